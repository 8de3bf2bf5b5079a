//! Why a connection ended: whose certificate was refused, who broke the protocol, or neither. Told apart by codes, never
//! by an error's text.

use quinn::ConnectionError;

use super::frame::ControlFrameError;
use super::{NetError, Whose};

/// QUIC says TLS alerts as 0x100 and the alert (RFC 9001, 4.8).
const ALERTS: std::ops::Range<u64> = 0x100..0x200;

/// TLS alerts about a certificate (RFC 8446, 6.2): bad, unsupported, revoked, expired, unknown, of an unknown authority,
/// denied, a signature that does not fit, required.
const ABOUT_CERTIFICATES: [u64; 9] = [42, 43, 44, 45, 46, 48, 49, 51, 116];

/// The alert of a check that is not the library's own: of the authority.
const OTHER_AUTHORITY: u64 = 46;

/// Who refused whose certificate, or what else happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndCause {
    /// We refused the peer's certificate.
    TheirCertificate,
    /// The peer refused ours.
    OurCertificate,
    /// The authority of one of the two is not known to the other.
    Authority(Whose),
    /// The peer sent what may not be.
    Protocol,
    /// It ended: a restart, a duplicate that was given up, silence.
    Ended,
}

fn cause(error: &ConnectionError) -> EndCause {
    let alert = |code: u64| ALERTS.contains(&code) && ABOUT_CERTIFICATES.contains(&(code & 0xff));
    let other = |code: u64| ALERTS.contains(&code) && code & 0xff == OTHER_AUTHORITY;
    match error {
        ConnectionError::TransportError(found) if other(found.code.into()) => {
            EndCause::Authority(Whose::Theirs)
        }
        ConnectionError::ConnectionClosed(said) if other(said.error_code.into()) => {
            EndCause::Authority(Whose::Ours)
        }
        ConnectionError::TransportError(found) if alert(found.code.into()) => {
            EndCause::TheirCertificate
        }
        ConnectionError::ConnectionClosed(said) if alert(said.error_code.into()) => {
            EndCause::OurCertificate
        }
        ConnectionError::TransportError(_) | ConnectionError::VersionMismatch => EndCause::Protocol,
        ConnectionError::ConnectionClosed(_)
        | ConnectionError::ApplicationClosed(_)
        | ConnectionError::Reset
        | ConnectionError::TimedOut
        | ConnectionError::LocallyClosed
        | ConnectionError::CidsExhausted => EndCause::Ended,
    }
}

/// A connection's end as an error.
pub(super) fn of_connection(peer: &str, error: &ConnectionError) -> NetError {
    let (peer, reason) = (peer.to_owned(), error.to_string());
    match cause(error) {
        EndCause::TheirCertificate => NetError::PeerCertificate { peer, reason },
        EndCause::OurCertificate => NetError::OwnCertificate { peer, reason },
        EndCause::Authority(whose) => NetError::Authority {
            whose,
            peer,
            reason,
        },
        EndCause::Protocol => NetError::Protocol { peer, reason },
        EndCause::Ended => NetError::Connection { peer, reason },
    }
}

/// What a failed read or write of a stream means: the connection's end if it has ended; that the link was lost if only
/// the stream has, whose end may overtake the connection's; or else that the peer broke the protocol.
pub(super) fn of_stream(
    peer: &str,
    connection: &quinn::Connection,
    error: ControlFrameError,
) -> NetError {
    let peer_name = || peer.to_owned();
    match (connection.close_reason(), error) {
        (Some(error), _) => of_connection(peer, &error),
        (None, ControlFrameError::Lost(reason)) => NetError::Lost {
            peer: peer_name(),
            reason,
        },
        (None, ControlFrameError::Wrong(reason)) => NetError::Protocol {
            peer: peer_name(),
            reason,
        },
    }
}

#[cfg(test)]
mod tests {
    use quinn::{ApplicationClose, VarInt};

    use super::*;

    #[test]
    fn a_peer_that_stops_or_gives_up_a_duplicate_is_no_fault() {
        let stopped = ConnectionError::ApplicationClosed(ApplicationClose {
            error_code: VarInt::from_u32(0),
            reason: bytes::Bytes::from_static(b"stopping"),
        });
        for ended in [stopped, ConnectionError::TimedOut, ConnectionError::Reset] {
            assert!(matches!(
                of_connection("n1", &ended),
                NetError::Connection { .. }
            ));
        }
    }
}
