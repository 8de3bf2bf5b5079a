//! What the chooser knows.

use storaged_codec::{ChunkSize, Geometry};

use super::ChooseError;
use super::candidates::ShapeKind;

/// One node's links and processor, as measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeMeasure {
    /// Bytes per second that it can send.
    pub up_bytes_per_s: u64,
    /// Bytes per second that it can receive.
    pub down_bytes_per_s: u64,
    /// To its peers and back, microseconds.
    pub round_trip_us: u64,
    /// Packets lost per million.
    pub loss_ppm: u32,
    /// Bytes per second that its processor multiplies by one coefficient and adds.
    pub fold_bytes_per_s: u64,
    /// Bytes per second that its processor can send and receive, together: crypto, system calls, copies.
    pub transport_bytes_per_s: u64,
}

/// Which stripes moved since the basis, in chunks per million.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dirty {
    /// Dirty at some member: the stripes that move.
    pub union_ppm: u32,
    /// Dirty at one member, on average: a node sends a chunk of its own only if it is dirty itself.
    pub own_ppm: u32,
}

impl Dirty {
    /// All of it.
    pub const FULL: Self = Self {
        union_ppm: 1_000_000,
        own_ppm: 1_000_000,
    };
}

/// Who keeps the parity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CodingNodes {
    /// Nodes that keep this group's parity and are data nodes of no group that encodes at this time.
    Dedicated(Vec<NodeMeasure>),
    /// A group for which this group codes in return, at the same time.
    Partners(Vec<NodeMeasure>),
}

impl CodingNodes {
    /// The nodes, in order.
    pub fn nodes(&self) -> &[NodeMeasure] {
        match self {
            Self::Dedicated(nodes) | Self::Partners(nodes) => nodes,
        }
    }
}

/// An encoding to choose a plan for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodeCase {
    /// k and m.
    pub geometry: Geometry,
    /// Bytes of the longest shard.
    pub shard_bytes: u64,
    /// Size of a chunk.
    pub chunk: ChunkSize,
    /// What moves.
    pub dirty: Dirty,
    /// The group's k data nodes, in coding order.
    pub data: Vec<NodeMeasure>,
    /// Its coding nodes.
    pub coding: CodingNodes,
    /// Per data node, for how many other groups it is a dedicated coding node that receives parity at the same time.
    /// Nodes beyond the end are for none.
    pub codes_for: Vec<usize>,
    /// Stripes in flight per node.
    pub stripes_in_flight: usize,
    /// Kinds of plans to consider.
    pub allowed: Vec<ShapeKind>,
}

impl EncodeCase {
    /// Stripes that move.
    pub fn stripes(&self) -> u64 {
        let all = u128::from(self.chunk.count(self.shard_bytes));
        let moved = (all * u128::from(self.dirty.union_ppm.min(1_000_000))).div_ceil(1_000_000);
        u64::try_from(moved).unwrap_or(u64::MAX)
    }

    /// For how many other groups a data node receives parity at the same time.
    pub(super) fn codes_for(&self, data_node: usize) -> usize {
        self.codes_for.get(data_node).copied().unwrap_or(0)
    }

    pub(super) fn check(&self) -> Result<(), ChooseError> {
        let (k, m) = (self.geometry.k(), self.geometry.m());
        exactly("data nodes", k, self.data.len())?;
        let coding = self.coding.nodes().len();
        match &self.coding {
            CodingNodes::Dedicated(_) => exactly("coding nodes", m, coding)?,
            // Each group must be wide enough for the other's parity.
            CodingNodes::Partners(_) => {
                let (what, expected) = ("partner nodes or more", m);
                let got = coding.min(k);
                (got >= m).then_some(()).ok_or(ChooseError::Nodes {
                    what,
                    expected,
                    got,
                })?;
            }
        }
        check_rates(self.data.iter().chain(self.coding.nodes()))
    }
}

pub(super) fn exactly(what: &'static str, expected: usize, got: usize) -> Result<(), ChooseError> {
    let error = ChooseError::Nodes {
        what,
        expected,
        got,
    };
    (got == expected).then_some(()).ok_or(error)
}

pub(super) fn check_rates<'a>(
    nodes: impl Iterator<Item = &'a NodeMeasure>,
) -> Result<(), ChooseError> {
    let stands_still = |node: &NodeMeasure| {
        let rates = [
            node.up_bytes_per_s,
            node.down_bytes_per_s,
            node.fold_bytes_per_s,
            node.transport_bytes_per_s,
        ];
        rates.contains(&0)
    };
    let mut nodes = nodes;
    let still = nodes.position(stands_still);
    still.map_or(Ok(()), |node| Err(ChooseError::NoRate(node)))
}
