//! Coding plans: which member sends which partial sum to which member, stripe by stripe. Pure functions.
//!
//! A plan is a directed graph of edges; each edge carries, per stripe, a vector of `width` partial sums. A hop
//! takes the vectors of its input edges and its own block, and computes every output as a linear combination of
//! them. Encoding and repair are the same thing with other coefficients ("repair pipelining", Li et al., USENIX
//! ATC 2017; the chain is the Parallel Erasure Daemon pipeline of Jitsumoto et al., IPSJ SIG 2009-HPC-122).

use std::fmt;

/// A stream from one member to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edge {
    /// Sending member.
    pub from: usize,
    /// Receiving member.
    pub to: usize,
    /// Partial sums per stripe.
    pub width: usize,
}

/// Where an output goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// Into the edge of this index.
    Edge(usize),
    /// Into this member's RAM, as the sink of this index.
    Keep(usize),
}

/// One output of a hop: `rows[i]` are the coefficients of partial sum i over the hop's operands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HopOutput {
    /// Where it goes.
    pub target: Target,
    /// One row per partial sum; one column per operand: the input edges' sums in order, then the local block.
    pub rows: Vec<Vec<u8>>,
}

/// What one member does with every stripe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hop {
    /// Which member.
    pub member: usize,
    /// Edges that it reads, by index.
    pub inputs: Vec<usize>,
    /// The source whose block it adds, if it has one.
    pub local: Option<usize>,
    /// What it computes.
    pub outputs: Vec<HopOutput>,
}

/// A whole plan. Members are indices into the session's list of nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CodingPlan {
    /// All edges.
    pub edges: Vec<Edge>,
    /// At most one hop per member, in an order in which every edge is written before it is read.
    pub hops: Vec<Hop>,
}

/// `rows[sink][source]`: what every sink is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Coefficients {
    rows: Vec<Vec<u8>>,
}

/// Rows of different lengths, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RaggedRows;

impl fmt::Display for RaggedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected one coefficient row per sink, all of the same non-zero length")
    }
}

impl std::error::Error for RaggedRows {}

impl Coefficients {
    /// One row per sink, one column per source.
    ///
    /// # Errors
    /// [`RaggedRows`] if there is no row, no column, or the rows differ in length.
    pub fn new(rows: Vec<Vec<u8>>) -> Result<Self, RaggedRows> {
        let width = rows.first().map_or(0, Vec::len);
        if width == 0 || rows.iter().any(|row| row.len() != width) {
            return Err(RaggedRows);
        }
        Ok(Self { rows })
    }

    /// One row per sink.
    pub fn rows(&self) -> &[Vec<u8>] {
        &self.rows
    }

    /// How many sinks.
    pub fn sinks(&self) -> usize {
        self.rows.len()
    }

    /// How many sources.
    pub fn sources(&self) -> usize {
        self.rows[0].len()
    }
}

impl CodingPlan {
    /// The chain: sources one after the other, each adding its term to all partial sums and passing them right,
    /// then the sinks, each keeping its own sum and passing the rest on. Members `0..sources` are the sources and
    /// the members after them the sinks. Every member sends at most `sinks` blocks per stripe.
    pub fn chain(coefficients: &Coefficients) -> Self {
        let (sources, sinks) = (coefficients.sources(), coefficients.sinks());
        let last = sources + sinks - 1;
        let width = |from: usize| {
            if from < sources {
                sinks
            } else {
                sources + sinks - 1 - from
            }
        };
        let edges = (0..last)
            .map(|from| Edge {
                from,
                to: from + 1,
                width: width(from),
            })
            .collect();
        let source_hops = (0..sources).map(|source| source_hop(coefficients, source));
        let sink_hops = (0..sinks).map(|sink| sink_hop(sources, sinks, sink));
        Self {
            edges,
            hops: source_hops.chain(sink_hops).collect(),
        }
    }

    /// The chain with one sink that is its last source: members `0..sources`, the last of which keeps the sum.
    pub fn chain_into_last(coefficients: &Coefficients) -> Self {
        let last = coefficients.sources() - 1;
        let mut plan = Self::chain(coefficients);
        plan.hops.truncate(last + 1);
        plan.edges.truncate(last);
        plan.hops[last].outputs[0].target = Target::Keep(0);
        plan
    }

    /// Whether an edge carries its sender's own block, unchanged: then what comes must have that block's digest.
    pub fn is_raw(&self, edge: usize) -> bool {
        let Some(hop) = self.edges.get(edge).and_then(|edge| self.hop(edge.from)) else {
            return false;
        };
        let sends =
            |output: &HopOutput| output.target == Target::Edge(edge) && output.rows == [[1]];
        hop.inputs.is_empty() && hop.local.is_some() && hop.outputs.iter().any(sends)
    }

    /// The hop of `member`, if it has one.
    pub fn hop(&self, member: usize) -> Option<&Hop> {
        self.hops.iter().find(|hop| hop.member == member)
    }

    /// Blocks that `member` sends per stripe: what its uplink must carry.
    pub fn blocks_sent(&self, member: usize) -> usize {
        self.edges
            .iter()
            .filter(|edge| edge.from == member)
            .map(|edge| edge.width)
            .sum()
    }
}

fn source_hop(coefficients: &Coefficients, source: usize) -> Hop {
    let sinks = coefficients.sinks();
    let inputs: Vec<usize> = source.checked_sub(1).into_iter().collect();
    let rows = (0..sinks)
        .map(|sink| {
            let mut row = vec![0; inputs.len() * sinks];
            if !inputs.is_empty() {
                row[sink] = 1;
            }
            row.push(coefficients.rows[sink][source]);
            row
        })
        .collect();
    Hop {
        member: source,
        inputs,
        local: Some(source),
        outputs: vec![HopOutput {
            target: Target::Edge(source),
            rows,
        }],
    }
}

fn sink_hop(sources: usize, sinks: usize, sink: usize) -> Hop {
    let member = sources + sink;
    let width = sinks - sink;
    let unit = |at: usize| (0..width).map(|i| u8::from(i == at)).collect::<Vec<u8>>();
    let mut outputs = vec![HopOutput {
        target: Target::Keep(sink),
        rows: vec![unit(0)],
    }];
    if width > 1 {
        outputs.push(HopOutput {
            target: Target::Edge(member),
            rows: (1..width).map(unit).collect(),
        });
    }
    Hop {
        member,
        inputs: vec![member - 1],
        local: None,
        outputs,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storaged_codec::{CodingMatrix, Geometry, engine};

    /// Runs a plan on one byte per block, by the definition of a hop.
    fn run(plan: &CodingPlan, blocks: &[u8], sinks: usize) -> Vec<u8> {
        let mut edges: Vec<Vec<u8>> = vec![Vec::new(); plan.edges.len()];
        let mut kept = vec![0; sinks];
        for hop in &plan.hops {
            let mut operands: Vec<u8> = hop.inputs.iter().flat_map(|&e| edges[e].clone()).collect();
            operands.extend(hop.local.map(|source| blocks[source]));
            for output in &hop.outputs {
                let sums: Vec<u8> = output.rows.iter().map(|row| dot(row, &operands)).collect();
                match output.target {
                    Target::Edge(edge) => {
                        assert_eq!(sums.len(), plan.edges[edge].width);
                        edges[edge] = sums;
                    }
                    Target::Keep(sink) => kept[sink] = sums[0],
                }
            }
        }
        kept
    }

    fn dot(row: &[u8], operands: &[u8]) -> u8 {
        assert_eq!(row.len(), operands.len());
        let mut sum = [0u8];
        for (&c, &x) in row.iter().zip(operands) {
            engine().fold(&mut [&mut sum[..]], &[c], &[x]);
        }
        sum[0]
    }

    #[test]
    fn a_chain_computes_exactly_the_matrix_product() {
        for k in 1..=6 {
            for m in 1..=4 {
                let matrix = CodingMatrix::cauchy(Geometry::new(k, m).unwrap());
                let rows: Vec<Vec<u8>> = (0..m).map(|j| matrix.parity_row(j).to_vec()).collect();
                let blocks: Vec<u8> = (0..k).map(|i| (i * 37 + 11) as u8).collect();
                let expected: Vec<u8> = rows.iter().map(|row| dot(row, &blocks)).collect();
                let plan = CodingPlan::chain(&Coefficients::new(rows).unwrap());
                assert_eq!(run(&plan, &blocks, m), expected);
                assert!((0..k + m).all(|member| plan.blocks_sent(member) <= m));
            }
        }
    }

    #[test]
    fn a_chain_may_end_in_its_last_source() {
        for k in 1..=5 {
            let row: Vec<u8> = (0..k).map(|i| (i * 29 + 3) as u8).collect();
            let blocks: Vec<u8> = (0..k).map(|i| (i * 91 + 7) as u8).collect();
            let expected = dot(&row, &blocks);
            let plan = CodingPlan::chain_into_last(&Coefficients::new(vec![row]).unwrap());
            assert_eq!(run(&plan, &blocks, 1), [expected]);
            assert_eq!((plan.hops.len(), plan.edges.len()), (k, k - 1));
        }
    }

    #[test]
    fn ragged_rows_are_refused() {
        assert!(Coefficients::new(vec![]).is_err());
        assert!(Coefficients::new(vec![vec![]]).is_err());
        assert!(Coefficients::new(vec![vec![1], vec![1, 2]]).is_err());
    }
}
