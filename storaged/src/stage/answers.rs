//! How long answers are, before they are written down: what is long waits for memory first.

use storaged_codec::Fingerprint;
use storaged_wire::Digest;
use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
use storaged_wire::local::Reply;

/// A digest with what says that it is one, and a fingerprint likewise.
const LEAF_BYTES: usize = size_of::<Digest>() + 2;
const PRINT_BYTES: usize = size_of::<Fingerprint>() + 1;
/// What a plan says of a rank, and a listing of a checkpoint, with names of usual length.
const PLANNED_BYTES: usize = 128;
const LISTED_BYTES: usize = 256;

/// About so many bytes an answer takes; none of one that is never long.
pub(super) fn answer_bytes(reply: &Reply) -> usize {
    let bytes = match reply {
        Reply::Manifest {
            bytes,
            schema,
            torch_metadata,
        } => bytes.len() + schema.len() + torch_metadata.len(),
        Reply::ShardOpened {
            leaves,
            fingerprints,
            ..
        } => {
            let prints = fingerprints.as_ref().map_or(0, |prints| prints.len());
            leaves.len() * LEAF_BYTES + prints * PRINT_BYTES
        }
        Reply::ShardComing { leaves, .. } => leaves.len() * LEAF_BYTES,
        Reply::Plan(plan) => plan.shards.len() * PLANNED_BYTES,
        Reply::Verdict(verdict) => {
            let plan = verdict.plan.as_ref();
            plan.map_or(0, |plan| plan.shards.len() * PLANNED_BYTES)
        }
        Reply::Status(text) => text.len(),
        Reply::Checkpoints(found) => found.len() * LISTED_BYTES,
        _ => 0,
    };
    // A longer one is a frame that no client takes.
    bytes.min(LOCAL_FRAME_BYTES_MAX)
}
