//! Checks of a session's work before anything is done for it, so that the pipeline need not check again: the plan
//! is derived from what the leader proposed, and what does not fit together is the leader's fault.

use storaged_core::encode::{Hop, SessionWork, Target};
use storaged_wire::peer::SessionFault;

/// The hop of this node, if its work fits together.
pub(super) fn hop_of(work: &SessionWork) -> Result<Hop, SessionFault> {
    fitting_hop(work).map_err(|what| SessionFault::Neighbour {
        node: work.leader.clone(),
        reason: format!("proposed a session that does not fit together: {what}"),
    })
}

fn fitting_hop(work: &SessionWork) -> Result<Hop, String> {
    let hop = work
        .plan
        .hop(work.member)
        .ok_or(format!("member {} has no part in the plan", work.member))?;
    check_stripes(work)?;
    let operands = check_inputs(work, hop)? + usize::from(hop.local.is_some());
    if hop.local.is_some() != work.source.is_some() {
        return Err("a member reads blocks exactly if the plan says so".into());
    }
    let keeps = hop
        .outputs
        .iter()
        .filter(|output| matches!(output.target, Target::Keep(_)))
        .count();
    if keeps != usize::from(work.keep.is_some()) {
        return Err(format!(
            "expected one place for each of {keeps} kept blocks, and at most one"
        ));
    }
    for output in &hop.outputs {
        let width = match output.target {
            Target::Edge(edge) => check_output(work, edge)?,
            Target::Keep(_) => 1,
        };
        if output.rows.len() != width || output.rows.iter().any(|row| row.len() != operands) {
            return Err(format!(
                "expected {width} rows of {operands} coefficients for an output"
            ));
        }
    }
    Ok(hop.clone())
}

fn check_stripes(work: &SessionWork) -> Result<(), String> {
    let count = work.chunk.count(work.lane_length);
    let mut next = 0;
    for range in &work.stripes {
        if range.start < next || range.end < range.start || range.end > count {
            return Err(format!(
                "stripes {range:?} are not in order within 0..{count}"
            ));
        }
        next = range.end;
    }
    Ok(())
}

fn check_inputs(work: &SessionWork, hop: &Hop) -> Result<usize, String> {
    let mut sums = 0;
    for edge in &hop.inputs {
        let shape = work
            .plan
            .edges
            .get(*edge)
            .ok_or(format!("there is no edge {edge}"))?;
        if shape.to != work.member || work.members.get(shape.from).is_none() {
            return Err(format!(
                "edge {edge} does not lead from a member to this one"
            ));
        }
        check_width(*edge, shape.width)?;
        sums += shape.width;
    }
    Ok(sums)
}

fn check_output(work: &SessionWork, edge: usize) -> Result<usize, String> {
    let shape = work
        .plan
        .edges
        .get(edge)
        .ok_or(format!("there is no edge {edge}"))?;
    if shape.from != work.member || work.members.get(shape.to).is_none() {
        return Err(format!(
            "edge {edge} does not lead from this member to another"
        ));
    }
    check_width(edge, shape.width)?;
    Ok(shape.width)
}

fn check_width(edge: usize, width: usize) -> Result<(), String> {
    match width {
        1..=255 => Ok(()),
        _ => Err(format!(
            "edge {edge} carries {width} sums, expected 1 to 255"
        )),
    }
}
