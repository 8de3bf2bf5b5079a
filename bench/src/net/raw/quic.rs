//! quinn by itself: as it comes, or with settings to try one by one.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use quinn::congestion::{BbrConfig, CubicConfig, NewRenoConfig};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, MtuDiscoveryConfig, TokioRuntime, TransportConfig};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use storaged::net::cert::CA_CERTIFICATE;
use tokio::task::JoinSet;

use super::{NAMES, RawArgs, WRITE_BYTES, say_ready, writes};

/// Settings to try; none means quinn's own default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Settings {
    /// Largest datagram that discovery tries.
    mtu: Option<u16>,
    /// First datagram size.
    initial_mtu: Option<u16>,
    /// Receive window of a stream, bytes.
    stream_window: Option<u32>,
    /// Receive window of a connection, bytes.
    window: Option<u32>,
    /// Bytes sent and not acknowledged.
    send_window: Option<u64>,
    /// Congestion control: cubic, bbr or newreno.
    congestion: Option<String>,
    /// Acknowledge after so many packets.
    ack_every: Option<u32>,
    /// Socket buffers, bytes.
    socket: Option<usize>,
    /// Several packets per system call.
    offload: Option<String>,
    /// Connections side by side, each with an endpoint of its own at the sender.
    connections: Option<usize>,
    /// Threads of the runtime.
    threads: Option<usize>,
    /// Cipher suite: aes128, aes256 or chacha.
    cipher: Option<String>,
    /// Bytes of a write.
    write: Option<usize>,
}

impl Settings {
    /// From `name=value,name=value`.
    ///
    /// # Errors
    /// For a name or value that is not known.
    pub fn parse(text: &str) -> Result<Self> {
        let mut settings = Self::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair
                .split_once('=')
                .with_context(|| format!("expected name=value, got {pair}"))?;
            match name {
                "mtu" => settings.mtu = Some(value.parse()?),
                "initial_mtu" => settings.initial_mtu = Some(value.parse()?),
                "stream_window" => settings.stream_window = Some(value.parse()?),
                "window" => settings.window = Some(value.parse()?),
                "send_window" => settings.send_window = Some(value.parse()?),
                "cc" => settings.congestion = Some(value.into()),
                "ack_every" => settings.ack_every = Some(value.parse()?),
                "socket" => settings.socket = Some(value.parse()?),
                "offload" => settings.offload = Some(value.into()),
                "connections" => settings.connections = Some(value.parse()?),
                "threads" => settings.threads = Some(value.parse()?),
                "cipher" => settings.cipher = Some(value.into()),
                "write" => settings.write = Some(value.parse()?),
                _ => bail!("expected a setting of quinn, got {name}"),
            }
        }
        Ok(settings)
    }

    fn transport(&self) -> Result<TransportConfig> {
        let mut config = TransportConfig::default();
        if let Some(mtu) = self.mtu {
            let mut discovery = MtuDiscoveryConfig::default();
            discovery.upper_bound(mtu);
            config.mtu_discovery_config(Some(discovery));
        }
        if let Some(mtu) = self.initial_mtu {
            config.initial_mtu(mtu);
        }
        if let Some(bytes) = self.stream_window {
            config.stream_receive_window(bytes.into());
        }
        if let Some(bytes) = self.window {
            config.receive_window(bytes.into());
        }
        if let Some(bytes) = self.send_window {
            config.send_window(bytes);
        }
        if let Some(packets) = self.ack_every {
            let mut frequency = quinn::AckFrequencyConfig::default();
            frequency.ack_eliciting_threshold(packets.into());
            config.ack_frequency_config(Some(frequency));
        }
        if let Some(offload) = &self.offload {
            config.enable_segmentation_offload(offload != "off");
        }
        match self.congestion.as_deref() {
            None => {}
            Some("cubic") => {
                config.congestion_controller_factory(Arc::new(CubicConfig::default()));
            }
            Some("bbr") => {
                config.congestion_controller_factory(Arc::new(BbrConfig::default()));
            }
            Some("newreno") => {
                config.congestion_controller_factory(Arc::new(NewRenoConfig::default()));
            }
            Some(other) => bail!("expected cubic, bbr or newreno, got {other}"),
        }
        Ok(config)
    }

    /// TLS of the receiver.
    ///
    /// # Errors
    /// If its certificate cannot be used.
    pub fn server_tls(&self, args: &RawArgs) -> Result<rustls::ServerConfig> {
        let (certificates, key) = identity(&args.certificates, NAMES[1])?;
        let config = rustls::ServerConfig::builder_with_provider(self.provider()?)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?;
        Ok(config)
    }

    /// TLS of the sender.
    ///
    /// # Errors
    /// If the authority's certificate cannot be used.
    pub fn client_tls(&self, args: &RawArgs) -> Result<rustls::ClientConfig> {
        let mut roots = RootCertStore::empty();
        let ca = args.certificates.join(CA_CERTIFICATE);
        roots.add(CertificateDer::from_pem_file(ca)?)?;
        let config = rustls::ClientConfig::builder_with_provider(self.provider()?)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(config)
    }

    fn provider(&self) -> Result<Arc<CryptoProvider>> {
        let mut provider = rustls::crypto::ring::default_provider();
        if let Some(cipher) = &self.cipher {
            let wanted = match cipher.as_str() {
                "aes128" => "TLS13_AES_128_GCM_SHA256",
                "aes256" => "TLS13_AES_256_GCM_SHA384",
                "chacha" => "TLS13_CHACHA20_POLY1305_SHA256",
                other => bail!("expected aes128, aes256 or chacha, got {other}"),
            };
            // QUIC needs AES-128 for its first packets in any case: it stays, behind the wanted one.
            provider
                .cipher_suites
                .sort_by_key(|suite| format!("{:?}", suite.suite()) != wanted);
        }
        Ok(Arc::new(provider))
    }

    fn runtime(&self) -> Result<tokio::runtime::Runtime> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let threads = self.threads.unwrap_or(2);
        Ok(builder.worker_threads(threads).enable_all().build()?)
    }

    fn endpoint(
        &self,
        at: std::net::SocketAddr,
        server: Option<quinn::ServerConfig>,
    ) -> Result<Endpoint> {
        let socket = UdpSocket::bind(at)?;
        if let Some(bytes) = self.socket {
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, bytes)?;
            rustix::net::sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
        }
        let mut config = EndpointConfig::default();
        if let Some(mtu) = self.mtu.or(self.initial_mtu) {
            config.max_udp_payload_size(mtu)?;
        }
        Ok(Endpoint::new(
            config,
            server,
            socket,
            Arc::new(TokioRuntime),
        )?)
    }
}

/// See [`super::receive`].
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    let settings = Settings::parse(&args.settings)?;
    let crypto = QuicServerConfig::try_from(settings.server_tls(args)?)?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    server.transport_config(Arc::new(settings.transport()?));
    settings.runtime()?.block_on(async {
        let endpoint = settings.endpoint(args.address, Some(server))?;
        say_ready();
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(async move {
                let Ok(connection) = incoming.await else {
                    return;
                };
                let mut buffer = vec![0; WRITE_BYTES];
                while let Ok(mut stream) = connection.accept_uni().await {
                    while let Ok(Some(_)) = stream.read(&mut buffer).await {}
                }
            });
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
    let crypto = QuicClientConfig::try_from(settings.client_tls(args)?)?;
    let mut client = quinn::ClientConfig::new(Arc::new(crypto));
    client.transport_config(Arc::new(settings.transport()?));
    settings.runtime()?.block_on(async {
        let count = settings.connections.unwrap_or(1);
        let mut connections = Vec::new();
        for _ in 0..count {
            let any = (args.sender.ip(), 0).into();
            let endpoint = settings.endpoint(any, None)?;
            let name = format!("{}.node.storaged", NAMES[1]);
            connections.push(
                endpoint
                    .connect_with(client.clone(), args.address, &name)?
                    .await?,
            );
        }
        // Path discovery goes on for some round trips; a daemon's connections are old when a step comes.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let mut fastest = Duration::MAX;
        for _ in 0..args.rounds {
            let started = Instant::now();
            let mut streams = JoinSet::new();
            for connection in &connections {
                let (connection, settings) = (connection.clone(), settings.clone());
                streams.spawn(send_stream(connection, settings, args.bytes / count as u64));
            }
            while let Some(ended) = streams.join_next().await {
                ended??;
            }
            fastest = fastest.min(started.elapsed());
        }
        if let Some(connection) = connections.first() {
            let stats = connection.stats();
            let (path, frames) = (stats.path, stats.frame_tx);
            eprintln!(
                "sent {} datagrams in {} calls, received {} in {}",
                stats.udp_tx.datagrams, stats.udp_tx.ios, stats.udp_rx.datagrams, stats.udp_rx.ios
            );
            eprintln!(
                "mtu {} rtt {:?} cwnd {} lost {} of {} packets, {} congestion events, {} black holes; data blocked {} stream {}",
                path.current_mtu, path.rtt, path.cwnd, path.lost_packets, path.sent_packets, path.congestion_events,
                path.black_holes_detected, frames.data_blocked, frames.stream_data_blocked
            );
        }
        Ok(fastest)
    })
}

async fn send_stream(connection: quinn::Connection, settings: Settings, bytes: u64) -> Result<()> {
    let mut stream = connection.open_uni().await?;
    match settings.write {
        // By slices, which quinn copies.
        Some(size) => {
            let block = vec![0x5a; size];
            for _ in 0..bytes / size as u64 {
                stream.write_all(&block).await?;
            }
        }
        None => {
            let block = Bytes::from(vec![0x5a; WRITE_BYTES]);
            for size in writes(bytes) {
                stream.write_chunk(block.slice(..size)).await?;
            }
        }
    }
    stream.finish()?;
    stream.stopped().await?;
    Ok(())
}

fn identity(
    directory: &Path,
    name: &str,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let certificate = CertificateDer::from_pem_file(directory.join(format!("{name}.pem")))?;
    let key = PrivateKeyDer::from_pem_file(directory.join(format!("{name}.key")))?;
    Ok((vec![certificate], key))
}

#[cfg(test)]
mod tests {
    use super::Settings;

    #[test]
    fn settings_are_parsed_or_refused() {
        let settings = Settings::parse("mtu=8952,cc=bbr").expect("both are known");
        assert_eq!(settings.mtu, Some(8952));
        assert_eq!(settings.congestion.as_deref(), Some("bbr"));
        assert_eq!(
            Settings::parse("").expect("none is fine"),
            Settings::default()
        );
        for bad in ["mtu", "speed=1", "mtu=fast"] {
            assert!(Settings::parse(bad).is_err(), "{bad}");
        }
    }
}
