//! Sound records to start from: every message there is, with fields of every kind.

use minicbor::bytes::ByteVec;
use storaged_wire::local::{
    Bears, BoardKind, ByteRange, CheckpointInfo, DropReport, DroppedNode, DurableWish, Keep,
    KeptFor, LiveRun, PinnedOnes, Removal, Reply, Request, Role, Rung, VerifiedPart, VerifyReport,
};
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{
    CheckpointKey, DropAnswer, Fence, HighMark, Holding, Lane, LinkTally, NamedRun, NamespaceMark,
    ParcelPlace, PeerMessage, PromiseOutcome, Relay, SealedShard, SessionFault, SessionKind,
    SessionRecord, StreamRecord, SumChecks, TablePage, TablePlace, UnowedCause,
};
use storaged_wire::plan::{
    CopyFault, PassedOverCause, RestorePlan, ShardSource, Source, Unrestorable,
};
use storaged_wire::provenance::KeyWanted;
use storaged_wire::shape::{EncodeShape, RepairShape, StripeMap};
use storaged_wire::{
    CheckpointState, ChunkSize, Digest, Enclosed, Enclosure, EnclosuresHeld, Fingerprint,
    Generation, Geometry, Manifest, Namespace, NodeName, Owner, Rank, Refusal, RefusalCode, RunId,
    SessionId, ShardEntry, SlotId, Step, WorldSize,
};

use super::{restart, running, succession};

pub fn link_tally(name: &str) -> LinkTally {
    LinkTally {
        node: node(name),
        bytes: 1 << 20,
        waiting_ms: 900,
    }
}

pub fn node(name: &str) -> NodeName {
    NodeName::new(name).expect("a node name")
}

pub fn namespace() -> Namespace {
    Namespace::new("llama-70b.v2").expect("a namespace")
}

pub fn some_digest() -> Digest {
    Digest::from_bytes(&[0xD1; 32])
}

fn bytes() -> ByteVec {
    ByteVec::from(vec![1, 2, 3, 4])
}

fn world_size() -> WorldSize {
    WorldSize::new(2).expect("a world size")
}

pub fn chunk() -> ChunkSize {
    ChunkSize::new(1 << 16).expect("a chunk size")
}

fn key() -> CheckpointKey {
    CheckpointKey {
        namespace: namespace(),
        run: RunId::new(3),
        step: Step::new(1 << 40),
    }
}

fn fence() -> Fence {
    Fence {
        namespace: namespace(),
        owner: Owner::of_token(b"t"),
        run: RunId::new(9),
        promised: RunId::with_identity(10, u64::MAX),
    }
}

fn named_run() -> NamedRun {
    NamedRun {
        namespace: namespace(),
        owner: Owner::of_token(b"t"),
        run: RunId::with_identity(10, 7),
    }
}

fn freed() -> DropAnswer {
    DropAnswer::Freed {
        bytes: 1 << 40,
        checkpoints: 3,
    }
}

pub fn mark() -> HighMark {
    HighMark {
        run: RunId::new(3),
        step: Step::new(1 << 40),
    }
}

fn lane() -> Lane {
    Lane { group: 1, index: 2 }
}

fn table_place() -> TablePlace {
    TablePlace {
        manifest: some_digest(),
        rank: Rank::new(1),
        first: 16_384,
    }
}

fn parcel_place() -> ParcelPlace {
    ParcelPlace {
        parcel: some_digest(),
        offset: 1 << 19,
    }
}

fn table_page() -> TablePage {
    TablePage {
        leaves: vec![some_digest(); 2],
        prints: vec![Fingerprint::from_bytes([7; 16]); 2],
    }
}

fn part() -> VerifiedPart {
    VerifiedPart {
        node: node("a"),
        what: "shard of rank 3".into(),
        bytes: 77,
        fault: Some("flipped".into()),
    }
}

/// A manifest of two ranks.
pub fn manifest() -> Manifest {
    let shard = |rank: u32, name: &str| ShardEntry {
        rank: Rank::new(rank),
        node: node(name),
        length: 100_000,
        root: some_digest(),
    };
    Manifest {
        version: Manifest::VERSION,
        namespace: namespace(),
        owner: Owner::of_token(b"t"),
        run: RunId::new(2),
        step: Step::new(40),
        world_size: world_size(),
        epoch: 1,
        geometry: Geometry::new(2, 1).expect("a geometry"),
        chunk: chunk(),
        shards: vec![shard(0, "a"), shard(1, "b")],
        groups: vec![GroupEntry {
            data: vec![node("a"), node("b")],
            coding: vec![node("c")],
        }],
        schema: Enclosed::naming(&bytes()),
        torch_metadata: Enclosed::nothing(),
    }
}

pub fn requests() -> Vec<Request> {
    [
        trainers_requests(),
        operators_requests(),
        restart::requests(),
        succession::requests(),
    ]
    .concat()
}

fn trainers_requests() -> Vec<Request> {
    let (manifest, rank, step) = (some_digest(), Rank::new(1), Step::new(5));
    let role = Role::Trainer {
        run: RunId::new(2),
        rank,
        world_size: world_size(),
    };
    let hello = |role| Request::Hello {
        version: 1,
        namespace: namespace(),
        token: bytes(),
        role,
    };
    let (slot, timeout_ms) = (SlotId::new(4), 1000);
    vec![
        hello(role),
        hello(Role::Reader),
        Request::OpenRun { timeout_ms },
        Request::AcquireSlot {
            bytes: 1 << 33,
            timeout_ms,
        },
        Request::SealSlot {
            slot,
            step,
            length: 9,
        },
        Request::ReleaseSlot { slot },
        Request::Board {
            rank: Rank::new(3),
            kind: BoardKind::Batches,
            bytes: 1 << 20,
        },
        Request::Commit {
            step,
            schema: bytes().into(),
            torch_metadata: bytes().into(),
            durable: DurableWish::Required,
        },
        Request::Wait {
            run: RunId::new(2),
            step,
            state: CheckpointState::Protected,
            timeout_ms,
        },
        Request::Plan {
            step: Some(step),
            timeout_ms,
            allow_older: true,
        },
        Request::GetManifest { manifest },
        Request::OpenShard {
            manifest,
            rank,
            ranges: vec![ByteRange {
                offset: 4096,
                length: u64::MAX,
            }],
            timeout_ms,
            without: Some(Rung::OwnRam),
            withheld: Some(vec![node("n1")]),
            early: Some(true),
        },
        Request::CloseShard { manifest, rank },
    ]
}

fn operators_requests() -> Vec<Request> {
    let timeout_ms = 1000;
    vec![
        Request::Status,
        Request::List {
            namespace: Some(namespace()),
        },
        Request::Drop {
            force: true,
            timeout_ms,
        },
        Request::Verify {
            step: None,
            timeout_ms,
        },
        Request::RestartSafe { bears: Some(1) },
        Request::Keep {
            run: None,
            step: Step::new(2),
            keep: Keep::Pin,
        },
        Request::Remove(Removal::All, LiveRun::Too, Some(PinnedOnes::Too)),
        Request::Remove(
            Removal::Step {
                run: None,
                step: Step::new(2),
            },
            LiveRun::Spared,
            None,
        ),
    ]
}

pub fn plan() -> RestorePlan {
    let source = |source| ShardSource {
        rank: Rank::new(0),
        length: 5,
        source,
    };
    RestorePlan {
        namespace: namespace(),
        run: RunId::new(2),
        step: Step::new(40),
        manifest: some_digest(),
        world_size: world_size(),
        state: CheckpointState::Committed,
        shards: vec![
            source(Source::Ram(node("a"))),
            source(Source::Decode(vec![node("a"), node("b")])),
            source(Source::Durable),
        ],
        expected_ms: 12,
        passed_over: vec![Unrestorable {
            run: RunId::new(1),
            step: Step::new(50),
            reason: "two nodes are gone".into(),
            cause: Some(PassedOverCause::ShardsLost),
            copy: Some(CopyFault::Forged),
        }],
    }
}

pub fn replies() -> Vec<Reply> {
    [readers_replies(), restart::replies(), succession::replies()].concat()
}

fn readers_replies() -> Vec<Reply> {
    vec![
        Reply::Welcome {
            node: node("a"),
            generation: Generation::new(u64::MAX),
            geometry: Geometry::new(4, 2).ok(),
            chunk: chunk(),
        },
        Reply::RunOpened { run: RunId::new(2) },
        Reply::SlotGranted {
            slot: SlotId::new(1),
            capacity: 2 << 20,
            descriptor: true,
        },
        Reply::Done,
        Reply::Reached {
            state: CheckpointState::Durable,
            manifest: Some(some_digest()),
            bears: Some(Bears { losses: 1, of: 2 }),
        },
        Reply::RestartSafe(vec!["job: step 3 bears 0 of 2".into()]),
        Reply::Plan(plan()),
        Reply::Manifest {
            bytes: bytes().into(),
            schema: bytes().into(),
            torch_metadata: Vec::new().into(),
        },
        Reply::ShardOpened {
            length: 9,
            chunk: chunk(),
            leaves: vec![some_digest(); 3].into(),
            rung: Rung::OwnRam,
            fingerprints: Some(vec![Fingerprint::ZERO; 3].into()),
        },
        Reply::Status("{}".into()),
        Reply::Checkpoints(vec![CheckpointInfo {
            namespace: namespace(),
            run: RunId::new(1),
            step: Step::new(2),
            state: CheckpointState::Staged,
            durable: false,
            world_size: world_size(),
            length: 3,
            manifest: None,
            bears: None,
            kept_for: Some(KeptFor::Reader),
            pinned: Some(true),
        }]),
        Reply::Verified(VerifyReport {
            manifest: some_digest(),
            step: Step::new(2),
            parts: vec![part()],
        }),
        Reply::Dropped(DropReport {
            namespace: namespace(),
            nodes: vec![DroppedNode {
                node: node("a"),
                answer: freed(),
            }],
            silent: vec![node("b")],
        }),
        Reply::Refused(Refusal::new(RefusalCode::BudgetFull, "expected room")),
        Reply::Removed {
            checkpoints: 2,
            objects: 9,
        },
    ]
}

pub fn stream_record() -> StreamRecord {
    StreamRecord {
        leader: node("a"),
        session: SessionId::new(7),
        edge: 3,
    }
}

/// About checkpoints and fences.
pub fn checkpoint_messages() -> Vec<PeerMessage> {
    [
        run_messages(),
        succession::messages(),
        step_messages(),
        copy_messages(),
        namespace_messages(),
        restart::messages(),
    ]
    .concat()
}

fn run_messages() -> Vec<PeerMessage> {
    let query = 6;
    vec![
        PeerMessage::Fences(vec![fence()]),
        PeerMessage::PromiseRun {
            query,
            run: named_run(),
        },
        PeerMessage::WithdrawRun(named_run()),
        PeerMessage::RunPromised {
            query,
            run: RunId::with_identity(10, 7),
            outcome: PromiseOutcome::Taken { highest: u64::MAX },
        },
        PeerMessage::RunPromised {
            query,
            run: RunId::with_identity(10, 7),
            outcome: PromiseOutcome::Promised,
        },
        PeerMessage::RaiseFence {
            query,
            run: named_run(),
        },
        PeerMessage::FenceRaised { query },
        PeerMessage::RunQuery {
            query,
            namespace: namespace(),
        },
        PeerMessage::RunAnswer {
            query,
            fence: Some(fence()),
        },
    ]
}

fn step_messages() -> Vec<PeerMessage> {
    let (owner, manifest) = (Owner::of_token(b"t"), some_digest());
    let (world_size, rank) = (world_size(), Rank::new(1));
    let state = CheckpointState::Protected;
    vec![
        PeerMessage::ShardsSealed {
            key: key(),
            owner,
            world_size,
            shards: vec![SealedShard {
                rank,
                length: 10,
                root: manifest,
            }],
            digesting: 1,
        },
        PeerMessage::SealedNoted {
            key: key(),
            shards: Some(manifest),
            description: None,
            quiet_ms: 5,
        },
        PeerMessage::Description {
            key: key(),
            owner,
            world_size,
            schema: Enclosure::of(&bytes()),
            torch_metadata: Enclosure::of(&[]),
            durable: DurableWish::Never,
            epoch: 3,
        },
        PeerMessage::Committed {
            manifest: bytes().into(),
            durable: DurableWish::Policy,
        },
        PeerMessage::ManifestStored {
            manifest,
            state,
            bears: 1,
        },
        PeerMessage::Abandoned {
            key: key(),
            reason: "rank 2 died".into(),
        },
        PeerMessage::Protected { manifest, bears: 2 },
    ]
}

fn copy_messages() -> Vec<PeerMessage> {
    let (manifest, rank) = (some_digest(), Rank::new(1));
    vec![
        PeerMessage::Held {
            manifest,
            version: 3,
            shards: vec![rank],
            parity: vec![(lane(), 1)],
            enclosures: EnclosuresHeld::All,
        },
        PeerMessage::HeldNoted {
            manifest,
            version: 3,
        },
        PeerMessage::Owed {
            manifest,
            done: vec![rank],
        },
        PeerMessage::Unowed {
            manifest,
            cause: UnowedCause::GivenUp("the tier is slower than the steps".into()),
        },
        PeerMessage::Unowed {
            manifest,
            cause: UnowedCause::Retired,
        },
        PeerMessage::Superseded {
            key: key(),
            reason: "a newer step needs its slot".into(),
        },
        PeerMessage::DurableFailed {
            manifest,
            reason: "no room".into(),
        },
        PeerMessage::Draining { turn: 2 },
        PeerMessage::DrainNoted { turn: Some(3) },
        PeerMessage::DrainNoted { turn: None },
        PeerMessage::KeyWanted(KeyWanted {
            namespace: key().namespace,
            owner: Owner::of_token(b"t"),
        }),
        PeerMessage::DurableRemoved {
            namespace: key().namespace,
            owner: Owner::of_token(b"t"),
        },
        PeerMessage::Durable { manifest },
        PeerMessage::Quarantined {
            manifest,
            key: key(),
            reason: "digest mismatch in chunk 1".into(),
        },
        PeerMessage::NoRoom {
            manifest,
            node: node("a"),
            reason: "needs 3 bytes".into(),
        },
    ]
}

fn namespace_messages() -> Vec<PeerMessage> {
    let (owner, manifest, query) = (Owner::of_token(b"t"), some_digest(), 6);
    let (rank, state) = (Rank::new(1), CheckpointState::Protected);
    vec![
        PeerMessage::HoldingsQuery {
            query,
            namespace: namespace(),
        },
        PeerMessage::Holdings {
            query,
            owner: Some(owner),
            holdings: vec![Holding {
                manifest,
                key: key(),
                state,
                shards: vec![rank],
                parity: vec![(lane(), 1)],
                enclosures: EnclosuresHeld::NotAll,
            }],
            mark: Some(mark()),
            copied: Some(mark()),
        },
        PeerMessage::Marks(vec![NamespaceMark {
            namespace: namespace(),
            owner,
            mark: mark(),
        }]),
        PeerMessage::Attached(vec![namespace()]),
        PeerMessage::Evicted {
            namespace: namespace(),
            up_to: mark(),
            durable: true,
        },
        PeerMessage::Dropped {
            query,
            answer: freed(),
        },
        PeerMessage::Dropped {
            query,
            answer: DropAnswer::Refused("it has trainers".into()),
        },
        PeerMessage::ManifestQuery { query, manifest },
        PeerMessage::ManifestAnswer {
            query: Some(query),
            manifest: Some(bytes()),
        },
        PeerMessage::VerifyQuery { query, manifest },
        PeerMessage::VerifyAnswer {
            query,
            parts: vec![part()],
        },
    ]
}

/// About sessions.
pub fn session_messages() -> Vec<PeerMessage> {
    [
        messages_before_a_session_runs(),
        messages_that_are_fetched(),
        running::messages_while_it_runs(),
    ]
    .concat()
}

fn messages_before_a_session_runs() -> Vec<PeerMessage> {
    let session = SessionId::new(7);
    let propose = |kind| {
        PeerMessage::Propose(SessionRecord {
            session,
            manifest: some_digest(),
            kind,
        })
    };
    let failed = |fault| PeerMessage::Failed { session, fault };
    let stripes = StripeMap {
        stripes: 9,
        bits: vec![0x81, 1].into(),
    };
    let begin = |shape| PeerMessage::Begin {
        session,
        stripes: Some(stripes.clone()),
        shape,
    };
    vec![
        propose(SessionKind::Encode {
            lane: lane(),
            basis: Some(some_digest()),
            checks: SumChecks::Parity,
            parities: vec![0, 1],
        }),
        propose(SessionKind::Encode {
            lane: lane(),
            basis: None,
            checks: SumChecks::Every,
            parities: vec![1],
        }),
        propose(SessionKind::Repair {
            lane: lane(),
            survivors: vec![0, 2],
            wanted: vec![(1, node("b"))],
            stripes: vec![(5, u64::MAX)],
            shape: RepairShape::Gather,
        }),
        PeerMessage::Ready {
            session,
            stripes: Some(stripes.clone()),
        },
        PeerMessage::Preparing { session },
        PeerMessage::RepairAwaited {
            leader: node("a"),
            session,
        },
        failed(SessionFault::NoManifest),
        failed(SessionFault::NoRoom("full".into())),
        failed(SessionFault::Neighbour {
            node: node("c"),
            reason: "slow".into(),
        }),
        failed(SessionFault::WrongBytes {
            node: node("c"),
            reason: "stripe 3".into(),
        }),
        begin(None),
        begin(Some(EncodeShape::Chain { order: vec![] })),
        begin(Some(EncodeShape::Tree {
            fan_in: 3,
            order: vec![1, 0],
        })),
        begin(Some(EncodeShape::GatherAtSources { roots: vec![2, 3] })),
        begin(Some(EncodeShape::GatherAtKeepers)),
    ]
}

fn messages_that_are_fetched() -> Vec<PeerMessage> {
    vec![
        PeerMessage::Parcel {
            parcel: some_digest(),
            length: 1 << 25,
            relay: None,
        },
        PeerMessage::Parcel {
            parcel: some_digest(),
            length: 1 << 25,
            relay: Some(Relay {
                of: node("a"),
                to: vec![node("b"), node("c")],
            }),
        },
        PeerMessage::ParcelQuery(parcel_place()),
        PeerMessage::ParcelPage {
            place: parcel_place(),
            bytes: vec![1, 2, 3].into(),
        },
        PeerMessage::TableQuery(table_place()),
        PeerMessage::TablePage {
            place: table_place(),
            page: table_page(),
        },
        PeerMessage::TablePage {
            place: table_place(),
            page: TablePage::default(),
        },
    ]
}
