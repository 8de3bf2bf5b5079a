//! Length-prefixed frames on QUIC streams: u32 little endian, then the body.

use bytes::Bytes;
use quinn::{ReadError, ReadExactError, RecvStream, SendStream};
use storaged_wire::framing::{FRAME_PREFIX_BYTES, body_length};
use thiserror::Error;

/// Why a frame did not come or go.
#[derive(Debug, Error)]
pub(super) enum ControlFrameError {
    /// The stream or its connection ended: a link that was cut, a peer that was paused or stopped, or one that gave the
    /// stream up. Nobody has done anything wrong.
    #[error("{0}")]
    Lost(String),
    /// The peer sent what may not be.
    #[error("{0}")]
    Wrong(String),
}

impl From<ReadError> for ControlFrameError {
    fn from(error: ReadError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<ReadExactError> for ControlFrameError {
    fn from(error: ReadExactError) -> Self {
        match error {
            ReadExactError::ReadError(error) => error.into(),
            // Whoever gives a frame up in the midst of it ends its stream so, without a reset: quinn does when a writer is dropped.
            ReadExactError::FinishedEarly(bytes) => {
                Self::Lost(format!("the stream ended after {bytes} bytes of a frame"))
            }
        }
    }
}

/// Reads one frame of at most `limit` bytes; none if the stream ended before it.
pub(super) async fn read(
    recv: &mut RecvStream,
    limit: usize,
) -> Result<Option<Vec<u8>>, ControlFrameError> {
    let mut prefix = [0; FRAME_PREFIX_BYTES];
    match recv.read_exact(&mut prefix).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let length = body_length(prefix, limit);
    let length = length.map_err(|error| ControlFrameError::Wrong(error.to_string()))?;
    let mut body = vec![0; length];
    recv.read_exact(&mut body).await?;
    Ok(Some(body))
}

/// Reads the next one of several; none where the stream or its connection has ended, be it in the midst of a frame: that is no fault.
pub(super) async fn next(
    recv: &mut RecvStream,
    limit: usize,
) -> Result<Option<Vec<u8>>, ControlFrameError> {
    match read(recv, limit).await {
        Err(ControlFrameError::Lost(_)) => Ok(None),
        frame => frame,
    }
}

/// Writes one frame. A write fails only with its stream or the connection.
pub(super) async fn write(send: &mut SendStream, body: Bytes) -> Result<(), ControlFrameError> {
    let length =
        u32::try_from(body.len()).map_err(|error| ControlFrameError::Wrong(error.to_string()))?;
    let prefix = Bytes::copy_from_slice(&length.to_le_bytes());
    send.write_all_chunks(&mut [prefix, body])
        .await
        .map_err(|error| ControlFrameError::Lost(error.to_string()))
}
