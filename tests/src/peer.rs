//! A node of the cluster that is not what it should be: a transport with its certificate, in its place, that says what it is told to.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use storaged::config::ConfigFile;
use storaged::net::{LINK_VERSIONS, Net, NetConfig, NetEvent, TlsIdentity, UdpFactory};
use storaged_sdk::wire::peer::{Fence, PeerMessage};
use storaged_sdk::wire::{Generation, Namespace, NodeName, Owner, RunId, decode, encode};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::system::System;

/// A link that does not come up in this time does not come up at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of one message.
pub const FENCES: usize = 400;

/// Messages from a peer that are remembered; later ones are let go.
const HEARD_MAX: usize = 100_000;

/// Fences of jobs that there are not, so many that whoever reads them has much more to do than who says them.
///
/// # Errors
/// None, as long as this is a name.
pub fn many_fences() -> Result<PeerMessage> {
    let fence = Fence {
        namespace: Namespace::new("nobodys")?,
        owner: Owner::of_token(b"nobody"),
        run: RunId::ZERO,
        promised: RunId::ZERO,
    };
    Ok(PeerMessage::Fences(vec![fence; FENCES]))
}

/// What others have said to it, as far as this can be read.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<PeerMessage>>>);

impl Heard {
    fn all(&self) -> MutexGuard<'_, Vec<PeerMessage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, body: &[u8]) {
        let mut all = self.all();
        if all.len() < HEARD_MAX {
            all.extend(decode("a message", body).ok());
        }
    }
}

/// It is linked to its peers until this is dropped, and answers nothing by itself.
pub struct HostilePeer {
    runtime: Runtime,
    net: Arc<Net>,
    heard: Heard,
}

impl HostilePeer {
    /// In place of this node, which must not run, linked to those.
    ///
    /// # Errors
    /// If a link does not come up.
    pub fn start(system: &System, node: usize, to: &[usize]) -> Result<Self> {
        let config = ConfigFile::load(&system.cluster.config_path(node))?.validate()?;
        let identity = TlsIdentity::load(config.tls.as_ref().context("certificates")?)?;
        let (sender, mut events) = mpsc::channel(64);
        let net = NetConfig {
            place: config.name.clone(),
            node: config.node.clone(),
            // Later than whoever was there before.
            generation: Generation::new(u64::MAX / 2),
            listen: config.listen,
            trunks: Vec::new(),
            identity,
            peers: config.peers.clone(),
            near: config.peers.iter().map(|peer| peer.name.clone()).collect(),
            agreement: config.agreement(),
            versions: LINK_VERSIONS,
            sockets: Arc::new(UdpFactory),
            seed: None,
        };
        let runtime = Runtime::new()?;
        let net = runtime.block_on(Net::start(net, sender))?;
        let mut missing: Vec<NodeName> = to.iter().map(|to| system.cluster.name(*to)).collect();
        let heard = Heard::default();
        let linked = async {
            while !missing.is_empty() {
                match events.recv().await.context("the transport has ended")? {
                    NetEvent::Up { peer, .. } => missing.retain(|name| *name != peer),
                    NetEvent::Message { body, .. } => heard.note(&body),
                    _ => {}
                }
            }
            anyhow::Ok(())
        };
        let linked = runtime.block_on(async { tokio::time::timeout(PATIENCE, linked).await });
        linked.context("waited for links")??;
        let noting = heard.clone();
        runtime.spawn(async move {
            while let Some(event) = events.recv().await {
                if let NetEvent::Message { body, .. } = event {
                    noting.note(&body);
                }
            }
        });
        Ok(Self {
            runtime,
            net,
            heard,
        })
    }

    /// Queues a message, which is lost where the queue is full: who says things without end says some of them.
    pub fn say(&self, to: &NodeName, message: &PeerMessage) {
        self.say_bytes(to, encode(message));
    }

    /// The same of what need not be a message.
    pub fn say_bytes(&self, to: &NodeName, bytes: Vec<u8>) {
        self.net.send(to, bytes.into());
    }

    /// What was said to it since this was last asked.
    pub fn heard(&self) -> Vec<PeerMessage> {
        std::mem::take(&mut *self.heard.all())
    }
}

impl Drop for HostilePeer {
    fn drop(&mut self) {
        self.runtime.block_on(self.net.close());
    }
}
