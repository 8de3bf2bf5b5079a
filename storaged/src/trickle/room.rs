//! CopyRoom in memory, beside the budget, for pieces of shards that are on their way to or from the tier. It is taken before a piece is read.
//!
//! Tenants have it in turn: whoever holds the least is next, so that several have equal parts and one alone has all of it. Who is next waits
//! for as much as it needs, and nobody passes it meanwhile: also a piece that is larger than the room goes, alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use storaged_wire::Namespace;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::pace::{CopyPace, Demand};

/// Requests to the tier at once: the shortest piece counts as such a part of the room.
pub(super) const PIECES_MAX: u64 = 64;

/// A tenant's name; none for the daemon's own user.
type Tenant = Option<String>;

/// CopyRoom for pieces of all tenants.
#[derive(Debug)]
pub(super) struct CopyRoom {
    piece_counts_min: u64,
    state: Mutex<RoomState>,
    changed: Notify,
}

#[derive(Debug)]
struct RoomState {
    used: u64,
    pace: CopyPace,
    /// Those that hold something or wait.
    tenants: BTreeMap<Tenant, TenantPieces>,
    tickets: u64,
}

#[derive(Debug, Default)]
struct TenantPieces {
    held: u64,
    /// In the order in which they came.
    waiting: VecDeque<WaitingPiece>,
}

#[derive(Debug)]
struct WaitingPiece {
    ticket: u64,
    counts: u64,
}

/// What has become of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PieceEnd {
    Moved,
    /// It was there already.
    NotNeeded,
    Failed,
}

/// CopyRoom that a piece has, until it is dropped.
#[derive(Debug)]
pub(super) struct PiecePlace {
    room: Arc<CopyRoom>,
    tenant: Tenant,
    counts: u64,
    end: PieceEnd,
}

/// A piece that waits; dropped, it waits no more.
struct PieceInLine<'a> {
    room: &'a Arc<CopyRoom>,
    tenant: Tenant,
    ticket: u64,
}

impl RoomState {
    /// The next one: of the tenant that holds the least, or of those the one that has waited for longest.
    fn next(&self) -> Option<&WaitingPiece> {
        let firsts = self.tenants.values();
        let firsts = firsts.filter_map(|pieces| Some((pieces.held, pieces.waiting.front()?)));
        let next = firsts.min_by_key(|(held, first)| (*held, first.ticket))?;
        Some(next.1)
    }

    fn fits(&self, counts: u64) -> bool {
        self.used == 0 || self.used.saturating_add(counts) <= self.pace.open()
    }

    fn demand(&self) -> Demand {
        if self.next().is_some() {
            Demand::Waiting
        } else {
            Demand::Met
        }
    }

    fn forget_idle(&mut self, tenant: &Tenant) {
        let pieces = self.tenants.get(tenant);
        if pieces.is_some_and(|pieces| pieces.held == 0 && pieces.waiting.is_empty()) {
            self.tenants.remove(tenant);
        }
    }
}

impl CopyRoom {
    /// For so many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        let state = RoomState {
            used: 0,
            pace: CopyPace::new(bytes),
            tenants: BTreeMap::new(),
            tickets: 0,
        };
        Arc::new(Self {
            piece_counts_min: (bytes / PIECES_MAX).max(1),
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    /// Waits until there is room for a piece of a job.
    pub async fn take(self: &Arc<Self>, job: &Namespace, bytes: u64) -> PiecePlace {
        let waiting = self.queue(job.tenant().map(str::to_owned), bytes);
        loop {
            let changed = self.changed.notified();
            if let Some(place) = waiting.admitted() {
                return place;
            }
            changed.await;
        }
    }

    fn queue(self: &Arc<Self>, tenant: Tenant, bytes: u64) -> PieceInLine<'_> {
        let mut state = self.state();
        let ticket = state.tickets;
        state.tickets += 1;
        let counts = bytes.max(self.piece_counts_min);
        let pieces = state.tenants.entry(tenant.clone()).or_default();
        pieces.waiting.push_back(WaitingPiece { ticket, counts });
        PieceInLine {
            room: self,
            tenant,
            ticket,
        }
    }

    fn state(&self) -> MutexGuard<'_, RoomState> {
        // No change is left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that count as taken, and tenants that have or want some.
    #[cfg(test)]
    pub fn taken(&self) -> (u64, usize) {
        let state = self.state();
        (state.used, state.tenants.len())
    }
}

impl PieceInLine<'_> {
    fn admitted(&self) -> Option<PiecePlace> {
        let mut state = self.room.state();
        let next = state.next()?;
        let counts = next.counts;
        if next.ticket != self.ticket || !state.fits(counts) {
            return None;
        }
        state.used += counts;
        let pieces = state.tenants.get_mut(&self.tenant)?;
        pieces.held += counts;
        pieces.waiting.pop_front();
        Some(PiecePlace {
            room: self.room.clone(),
            tenant: self.tenant.clone(),
            counts,
            end: PieceEnd::Failed,
        })
    }
}

impl Drop for PieceInLine<'_> {
    fn drop(&mut self) {
        let mut state = self.room.state();
        if let Some(pieces) = state.tenants.get_mut(&self.tenant) {
            pieces.waiting.retain(|piece| piece.ticket != self.ticket);
        }
        state.forget_idle(&self.tenant);
        drop(state);
        // Another one is next now.
        self.room.changed.notify_waiters();
    }
}

impl PiecePlace {
    /// It has come where it should.
    pub fn moved(mut self) {
        self.end = PieceEnd::Moved;
    }

    /// Nothing had to be moved.
    pub fn not_needed(mut self) {
        self.end = PieceEnd::NotNeeded;
    }
}

impl Drop for PiecePlace {
    fn drop(&mut self) {
        let mut state = self.room.state();
        let demand = state.demand();
        match self.end {
            PieceEnd::Moved => state.pace.moved(self.counts, Instant::now(), demand),
            PieceEnd::NotNeeded => {}
            PieceEnd::Failed => state.pace.failed(),
        }
        state.used -= self.counts;
        if let Some(pieces) = state.tenants.get_mut(&self.tenant) {
            pieces.held -= self.counts;
        }
        state.forget_idle(&self.tenant);
        drop(state);
        self.room.changed.notify_waiters();
    }
}
