//! Why a plan was chosen, and why the others were not: one sentence each, with the figures that decided.

use super::candidates::Plan;
use super::case::{CodingNodes, EncodeCase};
use super::estimate::{Bound, Estimate};

/// Of the chosen one.
pub(super) fn chosen(
    case: &EncodeCase,
    plan: &Plan,
    estimate: &Estimate,
    next: Option<(&Plan, &Estimate)>,
) -> String {
    let bound = bound(case, estimate);
    let name = plan.name();
    let expected = seconds(estimate.seconds);
    let Some((other, slower)) = next else {
        return format!("{name} is expected to take {expected}, {bound}; nothing else is allowed");
    };
    let against = if slower.seconds > estimate.seconds {
        format!(
            "the next best, {}, {:.2} times as long",
            other.name(),
            slower.seconds / estimate.seconds
        )
    } else {
        format!(
            "{} is not faster by more than the estimate can tell {}",
            other.name(),
            more(estimate, slower)
        )
    };
    format!("{name} is expected to take {expected}, {bound}; {against}")
}

/// Of another one.
pub(super) fn not_chosen(
    case: &EncodeCase,
    plan: &Plan,
    estimate: &Estimate,
    best: &Estimate,
) -> String {
    let name = plan.name();
    let expected = seconds(estimate.seconds);
    if estimate.seconds <= best.seconds {
        let more = more(best, estimate);
        return format!("{name} would take {expected}, no less than can be told, {more}");
    }
    let times = estimate.seconds / best.seconds;
    let bound = bound(case, estimate);
    format!("{name} would take {expected}, {times:.2} times as long, {bound}")
}

/// What the second needs more of.
fn more(few: &Estimate, many: &Estimate) -> String {
    let memory = (many.blocks_in_flight_max, few.blocks_in_flight_max);
    if many.connections > few.connections {
        format!(
            "and needs {} connections instead of {}",
            many.connections, few.connections
        )
    } else if memory.0 > memory.1 {
        format!(
            "and needs up to {} blocks of memory per node instead of {}",
            memory.0, memory.1
        )
    } else {
        "and no other reason speaks for it".into()
    }
}

fn bound(case: &EncodeCase, estimate: &Estimate) -> String {
    let shards = estimate.busiest_bytes as f64 / case.shard_bytes.max(1) as f64;
    match estimate.bound {
        Bound::Up(at) => format!(
            "bound by the uplink of {}; the busiest link carries {shards:.3} shards",
            node(case, at)
        ),
        Bound::Down(at) => format!(
            "bound by the downlink of {}; the busiest link carries {shards:.3} shards",
            node(case, at)
        ),
        Bound::Processor(at) => format!("bound by the processor of {}", node(case, at)),
        Bound::Connection(from, to) => format!(
            "bound by what loss leaves of the connection from {} to {}",
            node(case, from),
            node(case, to)
        ),
        Bound::Delay => format!(
            "{} of it the way of one stripe through all hops",
            seconds(estimate.delay_seconds)
        ),
    }
}

fn node(case: &EncodeCase, index: usize) -> String {
    match (index.checked_sub(case.data.len()), &case.coding) {
        (None, _) => format!("data node {index}"),
        (Some(index), CodingNodes::Dedicated(_)) => format!("coding node {index}"),
        (Some(index), CodingNodes::Partners(_)) => format!("partner node {index}"),
    }
}

/// A time with three figures and its unit.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn a_time_is_said_in_the_unit_that_it_is_of() {
        let said = [1.5, 0.999, 0.001, 0.000_4].map(seconds);
        assert_eq!(said, ["1.50 s", "999.00 ms", "1.00 ms", "400 us"]);
    }
}
