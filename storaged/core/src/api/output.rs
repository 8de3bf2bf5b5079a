//! What to do. Whatever ends says so by the input of the same id.

use std::ops::Range;
use std::sync::Arc;

use storaged_wire::drain::DrainOrder;
use storaged_wire::local::Reply;
use storaged_wire::peer::PeerMessage;
use storaged_wire::{
    ChunkSize, ConsentKey, Digest, Enclosures, KeptRecord, ManifestBytes, ManifestKey, Namespace,
    NodeName, Owner, Rank, RecordName, Rotation, RunId, SessionId, SlotId, Step,
};

use super::{
    Authorship, CheckPart, Curation, Leftovers, Note, ParityId, Preparation, QueryId, RequestId,
    ScrubPiece, SessionWork, SlotShard, Trust, UploadBase,
};

/// Why a slot is digested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestCause {
    /// Its trainer has sealed it: the step is to be coded.
    Saved,
    /// It is back, from other nodes, from the durable tier or from the daemon before this one.
    Restored,
}

/// What becomes of a slot's memory at its end, where another process has it still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotEnd {
    /// It is given back at once: only trainers can have it, and nothing that they put there counts any more.
    GivenBack,
    /// It stays until the last process lets go: a reader may be copying out of it, or a rank writing its board.
    LeftToReaders,
}

/// What to do.
#[derive(Debug, Clone)]
pub enum Output {
    /// Write this where it outlives the daemon, before anything that comes after it is done.
    Keep(KeptRecord),
    /// What has this name is not needed any more.
    Forget(RecordName),
    /// Answer a request; `descriptor` is the slot whose memfd goes along.
    Reply {
        id: RequestId,
        reply: Reply,
        descriptor: Option<SlotId>,
    },
    /// Begin to end this node in order, or go on with it, and answer how far that is.
    Drain { id: RequestId, order: DrainOrder },
    /// Send a control message; it may be lost.
    Send { to: NodeName, message: PeerMessage },
    /// Make and preallocate a slot.
    CreateSlot { slot: SlotId, bytes: u64 },
    /// Unmap and close a slot.
    DropSlot { slot: SlotId, end: SlotEnd },
    /// Digest the first `length` bytes of a sealed slot, chunk by chunk.
    Digest {
        slot: SlotId,
        length: u64,
        chunk: ChunkSize,
        cause: DigestCause,
    },
    /// Do this node's part of a session.
    Run(SessionWork),
    /// A reader waits for what a session brings: hold this node's part of it back no longer.
    Hasten {
        leader: NodeName,
        session: SessionId,
    },
    /// End this node's part of a session.
    Stop {
        leader: NodeName,
        session: SessionId,
    },
    /// Free a parity set.
    DropParity { set: ParityId },
    /// Copy a shard to the durable tier.
    Upload {
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        shard: SlotShard,
        /// What it may be written against, if increments are wanted and there is one.
        base: Option<UploadBase>,
        leftovers: Leftovers,
    },
    /// Give up the upload of a shard: its checkpoint has left RAM or is not owed any more.
    StopUpload { manifest: Digest, rank: Rank },
    /// The checkpoint is given up: end the upload of this node's shard, and take back what is of it in the durable tier.
    Withdraw {
        manifest: Arc<ManifestBytes>,
        rank: Rank,
    },
    /// Write what the checkpoint's manifest names to the durable tier, then the manifest: all its shards are there.
    Publish {
        manifest: Arc<ManifestBytes>,
        enclosures: Enclosures,
        authorship: Authorship,
    },
    /// Find the newest manifests of a namespace in the durable tier.
    ListDurable {
        query: QueryId,
        namespace: Namespace,
        /// That step of any run; the newest ones without it.
        step: Option<Step>,
        trust: Trust,
    },
    /// Claim a run in the durable tier, by create-if-absent: above `above` and above every run that has a folder or a
    /// claim there.
    ClaimRun {
        query: QueryId,
        namespace: Namespace,
        owner: Owner,
        /// That of the token by which it is asked.
        consent: Option<ConsentKey>,
        above: u64,
        identity: u64,
    },
    /// Give a run its number in the registry, by create-if-absent, if that is above every other one's there.
    RegisterRun {
        query: QueryId,
        namespace: Namespace,
        run: RunId,
    },
    /// Claim a run in the durable tier that was opened without it.
    RecordRun {
        namespace: Namespace,
        owner: Owner,
        run: RunId,
    },
    /// Look for the claim of this very run in the durable tier.
    FindRun {
        query: QueryId,
        namespace: Namespace,
        run: RunId,
    },
    /// Read ranges of a shard from the durable tier into a slot and verify them. Empty: all of it.
    Fetch {
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        slot: SlotId,
        ranges: Vec<Range<u64>>,
        trust: Trust,
    },
    /// Look for changes of a job's token in the durable tier, and with a trust for its newest checkpoint.
    FindSuccessions {
        query: QueryId,
        namespace: Namespace,
        trust: Option<Trust>,
    },
    /// Write a change of a job's token to the durable tier, by create-if-absent; the key is that of the token that is changed.
    Succeed {
        query: QueryId,
        rotation: Rotation,
        retired: ManifestKey,
    },
    /// Pin, unpin or remove checkpoints in the durable tier, which must be the owner's.
    Curate {
        id: RequestId,
        namespace: Namespace,
        owner: Owner,
        curation: Curation,
    },
    /// Read and check parts.
    Check {
        query: QueryId,
        parts: Vec<CheckPart>,
    },
    /// Read a piece of a block again, and compare.
    Scrub { query: QueryId, piece: ScrubPiece },
    /// Work on a whole manifest, done beside the decisions.
    Prepare(Preparation),
    /// For logs and metrics.
    Note(Note),
}
