//! Frames of a data stream. After the stream's first record comes, for every stripe in the plan's order, a header of
//! 16 bytes and the partial sums; after the last stripe the stream ends.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | stripe, u64 little endian |
//! | 8..12 | bytes of each partial sum, u32 little endian |
//! | 12 | 0: clean, all sums are zeros and no payload follows; 1: `width` sums follow, one after the other |
//! | 13 | width: number of partial sums |
//! | 14..16 | zero |
//!
//! A header says nothing that the receiver does not know from its own plan, except whether the stripe is clean. So
//! it is compared, never obeyed, and no peer can make this node take more memory than the plan has.

use std::sync::Arc;

use bytes::Bytes;

use super::buffer::{Block, BufferPool};
use super::error::{FrameError, NeighbourError};
use super::meter::Flow;
use super::{BlockReceiver, BlockSender, BlockState, StreamError};

const HEADER_BYTES: usize = 16;

/// The partial sums of one stripe on one edge; none if they are all zeros.
pub(super) type Sums = Option<Vec<Block>>;

/// What a header must say by the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub stripe: u64,
    /// Of each partial sum.
    pub bytes: u32,
    pub width: u8,
}

impl Shape {
    fn encode(self, state: BlockState) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[0..8].copy_from_slice(&self.stripe.to_le_bytes());
        header[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        header[12] = match state {
            BlockState::Clean => 0,
            BlockState::Dirty => 1,
        };
        header[13] = self.width;
        header
    }

    fn decode(self, header: [u8; HEADER_BYTES]) -> Result<BlockState, FrameError> {
        let [
            s0,
            s1,
            s2,
            s3,
            s4,
            s5,
            s6,
            s7,
            b0,
            b1,
            b2,
            b3,
            flag,
            width,
            r0,
            r1,
        ] = header;
        let Self {
            stripe,
            bytes: expected,
            width: sums,
        } = self;
        let got = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        if got != stripe {
            return Err(FrameError::Stripe {
                expected: stripe,
                got,
            });
        }
        let got = u32::from_le_bytes([b0, b1, b2, b3]);
        if got != expected {
            return Err(FrameError::Bytes {
                stripe,
                expected,
                got,
            });
        }
        if width != sums {
            return Err(FrameError::Width {
                stripe,
                expected: sums,
                got: width,
            });
        }
        if [r0, r1] != [0, 0] {
            return Err(FrameError::Reserved {
                stripe,
                got: [r0, r1],
            });
        }
        match flag {
            0 => Ok(BlockState::Clean),
            1 => Ok(BlockState::Dirty),
            got => Err(FrameError::Flag { stripe, got }),
        }
    }
}

/// Sends a stripe's partial sums. Their memory goes to the transport as it is, and comes home from there.
pub(super) async fn send(
    to: &mut dyn BlockSender,
    shape: Shape,
    sums: Sums,
) -> Result<(), StreamError> {
    let state = match sums {
        Some(_) => BlockState::Dirty,
        None => BlockState::Clean,
    };
    let mut chunks = vec![Bytes::copy_from_slice(&shape.encode(state))];
    chunks.extend(sums.into_iter().flatten().map(Bytes::from_owner));
    to.send(&mut chunks).await
}

/// Receives the partial sums of exactly this stripe. From its header on a frame is on its way, and `flow` counts the
/// time until it is whole.
pub(super) async fn receive(
    from: &mut dyn BlockReceiver,
    shape: Shape,
    buffers: &Arc<BufferPool>,
    flow: &Flow,
) -> Result<Sums, NeighbourError> {
    let mut header = [0; HEADER_BYTES];
    from.read_exact(&mut header).await?;
    if shape.decode(header)? == BlockState::Clean {
        return Ok(None);
    }
    let mut sums = Vec::with_capacity(shape.width.into());
    for _ in 0..shape.width {
        let mut sum = buffers.lend(shape.bytes as usize);
        flow.waits(from.read_exact(&mut sum)).await?;
        flow.moved(sum.len() as u64);
        sums.push(sum);
    }
    Ok(Some(sums))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        stripe: 0x0102,
        bytes: 0x10000,
        width: 3,
    };

    #[test]
    fn the_header_is_pinned() {
        let dirty = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 3, 0, 0];
        let clean = [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0];
        assert_eq!(SHAPE.encode(BlockState::Dirty), dirty);
        assert_eq!(SHAPE.encode(BlockState::Clean), clean);
        assert_eq!(SHAPE.decode(dirty), Ok(BlockState::Dirty));
        assert_eq!(SHAPE.decode(clean), Ok(BlockState::Clean));
    }

    #[test]
    fn every_byte_of_a_header_is_checked() {
        let good = SHAPE.encode(BlockState::Dirty);
        for at in 0..HEADER_BYTES {
            for bit in 0..8 {
                let mut bad = good;
                bad[at] ^= 1 << bit;
                let only_the_flag_may_differ = at == 12 && bit == 0;
                assert_eq!(
                    SHAPE.decode(bad).is_ok(),
                    only_the_flag_may_differ,
                    "byte {at} bit {bit}"
                );
            }
        }
    }
}
