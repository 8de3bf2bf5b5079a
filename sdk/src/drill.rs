//! What a drill asks: which step, and its shards as if nodes were lost.

use storaged_wire::local::{ByteRange, Request};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{ManifestBytes, NodeName, Rank, Step};

use crate::client::Client;
use crate::error::ClientError;
use crate::restored::RestoredShard;

impl Client {
    /// Asks what a drill would decode: of the newest protected step, or of this one whatever its state, the shards that can be decoded from
    /// RAM. That some cannot is the first of what was passed over. It waits for no node that is down.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with `NoCheckpoint` if there is no such step, with `TooManyLost` if nothing of it can be decoded.
    pub fn plan_drill(
        &mut self,
        step: Option<Step>,
        timeout_ms: u32,
    ) -> Result<RestorePlan, ClientError> {
        self.planned(&Request::PlanDrill { step, timeout_ms }, timeout_ms)
    }

    /// Like [`Client::open_shard`], but as if these nodes were lost with their RAM, and without the durable tier: what they hold is not
    /// asked for, and stays as it is. The ranges take as much of the budget as the whole shard, and nothing gives way to them.
    ///
    /// # Errors
    /// As `open_shard`.
    pub fn open_shard_as_if_lost(
        &mut self,
        manifest: &ManifestBytes,
        rank: Rank,
        ranges: Vec<ByteRange>,
        timeout_ms: u32,
        lost: &[NodeName],
    ) -> Result<RestoredShard, ClientError> {
        let request = Request::OpenShard {
            manifest: manifest.name(),
            rank,
            ranges,
            timeout_ms,
            without: None,
            withheld: Some(lost.to_vec()),
            early: None,
        };
        self.open(manifest, rank, &request, timeout_ms)
    }
}
