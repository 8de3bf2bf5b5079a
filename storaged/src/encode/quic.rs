//! Streams of sessions over the QUIC transport.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use quinn::{RecvStream, VarInt};
use storaged_wire::NodeName;
use storaged_wire::peer::StreamRecord;

use super::{BlockReceiver, BlockSender, StreamError, Streams};
use crate::net::{DataStream, Net, RailHint};

/// Opens streams on the links of a transport.
#[derive(Debug)]
pub struct QuicStreams {
    net: Arc<Net>,
}

impl QuicStreams {
    /// Over this transport.
    pub fn new(net: Arc<Net>) -> Self {
        Self { net }
    }
}

#[async_trait]
impl Streams for QuicStreams {
    async fn open(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        hint: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError> {
        let stream = self
            .net
            .open_stream(to, record, hint)
            .await
            .map_err(StreamError::transport)?;
        Ok(Box::new(QuicSender {
            stream,
            finished: false,
        }))
    }
}

/// A stream that is reset unless it is finished: dropping quinn's own would finish it, and send on what waits.
struct QuicSender {
    stream: DataStream,
    finished: bool,
}

impl Drop for QuicSender {
    fn drop(&mut self) {
        if self.finished {
            self.stream.has_arrived();
        } else {
            self.stream.has_failed();
            // An error means that the stream is over already.
            let _ = self.stream.stream.reset(VarInt::from_u32(0));
        }
    }
}

#[async_trait]
impl BlockSender for QuicSender {
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), StreamError> {
        self.stream
            .stream
            .write_all_chunks(chunks)
            .await
            .map_err(StreamError::transport)
    }

    async fn finish(&mut self) -> Result<(), StreamError> {
        let stream = &mut self.stream.stream;
        stream.finish().map_err(StreamError::transport)?;
        let acknowledged = stream.stopped().await;
        self.finished = matches!(acknowledged, Ok(None));
        match acknowledged {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(StreamError::Stopped { code: code.into() }),
            Err(error) => Err(StreamError::transport(error)),
        }
    }
}

#[async_trait]
impl BlockReceiver for RecvStream {
    async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), StreamError> {
        RecvStream::read_exact(self, out)
            .await
            .map_err(StreamError::transport)
    }

    async fn expect_end(&mut self) -> Result<(), StreamError> {
        match self.read_chunk(1, true).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(StreamError::Surplus),
            Err(error) => Err(StreamError::transport(error)),
        }
    }
}

/// For a daemon without peers.
#[derive(Debug, Clone, Copy)]
pub struct NoStreams;

#[async_trait]
impl Streams for NoStreams {
    async fn open(
        &self,
        to: &NodeName,
        _: &StreamRecord,
        _: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError> {
        Err(StreamError::NoTransport { to: to.clone() })
    }
}
