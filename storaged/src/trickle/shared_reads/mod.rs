//! Restarts in which many nodes read the same bytes of the durable tier, such as parameters that replicas share. Each piece of an
//! object is one node's to read, by a hash of its place among those that are up (rendezvous hashing: Thaler and Ravishankar, 1998),
//! and that one passes it on. So the tier serves each byte about once, however many want it. Nothing depends on it: what a peer does
//! not give in time is read here, and every chunk is checked against the manifest whoever it came from.

mod pieces;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_codec::digest;
use storaged_wire::{NodeName, decode, encode};
use thiserror::Error;
use tokio::time::Instant;

use super::store::{ObjectKey, Store, StoreError};
pub use pieces::HeldPiece;
use pieces::{ObjectPiece, Pieces};

/// Longer pieces are not passed on: a window whose chunks zstd could not shrink is a little longer than its bytes.
const PIECE_BYTES_MAX: u64 = super::FETCH_BYTES + (1 << 20);
/// A peer has so long before this node has read anything itself; then as long as it says ([`SharedReads::patience`]).
const PATIENCE: Duration = Duration::from_secs(30);
const PATIENCE_MIN: Duration = Duration::from_secs(5);
const PATIENCE_MAX: Duration = Duration::from_secs(60);
/// A peer that is late or gives something else is not asked for so long, and twice as long each time.
const DOUBT: Duration = Duration::from_secs(30);
/// But no longer than 2 to this power.
const DOUBLINGS_MAX: u32 = 4;
/// One that has no room is sound: it is asked again soon.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The other nodes, as far as they pass on what they read.
#[async_trait]
pub trait Fellows: Send + Sync + Debug {
    /// This node.
    fn me(&self) -> &NodeName;

    /// Those that are up and answer.
    fn up(&self) -> Vec<NodeName>;

    /// Asks one of them for a piece of so many bytes.
    ///
    /// # Errors
    /// Why it does not come.
    async fn ask(&self, whom: &NodeName, piece: Bytes, bytes: u64) -> Result<Bytes, FellowError>;
}

/// Whether nodes pass on to one another what they read from the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedReadsMode {
    /// Where each node's connections to the tier are what limits it: of S3, GCS and Azure.
    #[default]
    Auto,
    /// Of a directory too: a file server that all nodes read at once.
    Always,
    Never,
}

/// A peer did not give a piece.
#[derive(Debug, Error)]
#[error(transparent)]
pub struct FellowError(pub Box<dyn std::error::Error + Send + Sync>);

/// Why a peer's request is not served.
#[derive(Debug, Error)]
pub enum PassOnError {
    /// It is no request.
    #[error("expected a piece of a shard's object of at most {PIECE_BYTES_MAX} bytes, got {0}")]
    NoPiece(String),
    /// This node passes nothing on.
    #[error("nothing is passed on here: trickle.shared_reads")]
    Off,
    /// Everything that is kept is being read or sent.
    #[error("no room to keep another piece")]
    NoRoom,
    /// As the tier says.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Who reads what another wants too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// This node alone: the bytes are of its own shard, which nobody else is expected to want, or those that peers gave were wrong.
    Alone,
    /// All nodes that are up, each some of the pieces.
    Together,
}

/// Reads of the tier, some of them passed on among the nodes.
#[derive(Debug)]
pub(super) struct SharedReads {
    store: Arc<dyn Store>,
    fellows: Option<Arc<dyn Fellows>>,
    /// What readers of this node want.
    wanted: Arc<Pieces>,
    /// What this node reads for all. Apart from `wanted`, so that two nodes which take each other for the reader of a piece do not wait
    /// for each other.
    read: Arc<Pieces>,
    doubted: Mutex<BTreeMap<NodeName, PeerDoubt>>,
    /// How long this node's last own read of a piece took; 0 before there was one.
    own_read_ms: AtomicU64,
    tally: Tally,
}

/// A peer that is left alone.
#[derive(Debug)]
struct PeerDoubt {
    until: Instant,
    /// How often in a row it was slow or wrong.
    times: u32,
}

/// Why a peer's piece is read here.
#[derive(Debug, Error)]
enum NotGiven {
    #[error("it refused")]
    Refused(#[from] FellowError),
    #[error("no piece within {0:?}")]
    InTime(Duration),
    #[error("it gave {0} bytes, which is not what was asked for")]
    OtherLength(u64),
}

/// Bytes that were passed on.
#[derive(Debug, Default)]
struct Tally {
    got: AtomicU64,
    given: AtomicU64,
}

/// Bytes that nodes passed on to one another instead of reading them from the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PassedOn {
    /// From peers to this node.
    pub got: u64,
    /// From this node to peers.
    pub given: u64,
}

impl SharedReads {
    /// Over a store, for readers of so many bytes at once; nothing is passed on without fellows. Pieces that this node wants may take that
    /// much memory, and as much those that it reads for peers. A piece without room is not shared, so all that are read at once have some.
    pub fn new(store: Arc<dyn Store>, bytes_at_once: u64) -> Self {
        let pieces = bytes_at_once.div_ceil(super::FETCH_BYTES).max(1);
        let bytes_max = pieces * PIECE_BYTES_MAX;
        Self {
            store,
            fellows: None,
            wanted: Pieces::new(bytes_max),
            read: Pieces::new(bytes_max),
            doubted: Mutex::default(),
            own_read_ms: AtomicU64::new(0),
            tally: Tally::default(),
        }
    }

    /// With others to share reads with.
    pub fn with(self, fellows: Arc<dyn Fellows>) -> Self {
        let fellows = Some(fellows);
        Self { fellows, ..self }
    }

    /// The node itself, if it shares reads.
    pub fn me(&self) -> Option<&NodeName> {
        self.fellows.as_ref().map(|fellows| fellows.me())
    }

    pub fn passed_on(&self) -> PassedOn {
        PassedOn {
            got: self.tally.got.load(Ordering::Relaxed),
            given: self.tally.given.load(Ordering::Relaxed),
        }
    }

    /// Bytes of an object, which whoever wants them checks.
    pub async fn get(
        &self,
        reads: Reads,
        key: &ObjectKey,
        range: Range<u64>,
    ) -> Result<Bytes, StoreError> {
        let piece = ObjectPiece {
            key: key.as_str().to_owned(),
            start: range.start,
            end: range.end,
        };
        let can_be_shared = (1..=PIECE_BYTES_MAX).contains(&piece.bytes());
        let fellows = self.fellows.as_deref().filter(|_| can_be_shared);
        let (Some(fellows), Reads::Together) = (fellows, reads) else {
            return self.store.get(key, Some(range)).await;
        };
        let reading = self.read_by_its_reader(fellows, key, &piece);
        match self.wanted.get(&piece, reading).await {
            Some(read) => read.map(|held| held.bytes()),
            None => self.store.get(key, Some(range)).await,
        }
    }

    /// From the node whose piece it is, or from the tier if that is this one or does not give it.
    async fn read_by_its_reader(
        &self,
        fellows: &dyn Fellows,
        key: &ObjectKey,
        piece: &ObjectPiece,
    ) -> Result<Bytes, StoreError> {
        if let Some(reader) = self.reader_of(fellows, piece) {
            match self.asked(fellows, &reader, piece).await {
                Ok(bytes) => {
                    self.doubted().remove(&reader);
                    self.tally.got.fetch_add(piece.bytes(), Ordering::Relaxed);
                    return Ok(bytes);
                }
                Err(not_given) => self.doubt(reader, piece, &not_given),
            }
        }
        match self.read_once(key, piece).await {
            Some(read) => read.map(|held| held.bytes()),
            None => self.store.get(key, Some(piece.range())).await,
        }
    }

    async fn asked(
        &self,
        fellows: &dyn Fellows,
        reader: &NodeName,
        piece: &ObjectPiece,
    ) -> Result<Bytes, NotGiven> {
        let asked = fellows.ask(reader, encode(piece).into(), piece.bytes());
        let patience = self.patience();
        let given = tokio::time::timeout(patience, asked).await;
        let bytes = given.map_err(|_| NotGiven::InTime(patience))??;
        match bytes.len() as u64 {
            got if got == piece.bytes() => Ok(bytes),
            got => Err(NotGiven::OtherLength(got)),
        }
    }

    /// A peer may take some times as long as this node took itself: where the tier is slow for all, they wait for it together.
    fn patience(&self) -> Duration {
        match self.own_read_ms.load(Ordering::Relaxed) {
            0 => PATIENCE,
            ms => Duration::from_millis(ms * 4).clamp(PATIENCE_MIN, PATIENCE_MAX),
        }
    }

    fn doubt(&self, reader: NodeName, piece: &ObjectPiece, why: &NotGiven) {
        let mut doubted = self.doubted();
        let last = doubted.get(&reader).map_or(0, |doubt| doubt.times);
        let reason = crate::driver::chain(why);
        let (times, pause) = match why {
            // It has no room now, or has just begun or ended.
            NotGiven::Refused(_) => {
                tracing::debug!(peer = %reader, ?piece, reason, "a piece was not passed on");
                (last, REFUSED_PAUSE)
            }
            NotGiven::InTime(_) | NotGiven::OtherLength(_) => {
                tracing::warn!(peer = %reader, ?piece, reason, "a peer does not pass on what it should read in the durable tier; it is read here, and the peer is left alone for a while");
                (last + 1, DOUBT * (1 << last.min(DOUBLINGS_MAX)))
            }
        };
        let until = Instant::now() + pause;
        doubted.insert(reader, PeerDoubt { until, times });
    }

    async fn read_once(
        &self,
        key: &ObjectKey,
        piece: &ObjectPiece,
    ) -> Option<Result<HeldPiece, StoreError>> {
        let reading = async {
            let began = Instant::now();
            let read = self.store.get(key, Some(piece.range())).await;
            let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.own_read_ms.store(took.max(1), Ordering::Relaxed);
            read
        };
        self.read.get(piece, reading).await
    }

    /// The peer whose piece it is; none if it is this node's.
    fn reader_of(&self, fellows: &dyn Fellows, piece: &ObjectPiece) -> Option<NodeName> {
        let (doubted, now) = (self.doubted(), Instant::now());
        let is_trusted = |node: &NodeName| doubted.get(node).is_none_or(|it| it.until <= now);
        let up = fellows.up().into_iter();
        let mut nodes: Vec<NodeName> = up.filter(is_trusted).collect();
        nodes.push(fellows.me().clone());
        let reader = nodes.into_iter().max_by_key(|node| weight(node, piece))?;
        (reader != *fellows.me()).then_some(reader)
    }

    /// What a peer asks for, read from the tier and never from another peer.
    ///
    /// # Errors
    /// [`PassOnError`] says why not; the peer reads it itself then.
    pub async fn read_for_peer(&self, request: &[u8]) -> Result<HeldPiece, PassOnError> {
        if self.fellows.is_none() {
            return Err(PassOnError::Off);
        }
        let piece: ObjectPiece =
            decode("piece", request).map_err(|error| PassOnError::NoPiece(error.to_string()))?;
        let key = piece.key.parse::<ObjectKey>()?;
        if !(1..=PIECE_BYTES_MAX).contains(&piece.bytes()) || !is_of_a_shard(&key) {
            return Err(PassOnError::NoPiece(format!("{piece:?}")));
        }
        let read = self.read_once(&key, &piece).await;
        let held = read.ok_or(PassOnError::NoRoom)??;
        self.tally.given.fetch_add(piece.bytes(), Ordering::Relaxed);
        Ok(held)
    }

    fn doubted(&self) -> std::sync::MutexGuard<'_, BTreeMap<NodeName, PeerDoubt>> {
        self.doubted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The highest among the nodes has the piece: all agree on it who know the same nodes, and a node that goes or comes moves its own only.
fn weight(node: &NodeName, piece: &ObjectPiece) -> [u8; 32] {
    let place = format!("{node}\n{}\n{}", piece.key, piece.start);
    *digest(place.as_bytes()).as_bytes()
}

/// Whether a key is that of a shard's bytes, in any of their forms. Indices, manifests and records of runs are read by each node itself.
fn is_of_a_shard(key: &ObjectKey) -> bool {
    let name = key.as_str().rsplit('/').next().unwrap_or_default();
    let forms = ["_0.distcp", "_0.distcp.zst", "_0.increment"];
    let rank = forms.iter().find_map(|form| name.strip_suffix(form));
    let rank = rank.and_then(|name| name.strip_prefix("__"));
    rank.is_some_and(|rank| rank.parse::<u32>().is_ok())
}
