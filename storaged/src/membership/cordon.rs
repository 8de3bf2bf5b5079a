//! Nodes that an operator expects to lose, by an order of `storaged node cordon`. One keeps its place and what it holds, and is coded as
//! before; new parity goes to others where they suffice, and no place gets vacant for it. A roster says it, so it stays over restarts.

use std::collections::BTreeSet;

use storaged_wire::NodeName;

use super::roster::{ChangeError, Roster};

/// What an order makes of the roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cordoning {
    /// This epoch must be proposed.
    Propose(Box<Roster>),
    /// It is so already.
    Already,
}

impl Roster {
    /// With a node that is given nothing new. `own` is the node of whoever asks: a spare is in no roster.
    ///
    /// # Errors
    /// [`ChangeError::UnknownNode`] if nobody knows it.
    pub fn cordon(&self, node: &NodeName, own: &NodeName) -> Result<Cordoning, ChangeError> {
        if self.cordoned.contains(node) {
            return Ok(Cordoning::Already);
        }
        let known = self.nodes();
        if !known.contains(node) && node != own {
            return Err(unknown(node, &known));
        }
        let mut next = self.next(format!("{node} was cordoned"));
        next.cordoned.push(node.clone());
        next.cordoned.sort();
        // It may have come and wait for a place.
        next.arriving.retain(|arrival| arrival.node != *node);
        Ok(Cordoning::Propose(Box::new(next)))
    }

    /// With a node that is as any other again.
    ///
    /// # Errors
    /// [`ChangeError::UnknownNode`] if nobody knows it.
    pub fn uncordon(&self, node: &NodeName, own: &NodeName) -> Result<Cordoning, ChangeError> {
        let known = self.nodes();
        if !self.cordoned.contains(node) {
            let is_known = known.contains(node) || node == own;
            let refused = || unknown(node, &known);
            return is_known.then_some(Cordoning::Already).ok_or_else(refused);
        }
        let mut next = self.next(format!("{node} is not cordoned any more"));
        next.cordoned.retain(|it| it != node);
        Ok(Cordoning::Propose(Box::new(next)))
    }

    /// All that it has ever heard of and remembers.
    fn nodes(&self) -> BTreeSet<&NodeName> {
        let places = self.places.iter();
        let filling = places.flat_map(|place| place.node.iter().chain([&place.last]));
        let arriving = self.arriving.iter().map(|arrival| &arrival.node);
        let others = self.dismissed.iter().chain(&self.cordoned);
        filling.chain(arriving).chain(others).collect()
    }
}

fn unknown(node: &NodeName, known: &BTreeSet<&NodeName>) -> ChangeError {
    let names: Vec<&str> = known.iter().map(|it| it.as_str()).collect();
    ChangeError::UnknownNode {
        got: node.clone(),
        known: names.join(", "),
    }
}
