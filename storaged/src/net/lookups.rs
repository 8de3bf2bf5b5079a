//! Names of peers, looked up by the system: few at a time, each once, in the order in which they were first asked for. The system's resolver
//! blocks a thread for each name and may answer long after whoever asked has gone. Were each dial to ask it for itself, a resolver that hangs
//! would keep hundreds of threads, and what nobody waits for any more would queue up without end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

/// Threads that wait for the resolver. A thousand names that take 100 ms each are looked up in 3 s.
const AT_ONCE: usize = 32;
/// Longer than between two dials of a peer: what came when a dial had just given up is there for the next one.
const KEPT_FOR: Duration = Duration::from_secs(2);
/// A name's turn waits so long for somebody to ask again: a peer that is down is dialled every 4 s.
const WANTED_FOR: Duration = Duration::from_secs(5);
/// Dials have given up by then.
const SLOW: Duration = Duration::from_secs(3);
const TELL_EVERY: Duration = Duration::from_secs(60);

type AskResolver = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;
type LookupOutcome = Result<Arc<[SocketAddr]>, Arc<io::Error>>;

static SYSTEM: LazyLock<Arc<Lookups>> = LazyLock::new(|| {
    let ask = |name: &str| Ok((name, 0).to_socket_addrs()?.collect());
    Lookups::new(AT_ONCE, Box::new(ask))
});

/// Lookups that share their threads.
pub(super) struct Lookups {
    at_once: usize,
    resolver: Box<AskResolver>,
    state: Mutex<LookupState>,
}

#[derive(Default)]
struct LookupState {
    names: HashMap<String, NameLookup>,
    /// Names that no thread has begun with.
    turns: VecDeque<String>,
    threads: usize,
    told: Option<Instant>,
}

struct NameLookup {
    asked: Instant,
    answer: watch::Sender<Option<LookupAnswer>>,
}

struct LookupAnswer {
    found: LookupOutcome,
    at: Instant,
}

impl NameLookup {
    fn is_over(&self) -> bool {
        let answer = self.answer.borrow();
        answer
            .as_ref()
            .is_some_and(|it| it.at.elapsed() >= KEPT_FOR)
    }

    fn is_wanted(&self) -> bool {
        self.answer.receiver_count() > 0 || self.asked.elapsed() < WANTED_FOR
    }
}

impl Lookups {
    /// Of the process, because its threads are.
    pub fn of_the_system() -> &'static Arc<Self> {
        &SYSTEM
    }

    fn new(at_once: usize, resolver: Box<AskResolver>) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self {
            at_once,
            resolver,
            state,
        })
    }

    /// The addresses of a name, with port 0. Whoever gives up leaves no more behind than the name's turn.
    pub async fn addresses(self: &Arc<Self>, name: &str) -> io::Result<Arc<[SocketAddr]>> {
        let mut answer = self.ask(name);
        let answered = answer.wait_for(Option::is_some).await;
        let found = answered.ok();
        let found = found.and_then(|it| it.as_ref().map(|it| it.found.clone()));
        let found = found.ok_or_else(|| io::Error::other("it was not looked up"))?;
        found.map_err(|error| io::Error::new(error.kind(), error))
    }

    fn ask(self: &Arc<Self>, name: &str) -> watch::Receiver<Option<LookupAnswer>> {
        let mut state = self.state();
        let known = state.names.get_mut(name).filter(|it| !it.is_over());
        let answer = if let Some(lookup) = known {
            lookup.asked = Instant::now();
            lookup.answer.subscribe()
        } else {
            let (sender, answer) = watch::channel(None);
            let lookup = NameLookup {
                asked: Instant::now(),
                answer: sender,
            };
            state.names.insert(name.into(), lookup);
            state.turns.push_back(name.into());
            answer
        };
        if !state.turns.is_empty() && state.threads < self.at_once {
            state.threads += 1;
            let looker = Looker {
                lookups: self.clone(),
                is_counted: true,
            };
            drop(state);
            drop(spawn_blocking(move || looker.look()));
        }
        answer
    }

    fn state(&self) -> MutexGuard<'_, LookupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the threads. It counts as one also before it runs, and no more if the runtime ends before that.
struct Looker {
    lookups: Arc<Lookups>,
    is_counted: bool,
}

impl Looker {
    fn look(mut self) {
        while let Some(name) = self.next() {
            let began = Instant::now();
            let found = (self.lookups.resolver)(&name);
            self.answer(&name, found, began.elapsed());
        }
    }

    fn next(&mut self) -> Option<String> {
        let mut state = self.lookups.state();
        while let Some(name) = state.turns.pop_front() {
            if state.names.get(&name).is_some_and(NameLookup::is_wanted) {
                return Some(name);
            }
            state.names.remove(&name);
        }
        // Under the same lock as the look at the turns: who asks after that begins another thread.
        state.threads -= 1;
        self.is_counted = false;
        state.names.retain(|_, lookup| !lookup.is_over());
        None
    }

    fn answer(&self, name: &str, found: io::Result<Vec<SocketAddr>>, took: Duration) {
        let found = found.map(Arc::from).map_err(Arc::new);
        let mut state = self.lookups.state();
        if let Some(lookup) = state.names.get(name) {
            let at = Instant::now();
            lookup.answer.send_replace(Some(LookupAnswer { found, at }));
        }
        let is_told = |at: Instant| at.elapsed() < TELL_EVERY;
        if took >= SLOW && !state.told.is_some_and(is_told) {
            state.told = Some(Instant::now());
            let waiting = state.turns.len();
            drop(state);
            let took_s = took.as_secs_f64();
            tracing::warn!(
                key = "peers.address",
                name,
                took_s,
                waiting,
                "names of peers are looked up too slowly to dial them: check the resolver of this node"
            );
        }
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        if self.is_counted {
            self.lookups.state().threads -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use futures::FutureExt;

    use super::*;

    /// A resolver that says what it is asked and answers when told to; at once when the teller is gone.
    fn held(at_once: usize) -> (Arc<Lookups>, Receiver<String>, Sender<()>) {
        let ((asks, asked), (tells, told)) = (channel(), channel());
        let told = Mutex::new(told);
        let resolver = move |name: &str| {
            let _ = asks.send(name.to_owned());
            let _ = told.lock().expect("no panic").recv();
            Ok(vec![SocketAddr::from(([10, 0, 0, 1], 0))])
        };
        (Lookups::new(at_once, Box::new(resolver)), asked, tells)
    }

    fn next(asked: &Receiver<String>) -> String {
        asked
            .recv_timeout(Duration::from_secs(30))
            .expect("a question")
    }

    fn ask_and_give_up(lookups: &Arc<Lookups>, name: &str) {
        assert!(lookups.addresses(name).now_or_never().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_resolver_that_hangs_keeps_few_threads_however_often_it_is_asked() {
        let (lookups, asked, tells) = held(AT_ONCE);
        let names: BTreeSet<String> = (0..1000).map(|n| format!("n{n}")).collect();
        for _ in 0..3 {
            names
                .iter()
                .for_each(|name| ask_and_give_up(&lookups, name));
        }
        let mut begun: Vec<String> = (0..AT_ONCE).map(|_| next(&asked)).collect();
        let counts = |state: &LookupState| (state.threads, state.turns.len());
        assert_eq!(counts(&lookups.state()), (AT_ONCE, 1000 - AT_ONCE));
        assert!(asked.try_recv().is_err());
        drop(tells);
        begun.extend((AT_ONCE..1000).map(|_| next(&asked)));
        assert_eq!(begun.into_iter().collect::<BTreeSet<_>>(), names);
    }

    #[tokio::test(start_paused = true)]
    async fn names_have_their_turns_in_order_and_one_that_nobody_wants_has_none() {
        let (lookups, asked, tells) = held(1);
        ask_and_give_up(&lookups, "hangs");
        assert_eq!(next(&asked), "hangs");
        for name in ["b", "c", "gone", "b"] {
            ask_and_give_up(&lookups, name);
        }
        tokio::time::advance(WANTED_FOR).await;
        for name in ["c", "d", "b"] {
            ask_and_give_up(&lookups, name);
        }
        for name in ["b", "c", "d"] {
            tells.send(()).expect("a resolver");
            assert_eq!(next(&asked), name);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_came_too_late_is_there_for_the_next_dial_and_not_for_long() {
        let (lookups, asked, tells) = held(1);
        ask_and_give_up(&lookups, "a");
        assert_eq!(next(&asked), "a");
        tells.send(()).expect("a resolver");
        for _ in 0..2 {
            assert_eq!(lookups.addresses("a").await.expect("it").len(), 1);
        }
        assert!(asked.try_recv().is_err());
        tokio::time::advance(KEPT_FOR).await;
        ask_and_give_up(&lookups, "a");
        assert_eq!(next(&asked), "a");
    }
}
