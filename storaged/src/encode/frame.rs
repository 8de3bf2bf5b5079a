//! Frames of a data stream: for every stripe, in the plan's order, 16 bytes and the partial sums.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | stripe, u64 little endian |
//! | 8..12 | bytes of each partial sum, u32 little endian |
//! | 12 | 0: clean, all sums are zeros and no payload follows; 1: `width` sums follow, one after the other |
//! | 13 | width: number of partial sums |
//! | 14..16 | zero |

use bytes::Bytes;

use super::{BlockReceiver, BlockSender};

pub(super) const HEADER_BYTES: usize = 16;

/// The partial sums of one stripe on one edge; none if they are all zeros.
pub(super) type Sums = Option<Vec<Vec<u8>>>;

fn header(
    stripe: u64,
    bytes: usize,
    width: usize,
    dirty: bool,
) -> Result<[u8; HEADER_BYTES], String> {
    let bytes = u32::try_from(bytes).map_err(|error| error.to_string())?;
    let width = u8::try_from(width).map_err(|error| error.to_string())?;
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&stripe.to_le_bytes());
    header[8..12].copy_from_slice(&bytes.to_le_bytes());
    header[12] = u8::from(dirty);
    header[13] = width;
    Ok(header)
}

/// Sends a stripe's partial sums.
pub(super) async fn send(
    to: &mut dyn BlockSender,
    stripe: u64,
    bytes: usize,
    width: usize,
    sums: Sums,
) -> Result<u64, String> {
    let header = header(stripe, bytes, width, sums.is_some())?;
    let mut chunks = vec![Bytes::copy_from_slice(&header)];
    chunks.extend(sums.into_iter().flatten().map(Bytes::from));
    let total = chunks.iter().map(|chunk| chunk.len() as u64).sum();
    to.send(&mut chunks).await?;
    Ok(total)
}

/// Receives the partial sums of exactly this stripe. What the peer says is checked against the plan before any
/// memory is taken for it.
pub(super) async fn receive(
    from: &mut dyn BlockReceiver,
    stripe: u64,
    bytes: usize,
    width: usize,
) -> Result<Sums, String> {
    let mut got = [0; HEADER_BYTES];
    from.read_exact(&mut got).await?;
    let dirty = got[12] == 1;
    let expected = header(stripe, bytes, width, dirty)?;
    if got != expected {
        return Err(format!(
            "sent a frame header {got:02x?} where the plan has {expected:02x?}"
        ));
    }
    if !dirty {
        return Ok(None);
    }
    let mut sums = Vec::with_capacity(width);
    for _ in 0..width {
        let mut sum = vec![0; bytes];
        from.read_exact(&mut sum).await?;
        sums.push(sum);
    }
    Ok(Some(sums))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_pinned() {
        let bytes = header(0x0102, 0x10000, 3, true).unwrap();
        assert_eq!(bytes, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 3, 0, 0]);
        assert!(header(0, 0, 256, false).is_err());
    }
}
