//! One daemon's decisions: routes what comes to the machine that it is for. `handle` takes one input and gives the outputs;
//! `deadline` says when to come back with `Tick`. The machines are in the verbs' folders.

mod state;

use std::collections::BTreeSet;

use storaged_plan::GroupError;
use storaged_wire::local::{PinnedOnes, Reply, Request};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{Generation, Namespace, NodeName, Refusal};

use crate::api::{
    ConnId, DurableFault, DurableListing, Input, Now, Output, Prepared, QueryId, RequestId, Setup,
};
use crate::catalog::Peer;
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::{Event, NoSlot};
use crate::limits;
use crate::place::Runs;
use crate::restore::{Older, OpenedEarly, Restores};
use crate::scrub::Scrub;
use crate::stage::Trainers::{Heeded, Ignored};
use crate::stage::{Drops, PinOrders, TrainerHello};
use crate::successions::{Greeting, SaidHello};
use crate::testimony::needs_no_belief;

/// One daemon's decisions.
///
/// Each machine has tables of its own and is called with what it may use of the others: sessions with the context, restores
/// with both. The other way round they tell one another by events.
pub struct Node {
    cx: Context,
    sessions: Sessions,
    restores: Restores,
    runs: Runs,
    drops: Drops,
    pins: PinOrders,
    scrub: Scrub,
    repeat_at: Now,
}

impl Node {
    /// A node that knows nothing yet.
    ///
    /// # Errors
    /// [`GroupError`] if the members cannot be grouped with the geometry.
    pub fn new(setup: Setup) -> Result<Self, GroupError> {
        Ok(Self {
            cx: Context::new(setup)?,
            sessions: Sessions::default(),
            restores: Restores::default(),
            runs: Runs::default(),
            drops: Drops::default(),
            pins: PinOrders::default(),
            scrub: Scrub::default(),
            repeat_at: Now(0),
        })
    }

    /// Its tables.
    #[cfg(test)]
    pub(crate) fn context(&self) -> &Context {
        &self.cx
    }

    #[cfg(test)]
    pub(crate) fn context_mut(&mut self) -> &mut Context {
        &mut self.cx
    }

    /// Takes one input and returns what to do, in order.
    pub fn handle(&mut self, now: Now, input: Input) -> Vec<Output> {
        self.cx.begin(now);
        self.dispatch(input);
        self.let_in_who_waits();
        self.go_on_with_held();
        while let Some(event) = self.cx.next_event() {
            self.hear(event);
        }
        let mut all = self.cx.take_changed_records();
        all.append(&mut self.cx.out);
        all
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Message(from, message) => self.message(&from, message),
            Event::CommitTold(from, manifest, durable) => {
                self.cx.committed_elsewhere(&from, manifest, durable)
            }
            Event::ManifestTold(from, query, manifest) => {
                self.restores
                    .manifest_answered(&from, query, manifest, &mut self.cx)
            }
            Event::EnclosuresMoved => self.restores.advance_manifest_waits(&mut self.cx),
            Event::Adopted => self.sessions.retry_deferred(&mut self.cx),
            Event::Reached(key, state) => {
                self.cx.note_durable_step(&key, state);
                self.sessions.lanes_hear(&key, state, &mut self.cx);
            }
            Event::BlocksGone(key) => self.sessions.end_sessions_of(&key, &mut self.cx),
            Event::RoomMade => self.cx.serve_slot_waiters(),
            Event::SlotFreed(slot, namespace, rank) => {
                self.cx.serve_slot_waiters();
                self.cx.drop_spare_slot(slot, &namespace, rank);
            }
            Event::OpeningSlot(slot, made) => {
                self.restores
                    .opening_hears_of_slot(slot, made, &mut self.sessions, &mut self.cx)
            }
            Event::RepairSlot(slot, Ok(())) => self.sessions.joined_has_slot(slot, &mut self.cx),
            Event::RepairSlot(slot, Err(NoSlot(reason))) => {
                self.sessions
                    .joined_without_slot(slot, &reason, &mut self.cx)
            }
            Event::ShardComes(manifest, rank) => {
                let sessions = &self.sessions;
                self.restores
                    .shard_comes(manifest, rank, sessions, &mut self.cx)
            }
            Event::OpeningFilled(slot, leaves) => {
                self.restores
                    .opening_filled(slot, leaves, &mut self.sessions, &mut self.cx)
            }
            Event::OpeningFailed(slot, node, fault) => {
                self.restores.opening_session_failed(
                    slot,
                    &node,
                    &fault,
                    &mut self.sessions,
                    &mut self.cx,
                );
            }
            Event::OpeningIdle(slot) => {
                self.restores
                    .try_next_source_when_idle(slot, &mut self.sessions, &mut self.cx)
            }
            Event::SessionOver => self.sessions.lead_lanes(&mut self.cx),
            Event::Rotten(key, block, rotten) => {
                let fresh = rotten.len() as u64;
                let (scrub, sessions) = (&mut self.scrub, &mut self.sessions);
                scrub.found(&key, block, &rotten, fresh, sessions, &mut self.cx);
            }
            Event::RottenSource(key, block) => self.scrub.count(&key, block, 1, &mut self.cx),
            Event::ShardBack(rank) => self.restores.shard_is_back(rank, &mut self.cx),
        }
    }

    /// When to come back with [`Input::Tick`] at the latest.
    pub fn deadline(&self) -> Now {
        let waits = self.cx.waiters.deadline().into_iter();
        let all = waits
            .chain(self.restores.deadlines(self.cx.now))
            .chain(self.runs.deadlines(self.cx.now))
            .chain(self.sessions.deadlines())
            .chain(self.drops.deadlines())
            .chain(self.pins.deadlines())
            .chain(self.cx.successions.deadlines())
            .chain(self.cx.early.deadlines())
            .chain(self.scrub.deadline(&self.cx));
        all.chain([self.repeat_at]).min().unwrap_or(self.repeat_at)
    }

    fn dispatch(&mut self, input: Input) {
        match input {
            Input::Tick => self.tick(),
            Input::Recovered { records } => self.cx.recover(records),
            Input::PeerUp { node, generation } => self.peer_up(node, generation),
            Input::PeerDown { node } => self.peer_down(&node),
            Input::Message { from, message } => self.message(&from, message),
            Input::Request { id, request } => self.request(id, request),
            Input::RequestComes { conn, bytes } => self.cx.request_comes(conn, bytes),
            Input::Connected { conn, viewer } => drop(self.cx.viewers.insert(conn, viewer)),
            Input::Disconnected { conn } => self.disconnected(conn),
            Input::Members { newest, passed } => self.cx.set_members(newest, passed),
            Input::SlotCreated { slot } => self.cx.slot_created(slot),
            Input::SlotFailed { slot, reason } => self.cx.slot_failed(slot, &reason),
            Input::Digested {
                slot,
                leaves,
                prints,
                root,
                tally,
            } => self.cx.digested(slot, leaves, root, prints, &tally),
            Input::DigestFailed { slot, reason } => self.cx.digest_failed(slot, &reason),
            Input::SessionEnded {
                leader,
                session,
                outcome,
                kept,
            } => self
                .sessions
                .session_ended(&leader, session, outcome, kept, &mut self.cx),
            Input::SessionProgress {
                leader,
                session,
                tally,
            } => self
                .sessions
                .session_progress(&leader, session, &tally, &mut self.cx),
            Input::Uploaded {
                manifest,
                rank,
                outcome,
            } => self.cx.uploaded(manifest, rank, outcome),
            Input::Published { manifest, outcome } => self.cx.published(manifest, outcome),
            Input::DurableListed { query, outcome } => self.durable_listed(query, outcome),
            Input::Curated { id, outcome } => self.cx.curated(id, outcome),
            Input::DurableState(news) => self.cx.tier_heard(news),
            answer @ (Input::RunClaimed { .. }
            | Input::RunRegistered { .. }
            | Input::RunRecorded { .. }
            | Input::RunFound { .. }) => self.answered_of_runs(answer),
            Input::SuccessionsFound { query, outcome } => {
                self.cx.successions_found(query, outcome);
            }
            Input::Succeeded { query, outcome } => self.cx.succeeded(query, outcome),
            Input::Fetched { slot, outcome } => {
                self.restores
                    .fetched(slot, outcome, &mut self.sessions, &mut self.cx)
            }
            Input::Prepared(Prepared::Sealed { key, outcome }) => {
                self.cx.manifest_sealed(&key, outcome)
            }
            Input::Prepared(Prepared::Described {
                id,
                key,
                description,
            }) => self.cx.description_named(id, &key, description),
            Input::Prepared(Prepared::Opened {
                parcel,
                bytes,
                outcome,
            }) => self.cx.parcel_opened(parcel, bytes, outcome),
            Input::Checked { query, outcomes } => {
                self.restores.checked(query, outcomes, &mut self.cx)
            }
            Input::Scrubbed { query, outcome } => {
                let sessions = &mut self.sessions;
                self.scrub.scrubbed(query, outcome, sessions, &mut self.cx)
            }
        }
    }

    /// The durable tier, or the registry, has answered of a run.
    fn answered_of_runs(&mut self, answer: Input) {
        match answer {
            Input::RunClaimed { query, outcome } => {
                self.runs.run_claimed(query, outcome, &mut self.cx)
            }
            Input::RunRegistered {
                query,
                run,
                outcome,
            } => (self.runs).run_registered(query, run, outcome, &mut self.cx),
            Input::RunRecorded {
                namespace,
                run,
                outcome,
            } => self.cx.run_recorded(&namespace, run, outcome),
            Input::RunFound { query, outcome } => self.runs.run_found(query, outcome, &mut self.cx),
            _ => {}
        }
    }

    fn tick(&mut self) {
        self.cx.expire_waiters();
        self.cx.expire_followers();
        self.restores.expire_plans(&mut self.cx);
        self.runs.expire_proposals(&mut self.cx);
        self.runs.advance_hellos(&mut self.cx);
        self.restores
            .expire_openings(&mut self.sessions, &mut self.cx);
        self.restores.expire_verifies(&mut self.cx);
        self.drops.advance_drops(&mut self.cx);
        self.pins.advance(&mut self.cx);
        self.sessions.tick_sessions(&mut self.cx);
        self.restores
            .advance_awaited_repairs(&mut self.sessions, &mut self.cx);
        if self.cx.now >= self.repeat_at {
            self.repeat_at = self.cx.now.plus(limits::REPEAT_MS);
            self.repeat();
        }
        self.scrub.advance(&self.sessions, &mut self.cx);
    }

    /// Says again what still matters and starts what waits for its time.
    fn repeat(&mut self) {
        self.runs.ask_anew_after_a_gap(&mut self.cx);
        self.cx.notice_gap();
        self.restores.repeat_plans(&mut self.cx);
        self.runs.repeat_proposals(&mut self.cx);
        self.cx.greetings_ask_again();
        self.cx.wake_for_the_left();
        self.cx.give_up_old_commits();
        self.cx.forget_commits_of_the_gone();
        self.cx.ask_for_unconfirmed();
        self.cx.announce_all();
        self.cx.tell_all();
        self.cx.ask_owners();
        self.cx.tell_drain();
        self.pins.repeat(&mut self.cx);
        self.sessions.expire_sessions(&mut self.cx);
        self.sessions
            .repeat_proposals_to_members(None, &mut self.cx);
        self.sessions.repeat_preparations(&mut self.cx);
        self.cx.repeat_parcels();
        self.cx.fetch_enclosures();
        self.restores.advance_manifest_waits(&mut self.cx);
        self.cx.sweep_enclosures(self.restores.manifests_read());
        self.sessions.expire_part_filled(&mut self.cx);
        let restores = &self.restores;
        self.sessions.judge_sessions(
            &|sessions, cx, slot, slow| restores.opening_goes_around(slot, slow, sessions, cx),
            &mut self.cx,
        );
        self.sessions.free_withdrawn(&mut self.cx);
        self.sessions.tell_losses(&mut self.cx);
        self.sessions.lead_lanes(&mut self.cx);
        self.cx.weigh_all();
        self.cx.advance_doubts();
        self.cx.give_up_lost();
        self.cx.forget_disowned();
        self.cx.retire_unkept();
        self.cx.give_up_stuck_uploads();
        self.cx.start_uploads();
        self.cx.start_publishing();
        self.cx.count_records();
        self.cx.make_room_for_waiters();
        self.cx.advance_giving_way();
        self.cx
            .forget_foreign(|c| self.sessions.has_session_of(&c.key) || self.restores.opens(c));
        let asked_for = self.namespaces_asked_for();
        self.cx.look_after_lifetimes(&asked_for);
    }

    fn say_status(&mut self, id: RequestId) {
        let json = self.status_json(&self.cx.viewer(id.conn));
        self.cx.reply(id, Reply::Status(json));
    }

    /// Hellos for names that this node does not know go on once it has heard what others know of them.
    fn let_in_who_waits(&mut self) {
        for greeting in self.cx.take_greetings() {
            let Greeting {
                said,
                since,
                found,
                tier,
                ..
            } = greeting;
            // A tier that has been silent so far has no new time for the next question.
            let since = found.as_ref().map_or(since, |_| self.cx.now);
            let admitted = self.cx.hello(&said, &found.unwrap_or_default(), tier);
            self.admitted(said.id, admitted, since);
        }
    }

    /// Requests about jobs that this node does not know go on once it has heard what others know of them.
    fn go_on_with_held(&mut self) {
        for held in self.cx.take_held() {
            match self.cx.hears_late(&held) {
                Ok(()) => self.request_of_known(held.id, held.with_time_left(self.cx.now)),
                Err(refusal) => {
                    self.cx.budget.release_request(held.id.conn);
                    self.cx.reply(held.id, Reply::Refused(refusal));
                }
            }
        }
    }

    fn admitted(
        &mut self,
        id: RequestId,
        outcome: Result<Option<TrainerHello>, Refusal>,
        since: Now,
    ) {
        match outcome {
            Ok(unknown) => self.runs.hellos_wait(id, unknown, since, &mut self.cx),
            Err(refusal) => self.cx.reply(id, Reply::Refused(refusal)),
        }
    }

    fn request(&mut self, id: RequestId, request: Request) {
        if self.cx.lacks_word_for(id.conn, &request) {
            return self.cx.hold(id, request);
        }
        self.request_of_known(id, request);
    }

    fn request_of_known(&mut self, id: RequestId, request: Request) {
        self.cx.budget.release_request(id.conn);
        if let Err(refusal) = self.cx.check_goes_on(id, &request) {
            return self.cx.reply(id, Reply::Refused(refusal));
        }
        let Request::Hello {
            version,
            namespace,
            token,
            role,
        } = request
        else {
            return self.request_after_hello(id, request);
        };
        let admitted = self.cx.greeted(SaidHello {
            id,
            version,
            namespace,
            token,
            role,
        });
        self.admitted(id, admitted, self.cx.now);
    }

    fn request_after_hello(&mut self, id: RequestId, request: Request) {
        let (cx, restores) = (&mut self.cx, &mut self.restores);
        let outcome = match request {
            Request::Hello { .. } => return,
            Request::OpenRun { timeout_ms } => self.runs.open_run(id, timeout_ms, cx),
            Request::AcquireSlot { bytes, timeout_ms } => cx.acquire(id, bytes, timeout_ms),
            Request::SealSlot { slot, step, length } => cx.seal(id, slot, step, length),
            Request::ReleaseSlot { slot } => cx.release(id, slot),
            Request::Board { rank, kind, bytes } => cx.board(id, rank, kind, bytes),
            Request::Commit {
                step,
                schema,
                torch_metadata,
                durable,
            } => cx.commit(id, step, schema, torch_metadata, durable),
            Request::Wait {
                run,
                step,
                state,
                timeout_ms,
            } => cx.wait(id, run, step, state, timeout_ms),
            Request::Plan {
                step,
                timeout_ms,
                allow_older,
            } => {
                let older = if allow_older {
                    Older::Allowed
                } else {
                    Older::Refused
                };
                restores.plan(id, step, timeout_ms, older, cx)
            }
            Request::Verdict { timeout_ms } => restores.judge(id, timeout_ms, cx),
            Request::PlanDrill { step, timeout_ms } => restores.drill(id, step, timeout_ms, cx),
            Request::RestartFailed(report) => restores.restart_failed(id, report, cx),
            Request::LiftQuarantine { step } => cx.lift_quarantine(id, step),
            Request::Drain(order) => cx.drain(id, order),
            Request::Succession => cx.standing_of_token(id),
            Request::Rotate(rotation) => cx.rotate(id, *rotation),
            Request::GetManifest { manifest } => restores.get_manifest(id, manifest, cx),
            open @ Request::OpenShard { .. } => restores.open_requested(id, open, cx),
            Request::FollowShard {
                manifest,
                rank,
                timeout_ms,
            } => cx.follow_shard(id, OpenedEarly { manifest, rank }, timeout_ms),
            Request::CloseShard { manifest, rank } => {
                restores.close_shard(id, manifest, rank, &mut self.sessions, cx)
            }
            Request::Status => return self.say_status(id),
            Request::RestartSafe { bears } => cx.restart_safe(id, bears),
            Request::List { namespace } => cx.list(id, namespace.as_ref()),
            Request::Drop { force, timeout_ms } => {
                let trainers = if force { Ignored } else { Heeded };
                self.drops.drop_job(id, trainers, timeout_ms, cx)
            }
            Request::Verify { step, timeout_ms } => restores.verify(id, step, timeout_ms, cx),
            Request::Keep { run, step, keep } => self.pins.keep(id, run, step, keep, cx),
            Request::Remove(removal, live, pinned) => {
                cx.remove_durable(id, removal, live, pinned.unwrap_or(PinnedOnes::Spared))
            }
        };
        if let Err(refusal) = outcome {
            self.cx.reply(id, Reply::Refused(refusal));
        }
    }

    fn durable_listed(&mut self, query: QueryId, outcome: Result<DurableListing, DurableFault>) {
        if !self.cx.tier_looked_into(query, &outcome) {
            let (cx, sessions) = (&mut self.cx, &mut self.sessions);
            self.restores.durable_listed(query, outcome, sessions, cx);
        }
    }

    /// Each machine hears what is for it and gives back the rest.
    fn message(&mut self, from: &NodeName, message: PeerMessage) {
        if !self.cx.is_believed(from) && !needs_no_belief(&message) {
            return;
        }
        let greets = matches!(message, PeerMessage::Fences(_));
        let (cx, sessions) = (&mut self.cx, &mut self.sessions);
        let unheard = cx
            .hear(from, message)
            .and_then(|message| self.runs.hear(from, message, cx))
            .and_then(|message| sessions.hear(from, message, cx))
            .and_then(|message| self.restores.hear(from, message, cx))
            .and_then(|message| self.drops.hear(from, message, cx))
            .and_then(|message| self.pins.hear(from, message, cx));
        debug_assert_eq!(unheard, None, "a message that no machine hears");
        if greets {
            // Whoever greets has just come up, or sees us anew: it may have missed or forgotten what we proposed.
            self.sessions
                .repeat_proposals_to_members(Some(from), &mut self.cx);
        }
    }

    fn peer_up(&mut self, node: NodeName, generation: Generation) {
        if self.cx.is_another_daemon(&node, generation) && !planted!("generation_ignored") {
            if self.cx.peers.contains_key(&node) {
                self.forget_peer(&node);
            }
            self.cx.forget_said(&node);
        }
        let since = self.cx.now;
        let before = self.cx.note_peer(&node, generation);
        if before.is_none() && !self.cx.down.contains_key(&node) {
            self.cx.joined_at = since;
        }
        self.cx.drains.peer_up(&node, generation, since);
        self.cx.tell_drain();
        self.cx.recount_blocks_on(&node);
        self.cx.tell_marks(&node);
        self.cx.tell_quarantined(&node);
        self.cx.tell_failed(&node);
        self.cx.tell_pins(&node);
        self.cx.down.remove(&node);
        self.cx.tell_attached_to(&node);
        self.runs.greet(&node, &mut self.cx);
        self.cx.tell_successions(&node);
        self.cx.greetings_ask(&node);
        self.restores.plans_ask(&node, &mut self.cx);
        self.sessions.peer_may_have_lost(&node, &mut self.cx);
        self.cx.look_for_leftovers();
        self.cx.weigh_all();
    }

    fn peer_down(&mut self, node: &NodeName) {
        if let Some(peer) = self.cx.peers.get(node) {
            let since = self.cx.now;
            let down = Peer { since, ..*peer };
            self.cx.down.insert(node.clone(), down);
        }
        self.forget_peer(node);
        self.cx.look_for_leftovers();
        self.cx.weigh_all();
    }

    fn forget_peer(&mut self, node: &NodeName) {
        self.cx.peers.remove(node);
        let now = self.cx.now;
        self.cx.drains.peer_down(node, now);
        for checkpoint in self.cx.checkpoints.values_mut() {
            checkpoint.told.remove(node);
            if !planted!("noted_outlives_home") {
                checkpoint.noted_by.remove(node);
            }
            checkpoint.standing.forget(node, now);
        }
        self.cx.forget_vouchers(node);
        self.cx.recount_blocks_on(node);
        self.sessions.lanes_forget(node);
        self.sessions.sessions_forget(node, &mut self.cx);
        self.restores.plans_forget(node, &mut self.cx);
        self.restores.openings_forget(node);
        self.restores.verifies_forget(node, &mut self.cx);
        self.drops.advance_drops(&mut self.cx);
        self.pins.advance(&mut self.cx);
        self.runs.forget_peer(node);
        self.cx.greetings_forget(node);
    }

    /// A connection is gone, with all that it asked for.
    fn disconnected(&mut self, conn: ConnId) {
        self.cx.client_gone(conn);
        self.restores
            .forget_requests(conn, &mut self.sessions, &mut self.cx);
        self.drops.forget_drops(conn);
        self.pins.forget_askers(conn);
        self.runs.forget_proposals(conn, &mut self.cx);
        self.runs.forget_hellos(conn);
        self.cx.drop_slots_left_behind();
    }

    /// Jobs for which a request is under way.
    fn namespaces_asked_for(&self) -> BTreeSet<Namespace> {
        let plans = self.restores.namespaces();
        plans.chain(self.runs.namespaces()).cloned().collect()
    }
}
