//! The case of a group as a node of it knows it: the members, and one rate for all links. What was not measured is
//! a first guess, the same for every node, so that it moves the expected times but hardly the choice.

use storaged_codec::{ChunkSize, Geometry};

use super::case::{CodingNodes, Dirty, EncodeCase, NodeMeasure};
use super::{ChooseError, ShapeKind};
use crate::Group;

/// Round trip within a machine room, microseconds.
const ROUND_TRIP_US: u64 = 200;
/// One core multiplies and adds at this rate with the slower of the vector engines.
const FOLD_BYTES_PER_S: u64 = 5_000_000_000;
/// Two cores send and receive encrypted datagrams at this rate together.
const TRANSPORT_BYTES_PER_S: u64 = 2_000_000_000;
/// As the executor has by default.
const STRIPES_IN_FLIGHT: usize = 8;

impl NodeMeasure {
    /// A node on a link of this rate in both directions, all else guessed.
    pub fn on_link(bytes_per_s: u64) -> Self {
        Self {
            up_bytes_per_s: bytes_per_s,
            down_bytes_per_s: bytes_per_s,
            round_trip_us: ROUND_TRIP_US,
            loss_ppm: 0,
            fold_bytes_per_s: FOLD_BYTES_PER_S,
            transport_bytes_per_s: TRANSPORT_BYTES_PER_S,
        }
    }
}

/// What is known of a group beside its members.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupFacts {
    /// Bytes of the longest shard.
    pub shard_bytes: u64,
    /// Size of a chunk.
    pub chunk: ChunkSize,
    /// What moves.
    pub dirty: Dirty,
    /// Bytes per second of every link, each way.
    pub link_bytes_per_s: u64,
}

impl EncodeCase {
    /// The case of one of these groups, all of which encode at the same time. `sources` are its data nodes that have
    /// a shard, as positions in its list, in coding order.
    ///
    /// # Errors
    /// [`ChooseError::Nodes`] if there is no such group, or no source in it.
    pub fn of_group(
        groups: &[Group],
        group: usize,
        sources: &[usize],
        facts: &GroupFacts,
    ) -> Result<Self, ChooseError> {
        let nodes = |what, expected, got| ChooseError::Nodes {
            what,
            expected,
            got,
        };
        let Some(this) = groups.get(group) else {
            return Err(nodes("groups or more", group + 1, groups.len()));
        };
        let data = sources.iter().filter_map(|source| this.data.get(*source));
        let others = groups.iter().enumerate().filter(|(at, _)| *at != group);
        let coding: Vec<_> = others.flat_map(|(_, other)| &other.coding).collect();
        let codes_for: Vec<usize> = data
            .map(|node| coding.iter().filter(|other| **other == node).count())
            .collect();
        let (k, m) = (codes_for.len(), this.coding.len());
        let geometry = Geometry::new(k, m).map_err(|_| nodes("data nodes or more", 1, k))?;
        let node = NodeMeasure::on_link(facts.link_bytes_per_s);
        Ok(Self {
            geometry,
            shard_bytes: facts.shard_bytes,
            chunk: facts.chunk,
            dirty: facts.dirty,
            data: vec![node; k],
            coding: CodingNodes::Dedicated(vec![node; m]),
            codes_for,
            stripes_in_flight: STRIPES_IN_FLIGHT,
            allowed: ShapeKind::ALL.to_vec(),
        })
    }
}
