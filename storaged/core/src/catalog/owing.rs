//! What a checkpoint still owes the durable tier.

use std::collections::BTreeSet;

use storaged_wire::NodeName;

use crate::api::Now;
use crate::limits;

/// A checkpoint's way to the durable tier, beside the state of each upload.
#[derive(Debug, Clone, Default)]
pub(crate) struct Owing {
    /// Why its durable copy was given up, if it was.
    pub given_up: Option<String>,
    /// What the tier last said against it, here or at another node.
    pub failed: Option<String>,
    /// Nodes that have retired it: when all home nodes have, nobody will publish it.
    pub retired_at: BTreeSet<NodeName>,
    /// As a home node: when all shards were in the tier, so that its manifest may follow.
    pub copied_at: Option<Now>,
    /// As a home node: home nodes whose manifest the tier has not taken since then.
    pub unpublished_by: BTreeSet<NodeName>,
    /// As a home node: nodes with shards of it that take it for durable.
    said_durable_by: BTreeSet<NodeName>,
    /// When the last of them said so first.
    said_durable_at: Now,
    /// When the tier was asked in vain first since then.
    asked_in_vain: Option<Now>,
    /// The tier was looked into long enough, and does not have it.
    is_not_in_tier: bool,
}

impl Owing {
    /// Whether a node will not copy its shards: it takes the checkpoint for durable, and the tier does not have it.
    pub fn will_not_be_copied_by(&self, node: &NodeName) -> bool {
        self.is_not_in_tier && self.said_durable_by.contains(node)
    }

    /// A node takes it for durable: what the tier has was not looked for yet, or before it was there.
    pub fn is_said_durable(&mut self, by: &NodeName, now: Now) {
        if self.said_durable_by.insert(by.clone()) {
            self.said_durable_at = now;
            self.asked_in_vain = None;
            self.is_not_in_tier = false;
        }
    }

    /// The tier, asked then, does not have it. A listing may lag behind what was written.
    pub fn is_missed_in_tier(&mut self, asked_at: Now) {
        if asked_at < self.said_durable_at {
            return;
        }
        let first = *self.asked_in_vain.get_or_insert(asked_at);
        self.is_not_in_tier |=
            asked_at.since(first) >= limits::LISTINGS_LAG_MS || planted!("one_listing_is_enough");
    }

    /// Whether some node has let it go because something newer is safe.
    pub fn is_retired_somewhere(&self) -> bool {
        !self.retired_at.is_empty()
    }
}
