//! Room in memory, beside the budget, for pieces of shards that are on their way to or from the tier. It is taken before a piece is read.
//!
//! Tenants have it in turn: whoever holds the least is next, of those the one that was served longest ago, so that several have equal parts and
//! one alone has all of it. Who is next waits for as much as it needs, and nobody passes it meanwhile: also a piece that is larger than the
//! room goes, alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use storaged_wire::Namespace;
use tokio::sync::Notify;

/// Requests to the tier at once, however short the pieces are.
pub(super) const PIECES_MAX: usize = 64;

/// A tenant's name; none for the daemon's own user.
type Tenant = Option<String>;

/// Room for pieces of all tenants.
#[derive(Debug)]
pub(super) struct CopyRoom {
    most: u64,
    state: Mutex<RoomState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct RoomState {
    used: u64,
    pieces: usize,
    /// Those that hold something or wait.
    tenants: BTreeMap<Tenant, TenantPieces>,
    tickets: u64,
    served: u64,
}

#[derive(Debug, Default)]
struct TenantPieces {
    held: u64,
    /// When it was served last, counted in pieces.
    served: u64,
    /// In the order in which they came.
    waiting: VecDeque<WaitingPiece>,
}

#[derive(Debug)]
struct WaitingPiece {
    ticket: u64,
    bytes: u64,
}

/// Room that a piece has, until it is dropped.
#[derive(Debug)]
pub(super) struct PiecePlace {
    room: Arc<CopyRoom>,
    tenant: Tenant,
    bytes: u64,
}

/// A piece that waits; dropped, it waits no more.
struct PieceInLine<'a> {
    room: &'a Arc<CopyRoom>,
    tenant: Tenant,
    ticket: u64,
}

impl RoomState {
    /// The next one. That it was served for long ago decides between tenants that hold the same: where one piece fills the room all hold nothing,
    /// and who queued many pieces first would have all of them sent first.
    fn next(&self) -> Option<&WaitingPiece> {
        let tenants = self.tenants.values();
        let waiting = tenants.filter(|pieces| !pieces.waiting.is_empty());
        let next = waiting.min_by_key(|pieces| (pieces.held, pieces.served))?;
        next.waiting.front()
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
        Arc::new(Self {
            most: bytes,
            state: Mutex::default(),
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
        let pieces = state.tenants.entry(tenant.clone()).or_default();
        pieces.waiting.push_back(WaitingPiece { ticket, bytes });
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

    fn fits(&self, state: &RoomState, bytes: u64) -> bool {
        let is_within = state.used.saturating_add(bytes) <= self.most;
        state.used == 0 || is_within && state.pieces < PIECES_MAX
    }

    /// Bytes that are taken, and tenants that have or want some.
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
        let bytes = next.bytes;
        if next.ticket != self.ticket || !self.room.fits(&state, bytes) {
            return None;
        }
        state.used += bytes;
        state.pieces += 1;
        state.served += 1;
        let served = state.served;
        let pieces = state.tenants.get_mut(&self.tenant)?;
        pieces.held += bytes;
        pieces.served = served;
        pieces.waiting.pop_front();
        Some(PiecePlace {
            room: self.room.clone(),
            tenant: self.tenant.clone(),
            bytes,
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

impl Drop for PiecePlace {
    fn drop(&mut self) {
        let mut state = self.room.state();
        state.used -= self.bytes;
        state.pieces -= 1;
        if let Some(pieces) = state.tenants.get_mut(&self.tenant) {
            pieces.held -= self.bytes;
        }
        state.forget_idle(&self.tenant);
        drop(state);
        self.room.changed.notify_waiters();
    }
}
