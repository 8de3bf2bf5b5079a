//! What all machines of a node share: its set-up, the time of this input, what it says, who is there, and the tables that
//! everybody reads. A machine gets it with each call and keeps no reference to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use storaged_plan::{Group, GroupError, groups};
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{
    Digest, Generation, ManifestBytes, Namespace, NodeName, Owner, Refusal, RefusalCode, SlotId,
};

use crate::api::{ConnId, Note, Now, Output, QueryId, RequestId, Setup, Viewer};
use crate::budget::Budget;
use crate::catalog::{Attached, Checkpoint, Claim, Ends, NamespaceTable, Peer, Slot, TierQuestion};
use crate::enclosures::EnclosureStore;
use crate::event::Event;
use crate::keep::Keeping;
use crate::limits;
use crate::manifest_keys::ManifestKeys;
use crate::parcels::Parcels;
use crate::place::Drains;
use crate::restore::{Answer, EarlyReaders, Rates};
use crate::stage::{Lifetimes, Waiters};
use crate::successions::Successions;
use crate::testimony::Testimony;
use crate::trickle::TierHealth;

/// The node's tables, and its way out.
#[derive(Debug)]
pub(crate) struct Context {
    pub setup: Setup,
    pub groups: Vec<Group>,
    /// Those of epochs before, newest last.
    pub earlier_groups: VecDeque<(u64, Vec<Group>)>,
    pub started: Option<Now>,
    /// When a peer joined last that had not been up before.
    pub joined_at: Now,
    /// It was waited for them: one that joins late changes nothing of that, or what is due would not be for a second.
    has_settled: bool,
    pub now: Now,
    /// When time last passed, and since when without a gap.
    pub looked_at: Now,
    pub awake_since: Now,
    pub out: Vec<Output>,
    pub peers: BTreeMap<NodeName, Peer>,
    /// Peers that are down and were up, as they were: since then.
    pub down: BTreeMap<NodeName, Peer>,
    /// What is heard once the input is handled.
    loopback: VecDeque<Event>,
    /// How checkpoints that have left RAM ended.
    pub ends: Ends,
    pub namespaces: BTreeMap<Namespace, NamespaceTable>,
    pub checkpoints: BTreeMap<CheckpointKey, Checkpoint>,
    pub by_name: BTreeMap<Digest, CheckpointKey>,
    pub slots: BTreeMap<SlotId, Slot>,
    pub budget: Budget,
    pub conns: BTreeMap<ConnId, Attached>,
    /// Whose connections they are, where it is not the tenant without a name.
    pub viewers: BTreeMap<ConnId, Viewer>,
    pub waiters: Waiters,
    /// Commits whose descriptions are digested: they are answered then.
    pub describing: BTreeSet<RequestId>,
    /// Pins of which the durable tier is being told, and whether they count in RAM.
    pub kept_in_ram: BTreeMap<RequestId, Result<(), Refusal>>,
    pub lifetimes: Lifetimes,
    pub rates: Rates,
    pub early: EarlyReaders,
    pub parcels: Parcels,
    pub enclosures: EnclosureStore,
    pub tier: TierHealth,
    pub drains: Drains,
    pub keeping: Keeping,
    pub testimony: Testimony,
    /// Whether the tier has checkpoints that too few home nodes call durable.
    pub tier_questions: BTreeMap<QueryId, TierQuestion>,
    /// Questions to home nodes about steps in the way of trainers that wait, by job.
    pub homes_asked: BTreeMap<Namespace, u64>,
    pub keys: ManifestKeys,
    pub successions: Successions,
    next: u64,
}

impl Context {
    /// Of a node that knows nothing yet.
    pub fn new(setup: Setup) -> Result<Self, GroupError> {
        let groups = match setup.geometry {
            Some(geometry) => groups(&setup.members, geometry)?,
            None => Vec::new(),
        };
        let budget = Budget::new(setup.budget, &setup.shares);
        Ok(Self {
            groups,
            earlier_groups: VecDeque::new(),
            budget,
            setup,
            started: None,
            joined_at: Now(0),
            has_settled: false,
            now: Now(0),
            looked_at: Now(0),
            awake_since: Now(0),
            out: Vec::new(),
            peers: BTreeMap::new(),
            down: BTreeMap::new(),
            loopback: VecDeque::new(),
            ends: Ends::default(),
            namespaces: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
            by_name: BTreeMap::new(),
            slots: BTreeMap::new(),
            conns: BTreeMap::new(),
            viewers: BTreeMap::new(),
            waiters: Waiters::default(),
            describing: BTreeSet::new(),
            kept_in_ram: BTreeMap::new(),
            lifetimes: Lifetimes::default(),
            rates: Rates::default(),
            early: EarlyReaders::default(),
            parcels: Parcels::default(),
            enclosures: EnclosureStore::default(),
            tier: TierHealth::default(),
            drains: Drains::default(),
            keeping: Keeping::default(),
            testimony: Testimony::default(),
            tier_questions: BTreeMap::new(),
            homes_asked: BTreeMap::new(),
            keys: ManifestKeys::default(),
            successions: Successions::default(),
            next: 0,
        })
    }

    /// An input comes at this time.
    pub fn begin(&mut self, now: Now) {
        self.now = now;
        self.started.get_or_insert(now);
        self.has_settled |= self.settled();
    }

    /// Until when a request that comes now may wait.
    pub fn answer_by(&self, timeout_ms: u32) -> Now {
        let most = u64::from(timeout_ms).min(limits::REQUEST_MAX_MS);
        self.now.plus(most)
    }

    /// What has not been heard yet, in the order in which it is to be.
    pub fn next_event(&mut self) -> Option<Event> {
        self.loopback.pop_front()
    }

    /// Whether every configured peer is up, or has had time to be.
    pub(crate) fn settled(&self) -> bool {
        let started = self.now.since(self.started.unwrap_or(self.now));
        let is_quiet = self.now.since(self.joined_at) >= limits::JOIN_QUIET_MS;
        self.has_settled
            || self.peers.len() + 1 >= self.setup.members.len()
            || started >= limits::JOIN_GRACE_MS && is_quiet
            || started >= limits::JOIN_MAX_MS
    }

    pub(crate) fn me(&self) -> &NodeName {
        &self.setup.name
    }

    pub(crate) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Numbers given from now on are above this one.
    pub(crate) fn numbers_above(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    pub(crate) fn reply(&mut self, id: RequestId, reply: Reply) {
        self.answer(id, Answer::plain(reply));
    }

    /// Answers a request. Of an opening whose reader has the memory already it goes to whoever follows it.
    pub(crate) fn answer(&mut self, id: RequestId, answer: Answer) {
        if let Some((id, answer)) = self.early.heard(id, answer) {
            self.push_answer(id, answer);
        }
    }

    pub(crate) fn push_answer(&mut self, id: RequestId, answer: Answer) {
        let Answer { reply, descriptor } = answer;
        self.out.push(Output::Reply {
            id,
            reply,
            descriptor,
        });
    }

    pub(crate) fn note(&mut self, note: Note) {
        self.out.push(Output::Note(note));
    }

    /// Sends to a peer. What goes to this node itself is handled after the input that it came of: handled at once it
    /// would change tables under the hands of whoever sends, and a message that answers itself would never end.
    pub(crate) fn send(&mut self, to: &NodeName, message: PeerMessage) {
        if to == self.me() {
            self.emit(Event::Message(to.clone(), message));
        } else if self.peers.contains_key(to) {
            let (to, message) = (to.clone(), self.wrap(message));
            self.out.push(Output::Send { to, message });
        }
    }

    /// Sends to every peer that is up.
    pub(crate) fn send_all(&mut self, message: &PeerMessage) {
        let peers: Vec<NodeName> = self.peers.keys().cloned().collect();
        for peer in peers {
            self.send(&peer, message.clone());
        }
    }

    /// Tells the other machines of something, once this input is handled: first of blocks that are gone, so that no slot is
    /// given to anybody before all sessions that read from it have been stopped.
    pub(crate) fn emit(&mut self, event: Event) {
        match event {
            Event::BlocksGone(_) => self.loopback.push_front(event),
            _ => self.loopback.push_back(event),
        }
    }

    pub(crate) fn is_up(&self, node: &NodeName) -> bool {
        node == self.me() || self.peers.contains_key(node)
    }

    /// Whether a node that comes up is another daemon than when it was up last, be it that its link has ended since or not.
    pub(crate) fn is_another_daemon(&self, node: &NodeName, generation: Generation) -> bool {
        let down = self.down.get(node);
        let down = down.filter(|_| !planted!("restarts_of_the_down_not_seen"));
        let known = self.peers.get(node).or(down);
        known.is_some_and(|known| known.generation != generation)
    }

    /// A peer's link is up; what was known of it while it was up before. A link that breaks off and comes back takes nothing from what the
    /// daemon has.
    pub(crate) fn note_peer(&mut self, node: &NodeName, generation: Generation) -> Option<Peer> {
        let since = self.now;
        let known = self.peers.get(node).or(self.down.get(node));
        let is_same =
            |it: &&Peer| it.generation == generation && !planted!("links_that_flap_are_restarts");
        let known = Peer {
            generation,
            since,
            known_since: known.filter(is_same).map_or(since, |it| it.known_since),
        };
        self.peers.insert(node.clone(), known)
    }

    /// Another daemon runs on a node: what the one before said of itself is past.
    pub(crate) fn forget_said(&mut self, node: &NodeName) {
        self.forget_announced(node);
        self.testimony.forget(node);
    }

    pub(crate) fn manifest_named(&self, name: Digest) -> Option<Arc<ManifestBytes>> {
        self.by_name
            .get(&name)
            .and_then(|key| self.checkpoints.get(key))
            .and_then(|checkpoint| checkpoint.manifest.clone())
    }

    pub(crate) fn checkpoint_named(&mut self, name: Digest) -> Option<&mut Checkpoint> {
        let key = self.by_name.get(&name)?;
        self.checkpoints.get_mut(key)
    }

    /// Jobs of which checkpoints are known here.
    pub(crate) fn jobs_with_checkpoints(&self) -> BTreeSet<&Namespace> {
        self.checkpoints.keys().map(|key| &key.namespace).collect()
    }

    /// The committed checkpoints here, with their manifests.
    pub(crate) fn committed(&self) -> Vec<(CheckpointKey, Arc<ManifestBytes>)> {
        let all = self.checkpoints.values();
        all.filter_map(|c| Some((c.key.clone(), c.manifest.clone()?)))
            .collect()
    }

    pub(crate) fn attached(&self, id: RequestId) -> Result<&Attached, Refusal> {
        self.conns.get(&id.conn).ok_or_else(|| {
            Refusal::new(
                RefusalCode::NotAttached,
                "expected a hello first on this connection, got another request",
            )
        })
    }

    /// Who asks.
    pub(crate) fn viewer(&self, conn: ConnId) -> Viewer {
        let viewer = self.viewers.get(&conn).cloned();
        viewer.unwrap_or(Viewer::Tenant(None))
    }

    /// Whose a job is, if only as one peer says.
    pub(crate) fn told_owner_of(&self, namespace: &Namespace) -> Option<Owner> {
        let table = self.namespaces.get(namespace);
        let claims = |table: &&NamespaceTable| {
            table.claim != Claim::Boards || planted!("boards_claim_names")
        };
        table.filter(claims).map(|table| table.owner)
    }

    /// Whose a job is. One peer alone may say anything.
    pub(crate) fn owner_of(&self, namespace: &Namespace) -> Option<Owner> {
        let owner = self.told_owner_of(namespace)?;
        let is_hearsay = self.is_hearsay(namespace, &self.namespaces[namespace]);
        (!is_hearsay || planted!("boards_claim_names")).then_some(owner)
    }

    /// Bytes of the budget that nothing has reserved.
    pub fn budget_free(&self) -> u64 {
        self.budget.free()
    }
}
