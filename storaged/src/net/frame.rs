//! Length-prefixed frames on QUIC streams: u32 little endian, then the body.

use bytes::Bytes;
use quinn::{RecvStream, SendStream};

/// Reads one frame of at most `limit` bytes; none if the stream ended before it.
pub(super) async fn read(recv: &mut RecvStream, limit: usize) -> Result<Option<Vec<u8>>, String> {
    let mut prefix = [0; 4];
    match recv.read_exact(&mut prefix).await {
        Ok(()) => {}
        Err(quinn::ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(error) => return Err(error.to_string()),
    }
    let length = u32::from_le_bytes(prefix) as usize;
    if length > limit {
        return Err(format!(
            "expected a frame of at most {limit} bytes, got {length}"
        ));
    }
    let mut body = vec![0; length];
    recv.read_exact(&mut body)
        .await
        .map_err(|error| error.to_string())?;
    Ok(Some(body))
}

/// Writes one frame.
pub(super) async fn write(send: &mut SendStream, body: Bytes) -> Result<(), String> {
    let length = u32::try_from(body.len()).map_err(|error| error.to_string())?;
    let prefix = Bytes::copy_from_slice(&length.to_le_bytes());
    send.write_all_chunks(&mut [prefix, body])
        .await
        .map_err(|error| error.to_string())
}
