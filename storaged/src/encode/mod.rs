//! Effect of the verb *encode*: one executor for every coding plan, encode and repair alike.
//!
//! Per stripe a member receives the partial sums of its neighbours, adds its own block and sends the results on.
//! The three overlap: blocks wait in bounded queues between receiving, arithmetic (on a pool of threads) and
//! sending, and QUIC's flow control carries the back-pressure from hop to hop.
//! Order of reading: `executor` (sessions), `pipeline` (the stages of one), `stripe` (the arithmetic of one stripe),
//! `frame` (the bytes on the wire), `wary` (sums that are checked), then `bound` (repairs beside a save), `check`,
//! `buffer`, `inbound`, `meter`, `error` and `quic`.
//! The arithmetic runs on the threads of `crate::pool`.

mod bound;
mod buffer;
mod check;
mod error;
mod executor;
mod frame;
mod inbound;
mod meter;
mod pipeline;
mod quic;
mod stripe;
#[cfg(test)]
mod tests;
mod wary;

pub use bound::SaveGuard;
pub use error::StreamError;
pub use executor::{Executor, ExecutorLimits, SessionEnd};
pub use meter::Meters;
pub use quic::{NoStreams, QuicStreams};

use crate::net::RailHint;
pub use crate::pool::Pool;
use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::{SessionWork, Sink, Source};
use storaged_wire::NodeName;
use storaged_wire::peer::{SessionFault, StreamRecord};

/// Whether a block has anything in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockState {
    /// All zeros, or unchanged: nothing to do for it.
    Clean,
    /// It has content.
    Dirty,
}

/// Who finds out whether a shard's chunk is what it should be that a member puts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// Who reads it.
    Reader,
    /// Who keeps what it goes into: parity has the fingerprint that all chunks together must give, or it is not kept.
    Keeper,
}

/// The RAM side: where blocks come from and go to.
pub trait Blocks: Send + Sync {
    /// Fills `out`, all of it, with the block of `stripe`, verified unless `proof` is its keeper's; zeros beyond the shard's end. If
    /// it says `Clean`, what is in `out` means nothing.
    ///
    /// # Errors
    /// [`SessionFault::Corrupt`] if a chunk does not have its digest or its fingerprint, `NoBlocks` if there is no such block.
    fn read(
        &self,
        source: &Source,
        stripe: u64,
        proof: Proof,
        out: &mut [u8],
    ) -> Result<BlockState, SessionFault>;

    /// Begins to keep what a session computes.
    ///
    /// # Errors
    /// [`SessionFault::NoBlocks`] or `NoBasis` if the place for it, or the basis, is not there.
    fn begin_keep(
        &self,
        keep: &Sink,
        work: &SessionWork,
    ) -> Result<Box<dyn BlockSink>, SessionFault>;
}

/// Blocks being kept. Stripes may come in any order and from several threads.
pub trait BlockSink: Send + Sync {
    /// Keeps the block of a stripe; none if it is clean.
    ///
    /// # Errors
    /// [`SessionFault::WrongResult`] if it does not have the digest, of parity the fingerprint, that it must have.
    fn put(&self, stripe: u64, block: Option<&[u8]>) -> Result<(), SessionFault>;

    /// Every stripe is in.
    ///
    /// # Errors
    /// As `put`.
    fn finish(&self) -> Result<(), SessionFault>;
}

/// The network side: opens streams to peers.
#[async_trait]
pub trait Streams: Send + Sync {
    /// Opens a data stream; `hint` is for a node with several interfaces.
    ///
    /// # Errors
    /// [`StreamError`] that says why there is no stream to the peer.
    async fn open(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        hint: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError>;
}

/// The sending end of a stream. Dropped before it is finished, it resets the stream.
#[async_trait]
pub trait BlockSender: Send {
    /// Sends chunks, without copying them where the transport can.
    ///
    /// # Errors
    /// [`StreamError`] if the peer or the transport takes them no more.
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), StreamError>;

    /// Says that nothing more comes, and waits until the peer has everything.
    ///
    /// # Errors
    /// [`StreamError`] if the peer has not acknowledged everything.
    async fn finish(&mut self) -> Result<(), StreamError>;
}

/// The receiving end of a stream. Dropped before its end, it tells the sender to stop.
#[async_trait]
pub trait BlockReceiver: Send {
    /// Fills `out`.
    ///
    /// # Errors
    /// [`StreamError`] if the stream breaks, or ends first.
    async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), StreamError>;

    /// Waits for the end of the stream.
    ///
    /// # Errors
    /// [`StreamError::Surplus`] if there are more bytes.
    async fn expect_end(&mut self) -> Result<(), StreamError>;
}
