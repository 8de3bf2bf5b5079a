//! Shared memory between a trainer and its daemon: memfd slots, mappings of them, and descriptors on a Unix socket.
//!
//! A slot is a memfd that the daemon makes, preallocates and seals against growing and shrinking. The trainer maps
//! it once and copies into it; the daemon reads it with `pread` into private blocks. Neither side ever makes a
//! Rust reference to shared bytes, because the other process may write them at any time.

mod mapping;
mod passing;
mod slot;

pub use mapping::Mapping;
pub use passing::{
    PassingError, Wait, Wish, connect_waiting, ready_within, recv_frame, recv_frame_waiting,
    send_frame, send_frame_waiting,
};
pub use slot::{Slot, SlotError};
