//! What goes wrong: blocks that lost their digest, neighbours that break the protocol, stall or go, stopping.

use std::time::Duration;

use storaged_core::{SessionWork, Sink};
use storaged_plan::StripedPlan;
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{SessionId, SlotId};
use tokio::io::AsyncWriteExt;

use super::world::{CHUNK, Receiver, World, locked, node, noise};
use crate::encode::inbound::PARKED_FOR;

const STRIPES: usize = 12;

fn world_of(world: World) -> (World, Vec<SessionWork>) {
    let shards = (0..world.geometry.k())
        .map(|at| world.store(at, 1, &noise(at as u64, STRIPES * CHUNK as usize)))
        .collect::<Vec<_>>();
    let works = world.encode(1, &shards, 1);
    (world, works)
}

/// A frame as the protocol has it.
fn frame(stripe: u64, bytes: u32, flag: u8, width: u8) -> Vec<u8> {
    let mut frame = stripe.to_le_bytes().to_vec();
    frame.extend(bytes.to_le_bytes());
    frame.extend([flag, width, 0, 0]);
    if flag == 1 {
        frame.extend(vec![5; bytes as usize * usize::from(width)]);
    }
    frame
}

/// The last coding node of (1, 1) gets these bytes as the stream of its neighbour, which then ends its stream.
async fn told(bytes: Vec<u8>) -> Result<(), SessionFault> {
    let (world, mut works) = world_of(World::inline(1, 1));
    let mut work = works.remove(1);
    if let Some(Sink::Parity { prints, .. }) = &mut work.keep {
        // What the parity is does not count here.
        *prints = Default::default();
    }
    let record = StreamRecord {
        leader: node(0),
        session: work.session,
        edge: 0,
    };
    let (mut near, far) = tokio::io::duplex(1 << 20);
    world.executors[1].accept(record, node(0), Box::new(Receiver(far)));
    near.write_all(&bytes).await.unwrap();
    drop(near);
    let outcome = world.executors[1].run(work).await;
    world.assert_all_came_back();
    outcome.map(|_| ())
}

fn neighbour(index: usize, outcome: &Result<(), SessionFault>) -> String {
    match outcome {
        Err(SessionFault::Neighbour {
            node: blamed,
            reason,
        }) if *blamed == node(index) => reason.clone(),
        other => panic!("expected n{index} to be blamed, got {other:?}"),
    }
}

fn good_stream() -> Vec<u8> {
    (0..STRIPES as u64)
        .flat_map(|stripe| frame(stripe, CHUNK, 1, 1))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_neighbour_that_keeps_to_the_plan_is_believed() {
    told(good_stream()).await.unwrap();
    told(
        (0..STRIPES as u64)
            .flat_map(|stripe| frame(stripe, CHUNK, 0, 1))
            .collect(),
    )
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_neighbour_that_breaks_the_protocol_is_blamed() {
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good_stream();
        change(&mut bytes);
        bytes
    };
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (
            frame(1, CHUNK, 1, 1),
            "sent stripe 1 where the plan has stripe 0",
        ),
        (
            frame(0, CHUNK + 1, 1, 1),
            "sent sums of 4097 bytes for stripe 0 where the plan has 4096",
        ),
        (frame(0, u32::MAX, 0, 1), "sent sums of 4294967295 bytes"),
        (
            frame(0, CHUNK, 1, 2),
            "sent 2 sums for stripe 0 where the plan has 1",
        ),
        (frame(0, CHUNK, 2, 1), "sent flag 2 for stripe 0"),
        (with(&|bytes| bytes[15] = 1), "reserved bytes"),
        (with(&|bytes| bytes.truncate(bytes.len() - 1)), "early eof"),
        (with(&|bytes| bytes.truncate(7)), "early eof"),
        (Vec::new(), "early eof"),
        (with(&|bytes| bytes.push(0)), "sent more than the plan has"),
        (
            with(&|bytes| bytes.extend(frame(0, CHUNK, 1, 1))),
            "sent more than the plan has",
        ),
    ];
    for (bytes, expected) in cases {
        let reason = neighbour(0, &told(bytes).await);
        assert!(
            reason.contains(expected),
            "expected {expected:?}, got {reason:?}"
        );
    }
}

#[tokio::test]
async fn a_block_without_its_digest_is_told_and_ends_every_member() {
    let (world, works) = world_of(World::threaded(4, 2));
    locked(&world.rams[2].slots)
        .get_mut(&SlotId::new(1))
        .unwrap()[5 * CHUNK as usize] ^= 1;
    let outcomes = world.run(works).await;
    assert_eq!(outcomes[2], Err(SessionFault::Corrupt("chunk 5".into())));
    for at in [3, 4, 5] {
        neighbour(at - 1, &outcomes[at].clone().map(|_| ()));
    }
    world.assert_all_came_back();
}

#[tokio::test]
async fn arithmetic_that_breaks_ends_the_session_and_leaves_the_threads() {
    let (world, works) = world_of(World::threaded(2, 1));
    *locked(&world.rams[1].broken) = Some(4);
    let outcomes = world.run(works.clone()).await;
    assert_eq!(outcomes[1], Err(SessionFault::Aborted));
    world.assert_all_came_back();
    *locked(&world.rams[1].broken) = None;
    assert!(world.run(works).await.iter().all(Result::is_ok));
}

#[tokio::test(start_paused = true)]
async fn a_silent_neighbour_ends_by_the_limit() {
    let (world, works) = world_of(World::inline(4, 2));
    locked(&world.wires.silent).insert(node(1));
    let began = tokio::time::Instant::now();
    let outcomes = world.run(works).await;
    let stall = world.limits.stall;
    assert!(began.elapsed() >= stall && began.elapsed() < stall + Duration::from_secs(1));
    neighbour(1, &outcomes[2].clone().map(|_| ()));
    world.assert_all_came_back();
}

#[tokio::test(start_paused = true)]
async fn a_neighbour_that_never_opens_its_stream_ends_by_the_limit() {
    let (world, mut works) = world_of(World::inline(4, 2));
    // Only the last coding node runs.
    let outcomes = world.run(vec![works.remove(5)]).await;
    let reason = neighbour(4, &outcomes[0].clone().map(|_| ()));
    assert_eq!(reason, "opened no stream for 10000 ms");
}

#[tokio::test(start_paused = true)]
async fn a_neighbour_that_takes_nothing_ends_by_the_limit() {
    let (world, mut works) = world_of(World::inline(4, 2));
    // The stream of the first node is parked at the second, which never runs.
    let outcomes = world.run(vec![works.remove(0)]).await;
    let reason = neighbour(1, &outcomes[0].clone().map(|_| ()));
    assert_eq!(reason, "took nothing for 10000 ms");
    world.assert_all_came_back();
}

#[tokio::test(start_paused = true)]
async fn stopping_ends_at_once() {
    let (world, works) = world_of(World::inline(4, 2));
    locked(&world.wires.silent).insert(node(0));
    let began = tokio::time::Instant::now();
    let (executors, session) = (world.executors.clone(), works[0].session);
    let stop = async move {
        tokio::time::sleep(Duration::from_secs(1)).await;
        executors
            .iter()
            .for_each(|executor| executor.stop(&node(0), session));
    };
    let (outcomes, ()) = tokio::join!(world.run(works), stop);
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    assert!(
        outcomes
            .iter()
            .all(|outcome| *outcome == Err(SessionFault::Aborted)),
        "{outcomes:?}"
    );
    world.assert_all_came_back();
}

#[tokio::test(start_paused = true)]
async fn a_session_stopped_before_it_runs_does_not_begin() {
    let (world, works) = world_of(World::inline(1, 1));
    world.executors[0].stop(&node(0), works[0].session);
    let first = world.executors[0].run(works[0].clone()).await;
    assert_eq!(first, Err(SessionFault::Aborted));
    assert_eq!(world.sent(), 0);
    // The word counts once: a restarted leader may use the number again.
    assert!(world.run(works).await.iter().all(Result::is_ok));
}

#[tokio::test]
async fn when_a_session_has_ended_nothing_of_it_goes_on() {
    let (world, works) = world_of(World::threaded(2, 1));
    *locked(&world.rams[0].slow) = Duration::from_millis(30);
    let (executor, session) = (world.executors[0].clone(), works[0].session);
    let stop = async move {
        tokio::time::sleep(Duration::from_millis(10)).await;
        executor.stop(&node(0), session);
    };
    let (outcomes, ()) = tokio::join!(world.run(works), stop);
    assert_eq!(outcomes[0], Err(SessionFault::Aborted));
    world.assert_all_came_back();
}

#[tokio::test(start_paused = true)]
async fn a_stream_from_the_wrong_node_reaches_no_session() {
    let (world, works) = world_of(World::inline(2, 1));
    let record = StreamRecord {
        leader: node(0),
        session: SessionId::new(1),
        edge: 0,
    };
    let (_near, far) = tokio::io::duplex(64);
    world.executors[1].accept(record, node(2), Box::new(Receiver(far)));
    assert!(world.run(works).await.iter().all(Result::is_ok));
}

#[tokio::test(start_paused = true)]
async fn streams_without_a_session_are_parked_in_bounds() {
    let (world, _) = world_of(World::inline(2, 1));
    let open = |number: u64| {
        let record = StreamRecord {
            leader: node(0),
            session: SessionId::new(number),
            edge: 0,
        };
        let (near, far) = tokio::io::duplex(64);
        world.executors[1].accept(record, node(0), Box::new(Receiver(far)));
        near
    };
    let mut near: Vec<_> = (0..500).map(open).collect();
    assert_eq!(world.executors[1].streams_parked(), 128);
    // The streams that found no place are closed, those that did are open until their time is over.
    assert!(near[499].write_all(&[0; 65]).await.is_err());
    tokio::time::sleep(PARKED_FOR + Duration::from_millis(1)).await;
    assert_eq!(world.executors[1].streams_parked(), 0);
    assert!(near[0].write_all(&[0; 65]).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_fit_together_is_refused() {
    let (world, works) = world_of(World::inline(2, 1));
    type Spoil = fn(&mut SessionWork);
    let spoilt: [(&str, Spoil); 6] = [
        ("has no part in the plan", |work| work.member = 9),
        ("exactly if the plan says so", |work| work.source = None),
        ("are not in order within 0..12", |work| {
            work.stripes = std::iter::once(0..13).collect()
        }),
        ("are not in order within 0..12", |work| {
            work.stripes = vec![3..4, 2..3]
        }),
        ("does not lead from", |work| {
            work.members = vec![node(0)].into()
        }),
        ("rows of 2 coefficients", |work| {
            let mut plan = work.plan.classes()[0].clone();
            plan.hops[1].outputs[0].rows[0].pop();
            work.plan = StripedPlan::uniform(plan, 2).into();
        }),
    ];
    for (expected, spoil) in spoilt {
        let mut work = works[1].clone();
        spoil(&mut work);
        let reason = neighbour(0, &world.executors[1].run(work).await.map(|_| ()));
        assert!(
            reason.contains(expected),
            "expected {expected:?}, got {reason:?}"
        );
    }
}
