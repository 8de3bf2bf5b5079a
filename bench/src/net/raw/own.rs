//! The daemons' own transport, without a daemon around it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use storaged::net::cert::CA_CERTIFICATE;
use storaged::net::{
    Agreement, DataStream, LINK_VERSIONS, Net, NetConfig, NetEvent, NodeNaming, Peer, RailHint,
    TlsFiles, TlsIdentity, UdpFactory,
};
use storaged_sdk::wire::peer::StreamRecord;
use storaged_sdk::wire::{Generation, NodeName, SessionId};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{NAMES, RawArgs, WRITE_BYTES, say_ready, writes};

/// What may be tried.
struct Settings {
    /// Streams at once.
    streams: u32,
    sockets: u16,
    /// As many as a daemon has on two cores.
    threads: usize,
}

impl Settings {
    fn parse(text: &str) -> Result<Self> {
        let mut settings = Self {
            streams: 1,
            sockets: 1,
            threads: 2,
        };
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("streams", value)) => settings.streams = value.parse()?,
                Some(("sockets", value)) => settings.sockets = value.parse()?,
                Some(("threads", value)) => settings.threads = value.parse()?,
                _ => bail!("expected streams=N, sockets=N or threads=N, got {pair}"),
            }
        }
        Ok(settings)
    }

    fn runtime(&self) -> Result<Runtime> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        Ok(builder.worker_threads(self.threads).enable_all().build()?)
    }
}

/// See [`super::receive`].
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    let settings = Settings::parse(&args.settings)?;
    settings.runtime()?.block_on(async {
        let (_net, mut events) = start(args, &settings, 1).await?;
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
    let settings = Settings::parse(&args.settings)?;
    settings.runtime()?.block_on(async {
        let (net, mut events) = start(args, &settings, 0).await?;
        let up =
            async { while !matches!(events.recv().await, None | Some(NetEvent::Up { .. })) {} };
        let waited = tokio::time::timeout(Duration::from_secs(20), up).await;
        waited.context("no link to the receiver within 20 s")?;
        let to = NodeName::new(NAMES[1])?;
        let block = Bytes::from(vec![0x5a; WRITE_BYTES]);
        let mut fastest = Duration::MAX;
        for round in 0..args.rounds {
            let mut streams = JoinSet::new();
            for edge in 0..settings.streams {
                let record = StreamRecord {
                    leader: NodeName::new(NAMES[0])?,
                    session: SessionId::new(round as u64),
                    edge,
                };
                let stream = net.open_stream(&to, &record, RailHint::default()).await?;
                let bytes = args.bytes / u64::from(settings.streams);
                streams.spawn(send_on(stream, block.clone(), bytes));
            }
            let started = Instant::now();
            while let Some(sent) = streams.join_next().await {
                sent??;
            }
            fastest = fastest.min(started.elapsed());
        }
        Ok(fastest)
    })
}

async fn send_on(mut opened: DataStream, block: Bytes, bytes: u64) -> Result<()> {
    let stream = &mut opened.stream;
    for size in writes(bytes) {
        stream.write_chunk(block.slice(..size)).await?;
    }
    stream.finish()?;
    stream.stopped().await?;
    Ok(())
}

async fn start(
    args: &RawArgs,
    settings: &Settings,
    end: usize,
) -> Result<(Arc<Net>, mpsc::Receiver<NetEvent>)> {
    let addresses = [args.sender, args.address];
    let (events, received) = mpsc::channel(64);
    let config = NetConfig {
        identity: identity(&args.certificates, NAMES[end])?,
        place: NodeName::new(NAMES[end])?,
        node: NodeName::new(NAMES[end])?,
        generation: Generation::new(end as u64),
        listen: addresses[end],
        trunks: (1..settings.sockets)
            .map(|number| SocketAddr::new(addresses[end].ip(), addresses[end].port() + number))
            .collect(),
        peers: vec![Peer::named(
            NodeName::new(NAMES[1 - end])?,
            addresses[1 - end],
        )],
        near: BTreeSet::new(),
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
