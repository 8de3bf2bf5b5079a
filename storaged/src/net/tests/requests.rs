//! Requests and their answers.

use bytes::Bytes;

use super::*;
use crate::net::PeerAnswer;

const NEWEST: u16 = 10;

async fn linked(newest_of_first: u16) -> (TempDir, Started, Started) {
    let directory = certificates(2);
    let of = |node, newest| Spec {
        versions: (8, newest),
        ..Spec::new(node, Vec::new())
    };
    let (first, second) = (of(0, newest_of_first), of(1, NEWEST));
    let (mut first, mut second) = pair(directory.path(), first, second).await;
    first.version_of_link().await;
    second.version_of_link().await;
    (directory, first, second)
}

impl Started {
    async fn request(&mut self) -> (Vec<u8>, PeerAnswer) {
        self.wait(|event| match event {
            NetEvent::Request { body, answer, .. } => Some((body, answer)),
            _ => None,
        })
        .await
    }

    async fn asks(&self, node: usize, limit: usize) -> Result<Bytes, NetError> {
        let node = name(node);
        let asked = self.net.request(&node, "a piece".into(), limit);
        timeout(PATIENCE, asked).await.expect("an end in time")
    }
}

#[tokio::test]
async fn a_request_is_answered_whole_or_not_at_all() {
    const LENGTH: usize = 20 << 20;
    let (_directory, mut first, second) = linked(NEWEST).await;
    assert_eq!(second.net.answering(), [name(0)]);
    let answers = async {
        let (body, answer) = first.request().await;
        assert_eq!(body, b"a piece");
        let long = Bytes::from(vec![7; LENGTH]);
        answer.send(&name(1), long).await.expect("an answer");
        // The next one is not answered, and of the last one more is said than was asked for.
        drop(first.request().await);
        let (_, answer) = first.request().await;
        let _ = answer.send(&name(1), Bytes::from(vec![7; 11])).await;
        first
    };
    let asks = async {
        let whole = second.asks(0, LENGTH).await.expect("an answer");
        assert_eq!(whole.len(), LENGTH);
        assert!(matches!(
            second.asks(0, 10).await,
            Err(NetError::Connection { .. })
        ));
        assert!(matches!(
            second.asks(0, 10).await,
            Err(NetError::Connection { .. })
        ));
        // The link goes on.
        second.net.send(&name(0), "a word".into());
    };
    let (mut first, ()) = futures::future::join(answers, asks).await;
    let word = first.wait(|event| match event {
        NetEvent::Message { body, .. } => Some(body),
        _ => None,
    });
    assert_eq!(word.await, b"a word");
}

#[tokio::test]
async fn a_peer_of_an_older_release_is_not_asked() {
    let (_directory, _first, second) = linked(NEWEST - 1).await;
    assert!(second.net.answering().is_empty());
    assert!(matches!(second.asks(0, 10).await, Err(NetError::Down(_))));
}

#[tokio::test]
async fn who_asks_a_peer_that_goes_hears_of_it() {
    let (_directory, mut first, second) = linked(NEWEST).await;
    let goes = async {
        let asked = first.request().await;
        first.net.close().await;
        asked
    };
    let (_asked, answer) = futures::future::join(goes, second.asks(0, 10)).await;
    assert!(
        matches!(answer, Err(NetError::Connection { .. })),
        "{answer:?}"
    );
}

/// Others wait at the peer, so that its requests take no memory here. Whoever has dialled may have one less: the stream of its hello
/// is among those that it may open, and its end alone is no reason for the transport to grant another one.
#[tokio::test]
async fn one_peer_has_so_many_requests_at_once_and_no_more() {
    use crate::net::requests::REQUESTS_AT_ONCE;
    let most = REQUESTS_AT_ONCE as usize;
    let (_directory, mut first, second) = linked(NEWEST).await;
    let second = Arc::new(second);
    let asked: Vec<_> = (0..2 * most)
        .map(|_| {
            let second = second.clone();
            tokio::spawn(async move { second.asks(0, 100).await })
        })
        .collect();
    let mut open = Vec::new();
    for _ in 1..most {
        open.push(first.request().await.1);
    }
    let short = Duration::from_millis(300);
    if let Ok((_, answer)) = timeout(short, first.request()).await {
        open.push(answer);
        let more = timeout(short, first.request()).await;
        assert!(more.is_err(), "one more than there may be");
    }
    let left = 2 * most - open.len();
    for answer in open {
        let answered = answer.send(&name(1), "here".into()).await;
        answered.expect("an answer");
    }
    for _ in 0..left {
        let (_, answer) = first.request().await;
        let answered = answer.send(&name(1), "here".into()).await;
        answered.expect("an answer");
    }
    for asked in asked {
        assert_eq!(asked.await.unwrap().expect("an answer"), "here");
    }
}
