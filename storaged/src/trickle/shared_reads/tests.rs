//! Several nodes over one store that counts its requests.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::super::store::FakeStore;
use super::*;

const KEY: &str = "job/run-1/step-7/__3_0.distcp";
const PIECE: u64 = 4096;
const PIECES: u64 = 64;
const READ_AT_ONCE: u64 = 128 << 20;

/// What a node does when it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Answers,
    /// It never does.
    Hangs,
    /// It gives fewer bytes.
    CutsShort,
    /// It has no room.
    Refuses,
}

#[derive(Debug)]
struct Node {
    me: NodeName,
    manner: Manner,
    reads: SharedReads,
    asked: AtomicU64,
}

/// The nodes by their names, once all are there.
type Nodes = Arc<OnceLock<BTreeMap<NodeName, Arc<Node>>>>;

#[derive(Debug)]
struct Known {
    me: NodeName,
    /// As this node sees it.
    up: Vec<NodeName>,
    nodes: Nodes,
}

#[async_trait]
impl Fellows for Known {
    fn me(&self) -> &NodeName {
        &self.me
    }

    fn up(&self) -> Vec<NodeName> {
        let others = self.up.iter().filter(|node| **node != self.me);
        others.cloned().collect()
    }

    async fn ask(&self, whom: &NodeName, piece: Bytes, _: u64) -> Result<Bytes, FellowError> {
        let node = &self.nodes.get().expect("the nodes")[whom];
        node.asked.fetch_add(1, Ordering::Relaxed);
        match node.manner {
            Manner::Hangs => std::future::pending().await,
            Manner::CutsShort => Ok(Bytes::from_static(b"short")),
            Manner::Refuses => Err(FellowError(PassOnError::NoRoom.into())),
            Manner::Answers => {
                let given = node.reads.read_for_peer(&piece).await;
                let given = given.map_err(|error| FellowError(error.into()))?;
                Ok(given.bytes())
            }
        }
    }
}

struct Cluster {
    store: Arc<FakeStore>,
    nodes: Nodes,
    bytes: Bytes,
}

fn name(index: usize) -> NodeName {
    NodeName::new(format!("n{index}")).expect("a name")
}

fn key() -> ObjectKey {
    KEY.parse().expect("a key")
}

impl Cluster {
    async fn of(manners: &[Manner]) -> Self {
        let all: Vec<NodeName> = (0..manners.len()).map(name).collect();
        Self::seeing(manners, |_| all.clone()).await
    }

    /// Each node sees some others.
    async fn seeing(manners: &[Manner], up: impl Fn(usize) -> Vec<NodeName>) -> Self {
        let store = Arc::new(FakeStore::new());
        let bytes: Vec<u8> = (0..PIECE * PIECES).map(|at| (at / 7) as u8).collect();
        let bytes = Bytes::from(bytes);
        store.put_new(&key(), bytes.clone()).await.expect("written");
        let nodes = Nodes::default();
        let made = manners.iter().enumerate().map(|(index, manner)| {
            let known = Known {
                me: name(index),
                up: up(index),
                nodes: nodes.clone(),
            };
            let node = Node {
                me: name(index),
                manner: *manner,
                reads: SharedReads::new(store.clone(), READ_AT_ONCE).with(Arc::new(known)),
                asked: AtomicU64::new(0),
            };
            (name(index), Arc::new(node))
        });
        nodes.set(made.collect()).expect("nodes are made once");
        Self {
            store,
            nodes,
            bytes,
        }
    }

    fn node(&self, index: usize) -> &Node {
        &self.nodes.get().expect("the nodes")[&name(index)]
    }

    /// Reads the whole object at a node, piece by piece, and checks every byte.
    async fn read_at(&self, index: usize) {
        for piece in 0..PIECES {
            let range = piece * PIECE..(piece + 1) * PIECE;
            let (key, reads) = (key(), &self.node(index).reads);
            let read = reads.get(Reads::Together, &key, range.clone());
            let read = read.await.expect("read");
            assert_eq!(
                read,
                self.bytes.slice(range.start as usize..range.end as usize)
            );
        }
    }

    /// Requests of the tier while all of these nodes read all of the object.
    async fn requests_of(&self, readers: impl IntoIterator<Item = usize>) -> u64 {
        let before = self.store.requests();
        futures::future::join_all(readers.into_iter().map(|node| self.read_at(node))).await;
        self.store.requests() - before
    }
}

#[tokio::test(start_paused = true)]
async fn what_eight_nodes_want_the_tier_gives_once() {
    let cluster = Cluster::of(&[Manner::Answers; 8]).await;
    assert_eq!(cluster.requests_of(0..8).await, PIECES);
    let passed_on: Vec<PassedOn> = (0..8)
        .map(|node| cluster.node(node).reads.passed_on())
        .collect();
    let got: u64 = passed_on.iter().map(|bytes| bytes.got).sum();
    let given: u64 = passed_on.iter().map(|bytes| bytes.given).sum();
    assert_eq!((got, given), (7 * PIECES * PIECE, 7 * PIECES * PIECE));
    // No node reads much more than its share.
    for bytes in passed_on {
        assert!(bytes.given <= 7 * PIECE * PIECES / 4, "{bytes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn readers_of_one_node_have_its_pieces_read_once() {
    let cluster = Cluster::of(&[Manner::Answers]).await;
    assert_eq!(cluster.requests_of([0; 8]).await, PIECES);
}

#[tokio::test(start_paused = true)]
async fn what_is_of_this_nodes_own_shard_it_reads_itself() {
    let cluster = Cluster::of(&[Manner::Answers; 3]).await;
    let read = cluster
        .node(0)
        .reads
        .get(Reads::Alone, &key(), 0..PIECE)
        .await;
    assert_eq!(read.expect("read"), cluster.bytes.slice(..PIECE as usize));
    assert!((1..3).all(|node| cluster.node(node).asked.load(Ordering::Relaxed) == 0));
}

#[tokio::test(start_paused = true)]
async fn what_a_peer_does_not_give_is_read_here_and_it_is_left_alone_for_longer_each_time() {
    for manner in [Manner::Hangs, Manner::CutsShort] {
        let cluster = Cluster::of(&[Manner::Answers, manner, Manner::Answers]).await;
        let began = Instant::now();
        cluster.requests_of([0]).await;
        let asked = || cluster.node(1).asked.load(Ordering::Relaxed);
        assert_eq!(asked(), 1, "{manner:?}");
        let took = began.elapsed();
        assert!(took <= PATIENCE, "{manner:?}: {took:?}");
        tokio::time::sleep(DOUBT).await;
        cluster.requests_of([0]).await;
        assert_eq!(asked(), 2, "{manner:?}");
        tokio::time::sleep(DOUBT).await;
        cluster.requests_of([0]).await;
        assert_eq!(asked(), 2, "{manner:?}: twice as long");
        tokio::time::sleep(DOUBT).await;
        cluster.requests_of([0]).await;
        assert_eq!(asked(), 3, "{manner:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_has_no_room_is_asked_again_soon() {
    let cluster = Cluster::of(&[Manner::Answers, Manner::Refuses]).await;
    for times in 1..=3 {
        cluster.requests_of([0]).await;
        assert_eq!(cluster.node(1).asked.load(Ordering::Relaxed), times);
        // What was read is not kept for longer.
        tokio::time::sleep(2 * REFUSED_PAUSE + Duration::from_secs(20)).await;
    }
}

/// Where the tier is slow for all, they wait for it together; a node that is slow alone holds the others up for a moment.
#[tokio::test(start_paused = true)]
async fn a_peer_has_some_times_as_long_as_this_node_takes_itself() {
    let cluster = Cluster::of(&[Manner::Answers, Manner::Hangs]).await;
    let reads = &cluster.node(0).reads;
    assert_eq!(reads.patience(), PATIENCE);
    for (took, patience) in [
        (1, PATIENCE_MIN),
        (4_000, Duration::from_secs(16)),
        (99_000, PATIENCE_MAX),
    ] {
        reads.own_read_ms.store(took, Ordering::Relaxed);
        assert_eq!(reads.patience(), patience);
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_that_take_each_other_for_the_reader_do_not_wait_for_each_other() {
    // What one takes for the next one's, that one takes for the third one's, and so on in a ring.
    let seen = |index| vec![name((index + 1) % 3)];
    let cluster = Cluster::seeing(&[Manner::Answers; 3], seen).await;
    let began = Instant::now();
    let requests = cluster.requests_of(0..3).await;
    assert!((PIECES..=2 * PIECES).contains(&requests), "{requests}");
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_peer_is_given_bytes_of_shards_and_nothing_else() {
    let cluster = Cluster::of(&[Manner::Answers; 2]).await;
    let node = cluster.node(0);
    assert_eq!(node.me, name(0));
    let asks = async |key: &str, start, end| {
        let key = key.to_owned();
        let request = encode(&ObjectPiece { key, start, end });
        node.reads.read_for_peer(&request).await
    };
    assert!(asks(KEY, 0, 10).await.is_ok());
    let before = cluster.store.requests();
    let refused = [
        asks("job/run-1/step-7/storaged.manifest", 0, 10).await,
        asks("job/run-1/step-7/__x_0.distcp", 0, 10).await,
        asks(KEY, 10, 10).await,
        asks(KEY, 11, 10).await,
        asks(KEY, 0, PIECE_BYTES_MAX + 1).await,
        asks(KEY, 0, u64::MAX).await,
        node.reads.read_for_peer(b"junk").await,
        node.reads.read_for_peer(b"").await,
    ];
    for refused in refused {
        let refused = refused.expect_err("refused");
        assert!(matches!(refused, PassOnError::NoPiece(_)), "{refused}");
    }
    let outside = asks("../../etc/__0_0.distcp", 0, 10).await;
    assert!(matches!(
        outside,
        Err(PassOnError::Store(StoreError::Invalid { .. }))
    ));
    assert_eq!(
        cluster.store.requests(),
        before,
        "nothing was read for them"
    );
    let missing = asks("job/run-1/step-8/__3_0.distcp", 0, 10).await;
    assert!(matches!(
        missing,
        Err(PassOnError::Store(StoreError::NotFound { .. }))
    ));
    let alone = SharedReads::new(cluster.store.clone(), READ_AT_ONCE);
    let off = alone.read_for_peer(&[]).await;
    assert!(matches!(off, Err(PassOnError::Off)));
}
