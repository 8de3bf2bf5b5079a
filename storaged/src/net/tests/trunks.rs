//! Trunks: data goes on all of them, and without them nothing is worse than before.

use storaged_wire::SessionId;
use storaged_wire::peer::StreamRecord;
use tokio::time::Instant;

use super::super::rails::Interface;
use super::super::{DataStream, RailHint};
use super::*;

fn with_sockets(node: usize, sockets: usize) -> Spec {
    Spec {
        trunks: vec![SocketAddr::from(([127, 0, 0, 1], 0)); sockets - 1],
        ..Spec::new(node, Vec::new())
    }
}

/// Its sockets in their order, each on the interface of that number, the first of them 0.
fn with_interfaces(node: usize, interfaces: &[u8]) -> Spec {
    let trunks = interfaces[1..].iter();
    let at = |number: &u8| SocketAddr::from(([127, 0, 0, 1 + number], 0));
    Spec {
        trunks: trunks.map(at).collect(),
        ..Spec::new(node, Vec::new())
    }
}

/// Two that are linked, with so many sockets each.
async fn linked(directory: &Path, sockets: [usize; 2]) -> (Started, Started) {
    let (first, second) = (with_sockets(0, sockets[0]), with_sockets(1, sockets[1]));
    let (mut first, mut second) = pair(directory, first, second).await;
    first.version_of_link().await;
    second.version_of_link().await;
    (first, second)
}

impl Started {
    async fn open(&self, to: usize, edge: u32) -> DataStream {
        self.open_with(to, edge, RailHint::default()).await
    }

    async fn open_with(&self, to: usize, edge: u32, hint: RailHint) -> DataStream {
        let record = StreamRecord {
            leader: name(0),
            session: SessionId::new(7),
            edge,
        };
        let opened = timeout(PATIENCE, self.net.open_stream(&name(to), &record, hint)).await;
        opened.expect("in time").expect("the link is up")
    }

    async fn open_all(&self, to: usize, count: u32) -> Vec<DataStream> {
        let mut streams = Vec::new();
        for edge in 0..count {
            streams.push(self.open(to, edge).await);
        }
        streams
    }

    /// Edges of the streams that come, sorted.
    async fn edges(&mut self, count: usize) -> Vec<u32> {
        let mut edges = Vec::new();
        while edges.len() < count {
            let edge = self.wait(|event| match event {
                NetEvent::Stream { record, .. } => Some(record.edge),
                NetEvent::Down { .. } => panic!("the link went down"),
                _ => None,
            });
            edges.push(edge.await);
        }
        edges.sort_unstable();
        edges
    }

    async fn until_trunks(&self, count: usize) {
        let there = async {
            while self.net.trunks() != count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = timeout(PATIENCE, there).await;
        waited.unwrap_or_else(|_| panic!("expected {count} trunks, got {}", self.net.trunks()));
    }
}

/// How many streams each connection has: their numbers count up from 0 on each, and the link has its control stream before.
fn spread(streams: &[DataStream]) -> Vec<u64> {
    let mut numbers: Vec<u64> = (streams.iter())
        .map(|opened| opened.stream.id().index())
        .collect();
    numbers.sort_unstable();
    numbers
}

#[tokio::test]
async fn streams_go_over_all_sockets_that_both_have() {
    for (sockets, trunks, expected) in [
        ([3, 3], 2, [0, 0, 1, 1, 1, 2]),
        ([4, 2], 1, [0, 1, 1, 2, 2, 3]),
        ([1, 3], 0, [1, 2, 3, 4, 5, 6]),
        ([3, 1], 0, [1, 2, 3, 4, 5, 6]),
    ] {
        let directory = certificates(2);
        let (mut first, second) = linked(directory.path(), sockets).await;
        let streams = second.open_all(0, 6).await;
        assert_eq!(second.net.trunks(), trunks, "{sockets:?}");
        assert_eq!(spread(&streams), expected, "{sockets:?}");
        assert_eq!(first.edges(6).await, [0, 1, 2, 3, 4, 5]);
        // The other side has not needed any.
        assert_eq!(first.net.trunks(), trunks);
        let back = first.open_all(1, 3).await;
        assert_eq!(first.net.trunks(), 2 * trunks);
        drop((streams, back));
    }
}

#[tokio::test]
async fn bytes_arrive_whole_on_every_trunk() {
    let directory = certificates(2);
    let (mut first, second) = linked(directory.path(), [3, 3]).await;
    let mut streams = second.open_all(0, 6).await;
    for opened in &mut streams {
        let number = opened.stream.id().index() as u8;
        opened.stream.write_all(&[number; 5000]).await.unwrap();
        opened.stream.finish().unwrap();
    }
    for _ in 0..6 {
        let received = first.wait(|event| match event {
            NetEvent::Stream { recv, .. } => Some(recv),
            _ => None,
        });
        let bytes = received.await.read_to_end(10_000).await.unwrap();
        assert_eq!(bytes.len(), 5000);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    }
}

#[tokio::test]
async fn a_trunk_that_cannot_be_dialled_costs_no_stream() {
    let directory = certificates(2);
    let (mut first, second) = linked(directory.path(), [2, 2]).await;
    for socket in first.net.shared.trunk_sockets() {
        socket.endpoint.close(0u32.into(), b"a firewall");
    }
    let streams = second.open_all(0, 4).await;
    assert_eq!(spread(&streams), [1, 2, 3, 4]);
    assert_eq!(first.edges(4).await, [0, 1, 2, 3]);
    let chosen = second.net.shared.known(&name(0)).unwrap().link.trunks();
    assert!(chosen.is_some_and(|trunks| trunks.none_is_trusted()));
}

#[tokio::test]
async fn after_a_wait_in_vain_nobody_waits_for_another_trunk() {
    let directory = certificates(2);
    let (first, second) = linked(directory.path(), [4, 4]).await;
    let comes_about = || second.net.shared.trunks_come_about.load(Ordering::Relaxed);
    let streams = second.open_all(0, 2).await;
    assert!(comes_about());
    for socket in first.net.shared.trunk_sockets() {
        // Nobody answers there any more, as behind a firewall.
        socket.endpoint.rebind(closed_socket()).unwrap();
    }
    let more = second.open_all(0, 4).await;
    assert!(!comes_about());
    drop((streams, more));
}

/// A socket at which nothing arrives.
fn closed_socket() -> std::net::UdpSocket {
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap()
}

#[tokio::test]
async fn a_stream_that_is_given_up_puts_its_trunk_in_doubt_and_one_that_arrives_ends_that() {
    let directory = certificates(2);
    let (_first, second) = linked(directory.path(), [2, 2]).await;
    let streams = second.open_all(0, 2).await;
    assert_eq!(spread(&streams), [0, 1]);
    streams.iter().for_each(DataStream::has_failed);
    drop(streams);
    let avoided = second.open_all(0, 3).await;
    assert_eq!(spread(&avoided), [2, 3, 4], "all on the link");
    drop(avoided);
    let trunks = second.net.shared.known(&name(0)).unwrap().link.trunks();
    let trunks = trunks.unwrap();
    assert!(trunks.none_is_trusted());
    let on_trunk = trunks.first();
    assert_eq!(on_trunk.paused_times(), 1);
    on_trunk.prove();
    assert!(!trunks.none_is_trusted());
    let again = second.open_all(0, 2).await;
    assert_eq!(spread(&again), [1, 5]);
}

#[tokio::test]
async fn a_socket_that_cannot_be_bound_is_left_out_and_the_others_keep_their_numbers() {
    let directory = certificates(2);
    let absent = SocketAddr::from(([192, 0, 2, 1], 0));
    let there = SocketAddr::from(([127, 0, 0, 1], 0));
    let lame = Spec {
        trunks: vec![absent, there],
        ..Spec::new(0, Vec::new())
    };
    let (mut first, mut second) = pair(directory.path(), lame, with_sockets(1, 4)).await;
    first.version_of_link().await;
    second.version_of_link().await;
    let numbers = |started: &Started| -> Vec<u8> {
        let sockets = started.net.shared.trunk_sockets().iter();
        sockets.map(|socket| socket.number).collect()
    };
    assert_eq!(
        (numbers(&first), numbers(&second)),
        (vec![2], vec![1, 2, 3])
    );
    let streams = second.open_all(0, 4).await;
    assert_eq!(spread(&streams), [0, 1, 1, 2]);
    assert_eq!(first.edges(4).await, [0, 1, 2, 3]);
}

#[test]
fn a_socket_takes_the_trunk_of_its_own_number_alone() {
    use super::super::dial::Purpose;
    use super::super::trunks::{SocketKind, WrongSocket};
    let at = SocketKind::Trunks(3);
    assert_eq!(at.purpose(Some(3)), Ok(Purpose::Trunk(3)));
    for got in [0, 2, 4, 255] {
        assert_eq!(
            at.purpose(Some(got)),
            Err(WrongSocket::Number { here: 3, got })
        );
    }
    assert_eq!(at.purpose(None), Err(WrongSocket::LinkAtTrunks));
    assert_eq!(SocketKind::Links.purpose(None), Ok(Purpose::Link));
    let wrong = SocketKind::Links.purpose(Some(1));
    assert_eq!(wrong, Err(WrongSocket::TrunkAtLinks));
}

#[tokio::test]
async fn a_trunk_in_use_stays_and_one_that_nobody_needs_is_closed() {
    let directory = certificates(2);
    let (first, second) = linked(directory.path(), [2, 2]).await;
    let streams = second.open_all(0, 2).await;
    let later = || Instant::now() + Duration::from_secs(60);
    let trunks = second.net.shared.known(&name(0)).unwrap().link.trunks();
    let trunks = trunks.unwrap();
    trunks.rest(later());
    assert_eq!((first.net.trunks(), second.net.trunks()), (1, 1));
    drop(streams);
    // It was seen in use at that later time.
    trunks.rest(later());
    second.until_trunks(1).await;
    trunks.rest(later() + Duration::from_secs(60));
    second.until_trunks(0).await;
    first.until_trunks(0).await;
    let streams = second.open_all(0, 2).await;
    assert_eq!(spread(&streams), [0, 2], "it is dialled again");
}

#[tokio::test]
async fn trunks_end_with_their_link_and_come_with_the_next() {
    let directory = certificates(2);
    let (first, mut second) = linked(directory.path(), [2, 2]).await;
    let kept = second.open_all(0, 2).await;
    let address = first.net.local_addr().unwrap();
    first.net.close().await;
    drop(first);
    second.goes_down().await;
    second.until_trunks(0).await;
    let anew = Spec {
        peers: vec![second.peer(1)],
        ..with_sockets(0, 2)
    };
    let mut first = start(directory.path(), anew).await;
    assert_ne!(first.net.local_addr().unwrap(), address, "another port");
    second
        .net
        .set_peers(vec![first.peer(0)], &group(), agreement(1));
    second.version_of_link().await;
    let streams = second.open_all(0, 2).await;
    assert_eq!(second.net.trunks(), 1);
    assert_eq!(first.edges(2).await, [0, 1]);
    second.net.set_peers(Vec::new(), &group(), agreement(1));
    first.until_trunks(0).await;
    drop((kept, streams));
}

#[tokio::test]
async fn a_trunk_is_of_one_incarnation_and_the_newer_of_a_number_counts() {
    let directory = certificates(2);
    let (first, _second) = linked(directory.path(), [2, 2]).await;
    let link = first.net.shared.known(&name(1)).unwrap().link;
    let another = incarnation();
    assert!(link.take_trunk(1, another).is_none());
    let up = link.generation().expect("it is up");
    let before = link.take_trunk(1, up).expect("a trunk of this incarnation");
    let after = link.take_trunk(1, up).expect("it was dialled anew");
    assert!(before.is_cancelled() && !after.is_cancelled());
    assert!(link.take_trunk(2, up).is_some_and(|it| !it.is_cancelled()));
    first.net.set_peers(Vec::new(), &group(), agreement(1));
    let ended = timeout(PATIENCE, after.cancelled()).await;
    ended.expect("with the link");
    assert!(link.take_trunk(1, up).is_none());
}

#[tokio::test]
async fn each_socket_takes_what_it_is_for() {
    let directory = certificates(2);
    let mut first = start(directory.path(), with_sockets(0, 2)).await;
    let trunk = first.net.shared.trunk_sockets()[0]
        .endpoint
        .local_addr()
        .unwrap();
    let wrong = Spec::new(1, vec![Peer::named(name(0), trunk)]);
    let second = start(directory.path(), wrong).await;
    first.net.set_peers(
        vec![Peer::named(name(1), SocketAddr::from(([127, 0, 0, 1], 9)))],
        &group(),
        agreement(1),
    );
    let told = first.wait(|event| match event {
        NetEvent::Failed(error) => Some(error.to_string()),
        NetEvent::Up { .. } => panic!("it is linked"),
        _ => None,
    });
    let told = told.await;
    assert!(
        told.contains("only trunks are taken at this address"),
        "{told}"
    );
    drop(second);
}

#[tokio::test]
async fn another_certificate_is_used_for_trunks_too() {
    let directory = certificates(2);
    let (mut first, second) = linked(directory.path(), [2, 2]).await;
    renew(directory.path(), &name(1), DAY).unwrap();
    let renewed = identity(directory.path(), 1);
    second.net.set_identity(&renewed).unwrap();
    let streams = second.open_all(0, 2).await;
    assert_eq!(first.edges(2).await, [0, 1]);
    assert_eq!(second.net.trunks(), 1);
    drop(streams);
}

/// A node with these interfaces and as many peers like it as there are hints; a stream to each, with its hint.
async fn one_stream_per_peer(
    interfaces: &[u8],
    hints: &[usize],
) -> (Started, Vec<Started>, Vec<DataStream>) {
    let directory = certificates(1 + hints.len());
    let mut hub = start(directory.path(), with_interfaces(0, interfaces)).await;
    let mut peers = Vec::new();
    for node in 1..=hints.len() {
        let spec = Spec {
            peers: vec![hub.peer(0)],
            ..with_interfaces(node, interfaces)
        };
        peers.push(start(directory.path(), spec).await);
    }
    let known = (1..).zip(&peers).map(|(node, peer)| peer.peer(node));
    hub.net.set_peers(known.collect(), &group(), agreement(1));
    let mut streams = Vec::new();
    for _ in &peers {
        hub.version_of_link().await;
    }
    for (peer, hint) in (1..).zip(hints) {
        let hint = RailHint::new(*hint);
        streams.push(hub.open_with(peer, 0, hint).await);
    }
    (hub, peers, streams)
}

#[tokio::test]
async fn the_only_stream_to_each_of_several_peers_spreads_over_the_interfaces() {
    let (hub, _peers, streams) = one_stream_per_peer(&[0, 1], &[0, 1, 2, 3, 4, 5]).await;
    assert_eq!(hub.net.trunks(), 3);
    assert_eq!(spread(&streams), [0, 0, 0, 1, 1, 1]);
    let (hub, _peers, streams) = one_stream_per_peer(&[0, 1, 2], &[0, 1, 2]).await;
    assert_eq!(hub.net.trunks(), 2);
    assert_eq!(spread(&streams), [0, 0, 1]);
}

#[tokio::test]
async fn several_sockets_of_one_interface_leave_the_only_stream_to_a_peer_on_the_link() {
    let (hub, _peers, streams) = one_stream_per_peer(&[0, 0, 0], &[0, 1, 2, 3]).await;
    assert_eq!(hub.net.trunks(), 0);
    assert_eq!(spread(&streams), [1, 1, 1, 1]);
}

#[tokio::test]
async fn the_second_stream_to_a_peer_goes_over_another_interface_than_the_first() {
    for number in 0..4 {
        let hint = RailHint::new(number);
        let (hub, _peers, mut streams) = one_stream_per_peer(&[0, 1, 0, 1], &[number]).await;
        for edge in 1..4 {
            streams.push(hub.open_with(1, edge, hint).await);
            let trunks = hub.net.shared.known(&name(1)).unwrap().link.trunks();
            let trunks = trunks.unwrap();
            let rail = Interface::Rail([127, 0, 0, 2].into());
            let (near, far) = (
                trunks.streams_on(Interface::OfLinks),
                trunks.streams_on(rail),
            );
            assert!(near.abs_diff(far) <= 1, "{near} and {far}, hint {number}");
        }
    }
}

#[tokio::test]
async fn a_rail_in_doubt_leaves_its_streams_to_the_link() {
    let (hub, _peers, streams) = one_stream_per_peer(&[0, 1], &[1]).await;
    assert_eq!(hub.net.trunks(), 1);
    streams.iter().for_each(DataStream::has_failed);
    drop(streams);
    let next = hub.open_with(1, 1, RailHint::new(1)).await;
    assert_eq!(spread(&[next]), [1]);
}
