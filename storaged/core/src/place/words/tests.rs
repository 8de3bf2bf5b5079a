//! Who is believed of how far a checkpoint is.

use std::sync::Arc;

use storaged_codec::digest;

use super::*;
use crate::api::{Input, Note, Now, Output};
use crate::node::Node;
use crate::testkit::{
    alone_among, committed, hear, job, last_of, last_with_tier, manifest, name, owner,
};
use storaged_wire::peer::{Fence, Lane, UnowedCause};
use storaged_wire::{EnclosuresHeld, Generation, ManifestBytes, Rank};

const MEMBERS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// A step that node e, which is none of its home nodes, may hear of; its home nodes, and one of the others.
fn step(node: &Node) -> (Arc<ManifestBytes>, Vec<String>, String) {
    for step in 1..100 {
        let sealed = manifest(step, &["a", "b"], &["c", "e"], 4096, digest(b"shard"));
        let sealed = Arc::new(sealed.seal().expect("a sound manifest"));
        let key = CheckpointKey::of(sealed.manifest());
        let homes = node.context().homes_of(&key);
        let homes: Vec<String> = homes.iter().map(|home| home.as_str().into()).collect();
        if !homes.contains(&"e".to_owned()) {
            let mut others = MEMBERS
                .iter()
                .filter(|it| !homes.contains(&(**it).to_owned()));
            let stranger = others.find(|it| **it != "e").expect("three of five");
            return (sealed, homes, (*stranger).into());
        }
    }
    panic!("e is a home of every step");
}

fn protected(sealed: &ManifestBytes, bears: u32) -> PeerMessage {
    let manifest = sealed.name();
    PeerMessage::Protected { manifest, bears }
}

fn state(node: &Node, sealed: &ManifestBytes) -> Option<CheckpointState> {
    let key = CheckpointKey::of(sealed.manifest());
    Some(node.context().checkpoints.get(&key)?.state)
}

#[test]
fn a_commit_is_believed_from_a_home_node_alone() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, stranger) = step(&node);
    hear(&mut node, 1, &stranger, committed(&sealed));
    assert_eq!(state(&node, &sealed), None);
    hear(&mut node, 2, &homes[0], committed(&sealed));
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
}

#[test]
fn one_home_node_alone_makes_nothing_protected() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, stranger) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    hear(&mut node, 2, &homes[0], protected(&sealed, 2));
    hear(&mut node, 3, &stranger, protected(&sealed, 2));
    hear(&mut node, 4, &homes[0], protected(&sealed, 2));
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
    hear(&mut node, 5, &homes[1], protected(&sealed, 2));
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Protected));
}

#[test]
fn nothing_is_durable_where_there_is_no_tier() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    for home in &homes {
        let manifest = sealed.name();
        let outputs = hear(&mut node, 2, home, PeerMessage::Durable { manifest });
        let named = outputs.iter().any(|output| {
            let statement = FalseStatement::NoDurableTier;
            matches!(output, Output::Note(Note::FalseStatement { statement: said, .. }) if *said == statement)
        });
        assert!(named, "{outputs:?}");
    }
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
}

#[test]
fn more_losses_than_there_is_parity_for_are_nobodys_to_promise() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    for home in &homes {
        hear(&mut node, 2, home, protected(&sealed, 3));
    }
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
}

#[test]
fn what_too_few_call_durable_is_looked_up_in_the_tier() {
    let mut node = last_with_tier(&MEMBERS, 2, 2, DurablePolicy::Every(1));
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    let manifest = sealed.name();
    hear(&mut node, 2, &homes[0], PeerMessage::Durable { manifest });
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
    let outputs = node.handle(Now(2 + limits::TIER_DOUBT_MS), crate::api::Input::Tick);
    let asked = outputs.iter().any(|output| {
        matches!(output, Output::ListDurable { step: Some(step), .. } if *step == sealed.manifest().step)
    });
    assert!(asked, "{outputs:?}");
    hear(
        &mut node,
        20_000,
        &homes[1],
        PeerMessage::Durable { manifest },
    );
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Durable));
}

/// The node that it sees first may err. Once it has waited for the others, or was told of the run, the only one that is up is heard.
#[test]
fn a_node_that_has_just_started_believes_no_single_word() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    let others = MEMBERS
        .iter()
        .filter(|it| **it != "e" && **it != homes[0].as_str());
    for other in others {
        let node_down = crate::api::Input::PeerDown { node: name(other) };
        node.handle(Now(1), node_down);
    }
    let mut fresh = [(); 2].map(|()| alone_among(&MEMBERS, 2, 2));
    for fresh in &mut fresh {
        let first = crate::api::Input::PeerUp {
            node: name(&homes[0]),
            generation: Generation::new(1),
        };
        fresh.handle(Now(1), first);
    }
    let [waits, is_told] = &mut fresh;
    for (node, expected) in [
        (&mut node, CheckpointState::Protected),
        (&mut *waits, CheckpointState::Committed),
        (&mut *is_told, CheckpointState::Committed),
    ] {
        hear(node, 2, &homes[0], committed(&sealed));
        hear(node, 3, &homes[0], protected(&sealed, 2));
        assert_eq!(state(node, &sealed), Some(expected));
    }
    let run = sealed.manifest().run;
    let fence = Fence {
        namespace: job(),
        owner: owner(),
        run,
        promised: run,
    };
    // Whoever errs of the step may tell of its run as well.
    hear(is_told, 4, &homes[0], PeerMessage::Fences(vec![fence]));
    for node in [waits, is_told] {
        assert_eq!(state(node, &sealed), Some(CheckpointState::Committed));
        for second in 1..=limits::JOIN_MAX_MS / 1_000 + 2 {
            node.handle(Now(1_000 * second), crate::api::Input::Tick);
        }
        assert_eq!(state(node, &sealed), Some(CheckpointState::Protected));
    }
}

/// The others would say it again, if they knew it: else nobody does, and it would be led for ever.
#[test]
fn a_commit_of_which_nothing_comes_is_asked_for_again_once_its_teller_is_gone() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    let gone = name(&homes[0]);
    node.handle(Now(2), crate::api::Input::PeerDown { node: gone });
    node.handle(Now(limits::UNCONFIRMED_MS), crate::api::Input::Tick);
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
    let later = limits::UNCONFIRMED_MS + 2_000;
    let outputs = node.handle(Now(later), crate::api::Input::Tick);
    assert_eq!(state(&node, &sealed), None);
    let is_asked = outputs.iter().any(|output| {
        let cause = UnowedCause::Retired;
        let unowed = PeerMessage::Unowed {
            manifest: sealed.name(),
            cause,
        };
        matches!(output, Output::Send { to, message } if to.as_str() == homes[1] && *message == unowed)
    });
    assert!(is_asked, "{outputs:?}");
    hear(&mut node, later + 1, &homes[1], committed(&sealed));
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
}

/// A home node may have passed a lie on, and have forgotten it since.
#[test]
fn a_commit_that_all_home_nodes_have_let_go_is_forgotten() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    let asked_at = |node: &mut Node, at: u64| {
        let outputs = node.handle(Now(at), crate::api::Input::Tick);
        let asked = outputs.into_iter().filter_map(|output| match output {
            Output::Send {
                to,
                message: PeerMessage::Owed { manifest, done },
            } if manifest == sealed.name() && done.is_empty() => Some(to),
            _ => None,
        });
        asked.collect::<std::collections::BTreeSet<_>>()
    };
    node.handle(Now(limits::UNCONFIRMED_MS), crate::api::Input::Tick);
    let later = limits::UNCONFIRMED_MS + 2_000;
    let asked = asked_at(&mut node, later);
    assert!(homes.iter().all(|home| asked.contains(&name(home))));
    for home in homes.iter().rev() {
        assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
        let cause = UnowedCause::Retired;
        let manifest = sealed.name();
        let unowed = PeerMessage::Unowed { manifest, cause };
        hear(&mut node, later + 1, home, unowed);
    }
    assert_eq!(state(&node, &sealed), None);
    assert!(asked_at(&mut node, later + 2_000).is_empty());
}

/// Who told of it only the daemon before knew.
#[test]
fn a_commit_that_a_daemon_has_kept_is_forgotten_with_its_home_nodes_too() {
    let mut before = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&before);
    let said = hear(&mut before, 1, &homes[0], committed(&sealed));
    let kept = said.into_iter().filter_map(|output| match output {
        Output::Keep(record) => Some(record),
        _ => None,
    });
    let records = kept.collect();
    let mut node = alone_among(&MEMBERS, 2, 2);
    node.handle(Now(0), crate::api::Input::Recovered { records });
    for peer in &MEMBERS[..4] {
        let (node_up, generation) = (name(peer), Generation::new(1));
        let node_up = crate::api::Input::PeerUp {
            node: node_up,
            generation,
        };
        node.handle(Now(1), node_up);
    }
    for at in [limits::UNCONFIRMED_MS, limits::UNCONFIRMED_MS + 2_000] {
        node.handle(Now(at), crate::api::Input::Tick);
    }
    assert_eq!(state(&node, &sealed), Some(CheckpointState::Committed));
    for home in &homes {
        let unowed = PeerMessage::Unowed {
            manifest: sealed.name(),
            cause: UnowedCause::Retired,
        };
        hear(&mut node, limits::UNCONFIRMED_MS + 2_001, home, unowed);
    }
    assert_eq!(state(&node, &sealed), None);
}

/// A home node whose link to one holder is cut would give its part away for a committed step that can be given up.
#[test]
fn a_home_node_that_is_cut_off_from_one_holder_hears_the_other_home_node() {
    let held = |sealed: &ManifestBytes, rank, parity| PeerMessage::Held {
        manifest: sealed.name(),
        version: 1,
        shards: Vec::from_iter(rank),
        parity,
        enclosures: EnclosuresHeld::All,
    };
    for heard in [&["b", "c"][..], &["c"][..]] {
        let mut node = last_of(&MEMBERS, 2, 1);
        // `d` and this one decide of it; the blocks are on the others.
        let is_theirs = |sealed: &ManifestBytes| {
            let homes = node
                .context()
                .homes_of(&CheckpointKey::of(sealed.manifest()));
            ["d", "e"].iter().all(|it| homes.contains(&name(it)))
        };
        let mut all = (1..).map(|step| {
            let sealed = manifest(step, &["a", "b"], &["c"], 4096, digest(b"shard"));
            sealed.seal().expect("a sound manifest")
        });
        let sealed = all.find(is_theirs).expect("a step");
        node.handle(Now(1), crate::api::Input::PeerDown { node: name("a") });
        hear(&mut node, 2, "d", committed(&sealed));
        if heard.contains(&"b") {
            hear(&mut node, 3, "b", held(&sealed, Some(Rank::new(1)), vec![]));
        }
        let lane = Lane { group: 0, index: 0 };
        hear(&mut node, 3, "c", held(&sealed, None, vec![(lane, 0)]));
        hear(&mut node, 4, "d", protected(&sealed, 1));
        let expected = match heard.len() {
            2 => CheckpointState::Protected,
            _ => CheckpointState::Committed,
        };
        assert_eq!(state(&node, &sealed), Some(expected), "{heard:?}");
    }
}

#[test]
fn home_nodes_that_differ_are_checked_by_asking_all_what_they_hold() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    hear(&mut node, 1, &homes[0], committed(&sealed));
    hear(&mut node, 2, &homes[0], protected(&sealed, 2));
    let mut asked = Vec::new();
    for at in [1_000, 2_000, 3_000, 4_000, 5_000] {
        let outputs = node.handle(Now(at), crate::api::Input::Tick);
        asked.extend(outputs.into_iter().filter_map(|output| match output {
            Output::Send {
                to,
                message: PeerMessage::HoldingsQuery { .. },
            } => Some(to),
            _ => None,
        }));
    }
    for holder in ["a", "b", "c"] {
        let asked = asked.iter().any(|to| to.as_str() == holder);
        assert!(asked, "{holder} was not asked");
    }
}

/// It has asked, and nobody has answered: what it has not heard of may all be there.
#[test]
fn who_counts_because_home_nodes_differ_lets_go_nothing_before_they_had_the_time_to_answer() {
    let mut node = last_of(&MEMBERS, 2, 2);
    let (sealed, homes, _) = step(&node);
    let key = CheckpointKey::of(sealed.manifest());
    let began = limits::JOIN_GRACE_MS + 10_000;
    hear(&mut node, began, &homes[0], committed(&sealed));
    hear(&mut node, began, &homes[0], protected(&sealed, 2));
    let is_called_safe = |node: &Node| {
        let cx = node.context();
        cx.is_called_safe(&cx.checkpoints[&key])
    };
    let counts = |node: &Node| node.context().checkpoints[&key].standing.counts();
    let mut ticks = (1..20).map(|half_seconds| began + 500 * half_seconds);
    let asked_at = ticks.find(|at| {
        node.handle(Now(*at), crate::api::Input::Tick);
        counts(&node)
    });
    let asked_at = asked_at.expect("it counts for itself");
    assert!(is_called_safe(&node), "it has just asked");
    node.context_mut().now = Now(asked_at + limits::DOUBT_MS);
    assert!(!is_called_safe(&node), "all had the time to answer");
}

/// What a node says to a home node of what it holds of a step, with a tick at that time.
fn said_to(node: &mut Node, now: u64, home: &str) -> Option<u32> {
    let outputs = node.handle(Now(now), Input::Tick);
    outputs.into_iter().find_map(|output| match output {
        Output::Send {
            to,
            message: PeerMessage::Held { version, .. },
        } if to.as_str() == home => Some(version),
        _ => None,
    })
}

/// It lets a step go and hears of it again from another home node. It counts nothing of what it had been told before.
#[test]
fn a_home_node_that_takes_a_step_up_again_hears_what_is_held() {
    for again in [committed, |sealed: &ManifestBytes| protected(sealed, 1)] {
        let mut node = last_of(&MEMBERS, 2, 2);
        let (sealed, homes, _) = step(&node);
        let (home, manifest) = (&homes[0], sealed.name());
        hear(&mut node, 1, home, committed(&sealed));
        let version = said_to(&mut node, 2_000, home).expect("it tells what it holds");
        hear(
            &mut node,
            2_001,
            home,
            PeerMessage::HeldNoted { manifest, version },
        );
        assert_eq!(said_to(&mut node, 4_000, home), None, "it knows");
        let cause = UnowedCause::Retired;
        hear(
            &mut node,
            4_001,
            home,
            PeerMessage::Unowed { manifest, cause },
        );
        assert_eq!(said_to(&mut node, 6_000, home), None, "it does not count");
        hear(&mut node, 6_001, home, again(&sealed));
        assert!(said_to(&mut node, 8_000, home).is_some());
    }
}
