//! What must hold whatever comes. A node answers each request once and in time, says nothing that is longer than a frame or that
//! cannot be read again, gives no slot to two, hands nothing out whose digest is wrong, and names no tenant's jobs to another.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::{digest, root_digest};
use storaged_core::{ConnId, RequestId, Viewer};
use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
use storaged_wire::local::{Reply, Request};
use storaged_wire::peer::{CONTROL_FRAME_BYTES_MAX, PeerMessage};
use storaged_wire::{
    Digest, Enclosures, Manifest, ManifestBytes, Namespace, SlotId, TenantName, decode, encode,
};

use crate::testkit::Pid;

/// Requests that name no limit of their own are answered within this time.
const UNLIMITED_MS: u64 = 30_000;
/// No request waits longer.
const REQUEST_MAX_MS: u64 = 600_000;
/// What an answer may come later than its limit.
const LATE_MS: u64 = 1_000;

/// A request that has not been answered.
#[derive(Debug, Clone)]
pub struct Open {
    pub pid: Pid,
    pub request: Request,
    /// When its node heard it; none while that is paused.
    heard_at: Option<u64>,
    viewer: Viewer,
}

/// Who keeps the books of what nodes were asked and said.
#[derive(Debug, Default)]
pub struct Oracle {
    open: BTreeMap<RequestId, Open>,
    answered: BTreeSet<RequestId>,
    /// Who fills which slot.
    filled: BTreeMap<(Pid, SlotId), ConnId>,
    /// Every manifest that was told of, by a name that it has.
    manifests: BTreeMap<Digest, Manifest>,
}

impl Open {
    /// By when it must be answered; none as long as nobody has heard it.
    pub fn by(&self) -> Option<u64> {
        let heard_at = self.heard_at?;
        Some(heard_at + limit_ms(&self.request) + LATE_MS)
    }
}

impl Oracle {
    /// A request is about to be asked.
    pub fn asks(
        &mut self,
        id: RequestId,
        pid: Pid,
        heard_at: Option<u64>,
        viewer: Viewer,
        request: &Request,
    ) {
        let request = request.clone();
        let open = Open {
            pid,
            request,
            heard_at,
            viewer,
        };
        self.open.insert(id, open);
    }

    /// A node is paused and hears no more.
    pub fn pauses(&mut self, node: usize, now: u64) {
        let of_node = self.open.values_mut().filter(|open| open.pid.node == node);
        for open in of_node {
            open.heard_at = open.heard_at.filter(|at| *at <= now);
        }
    }

    /// A node that was paused hears what it was asked meanwhile.
    pub fn goes_on(&mut self, node: usize, now: u64) {
        let of_node = self.open.values_mut().filter(|open| open.pid.node == node);
        for open in of_node {
            open.heard_at = open.heard_at.or(Some(now));
        }
    }

    /// Whether something that was asked on a connection has not been answered.
    pub fn waits(&self, conn: ConnId) -> bool {
        self.open.keys().any(|id| id.conn == conn)
    }

    /// Requests that are to be answered.
    pub fn open(&self) -> impl Iterator<Item = (&RequestId, &Open)> {
        self.open.iter()
    }

    /// Nobody waits for answers on a connection any more.
    pub fn closes(&mut self, conn: ConnId) {
        self.open.retain(|id, _| id.conn != conn);
        self.filled.retain(|_, holder| *holder != conn);
    }

    /// A process is gone with all that it was asked.
    pub fn ends(&mut self, node: usize) {
        self.open.retain(|_, open| open.pid.node != node);
        self.filled.retain(|(pid, _), _| pid.node != node);
    }

    /// A message to a peer fits a frame and is read as it was written; gives its bytes.
    pub fn sends(&mut self, message: &PeerMessage) -> Vec<u8> {
        let bytes = encode(message);
        assert!(
            bytes.len() <= CONTROL_FRAME_BYTES_MAX,
            "a message of {} bytes",
            bytes.len()
        );
        let read: PeerMessage = decode("message", &bytes).expect("what a node says can be read");
        assert_eq!(read, *message, "what a node says is read as it was said");
        if let PeerMessage::Committed { manifest, .. } = message {
            self.tells_of(manifest);
        }
        bytes
    }

    /// A reply fits a frame, is read as it was written, is the only one, and is sound; gives what was asked.
    pub fn replies(&mut self, pid: Pid, id: RequestId, reply: &Reply) -> Option<Open> {
        let bytes = encode(reply);
        assert!(
            bytes.len() <= LOCAL_FRAME_BYTES_MAX,
            "a reply of {} bytes",
            bytes.len()
        );
        let read: Reply = decode("reply", &bytes).expect("a reply can be read");
        assert_eq!(read, *reply, "a reply is read as it was said");
        assert!(
            self.answered.insert(id),
            "a request is answered twice: {reply:?}"
        );
        let open = self.open.remove(&id)?;
        self.check_slot(pid, id.conn, &open.request, reply);
        self.check_bytes(&open.request, reply);
        self.check_owner(&open, reply);
        check_names(&open, reply);
        Some(open)
    }

    /// A slot that somebody fills is given to nobody else.
    fn check_slot(&mut self, pid: Pid, conn: ConnId, request: &Request, reply: &Reply) {
        match (request, reply) {
            (Request::AcquireSlot { .. }, Reply::SlotGranted { slot, .. }) => {
                let before = self.filled.insert((pid, *slot), conn);
                assert_eq!(before, None, "{slot:?} of {pid:?} is given to two");
            }
            (Request::SealSlot { slot, .. } | Request::ReleaseSlot { slot }, Reply::Done) => {
                self.filled.remove(&(pid, *slot));
            }
            _ => {}
        }
    }

    /// What is handed out has the digests by which it was asked for.
    fn check_bytes(&mut self, request: &Request, reply: &Reply) {
        match (request, reply) {
            (
                Request::GetManifest { manifest },
                Reply::Manifest {
                    bytes,
                    schema,
                    torch_metadata,
                },
            ) => {
                assert_eq!(digest(bytes), *manifest, "a manifest is what was asked for");
                self.tells_of(bytes);
                let record = &self.manifests[manifest];
                let named = Enclosures {
                    schema: schema.clone(),
                    torch_metadata: torch_metadata.clone(),
                };
                let proven = Enclosures::of(record, &named);
                assert_eq!(proven, Ok(named), "what it names is what it names");
            }
            (
                Request::OpenShard { manifest, rank, .. }
                | Request::FollowShard { manifest, rank, .. },
                Reply::ShardOpened {
                    length,
                    chunk,
                    leaves,
                    ..
                }
                | Reply::ShardComing {
                    length,
                    chunk,
                    leaves,
                    ..
                },
            ) => {
                let record = self.manifests.get(manifest);
                let Some(entry) = record.and_then(|record| record.shard(*rank)) else {
                    return;
                };
                assert_eq!(entry.length, *length, "a shard is as long as it says");
                let root = root_digest(leaves, *length, *chunk);
                assert_eq!(entry.root, root, "a shard has the digests of its manifest");
            }
            _ => {}
        }
    }

    /// A checkpoint is opened for its own tenant alone, whoever knows the digest of its manifest.
    fn check_owner(&self, open: &Open, reply: &Reply) {
        let manifest = match (&open.request, reply) {
            (Request::GetManifest { manifest }, Reply::Manifest { .. }) => manifest,
            (
                Request::OpenShard { manifest, .. } | Request::FollowShard { manifest, .. },
                Reply::ShardOpened { .. } | Reply::ShardComing { .. } | Reply::ShardCame(_),
            ) => manifest,
            _ => return,
        };
        if let Some(record) = self.manifests.get(manifest) {
            let is_own = is_of(&open.viewer, &record.namespace);
            assert!(
                is_own,
                "{:?} opens one of {}",
                open.viewer, record.namespace
            );
        }
    }

    /// A manifest went by.
    pub fn tells_of(&mut self, bytes: &[u8]) {
        if let Ok(read) = ManifestBytes::parse(bytes.to_vec()) {
            self.manifests.insert(read.name(), read.manifest().clone());
        }
    }

    /// Names of manifests that went by.
    pub fn manifests(&self) -> impl Iterator<Item = (&Digest, &Manifest)> {
        self.manifests.iter()
    }
}

/// Within how long a request is answered.
fn limit_ms(request: &Request) -> u64 {
    match request {
        Request::OpenRun { timeout_ms }
        | Request::AcquireSlot { timeout_ms, .. }
        | Request::Wait { timeout_ms, .. }
        | Request::Plan { timeout_ms, .. }
        | Request::OpenShard { timeout_ms, .. }
        | Request::Verify { timeout_ms, .. }
        | Request::Drop { timeout_ms, .. }
        | Request::Verdict { timeout_ms }
        | Request::PlanDrill { timeout_ms, .. } => u64::from(*timeout_ms).min(REQUEST_MAX_MS),
        Request::RestartFailed(report) => u64::from(report.timeout_ms).min(REQUEST_MAX_MS),
        _ => UNLIMITED_MS,
    }
}

/// Whether a job is that of whoever looks on, by its name and not as nodes tell it.
fn is_of(viewer: &Viewer, namespace: &Namespace) -> bool {
    match viewer {
        Viewer::Operator => true,
        Viewer::Tenant(tenant) => {
            let owner = namespace.as_str().split_once('~').map(|(owner, _)| owner);
            owner == tenant.as_ref().map(TenantName::as_str)
        }
        Viewer::Public => false,
    }
}

/// What is said to somebody names jobs of nobody else.
fn check_names(open: &Open, reply: &Reply) {
    let named: Vec<&Namespace> = match reply {
        Reply::Plan(plan) => vec![&plan.namespace],
        Reply::Checkpoints(all) => all.iter().map(|one| &one.namespace).collect(),
        Reply::Dropped(report) => vec![&report.namespace],
        Reply::Status(text) | Reply::Refused(storaged_wire::Refusal { message: text, .. }) => {
            return check_text(&open.viewer, &open.request, text);
        }
        _ => return,
    };
    for namespace in named {
        assert!(
            is_of(&open.viewer, namespace),
            "{:?} is told of {namespace}",
            open.viewer
        );
    }
}

fn check_text(viewer: &Viewer, request: &Request, text: &str) {
    let asked = format!("{request:?}");
    for foreign in ["blue~", "red~"] {
        let namespace = Namespace::new(format!("{foreign}job"));
        let hidden = namespace.is_ok_and(|namespace| !is_of(viewer, &namespace));
        // A name that somebody has said himself may be said back to him.
        assert!(
            !hidden || asked.contains(foreign) || !text.contains(foreign),
            "{viewer:?} is told {text}"
        );
    }
}
