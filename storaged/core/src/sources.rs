//! Whom something is fetched from, page by page: the first node is asked, again each second, until it answers, goes down or is
//! silent for too long; then the next one is.

use std::collections::VecDeque;

use storaged_wire::NodeName;

use crate::api::Now;
use crate::limits;

/// The nodes that may have it, best first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    nodes: VecDeque<NodeName>,
    /// When the page that is waited for was asked for last, and when first: none if it is to be asked for now.
    asked: Option<(Now, Now)>,
}

impl FromIterator<NodeName> for Sources {
    fn from_iter<I: IntoIterator<Item = NodeName>>(nodes: I) -> Self {
        let nodes = nodes.into_iter().collect();
        Self { nodes, asked: None }
    }
}

impl Sources {
    /// How many are left, the one that is asked included.
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Adds one that is asked after all others, unless it is among them.
    pub fn add(&mut self, node: &NodeName) {
        if !self.nodes.contains(node) {
            self.nodes.push_back(node.clone());
        }
    }

    /// Whether this is the one that is asked.
    pub fn is_asked(&self, node: &NodeName) -> bool {
        self.nodes.front() == Some(node)
    }

    /// The page that was asked for is here: the next one may be asked for at once.
    pub fn answered(&mut self) {
        self.asked = None;
    }

    /// The one that is asked is no use.
    pub fn next(&mut self) {
        self.nodes.pop_front();
        self.asked = None;
    }

    /// Whether the one that is asked is down, or has not answered for so long.
    pub fn is_silent(&self, now: Now, patience_ms: u64, is_up: impl Fn(&NodeName) -> bool) -> bool {
        let silent = |(_, first): (Now, Now)| now.since(first) >= patience_ms;
        let asked = self.nodes.front();
        asked.is_some_and(|node| !is_up(node) || self.asked.is_some_and(silent))
    }

    /// Whom to ask now, if it is time.
    pub fn ask(&mut self, now: Now) -> Option<&NodeName> {
        let node = self.nodes.front()?;
        let due = |(last, _): (Now, Now)| now.since(last) >= limits::REPEAT_MS;
        if !self.asked.is_none_or(due) {
            return None;
        }
        let first = self.asked.map_or(now, |(_, first)| first);
        self.asked = Some((now, first));
        Some(node)
    }
}
