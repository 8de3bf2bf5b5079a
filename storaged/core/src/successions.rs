//! The table of tokens that were changed for others: what was proved here, what peers say, and whom the durable tier is asked for. What
//! is made of it is in `stage/identify.rs` and `stage/rotate.rs`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use minicbor::bytes::ByteVec;
use storaged_wire::local::{Request, Role};
use storaged_wire::peer::OrderKey;
use storaged_wire::succession::RecordSource;
use storaged_wire::{ConsentKey, Namespace, NodeName, Owner, Rotation, Succession};

use crate::api::{ConnId, DurableFault, Now, QueryId, RequestId};
use crate::limits;

/// A hello as it was said.
#[derive(Debug, Clone)]
pub(crate) struct SaidHello {
    pub id: RequestId,
    pub version: u16,
    pub namespace: Namespace,
    pub token: ByteVec,
    pub role: Role,
}

/// What was said before this node had heard of the job: whom the token speaks for is looked at again once it has.
#[derive(Clone)]
pub(crate) struct EarlyHello {
    pub token: ByteVec,
    pub role: Role,
    pub tier: WordOfChanges,
}

impl fmt::Debug for EarlyHello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EarlyHello")
            .field("role", &self.role)
            .field("tier", &self.tier)
            .finish_non_exhaustive()
    }
}

/// Whether the durable tier has said who opens a job that this node does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WordOfChanges {
    Heard,
    /// It failed, or was silent.
    Missing,
}

/// A hello for a name that this node does not know: it goes on once all that are asked have answered, or at the end of its time.
#[derive(Debug, Clone)]
pub(crate) struct Greeting {
    pub said: SaidHello,
    /// In full.
    pub namespace: Namespace,
    pub since: Now,
    /// What the durable tier has; none while it is asked.
    pub found: Option<Vec<Succession>>,
    pub tier: WordOfChanges,
    /// Peers that have just come up, and may know the job.
    pub waiting_for: BTreeSet<NodeName>,
}

/// A request about a job that this node does not know: peers are asked first, and the durable tier if it was silent when whoever asks said
/// hello.
#[derive(Debug, Clone)]
pub(crate) struct HeldRequest {
    pub id: RequestId,
    pub request: Request,
    pub namespace: Namespace,
    pub since: Now,
    /// Whoever asks waits no longer than until then.
    pub deadline: Now,
    pub word: LateWord,
    pub waiting_for: BTreeSet<NodeName>,
}

/// What the durable tier has to say to one.
#[derive(Debug, Clone)]
pub(crate) enum LateWord {
    /// It has said it with the hello, or there is none.
    Unneeded,
    Awaited,
    Found(Vec<Succession>),
    Failed(DurableFault),
}

impl HeldRequest {
    /// When it goes on, or is refused, if nobody says anything more.
    fn until(&self) -> Now {
        let wait = match self.word {
            // Whoever has time waits for a tier that is slow.
            LateWord::Awaited if !self.needs_no_tier() => return self.deadline,
            LateWord::Awaited => limits::SUCCESSION_WAIT_MS,
            LateWord::Unneeded | LateWord::Found(_) | LateWord::Failed(_) => limits::CHANGE_WAIT_MS,
        };
        self.since.plus(wait).min(self.deadline)
    }

    /// Whether it neither reads nor changes what is durable. A run of a job that nobody knows has rules of its own for a tier that is away, and a
    /// job that may be opened without it has its boards.
    pub const fn needs_no_tier(&self) -> bool {
        matches!(
            self.request,
            Request::OpenRun { .. } | Request::Board { .. }
        )
    }

    pub fn is_over(&self, now: Now) -> bool {
        let is_told = self.waiting_for.is_empty() && !matches!(self.word, LateWord::Awaited);
        is_told || self.until() <= now
    }

    /// The request, of a caller who has waited already.
    pub fn with_time_left(self, now: Now) -> Request {
        let left_ms = self.deadline.since(now);
        self.request.within(Duration::from_millis(left_ms))
    }

    /// Or have had time to.
    pub fn have_peers_told(&self, now: Now) -> bool {
        self.waiting_for.is_empty() || self.since.plus(limits::CHANGE_WAIT_MS) <= now
    }
}

impl Greeting {
    /// Then it goes on whatever it has heard. A trainer is refused without word of changes, and has all the time of its hello for that.
    pub fn until(&self) -> Now {
        self.since.plus(match self.said.role {
            Role::Trainer { .. } => limits::RUN_CONFIRM_MS,
            Role::Reader => limits::SUCCESSION_WAIT_MS,
        })
    }
}

/// What the durable tier was asked for.
#[derive(Debug, Clone)]
pub(crate) enum SuccessionWait {
    /// By whom a job is opened that this node does not know.
    Hello(Greeting),
    /// The same, with a request of who was let in without having heard that.
    Request(Box<HeldRequest>),
    /// What must be known to change a token.
    Standing(RequestId),
    /// To take the change of one.
    Rotation(RequestId, Box<Rotation>),
    /// It says that the key of this job's MACs is no longer the newest.
    Publication(Namespace),
}

impl SuccessionWait {
    /// The job that peers are asked for, and whose answer is awaited.
    const fn asks_peers(&mut self) -> Option<(&Namespace, &mut BTreeSet<NodeName>)> {
        match self {
            Self::Hello(it) => Some((&it.namespace, &mut it.waiting_for)),
            Self::Request(it) => Some((&it.namespace, &mut it.waiting_for)),
            Self::Standing(_) | Self::Rotation(..) | Self::Publication(_) => None,
        }
    }

    fn asker(&self) -> Option<RequestId> {
        match self {
            Self::Hello(greeting) => Some(greeting.said.id),
            Self::Request(held) => Some(held.id),
            Self::Standing(id) | Self::Rotation(id, _) => Some(*id),
            Self::Publication(_) => None,
        }
    }
}

/// A token that a connection has said.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SaidToken {
    pub credential: Owner,
    pub consent: ConsentKey,
    pub orders: OrderKey,
}

/// What is known of changes.
#[derive(Debug, Default)]
pub(crate) struct Successions {
    /// By a token that was said here.
    proven: BTreeMap<Namespace, Succession>,
    /// One of each peer that said something else.
    told: BTreeMap<Namespace, BTreeMap<NodeName, Succession>>,
    /// What they passed on of others' words, a few of each job. It takes no place of what a peer says of itself: one liar would push that out.
    passed_on: BTreeMap<Namespace, VecDeque<Succession>>,
    pub errands: BTreeMap<QueryId, SuccessionWait>,
}

impl Successions {
    pub fn proven(&self, namespace: &Namespace) -> Option<&Succession> {
        self.proven.get(namespace)
    }

    /// Jobs of which something is known.
    pub fn jobs(&self) -> BTreeSet<Namespace> {
        let told = self.told.keys().chain(self.passed_on.keys());
        self.proven.keys().chain(told).cloned().collect()
    }

    /// What peers that are linked now are told of a job: what is proven here, and a few that are not and come later.
    pub fn to_tell(&self, namespace: &Namespace) -> Vec<(RecordSource, Succession)> {
        let proven = self.proven.get(namespace);
        let own = proven.map(|it| (RecordSource::Own, it.clone()));
        let later = self.unproven(namespace);
        let later = later.filter(|it| proven.is_none_or(|proven| it.number > proven.number));
        let later = later.take(limits::SUCCESSIONS_PASSED_ON_MAX);
        let later = later.map(|it| (RecordSource::Told, it.clone()));
        own.into_iter().chain(later).collect()
    }

    fn unproven(&self, namespace: &Namespace) -> impl Iterator<Item = &Succession> {
        let told = self.told.get(namespace).into_iter();
        let passed_on = self.passed_on.get(namespace).into_iter().flatten();
        told.flat_map(BTreeMap::values).chain(passed_on)
    }

    pub fn prove(&mut self, succession: Succession) {
        let namespace = succession.namespace.clone();
        if let Some(told) = self.told.get_mut(&namespace) {
            told.retain(|_, it| *it != succession);
        }
        if let Some(passed_on) = self.passed_on.get_mut(&namespace) {
            passed_on.retain(|it| it.number > succession.number);
        }
        self.proven.insert(namespace, succession);
    }

    /// A peer says so. Each has one place, and what enough others say too takes none: were it kept of one alone, that one could say something
    /// else in its place.
    pub fn note_told(&mut self, from: &NodeName, succession: Succession) {
        let told = self.told.entry(succession.namespace.clone()).or_default();
        let others = told.iter().filter(|(teller, _)| *teller != from);
        let same = others.filter(|(_, it)| **it == succession);
        if same.count() < limits::WORDS_NEEDED {
            told.insert(from.clone(), succession);
        }
    }

    /// A peer passes it on. The newest of these stay.
    pub fn note_passed_on(&mut self, succession: Succession) {
        if self
            .candidates(&succession.namespace)
            .any(|it| *it == succession)
        {
            return;
        }
        let records = self.passed_on.entry(succession.namespace.clone());
        let records = records.or_default();
        records.push_back(succession);
        if records.len() > limits::SUCCESSIONS_PASSED_ON_MAX {
            records.pop_front();
        }
    }

    /// What may hold for a job.
    pub fn candidates(&self, namespace: &Namespace) -> impl Iterator<Item = &Succession> {
        let unproven = self.unproven(namespace);
        self.proven.get(namespace).into_iter().chain(unproven)
    }

    /// The node knows nothing of a job any more.
    pub fn forget_job(&mut self, namespace: &Namespace) {
        self.proven.remove(namespace);
        self.told.remove(namespace);
        self.passed_on.remove(namespace);
    }

    /// Whether a change of a job's token is on its way to the tier.
    pub fn is_rotating(&self, namespace: &Namespace) -> bool {
        self.errands.values().any(|errand| match errand {
            SuccessionWait::Rotation(_, rotation) => rotation.succession.namespace == *namespace,
            _ => false,
        })
    }

    /// A connection is gone.
    pub fn forget(&mut self, conn: ConnId) {
        // A change that is on its way to the tier holds once it is there, whoever still waits for it.
        let is_its = |errand: &SuccessionWait| match errand {
            SuccessionWait::Rotation(..) => false,
            other => other.asker().is_some_and(|id| id.conn == conn),
        };
        self.errands.retain(|_, errand| !is_its(errand));
    }

    /// Hellos and requests that wait for peers too: their jobs, and whose answers they await.
    pub fn awaiting_peers(
        &mut self,
    ) -> impl Iterator<Item = (QueryId, &Namespace, &mut BTreeSet<NodeName>)> {
        let errands = self.errands.iter_mut();
        errands.filter_map(|(query, errand)| {
            let (namespace, waiting_for) = errand.asks_peers()?;
            Some((*query, namespace, waiting_for))
        })
    }

    /// The jobs of hellos and requests that wait.
    pub fn awaited_jobs(&self) -> impl Iterator<Item = &Namespace> {
        self.errands.values().filter_map(|errand| match errand {
            SuccessionWait::Hello(greeting) => Some(&greeting.namespace),
            SuccessionWait::Request(held) => Some(&held.namespace),
            _ => None,
        })
    }

    /// Hellos that go on now.
    pub fn take_greetings(&mut self, is_over: impl Fn(&Greeting) -> bool) -> Vec<Greeting> {
        let over =
            |errand: &SuccessionWait| matches!(errand, SuccessionWait::Hello(it) if is_over(it));
        self.take(over, |errand| match errand {
            SuccessionWait::Hello(greeting) => Some(greeting),
            _ => None,
        })
    }

    /// Requests that go on now.
    pub fn take_held(&mut self, is_over: impl Fn(&HeldRequest) -> bool) -> Vec<HeldRequest> {
        let over =
            |errand: &SuccessionWait| matches!(errand, SuccessionWait::Request(it) if is_over(it));
        self.take(over, |errand| match errand {
            SuccessionWait::Request(held) => Some(*held),
            _ => None,
        })
    }

    fn take<T>(
        &mut self,
        over: impl Fn(&SuccessionWait) -> bool,
        inner: impl Fn(SuccessionWait) -> Option<T>,
    ) -> Vec<T> {
        let over = self.errands.extract_if(.., |_, errand| over(errand));
        over.filter_map(|(_, errand)| inner(errand)).collect()
    }

    pub fn deadlines(&self) -> impl Iterator<Item = Now> {
        self.errands.values().filter_map(|errand| match errand {
            SuccessionWait::Hello(greeting) => Some(greeting.until()),
            SuccessionWait::Request(held) => Some(held.until()),
            _ => None,
        })
    }

    /// Requests that wait for the tier.
    pub fn unanswered(&self) -> usize {
        let asked = self.errands.values().filter_map(SuccessionWait::asker);
        asked.count()
    }
}
