//! Connections that break, and come back by themselves: what is said again, what is not, and which memory is the same as before.

mod fake;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fake::{accept, hear, listen, options, say, welcome, welcome_by};
use storaged_arena::Slot;
use storaged_sdk::wire::local::{DurableWish, Reply, Request, Role};
use storaged_sdk::wire::{
    CheckpointState, Rank, Refusal, RefusalCode, RunId, SlotId, Step, WorldSize,
};
use storaged_sdk::{Client, ClientError, StagedSlot, Trainer};

const RUN: RunId = RunId::new(7);
const BYTES: u64 = 5000;

/// Serves a connection, and is gone with it.
type Serve = Box<dyn FnOnce(&mut UnixStream) + Send>;

fn serve(serve: impl FnOnce(&mut UnixStream) + Send + 'static) -> Serve {
    Box::new(serve)
}

/// One daemon after the other on one socket, each as long as its one connection; nobody listens for a while between them.
fn daemons(all: Vec<Serve>) -> (tempfile::TempDir, PathBuf, JoinHandle<()>) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let (listener, path) = (listen(&socket), socket.clone());
    let thread = std::thread::spawn(move || {
        let mut listener = Some(listener);
        for serve in all {
            let listening = listener.take().unwrap_or_else(|| {
                std::thread::sleep(Duration::from_millis(300));
                listen(&path)
            });
            let mut stream = accept(&listening);
            drop(listening);
            serve(&mut stream);
        }
    });
    (directory, socket, thread)
}

fn trainer(socket: PathBuf) -> Trainer {
    let world_size = WorldSize::new(3).unwrap();
    Trainer::connect(options(socket), RUN, Rank::new(2), world_size).unwrap()
}

fn is_ours(role: &Role) -> bool {
    matches!(role, Role::Trainer { run, rank, world_size }
        if *run == RUN && *rank == Rank::new(2) && world_size.get() == 3)
}

fn grant(stream: &mut UnixStream, number: u64, slot: &Slot) {
    let Request::AcquireSlot { .. } = hear(stream) else {
        panic!("expected to be asked for a slot");
    };
    let reply = Reply::SlotGranted {
        slot: SlotId::new(number),
        capacity: slot.capacity(),
        descriptor: true,
    };
    say(stream, &reply, Some(slot));
}

fn slot() -> Slot {
    Slot::create(8192).unwrap()
}

fn done(stream: &mut UnixStream) -> Request {
    let request = hear(stream);
    say(stream, &Reply::Done, None);
    request
}

fn start_of(slot: &StagedSlot) -> *mut u8 {
    slot.mapping().start()
}

#[test]
fn a_slot_is_asked_for_again_where_the_daemon_was_restarted() {
    let (_directory, socket, thread) = daemons(vec![
        serve(|stream| assert!(is_ours(&welcome_by(stream, 1)))),
        serve(|stream| {
            assert!(is_ours(&welcome_by(stream, 2)));
            grant(stream, 1, &slot());
            let sealed = done(stream);
            assert!(matches!(sealed, Request::SealSlot { .. }), "{sealed:?}");
        }),
    ]);
    let mut trainer = trainer(socket);
    let staged = trainer.acquire(BYTES, 5_000).unwrap();
    trainer.seal(&staged, Step::new(1), BYTES).unwrap();
    assert_eq!(trainer.welcome().generation.get(), 2);
    thread.join().unwrap();
}

/// The connection breaks while the answer is waited for: what is asked for is asked for again, with the time that is left.
#[test]
fn a_wait_goes_on_with_the_time_that_is_left() {
    let (_directory, socket, thread) = daemons(vec![
        serve(|stream| {
            welcome(stream);
            let wait = hear(stream);
            assert!(matches!(
                wait,
                Request::Wait {
                    timeout_ms: 5_000,
                    ..
                }
            ));
            std::thread::sleep(Duration::from_millis(700));
        }),
        serve(|stream| {
            welcome(stream);
            let Request::Wait { timeout_ms, .. } = hear(stream) else {
                panic!("expected the wait");
            };
            assert!((2_000..=4_000).contains(&timeout_ms), "{timeout_ms} ms");
            let reply = Reply::Reached {
                state: CheckpointState::Protected,
                manifest: None,
                bears: None,
            };
            say(stream, &reply, None);
        }),
    ]);
    let (mut client, _) = Client::connect(&options(socket)).unwrap();
    let state = CheckpointState::Committed;
    let reached = client.wait(RUN, Step::new(1), state, 5_000).unwrap();
    assert_eq!(reached.state, CheckpointState::Protected);
    thread.join().unwrap();
}

#[test]
fn a_save_that_was_being_filled_fails_and_the_next_one_does_not() {
    let (_directory, socket, thread) = daemons(vec![
        serve(|stream| {
            welcome_by(stream, 1);
            grant(stream, 1, &slot());
        }),
        serve(|stream| {
            welcome_by(stream, 2);
            grant(stream, 1, &slot());
            let sealed = done(stream);
            let expected = Step::new(2);
            assert!(matches!(sealed, Request::SealSlot { step, .. } if step == expected));
        }),
    ]);
    let mut trainer = trainer(socket);
    let lost = trainer.acquire(BYTES, 5_000).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let error = trainer.seal(&lost, Step::new(1), BYTES).unwrap_err();
    assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    let next = trainer.acquire(BYTES, 5_000).unwrap();
    // It was given by another daemon: a seal would be of whatever that one has under this number.
    let error = trainer.seal(&lost, Step::new(2), BYTES).unwrap_err();
    assert!(matches!(error, ClientError::SlotLost { .. }), "{error}");
    assert!(error.to_string().contains("is lost"), "{error}");
    trainer.release(&lost).unwrap();
    trainer.seal(&next, Step::new(2), BYTES).unwrap();
    thread.join().unwrap();
}

/// A number that another daemon gives may have been another slot's of the one before.
#[test]
fn a_slot_of_another_daemon_is_other_memory() {
    let (first, second, third) = (slot(), slot(), slot());
    for memory in [&second, &third] {
        memory.write_at(0, b"later").unwrap();
    }
    let kept = first.try_clone().unwrap();
    let (_directory, socket, thread) = daemons(vec![
        serve(move |stream| {
            welcome_by(stream, 1);
            grant(stream, 9, &first);
            done(stream);
        }),
        // The same daemon: only the connection broke.
        serve(move |stream| {
            welcome_by(stream, 1);
            grant(stream, 9, &kept);
            done(stream);
        }),
        serve(move |stream| {
            welcome_by(stream, 2);
            grant(stream, 9, &second);
            done(stream);
            grant(stream, 10, &third);
            done(stream);
            let mut seen = [0; 5];
            second.read_at(0, &mut seen).unwrap();
            assert_eq!(&seen, b"third");
        }),
    ]);
    let mut trainer = trainer(socket);
    let mut save = |step, text: &[u8]| {
        let staged = trainer.acquire(BYTES, 5_000).unwrap();
        staged.copy_in(0, text).unwrap();
        trainer.seal(&staged, Step::new(step), BYTES).unwrap();
        staged
    };
    let (one, two) = (save(1, b"first"), save(2, b"again"));
    let until = Instant::now() + Duration::from_secs(20);
    while !one.memory().is_mapped() {
        assert!(Instant::now() < until, "pages are mapped behind a save");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(
        (one.memory_number(), start_of(&one)),
        (two.memory_number(), start_of(&two))
    );
    let (three, four) = (save(3, b"third"), save(4, b"fours"));
    assert_ne!(start_of(&three), start_of(&two));
    let all = [
        two.memory_number(),
        three.memory_number(),
        four.memory_number(),
    ];
    assert!(all[0] < all[1] && all[1] < all[2], "{all:?}");
    thread.join().unwrap();
}

#[test]
fn a_commit_is_said_again_and_one_of_a_lost_shard_says_so() {
    let commit = |stream: &mut UnixStream, reply: Reply| {
        let asked = hear(stream);
        assert!(matches!(asked, Request::Commit { .. }), "{asked:?}");
        say(stream, &reply, None);
    };
    let none = Refusal::new(RefusalCode::WrongSlot, "no sealed shard");
    let (_directory, socket, thread) = daemons(vec![
        serve(|stream| {
            welcome(stream);
            grant(stream, 1, &slot());
            done(stream);
            hear(stream);
        }),
        serve(move |stream| {
            welcome_by(stream, 2);
            commit(stream, Reply::Done);
            grant(stream, 1, &slot());
            done(stream);
        }),
        serve(move |stream| {
            welcome_by(stream, 3);
            commit(stream, Reply::Refused(none.clone()));
            // Of a step that was sealed on this very connection it is the caller's mistake.
            grant(stream, 1, &slot());
            done(stream);
            commit(stream, Reply::Refused(none));
        }),
    ]);
    let mut trainer = trainer(socket);
    let mut save = |step| {
        let staged = trainer.acquire(BYTES, 5_000).unwrap();
        let step = Step::new(step);
        trainer.seal(&staged, step, BYTES).unwrap();
        trainer.commit(step, Vec::new(), Vec::new(), DurableWish::Never)
    };
    save(1).unwrap();
    let error = save(2).unwrap_err();
    assert!(matches!(error, ClientError::SlotLost { .. }), "{error}");
    let error = save(3).unwrap_err();
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
    thread.join().unwrap();
}

/// A run that was opened twice would be two runs; one that cannot have been heard of is asked for again.
#[test]
fn what_may_not_be_said_twice_is_said_again_only_if_nobody_heard_it() {
    let opened = |stream: &mut UnixStream| {
        assert!(matches!(hear(stream), Request::OpenRun { .. }));
        say(stream, &Reply::RunOpened { run: RUN }, None);
    };
    let (_directory, socket, thread) = daemons(vec![
        serve(welcome),
        serve(move |stream| {
            welcome(stream);
            opened(stream);
            hear(stream);
        }),
        serve(move |stream| {
            welcome(stream);
            opened(stream);
        }),
    ]);
    let (mut client, _) = Client::connect(&options(socket)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(client.open_run(5_000).unwrap(), RUN);
    let error = client.open_run(5_000).unwrap_err();
    assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    assert_eq!(client.open_run(5_000).unwrap(), RUN);
    thread.join().unwrap();
}

#[test]
fn a_daemon_that_ends_each_time_it_is_asked_is_asked_twice() {
    let ends: fn(&mut UnixStream) = |stream| {
        welcome(stream);
        hear(stream);
    };
    let (_directory, socket, thread) = daemons(vec![serve(ends), serve(ends)]);
    let (mut client, _) = Client::connect(&options(socket)).unwrap();
    let error = client.plan(None, 5_000).unwrap_err();
    assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    thread.join().unwrap();
}

#[test]
fn a_daemon_that_is_stopping_is_waited_for() {
    let (_directory, socket, thread) = daemons(vec![
        serve(|stream| {
            welcome(stream);
            hear(stream);
            let stopping = Refusal::new(RefusalCode::Draining, "the daemon is stopping");
            say(stream, &Reply::Refused(stopping), None);
        }),
        serve(|stream| {
            welcome_by(stream, 2);
            grant(stream, 1, &slot());
        }),
    ]);
    trainer(socket).acquire(BYTES, 5_000).unwrap();
    thread.join().unwrap();
}

/// The first call waits for it, within its own limit; later ones find it away and go on at once, until it is back.
#[test]
fn a_daemon_that_stays_away_costs_one_wait_and_is_found_when_it_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let listener = listen(&socket);
    let path = socket.clone();
    let gone = std::thread::spawn(move || {
        let mut stream = accept(&listener);
        drop(listener);
        welcome(&mut stream);
    });
    let mut trainer = trainer(path);
    gone.join().unwrap();
    let mut failed_after = |limit_ms| {
        let began = Instant::now();
        let error = trainer.acquire(BYTES, limit_ms).unwrap_err();
        assert!(matches!(error, ClientError::Unavailable { .. }), "{error}");
        began.elapsed()
    };
    let within_limit = failed_after(500);
    assert!(
        within_limit < Duration::from_millis(2_000),
        "{within_limit:?}"
    );
    let first = failed_after(60_000);
    assert!(
        first > Duration::from_secs(3) && first < Duration::from_secs(15),
        "{first:?}"
    );
    let later = failed_after(60_000);
    assert!(later < Duration::from_secs(2), "{later:?}");
    let listener = listen(&socket);
    let back = std::thread::spawn(move || {
        let mut stream = accept(&listener);
        assert!(is_ours(&welcome_by(&mut stream, 2)));
        grant(&mut stream, 1, &slot());
    });
    trainer.acquire(BYTES, 5_000).unwrap();
    back.join().unwrap();
}

/// Whoever asks without a name may be about to end this very daemon, and not the one that comes next.
/// What a daemon holds for a connection goes with it, also where nothing is asked of it any more.
#[test]
fn a_connection_that_was_hung_up_is_closed_at_once_and_the_next_call_makes_another() {
    let (closed, is_closed) = std::sync::mpsc::channel();
    let (_directory, socket, thread) = daemons(vec![
        serve(move |stream| {
            welcome(stream);
            let read = std::io::Read::read(stream, &mut [0]);
            closed.send(read.ok()).unwrap();
        }),
        serve(|stream| {
            welcome(stream);
            let asked = hear(stream);
            assert!(matches!(asked, Request::Status), "{asked:?}");
            say(stream, &Reply::Status("{}".into()), None);
        }),
    ]);
    let (mut client, _) = Client::connect(&options(socket)).unwrap();
    client.hang_up();
    let heard = is_closed.recv_timeout(Duration::from_secs(5));
    assert_eq!(heard, Ok(Some(0)));
    client.hang_up();
    assert_eq!(client.status().unwrap(), "{}");
    thread.join().unwrap();
}

#[test]
fn a_connection_without_a_name_stays_broken() {
    let (_directory, socket, thread) = daemons(vec![serve(|stream| drop(hear(stream)))]);
    let mut client = Client::connect_anonymous(&socket).unwrap();
    for _ in 0..2 {
        let error = client.status().unwrap_err();
        assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    }
    thread.join().unwrap();
}
