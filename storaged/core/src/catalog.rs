//! The tables: what this node knows of its peers, slots, namespaces and checkpoints.

mod making_way;
mod opened;
mod owing;

pub(crate) use making_way::{GivingWay, GivingWayFor, HeldOff, Yielding};
pub(crate) use opened::OpenedSteps;
pub(crate) use owing::Owing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use storaged_codec::{Fingerprint, digest};
use storaged_wire::local::{BoardKind, DurableWish};
use storaged_wire::peer::{CheckpointKey, Fence, HighMark, Holding, Lane};
use storaged_wire::{
    CheckpointState, ChunkSize, Digest, Enclosure, EnclosuresHeld, Generation, ManifestBytes,
    Namespace, NodeName, Owner, Rank, RunId, SlotId, Step, WorldSize,
};

use crate::api::{ConnId, Now, ParityId, RequestId, SlotEnd, SlotShard};
use crate::failed_steps::FailedRestarts;
use crate::limits;
use crate::parcels::Notice;
use crate::pins::Pins;
use crate::place::PromisedTo;
use crate::successions::{EarlyHello, SaidToken};
use crate::vouched::Vouched;

/// A peer whose link is up, or was.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub generation: Generation,
    /// Since when it is so.
    pub since: Now,
    /// When its daemon was heard of first: a link that breaks off and comes back takes nothing from what it has.
    pub known_since: Now,
}

/// What a slot is in use for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// Being made for an acquire request.
    Creating(RequestId),
    /// Being made or filled for a reader on this node.
    Opening,
    /// Being made or filled by a session that repairs a shard of this node.
    Repairing,
    /// Nobody's.
    Free,
    /// A trainer fills it.
    Held(ConnId),
    /// Holds a shard of a checkpoint, or will once its digests are known.
    Sealed(CheckpointKey),
    /// Holds ranges of a shard for readers on this node; not part of any checkpoint's holding.
    Guest,
    /// A board, being made for a request.
    BoardComing(BoardKind, RequestId),
    /// Its rank's board: trainers write it and nobody else looks at it.
    Board(BoardKind),
}

impl SlotUse {
    /// What becomes of its memory when it goes. A step that has left RAM has left its slots free: its readers had gone before.
    pub fn end(&self) -> SlotEnd {
        match self {
            Self::Creating(_) | Self::Free | Self::Held(_) => SlotEnd::GivenBack,
            Self::Opening
            | Self::Repairing
            | Self::Sealed(_)
            | Self::Guest
            | Self::BoardComing(..)
            | Self::Board(_) => SlotEnd::LeftToReaders,
        }
    }

    /// Whether it is one of the slots that a rank saves in: not a reader's, and no board.
    pub fn is_for_saves(&self) -> bool {
        !matches!(
            self,
            Self::Opening | Self::Guest | Self::BoardComing(..) | Self::Board(_)
        )
    }
}

/// One slot.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub namespace: Namespace,
    pub rank: Rank,
    pub capacity: u64,
    pub used_for: SlotUse,
    /// Readers that had its shard open when chunks of it rotted: they count again once it is whole.
    pub readers_before: BTreeSet<ConnId>,
}

/// A shard sealed on this node.
#[derive(Debug, Clone)]
pub(crate) struct LocalShard {
    pub slot: SlotId,
    pub length: u64,
    /// Size of the chunks that it is digested in: its manifest's, or of a new one the configured size.
    pub chunk: ChunkSize,
    /// Known once digested.
    pub digests: Option<(Arc<[Digest]>, Digest)>,
    /// The chunks' fingerprints, once digested here; none of a restored shard till then.
    pub prints: Arc<[Fingerprint]>,
    /// Readers that have it open: it stays while there are any.
    pub readers: BTreeSet<ConnId>,
    /// Being uploaded, or uploaded.
    pub upload: Upload,
    /// Since when its digests are made, if they are not known.
    pub sealed_at: Now,
}

/// How far a shard's way to the durable tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Upload {
    /// Of a shard whose trainer had sealed an earlier step in this life of the daemon: nothing of it can be in the tier.
    Fresh,
    Idle,
    Running,
    RetryAt(Now),
    Done,
}

impl LocalShard {
    /// The shard with its digests, once they are known.
    pub fn sealed(&self) -> Option<SlotShard> {
        self.digests.as_ref().map(|(leaves, _)| SlotShard {
            slot: self.slot,
            length: self.length,
            chunk: self.chunk,
            leaves: leaves.clone(),
            prints: self.prints.clone(),
        })
    }
}

/// What a home node collects of a checkpoint before it commits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Announced {
    pub node: NodeName,
    pub length: u64,
    pub root: Digest,
}

/// How far the manifest of a checkpoint is at a home node that has heard of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sealing {
    /// Something has not been heard of.
    NotYet,
    Running,
    Over,
}

/// What a home node has noted of what a node announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Noted {
    /// Digest of the list of its shards.
    pub shards: Option<Digest>,
    /// Digest of the description, whoever gave it.
    pub description: Option<Digest>,
    /// When it said so.
    pub at: Now,
}

/// The shards that a node announced in one message: all that it has sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AnnouncedBy {
    pub ranks: BTreeSet<Rank>,
    /// Digest of the list.
    pub name: Digest,
}

/// The committing rank's description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Description {
    /// Digest of the names of the two below.
    pub name: Digest,
    pub schema: Enclosure,
    pub torch_metadata: Enclosure,
    pub durable: DurableWish,
    /// Whose groups code it: that of its node when it described it.
    pub epoch: u64,
}

impl Description {
    pub fn new(
        schema: Enclosure,
        torch_metadata: Enclosure,
        durable: DurableWish,
        epoch: u64,
    ) -> Self {
        let both = [schema.digest, torch_metadata.digest];
        let mut named = both.map(|it| *it.as_bytes()).concat();
        named.extend(epoch.to_le_bytes());
        Self {
            name: digest(&named),
            schema,
            torch_metadata,
            durable,
            epoch,
        }
    }

    /// What it names.
    pub fn named(&self) -> [Enclosure; 2] {
        [self.schema, self.torch_metadata]
    }
}

/// What a node was last told of a checkpoint, and has acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Told {
    pub state: CheckpointState,
    pub bears: u32,
}

/// One checkpoint as this node knows it.
#[derive(Debug, Clone)]
pub(crate) struct Checkpoint {
    pub key: CheckpointKey,
    pub owner: Owner,
    pub world_size: WorldSize,
    /// Its home nodes, best first.
    pub homes: Vec<NodeName>,
    pub first_seen: Now,
    /// When something new was last heard of it, here or at a home node, before it committed.
    pub news_at: Now,
    /// As a home node: when the other home nodes were last told of that.
    pub news_shared_at: Now,
    /// What home nodes have noted of what this node announced.
    pub noted_by: BTreeMap<NodeName, Noted>,
    /// When this node heard of the manifest.
    pub committed_at: Option<Now>,
    /// When home nodes that do not answer were last told of it once more, and how often they were.
    pub told_homes: Option<(Now, u32)>,
    pub state: CheckpointState,
    pub manifest: Option<Arc<ManifestBytes>>,
    pub durable_wish: DurableWish,
    /// Its way to the durable tier.
    pub owing: Owing,
    /// Shards in this node's RAM.
    pub shards: BTreeMap<Rank, LocalShard>,
    /// Parity sets in this node's RAM.
    pub parity: BTreeMap<(Lane, u32), ParityId>,
    /// Chunk digests of other nodes' shards of the lanes this node codes.
    pub leaves: BTreeMap<Rank, Arc<[Digest]>>,
    /// And their fingerprints.
    pub prints: BTreeMap<Rank, Arc<[Fingerprint]>>,
    /// What this node has to say to the home nodes: the description, if a trainer here gave it.
    pub description_here: Option<Description>,
    /// What this node says of it again and again, where that does not fit a message.
    pub parcels: BTreeMap<Notice, (Digest, u64)>,
    /// As a home node: shards announced.
    pub announced: BTreeMap<Rank, Announced>,
    /// As a home node: what each node announced last.
    pub announced_by: BTreeMap<NodeName, AnnouncedBy>,
    /// As a home node: the description.
    pub description: Option<Description>,
    /// As a home node: whether the manifest of what was announced is being made.
    pub sealing: Sealing,
    /// How often what was sealed was not what is announced still.
    pub sealed_anew: u8,
    /// As a home node: who has stored the manifest, and what it was last told.
    pub told: BTreeMap<NodeName, Told>,
    /// Which blocks are where.
    pub standing: crate::place::Standing,
    /// As a home node: shards in the durable tier.
    pub shards_durable: BTreeSet<Rank>,
    /// As a home node: the manifest is being written to the durable tier, or may be tried again at this time.
    pub publishing: Upload,
    /// Lanes that this node led to protection.
    pub lanes_led: BTreeSet<Lane>,
    /// Who told of its commit first.
    pub told_by: Option<NodeName>,
    /// Which node had no room for its part of it when this node heard of it last.
    pub no_room: Option<NoRoomThere>,
    /// Whether its parity here makes way for another step.
    pub yielding: Yielding,
    /// Whether all that is here of it gives way to a newer step.
    pub giving_way: Option<GivingWay>,
}

/// A node has no room for its part of a checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct NoRoomThere {
    pub node: NodeName,
    /// As it said.
    pub reason: String,
    pub refused: ParityRefused,
}

/// Since when some node has no room for parity, of one step or of any of a job's, and when one said so last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParityRefused {
    pub since: Now,
    pub heard_at: Now,
}

/// How a checkpoint that has left RAM ended.
#[derive(Debug, Clone)]
pub(crate) struct End {
    /// The furthest that it came.
    pub state: CheckpointState,
    pub name: Option<Digest>,
    /// Why it came no further, if anybody would ask.
    pub reason: String,
}

/// The last ends, for those who ask late.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ends {
    by_key: BTreeMap<CheckpointKey, End>,
    by_name: BTreeMap<Digest, CheckpointKey>,
    order: VecDeque<CheckpointKey>,
    given_up: VecDeque<GivenUp>,
    /// Apart from those: many forgeries at once would push out what was true.
    disowned: VecDeque<GivenUp>,
}

/// A committed checkpoint that was given up here, of which others may still tell.
#[derive(Debug, Clone)]
struct GivenUp {
    name: Digest,
    key: CheckpointKey,
    at: Now,
}

/// Why a committed checkpoint was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUpCause {
    /// A peer has given it up.
    Told,
    /// Those that should hold its shards have never heard of it.
    Disowned,
}

impl GivenUpCause {
    /// For so long it is not taken up again.
    fn refused_ms(self) -> u64 {
        match self {
            Self::Disowned if !planted!("disowned_commits_taken_again") => limits::DISOWNED_MS,
            Self::Told | Self::Disowned => limits::GIVEN_UP_HEARD_MS,
        }
    }

    /// So many are remembered.
    fn kept(self) -> usize {
        match self {
            Self::Told => limits::GIVEN_UP_KEPT,
            Self::Disowned => limits::DISOWNED_KEPT,
        }
    }
}

impl Ends {
    pub fn note(&mut self, key: CheckpointKey, end: End) {
        if let Some(name) = end.name {
            self.by_name.insert(name, key.clone());
        }
        if self.by_key.insert(key.clone(), end).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > limits::ENDS_KEPT {
            let oldest = self.order.pop_front();
            let end = oldest.and_then(|key| self.by_key.remove(&key));
            if let Some(name) = end.and_then(|end| end.name) {
                self.by_name.remove(&name);
            }
        }
    }

    pub fn of(&self, key: &CheckpointKey) -> Option<&End> {
        self.by_key.get(key)
    }

    /// A committed checkpoint was given up, which others may not have heard.
    pub fn note_given_up(
        &mut self,
        name: Digest,
        key: CheckpointKey,
        at: Now,
        cause: GivenUpCause,
    ) {
        let given_up = self.given_up_for(cause);
        if given_up.len() >= cause.kept() {
            given_up.pop_front();
        }
        given_up.push_back(GivenUp { name, key, at });
    }

    fn given_up_for(&mut self, cause: GivenUpCause) -> &mut VecDeque<GivenUp> {
        match cause {
            GivenUpCause::Told => &mut self.given_up,
            GivenUpCause::Disowned => &mut self.disowned,
        }
    }

    /// Which one it was that was given up.
    pub fn given_up(&self, name: Digest) -> Option<&CheckpointKey> {
        let mut all = self.given_up.iter().chain(&self.disowned);
        all.find(|it| it.name == name).map(|it| &it.key)
    }

    /// Whether it was given up so lately that it is not taken up again yet.
    pub fn is_refused(&self, name: Digest, now: Now) -> bool {
        let lately = |all: &VecDeque<GivenUp>, cause: GivenUpCause| {
            let is_late = |it: &GivenUp| now.since(it.at) < cause.refused_ms();
            all.iter().any(|it| it.name == name && is_late(it))
        };
        lately(&self.given_up, GivenUpCause::Told) || lately(&self.disowned, GivenUpCause::Disowned)
    }

    pub fn named(&self, name: Digest) -> Option<&End> {
        self.of(self.by_name.get(&name)?)
    }
}

impl Checkpoint {
    /// Whether some shard or parity of it is here.
    pub fn has_blocks(&self) -> bool {
        !self.shards.is_empty() || !self.parity.is_empty()
    }

    pub fn new(key: CheckpointKey, owner: Owner, world_size: WorldSize, now: Now) -> Self {
        Self {
            key,
            owner,
            world_size,
            homes: Vec::new(),
            first_seen: now,
            news_at: now,
            news_shared_at: now,
            noted_by: BTreeMap::new(),
            committed_at: None,
            told_homes: None,
            state: CheckpointState::Staged,
            manifest: None,
            durable_wish: DurableWish::Policy,
            owing: Owing::default(),
            shards: BTreeMap::new(),
            parity: BTreeMap::new(),
            leaves: BTreeMap::new(),
            prints: BTreeMap::new(),
            description_here: None,
            parcels: BTreeMap::new(),
            announced: BTreeMap::new(),
            announced_by: BTreeMap::new(),
            description: None,
            sealing: Sealing::NotYet,
            sealed_anew: 0,
            told: BTreeMap::new(),
            standing: crate::place::Standing::default(),
            shards_durable: BTreeSet::new(),
            publishing: Upload::Idle,
            lanes_led: BTreeSet::new(),
            told_by: None,
            no_room: None,
            yielding: Yielding::default(),
            giving_way: None,
        }
    }

    /// What was said to be in the durable tier need not be there any more.
    pub fn forget_copied(&mut self) {
        self.shards_durable.clear();
        self.owing.copied_at = None;
    }

    /// Whether nothing of it is here, and too few call it safe.
    pub fn is_bare(&self) -> bool {
        self.state < CheckpointState::Protected && !self.has_blocks()
    }

    /// The most losses that it can bear, once committed.
    pub fn parity_count(&self) -> Option<u32> {
        let manifest = self.manifest.as_ref()?.manifest();
        u32::try_from(manifest.geometry.m()).ok()
    }

    /// The name of its manifest, once committed.
    pub fn name(&self) -> Option<Digest> {
        self.manifest.as_ref().map(|manifest| manifest.name())
    }

    /// What this node holds of it.
    pub fn holding(&self, enclosures: EnclosuresHeld) -> Option<Holding> {
        Some(Holding {
            manifest: self.name()?,
            key: self.key.clone(),
            state: self.state,
            shards: self.shards_held().collect(),
            parity: self.parity.keys().copied().collect(),
            enclosures,
        })
    }

    /// Ranks whose shards belong here and whose tables alone are here; a planted bug takes them for held.
    pub fn own_tables<'a>(&'a self, me: &'a NodeName) -> impl Iterator<Item = Rank> + 'a {
        let manifest = self.manifest.iter();
        let entries = manifest.flat_map(|it| &it.manifest().shards);
        let own = entries.filter(move |it| it.node == *me).map(|it| it.rank);
        own.filter(|rank| self.leaves.contains_key(rank) && !self.shards.contains_key(rank))
    }

    fn shards_held(&self) -> impl Iterator<Item = Rank> + '_ {
        self.shards
            .iter()
            .filter(|(_, shard)| shard.digests.is_some())
            .map(|(rank, _)| *rank)
    }
}

/// A run that was opened without the durable tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unrecorded {
    /// To be told from this time on.
    Due(Now, RunId),
    /// Being told.
    Running(RunId),
}

/// The question whether the durable tier has a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierQuestion {
    pub manifest: Digest,
    pub asked_at: Now,
}

/// What one peer says of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Word {
    pub fence: Option<RunId>,
    pub promised: Option<RunId>,
}

/// What the name of a job rests on at a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    /// On nothing: there are boards alone. Only who opens a run has asked others whose the job is.
    Boards,
    /// On a run, or on what was promised to who opens one.
    Held,
}

/// A namespace as this node knows it.
#[derive(Debug, Clone)]
pub(crate) struct NamespaceTable {
    pub owner: Owner,
    pub claim: Claim,
    /// Runs below are fenced off.
    pub fence: RunId,
    /// The highest run that was promised to whoever opens it, here or at a peer.
    pub promised: RunId,
    /// The highest that this node has promised.
    pub granted: RunId,
    /// When it has promised something last.
    pub granted_at: Now,
    /// To whom it has promised runs that are not withdrawn.
    pub promised_to: PromisedTo,
    /// What each peer says of its runs; it counts once enough say so.
    pub words: BTreeMap<NodeName, Word>,
    /// What peers say who call the job another owner's.
    pub rivals: BTreeMap<NodeName, Fence>,
    /// When all were asked whose it is.
    pub owner_asked: Option<Now>,
    /// The run that the durable tier has not heard of yet.
    pub unrecorded: Option<Unrecorded>,
    /// World sizes said by trainers here, per run.
    pub world_sizes: BTreeMap<RunId, WorldSize>,
    /// Last step sealed here, per run and rank.
    pub last_step: BTreeMap<(RunId, Rank), Step>,
    /// The highest checkpoint known to have been protected.
    pub mark: Option<HighMark>,
    /// The highest checkpoint of which this node has copied a shard to the durable tier: whoever wrote its manifest may have gone
    /// before anybody heard that it is durable.
    pub copied: Option<HighMark>,
    /// Steps that restarts have failed from.
    pub failed: FailedRestarts,
    /// Which steps were opened here, to go on from.
    pub opened: OpenedSteps,
    /// Steps that are pinned in RAM.
    pub pins: Pins,
    /// Those of which this node has lost all, as a home node, and others tell.
    pub vouched: Vouched,
    /// Up to here the job's checkpoints have left RAM for another job, or were dropped.
    pub evicted: Option<HighMark>,
    /// Why checkpoints were given up, for those who wait for them.
    pub abandoned: BTreeMap<(RunId, Step), String>,
    /// Since when no step is protected for want of room.
    pub parity_refused: Option<ParityRefused>,
}

impl NamespaceTable {
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            claim: Claim::Held,
            fence: RunId::ZERO,
            promised: RunId::ZERO,
            granted: RunId::ZERO,
            granted_at: Now::default(),
            promised_to: PromisedTo::default(),
            words: BTreeMap::new(),
            rivals: BTreeMap::new(),
            owner_asked: None,
            unrecorded: None,
            world_sizes: BTreeMap::new(),
            last_step: BTreeMap::new(),
            mark: None,
            copied: None,
            failed: FailedRestarts::default(),
            opened: OpenedSteps::default(),
            pins: Pins::default(),
            vouched: Vouched::default(),
            evicted: None,
            abandoned: BTreeMap::new(),
            parity_refused: None,
        }
    }
}

/// Who a connection said it is.
#[derive(Debug, Clone)]
pub(crate) struct Attached {
    pub namespace: Namespace,
    pub owner: Owner,
    /// By which token; none of an operator who has another one.
    pub said: Option<SaidToken>,
    /// Of who came before this node had heard of the job.
    pub early: Option<EarlyHello>,
    pub trainer: Option<(RunId, Rank, WorldSize)>,
    /// Slots whose descriptor this connection was given.
    pub slots_passed: BTreeSet<SlotId>,
    /// It has been refused a slot, and was given none since.
    pub refused_slot: Option<RefusedSlot>,
}

/// Requests of a trainer for a slot that were refused one after another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RefusedSlot {
    /// When the first of them came.
    pub lacking_since: Now,
    /// When the last was refused.
    pub last: Now,
}

impl Attached {
    /// An operator reads all jobs; a run, which ends the trainers of the one before, is opened by the job's token.
    pub fn opens_runs(&self) -> bool {
        self.said.is_some() || planted!("operators_open_runs")
    }
}

/// A request that waits.
#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    pub id: RequestId,
    pub deadline: Now,
    pub wish: WaiterWish,
}

/// What it waits for.
#[derive(Debug, Clone)]
pub(crate) enum WaiterWish {
    Slot {
        bytes: u64,
        since: Now,
        /// Since when it has asked in vain.
        lacking_since: Now,
        /// The caller's own limit; that of the waiter may be shorter.
        until: Now,
    },
    State {
        key: CheckpointKey,
        state: CheckpointState,
    },
}
