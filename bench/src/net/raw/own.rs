//! The daemons' own transport, without a daemon around it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use storaged::net::cert::CA_CERTIFICATE;
use storaged::net::{
    Agreement, LINK_VERSIONS, Net, NetConfig, NetEvent, NodeNaming, Peer, TlsFiles, TlsIdentity,
    UdpFactory,
};
use storaged_sdk::wire::peer::StreamRecord;
use storaged_sdk::wire::{Generation, NodeName, SessionId};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::{NAMES, RawArgs, WRITE_BYTES, say_ready, writes};

/// As many threads as a daemon's network has.
const THREADS: usize = 2;

/// See [`super::receive`].
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    runtime()?.block_on(async {
        let (_net, mut events) = start(args, 1).await?;
        say_ready();
        while let Some(event) = events.recv().await {
            if let NetEvent::Stream { mut recv, .. } = event {
                let mut buffer = vec![0; WRITE_BYTES];
                tokio::spawn(
                    async move { while let Ok(Some(_)) = recv.read(&mut buffer).await {} },
                );
            }
        }
        Ok(())
    })
}

/// See [`super::send`].
///
/// # Errors
/// If the bytes do not arrive.
pub fn send(args: &RawArgs) -> Result<Duration> {
    runtime()?.block_on(async {
        let (net, mut events) = start(args, 0).await?;
        let up =
            async { while !matches!(events.recv().await, None | Some(NetEvent::Up { .. })) {} };
        let waited = tokio::time::timeout(Duration::from_secs(20), up).await;
        waited.context("no link to the receiver within 20 s")?;
        let block = Bytes::from(vec![0x5a; WRITE_BYTES]);
        let mut fastest = Duration::MAX;
        for round in 0..args.rounds {
            let record = StreamRecord {
                leader: NodeName::new(NAMES[0])?,
                session: SessionId::new(round as u64),
                edge: 0,
            };
            let mut stream = net.open_stream(&NodeName::new(NAMES[1])?, &record).await?;
            let started = Instant::now();
            for size in writes(args.bytes) {
                stream.write_chunk(block.slice(..size)).await?;
            }
            stream.finish()?;
            stream.stopped().await?;
            fastest = fastest.min(started.elapsed());
        }
        Ok(fastest)
    })
}

fn runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    Ok(builder.worker_threads(THREADS).enable_all().build()?)
}

async fn start(args: &RawArgs, end: usize) -> Result<(Arc<Net>, mpsc::Receiver<NetEvent>)> {
    let addresses = [args.sender, args.address];
    let (events, received) = mpsc::channel(64);
    let config = NetConfig {
        identity: identity(&args.certificates, NAMES[end])?,
        place: NodeName::new(NAMES[end])?,
        node: NodeName::new(NAMES[end])?,
        generation: Generation::new(end as u64),
        listen: addresses[end],
        peers: vec![Peer::named(
            NodeName::new(NAMES[1 - end])?,
            addresses[1 - end],
        )],
        group: BTreeSet::new(),
        agreement: Agreement::of(None, storaged_sdk::wire::ChunkSize::new(1 << 18)?, &[]),
        versions: LINK_VERSIONS,
        sockets: Arc::new(UdpFactory),
        seed: None,
    };
    Ok((Net::start(config, events).await?, received))
}

fn identity(directory: &Path, name: &str) -> Result<TlsIdentity> {
    Ok(TlsIdentity::load(&TlsFiles {
        ca: directory.join(CA_CERTIFICATE),
        certificate: directory.join(format!("{name}.pem")),
        key: directory.join(format!("{name}.key")),
        crl: None,
        naming: NodeNaming::Dns,
    })?)
}
