//! Transports in one process: who links to whom, and what they say if not.

mod requests;
mod spiffe;
mod trunks;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use storaged_plan::Member;
use storaged_wire::peer::CONTROL_FRAME_BYTES_MAX;
use storaged_wire::{ChunkSize, Generation, Geometry, NodeName};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::cert::{CA_CERTIFICATE, REVOKED, create_ca, issue, renew, revoke};
use super::streams::KIND_CONTROL;
use super::{
    Agreement, Net, NetConfig, NetError, NetEvent, NodeNaming, Peer, TlsError, TlsFiles,
    TlsIdentity, UdpFactory, VersionRange, Whose,
};

const DAY: Duration = Duration::from_secs(86_400);
const PATIENCE: Duration = Duration::from_secs(20);

fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).unwrap()
}

fn files(directory: &Path, node: usize) -> TlsFiles {
    TlsFiles {
        ca: directory.join(CA_CERTIFICATE),
        certificate: directory.join(format!("n{node}.pem")),
        key: directory.join(format!("n{node}.key")),
        crl: None,
        naming: NodeNaming::Dns,
    }
}

fn identity(directory: &Path, node: usize) -> TlsIdentity {
    TlsIdentity::load(&files(directory, node)).unwrap()
}

fn certificates(nodes: usize) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    create_ca(directory.path(), DAY).unwrap();
    (0..nodes).for_each(|node| drop(issue(directory.path(), &name(node), DAY).unwrap()));
    directory
}

/// All share a group.
fn group() -> BTreeSet<NodeName> {
    (0..3).map(name).collect()
}

fn agreement(m: usize) -> Agreement {
    let member = |node| Member {
        name: name(node),
        failure_domain: format!("rack-{node}"),
        cordon: Default::default(),
        seat: None,
    };
    let members: Vec<Member> = (0..3).map(member).collect();
    let geometry = Geometry::new(1, m).unwrap();
    Agreement::of(Some(geometry), ChunkSize::new(1 << 16).unwrap(), &members)
}

/// What one transport is started with.
struct Spec {
    node: usize,
    peers: Vec<Peer>,
    m: usize,
    versions: (u16, u16),
    naming: NodeNaming,
    trunks: Vec<SocketAddr>,
}

impl Spec {
    fn new(node: usize, peers: Vec<Peer>) -> Self {
        Self {
            node,
            peers,
            m: 1,
            versions: (4, 5),
            naming: NodeNaming::Dns,
            trunks: Vec::new(),
        }
    }
}

struct Started {
    net: Arc<Net>,
    events: mpsc::Receiver<NetEvent>,
}

/// Each start is a new incarnation: a second connection of the same one is taken for a better connection, and no restart is told.
fn incarnation() -> Generation {
    static STARTS: AtomicU64 = AtomicU64::new(1);
    Generation::new(STARTS.fetch_add(1, Ordering::Relaxed))
}

async fn start(directory: &Path, spec: Spec) -> Started {
    let files = TlsFiles {
        naming: spec.naming,
        ..files(directory, spec.node)
    };
    let (sender, events) = mpsc::channel(64);
    let config = NetConfig {
        place: name(spec.node),
        node: name(spec.node),
        generation: incarnation(),
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        trunks: spec.trunks,
        identity: TlsIdentity::load(&files).unwrap(),
        peers: spec.peers,
        near: group(),
        agreement: agreement(spec.m),
        versions: VersionRange {
            min: spec.versions.0,
            max: spec.versions.1,
        },
        sockets: Arc::new(UdpFactory),
        seed: None,
    };
    let net = Net::start(config, sender).await.unwrap();
    Started { net, events }
}

impl Started {
    fn peer(&self, node: usize) -> Peer {
        Peer::named(name(node), self.net.local_addr().unwrap())
    }

    /// Waits for an event that is the wanted one.
    async fn wait<T>(&mut self, wanted: impl Fn(NetEvent) -> Option<T>) -> T {
        let waiting = async {
            loop {
                let event = self.events.recv().await.expect("the transport runs");
                if let Some(found) = wanted(event) {
                    return found;
                }
            }
        };
        timeout(PATIENCE, waiting).await.expect("in time")
    }

    async fn version_of_link(&mut self) -> u16 {
        self.wait(|event| match event {
            NetEvent::Up { version, .. } => Some(version),
            _ => None,
        })
        .await
    }

    /// Until a peer has said anew what it should have in common with this node.
    async fn heard(&mut self) {
        self.wait(|event| matches!(event, NetEvent::AgreementSaid { .. }).then_some(()))
            .await;
    }

    async fn goes_down(&mut self) {
        self.wait(|event| matches!(event, NetEvent::Down { .. }).then_some(()))
            .await;
    }

    async fn refusal(&mut self) -> NetError {
        self.wait(|event| match event {
            NetEvent::Refused { why, .. } => Some(why),
            NetEvent::Up { .. } => panic!("it is linked"),
            _ => None,
        })
        .await
    }
}

/// Two transports that know each other: node 1 dials node 0, and is told to it as a peer.
async fn pair(directory: &Path, first: Spec, second: Spec) -> (Started, Started) {
    let (m, node) = (first.m, second.node);
    let first = start(directory, first).await;
    let mut second = second;
    second.peers = vec![first.peer(0)];
    let second = start(directory, second).await;
    first
        .net
        .set_peers(vec![second.peer(node)], &group(), agreement(m));
    (first, second)
}

/// A peer that does not know what is said anew is told it at the next link, and this one stays.
#[tokio::test]
async fn what_changes_is_said_on_links_that_are_up_to_those_who_know_what_it_is() {
    for (oldest, newest) in [(8, 9), (8, 8)] {
        let directory = certificates(2);
        let of = |node| Spec {
            versions: (8, 9),
            ..Spec::new(node, Vec::new())
        };
        let older = Spec {
            versions: (oldest, newest),
            ..of(0)
        };
        let (mut older, mut newer) = pair(directory.path(), older, of(1)).await;
        assert_eq!(newer.version_of_link().await, newest);
        assert_eq!(older.version_of_link().await, newest);
        for key in ["key 1", "key 2"] {
            let said = agreement(1).advising(1, Some(key.into()));
            newer.net.set_agreement(said);
        }
        older.net.set_agreement(agreement(1).advising(1, None));
        if newest == 9 {
            let differs = timeout(PATIENCE, async {
                while newer.net.advice(&name(0)).is_none_or(|all| all.is_empty()) {
                    older.heard().await;
                    newer.heard().await;
                }
            });
            differs.await.expect("both have said what they are");
            assert_eq!(newer.net.advice(&name(0)).map(|all| all.len()), Some(1));
            older.net.set_peers(Vec::new(), &group(), agreement(1));
            newer.goes_down().await;
            assert_eq!(newer.net.advice(&name(0)), None, "not that all is the same");
        } else {
            // Were it said, the link would end by it.
            newer.net.send(&name(0), "a word".into());
            let body = older.wait(|event| match event {
                NetEvent::Message { body, .. } => Some(body),
                NetEvent::Down { .. } | NetEvent::AgreementSaid { .. } => panic!("{event:?}"),
                _ => None,
            });
            assert_eq!(body.await, b"a word");
        }
    }
}

#[tokio::test]
async fn an_older_and_a_newer_version_speak_the_highest_that_both_know() {
    let directory = certificates(2);
    let older = Spec {
        versions: (3, 4),
        ..Spec::new(0, Vec::new())
    };
    let newer = Spec::new(1, Vec::new());
    let (mut older, mut newer) = pair(directory.path(), older, newer).await;
    assert_eq!(newer.version_of_link().await, 4);
    assert_eq!(older.version_of_link().await, 4);
}

#[tokio::test]
async fn without_a_common_version_both_say_both_ranges() {
    let directory = certificates(2);
    let newer = Spec {
        versions: (6, 7),
        ..Spec::new(0, Vec::new())
    };
    let (mut newer, mut older) = pair(directory.path(), newer, Spec::new(1, Vec::new())).await;
    for side in [&mut newer, &mut older] {
        let told = side.refusal().await.to_string();
        assert!(told.contains("4 to 5") && told.contains("6 to 7"), "{told}");
    }
}

#[tokio::test]
async fn nodes_that_are_configured_differently_name_the_key_and_both_values() {
    let directory = certificates(2);
    let other = Spec {
        m: 2,
        ..Spec::new(0, Vec::new())
    };
    let (mut other, mut one) = pair(directory.path(), other, Spec::new(1, Vec::new())).await;
    let told = one.refusal().await.to_string();
    assert!(told.contains("coding.m is 1 here and 2 there"), "{told}");
    let told = other.refusal().await.to_string();
    assert!(told.contains("coding.m is 2 here and 1 there"), "{told}");
    // A reload of the one that is wrong mends it.
    one.net
        .set_peers(vec![other.peer(0)], &group(), agreement(2));
    assert_eq!(one.version_of_link().await, 5);
}

/// Else the driver would take a peer for lost that is linked.
#[tokio::test]
async fn a_link_is_told_of_once_the_one_before_it_has_ended() {
    let directory = certificates(2);
    let mut hub = start(directory.path(), Spec::new(0, Vec::new())).await;
    let mut next = start(directory.path(), Spec::new(1, vec![hub.peer(0)])).await;
    let last = hub.net.ends_late(name(1));
    hub.net
        .set_peers(vec![next.peer(1)], &group(), agreement(1));
    next.version_of_link().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    while let Ok(event) = hub.events.try_recv() {
        assert!(!matches!(event, NetEvent::Up { .. }), "{event:?}");
    }
    last.cancel();
    hub.version_of_link().await;
}

#[tokio::test]
async fn a_reload_adds_and_removes_peers_and_keeps_the_links_of_the_others() {
    let directory = certificates(3);
    let (mut hub, mut first) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    hub.version_of_link().await;
    first.version_of_link().await;
    let mut second = start(directory.path(), Spec::new(2, vec![hub.peer(0)])).await;
    hub.net
        .set_peers(vec![first.peer(1), second.peer(2)], &group(), agreement(1));
    hub.version_of_link().await;
    second.version_of_link().await;
    hub.net
        .set_peers(vec![second.peer(2)], &group(), agreement(1));
    let gone = hub
        .wait(|event| match event {
            NetEvent::Down { peer, .. } => Some(peer),
            NetEvent::Up { peer, .. } => panic!("{peer} was linked to again"),
            _ => None,
        })
        .await;
    assert_eq!(gone, name(1));
    let refused = hub
        .wait(|event| match event {
            NetEvent::Failed(error @ NetError::UnknownPeer(_)) => Some(error),
            _ => None,
        })
        .await;
    assert!(refused.to_string().contains("n1"));
}

#[tokio::test]
async fn a_certificate_is_taken_anew_and_the_link_stays() {
    let directory = certificates(2);
    let (mut hub, mut first) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    hub.version_of_link().await;
    first.version_of_link().await;
    let before = identity(directory.path(), 0).validity().unwrap();
    renew(directory.path(), &name(0), 2 * DAY).unwrap();
    let renewed = identity(directory.path(), 0);
    assert!(renewed.validity().unwrap().ends > before.ends);
    hub.net.set_identity(&renewed).unwrap();
    let other = identity(directory.path(), 1);
    assert!(hub.net.set_identity(&other).is_err());
    let quiet = timeout(Duration::from_secs(1), first.events.recv()).await;
    assert!(quiet.is_err(), "{quiet:?}");
}

/// One whose certificate has expired is told that it is its own; the others are told whose it is.
#[tokio::test]
async fn it_is_said_whose_certificate_expired() {
    let directory = certificates(1);
    issue(directory.path(), &name(1), Duration::ZERO).unwrap();
    let (mut sound, mut expired) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    let own = expired.refusal().await;
    assert!(matches!(own, NetError::OwnCertificate { .. }), "{own}");
    assert!(own.to_string().contains("storaged cert renew"), "{own}");
    let theirs = sound.refusal().await;
    assert!(
        matches!(&theirs, NetError::PeerCertificate { peer, .. } if peer == "n1"),
        "{theirs}"
    );
}

/// A peer that stops in the midst of a handshake or at once after it has done nothing wrong.
#[tokio::test]
async fn a_restart_is_no_fault_of_a_peer() {
    let directory = certificates(2);
    let (mut hub, mut first) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    hub.version_of_link().await;
    first.version_of_link().await;
    first.net.close().await;
    drop(first);
    let again = start(directory.path(), Spec::new(1, vec![hub.peer(0)])).await;
    hub.net
        .set_peers(vec![again.peer(1)], &group(), agreement(1));
    let worst = hub
        .wait(|event| match event {
            NetEvent::Up { .. } => Some(None),
            NetEvent::Failed(NetError::Connection { .. }) => None,
            NetEvent::Failed(error) => Some(Some(error)),
            NetEvent::Refused { why, .. } => Some(Some(why)),
            _ => None,
        })
        .await;
    assert!(worst.is_none(), "{worst:?}");
}

/// A peer that is stopped (SIGSTOP) or cut off in the midst of a record gives its streams up when it is back, before the
/// connection ends: that is no fault of the protocol. What it should not have sent is.
#[tokio::test]
async fn a_stream_that_is_given_up_is_a_lost_link_and_nonsense_is_a_fault() {
    let directory = certificates(2);
    let (mut hub, _first) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    for said in [Said::HalfAndReset, Said::HalfAndEnd, Said::Nonsense] {
        let connection = stranger(directory.path(), 1, &hub).await;
        let (mut send, _recv) = connection.open_bi().await.unwrap();
        match said {
            Said::HalfAndReset => {
                send.write_all(&[9, 0, 0, 0, 1]).await.unwrap();
                tokio::time::sleep(Duration::from_millis(100)).await;
                send.reset(quinn::VarInt::from_u32(0)).unwrap();
            }
            Said::HalfAndEnd => {
                send.write_all(&[9, 0, 0, 0, 1]).await.unwrap();
                drop(send);
            }
            Said::Nonsense => send.write_all(&[1, 0, 0, 0, 0xff]).await.unwrap(),
        }
        let error = hub
            .wait(|event| match event {
                NetEvent::Failed(NetError::Connection { .. }) => None,
                NetEvent::Failed(error) => Some(error),
                _ => None,
            })
            .await;
        match said {
            Said::HalfAndReset | Said::HalfAndEnd => {
                assert!(matches!(error, NetError::Lost { .. }), "{error}");
            }
            Said::Nonsense => assert!(matches!(error, NetError::Protocol { .. }), "{error}"),
        }
    }
}

/// Nobody knows where the next one would begin.
#[tokio::test]
async fn a_frame_that_is_too_long_is_a_fault_and_ends_the_link() {
    let directory = certificates(2);
    let (mut hub, first) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    hub.version_of_link().await;
    let known = first.net.shared.peer(&name(0)).unwrap();
    let connection = known.connection().await.unwrap();
    let mut send = connection.open_uni().await.unwrap();
    let longer = u32::try_from(CONTROL_FRAME_BYTES_MAX).unwrap() + 1;
    send.write_all(&[KIND_CONTROL]).await.unwrap();
    send.write_all(&longer.to_le_bytes()).await.unwrap();
    let error = hub
        .wait(|event| match event {
            NetEvent::Failed(error) => Some(error),
            _ => None,
        })
        .await;
    assert!(matches!(error, NetError::Protocol { .. }), "{error}");
    connection.closed().await;
}

#[derive(Clone, Copy)]
enum Said {
    HalfAndReset,
    HalfAndEnd,
    Nonsense,
}

/// A bare connection with a node's certificate.
async fn stranger(directory: &Path, node: usize, to: &Started) -> quinn::Connection {
    let client = identity(directory, node).client().unwrap();
    let config = quinn::ClientConfig::new(Arc::new(client));
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let endpoint = quinn::Endpoint::client(local).unwrap();
    let address = to.net.local_addr().unwrap();
    let name = super::node_naming::dns_name(&name(0));
    let connecting = endpoint.connect_with(config, address, &name).unwrap();
    connecting.await.unwrap()
}

/// All authorities have one name; both nodes say which keys they have, and that a renewal would not help.
#[tokio::test]
async fn a_certificate_of_another_authority_names_both_authorities() {
    let directory = certificates(1);
    let other = tempfile::tempdir().unwrap();
    create_ca(other.path(), DAY).unwrap();
    issue(other.path(), &name(1), DAY).unwrap();
    for kind in ["pem", "key"] {
        let file = format!("n1.{kind}");
        std::fs::copy(other.path().join(&file), directory.path().join(&file)).unwrap();
    }
    let key_of = |directory: &Path| {
        let ca = directory.join(CA_CERTIFICATE);
        let certificate = files(directory, 0).certificate;
        let files = TlsFiles {
            ca,
            crl: None,
            naming: NodeNaming::Dns,
            certificate: if directory == other.path() {
                directory.join("n1.pem")
            } else {
                certificate
            },
            key: if directory == other.path() {
                directory.join("n1.key")
            } else {
                directory.join("n0.key")
            },
        };
        let text = TlsIdentity::load(&files).unwrap().authorities();
        text.rsplit(' ').next().unwrap().to_owned()
    };
    let (known, unknown) = (key_of(directory.path()), key_of(other.path()));
    assert_ne!(known, unknown);
    let (mut sound, mut foreign) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    for (side, expected) in [(&mut sound, Whose::Theirs), (&mut foreign, Whose::Ours)] {
        let error = side.refusal().await;
        assert!(
            matches!(&error, NetError::Authority { whose, .. } if *whose == expected),
            "{error}"
        );
        let told = error.to_string();
        for word in [&*known, &*unknown, "storaged cert issue DIR NODE", "tls.ca"] {
            assert!(told.contains(word), "{word} in {told}");
        }
        assert!(!told.contains("storaged cert renew"), "{told}");
    }
}

#[test]
fn without_an_authority_the_command_that_makes_one_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let error = issue(directory.path(), &name(0), DAY).unwrap_err();
    let told = error.to_string();
    let command = format!("storaged cert ca {}", directory.path().display());
    assert!(told.contains(&command) && told.contains("ca.key"), "{told}");
}

#[test]
fn a_key_that_others_may_read_is_refused_with_what_helps() {
    use std::os::unix::fs::PermissionsExt;
    let directory = certificates(1);
    let files = files(directory.path(), 0);
    let set = |mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&files.key, mode).unwrap();
    };
    for allowed in [0o600, 0o400, 0o640, 0o660] {
        set(allowed);
        TlsIdentity::load(&files).unwrap();
    }
    for exposed in [0o644, 0o604, 0o602, 0o666] {
        set(exposed);
        let error = TlsIdentity::load(&files).unwrap_err();
        assert!(matches!(error, TlsError::KeyExposed { mode, .. } if mode == exposed));
        let text = error.to_string();
        assert!(text.contains("chmod 640") && text.contains(&format!("{exposed:04o}")));
    }
}

/// With the list that the authority has signed.
fn with_list(directory: &Path, node: usize) -> TlsFiles {
    TlsFiles {
        crl: Some(directory.join(REVOKED)),
        ..files(directory, node)
    }
}

#[test]
fn a_list_names_what_was_revoked_and_grows() {
    let directory = certificates(3);
    for node in [1, 2, 1] {
        revoke(directory.path(), &name(node), None).unwrap();
    }
    let load = |node| TlsIdentity::load(&with_list(directory.path(), node)).unwrap();
    load(0).check(&name(0)).unwrap();
    for node in [1, 2] {
        let error = load(node).check(&name(node)).unwrap_err();
        assert!(matches!(error, TlsError::Revoked { .. }), "{error}");
    }
    // The same list in DER.
    let list = directory.path().join(REVOKED);
    let text = std::fs::read(&list).unwrap();
    let der = CertificateRevocationListDer::from_pem_slice(&text).unwrap();
    std::fs::write(&list, &der).unwrap();
    load(2).check(&name(2)).unwrap_err();
    // The next certificate of a node is not the one that was revoked.
    renew(directory.path(), &name(1), DAY).unwrap();
    load(1).check(&name(1)).unwrap();
}

#[test]
fn lists_of_others_and_what_is_no_list_are_refused() {
    let (ours, theirs) = (certificates(1), certificates(1));
    revoke(theirs.path(), &name(0), None).unwrap();
    let list = ours.path().join(REVOKED);
    std::fs::copy(theirs.path().join(REVOKED), &list).unwrap();
    // Of an authority of the same name, with another key.
    let error = TlsIdentity::load(&with_list(ours.path(), 0)).unwrap_err();
    assert!(matches!(error, TlsError::ForeignList { .. }), "{error}");
    std::fs::remove_file(&list).unwrap();
    revoke(ours.path(), &name(0), None).unwrap();
    let sound = std::fs::read_to_string(&list).unwrap();
    TlsIdentity::load(&with_list(ours.path(), 0)).unwrap();
    let certificate = std::fs::read_to_string(ours.path().join(CA_CERTIFICATE)).unwrap();
    for wrong in [
        "",
        "no list",
        certificate.as_str(),
        &sound[..sound.len() / 2],
    ] {
        std::fs::write(&list, wrong).unwrap();
        let error = TlsIdentity::load(&with_list(ours.path(), 0)).unwrap_err();
        assert!(matches!(error, TlsError::File { .. }), "{wrong}: {error}");
    }
}

#[tokio::test]
async fn a_link_ends_when_its_peers_certificate_is_revoked() {
    let directory = certificates(2);
    let (mut first, mut second) = pair(
        directory.path(),
        Spec::new(0, Vec::new()),
        Spec::new(1, Vec::new()),
    )
    .await;
    first.version_of_link().await;
    second.version_of_link().await;
    revoke(directory.path(), &name(1), None).unwrap();
    let listed = TlsIdentity::load(&with_list(directory.path(), 0)).unwrap();
    first.net.set_identity(&listed).unwrap();
    let (mut is_down, mut is_told) = (false, false);
    while !(is_down && is_told) {
        let news = first.wait(Some).await;
        assert!(!matches!(news, NetEvent::Up { .. }), "it is let in again");
        is_down |= matches!(news, NetEvent::Down { .. });
        is_told |= matches!(news, NetEvent::Failed(NetError::PeerCertificate { peer, .. }) if peer == "n1");
    }
    // Nor can it be dialled.
    let refusal = first.refusal().await;
    assert!(
        matches!(refusal, NetError::PeerCertificate { .. }),
        "{refusal}"
    );
}
