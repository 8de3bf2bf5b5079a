//! Requests between peers with one answer each: a stream in both directions, on the link. Who answers knows what they mean.

use std::time::Duration;

use bytes::Bytes;
use quinn::{RecvStream, SendStream, VarInt};
use storaged_wire::NodeName;

use super::endpoint::{FIRST_RECORD_BYTES_MAX, Net, NetEvent, Shared};
use super::streams::FIRST_RECORD_WAIT;
use super::{NetError, frame};

/// The first version of the link in which peers ask one another.
pub(super) const REQUESTS: u16 = 10;
/// Requests of one peer that are answered at once; further ones wait at the peer.
pub(super) const REQUESTS_AT_ONCE: u32 = 8;
/// An answer that its asker does not read in this time is given up: it holds memory.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// Where an answer goes. Dropped instead, it tells the asker that there is none.
#[derive(Debug)]
pub struct PeerAnswer(Option<SendStream>);

impl PeerAnswer {
    /// Ends once the asker waits no longer.
    pub async fn given_up(&mut self) {
        match &mut self.0 {
            Some(stream) => drop(stream.stopped().await),
            None => std::future::pending().await,
        }
    }

    /// Sends the answer, whole.
    ///
    /// # Errors
    /// [`NetError`] if the asker has not got it.
    pub async fn send(mut self, to: &NodeName, bytes: Bytes) -> Result<(), NetError> {
        let failed = |reason: String| NetError::failed(to, reason);
        let Some(stream) = &mut self.0 else {
            return Ok(());
        };
        let sending = async {
            let sent = frame::write(stream, bytes).await;
            sent.map_err(|error| failed(error.to_string()))?;
            stream.finish().map_err(|error| failed(error.to_string()))?;
            let stopped = stream.stopped().await;
            stopped.map_err(|error| failed(error.to_string()))
        };
        let sent = tokio::time::timeout(ANSWER_WAIT, sending).await;
        match sent.map_err(|_| failed("it does not read its answer".into()))?? {
            None => self.0 = None,
            Some(_) => return Err(failed("it gave its request up".into())),
        }
        Ok(())
    }
}

impl Drop for PeerAnswer {
    fn drop(&mut self) {
        if let Some(stream) = &mut self.0 {
            // quinn's own would finish the stream: half an answer would look like a whole one that is wrong.
            let _ = stream.reset(VarInt::from_u32(0));
        }
    }
}

impl Net {
    /// Peers that are linked to and answer requests.
    pub fn answering(&self) -> Vec<NodeName> {
        self.shared.answering()
    }

    /// Asks a peer, and reads its answer of at most `limit` bytes.
    ///
    /// # Errors
    /// [`NetError`] if the peer is unknown, down, of a release that does not answer, or has no answer.
    pub async fn request(
        &self,
        to: &NodeName,
        body: Bytes,
        limit: usize,
    ) -> Result<Bytes, NetError> {
        let known = self.shared.peer(to)?;
        if !known.link.answers() {
            return Err(NetError::Down(to.clone()));
        }
        let connection = known.connection().await?;
        let failed = |reason: String| NetError::failed(to, reason);
        let (mut send, mut recv) = connection
            .open_bi()
            .await
            .map_err(|error| failed(error.to_string()))?;
        let sent = frame::write(&mut send, body).await;
        sent.map_err(|error| failed(error.to_string()))?;
        let _ = send.finish();
        let answer = frame::read(&mut recv, limit).await;
        let answer = answer.map_err(|error| failed(error.to_string()))?;
        let answer = answer.ok_or_else(|| failed("it has no answer".into()))?;
        // Dropped before its end, the stream would tell the peer that its answer was not wanted.
        match recv.read(&mut [0]).await {
            Ok(None) => {}
            Ok(Some(_)) => return Err(failed("more came than its answer".into())),
            Err(error) => return Err(failed(error.to_string())),
        }
        Ok(answer.into())
    }
}

/// Takes a request that a peer begins, and hands it on.
pub(super) async fn serve(from: NodeName, send: SendStream, mut recv: RecvStream, shared: &Shared) {
    let answer = PeerAnswer(Some(send));
    let reading = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX);
    let Ok(Ok(Some(body))) = tokio::time::timeout(FIRST_RECORD_WAIT, reading).await else {
        return;
    };
    let request = NetEvent::Request { from, body, answer };
    let _ = shared.events.send(request).await;
}
