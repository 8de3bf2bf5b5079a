//! How much of the room is used: more where that makes copies faster.

use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::*;
use crate::trickle::room::CopyRoom;

const MIB: u64 = 1 << 20;
const PIECE: u64 = 16 * MIB;

/// How a tier takes pieces.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// So many bytes per second and connection, however many there are.
    PerConnection(u64),
    /// So many, for whoever comes first.
    OneByOne(u64),
    /// So many for all of them together.
    Shared(u64),
}

fn job() -> Namespace {
    Namespace::new("job").unwrap()
}

fn seconds(bytes: u64, rate: u64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64)
}

/// Moves pieces; gives the most that was under way at once, and the bytes per second.
async fn moved(room: &Arc<CopyRoom>, way: Way, pieces: usize) -> (u64, f64) {
    let (one, under_way) = (Semaphore::new(1), std::cell::Cell::new(0));
    let (most, began, name) = (std::cell::Cell::new(0), Instant::now(), job());
    let move_one = async || {
        let place = room.take(&name, PIECE).await;
        under_way.set(under_way.get() + PIECE);
        most.set(under_way.get().max(most.get()));
        match way {
            Way::PerConnection(rate) => tokio::time::sleep(seconds(PIECE, rate)).await,
            Way::OneByOne(rate) => {
                let _turn = one.acquire().await.unwrap();
                tokio::time::sleep(seconds(PIECE, rate)).await;
            }
            Way::Shared(rate) => tokio::time::sleep(seconds(under_way.get(), rate)).await,
        }
        under_way.set(under_way.get() - PIECE);
        place.moved();
    };
    let mut all = FuturesUnordered::new();
    all.extend((0..pieces).map(|_| move_one()));
    while all.next().await.is_some() {}
    let rate = (pieces as u64 * PIECE) as f64 / began.elapsed().as_secs_f64();
    (most.get(), rate)
}

#[tokio::test(start_paused = true)]
async fn connections_that_are_slow_each_are_as_many_as_there_is_room_for() {
    let room = CopyRoom::new(512 * MIB);
    let (most, rate) = moved(&room, Way::PerConnection(40 * MIB), 400).await;
    assert_eq!(most, 512 * MIB);
    assert!(rate >= 1000.0 * MIB as f64, "{rate}");
    assert_eq!(room.taken(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn memory_that_makes_nothing_faster_is_left_alone() {
    for way in [Way::OneByOne(500 * MIB), Way::Shared(6 * MIB)] {
        let room = CopyRoom::new(512 * MIB);
        let (most, _) = moved(&room, way, 400).await;
        // Now and then more is tried.
        assert!(most <= 192 * MIB, "{way:?}: {most}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_a_piece_fails_fewer_share_the_way() {
    let room = CopyRoom::new(512 * MIB);
    moved(&room, Way::PerConnection(40 * MIB), 400).await;
    drop(room.take(&job(), PIECE).await);
    let (most, _) = moved(&room, Way::Shared(6 * MIB), 40).await;
    assert_eq!(most, 128 * MIB);
    // And more again once that helps.
    let (most, _) = moved(&room, Way::PerConnection(40 * MIB), 800).await;
    assert_eq!(most, 512 * MIB);
}
