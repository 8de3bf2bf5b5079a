//! What is known of what a step bears.

use std::sync::Arc;

use storaged_codec::digest;
use storaged_wire::WorldSize;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::UnowedCause;

use super::*;
use crate::api::Input;
use crate::node::Node;
use crate::testkit::{hear, hear_from_all, last_of, manifest, name};

/// Whether the last node of three is a home node of a step, and what it knows that it bears once the others, who may be,
/// have told it this.
fn known(step: u64, told: &[(&str, u32)]) -> (bool, Option<u32>) {
    known_by(last_of(&["a", "b", "c"], 2, 1), &["c"], step, told)
}

/// The same, of this node.
fn known_by(
    mut node: Node,
    coding: &[&str],
    step: u64,
    told: &[(&str, u32)],
) -> (bool, Option<u32>) {
    let manifest = manifest(step, &["a", "b"], coding, 4096, digest(b"shard"));
    let manifest = Arc::new(manifest.seal().expect("a sound manifest"));
    let committed = PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Policy,
    };
    hear_from_all(&mut node, 1, &committed);
    for (from, bears) in told {
        let (manifest, bears) = (manifest.name(), *bears);
        let message = PeerMessage::Protected { manifest, bears };
        hear(&mut node, 2, from, message);
    }
    let cx = node.context();
    let key = cx.by_name[&manifest.name()].clone();
    let known = cx.bears_if_known(&cx.checkpoints[&key]);
    let is_home = cx.homes_of(&key).contains(cx.me());
    (is_home, known.map(|bears| bears.losses))
}

#[test]
fn what_a_step_bears_is_not_known_before_its_blocks_are_and_is_not_nothing_then() {
    let mut seen = BTreeSet::new();
    for step in 1..20 {
        let (is_home, losses) = known(step, &[]);
        assert_eq!(losses, Some(0), "it has only committed");
        let heard = known(step, &[("a", 1), ("b", 1)]).1;
        let lost = known(step, &[("a", 0), ("b", 0)]).1;
        // A home node counts for itself, whatever the other one says.
        let expected = Some(if is_home { 0 } else { 1 });
        assert_eq!((heard, lost), (expected, Some(0)), "home: {is_home}");
        seen.insert(is_home);
    }
    assert_eq!(seen.len(), 2, "one of three is no home node");
}

/// Two other home nodes call it protected, and the others hold its blocks, of which nobody has told here yet.
#[test]
fn what_a_protected_step_bears_is_not_known_before_its_blocks_are() {
    let mut seen = BTreeSet::new();
    for step in 1..20 {
        let heard = |told| {
            let node = last_of(&["a", "b", "d", "c"], 2, 2);
            known_by(node, &["d", "c"], step, told)
        };
        let (is_home, losses) = heard(&[("a", 1), ("b", 1), ("d", 1)]);
        let expected = if is_home { None } else { Some(1) };
        assert_eq!(losses, expected, "home: {is_home}");
        seen.insert(is_home);
    }
    assert_eq!(seen.len(), 2, "one of four is no home node");
}

/// A home node without blocks of a step, which hears at this time of the last block that was missing; ticks come each second until the
/// first of these times, and so long after the second. Whether it calls the step protected at the second, and after each later look.
fn protected_after_a_stop(stopped: u64, continued: u64, looks: [u64; 5]) -> Vec<bool> {
    let is_home = |step: &u64| {
        let node = last_of(&["a", "b", "c", "d"], 2, 1);
        let key = CheckpointKey::of(&manifest(*step, &["a", "b"], &["c"], 5, digest(b"any")));
        node.context().homes_of(&key).contains(node.context().me())
    };
    let step = (1..100).find(is_home).expect("it is one of some step");
    let mut node = last_of(&["a", "b", "c", "d"], 2, 1);
    let manifest = manifest(step, &["a", "b"], &["c"], 5, digest(b"any"));
    let key = CheckpointKey::of(&manifest);
    let manifest = manifest.seal().expect("a sound manifest");
    let name = manifest.name();
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear_from_all(&mut node, 1, &committed);
    let held = |shards: Vec<Rank>, parity: Vec<(Lane, u32)>| PeerMessage::Held {
        manifest: name,
        version: 1,
        shards,
        parity,
        enclosures: EnclosuresHeld::All,
    };
    hear(&mut node, 2, "a", held(vec![Rank::new(0)], Vec::new()));
    hear(&mut node, 2, "b", held(vec![Rank::new(1)], Vec::new()));
    for second in 0..=stopped / 1000 {
        node.handle(Now(1000 * second), Input::Tick);
    }
    let lane = Lane { group: 0, index: 0 };
    hear(&mut node, continued, "c", held(Vec::new(), vec![(lane, 0)]));
    let is_protected = |node: &Node| {
        let checkpoint = &node.context().checkpoints[&key];
        checkpoint.state >= CheckpointState::Protected
    };
    let mut seen = vec![is_protected(&node)];
    for later in looks {
        node.handle(Now(continued + later), Input::Tick);
        seen.push(is_protected(&node));
    }
    seen
}

/// What was said before is in its queue, and the others may have given the step up long ago.
#[test]
fn a_home_node_that_was_stopped_protects_nothing_before_it_knows_whose_links_have_ended() {
    let each_second = [0, 1_000, 2_000, 3_000, 4_000];
    let seen = protected_after_a_stop(2_000, 2_500, each_second);
    assert!(seen[0], "it was not stopped");
    let seen = protected_after_a_stop(2_000, 20_000, each_second);
    assert_eq!(seen, [false, false, false, false, true, true]);
    // Stopped once more, for two seconds, it has heard nobody in those.
    let seen = protected_after_a_stop(2_000, 20_000, [0, 1_000, 3_100, 4_050, 5_000]);
    assert_eq!(seen, [false, false, false, false, false, true]);
}

/// Of so many members that those which are no neighbours are silent for longer before that is noticed.
#[test]
fn a_home_node_of_a_large_cluster_listens_for_longer() {
    let members: Vec<String> = (0..257).map(|at| format!("n{at:03}")).collect();
    let members: Vec<&str> = members.iter().map(String::as_str).collect();
    let listens = |members: &[&str]| {
        let mut node = last_of(members, 2, 1);
        let looks = [
            1_000, 20_000, 21_000, 22_000, 23_000, 24_000, 25_000, 26_000, 27_000,
        ];
        let listening = looks.into_iter().filter(|at| {
            node.handle(Now(*at), Input::Tick);
            node.context().has_yet_to_listen()
        });
        listening.count()
    };
    assert_eq!((listens(&members[..256]), listens(&members)), (3, 7));
}

/// `c` is a data node of the step's group on which no rank is, and a home node of it. It lets the step go, and takes it up again.
#[test]
fn a_home_node_without_blocks_that_takes_a_step_up_again_has_not_retired_it() {
    let mut node = last_of(&["a", "b", "c", "d", "e"], 3, 2);
    let of = |step| {
        let mut manifest = manifest(step, &["a", "b", "c"], &["d", "e"], 5, digest(b"any"));
        manifest.shards.pop();
        manifest.world_size = WorldSize::new(2).expect("ranks");
        manifest
    };
    let homes_of = |node: &Node, step| node.context().homes_of(&CheckpointKey::of(&of(step)));
    let is_home = |step: &u64| {
        let homes = homes_of(&node, *step);
        ["c", "e"].iter().all(|it| homes.contains(&name(it)))
    };
    let step = (1..100).find(is_home).expect("both are of some step");
    let manifest = of(step).seal().expect("a sound manifest");
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear_from_all(&mut node, 1, &committed);
    let key = CheckpointKey::of(manifest.manifest());
    let has_retired = |node: &Node| {
        let owing = &node.context().checkpoints[&key].owing;
        owing.retired_at.contains(&name("c"))
    };
    let (manifest, cause) = (manifest.name(), UnowedCause::Retired);
    hear(&mut node, 2, "c", PeerMessage::Unowed { manifest, cause });
    assert!(has_retired(&node));
    let version = 1;
    hear(
        &mut node,
        3,
        "c",
        PeerMessage::HeldNoted { manifest, version },
    );
    assert!(!has_retired(&node));
}
