//! One stripe's plan from a rooted tree: every vertex takes what its children send, adds its own block and sends the
//! result towards the root, which hands each finished sum to the member that keeps it.
//!
//! A chain is a tree with one child per vertex, a gather one in which all sources are children of the root. What
//! goes up from a subtree of t sources is the smaller of its t blocks as they are and its partial sums, one per sink;
//! of as many blocks as sums the blocks, which nobody need have computed, and which have digests.

use super::error::PlanError;
use crate::{CodingPlan, Coefficients, Edge, Hop, HopOutput, Target};

/// A member's place in the tree.
#[derive(Debug, Clone)]
pub(super) struct Vertex {
    pub member: usize,
    /// The source whose block it holds.
    pub source: Option<usize>,
    /// Indices of vertices before this one.
    pub children: Vec<usize>,
}

impl Vertex {
    /// A source, which is the member of the same number.
    pub fn source(source: usize, children: Vec<usize>) -> Self {
        Self {
            member: source,
            source: Some(source),
            children,
        }
    }
}

/// One block on its way up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carried {
    Block(usize),
    Sum(usize),
}

/// Builds the plan. Vertices come in an order in which children precede their parent; the last is the root.
/// `sinks[j]` is the member that keeps sum j.
pub(super) fn reduce(
    coefficients: &Coefficients,
    vertices: &[Vertex],
    sinks: &[usize],
) -> Result<CodingPlan, PlanError> {
    check(coefficients, vertices, sinks)?;
    let mut plan = CodingPlan {
        edges: Vec::new(),
        hops: Vec::new(),
    };
    let mut sent: Vec<(usize, Vec<Carried>)> = Vec::new();
    let mut parents = vec![0; vertices.len()];
    for (index, vertex) in vertices.iter().enumerate() {
        vertex.children.iter().for_each(|c| parents[*c] = index);
    }
    let (root, others) = vertices.split_last().ok_or(PlanError::Blocks {
        expected: 1,
        got: 0,
    })?;
    for (index, vertex) in others.iter().enumerate() {
        let operands = operands(vertex, &sent);
        let carried = carry(&operands, sinks.len());
        let rows = carried
            .iter()
            .map(|c| row(coefficients, *c, &operands))
            .collect();
        let to = vertices[parents[index]].member;
        let edge = add_edge(&mut plan, vertex.member, to, carried.len());
        let inputs = vertex.children.iter().map(|c| sent[*c].0).collect();
        sent.push((edge, carried));
        plan.hops.push(Hop {
            member: vertex.member,
            inputs,
            local: vertex.source,
            outputs: vec![HopOutput {
                target: Target::Edge(edge),
                rows,
            }],
        });
    }
    deliver(&mut plan, coefficients, root, &sent, sinks);
    Ok(plan)
}

fn add_edge(plan: &mut CodingPlan, from: usize, to: usize, width: usize) -> usize {
    plan.edges.push(Edge { from, to, width });
    plan.edges.len() - 1
}

/// What a vertex computes with: the blocks its children sent, in order, and its own.
fn operands(vertex: &Vertex, sent: &[(usize, Vec<Carried>)]) -> Vec<Carried> {
    let received = vertex.children.iter().flat_map(|c| sent[*c].1.clone());
    received.chain(vertex.source.map(Carried::Block)).collect()
}

/// What a vertex sends on: its subtree's blocks as they are while they are no more than the sums.
fn carry(operands: &[Carried], sums: usize) -> Vec<Carried> {
    let all_blocks = operands.iter().all(|c| matches!(c, Carried::Block(_)));
    if all_blocks && operands.len() <= sums {
        operands.to_vec()
    } else {
        (0..sums).map(Carried::Sum).collect()
    }
}

/// The coefficients of what is wanted over the operands.
fn row(coefficients: &Coefficients, wanted: Carried, operands: &[Carried]) -> Vec<u8> {
    let of = |operand: &Carried| match (wanted, *operand) {
        (Carried::Sum(sink), Carried::Block(source)) => coefficients.rows()[sink][source],
        (wanted, operand) => u8::from(wanted == operand),
    };
    operands.iter().map(of).collect()
}

/// The root's hop: it keeps its own sum, if one is its own, and sends each other one straight to its keeper.
fn deliver(
    plan: &mut CodingPlan,
    coefficients: &Coefficients,
    root: &Vertex,
    sent: &[(usize, Vec<Carried>)],
    sinks: &[usize],
) {
    let operands = operands(root, sent);
    let inputs = root.children.iter().map(|c| sent[*c].0).collect();
    let mut outputs = Vec::with_capacity(sinks.len());
    let mut keeping = Vec::new();
    for (sink, member) in sinks.iter().enumerate() {
        let target = if *member == root.member {
            Target::Keep(sink)
        } else {
            let edge = add_edge(plan, root.member, *member, 1);
            keeping.push(keep(*member, edge, sink));
            Target::Edge(edge)
        };
        let rows = vec![row(coefficients, Carried::Sum(sink), &operands)];
        outputs.push(HopOutput { target, rows });
    }
    plan.hops.push(Hop {
        member: root.member,
        inputs,
        local: root.source,
        outputs,
    });
    plan.hops.extend(keeping);
}

fn keep(member: usize, edge: usize, sink: usize) -> Hop {
    Hop {
        member,
        inputs: vec![edge],
        local: None,
        outputs: vec![HopOutput {
            target: Target::Keep(sink),
            rows: vec![vec![1]],
        }],
    }
}

fn check(
    coefficients: &Coefficients,
    vertices: &[Vertex],
    sinks: &[usize],
) -> Result<(), PlanError> {
    let expected = coefficients.sinks();
    if sinks.len() != expected {
        let got = sinks.len();
        return Err(PlanError::Blocks { expected, got });
    }
    let mut keepers = sinks.to_vec();
    keepers.sort_unstable();
    keepers.dedup();
    if keepers.len() != expected {
        let (needed, got) = (expected, keepers.len());
        return Err(PlanError::ParityHolders { needed, got });
    }
    let others = vertices.iter().rev().skip(1);
    let twice = others
        .map(|vertex| vertex.member)
        .find(|member| sinks.contains(member));
    twice.map_or(Ok(()), |member| Err(PlanError::TwoRoles(member)))
}
