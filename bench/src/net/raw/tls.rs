//! TLS 1.3 over TCP, by rustls in the process: what a second transport without the kernel's help would be.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConnection, RootCertStore, ServerConnection, Stream};
use storaged::net::cert::CA_CERTIFICATE;

use super::quic::{Settings, identity};
use super::{NAMES, RawArgs, WRITE_BYTES, say_ready, writes};

/// See [`super::receive`].
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    let (certificates, key) = identity(&args.certificates, NAMES[1])?;
    let provider = Settings::parse(&args.settings)?.provider()?;
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(certificates, key)?;
    let config = Arc::new(config);
    let listener = TcpListener::bind(args.address)?;
    say_ready();
    let mut buffer = vec![0; WRITE_BYTES];
    for stream in listener.incoming() {
        let mut stream = stream?;
        let mut connection = ServerConnection::new(config.clone())?;
        let mut tls = Stream::new(&mut connection, &mut stream);
        while tls.read(&mut buffer)? > 0 {}
        // Closing tells the sender that everything is here.
    }
    Ok(())
}

/// See [`super::send`].
///
/// # Errors
/// If the bytes do not arrive.
pub fn send(args: &RawArgs) -> Result<Duration> {
    let mut roots = RootCertStore::empty();
    let ca = args.certificates.join(CA_CERTIFICATE);
    roots.add(CertificateDer::from_pem_file(ca)?)?;
    let provider = Settings::parse(&args.settings)?.provider()?;
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let name = ServerName::try_from(format!("{}.node.storaged", NAMES[1]))?;
    let block = vec![0x5a; WRITE_BYTES];
    let mut fastest = Duration::MAX;
    for _ in 0..args.rounds {
        let mut stream = TcpStream::connect(args.address)?;
        stream.set_nodelay(true)?;
        let mut connection = ClientConnection::new(config.clone(), name.clone())?;
        let mut tls = Stream::new(&mut connection, &mut stream);
        let started = Instant::now();
        for size in writes(args.bytes) {
            tls.write_all(&block[..size])?;
        }
        tls.conn.send_close_notify();
        tls.flush()?;
        stream.shutdown(Shutdown::Write)?;
        // What comes before the end are session tickets.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest)?;
        ensure!(rest.len() < 4096, "the receiver sent something back");
        fastest = fastest.min(started.elapsed());
    }
    Ok(fastest)
}
