//! A node of the cluster that says something without end, faster than anybody can decide: a transport with its certificate, in its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use storaged::config::{Config, ConfigFile};
use storaged::net::{LINK_VERSIONS, Net, NetConfig, NetEvent, TlsIdentity, UdpFactory};
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::peer::{CheckpointKey, Fence, PeerMessage};
use storaged_sdk::wire::{
    CheckpointState, Generation, Namespace, NodeName, Owner, RunId, Step, encode,
};
use storaged_tests::system::{System, shards, wait};
use tokio::runtime::Runtime;

/// Fences of a message: it costs whoever reads it much more than who says it.
const FENCES: usize = 400;

/// It goes on until this is dropped.
struct Flood {
    is_over: Arc<AtomicBool>,
    said: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Flood {
    /// In place of this node, which must not run, to that one.
    fn start(system: &System, node: usize, to: usize) -> Result<Self> {
        let config = ConfigFile::load(&system.cluster.config_path(node))?.validate()?;
        let to = system.cluster.name(to);
        let (is_over, said) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (over, count) = (is_over.clone(), said.clone());
        let thread = std::thread::spawn(move || {
            Runtime::new()?.block_on(flood(&config, &to, &over, &count))
        });
        Ok(Self {
            is_over,
            said,
            thread: Some(thread),
        })
    }

    fn said(&self) -> u64 {
        self.said.load(Ordering::Relaxed)
    }

    fn end(mut self) -> Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().context("a thread")?.join();
        ended.map_err(|_| anyhow::anyhow!("the flood broke"))?
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

async fn flood(config: &Config, to: &NodeName, over: &AtomicBool, said: &AtomicU64) -> Result<()> {
    let (sender, mut events) = tokio::sync::mpsc::channel(64);
    let net = Net::start(
        NetConfig {
            place: config.name.clone(),
            node: config.node.clone(),
            generation: Generation::new(u64::MAX / 2),
            listen: config.listen,
            trunks: Vec::new(),
            identity: TlsIdentity::load(config.tls.as_ref().context("certificates")?)?,
            peers: config.peers.clone(),
            near: config.peers.iter().map(|peer| peer.name.clone()).collect(),
            agreement: config.agreement(),
            versions: LINK_VERSIONS,
            sockets: Arc::new(UdpFactory),
            seed: None,
        },
        sender,
    )
    .await?;
    while let Some(event) = events.recv().await {
        if matches!(&event, NetEvent::Up { peer, .. } if peer == to) {
            break;
        }
    }
    // Its answers are nobody's.
    let answers = tokio::spawn(async move { while events.recv().await.is_some() {} });
    let fence = Fence {
        namespace: Namespace::new("nobodys")?,
        owner: Owner::of_token(b"nobody"),
        run: RunId::ZERO,
        promised: RunId::ZERO,
    };
    let message: Bytes = encode(&PeerMessage::Fences(vec![fence; FENCES])).into();
    while !over.load(Ordering::Relaxed) {
        net.send(to, message.clone());
        said.fetch_add(1, Ordering::Relaxed);
        tokio::task::yield_now().await;
    }
    net.close().await;
    answers.abort();
    Ok(())
}

#[test]
fn a_peer_that_says_something_without_end_keeps_nobody_from_saving() -> Result<()> {
    let mut system = System::start(3, None, "")?;
    let members = ConfigFile::load(&system.cluster.config_path(0))?
        .validate()?
        .members;
    let (run, mut trainers) = system.trainers(2)?;
    system.cluster.kill(2)?;
    let flood = Flood::start(&system, 2, 0)?;
    wait("a flood", || {
        ensure!(flood.said() > 5_000, "{}", flood.said());
        Ok(())
    })?;
    // It decides nothing itself, so steps that it is the home node of are not committed.
    let is_decided = |step: &u64| {
        let key = CheckpointKey {
            namespace: system.namespace.clone(),
            run,
            step: Step::new(*step),
        };
        storaged_plan::homes(&members, &key, 1) != [system.cluster.name(2)]
    };
    let steps: Vec<u64> = (1..).filter(is_decided).take(8).collect();
    for step in steps {
        system.save(&mut trainers, step, &shards(2, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Committed)?;
    }
    flood.end()?;
    Ok(())
}
