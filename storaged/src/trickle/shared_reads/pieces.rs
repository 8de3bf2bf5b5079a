//! Pieces of objects that several want at about the same time: each is read once, and kept for those that come a little later.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use minicbor::{Decode, Encode};
use tokio::sync::OnceCell;
use tokio::time::Instant;

/// Whoever restarts with others reads what they read within so long; then the memory goes back.
const KEPT: Duration = Duration::from_secs(10);

/// Shorter pieces count as so many bytes.
const PIECE_BYTES_COUNTED_MIN: u64 = 4096;

/// Bytes of an object, as peers name them to one another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub(super) struct ObjectPiece {
    /// The object's key.
    #[n(0)]
    pub key: String,
    /// The first byte.
    #[n(1)]
    pub start: u64,
    /// The byte behind the last one.
    #[n(2)]
    pub end: u64,
}

impl ObjectPiece {
    pub fn bytes(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// What it counts as: also the shortest has a name and a place.
    fn takes(&self) -> u64 {
        self.bytes().max(PIECE_BYTES_COUNTED_MIN)
    }

    pub fn range(&self) -> Range<u64> {
        self.start..self.end
    }
}

/// Pieces that are being read or were read just now, in bounded memory.
#[derive(Debug)]
pub(super) struct Pieces {
    bytes_max: u64,
    kept: Mutex<Kept>,
}

/// A piece that counts as kept as long as somebody has it: were it let go while it is sent to a peer that reads slowly, the next
/// piece would take memory beside it.
#[derive(Debug)]
pub struct HeldPiece {
    bytes: Bytes,
    _cell: Arc<OnceCell<Bytes>>,
}

impl HeldPiece {
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }
}

#[derive(Debug, Default)]
struct Kept {
    pieces: BTreeMap<ObjectPiece, KeptPiece>,
    bytes: u64,
}

#[derive(Debug)]
struct KeptPiece {
    /// Who holds it too is reading the piece or waits for it.
    cell: Arc<OnceCell<Bytes>>,
    wanted_at: Instant,
}

impl Kept {
    /// Lets go of pieces that nobody holds, those first that were not wanted for longest, until so many bytes are free.
    fn make_room(&mut self, bytes: u64, bytes_max: u64) -> bool {
        while self.bytes.saturating_add(bytes) > bytes_max {
            let idle = self.pieces.iter().filter(|(_, kept)| kept.is_idle());
            let Some((piece, _)) = idle.min_by_key(|(_, kept)| kept.wanted_at) else {
                return false;
            };
            let piece = piece.clone();
            self.remove(&piece);
        }
        true
    }

    fn remove(&mut self, piece: &ObjectPiece) {
        if self.pieces.remove(piece).is_some() {
            self.bytes -= piece.takes();
        }
    }
}

impl KeptPiece {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.cell) == 1
    }
}

impl Pieces {
    pub fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            kept: Mutex::default(),
        })
    }

    /// The piece: whoever wants it first reads it, and the others wait for that. None if there is no room to keep it.
    ///
    /// # Errors
    /// As the reading; the next who waits for it then reads it himself.
    pub async fn get<E>(
        self: &Arc<Self>,
        piece: &ObjectPiece,
        read: impl Future<Output = Result<Bytes, E>>,
    ) -> Option<Result<HeldPiece, E>> {
        let cell = self.cell(piece)?;
        let got = cell.get_or_try_init(|| read).await.cloned();
        Some(got.map(|bytes| HeldPiece { bytes, _cell: cell }))
    }

    fn cell(self: &Arc<Self>, piece: &ObjectPiece) -> Option<Arc<OnceCell<Bytes>>> {
        let mut kept = self.kept();
        let now = Instant::now();
        if let Some(known) = kept.pieces.get_mut(piece) {
            known.wanted_at = now;
            return Some(known.cell.clone());
        }
        if !kept.make_room(piece.takes(), self.bytes_max) {
            return None;
        }
        let cell = Arc::new(OnceCell::new());
        let new = KeptPiece {
            cell: cell.clone(),
            wanted_at: now,
        };
        kept.pieces.insert(piece.clone(), new);
        kept.bytes += piece.takes();
        tokio::spawn(let_go_in_time(Arc::downgrade(self), piece.clone()));
        Some(cell)
    }

    /// Bytes that are reserved now.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.kept().bytes
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // No change is left half done, so a panic elsewhere does not spoil it.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory goes back also where nothing is read any more.
async fn let_go_in_time(pieces: Weak<Pieces>, piece: ObjectPiece) {
    loop {
        tokio::time::sleep(KEPT).await;
        let Some(pieces) = pieces.upgrade() else {
            return;
        };
        let mut kept = pieces.kept();
        let Some(known) = kept.pieces.get(&piece) else {
            return;
        };
        if known.is_idle() && known.wanted_at.elapsed() >= KEPT {
            return kept.remove(&piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const BYTES: u64 = PIECE_BYTES_COUNTED_MIN;
    /// For two pieces and a half.
    const ROOM: u64 = BYTES * 5 / 2;

    fn piece(start: u64) -> ObjectPiece {
        ObjectPiece {
            key: "job/run-1/step-1/__0_0.distcp".into(),
            start,
            end: start + BYTES,
        }
    }

    async fn read(reads: &AtomicU64) -> Result<Bytes, Infallible> {
        reads.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(Bytes::from_static(&[7; BYTES as usize]))
    }

    #[tokio::test(start_paused = true)]
    async fn what_many_want_at_once_is_read_once_and_its_memory_goes_back() {
        let (pieces, reads) = (Pieces::new(ROOM), AtomicU64::new(0));
        let wanted = piece(0);
        let all = (0..20).map(|_| pieces.get(&wanted, read(&reads)));
        for got in futures::future::join_all(all).await {
            assert_eq!(
                got.expect("room").expect("read").bytes().len() as u64,
                BYTES
            );
        }
        // A moment later it is still there.
        tokio::time::sleep(KEPT / 2).await;
        pieces
            .get(&wanted, read(&reads))
            .await
            .expect("room")
            .expect("read");
        assert_eq!((reads.load(Ordering::Relaxed), pieces.bytes()), (1, BYTES));
        tokio::time::sleep(KEPT * 2).await;
        assert_eq!(pieces.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn room_is_made_by_what_nobody_holds_and_else_there_is_none() {
        let (pieces, reads) = (Pieces::new(ROOM), AtomicU64::new(0));
        let (first, second, third) = (piece(0), piece(BYTES), piece(2 * BYTES));
        let both = futures::future::join(
            pieces.get(&first, read(&reads)),
            pieces.get(&second, read(&reads)),
        );
        let refused = async {
            tokio::task::yield_now().await;
            pieces.get(&third, read(&reads)).await.is_none()
        };
        let (_, is_refused) = futures::future::join(both, refused).await;
        assert!(
            is_refused,
            "both are being read, and there is no room for a third"
        );
        // What is still being sent to somebody is not let go for another one.
        let held = pieces.get(&third, read(&reads)).await;
        let sent = pieces.get(&first, read(&reads)).await;
        assert!(held.is_some() && sent.is_some());
        assert!(pieces.get(&second, read(&reads)).await.is_none());
        tokio::time::sleep(KEPT * 5).await;
        assert_eq!(pieces.bytes(), 2 * BYTES);
        drop((held, sent));
        tokio::time::sleep(KEPT * 2).await;
        assert_eq!(pieces.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_piece_that_could_not_be_read_reads_it_himself() {
        let pieces = Pieces::new(ROOM);
        let wanted = piece(0);
        let fails = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Err("the tier is down")
        };
        let reads = async { Ok::<_, &str>(Bytes::from_static(b"read")) };
        let (first, second) =
            futures::future::join(pieces.get(&wanted, fails), pieces.get(&wanted, reads)).await;
        assert!(matches!(first, Some(Err("the tier is down"))));
        assert_eq!(second.expect("room").expect("read").bytes(), "read");
    }
}
