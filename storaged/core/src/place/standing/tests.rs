//! What is known of what a step bears.

use std::sync::Arc;

use storaged_codec::digest;
use storaged_wire::local::DurableWish;

use super::*;
use crate::node::Node;
use crate::testkit::{hear, hear_from_all, last_of, manifest};

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
