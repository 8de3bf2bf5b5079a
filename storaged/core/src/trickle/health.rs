//! What a node knows of the durable tier itself: whether it answers, and which checkpoints in it proved damaged.

use std::collections::BTreeMap;

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, NodeName};

use crate::api::{DurableFault, Now};

/// The durable tier as this node knows it.
#[derive(Debug, Default)]
pub(crate) struct TierHealth {
    /// Why it did not do what was asked last; none while it does.
    pub(super) fault: Option<DurableFault>,
    /// That it answers nobody who writes, though it may answer who reads.
    pub(super) unwritten: Option<DurableFault>,
    /// When it was found last that it is configured wrongly.
    pub(super) misconfigured_at: Option<Now>,
    /// Damaged checkpoints, and what was found.
    pub(super) quarantined: BTreeMap<Digest, Damaged>,
    /// The same by name, with what the newest listing of their namespace has said, for whoever looks.
    pub(super) damaged: BTreeMap<CheckpointKey, String>,
}

/// A checkpoint in the tier that proved damaged.
#[derive(Debug, Clone)]
pub(super) struct Damaged {
    pub(super) key: CheckpointKey,
    pub(super) reason: String,
    pub(super) found: FoundBy,
    /// The tier has a mark of it, as far as is known here: what it says counts for whoever comes later.
    pub(super) is_marked: bool,
    pub(super) at: Now,
}

/// Who found it damaged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FoundBy {
    Here,
    Peer(NodeName),
}

/// Text that needs no escaping in JSON.
pub(crate) fn plain(text: &str) -> String {
    let plain = |c: char| match c {
        '"' => '\'',
        '\\' => '/',
        c if c.is_control() => ' ',
        c => c,
    };
    text.chars().map(plain).collect()
}
