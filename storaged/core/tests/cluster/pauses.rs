//! Pauses of the small cluster's nodes (SIGSTOP): what comes waits, the others notice by silence, and links that have
//! broken meanwhile look as if they were up until the node has found out.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::Input;

use super::{Cluster, Event};

/// A link ends after so much silence.
const SILENCE_MS: u64 = 2_000;
/// A node that has woken up finds its links broken this late.
const FINDS_OUT_MS: u64 = 50;
/// And dials again this much later.
const DIALS_MS: u64 = 150;

#[derive(Default)]
pub struct Pauses {
    /// What waits for a node that is paused.
    waiting: BTreeMap<usize, Vec<Input>>,
    /// Links that are broken though one end does not know.
    severed: BTreeSet<(usize, usize)>,
}

impl Pauses {
    /// The input, or nothing if it has to wait.
    pub fn let_through(&mut self, node: usize, input: Input) -> Option<Input> {
        match self.waiting.get_mut(&node) {
            Some(waiting) => {
                waiting.push(input);
                None
            }
            None => Some(input),
        }
    }

    pub fn is_severed(&self, from: usize, to: usize) -> bool {
        self.severed.contains(&(from.min(to), from.max(to)))
    }
}

impl Cluster {
    /// Stops a node for so many milliseconds.
    pub fn pause(&mut self, node: usize, ms: u64) {
        self.pauses.waiting.insert(node, Vec::new());
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            let at = self.now + SILENCE_MS + 5 * other as u64;
            self.at(at, Event::Silent(node, other));
        }
        self.at(self.now + ms, Event::Resume(node));
    }

    pub(super) fn is_silent(&mut self, node: usize, to: usize) {
        if !self.pauses.waiting.contains_key(&node) {
            return;
        }
        self.pauses.severed.insert((node.min(to), node.max(to)));
        if let Some(generation) = self.links.get(&(to, node)).copied() {
            self.link_down(to, node, generation);
        }
    }

    pub(super) fn resume(&mut self, node: usize) {
        let waiting = self.pauses.waiting.remove(&node).unwrap_or_default();
        for input in waiting {
            self.tell(node, input);
        }
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            if !self.pauses.is_severed(node, other) {
                continue;
            }
            if let Some(generation) = self.links.get(&(node, other)).copied() {
                let at = self.now + FINDS_OUT_MS;
                self.at(at, Event::Unlink(node, other, generation));
            }
            let at = self.now + FINDS_OUT_MS + DIALS_MS;
            self.at(at, Event::Link(node, other));
            self.at(at + 1, Event::Link(other, node));
        }
    }

    /// A new connection: both ends know of it.
    pub(super) fn is_joined(&mut self, from: usize, to: usize) {
        let waits = |node: &usize| self.pauses.waiting.contains_key(node);
        if !waits(&from) && !waits(&to) {
            self.pauses.severed.remove(&(from.min(to), from.max(to)));
        }
    }
}
