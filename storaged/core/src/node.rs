//! The machine: one daemon's decisions. `handle` takes one input and appends outputs; `deadline` says when to
//! come back with `Tick`. The verbs are in their own folders, each as an `impl Node`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use storaged_plan::{Group, GroupError, groups};
use storaged_wire::local::{PinnedOnes, Reply, Request};
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionRecord, TablePlace};
use storaged_wire::{
    CheckpointState, Digest, Generation, ManifestBytes, Namespace, NodeName, Owner, Refusal,
    SessionId, SlotId,
};

use crate::api::{ConnId, Curation, Input, Note, Now, Output, ParityId, QueryId, RequestId, Setup};
use crate::budget::Budget;
use crate::encode::{Beginning, Ending, Joined, Led, ParityPlace, PartFilled, PartMade};
use crate::event::Event;
use crate::limits;
use crate::parcels::Parcels;
use crate::place::{Blocks, RunProposal, WaitingHello};
use crate::restore::{HealFirst, Older, OpenWish, Opening, PlanQuery, VerifyWork};
use crate::stage::{DropWork, Lifetimes};
use crate::table::{Attached, Checkpoint, Ends, NamespaceTable, Peer, Slot, Told, Waiter};

/// One daemon's decisions.
pub struct Node {
    pub(crate) setup: Setup,
    pub(crate) groups: Vec<Group>,
    pub(crate) started: Option<Now>,
    pub(crate) now: Now,
    pub(crate) out: Vec<Output>,
    pub(crate) peers: BTreeMap<NodeName, Peer>,
    /// Since when peers are down that were up.
    pub(crate) down_since: BTreeMap<NodeName, Now>,
    /// What is heard once the input is handled.
    loopback: VecDeque<Event>,
    /// How checkpoints that have left RAM ended.
    pub(crate) ends: Ends,
    pub(crate) namespaces: BTreeMap<Namespace, NamespaceTable>,
    pub(crate) checkpoints: BTreeMap<CheckpointKey, Checkpoint>,
    pub(crate) by_name: BTreeMap<Digest, CheckpointKey>,
    pub(crate) slots: BTreeMap<SlotId, Slot>,
    pub(crate) budget: Budget,
    pub(crate) conns: BTreeMap<ConnId, Attached>,
    /// Connections of operators.
    pub(crate) operators: BTreeSet<ConnId>,
    pub(crate) waiters: Vec<Waiter>,
    pub(crate) led: BTreeMap<SessionId, Led>,
    pub(crate) joined: BTreeMap<(NodeName, SessionId), Joined>,
    pub(crate) lanes: crate::encode::LaneTable,
    pub(crate) part_filled: BTreeMap<SlotId, PartFilled>,
    pub(crate) part_made: BTreeMap<ParityPlace, PartMade>,
    pub(crate) ending: BTreeMap<(NodeName, SessionId), Ending>,
    pub(crate) waiting_proposals: BTreeMap<(NodeName, SessionId), SessionRecord>,
    pub(crate) deferred_tables: BTreeSet<(NodeName, TablePlace)>,
    pub(crate) proposals: BTreeMap<QueryId, RunProposal>,
    pub(crate) hellos: BTreeMap<QueryId, WaitingHello>,
    pub(crate) plans: BTreeMap<QueryId, PlanQuery>,
    pub(crate) openings: BTreeMap<SlotId, Opening>,
    pub(crate) heals_first: Vec<HealFirst>,
    pub(crate) verifies: BTreeMap<QueryId, VerifyWork>,
    pub(crate) drops: BTreeMap<QueryId, DropWork>,
    pub(crate) lifetimes: Lifetimes,
    pub(crate) planned: Vec<Arc<ManifestBytes>>,
    pub(crate) rates: crate::restore::Rates,
    pub(crate) measured: crate::encode::MeasuredRates,
    pub(crate) parcels: Parcels,
    pub(crate) tier: crate::trickle::TierHealth,
    pub(crate) next: u64,
    pub(crate) repeat_at: Now,
}

impl Node {
    /// A node that knows nothing yet.
    ///
    /// # Errors
    /// [`GroupError`] if the members cannot be grouped with the geometry.
    pub fn new(setup: Setup) -> Result<Self, GroupError> {
        let groups = match setup.geometry {
            Some(geometry) => groups(&setup.members, geometry)?,
            None => Vec::new(),
        };
        let budget = Budget::new(setup.budget);
        Ok(Self {
            groups,
            budget,
            setup,
            started: None,
            now: Now(0),
            out: Vec::new(),
            peers: BTreeMap::new(),
            down_since: BTreeMap::new(),
            loopback: VecDeque::new(),
            ends: Ends::default(),
            namespaces: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
            by_name: BTreeMap::new(),
            slots: BTreeMap::new(),
            conns: BTreeMap::new(),
            operators: BTreeSet::new(),
            waiters: Vec::new(),
            led: BTreeMap::new(),
            joined: BTreeMap::new(),
            lanes: BTreeMap::new(),
            part_filled: BTreeMap::new(),
            part_made: BTreeMap::new(),
            ending: BTreeMap::new(),
            waiting_proposals: BTreeMap::new(),
            deferred_tables: BTreeSet::new(),
            proposals: BTreeMap::new(),
            hellos: BTreeMap::new(),
            plans: BTreeMap::new(),
            openings: BTreeMap::new(),
            heals_first: Vec::new(),
            verifies: BTreeMap::new(),
            drops: BTreeMap::new(),
            lifetimes: Lifetimes::default(),
            planned: Vec::new(),
            rates: crate::restore::Rates::default(),
            measured: crate::encode::MeasuredRates::default(),
            parcels: Parcels::default(),
            tier: crate::trickle::TierHealth::default(),
            next: 0,
            repeat_at: Now(0),
        })
    }

    /// Takes one input and returns what to do, in order.
    pub fn handle(&mut self, now: Now, input: Input) -> Vec<Output> {
        self.now = now;
        self.started.get_or_insert(now);
        self.dispatch(input);
        while let Some(event) = self.loopback.pop_front() {
            self.hear(event);
        }
        std::mem::take(&mut self.out)
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Message(message) => {
                let me = self.me().clone();
                self.message(&me, message);
            }
            Event::Adopted => self.look_at_waiting(),
            Event::Reached(key, state) => self.lanes_hear(&key, state),
            Event::BlocksGone(key) => self.end_sessions_of(&key),
            Event::SlotFreed(slot, namespace, rank) => {
                self.serve_slot_waiters();
                self.drop_spare_slot(slot, &namespace, rank);
            }
            Event::OpeningFilled(slot, leaves) => self.opening_filled(slot, leaves),
            Event::OpeningFailed(slot, node, fault) => {
                self.opening_session_failed(slot, &node, &fault);
            }
            Event::OpeningIdle(slot) => self.climb_again(slot),
            Event::ShardBack(rank) => self.shard_is_back(rank),
        }
    }

    /// When to come back with [`Input::Tick`] at the latest.
    pub fn deadline(&self) -> Now {
        let waits = self.waiters.iter().map(|waiter| waiter.deadline);
        let plans = self.plans.values().map(|plan| plan.deadline);
        let proposals = self
            .proposals
            .values()
            .map(|proposal| proposal.wakes(self.now));
        let hellos = self.hellos.values().map(|waiting| waiting.deadline);
        let openings = self.openings.values().map(|opening| opening.deadline);
        let sessions = self.sessions_deadline().chain(self.heals_deadline());
        let all = waits
            .chain(plans)
            .chain(proposals)
            .chain(hellos)
            .chain(openings)
            .chain(sessions)
            .chain(self.verifies_deadline())
            .chain(self.drops.values().map(|work| work.deadline));
        all.chain([self.repeat_at]).min().unwrap_or(self.repeat_at)
    }

    fn dispatch(&mut self, input: Input) {
        match input {
            Input::Tick => self.tick(),
            Input::PeerUp { node, generation } => self.peer_up(node, generation),
            Input::PeerDown { node } => self.peer_down(&node),
            Input::Message { from, message } => self.message(&from, message),
            Input::Request { id, request } => self.request(id, request),
            Input::OperatorConnected { conn } => drop(self.operators.insert(conn)),
            Input::Disconnected { conn } => self.disconnected(conn),
            Input::Members { members } => self.set_members(members),
            Input::SlotCreated { slot } => self.slot_created(slot),
            Input::SlotFailed { slot, reason } => self.slot_failed(slot, &reason),
            Input::Digested {
                slot,
                leaves,
                prints,
                root,
            } => self.digested(slot, (leaves, root), prints),
            Input::DigestFailed { slot, reason } => self.digest_failed(slot, &reason),
            Input::SessionEnded {
                leader,
                session,
                outcome,
                kept,
            } => self.session_ended(&leader, session, outcome, kept),
            Input::SessionProgress {
                leader,
                session,
                tally,
            } => self.session_progress(&leader, session, &tally),
            Input::Uploaded {
                manifest,
                rank,
                outcome,
            } => self.uploaded(manifest, rank, outcome),
            Input::Published { manifest, outcome } => self.published(manifest, outcome),
            Input::DurableListed { query, outcome } => self.durable_listed(query, outcome),
            Input::Curated { id, outcome } => self.curated(id, outcome),
            Input::DurableState(outcome) => self.tier_answered(outcome.err().as_ref()),
            Input::RunClaimed { query, outcome } => self.run_claimed(query, outcome),
            Input::RunRecorded {
                namespace,
                run,
                outcome,
            } => self.run_recorded(&namespace, run, outcome),
            Input::RunFound { query, outcome } => self.run_found(query, outcome),
            Input::Fetched { slot, outcome } => self.fetched(slot, outcome),
            Input::Checked { query, outcomes } => self.checked(query, outcomes),
        }
    }

    fn tick(&mut self) {
        self.expire_waiters();
        self.expire_plans();
        self.expire_proposals();
        self.advance_hellos();
        self.expire_openings();
        self.expire_verifies();
        self.advance_drops();
        self.tick_sessions();
        self.look_after_heals();
        if self.now >= self.repeat_at {
            self.repeat_at = self.now.plus(limits::REPEAT_MS);
            self.repeat();
        }
    }

    /// Says again what still matters and starts what waits for its time.
    fn repeat(&mut self) {
        self.repeat_plans();
        self.repeat_proposals();
        self.give_up_old_commits();
        self.announce_all();
        self.tell_all();
        self.expire_sessions();
        self.propose_again(None);
        self.prepare_again();
        self.repeat_parcels();
        self.expire_part_filled();
        self.judge_sessions();
        self.lead_lanes();
        self.weigh_all();
        self.give_up_lost();
        self.give_up_stuck_uploads();
        self.start_uploads();
        self.start_publishing();
        self.make_room_for_waiters();
        self.forget_foreign();
        self.look_after_lifetimes();
    }

    fn request(&mut self, id: RequestId, request: Request) {
        let outcome = match request {
            Request::Hello {
                version,
                namespace,
                token,
                role,
            } => self.hello(id, version, namespace, &token, role),
            Request::OpenRun { timeout_ms } => self.open_run(id, timeout_ms),
            Request::AcquireSlot { bytes, timeout_ms } => self.acquire(id, bytes, timeout_ms),
            Request::SealSlot { slot, step, length } => self.seal(id, slot, step, length),
            Request::ReleaseSlot { slot } => self.release(id, slot),
            Request::Commit {
                step,
                schema,
                torch_metadata,
                durable,
            } => self.commit(id, step, schema, torch_metadata, durable),
            Request::Wait {
                run,
                step,
                state,
                timeout_ms,
            } => self.wait(id, run, step, state, timeout_ms),
            Request::Plan {
                step,
                timeout_ms,
                allow_older,
            } => {
                let older = match allow_older {
                    true => Older::Allowed,
                    false => Older::Refused,
                };
                self.plan(id, step, timeout_ms, older)
            }
            Request::GetManifest { manifest } => self.get_manifest(id, manifest),
            Request::OpenShard {
                manifest,
                rank,
                ranges,
                timeout_ms,
                without,
            } => {
                let ranges = ranges
                    .iter()
                    .map(|r| r.offset..r.offset.saturating_add(r.length))
                    .collect();
                let wait = u64::from(timeout_ms).min(limits::REQUEST_MAX_MS);
                let wish = OpenWish {
                    manifest,
                    rank,
                    ranges,
                    deadline: self.now.plus(wait),
                    without,
                    healed_in_vain: false,
                };
                self.open_shard(id, wish, timeout_ms)
            }
            Request::CloseShard { manifest, rank } => self.close_shard(id, manifest, rank),
            Request::Status => self.status(id),
            Request::RestartSafe { bears } => self.restart_safe(id, bears),
            Request::List { namespace } => self.list(id, namespace.as_ref()),
            Request::Drop { force, timeout_ms } => self.drop_job(id, force, timeout_ms),
            Request::Verify { step, timeout_ms } => self.verify(id, step, timeout_ms),
            Request::Keep { run, step, keep } => {
                self.curate(id, Curation::Keep { run, step, keep })
            }
            Request::Remove(removal, live, pinned) => {
                let pinned = pinned.unwrap_or(PinnedOnes::Spared);
                self.remove_durable(id, removal, live, pinned)
            }
        };
        if let Err(refusal) = outcome {
            self.reply(id, Reply::Refused(refusal));
        }
    }

    pub(crate) fn message(&mut self, from: &NodeName, message: PeerMessage) {
        match message {
            PeerMessage::Fences(fences) => self.learn_fences(from, fences),
            PeerMessage::PromiseRun { query, run } => self.promise_asked(from, query, run),
            PeerMessage::RunPromised {
                query,
                run,
                outcome,
            } => self.run_promised(from, (QueryId(query), run), outcome),
            PeerMessage::RaiseFence { query, run } => self.fence_rises(from, query, &run),
            PeerMessage::FenceRaised { query } => self.fence_raised(from, QueryId(query)),
            PeerMessage::RunQuery { query, namespace } => {
                self.fence_asked(from, query, &namespace);
            }
            PeerMessage::RunAnswer { query, fence } => {
                self.fence_told(from, QueryId(query), fence);
            }
            PeerMessage::ShardSealed {
                key,
                owner,
                world_size,
                rank,
                length,
                root,
            } => self.shard_announced(from, key, owner, world_size, rank, length, root),
            PeerMessage::Description {
                key,
                owner,
                world_size,
                schema,
                torch_metadata,
                durable,
            } => {
                let description = crate::table::Description {
                    schema,
                    torch_metadata,
                    durable,
                };
                self.described(from, key, owner, world_size, description);
            }
            PeerMessage::Committed { manifest, durable } => {
                self.committed_elsewhere(from, manifest, durable);
            }
            PeerMessage::ManifestStored {
                manifest,
                state,
                bears,
            } => self.manifest_stored(from, manifest, Told { state, bears }),
            PeerMessage::Abandoned { key, reason } => self.abandon(&key, &reason),
            PeerMessage::Superseded { key, reason } => self.superseded(&key, &reason),
            PeerMessage::Propose(record) => self.proposed(from, record),
            PeerMessage::Ready { session, stripes } => self.member_ready(from, session, stripes),
            PeerMessage::Preparing { session } => self.member_preparing(from, session),
            PeerMessage::TableQuery(place) => self.table_asked(from, place),
            PeerMessage::TablePage { place, page } => self.table_told(from, place, page),
            PeerMessage::Parcel {
                parcel,
                length,
                relay,
            } => self.parcel_told(from, (parcel, length), relay),
            PeerMessage::ParcelQuery(place) => self.parcel_asked(from, place),
            PeerMessage::ParcelPage { place, bytes } => self.parcel_page(from, place, &bytes),
            PeerMessage::Failed { session, fault } => self.member_failed(from, session, fault),
            PeerMessage::Begin {
                session,
                stripes,
                shape,
            } => self.begin(from, session, Beginning { stripes, shape }),
            PeerMessage::Finished { session, tally } => {
                self.member_progress(from, session, tally);
                self.member_finished(from, session);
            }
            PeerMessage::Progress { session, tally } => self.member_progress(from, session, tally),
            PeerMessage::Close { session, kept } => self.close(from, session, kept),
            PeerMessage::Protected { manifest, bears } => {
                let state = CheckpointState::Protected;
                self.told_state(from, manifest, state, Some(bears));
            }
            PeerMessage::Held {
                manifest,
                version,
                shards,
                parity,
            } => {
                let blocks = Blocks {
                    shards: shards.into_iter().collect(),
                    parity: parity.into_iter().collect(),
                };
                self.held(from, manifest, version, blocks);
            }
            PeerMessage::HeldNoted { manifest, version } => {
                self.held_noted(from, manifest, version);
            }
            PeerMessage::Owed { manifest, done } => self.owed(from, manifest, done),
            PeerMessage::Unowed { manifest, cause } => self.unowed(from, manifest, cause),
            PeerMessage::DurableFailed { manifest, reason } => {
                self.durable_failed(manifest, reason);
            }
            PeerMessage::Quarantined {
                manifest,
                key,
                reason,
            } => self.learn_quarantine(from, manifest, key, reason),
            PeerMessage::NoRoom {
                manifest,
                node,
                reason,
            } => self.no_room_told(manifest, node, &reason),
            PeerMessage::Durable { manifest } => {
                self.told_state(from, manifest, CheckpointState::Durable, None);
            }
            PeerMessage::HoldingsQuery { query, namespace } => {
                self.holdings_asked(from, query, &namespace);
            }
            PeerMessage::Holdings {
                query,
                owner,
                holdings,
                mark,
            } => self.holdings_told(from, QueryId(query), owner, holdings, mark),
            PeerMessage::Marks(marks) => self.learn_marks(marks),
            PeerMessage::Attached(namespaces) => self.attached_told(from, namespaces),
            PeerMessage::Evicted {
                namespace,
                up_to,
                durable,
            } => self.evicted_elsewhere(&namespace, up_to, durable),
            PeerMessage::Drop(order) => self.drop_asked(from, &order),
            PeerMessage::Dropped { query, answer } => {
                self.dropped_told(from, QueryId(query), answer);
            }
            PeerMessage::ManifestQuery { query, manifest } => {
                self.manifest_asked(from, query, manifest);
            }
            PeerMessage::ManifestAnswer { query, manifest } => {
                self.manifest_answered(from, query.map(QueryId), manifest.map(Into::into));
            }
            PeerMessage::VerifyQuery { query, manifest } => {
                self.verify_asked(from, query, manifest);
            }
            PeerMessage::VerifyAnswer { query, parts } => {
                self.verify_answered(from, QueryId(query), parts);
            }
        }
    }

    fn peer_up(&mut self, node: NodeName, generation: Generation) {
        if let Some(known) = self.peers.get(&node)
            && known.generation != generation
            && !planted!("generation_ignored")
        {
            self.forget_peer(&node);
        }
        self.peers.insert(node.clone(), Peer { generation });
        self.recount_blocks_on(&node);
        self.tell_marks(&node);
        self.tell_quarantined(&node);
        self.down_since.remove(&node);
        self.tell_attached_to(&node);
        self.greet(&node);
        self.peer_may_have_lost(&node);
        self.weigh_all();
    }

    fn peer_down(&mut self, node: &NodeName) {
        if self.peers.contains_key(node) {
            self.down_since.insert(node.clone(), self.now);
        }
        self.forget_peer(node);
        self.weigh_all();
    }

    fn forget_peer(&mut self, node: &NodeName) {
        self.peers.remove(node);
        for checkpoint in self.checkpoints.values_mut() {
            checkpoint.told.remove(node);
            checkpoint.standing.forget(node);
        }
        self.recount_blocks_on(node);
        self.lanes_forget(node);
        self.sessions_forget(node);
        self.queries_forget(node);
        self.hellos_forget_peer(node);
    }

    /// Whether every configured peer is up, or has had time to be.
    pub(crate) fn settled(&self) -> bool {
        let started = self.started.unwrap_or(self.now);
        self.peers.len() + 1 >= self.setup.members.len()
            || self.now.since(started) >= limits::JOIN_GRACE_MS
    }

    pub(crate) fn me(&self) -> &NodeName {
        &self.setup.name
    }

    pub(crate) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn reply(&mut self, id: RequestId, reply: Reply) {
        self.out.push(Output::Reply {
            id,
            reply,
            descriptor: None,
        });
    }

    pub(crate) fn note(&mut self, note: Note) {
        self.out.push(Output::Note(note));
    }

    /// Sends to a peer. What goes to this node itself is handled after the input that it came of: handled at once it
    /// would change tables under the hands of whoever sends, and a message that answers itself would never end.
    pub(crate) fn send(&mut self, to: &NodeName, message: PeerMessage) {
        if to == self.me() {
            self.emit(Event::Message(message));
        } else if self.peers.contains_key(to) {
            let (to, message) = (to.clone(), self.wrap(message));
            self.out.push(Output::Send { to, message });
        }
    }

    /// Tells the other machines of something, once this input is handled.
    pub(crate) fn emit(&mut self, event: Event) {
        self.loopback.push_back(event);
    }

    pub(crate) fn is_up(&self, node: &NodeName) -> bool {
        node == self.me() || self.peers.contains_key(node)
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

    pub(crate) fn attached(&self, id: RequestId) -> Result<&Attached, Refusal> {
        self.conns.get(&id.conn).ok_or_else(|| {
            Refusal::new(
                storaged_wire::RefusalCode::NotAttached,
                "expected a hello first on this connection, got another request",
            )
        })
    }

    pub(crate) fn owner_of(&self, namespace: &Namespace) -> Option<Owner> {
        self.namespaces.get(namespace).map(|table| table.owner)
    }

    /// Bytes of the budget that nothing has reserved.
    pub fn budget_free(&self) -> u64 {
        self.budget.total() - self.budget.used()
    }

    /// Everything that this node's RAM is used for, for the ledger's check after a stress test.
    pub fn ledger(&self) -> crate::budget::Ledger {
        let parity: BTreeSet<ParityId> = self
            .checkpoints
            .values()
            .flat_map(|checkpoint| checkpoint.parity.values().copied())
            .collect();
        crate::budget::Ledger {
            used: self.budget.used(),
            total: self.budget.total(),
            slots: self.slots.len(),
            parity_sets: parity.len(),
            sessions: self.joined.len() + self.led.len(),
            waiters: self.waiters.len() + self.heals_first.len(),
            jobs: self.namespaces.len(),
        }
    }
}
