//! Shared memory between a trainer and its daemon: memfd slots, mappings of them, and descriptors on a Unix socket; segments, memory of
//! the daemon alone that outlives it; and memory for what comes from files and goes to them (`private`).
//!
//! A slot is a memfd that the daemon makes, preallocates and seals against growing and shrinking. The trainer maps
//! it once and copies into it (`memory` says how it does so the first time); the daemon copies it into private blocks, from a mapping of its own (`view`) or with
//! `pread`. Neither side ever makes a Rust reference to shared bytes, because the other process may write them at any time; and a page that fails under
//! a daemon's mapping does not end it (`faults`). The cells of a segment are not shared, and not mapped: `segment` says why.

mod datagram;
mod faults;
mod inherited;
mod mapping;
mod memory;
mod passing;
mod positioned;
mod private;
mod segment;
mod slot;
mod view;

pub use datagram::{Received, Recipient, recv_datagram, send_datagram};
pub use faults::{memory_pages_lost, survive_memory_faults};
pub use inherited::take_inherited;
pub use mapping::Mapping;
pub use memory::SlotMemory;
pub use passing::{
    FrameStart, PassingError, Wait, Wish, begin_frame, connect_waiting, ready_within, recv_body,
    recv_frame, recv_frame_waiting, send_frame, send_frame_waiting,
};
pub use private::{AlignedBytes, DIRECT_ALIGNMENT, IdleMemory, take_idle_memory};
pub use segment::{CELL_BYTES_MIN, Cell, Segment, SegmentError};
pub use slot::{Slot, SlotError};
