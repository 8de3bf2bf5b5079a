//! The other nodes as readers of the durable tier: what this one asks of them and they of it.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_wire::NodeName;

use super::{Daemon, chain};
use crate::net::{Net, PeerAnswer};
use crate::trickle::{FellowError, Fellows};

/// Peers over the network.
#[derive(Debug)]
pub(super) struct LinkedPeers {
    me: NodeName,
    net: Arc<Net>,
}

impl LinkedPeers {
    pub fn new(me: NodeName, net: Arc<Net>) -> Self {
        Self { me, net }
    }
}

#[async_trait]
impl Fellows for LinkedPeers {
    fn me(&self) -> &NodeName {
        &self.me
    }

    fn up(&self) -> Vec<NodeName> {
        self.net.answering()
    }

    async fn ask(&self, whom: &NodeName, piece: Bytes, bytes: u64) -> Result<Bytes, FellowError> {
        let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
        let answer = self.net.request(whom, piece, limit).await;
        answer.map_err(|error| FellowError(error.into()))
    }
}

impl Daemon {
    /// A peer wants a piece of the durable tier. Without an answer it reads the piece itself.
    pub(super) fn pass_on(&self, from: NodeName, request: Vec<u8>, mut answer: PeerAnswer) {
        let Some(trickle) = self.trickle.clone() else {
            return;
        };
        tokio::spawn(async move {
            let read = tokio::select! {
                read = trickle.read_for_peer(&request) => read,
                () = answer.given_up() => return,
            };
            let piece = match read {
                Ok(piece) => piece,
                Err(error) => {
                    let reason = chain(&error);
                    return tracing::debug!(peer = %from, reason, "a piece is not passed on");
                }
            };
            if let Err(error) = answer.send(&from, piece.bytes()).await {
                tracing::debug!(reason = chain(&error), "a piece was not passed on");
            }
        });
    }
}
