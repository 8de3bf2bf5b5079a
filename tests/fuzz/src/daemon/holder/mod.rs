//! The holder (`storaged hold`): datagrams come to it over several connections, in any order, with descriptors and without, and beside it a model
//! says what must come of each. Who is not attached changes nothing; once it was counted, what is held is what was said, of the same files, and
//! never more than there is room for. What a holder, a keeper and a daemon say to one another means one thing, and is said again as it was read.

mod model;
mod said;
mod seeds;

use std::cell::RefCell;
use std::fmt::Debug;

use storaged::keep::holder::{Reaction, UnconnectedHolder};
use storaged::keep::message::{DATAGRAM_MAX, FromKeeper, HoldAnswer, HoldOrder, ToHolder};
use tokio::runtime::Runtime;

use model::{Expected, ROOM};
use said::{Datagram, STEPS, Step, files, identity};
pub use seeds::holder_seeds;

const CONNECTIONS: usize = 4;
/// Bytes of a step: what, over which connection, and two that say more.
const STEP_BYTES: usize = 4;
/// No name is longer.
const NAME_BYTES_MAX: usize = 64;

/// A holder, what it must have, and the number of each of its connections.
struct Scene<'h> {
    holder: &'h mut UnconnectedHolder,
    expected: Expected,
    connections: [u64; CONNECTIONS],
    last: u64,
}

impl<'h> Scene<'h> {
    fn over(holder: &'h mut UnconnectedHolder) -> Self {
        holder.begin_anew(ROOM);
        let connections: [u64; CONNECTIONS] = std::array::from_fn(|at| at as u64);
        Self {
            holder,
            expected: Expected::default(),
            connections,
            last: CONNECTIONS as u64,
        }
    }

    fn play(&mut self, step: Step, [over, which, how]: [u8; 3], own: &[u8]) {
        let at = usize::from(over) % CONNECTIONS;
        if let Some(said) = Datagram::of(step, [which, how], own) {
            return self.say(at, said);
        }
        match step {
            Step::HangUp => self.hang_up(at),
            Step::DaemonEnds => self.expected.end_daemon(),
            _ => self.say_odd(at),
        }
    }

    fn say(&mut self, at: usize, said: Datagram) {
        reads_back(&said.body);
        let connection = self.connections[at];
        let was_attached = self.expected.is_attached(connection);
        let expected = self.expected.take(connection, &said.body, said.comes);
        let reaction = self.holder.take(connection, &said.body, said.descriptor);
        self.must_be(at, &reaction, &expected);
        if !was_attached || matches!(reaction, Reaction::Say(_)) {
            self.has_the_files();
        }
    }

    fn say_odd(&mut self, at: usize) {
        let connection = self.connections[at];
        let expected = if self.expected.is_attached(connection) {
            self.expected.miss()
        } else {
            Reaction::Part(None)
        };
        let reaction = self.holder.take_odd(connection);
        self.must_be(at, &reaction, &expected);
    }

    fn must_be(&mut self, at: usize, reaction: &Reaction, expected: &Reaction) {
        assert_eq!(reaction, expected);
        assert_eq!(self.holder.told(), self.expected.told.take());
        if matches!(reaction, Reaction::Part(_)) {
            self.hang_up(at);
        }
        for connection in self.connections {
            let is_attached = self.expected.is_attached(connection);
            assert_eq!(self.holder.is_attached(connection), is_attached);
        }
        let held = self.holder.held().map(|(name, _)| name.to_string());
        let held: Vec<String> = held.collect();
        assert!(held.len() <= ROOM, "more than there is room for: {held:?}");
        let expected = self.expected.names.keys();
        assert!(expected.eq(held.iter()), "held: {held:?}");
    }

    fn hang_up(&mut self, at: usize) {
        let connection = self.connections[at];
        self.holder.ended(connection);
        self.expected.end(connection);
        self.connections[at] = self.last;
        self.last += 1;
    }

    /// By each name the file that was stored last.
    fn has_the_files(&self) {
        for (name, descriptor) in self.holder.held() {
            let file = descriptor.try_clone_to_owned().expect("a descriptor");
            let expected = self.expected.names.get(name.as_str());
            let expected = expected.map(|index| identity(&files()[*index]));
            assert_eq!(Some(identity(&file.into())), expected, "{name}");
        }
    }
}

/// Whatever can be read of a datagram means one thing, and can be read again as it is said.
fn reads_back(body: &[u8]) {
    let (order, change) = (HoldOrder::decode(body), ToHolder::decode(body));
    let (answer, given) = (HoldAnswer::decode(body), FromKeeper::decode(body));
    let meanings = [
        order.is_some(),
        change.is_some(),
        answer.is_some(),
        given.is_some(),
    ];
    let meanings = meanings.into_iter().filter(|it| *it).count();
    assert!(meanings <= 1, "{meanings} meanings");
    if let Some(order) = order {
        reads_again(&order, &order.encode(), HoldOrder::decode);
    }
    if let Some(answer) = answer {
        reads_again(&answer, &answer.encode(), HoldAnswer::decode);
    }
    if let Some(change) = &change {
        reads_again(change, &change.encode(), ToHolder::decode);
    }
    if let Some(given) = &given {
        reads_again(given, &given.encode(), FromKeeper::decode);
    }
    let changed = change.as_ref().and_then(|change| match change {
        ToHolder::Store(name) | ToHolder::Remove(name) => Some(name),
        ToHolder::List | ToHolder::Watch => None,
    });
    let held = given.as_ref().and_then(|given| match given {
        FromKeeper::Held(name) => Some(name),
        FromKeeper::End(_) | FromKeeper::Holder(_) => None,
    });
    if let Some(name) = changed.or(held) {
        assert!(is_name(name.as_str()), "{name}");
    }
}

fn reads_again<T: Debug + PartialEq>(read: &T, text: &str, decode: fn(&[u8]) -> Option<T>) {
    assert!(text.len() <= DATAGRAM_MAX, "{text}");
    assert_eq!(decode(text.as_bytes()).as_ref(), Some(read), "{text}");
}

fn is_name(text: &str) -> bool {
    let is_plain = |it: u8| (b'!'..=b'~').contains(&it) && it != b':';
    (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_plain)
}

/// One holder for all inputs, and the runtime that it belongs to.
struct Fed {
    holder: UnconnectedHolder,
    _runtime: Runtime,
}

thread_local! {
    static FED: RefCell<Fed> = RefCell::new(Fed::start());
}

impl Fed {
    fn start() -> Self {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_io().build().expect("a runtime");
        let holder = runtime.block_on(UnconnectedHolder::start());
        Self {
            holder: holder.expect("a pair of sockets"),
            _runtime: runtime,
        }
    }
}

/// The target: how many steps, these, and then bytes that steps may say.
pub fn holder(bytes: &[u8]) {
    let Some((count, rest)) = bytes.split_first() else {
        return;
    };
    let count = usize::from(*count).min(rest.len() / STEP_BYTES);
    let (steps, own) = rest.split_at(count * STEP_BYTES);
    reads_back(own);
    FED.with_borrow_mut(|fed| {
        let mut scene = Scene::over(&mut fed.holder);
        for [what, more @ ..] in steps.as_chunks::<STEP_BYTES>().0 {
            let step = STEPS[usize::from(*what) % STEPS.len()];
            scene.play(step, *more, own);
        }
        scene.has_the_files();
    });
}
