//! Certificates that name nodes by SPIFFE IDs.

use std::path::Path;

use rcgen::{
    CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType, string::Ia5String,
};
use tempfile::TempDir;

use super::super::node_naming::NameError;
use super::super::{NetError, NodeNaming, TlsError, TlsFiles, TlsIdentity, probe};
use super::{DAY, Spec, create_ca, files, name, pair, start};

const ID: &str = "spiffe://example.org/storaged/";

fn naming(template: &str) -> NodeNaming {
    NodeNaming::Spiffe(template.parse().unwrap())
}

fn uri(text: &str) -> SanType {
    SanType::URI(Ia5String::try_from(text).unwrap())
}

/// Certificates of one authority: of each node, with these names.
fn certificates(of_nodes: &[&[SanType]]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    create_ca(directory.path(), DAY).unwrap();
    let read = |file: &str| std::fs::read_to_string(directory.path().join(file)).unwrap();
    let key = KeyPair::from_pem(&read("ca.key")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&read("ca.pem"), key).unwrap();
    for (node, names) in of_nodes.iter().enumerate() {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.to_vec();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let files = files(directory.path(), node);
        std::fs::write(&files.certificate, certificate.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&files.key, private).unwrap();
    }
    directory
}

fn named_by(template: &str, node: usize) -> Spec {
    Spec {
        naming: naming(template),
        ..Spec::new(node, Vec::new())
    }
}

fn load(directory: &Path, naming: NodeNaming) -> TlsIdentity {
    let files = TlsFiles {
        naming,
        ..files(directory, 0)
    };
    TlsIdentity::load(&files).unwrap()
}

#[tokio::test]
async fn nodes_link_by_their_ids_without_any_dns_name() {
    let directory = certificates(&[&[uri(&format!("{ID}n0"))], &[uri(&format!("{ID}n1"))]]);
    let template = format!("{ID}{{node}}");
    let (mut one, mut other) = pair(
        directory.path(),
        named_by(&template, 0),
        named_by(&template, 1),
    )
    .await;
    assert_eq!(one.version_of_link().await, 5);
    assert_eq!(other.version_of_link().await, 5);
}

/// One authority often signs for all workloads of a trust domain: that it has signed is not enough.
#[tokio::test]
async fn another_workload_of_the_same_authority_is_refused_by_both_sides() {
    let stranger = "spiffe://example.org/web/n1";
    let directory = certificates(&[&[uri(&format!("{ID}n0"))], &[uri(stranger)]]);
    let (mut node, mut other) = pair(
        directory.path(),
        named_by(&format!("{ID}{{node}}"), 0),
        named_by("spiffe://example.org/web/{node}", 1),
    )
    .await;
    let told = node.refusal().await;
    assert!(matches!(told, NetError::PeerCertificate { .. }), "{told}");
    let told = told.to_string();
    assert!(
        told.contains(&format!("expected {ID}n1 as its only URI")),
        "{told}"
    );
    assert!(told.contains(stranger), "{told}");
    let told = other.refusal().await.to_string();
    assert!(
        told.contains("as its only URI") || told.contains("refused"),
        "{told}"
    );
}

/// Whoever dials looks before it says a word: the other side is not asked who this is.
#[tokio::test]
async fn another_workload_hears_nothing_from_whom_it_is_dialled_by() {
    let directory = certificates(&[
        &[uri("spiffe://example.org/web/n0")],
        &[uri(&format!("{ID}n1"))],
    ]);
    let stranger = start(
        directory.path(),
        named_by("spiffe://example.org/web/{node}", 0),
    )
    .await;
    let template = format!("{ID}{{node}}");
    let mut dialling = named_by(&template, 1);
    dialling.peers = vec![stranger.peer(0)];
    let told = start(directory.path(), dialling).await.refusal().await;
    assert!(matches!(told, NetError::PeerCertificate { .. }), "{told}");
    let files = TlsFiles {
        naming: naming(&template),
        ..files(directory.path(), 1)
    };
    let identity = TlsIdentity::load(&files).unwrap();
    let peer = stranger.peer(0);
    let probed = probe(&identity, &name(0), &peer.address).await.unwrap_err();
    assert!(
        matches!(probed, NetError::PeerCertificate { .. }),
        "{probed}"
    );
}

#[test]
fn a_certificate_must_have_the_id_and_no_other_one() {
    let own = uri(&format!("{ID}n0"));
    let other = uri("spiffe://example.org/web");
    let dns = SanType::DnsName(Ia5String::try_from("n0.node.storaged").unwrap());
    let template = format!("{ID}{{node}}");
    for (names, is_taken) in [
        (vec![own.clone()], true),
        (vec![dns.clone(), own.clone()], true),
        (vec![own.clone(), other.clone()], false),
        (vec![other, own], false),
        (vec![dns.clone()], false),
        (vec![uri(&format!("{ID}N0"))], false),
        (vec![uri(&format!("{ID}n0/"))], false),
    ] {
        let directory = certificates(&[&names]);
        let checked = load(directory.path(), naming(&template)).check(&name(0));
        match checked {
            Ok(()) => assert!(is_taken, "{names:?}"),
            Err(TlsError::Name {
                reason: NameError::Spiffe { expected, .. },
                ..
            }) => assert!(!is_taken && expected == format!("{ID}n0"), "{names:?}"),
            Err(other) => panic!("{other}"),
        }
    }
    // By DNS names it is the other way round.
    let directory = certificates(&[&[dns]]);
    load(directory.path(), NodeNaming::Dns)
        .check(&name(0))
        .unwrap();
    let directory = certificates(&[&[uri(&format!("{ID}n0"))]]);
    assert!(
        load(directory.path(), NodeNaming::Dns)
            .check(&name(0))
            .is_err()
    );
}
