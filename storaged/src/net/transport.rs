//! What connections are set to (docs/operate/transport.md has the measurements).

use std::sync::Arc;
use std::time::Duration;

use quinn::{ClientConfig, MtuDiscoveryConfig, ServerConfig, TransportConfig, VarInt};

use super::requests::REQUESTS_AT_ONCE;
use super::socket::DATAGRAM_BYTES_MAX;
use super::{NetError, TlsIdentity};

/// A connection on which nothing comes ends by itself after this time. Links are given up long before (`pulse`).
const IDLE: Duration = Duration::from_secs(15);
/// A trunk has no beat: it is kept by its dialler, and lost with a rail that carries nothing any more.
const TRUNK_IDLE: Duration = Duration::from_secs(3);
const TRUNK_KEPT_EVERY: Duration = Duration::from_secs(1);
/// Words without a meaning wait in so much memory.
const WORDS_BYTES_MAX: usize = 256;
/// Unread bytes that one stream may have in flight: bandwidth times delay of 100 Gbit/s over 0.3 ms, 4 MB. More of
/// them fall out of the cache between the socket and the reader, and cost a tenth more CPU (docs/operate/transport.md).
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// The same for all streams of a link; all trunks of a peer share as much again.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// But each has at least so much: streams that nobody reads must not stop the others on it.
const TRUNK_WINDOW_BYTES: u32 = 16 << 20;
/// Streams that a peer may have open to us at once on a connection: 64 sessions of 4 edges.
const STREAMS_MAX: u32 = 256;

/// What connections of one kind are set to, whoever dials.
#[derive(Debug)]
pub(super) struct BothSides {
    /// Of those that are accepted.
    pub server: ServerConfig,
    /// Of those that are dialled.
    pub client: ClientConfig,
}

/// Who a node is to those that dial it and that it dials, on links and on so many trunks.
///
/// # Errors
/// [`NetError::Tls`] if the certificate or the key cannot be used.
pub(super) fn both_sides(
    identity: &TlsIdentity,
    trunks: usize,
) -> Result<(BothSides, BothSides), NetError> {
    let transport = Arc::new(of_links());
    let links = BothSides {
        server: server(identity, transport.clone())?,
        client: client(identity, transport)?,
    };
    let trunks = u32::try_from(trunks.max(1)).unwrap_or(u32::MAX);
    let trunks = BothSides {
        server: server(identity, Arc::new(of_accepted_trunks(trunks)))?,
        client: client(identity, Arc::new(of_dialled_trunks()))?,
    };
    Ok((links, trunks))
}

fn server(
    identity: &TlsIdentity,
    transport: Arc<TransportConfig>,
) -> Result<ServerConfig, NetError> {
    let mut server = ServerConfig::with_crypto(Arc::new(identity.server()?));
    server.transport_config(transport);
    Ok(server)
}

fn client(
    identity: &TlsIdentity,
    transport: Arc<TransportConfig>,
) -> Result<ClientConfig, NetError> {
    let mut client = ClientConfig::new(Arc::new(identity.client()?));
    client.transport_config(transport);
    Ok(client)
}

fn of_links() -> TransportConfig {
    let mut config = TransportConfig::default();
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(DATAGRAM_BYTES_MAX);
    config
        .max_idle_timeout(IDLE.try_into().ok())
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(u64::from(CONNECTION_WINDOW_BYTES))
        .max_concurrent_uni_streams(STREAMS_MAX.into())
        .max_concurrent_bidi_streams(REQUESTS_AT_ONCE.into())
        .datagram_receive_buffer_size(Some(WORDS_BYTES_MAX))
        .datagram_send_buffer_size(WORDS_BYTES_MAX)
        .mtu_discovery_config(Some(discovery));
    config
}

fn of_accepted_trunks(trunks: u32) -> TransportConfig {
    let mut config = of_links();
    let window = (CONNECTION_WINDOW_BYTES / trunks).max(TRUNK_WINDOW_BYTES);
    config
        .max_idle_timeout(TRUNK_IDLE.try_into().ok())
        .max_concurrent_bidi_streams(1u32.into())
        .receive_window(VarInt::from_u32(window));
    config
}

/// The peer has trunks of its own for what it sends: on these nothing comes but acknowledgements.
fn of_dialled_trunks() -> TransportConfig {
    let mut config = of_links();
    config
        .max_idle_timeout(TRUNK_IDLE.try_into().ok())
        .keep_alive_interval(Some(TRUNK_KEPT_EVERY))
        .max_concurrent_uni_streams(0u32.into())
        .max_concurrent_bidi_streams(0u32.into());
    config
}
