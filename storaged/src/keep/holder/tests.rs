//! A holder in this process, keepers' ends of their links to it, and strangers that say anything.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::time::Instant;

use super::*;
use crate::keep::holder_link::HolderLink;
use crate::keep::holdings::{AfterKeeper, Holdings};
use crate::keep::message::{HolderReport, ToHolder};
use crate::keep::packets::tests::text;

/// A busy machine has done it within this time.
const PATIENCE: Duration = Duration::from_secs(20);

/// A holder with threads of its own.
struct TestHolder {
    runtime: Option<Runtime>,
    held: Arc<Mutex<HeldMemory>>,
}

impl TestHolder {
    async fn start(path: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let held = Arc::new(Mutex::new(HeldMemory::default()));
        let began = Instant::now();
        let listener = loop {
            let made = {
                let _within = runtime.enter();
                listen_at(path)
            };
            match made {
                Ok(listener) => break listener,
                // The one before has not quite ended.
                Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
            }
            tokio::time::sleep(RETRY).await;
        };
        let memory = Arc::clone(&held);
        runtime.spawn(async move { admit(&listener, &memory).await });
        Self {
            runtime: Some(runtime),
            held,
        }
    }

    fn names(&self) -> Vec<String> {
        let held = lock(&self.held);
        held.table.names().map(|name| name.to_string()).collect()
    }

    fn is_attached(&self) -> bool {
        lock(&self.held).attached.is_some()
    }

    /// Waits until it holds these.
    async fn has(&self, names: &[&str]) {
        let began = Instant::now();
        while self.names() != names {
            assert!(began.elapsed() < PATIENCE, "{:?}", self.names());
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn is_left(&self) {
        let began = Instant::now();
        while self.is_attached() {
            assert!(began.elapsed() < PATIENCE, "the keeper is still attached");
            tokio::time::sleep(RETRY).await;
        }
    }
}

impl Drop for TestHolder {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A process that ends when it is killed.
fn sleeper() -> std::process::Child {
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("60").spawn().unwrap()
}

fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hold.sock");
    (folder, path)
}

fn file(content: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

fn name(text: &str) -> HolderName {
    HolderName::new(text).unwrap()
}

fn keeper(mark: u64) -> HoldOrder {
    HoldOrder::Attach(KeeperIdentity { process: 7, mark })
}

async fn send(packets: &Packets, body: &str, descriptor: Option<BorrowedFd<'_>>) {
    loop {
        packets.ready(Interest::WRITABLE).await.unwrap();
        match packets.try_send(body, descriptor) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => return sent.unwrap(),
        }
    }
}

async fn store(packets: &Packets, text: &str, file: &File) {
    let body = ToHolder::Store(name(text)).encode();
    send(packets, &body, Some(file.as_fd())).await;
}

async fn attached(path: &Path, mark: u64) -> Packets {
    let packets = Packets::connect(path).unwrap();
    send(&packets, &keeper(mark).encode(), None).await;
    packets
}

async fn counted(packets: &Packets) -> Option<HoldAnswer> {
    send(packets, &HoldOrder::Count.encode(), None).await;
    HoldAnswer::decode(text(packets).await.unwrap().as_bytes())
}

fn holds(held: usize, freed: usize) -> Option<HoldAnswer> {
    Some(HoldAnswer::Holds(HeldCount { held, freed }))
}

/// Whoever is refused hears who is there, and the end.
async fn is_refused(packets: &Packets, process: u32) {
    let said = text(packets).await.unwrap();
    let answer = HoldAnswer::decode(said.as_bytes());
    assert_eq!(answer, Some(HoldAnswer::Busy(process)));
    assert!(text(packets).await.is_err());
}

#[tokio::test]
async fn what_one_keeper_left_the_next_one_gets() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let first = attached(&path, 1).await;
    store(&first, "slot-1", &file(b"1")).await;
    store(&first, "slot-2", &file(b"2")).await;
    send(&first, &ToHolder::Remove(name("slot-1")).encode(), None).await;
    // The last that it says is in the queue when it ends.
    store(&first, "slot-3", &file(b"3")).await;
    drop(first);
    // A holder that has not heard of it yet is not left by it either.
    holder.has(&["slot-2", "slot-3"]).await;
    holder.is_left().await;
    let next = attached(&path, 2).await;
    send(&next, &ToHolder::List.encode(), None).await;
    let mut body = [0; DATAGRAM_MAX];
    for expected in ["slot-2", "slot-3"] {
        let Received::Whole { length, descriptor } = next.receive(&mut body).await.unwrap() else {
            panic!("an odd datagram");
        };
        let said = FromKeeper::decode(&body[..length]);
        assert_eq!(said, Some(FromKeeper::Held(name(expected))));
        let mut content = [0];
        let file = File::from(descriptor.unwrap());
        file.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(content, expected.as_bytes()[5..]);
    }
    assert_eq!(text(&next).await.unwrap(), "END=2");
}

#[tokio::test]
async fn a_second_keeper_is_refused_and_who_has_gone_changes_nothing() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let first = attached(&path, 1).await;
    store(&first, "slot-1", &file(b"1")).await;
    assert_eq!(counted(&first).await, holds(1, 0));
    is_refused(&attached(&path, 2).await, 7).await;
    // The first one comes again over another connection: the earlier one's word counts no longer.
    let again = attached(&path, 1).await;
    assert_eq!(counted(&again).await, holds(1, 0));
    send(&first, &ToHolder::Remove(name("slot-1")).encode(), None).await;
    assert!(text(&first).await.is_err());
    assert_eq!(counted(&again).await, holds(1, 0));
    drop(again);
    holder.is_left().await;
    // Nobody is attached who has not said so.
    let stranger = Packets::connect(&path).unwrap();
    store(&stranger, "slot-1", &file(b"2")).await;
    assert!(text(&stranger).await.is_err());
    assert_eq!(counted(&attached(&path, 2).await).await, holds(1, 0));
}

/// A daemon that goes on while its keeper is dead has the memory still.
#[tokio::test]
async fn nobody_else_is_let_in_while_a_daemon_runs() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let mut daemon = sleeper();
    let number = daemon.id();
    let pid = Pid::from_raw(number.try_into().unwrap()).unwrap();
    let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let first = attached(&path, 1).await;
    let order = HoldOrder::Daemon(number).encode();
    send(&first, &order, Some(process.as_fd())).await;
    store(&first, "slot-1", &file(b"1")).await;
    assert_eq!(counted(&first).await, holds(1, 0));
    drop(first);
    holder.is_left().await;
    is_refused(&attached(&path, 2).await, number).await;
    let asked = tokio::task::spawn_blocking({
        let path = path.clone();
        move || release(&path)
    });
    let refused = asked.await.unwrap();
    assert!(
        matches!(refused, Err(KeepError::HolderTaken { process }) if process == number),
        "{refused:?}"
    );
    // Its own keeper is.
    let again = attached(&path, 1).await;
    assert_eq!(counted(&again).await, holds(1, 0));
    drop(again);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    holder.is_left().await;
    let next = attached(&path, 2).await;
    assert_eq!(counted(&next).await, holds(1, 0));
    drop(next);
    holder.is_left().await;
    let freed = tokio::task::spawn_blocking(move || release(&path));
    assert_eq!(freed.await.unwrap().unwrap(), 1);
    assert_eq!(holder.names(), Vec::<String>::new());
}

/// A daemon that ends of what is held would do so for ever.
#[tokio::test]
async fn a_keeper_between_two_daemons_lets_go_with_its_holder() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let mut daemon = sleeper();
    let mut held = Holdings::with_holder(Some(path.clone()));
    held.take_over().await.unwrap();
    held.daemon_is(Some(daemon.id()));
    let body = ToHolder::Store(name("slot-1")).encode();
    held.take(body.as_bytes(), Some(file(b"1").into()));
    assert_eq!(held.hand_on().await, AfterKeeper::Held);
    let ask = || {
        let path = path.clone();
        tokio::task::spawn_blocking(move || release(&path))
    };
    let own = std::process::id();
    let attached = tokio::task::spawn_blocking({
        let path = path.clone();
        move || attached_keeper(&path)
    });
    assert_eq!(attached.await.unwrap().unwrap(), own);
    let refused = ask().await.unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(
        matches!(refused, Err(KeepError::HolderTaken { process }) if process == own),
        "{refused:?}"
    );
    assert_eq!(holder.names(), ["slot-1"]);
    assert_eq!(ask().await.unwrap().unwrap(), 1);
    let began = Instant::now();
    while held.table().len() > 0 {
        assert!(began.elapsed() < PATIENCE, "the keeper has it still");
        let _ = tokio::time::timeout(RETRY, held.ready()).await;
        held.turn();
        held.let_go_if_told();
    }
    assert_eq!(held.hand_on().await, AfterKeeper::Held);
    assert_eq!(holder.names(), Vec::<String>::new());
}

#[tokio::test]
async fn what_comes_anew_counts_once_it_is_whole() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let kept = file(b"1");
    let first = attached(&path, 1).await;
    for text in ["journal-0", "slot-1", "slot-2"] {
        store(&first, text, &kept).await;
    }
    assert_eq!(counted(&first).await, holds(3, 0));
    send(&first, &HoldOrder::Anew.encode(), None).await;
    store(&first, "journal-1", &file(b"2")).await;
    drop(first);
    holder.is_left().await;
    holder.has(&["journal-0", "slot-1", "slot-2"]).await;
    let next = attached(&path, 2).await;
    send(&next, &HoldOrder::Anew.encode(), None).await;
    store(&next, "slot-1", &kept).await;
    // Of the same name, and other memory.
    store(&next, "slot-2", &file(b"2")).await;
    assert_eq!(counted(&next).await, holds(2, 2));
    holder.has(&["slot-1", "slot-2"]).await;
}

#[tokio::test]
async fn nonsense_ends_a_connection_or_is_told_to_its_keeper_and_nothing_else() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let long = "x".repeat(DATAGRAM_MAX + 1);
    let odd = ["READY=1", "HOLDANEW=1", "HOLDCOUNT=1", "FDLIST=1", &long];
    for body in odd {
        let stranger = Packets::connect(&path).unwrap();
        send(&stranger, body, None).await;
        assert!(text(&stranger).await.is_err(), "{body}");
    }
    let first = attached(&path, 1).await;
    store(&first, "slot-1", &file(b"1")).await;
    let other = file(b"2");
    for body in ["READY=1", "FDSTORE=1\nFDNAME=a:b", "HOLDANEW=1", &long] {
        send(&first, body, Some(other.as_fd())).await;
    }
    assert_eq!(counted(&first).await, Some(HoldAnswer::Lacks(4)));
    assert_eq!(counted(&first).await, holds(1, 0));
    // So many that say nothing: there is no place for one more, and those that have one go on.
    let idle: Vec<_> = (0..2 * CONNECTIONS_MAX)
        .filter_map(|_| Packets::connect(&path).ok())
        .collect();
    assert_eq!(counted(&first).await, holds(1, 0));
    drop(idle);
    drop(first);
    holder.is_left().await;
    holder.has(&["slot-1"]).await;
}

fn taken(table: &mut Table, link: &mut HolderLink, order: &ToHolder, file: Option<&File>) {
    let descriptor = file.map(|it| it.try_clone().unwrap().into());
    let taken = table.take(order.encode().as_bytes(), descriptor);
    link.note(&taken, table);
}

/// Lets a link do what it can for a while.
async fn for_a_while(link: &mut HolderLink, table: &Table) {
    let _ = link.settle(table, Duration::from_millis(300)).await;
}

#[tokio::test]
async fn a_link_takes_over_hands_on_and_says_all_to_a_holder_that_is_back() {
    let (_folder, path) = place();
    let holder = TestHolder::start(&path).await;
    let before = attached(&path, 1).await;
    store(&before, "slot-1", &file(b"1")).await;
    assert_eq!(counted(&before).await, holds(1, 0));
    let (mut link, mut table) = (HolderLink::to(path.clone()), Table::default());
    {
        // It waits while another keeper is there.
        let take_over = link.take_over(&mut table);
        tokio::pin!(take_over);
        let early = tokio::time::timeout(Duration::from_millis(300), &mut take_over).await;
        assert!(early.is_err());
        drop(before);
        take_over.await.unwrap();
    }
    assert_eq!(table.len(), 1);
    taken(
        &mut table,
        &mut link,
        &ToHolder::Store(name("slot-2")),
        Some(&file(b"2")),
    );
    taken(
        &mut table,
        &mut link,
        &ToHolder::Remove(name("slot-1")),
        None,
    );
    assert!(link.settle(&table, PATIENCE).await);
    holder.has(&["slot-2"]).await;
    assert_eq!(link.report(), HolderReport::HasAll);

    drop(holder);
    let began = Instant::now();
    while link.is_well() {
        assert!(began.elapsed() < PATIENCE, "it is not missed");
        taken(
            &mut table,
            &mut link,
            &ToHolder::Store(name("slot-3")),
            Some(&file(b"3")),
        );
        for_a_while(&mut link, &table).await;
    }
    let lacks = link.report();
    assert!(matches!(lacks, HolderReport::Lacks { since: 1.. }));
    for_a_while(&mut link, &table).await;
    assert_eq!(link.report(), lacks, "it is as old as its beginning");
    let holder = TestHolder::start(&path).await;
    assert!(link.settle(&table, PATIENCE).await);
    assert!(link.is_well());
    assert_eq!(link.report(), HolderReport::HasAll);
    holder.has(&["slot-2", "slot-3"]).await;
}

/// It is the keeper's table that counts once a daemon runs without what the holder has.
#[tokio::test]
async fn what_an_earlier_daemon_left_goes_when_a_holder_comes_too_late() {
    let (_folder, path) = place();
    let (mut link, mut table) = (HolderLink::to(path.clone()), Table::default());
    taken(
        &mut table,
        &mut link,
        &ToHolder::Store(name("slot-1")),
        Some(&file(b"new")),
    );
    let holder = TestHolder::start(&path).await;
    let before = attached(&path, 1).await;
    for text in ["slot-1", "slot-9"] {
        store(&before, text, &file(b"old")).await;
    }
    assert_eq!(counted(&before).await, holds(2, 0));
    for_a_while(&mut link, &table).await;
    holder.has(&["slot-1", "slot-9"]).await;
    drop(before);
    assert!(link.settle(&table, PATIENCE).await);
    holder.has(&["slot-1"]).await;
}

/// Nobody reads what is said: the keeper goes on, and what waits stays within bounds.
#[tokio::test]
async fn a_holder_that_hangs_holds_nobody_up_and_has_all_in_the_end() {
    let (_folder, path) = place();
    let listener = listen_at(&path).unwrap();
    let (mut link, mut table) = (HolderLink::to(path.clone()), Table::default());
    let memory = file(b"1");
    link.turn(&table);
    for number in 0..20_000 {
        let name = name(&format!("slot-{number}"));
        taken(
            &mut table,
            &mut link,
            &ToHolder::Store(name.clone()),
            Some(&memory),
        );
        if number % 4 != 0 {
            taken(&mut table, &mut link, &ToHolder::Remove(name), None);
        }
        link.turn(&table);
        // Descriptors of one process are few.
        if number >= 100 {
            taken(
                &mut table,
                &mut link,
                &ToHolder::Remove(self::name(&format!("slot-{}", number - 100))),
                None,
            );
        }
    }
    assert!(!link.settle(&table, Duration::from_millis(300)).await);
    drop(listener);
    let holder = TestHolder::start(&path).await;
    assert!(link.settle(&table, PATIENCE).await);
    let expected: Vec<String> = table.names().map(|name| name.to_string()).collect();
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    holder.has(&expected).await;
}

/// What a holder said a while ago is no word for now.
#[tokio::test]
async fn a_holder_that_hangs_after_it_has_agreed_is_not_believed() {
    let (_folder, path) = place();
    let listener = listen_at(&path).unwrap();
    let (mut link, mut table) = (HolderLink::to(path.clone()), Table::default());
    let listing = async {
        let packets = Packets::of(listener.accept().await.unwrap().0);
        assert!(text(&packets).await.unwrap().starts_with("HOLDATTACH="));
        assert_eq!(text(&packets).await.unwrap(), ToHolder::List.encode());
        packets.send(&FromKeeper::End(0).encode()).await.unwrap();
        packets
    };
    let (packets, taken_over) = tokio::join!(listing, link.take_over(&mut table));
    taken_over.unwrap();
    let counting = async {
        assert_eq!(text(&packets).await.unwrap(), HoldOrder::Count.encode());
        let none = HeldCount { held: 0, freed: 0 };
        let answer = HoldAnswer::Holds(none).encode();
        packets.send(&answer).await.unwrap();
    };
    let ((), is_settled) = tokio::join!(counting, link.settle(&table, PATIENCE));
    assert!(is_settled);
    assert!(!link.settle(&table, Duration::from_millis(300)).await);
    assert_eq!(text(&packets).await.unwrap(), HoldOrder::Count.encode());
}

/// A keeper whose place another one has taken hears whose it is, and starts no daemon beside that one's.
#[tokio::test]
async fn who_comes_back_to_a_holder_that_is_taken_knows_it() {
    let (_folder, path) = place();
    let _holder = TestHolder::start(&path).await;
    let other = attached(&path, 1).await;
    assert_eq!(counted(&other).await, holds(0, 0));
    let (mut link, table) = (HolderLink::to(path.clone()), Table::default());
    let began = Instant::now();
    while link.taken_by() != Some(7) {
        assert!(began.elapsed() < PATIENCE, "it is not told");
        for_a_while(&mut link, &table).await;
    }
    drop(other);
    assert!(link.settle(&table, PATIENCE).await);
    assert_eq!(link.taken_by(), None);
}

/// Else a holder would have had a table without its journal for a moment.
#[tokio::test]
async fn a_table_that_comes_anew_counts_with_what_has_changed_since() {
    let (_folder, path) = place();
    let listener = listen_at(&path).unwrap();
    let (mut link, mut table) = (HolderLink::to(path.clone()), Table::default());
    link.turn(&table);
    let order = ToHolder::Store(name("journal-1"));
    taken(&mut table, &mut link, &order, Some(&file(b"1")));
    let listening = async {
        let packets = Packets::of(listener.accept().await.unwrap().0);
        let mut said = Vec::new();
        for _ in 0..4 {
            said.push(text(&packets).await.unwrap());
        }
        said
    };
    let said = tokio::select! {
        said = listening => said,
        _ = link.settle(&table, PATIENCE) => panic!("nobody has agreed"),
    };
    assert!(said[0].starts_with("HOLDATTACH="));
    let (anew, count) = (HoldOrder::Anew.encode(), HoldOrder::Count.encode());
    assert_eq!(said[1..], [anew, order.encode(), count]);
}
