//! What one peer may say, and for how long it is believed.

use storaged_codec::digest;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{Fence, NamedRun};
use storaged_wire::{Generation, Owner, RunId};

use super::*;
use crate::api::{Input, Output};
use crate::node::Node;
use crate::testkit::{hear, hear_from_all, job, last_of, manifest, name, owner};

fn node() -> Node {
    last_of(&["a", "b", "c", "d", "e"], 2, 2)
}

fn fences(job: Namespace, number: u64) -> PeerMessage {
    PeerMessage::Fences(vec![Fence {
        namespace: job,
        owner: owner(),
        run: RunId::new(number),
        promised: RunId::new(number),
    }])
}

fn notes(outputs: Vec<Output>) -> Vec<Note> {
    let notes = outputs.into_iter().filter_map(|output| match output {
        Output::Note(note) => Some(note),
        _ => None,
    });
    notes.collect()
}

#[test]
fn a_peer_that_says_again_and_again_what_cannot_be_is_named_and_not_believed_until_it_is_restarted()
{
    let mut node = node();
    let statement = FalseStatement::RunOutOfRange { number: u64::MAX };
    let named = Note::FalseStatement {
        node: name("a"),
        statement,
    };
    let mut last = Vec::new();
    for at in 0..u64::from(limits::PROOFS_MAX) {
        assert!(node.context().is_believed(&name("a")));
        last = notes(hear(&mut node, at, "a", fences(job(), u64::MAX)));
        assert!(last.contains(&named), "{last:?}");
    }
    assert!(last.contains(&Note::Disbelieved { node: name("a") }));
    assert!(!node.context().is_believed(&name("a")));
    assert!(node.context().is_believed(&name("b")));

    // Nothing counts that it says now, and what another one says does not count twice for it.
    hear(&mut node, 50, "a", fences(job(), 7));
    hear(&mut node, 50, "b", fences(job(), 7));
    assert_eq!(node.context().fence_of(&job()), RunId::ZERO);

    // A link that ends and comes back changes nothing; another daemon may have been mended.
    let up = |generation| Input::PeerUp {
        node: name("a"),
        generation: Generation::new(generation),
    };
    let down = Input::PeerDown { node: name("a") };
    node.handle(Now(55), down.clone());
    node.handle(Now(56), up(1));
    assert!(!node.context().is_believed(&name("a")));
    node.handle(Now(57), down);
    node.handle(Now(60), up(2));
    assert!(node.context().is_believed(&name("a")));
    hear(&mut node, 70, "a", fences(job(), 7));
    assert_eq!(node.context().fence_of(&job()), RunId::new(7));
}

#[test]
fn a_run_that_one_peer_alone_tells_of_fences_nobody_off() {
    let mut node = node();
    hear(&mut node, 1, "a", fences(job(), 9));
    hear(&mut node, 2, "a", fences(job(), 9));
    assert_eq!(node.context().fence_of(&job()), RunId::ZERO);
    hear(&mut node, 3, "b", fences(job(), 7));
    assert_eq!(
        node.context().fence_of(&job()),
        RunId::new(7),
        "what two know"
    );
    hear(&mut node, 4, "b", fences(job(), 9));
    assert_eq!(node.context().fence_of(&job()), RunId::new(9));
}

/// Others are down for a moment.
#[test]
fn the_only_peer_that_is_up_does_not_use_up_the_numbers_of_a_job() {
    let after = |number| {
        let mut node = node();
        for gone in ["b", "c", "d"] {
            node.handle(Now(1), Input::PeerDown { node: name(gone) });
        }
        hear(&mut node, 2, "a", fences(job(), number));
        node.context().highest_number(&job())
    };
    assert_eq!(after(7), 7);
    assert_eq!(after(limits::RUN_NUMBER_MAX), 0);
}

#[test]
fn a_wish_for_the_last_run_leaves_numbers_for_the_runs_that_follow() {
    let after = |number| {
        let mut node = node();
        let run = NamedRun {
            namespace: job(),
            owner: owner(),
            run: RunId::with_identity(number, 3),
        };
        let wish = PeerMessage::PromiseRun { query: 1, run };
        let said = hear(&mut node, 2, "a", wish);
        (node.context().highest_number(&job()), said.len())
    };
    assert_eq!(after(limits::RUN_WISH_MAX).0, limits::RUN_WISH_MAX);
    assert_eq!(after(limits::RUN_WISH_MAX + 1), (0, 0));
    assert_eq!(after(limits::RUN_NUMBER_MAX), (0, 0));
}

/// Whoever wanted to open the job first was promised it here, and did not.
#[test]
fn what_was_only_promised_gives_way_to_a_run_that_two_say_they_have_opened() {
    let mut node = node();
    let run_of = |owner, number| NamedRun {
        namespace: job(),
        owner,
        run: RunId::with_identity(number, number),
    };
    let another = Owner::of_token(b"another token, of sixteen bytes");
    let (query, run) = (1, run_of(another, 1));
    hear(&mut node, 2, "a", PeerMessage::PromiseRun { query, run });
    assert_eq!(node.context().owner_of(&job()), Some(another));
    for (query, from) in [(2, "b"), (3, "c")] {
        let run = run_of(owner(), 2);
        hear(&mut node, 3, from, PeerMessage::RaiseFence { query, run });
    }
    assert_eq!(node.context().owner_of(&job()), Some(owner()));
    assert_eq!(node.context().fence_of(&job()).number(), 2);
}

#[test]
fn jobs_that_one_peer_makes_up_take_no_more_room_than_a_peer_may() {
    let mut node = node();
    let made_up = |i: usize| Namespace::new(format!("made-up-{i}")).expect("a name");
    for i in 0..limits::JOBS_PER_PEER_MAX + 500 {
        hear(&mut node, 1, "a", fences(made_up(i), 1));
    }
    let kept = node.context().namespaces.len();
    assert!(kept <= limits::JOBS_PER_PEER_MAX, "{kept}");
    // Another peer's job is still heard of.
    hear(&mut node, 2, "b", fences(job(), 1));
    assert!(node.context().namespaces.contains_key(&job()));
}

#[test]
fn a_peer_ends_no_more_steps_than_so_many_a_minute() {
    let mut testimony = Testimony::default();
    let ended = |testimony: &mut Testimony, at| {
        (0..100)
            .filter(|_| testimony.may_end(&name("a"), at))
            .count()
    };
    assert_eq!(
        ended(&mut testimony, Now(5)),
        limits::ENDS_HEARD_MAX as usize
    );
    assert_eq!(ended(&mut testimony, Now(1_000)), 0);
    let later = Now(5 + limits::ENDS_HEARD_EVERY_MS);
    assert_eq!(
        ended(&mut testimony, later),
        limits::ENDS_HEARD_MAX as usize
    );
}

/// Nothing of the run was ever saved here, nor need it be: the numbers that are left must not go with it.
#[test]
fn a_forged_commit_leaves_numbers_for_the_runs_that_follow() {
    let told_of = |number| {
        let mut node = node();
        let mut forged = manifest(5, &["a", "b"], &["c", "d"], 4096, digest(b"shard"));
        forged.run = RunId::new(number);
        let manifest = forged.seal().expect("a sound manifest").bytes().to_vec();
        let committed = PeerMessage::Committed {
            manifest: manifest.into(),
            durable: DurableWish::Policy,
        };
        hear_from_all(&mut node, 1, &committed);
        assert_eq!(node.context().checkpoints.len(), 1, "run {number}");
        node.context().highest_number(&job())
    };
    assert_eq!(told_of(7), 7, "what was saved stays below");
    assert_eq!(told_of(limits::RUN_NUMBER_MAX), 0);
}
