//! `Node::handle` with whatever may come: requests, peers' messages and results of effects, sound ones and ones with
//! numbers up to their limits, in sequences that reach running sessions. No panic, no recursion without end, memory
//! within the budget, and outputs in proportion to what came in.

mod cluster;
#[path = "../../../../../codec/wire/tests/fuzz/places.rs"]
mod places;
#[allow(dead_code, reason = "the records' own fuzz targets use all of it")]
#[path = "../../../../../codec/wire/tests/fuzz/restart.rs"]
mod restart;
#[path = "../../../../../codec/wire/tests/fuzz/running.rs"]
mod running;
#[path = "../../../../../codec/wire/tests/fuzz/samples.rs"]
#[allow(dead_code, reason = "of the records only the messages are wanted")]
mod samples;
#[allow(dead_code, reason = "of the records only the messages are wanted")]
#[path = "../../../../../codec/wire/tests/fuzz/succession.rs"]
mod succession;
mod twist;

use bolero::check;
use cluster::Cluster;
use twist::Twist;

/// Sequences of each target when it runs as a test.
const ITERATIONS: usize = 400;

/// What happens next: which kind, to or of whom, and how it is twisted.
type Move = (u8, u8, Twist);

fn play(moves: &[Move]) -> Cluster {
    let mut cluster = Cluster::new();
    for (kind, who, twist) in moves.iter().take(200) {
        cluster.play(*kind, *who, twist);
    }
    cluster
}

#[test]
fn whatever_comes_is_handled() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<Vec<Move>>()
        .for_each(|moves| drop(play(moves)));
}

/// The honest moves alone reach what the twisted ones are to disturb.
#[test]
fn honest_moves_save_protect_and_restore() {
    let mut cluster = Cluster::new();
    for step in 0..3 {
        cluster.save(step);
        cluster.settle(200);
    }
    assert!(cluster.scene.protected > 0, "a step became protected");
    assert!(!cluster.sessions.counts.begun.is_empty(), "sessions ran");
    assert!(!cluster.tier.published.is_empty(), "a step became durable");
    cluster.restart(2);
    cluster.settle(400);
    cluster.restore();
    cluster.settle(400);
    assert!(
        cluster.scene.opened > 0,
        "a shard was opened: {:?}",
        cluster.scene.refused
    );
}

/// And from there on, everything.
#[test]
fn whatever_comes_to_a_cluster_at_work_is_handled() {
    check!()
        .with_iterations(ITERATIONS)
        .with_type::<(u8, Vec<Move>)>()
        .for_each(|(begun, moves)| {
            let mut cluster = Cluster::new();
            for step in 0..u64::from(begun % 4) {
                cluster.save(step);
                cluster.settle(usize::from(*begun) / 4);
            }
            for (kind, who, twist) in moves.iter().take(150) {
                cluster.play(*kind, *who, twist);
            }
            cluster.settle(100);
        });
}

/// Machines give back what is not for them: what all give back would be lost without a word.
#[test]
fn every_message_is_heard_by_some_machine() {
    let messages = samples::checkpoint_messages().into_iter();
    for message in messages.chain(samples::session_messages()) {
        let mut cluster = Cluster::new();
        cluster.hear(0, 1, message);
    }
}
