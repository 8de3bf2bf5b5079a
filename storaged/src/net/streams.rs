//! What a peer sends on a connection, whoever dialled it: control messages on one stream, data streams beside it.

use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, RecvStream, VarInt};
use storaged_wire::peer::CONTROL_FRAME_BYTES_MAX;
use storaged_wire::{NodeName, decode};
use tokio_util::sync::CancellationToken;

use super::agreement::Agreement;
use super::endpoint::{FIRST_RECORD_BYTES_MAX, NetEvent, Shared, failed};
use super::frame::ControlFrameError;
use super::pace::MessagePace;
use super::{NetError, failure, frame, requests};

/// First records of connections and streams come within this time.
pub(super) const FIRST_RECORD_WAIT: Duration = Duration::from_secs(5);

pub(super) const KIND_CONTROL: u8 = 0;
pub(super) const KIND_DATA: u8 = 1;
pub(super) const KIND_AGREEMENT: u8 = 2;

/// Between two of what a peer says of its configuration: a reload is rare, and each may be told.
const AGREEMENT_PAUSE: Duration = Duration::from_millis(500);

/// Whose connection it is.
#[derive(Clone)]
pub(super) struct Speaker {
    name: NodeName,
    pace: Arc<MessagePace>,
}

impl Speaker {
    pub fn new(name: NodeName, pace: Arc<MessagePace>) -> Self {
        Self { name, pace }
    }

    async fn take_turn(&self) {
        self.pace.take(&self.name, 0).await;
    }
}

/// Takes what comes until the connection ends, its peer is not configured any more or its certificate is revoked.
pub(super) async fn serve(
    connection: Connection,
    from: Speaker,
    shared: Arc<Shared>,
    gone: CancellationToken,
) {
    let (of_peer, of_shared) = (connection.clone(), shared.clone());
    let mut revoked = std::pin::pin!(of_shared.until_revoked(&of_peer));
    loop {
        let stream = tokio::select! {
            biased;
            () = gone.cancelled() => break,
            () = &mut revoked => {
                end_revoked(&connection);
                let (peer, reason) = (from.name.to_string(), "it is revoked".into());
                let refused = NetError::PeerCertificate { peer, reason };
                let _ = shared.events.send(failed(refused)).await;
                return;
            }
            stream = connection.accept_uni() => stream,
            Ok((send, recv)) = connection.accept_bi() => {
                let (shared, from) = (shared.clone(), from.clone());
                tokio::spawn(async move {
                    from.take_turn().await;
                    requests::serve(from.name, send, recv, &shared).await;
                });
                continue;
            }
            // It was said to be acknowledged (`pulse`), which has been done.
            Ok(_) = connection.read_datagram() => continue,
        };
        let Ok(stream) = stream else { return };
        let (shared, from, connection) = (shared.clone(), from.clone(), connection.clone());
        tokio::spawn(async move {
            if let Err(error) = serve_stream(stream, &from, &shared, &connection).await {
                let is_wrong = matches!(error, ControlFrameError::Wrong(_));
                let error = failure::of_stream(from.name.as_str(), &connection, error);
                let _ = shared.events.send(failed(error)).await;
                if is_wrong {
                    connection.close(VarInt::from_u32(2), b"protocol");
                }
            }
        });
    }
    connection.close(VarInt::from_u32(1), b"not a peer any more");
}

async fn serve_stream(
    mut recv: RecvStream,
    from: &Speaker,
    shared: &Shared,
    connection: &Connection,
) -> Result<(), ControlFrameError> {
    from.take_turn().await;
    let mut kind = [0];
    let first = tokio::time::timeout(FIRST_RECORD_WAIT, recv.read_exact(&mut kind)).await;
    let late = |_| ControlFrameError::Lost("no first byte of a stream in time".into());
    first.map_err(late)??;
    match kind[0] {
        KIND_CONTROL => {
            while let Some(body) = frame::next(&mut recv, CONTROL_FRAME_BYTES_MAX).await? {
                let room = from.pace.take_message(&from.name, body.len()).await;
                // What has waited beyond its connection would come after what the next incarnation says.
                if connection.close_reason().is_some() {
                    break;
                }
                let from = from.name.clone();
                let message = NetEvent::Message { from, body, room };
                if shared.events.send(message).await.is_err() {
                    break;
                }
            }
            Ok(())
        }
        KIND_DATA => {
            let first = frame::next(&mut recv, FIRST_RECORD_BYTES_MAX);
            let body = tokio::time::timeout(FIRST_RECORD_WAIT, first).await;
            let Some(body) = body.unwrap_or(Ok(None))? else {
                return Ok(());
            };
            let record = decode("stream record", &body);
            let record = record.map_err(|error| ControlFrameError::Wrong(error.to_string()))?;
            let stream = NetEvent::Stream {
                from: from.name.clone(),
                record,
                recv,
            };
            let _ = shared.events.send(stream).await;
            Ok(())
        }
        KIND_AGREEMENT => serve_agreements(recv, &from.name, shared).await,
        other => Err(ControlFrameError::Wrong(format!(
            "expected a stream of kind 0, 1 or 2, got {other}"
        ))),
    }
}

/// Takes what a peer says anew of what it should have in common with this node.
async fn serve_agreements(
    mut recv: RecvStream,
    from: &NodeName,
    shared: &Shared,
) -> Result<(), ControlFrameError> {
    while let Some(body) = frame::next(&mut recv, FIRST_RECORD_BYTES_MAX).await? {
        let said = decode::<Agreement>("agreement", &body);
        let said = said.map_err(|error| ControlFrameError::Wrong(error.to_string()))?;
        let Some(known) = shared.known(from) else {
            break;
        };
        known.link.set_theirs(Some(said));
        let peer = from.clone();
        if (shared.events.send(NetEvent::AgreementSaid { peer }).await).is_err() {
            break;
        }
        tokio::time::sleep(AGREEMENT_PAUSE).await;
    }
    Ok(())
}

/// Ends a connection of somebody whose certificate is revoked.
pub(super) fn end_revoked(connection: &Connection) {
    connection.close(VarInt::from_u32(3), b"the certificate is revoked");
}
