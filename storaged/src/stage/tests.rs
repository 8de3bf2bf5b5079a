//! What the driver hears of connections through real sockets.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use storaged_arena::{Wish, ready_within};
use storaged_codec::ChunkSize;
use storaged_core::{ConnId, Viewer};
use storaged_wire::framing::{FRAME_PREFIX_BYTES, frame};
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Role};
use storaged_wire::{Generation, Namespace, NodeName, Step};

use super::*;

const CONNECTIONS: usize = 200;

fn socket(folder: &Path, name: &str, viewer: Viewer) -> TenantSocket {
    let access = Access::Users {
        uids: [rustix::process::geteuid().as_raw()].into(),
        group: None,
    };
    TenantSocket {
        path: folder.join(name),
        access,
        viewer,
        requests: None,
        connections: CONNECTIONS_MAX,
    }
}

/// What is heard of each connection until nothing comes any more: how often that it is gone, and whether that came last.
async fn heard(mut from_stage: FromStage) -> BTreeMap<ConnId, (usize, bool)> {
    let mut of_each: BTreeMap<ConnId, (usize, bool)> = BTreeMap::new();
    let quiet = Duration::from_secs(2);
    while let Ok(Some(event)) = tokio::time::timeout(quiet, from_stage.next()).await {
        let (conn, is_gone) = match event {
            StageEvent::Connected { conn, .. } => (conn, false),
            StageEvent::Request { id, .. } => (id.conn, false),
            StageEvent::RequestComes { conn, .. } => (conn, false),
            StageEvent::Gone { conn } => (conn, true),
        };
        let (gone, is_last) = of_each.entry(conn).or_default();
        *gone += usize::from(is_gone);
        *is_last = is_gone;
    }
    of_each
}

/// Whichever thread notices first that a client is gone, the driver forgets all that it has heard of it.
#[tokio::test]
async fn the_last_that_is_heard_of_a_connection_is_that_it_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (events, from_stage) = queues();
    let sockets = [
        socket(folder.path(), "tenant", Viewer::Tenant(None)),
        socket(folder.path(), "operator", Viewer::Operator),
    ];
    listen(&sockets, &events).unwrap();
    let clients = tokio::task::spawn_blocking(move || {
        for which in 0..CONNECTIONS {
            let stream = UnixStream::connect(&sockets[which % 2].path).unwrap();
            if which % 3 == 0 {
                let request = storaged_wire::framing::frame(&Request::Status);
                std::io::Write::write_all(&mut &stream, &request).unwrap();
            }
        }
    });
    clients.await.unwrap();
    let of_each = heard(from_stage).await;
    assert_eq!(of_each.len(), CONNECTIONS);
    let left = of_each.iter().filter(|(_, (_, is_last))| !is_last);
    assert_eq!(left.count(), 0, "{of_each:?}");
    let twice = of_each.values().filter(|(gone, _)| *gone > 2);
    assert_eq!(twice.count(), 0, "{of_each:?}");
}

/// A client that waits for nothing is told of once: to forget it is work for the driver.
#[tokio::test]
async fn a_connection_is_gone_once() {
    let folder = tempfile::tempdir().unwrap();
    let (events, mut from_stage) = queues();
    let tenant = socket(folder.path(), "tenant", Viewer::Tenant(None));
    listen(std::slice::from_ref(&tenant), &events).unwrap();
    for _ in 0..20 {
        let stream = UnixStream::connect(&tenant.path).unwrap();
        let connected = from_stage.next().await;
        assert!(matches!(connected, Some(StageEvent::Connected { .. })));
        // Both threads see the end: its own, which reads, and the one that watches. Its own must have told of the beginning by then and
        // know it; else it says the end once more.
        std::thread::sleep(Duration::from_millis(100));
        drop(stream);
        let gone = from_stage.next().await;
        assert!(matches!(gone, Some(StageEvent::Gone { .. })), "{gone:?}");
        let again = tokio::time::timeout(Duration::from_millis(50), from_stage.next());
        assert!(again.await.is_err());
    }
}

/// Of what a connection has said, all but that it is there.
async fn next_heard(from_stage: &mut FromStage) -> StageEvent {
    loop {
        match from_stage.next().await {
            Some(StageEvent::Connected { .. }) => {}
            other => return other.expect("the sockets are open"),
        }
    }
}

/// Who sends it is charged for it while it comes, and not for what was no request.
#[tokio::test]
async fn a_long_request_is_heard_of_before_its_bytes_are_here() {
    let folder = tempfile::tempdir().unwrap();
    let (events, mut from_stage) = queues();
    let tenant = socket(folder.path(), "tenant", Viewer::Tenant(None));
    listen(std::slice::from_ref(&tenant), &events).unwrap();
    let mut stream = UnixStream::connect(&tenant.path).unwrap();
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: Namespace::new("job").unwrap(),
        token: Vec::new().into(),
        role: Role::Reader,
    };
    stream.write_all(&frame(&hello)).unwrap();
    let StageEvent::Request { answer, .. } = next_heard(&mut from_stage).await else {
        panic!("expected a hello");
    };
    let reply = Reply::Welcome {
        node: NodeName::new("n").unwrap(),
        generation: Generation::new(1),
        geometry: None,
        chunk: ChunkSize::new(4096).unwrap(),
    };
    answer.send(Answer { reply, slot: None }).unwrap();
    let commit = Request::Commit {
        step: Step::new(1),
        schema: vec![7; 1 << 20].into(),
        torch_metadata: Vec::new().into(),
        durable: DurableWish::Never,
    };
    let mut nothing = frame(&commit);
    let length = (nothing.len() - FRAME_PREFIX_BYTES) as u64;
    let (begun, rest) = nothing.split_at(100);
    stream.write_all(begun).unwrap();
    let coming = next_heard(&mut from_stage).await;
    let is_told = |event: &StageEvent, expected| match event {
        StageEvent::RequestComes { bytes, .. } => *bytes == expected,
        _ => false,
    };
    assert!(is_told(&coming, length), "{coming:?}");
    stream.write_all(rest).unwrap();
    let StageEvent::Request { request, .. } = next_heard(&mut from_stage).await else {
        panic!("expected a request");
    };
    assert_eq!(request, commit);
    nothing.truncate(1 << 20);
    nothing[..FRAME_PREFIX_BYTES].copy_from_slice(&((1_u32 << 20) - 4).to_le_bytes());
    stream.write_all(&nothing).unwrap();
    for expected in [(1 << 20) - 4, 0] {
        let event = next_heard(&mut from_stage).await;
        assert!(is_told(&event, expected), "{event:?}");
    }
}

/// Who asks for what is long on many connections and reads nothing of it has the daemon hold two answers: one in the socket's own room for
/// them, and one in that of all sockets.
#[tokio::test]
async fn long_answers_that_nobody_reads_wait_for_one_another() {
    let folder = tempfile::tempdir().unwrap();
    let (events, mut from_stage) = queues();
    let tenant = socket(folder.path(), "tenant", Viewer::Tenant(None));
    listen(std::slice::from_ref(&tenant), &events).unwrap();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut stream = UnixStream::connect(&tenant.path).unwrap();
        stream.write_all(&frame(&Request::Status)).unwrap();
        let StageEvent::Request { answer, .. } = next_heard(&mut from_stage).await else {
            panic!("expected a request");
        };
        let reply = Reply::Status("x".repeat(6 << 20));
        answer.send(Answer { reply, slot: None }).unwrap();
        clients.push(stream);
        // In this order.
        std::thread::sleep(Duration::from_millis(200));
    }
    let is_answered = |stream: &UnixStream, within| ready_within(stream, Wish::Read, within);
    let soon = Duration::from_secs(5);
    assert!(is_answered(&clients[0], soon).unwrap());
    assert!(is_answered(&clients[1], soon).unwrap());
    let third = &clients[2];
    assert!(!is_answered(third, Duration::from_millis(300)).unwrap());
    let mut first = &clients[0];
    let mut read = vec![0; 6 << 20];
    std::io::Read::read_exact(&mut first, &mut read).unwrap();
    assert!(is_answered(third, soon).unwrap());
}

async fn becomes(so: impl Fn() -> bool) -> bool {
    for _ in 0..100 {
        if so() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    false
}

#[tokio::test]
async fn a_socket_that_was_removed_is_made_anew_and_what_is_in_its_place_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (events, mut from_stage) = queues();
    let tenant = socket(folder.path(), "tenant", Viewer::Tenant(None));
    let path = tenant.path.as_path();
    let faults = listen(std::slice::from_ref(&tenant), &events).unwrap();
    fs::remove_file(path).unwrap();
    assert!(becomes(|| UnixStream::connect(path).is_ok()).await);
    let _held = UnixStream::connect(path).unwrap();
    let connected =
        async { while !matches!(from_stage.next().await, Some(StageEvent::Connected { .. })) {} };
    tokio::time::timeout(Duration::from_secs(20), connected)
        .await
        .unwrap();
    assert!(becomes(|| faults.reasons().is_empty()).await);

    let other = folder.path().join("other");
    fs::write(&other, "of somebody else").unwrap();
    fs::rename(&other, path).unwrap();
    assert!(becomes(|| !faults.reasons().is_empty()).await);
    let reasons = faults.reasons();
    assert!(reasons[0].contains("something else"), "{reasons:?}");
    assert_eq!(fs::read(path).unwrap(), b"of somebody else");
    fs::remove_file(path).unwrap();
    assert!(becomes(|| UnixStream::connect(path).is_ok()).await);
    assert!(becomes(|| faults.reasons().is_empty()).await);
}
