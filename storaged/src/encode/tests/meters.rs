//! What members measure of their links: only a slow one has blocks on their way all the time.

use std::collections::BTreeMap;

use storaged_core::SessionTally;
use storaged_plan::Shape;

use super::links::{GroupOf, RATE, encode, plain_chain, world};
use super::world::{locked, node};

/// Shares of the time in which each link had a block on its way.
fn saturated(tallies: &[SessionTally]) -> BTreeMap<(usize, usize), f64> {
    let mut links = BTreeMap::new();
    for (to, receiver) in tallies.iter().enumerate() {
        for link in receiver.links.iter().filter(|link| link.bytes > 0) {
            let from = (0..tallies.len()).find(|from| node(*from) == link.node);
            let share = link.waiting_ms as f64 / receiver.elapsed_ms as f64;
            links.insert((from.unwrap(), to), share);
        }
    }
    links
}

/// One node's link is a tenth as fast as the others.
#[tokio::test(start_paused = true)]
async fn the_link_that_blocks_are_on_all_the_time_is_the_slow_one() {
    let (k, stripes) = (8, 100);
    for (slow, shape) in [
        (0, plain_chain(k)),
        (3, plain_chain(k)),
        (7, plain_chain(k)),
        (3, Shape::gather_at_all_sources(k)),
    ] {
        let world = world(k + 2);
        locked(&world.wires.rates).insert(node(slow), RATE / 10);
        let nodes: Vec<usize> = (0..k + 2).collect();
        let works = encode(
            &world,
            1,
            &GroupOf {
                nodes: &nodes,
                m: 2,
            },
            stripes,
            &shape,
        );
        let tallies: Vec<SessionTally> = (world.run(works).await.into_iter())
            .map(Result::unwrap)
            .collect();
        let links = saturated(&tallies);
        eprintln!("{slow} {shape:?}: {links:.2?}");
        let full = |link: &(&(usize, usize), &f64)| *link.1 >= 0.6;
        assert!(links.iter().any(|link| full(&link)), "{slow}: {links:?}");
        for ((from, to), share) in &links {
            let is_slow = *from == slow || *to == slow;
            assert!(is_slow || *share < 1.0 / 3.0, "{slow}: {links:?}");
        }
    }
}
