//! Tokens that follow one another, and what somebody else makes of it.

use storaged_codec::digest;

use super::*;
use crate::ids::Step;
use crate::run::RunId;

const FIRST: &[u8] = b"the first token of the job";
const SECOND: &[u8] = b"the second token of the job";
const THIRD: &[u8] = b"the third token of the job";
const SEAL: [u8; SEAL_BYTES] = [7; SEAL_BYTES];

fn job() -> Namespace {
    Namespace::new("blue~job").unwrap()
}

fn up_to(step: u64) -> HighMark {
    HighMark {
        run: RunId::with_identity(3, 0xa6),
        step: Step::new(step),
    }
}

fn key(token: &[u8]) -> ManifestKey {
    ManifestKey::of_token(&job(), token)
}

fn consent(token: &[u8]) -> ConsentKey {
    ConsentKey::of_token(&job(), token)
}

fn standing(succession: Option<Succession>, step: u64) -> TokenStanding {
    TokenStanding {
        namespace: job(),
        succession,
        durable: Some(up_to(step)),
    }
}

fn once() -> Rotation {
    Rotation::new(&standing(None, 20), FIRST, SECOND, SEAL).unwrap()
}

fn twice() -> Rotation {
    let before = Some(once().succession);
    Rotation::new(&standing(before, 40), SECOND, THIRD, SEAL).unwrap()
}

fn provenance(step: u64) -> Provenance {
    let HighMark { run, step } = up_to(step);
    Provenance {
        version: Provenance::VERSION,
        manifest: digest(b"m"),
        key: CheckpointKey {
            namespace: job(),
            run,
            step,
        },
        predecessor: None,
        increments: Vec::new(),
    }
}

#[test]
fn the_new_token_opens_what_the_old_ones_let_go() {
    let (one, two) = (once(), twice());
    assert_eq!(one.succession.open(SECOND).unwrap().keys, one.keys);
    let opened = two.succession.open(THIRD).unwrap();
    assert_eq!(opened.keys, two.keys);
    assert_eq!((two.succession.number, two.keys.retired.len()), (2, 2));
    assert_eq!(two.succession.owner, Owner::of_token(FIRST));
    assert!(
        opened.has_retired(Owner::of_token(SECOND)) && !opened.has_retired(Owner::of_token(THIRD))
    );
    for token in [FIRST, SECOND] {
        assert!(two.succession.retires(&consent(token)) && two.succession.retires_key(&key(token)));
        assert!(!two.succession.is_under(&key(token)));
        let refused = two.succession.open(token).unwrap_err();
        assert!(
            matches!(refused, SuccessionError::AnotherToken),
            "{refused}"
        );
    }
    assert!(!two.succession.retires(&consent(THIRD)) && two.succession.is_under(&key(THIRD)));
}

#[test]
fn its_bytes_are_pinned_and_hide_the_tokens() {
    let bytes = encode(&twice().succession);
    assert_eq!(
        decode::<Succession>("succession", &bytes).unwrap(),
        twice().succession
    );
    for token in [FIRST, SECOND, THIRD] {
        assert!(!bytes.windows(token.len()).any(|some| some == token));
    }
    let pinned = digest(&bytes).to_string();
    assert_eq!(
        pinned, "bbce375b3a0e0d351f913ddf6487a48278ab6f9c6167fc5f2052a822f5fa687b",
        "records in durable tiers have these bytes"
    );
}

#[test]
fn whoever_lacks_the_old_token_makes_none() {
    // Its own first token, in the owner's name.
    let mut forged = Rotation::new(&standing(None, 20), THIRD, SECOND, SEAL)
        .unwrap()
        .succession;
    forged.owner = Owner::of_token(FIRST);
    let refused = forged.open(SECOND).unwrap_err();
    assert!(matches!(refused, SuccessionError::Forged(_)), "{refused}");
    // Even with a MAC that is right for what it says.
    let mac = key(SECOND).mac(&forged.authenticated());
    forged.mac = ByteArray::from(*mac.as_bytes());
    let refused = forged.open(SECOND).unwrap_err();
    assert!(refused.to_string().contains("owner's"), "{refused}");
    assert!(!forged.retires(&consent(FIRST)));
}

#[test]
fn every_changed_bit_is_seen() {
    let sound = encode(&once().succession);
    for bit in 0..sound.len() * 8 {
        let mut changed = sound.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let Ok(read) = decode::<Succession>("succession", &changed) else {
            continue;
        };
        if read != once().succession {
            assert!(read.open(SECOND).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn a_retired_key_counts_for_what_was_durable_then_and_no_longer() {
    let keys = twice().keys;
    let read = |step, token: &[u8]| keys.read(&provenance(step).to_object(&key(token)));
    for (step, token) in [(20, FIRST), (40, SECOND), (1000, THIRD)] {
        assert_eq!(read(step, token).unwrap(), provenance(step));
    }
    for (step, token) in [(21, FIRST), (41, SECOND)] {
        let refused = read(step, token).unwrap_err();
        assert!(
            matches!(refused, ProvenanceError::Retired { .. }),
            "{refused}"
        );
    }
    let refused = read(1, b"none of its tokens").unwrap_err();
    assert!(matches!(refused, ProvenanceError::Forged), "{refused}");
    let nothing_durable = TokenStanding {
        durable: None,
        ..standing(None, 0)
    };
    let keys = Rotation::new(&nothing_durable, FIRST, SECOND, SEAL)
        .unwrap()
        .keys;
    let refused = keys
        .read(&provenance(1).to_object(&key(FIRST)))
        .unwrap_err();
    assert!(
        matches!(refused, ProvenanceError::Retired { .. }),
        "{refused}"
    );
}

#[test]
fn only_a_new_token_follows_and_only_the_one_that_opens_it_lets_go() {
    let new = |before: Option<Succession>, old: &[u8], new: &[u8]| {
        Rotation::new(&standing(before, 1), old, new, SEAL)
    };
    for (old, token) in [(FIRST, FIRST), (FIRST, &b""[..]), (FIRST, b"short")] {
        let refused = new(None, old, token).unwrap_err();
        assert!(matches!(refused, SuccessionError::NotNew), "{refused}");
    }
    let before = Some(once().succession);
    let back = new(before.clone(), SECOND, FIRST).unwrap_err();
    assert!(matches!(back, SuccessionError::NotNew), "{back}");
    let late = new(before, FIRST, THIRD).unwrap_err();
    assert!(matches!(late, SuccessionError::AnotherToken), "{late}");
}

#[test]
fn a_job_has_so_many_tokens_and_no_more() {
    let token = |number: u32| format!("token number {number} of the job").into_bytes();
    let mut last = None;
    for number in 0..SUCCESSIONS_MAX {
        let next = Rotation::new(&standing(last, 1), &token(number), &token(number + 1), SEAL);
        last = Some(next.unwrap().succession);
    }
    let (old, new) = (token(SUCCESSIONS_MAX), token(SUCCESSIONS_MAX + 1));
    let refused = Rotation::new(&standing(last, 1), &old, &new, SEAL).unwrap_err();
    assert!(matches!(refused, SuccessionError::TooMany), "{refused}");
}

/// A node that publishes has it, and may not have heard the token.
#[test]
fn who_has_the_manifest_key_alone_retires_no_token_and_names_no_other_key() {
    let mut forged = Rotation::new(&standing(None, 20), THIRD, SECOND, SEAL)
        .unwrap()
        .succession;
    forged.owner = Owner::of_token(FIRST);
    forged.key_notices = vec![as_mac(key(FIRST).mac(&forged.consented()))];
    assert!(forged.retires_key(&key(FIRST)) && !forged.retires(&consent(FIRST)));
    let mut relayed = once().succession;
    relayed.key_check = as_mac(key(THIRD).mac(&key_checked(&job())));
    assert!(
        !relayed.retires(&consent(FIRST)),
        "the consent is to one key"
    );
}
