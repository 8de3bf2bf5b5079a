//! What is logged of copies to the durable tier: what the cost model expected, and what came.

use storaged_codec::delta::Estimate;
use storaged_wire::{Manifest, Rank};

use crate::trickle::Copied;

pub(super) fn say_copied(of: &Manifest, rank: Rank, copied: &Copied) {
    let (namespace, run, step) = (&of.namespace, of.run, of.step.get());
    let Some(increment) = &copied.increment else {
        return tracing::debug!(%namespace, %run, step, rank = rank.get(), bytes = copied.bytes, "copied to the durable tier");
    };
    let mut expected = Estimate::default();
    let mut got = Estimate::default();
    let mut kinds = Vec::new();
    for (kind, tally) in &increment.tallies {
        expected += tally.expected;
        got += tally.got;
        kinds.push(format!("{} {}", tally.chunks, kind.name()));
    }
    tracing::info!(%namespace, %run, step, rank = rank.get(), base = increment.base.get(), depth = increment.depth, bytes = copied.bytes,
        stored = increment.bytes, chunks = kinds.join(", "), without_base = increment.without_base,
        expected = %format!("{:.0} bytes in {:.3} s", expected.bytes, expected.seconds),
        got = %format!("{:.0} bytes in {:.3} s", got.bytes, got.seconds),
        "copied to the durable tier as an increment");
}
