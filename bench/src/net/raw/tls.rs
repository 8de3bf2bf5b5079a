//! TLS 1.3 over TCP, by rustls in the process: what a second transport without the kernel's help would be.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, Stream};

use super::quic::Settings;
use super::{NAMES, RawArgs, WRITE_BYTES, say_ready, writes};

/// See [`super::receive`].
///
/// # Errors
/// If it cannot listen.
pub fn receive(args: &RawArgs) -> Result<()> {
    let config = Arc::new(Settings::parse(&args.settings)?.server_tls(args)?);
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
    let config = Arc::new(Settings::parse(&args.settings)?.client_tls(args)?);
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
