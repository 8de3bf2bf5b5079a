//! How long plans take that run at once: the busiest of all links and processors, and before it the time until the
//! first stripe has come through.
//!
//! Not modelled: queues inside the network, and a window of stripes too small for the round trip (the transport's
//! own window is what bridges a round trip, so the executor's need not).

use std::collections::{BTreeMap, BTreeSet};

use super::case::{Dirty, NodeMeasure};
use crate::StripedPlan;
use crate::{CodingPlan, Hop, Target};

/// Payload of a packet on a path that was not probed for more.
const PACKET_BYTES: f64 = 1200.0;
/// Of the steady state of loss-driven congestion control: rate = this * packet / (round trip * sqrt(loss))
/// (Mathis et al., ACM CCR 27(3), 1997).
const LOSS_CONSTANT: f64 = 1.22;

/// A plan and the nodes that its members are.
pub(super) struct Part<'a> {
    pub plan: &'a StripedPlan,
    /// One node per member, as an index into the measures.
    pub nodes: Vec<usize>,
}

/// How much moves.
pub(super) struct Volume {
    pub stripes: u64,
    pub stripe_bytes: u64,
    pub dirty: Dirty,
    pub stripes_in_flight: usize,
}

/// What the time of a plan is bound by. Nodes are numbered data nodes (or survivors) first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// A node's uplink.
    Up(usize),
    /// A node's downlink.
    Down(usize),
    /// A node's processor.
    Processor(usize),
    /// One connection that loss keeps slow.
    Connection(usize, usize),
    /// The time until the first stripe is through.
    Delay,
}

/// What a candidate takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// Until the last block is kept.
    pub seconds: f64,
    /// Of it, until the first stripe is through.
    pub delay_seconds: f64,
    /// The busiest of links and processors.
    pub bound: Bound,
    /// Bytes that the busiest uplink or downlink carries.
    pub busiest_bytes: u64,
    /// Bytes on all links together.
    pub total_bytes: u64,
    /// Pairs of nodes that exchange blocks.
    pub connections: usize,
    /// Most blocks that one node holds.
    pub blocks_in_flight_max: usize,
}

/// Bytes, per node and per connection.
struct Traffic {
    sent: Vec<f64>,
    received: Vec<f64>,
    folded: Vec<f64>,
    pairs: BTreeMap<(usize, usize), f64>,
}

pub(super) fn estimate(
    parts: &[Part<'_>],
    nodes: &[NodeMeasure],
    codes_for: &[usize],
    volume: &Volume,
) -> Estimate {
    let mut traffic = traffic(parts, nodes.len(), volume);
    let moved = volume.stripes as f64 * volume.stripe_bytes as f64;
    for (received, groups) in traffic.received.iter_mut().zip(codes_for) {
        *received += *groups as f64 * moved;
    }
    let (bound, busy) = busiest(&traffic, nodes);
    let delays = parts.iter().map(|part| delay(part, nodes, volume));
    let delay = delays.fold(0.0, f64::max);
    // The first stripe's own share of the busiest link is in the delay already.
    let rest = 1.0 - 1.0 / volume.stripes.max(1) as f64;
    let seconds = if volume.stripes == 0 {
        0.0
    } else {
        delay + busy * rest
    };
    let most = |bytes: &[f64]| bytes.iter().copied().fold(0.0, f64::max);
    Estimate {
        seconds,
        delay_seconds: delay,
        bound: if delay > busy * rest {
            Bound::Delay
        } else {
            bound
        },
        busiest_bytes: most(&traffic.sent).max(most(&traffic.received)).round() as u64,
        total_bytes: traffic.sent.iter().sum::<f64>().round() as u64,
        connections: connections(&traffic),
        blocks_in_flight_max: blocks_max(parts, nodes.len(), volume.stripes_in_flight),
    }
}

fn traffic(parts: &[Part<'_>], nodes: usize, volume: &Volume) -> Traffic {
    let mut traffic = Traffic {
        sent: vec![0.0; nodes],
        received: vec![0.0; nodes],
        folded: vec![0.0; nodes],
        pairs: BTreeMap::new(),
    };
    for part in parts {
        let classes = part.plan.classes();
        for (index, plan) in (0..).zip(classes) {
            let count = classes.len() as u64;
            let stripes = volume.stripes / count + u64::from(index < volume.stripes % count);
            let bytes = stripes as f64 * volume.stripe_bytes as f64;
            add(&mut traffic, plan, &part.nodes, bytes, volume.dirty);
        }
    }
    traffic
}

fn add(traffic: &mut Traffic, plan: &CodingPlan, nodes: &[usize], bytes: f64, dirty: Dirty) {
    let share = dirty_shares(plan, dirty);
    for (edge, share) in plan.edges.iter().zip(&share) {
        let (from, to) = (nodes[edge.from], nodes[edge.to]);
        let moved = bytes * edge.width as f64 * share;
        traffic.sent[from] += moved;
        traffic.received[to] += moved;
        *traffic.pairs.entry((from, to)).or_default() += moved;
    }
    for hop in &plan.hops {
        traffic.folded[nodes[hop.member]] += bytes * terms(hop);
    }
}

/// Of the stripes that move, the share in which an edge carries anything: those in which a source behind it is dirty,
/// taken as independent of each other up to the union.
fn dirty_shares(plan: &CodingPlan, dirty: Dirty) -> Vec<f64> {
    let union = f64::from(dirty.union_ppm.max(1)) / 1e6;
    let own = (f64::from(dirty.own_ppm) / 1e6).min(union);
    let mut clean = vec![1.0; plan.edges.len()];
    for hop in &plan.hops {
        let behind: f64 = hop.inputs.iter().map(|edge| clean[*edge]).product();
        let all = if hop.local.is_some() {
            behind * (1.0 - own)
        } else {
            behind
        };
        for output in &hop.outputs {
            if let Target::Edge(edge) = output.target {
                clean[edge] = all;
            }
        }
    }
    clean
        .iter()
        .map(|clean| ((1.0 - clean) / union).min(1.0))
        .collect()
}

/// Seconds that the busiest link, connection or processor needs, and which it is.
fn busiest(traffic: &Traffic, nodes: &[NodeMeasure]) -> (Bound, f64) {
    let mut busiest = (Bound::Delay, 0.0);
    let mut offer = |bound, seconds: f64| {
        if seconds > busiest.1 {
            busiest = (bound, seconds);
        }
    };
    for (index, node) in nodes.iter().enumerate() {
        let (sent, received) = (traffic.sent[index], traffic.received[index]);
        offer(Bound::Up(index), sent / node.up_bytes_per_s as f64);
        offer(Bound::Down(index), received / node.down_bytes_per_s as f64);
        let processor = traffic.folded[index] / node.fold_bytes_per_s as f64
            + (sent + received) / node.transport_bytes_per_s as f64;
        offer(Bound::Processor(index), processor);
    }
    for ((from, to), bytes) in &traffic.pairs {
        if let Some(rate) = loss_rate(&nodes[*from], &nodes[*to]) {
            offer(Bound::Connection(*from, *to), bytes / rate);
        }
    }
    busiest
}

/// Packets lost between two nodes, and the mean of their round trips in seconds.
fn path(from: &NodeMeasure, to: &NodeMeasure) -> (f64, f64) {
    let loss = f64::from(from.loss_ppm.max(to.loss_ppm)) / 1e6;
    let round_trip = (from.round_trip_us + to.round_trip_us) as f64 / 2e6;
    (loss, round_trip)
}

/// The rate that one connection keeps up on a lossy path; none if nothing holds it back.
fn loss_rate(from: &NodeMeasure, to: &NodeMeasure) -> Option<f64> {
    let (loss, round_trip) = path(from, to);
    let holds_back = loss > 0.0 && round_trip > 0.0;
    holds_back.then(|| LOSS_CONSTANT * PACKET_BYTES / (round_trip * loss.sqrt()))
}

/// The time of one stripe from its sources to its keepers, alone in the network: of the slowest class.
fn delay(part: &Part<'_>, nodes: &[NodeMeasure], volume: &Volume) -> f64 {
    let classes = part.plan.classes().iter();
    let one = |plan| stripe_delay(plan, &part.nodes, nodes, volume.stripe_bytes as f64);
    classes.map(one).fold(0.0, f64::max)
}

fn stripe_delay(plan: &CodingPlan, at: &[usize], nodes: &[NodeMeasure], bytes: f64) -> f64 {
    // Per edge: when its first and its last byte are there.
    let mut there = vec![(0.0, 0.0); plan.edges.len()];
    let mut last: f64 = 0.0;
    for hop in &plan.hops {
        let node = &nodes[at[hop.member]];
        let width: usize = hop.inputs.iter().map(|edge| plan.edges[*edge].width).sum();
        let first_byte = hop.inputs.iter().map(|edge| there[*edge].0);
        let first_byte = first_byte.fold(f64::INFINITY, f64::min);
        // What several send at once shares this node's downlink.
        let shared = if hop.inputs.is_empty() {
            0.0
        } else {
            first_byte + width as f64 * bytes / node.down_bytes_per_s as f64
        };
        let arrived = hop.inputs.iter().map(|edge| there[*edge].1);
        let arrived = arrived.fold(shared, f64::max);
        let mut ready = arrived + terms(hop) * bytes / node.fold_bytes_per_s as f64;
        last = last.max(ready);
        for output in &hop.outputs {
            if let Target::Edge(edge) = output.target {
                let to = &nodes[at[plan.edges[edge].to]];
                let moved = plan.edges[edge].width as f64 * bytes;
                let (first, sent) = (ready, ready + moved / node.up_bytes_per_s as f64);
                let travel = travel(node, to, moved);
                there[edge] = (first + travel, sent + travel);
                ready = sent;
            }
        }
    }
    last
}

/// Products of a block and a coefficient that a hop computes per stripe.
fn terms(hop: &Hop) -> f64 {
    let rows = hop.outputs.iter().flat_map(|output| &output.rows);
    rows.flatten().filter(|c| **c > 1).count() as f64
}

/// Half a round trip, and a whole one more if a packet of what is sent is lost.
fn travel(from: &NodeMeasure, to: &NodeMeasure, bytes: f64) -> f64 {
    let (loss, round_trip) = path(from, to);
    let hit = (bytes / PACKET_BYTES).ceil() * loss;
    round_trip * (0.5 + hit.min(1.0))
}

fn connections(traffic: &Traffic) -> usize {
    let pairs = traffic.pairs.keys();
    let either_way: BTreeSet<(usize, usize)> = pairs.map(|(a, b)| (*a.min(b), *a.max(b))).collect();
    either_way.len()
}

fn blocks_max(parts: &[Part<'_>], nodes: usize, in_flight: usize) -> usize {
    let mut blocks = vec![0; nodes];
    for part in parts {
        for (member, node) in part.nodes.iter().enumerate() {
            let in_flight = part.plan.stripes_in_flight(in_flight);
            blocks[*node] += part.plan.blocks_in_flight_max(member, in_flight);
        }
    }
    blocks.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_travels_half_a_round_trip_and_a_whole_one_more_for_each_loss_to_expect() {
        let node = |loss_ppm| NodeMeasure {
            round_trip_us: 1_000,
            loss_ppm,
            ..NodeMeasure::on_link(125_000_000)
        };
        let of_ten_packets = |loss_ppm| travel(&node(0), &node(loss_ppm), 12_000.0);
        assert!((of_ten_packets(0) - 0.000_5).abs() < 1e-9);
        assert!((of_ten_packets(10_000) - 0.000_6).abs() < 1e-9);
        // No more than one: lost packets of a block are sent again together.
        assert!((of_ten_packets(500_000) - 0.001_5).abs() < 1e-9);
    }
}
