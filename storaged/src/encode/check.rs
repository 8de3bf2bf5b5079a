//! Checks of a session's work before anything is done for it, so that the pipeline need not check again: the plan
//! is derived from what the leader proposed, and what does not fit together is the leader's fault.

use std::collections::BTreeSet;
use std::ops::Range;

use storaged_core::SessionWork;
use storaged_plan::{CodingPlan, CoefficientRows, Hop, Link, PlanError, Target, trace};
use storaged_wire::peer::SessionFault;
use thiserror::Error;

/// This node's part in one class of stripes, with the links that its edges are.
#[derive(Debug, Clone)]
pub(super) struct ClassPart {
    pub hop: Hop,
    /// Per input edge of the hop, in order.
    pub inputs: Vec<EdgeRef>,
    /// Per output that is an edge, in the order of the hop's outputs.
    pub outputs: Vec<EdgeRef>,
    /// Per input, what its sums are made of; none at all if they are not checked.
    pub made: Vec<CoefficientRows>,
}

/// An edge as a place in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EdgeRef {
    /// Number of its link in the plan.
    pub link: usize,
    /// Partial sums per stripe.
    pub width: u8,
    /// The source member whose block this is, as it is.
    pub raw_from: Option<usize>,
}

/// What this node does, if its work fits together.
#[derive(Debug, Clone)]
pub(super) struct CheckedPlan {
    /// Per class; none where it has no part.
    pub classes: Vec<Option<ClassPart>>,
    /// All links of the plan.
    pub links: Vec<Link>,
}

/// Work that does not fit together.
#[derive(Debug, Error)]
enum WorkError {
    #[error("link {0:?} does not lead from a member to another")]
    LinkOutside(Link),
    #[error("member {0} has no part in the plan")]
    NoPart(usize),
    #[error("a member reads blocks exactly if the plan says so")]
    Source,
    #[error("a member keeps blocks exactly if the plan says so")]
    Sink,
    #[error("expected at most one kept block per stripe and member")]
    KeepsSeveral,
    #[error("there is no edge {0}")]
    NoEdge(usize),
    #[error("edge {0} has no link")]
    NoLink(usize),
    #[error("edge {0} does not lead from a member to this one")]
    NotToHere(usize),
    #[error("edge {0} does not lead from this member to another")]
    NotFromHere(usize),
    #[error("edge {edge} carries {got} sums, expected 1 to 255")]
    Width { edge: usize, got: usize },
    #[error("link {0} has two edges of one stripe")]
    TwoEdges(usize),
    #[error("expected {width} rows of {operands} coefficients for an output")]
    Rows { width: usize, operands: usize },
    #[error("stripes {range:?} are not in order within 0..{count}")]
    Stripes { range: Range<u64>, count: u64 },
    #[error(transparent)]
    Plan(#[from] PlanError),
}

pub(super) fn checked_plan(work: &SessionWork) -> Result<CheckedPlan, SessionFault> {
    fitting_plan(work).map_err(|what| SessionFault::Neighbour {
        node: work.leader.clone(),
        reason: format!("proposed a session that does not fit together: {what}"),
    })
}

fn fitting_plan(work: &SessionWork) -> Result<CheckedPlan, WorkError> {
    let links = work.plan.links();
    let out_of_range = |link: &&Link| link.from.max(link.to) >= work.members.len();
    if let Some(link) = links.iter().find(out_of_range) {
        return Err(WorkError::LinkOutside(*link));
    }
    let classes = work.plan.classes().iter();
    let classes = classes
        .map(|plan| {
            plan.hop(work.member)
                .map(|hop| class_part(work, plan, hop, &links))
                .transpose()
        })
        .collect::<Result<Vec<_>, _>>()?;
    let mut mine = classes.iter().flatten().peekable();
    if mine.peek().is_none() {
        return Err(WorkError::NoPart(work.member));
    }
    let parts: Vec<&ClassPart> = mine.collect();
    let reads = parts.iter().any(|part| part.hop.local.is_some());
    if reads != work.source.is_some() {
        return Err(WorkError::Source);
    }
    let keeps = parts.iter().any(|part| keeps(&part.hop) > 0);
    if keeps != work.keep.is_some() {
        return Err(WorkError::Sink);
    }
    check_stripes(work)?;
    Ok(CheckedPlan { classes, links })
}

fn keeps(hop: &Hop) -> usize {
    let targets = hop.outputs.iter().map(|output| output.target);
    targets
        .filter(|target| matches!(target, Target::Keep(_)))
        .count()
}

fn class_part(
    work: &SessionWork,
    plan: &CodingPlan,
    hop: &Hop,
    links: &[Link],
) -> Result<ClassPart, WorkError> {
    let input = |number: &usize| {
        let edge = edge_of(plan, *number, links)?;
        let ours = links[edge.link].to == work.member;
        ours.then_some(edge).ok_or(WorkError::NotToHere(*number))
    };
    let inputs = hop
        .inputs
        .iter()
        .map(input)
        .collect::<Result<Vec<_>, _>>()?;
    let received: usize = inputs.iter().map(|edge| usize::from(edge.width)).sum();
    let operands = received + usize::from(hop.local.is_some());
    let mut outputs = Vec::new();
    for output in &hop.outputs {
        let width = match output.target {
            Target::Keep(_) => 1,
            Target::Edge(number) => {
                let edge = edge_of(plan, number, links)?;
                if links[edge.link].from != work.member {
                    return Err(WorkError::NotFromHere(number));
                }
                outputs.push(edge);
                usize::from(edge.width)
            }
        };
        if output.rows.len() != width || output.rows.iter().any(|row| row.len() != operands) {
            return Err(WorkError::Rows { width, operands });
        }
    }
    if keeps(hop) > 1 {
        return Err(WorkError::KeepsSeveral);
    }
    one_edge_per_link(inputs.iter().chain(&outputs))?;
    let hop = hop.clone();
    let made = made_of(work, plan, &hop)?;
    Ok(ClassPart {
        hop,
        inputs,
        outputs,
        made,
    })
}

/// What comes to a hop is made of, if it is to be checked.
fn made_of(
    work: &SessionWork,
    plan: &CodingPlan,
    hop: &Hop,
) -> Result<Vec<CoefficientRows>, WorkError> {
    if work.proofs.values().all(|proof| proof.prints.is_empty()) {
        return Ok(Vec::new());
    }
    let traced = trace(plan, work.plan.sources())?;
    let made = |edge: &usize| traced.edges.get(*edge).cloned().unwrap_or_default();
    Ok(hop.inputs.iter().map(made).collect())
}

/// Frames of one stripe on one stream would not be told apart.
fn one_edge_per_link<'a>(edges: impl Iterator<Item = &'a EdgeRef>) -> Result<(), WorkError> {
    let mut seen = BTreeSet::new();
    let mut edges = edges;
    match edges.find(|edge| !seen.insert(edge.link)) {
        None => Ok(()),
        Some(edge) => Err(WorkError::TwoEdges(edge.link)),
    }
}

fn edge_of(plan: &CodingPlan, number: usize, links: &[Link]) -> Result<EdgeRef, WorkError> {
    let shape = plan.edges.get(number).ok_or(WorkError::NoEdge(number))?;
    let link = Link {
        from: shape.from,
        to: shape.to,
    };
    let place = links.binary_search(&link);
    let link = place.map_err(|_| WorkError::NoLink(number))?;
    match u8::try_from(shape.width) {
        Ok(width @ 1..) => Ok(EdgeRef {
            link,
            width,
            raw_from: plan.is_raw(number).then_some(shape.from),
        }),
        _ => Err(WorkError::Width {
            edge: number,
            got: shape.width,
        }),
    }
}

fn check_stripes(work: &SessionWork) -> Result<(), WorkError> {
    let count = work.chunk.count(work.lane_length);
    let mut next = 0;
    for range in &work.stripes {
        if range.start < next || range.end < range.start || range.end > count {
            let range = range.clone();
            return Err(WorkError::Stripes { range, count });
        }
        next = range.end;
    }
    Ok(())
}
