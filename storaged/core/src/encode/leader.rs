//! Leading sessions: parity of committed checkpoints, and blocks that a protected checkpoint has lost (healing).
//! A lane is led by the first of its coding nodes that is up, starting at another one for each lane.

use std::collections::{BTreeMap, BTreeSet};

use storaged_plan::{Derived, LaneBlocks, lanes_coded_by, lanes_of};
use storaged_wire::peer::{
    CheckpointKey, Lane, PeerMessage, SessionFault, SessionKind, SessionRecord,
};
use storaged_wire::shape::StripeMap;
use storaged_wire::{CheckpointState, ManifestBytes, NodeName, SessionId, SlotId};

use super::linkstats::SessionProgress;
use super::missing_stripes::MissingStripes;
use super::session::{Beginning, LanePlace, LedSession, SessionGoal};
use super::stripe_maps::{from_wire, to_wire};
use super::topology::{StripeDemand, chosen};
use super::turns::LaneTurn;
use crate::api::Note;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;

impl Sessions {
    /// A checkpoint came further: what counts now, and what there is to lead.
    pub(crate) fn lanes_hear(
        &mut self,
        key: &CheckpointKey,
        state: CheckpointState,
        cx: &mut Context,
    ) {
        if state >= CheckpointState::Protected {
            self.count_finished_parity(key, cx);
        }
        self.lead_lanes(cx);
    }

    /// Starts the sessions that this node should lead and has not.
    pub(crate) fn lead_lanes(&mut self, cx: &mut Context) {
        if cx.setup.geometry.is_none() {
            return;
        }
        self.lanes
            .retain(|place, _| cx.by_name.contains_key(&place.manifest));
        // The newest first: once it is protected, older ones need no healing. All sessions share the links, so the other way round a step
        // that is about to retire would hold up the one that lets it.
        let committed = cx.checkpoints.values().rev();
        let committed = committed.filter(|it| !cx.is_only_base(it) && !left_unhealed(it, cx));
        let mut lanes = Vec::new();
        for checkpoint in committed {
            let Some(manifest) = &checkpoint.manifest else {
                continue;
            };
            lanes.extend(lanes_coded_by(manifest, cx.me()).map(|lane| LaneTurn {
                key: checkpoint.key.clone(),
                manifest: manifest.clone(),
                lane,
                state: checkpoint.state,
            }));
        }
        self.lead_in_turn(lanes, cx);
    }

    pub(super) fn lead_lane(&mut self, turn: &LaneTurn, cx: &mut Context) {
        let LaneTurn {
            key,
            manifest,
            lane,
            state,
        } = turn;
        let Some(blocks) = LaneBlocks::of(manifest, *lane) else {
            return;
        };
        if cx.leader_of(&blocks.coding, *lane) != Some(cx.me()) {
            return;
        }
        let now = cx.now;
        let place = LanePlace::of(manifest, *lane);
        let progress = self.lanes.entry(place).or_default();
        if let Some(session) = progress.session {
            return self.revalidate(session, manifest, &blocks, *state, cx);
        }
        // The lane comes up again with the next tick.
        if now < progress.retry_at || !self.may_lead_for(&key.namespace) {
            return;
        }
        // What a home node calls protected has been coded: whoever was restarted repairs it before it knows that it is.
        let checkpoint = &cx.checkpoints[key];
        let was_led = checkpoint.lanes_led.contains(lane);
        let is_coded = was_led || checkpoint.standing.is_called_protected();
        if *state >= CheckpointState::Protected || is_coded {
            self.repair_lane(key, manifest, *lane, &blocks, cx);
        } else {
            self.encode_lane(key, manifest, *lane, &blocks, cx);
        }
    }

    fn encode_lane(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
        cx: &mut Context,
    ) {
        let Some(parities) = cx.parities_to_make(blocks) else {
            return;
        };
        let in_full = self
            .lanes
            .get(&LanePlace::of(manifest, lane))
            .is_some_and(|p| p.in_full || p.wary);
        let basis = if in_full {
            None
        } else {
            cx.basis_for(key, manifest, blocks)
        };
        let checks = self.checks_of(manifest.name(), lane);
        let kind = SessionKind::Encode {
            lane,
            basis,
            checks,
            parities,
        };
        self.lead(key.clone(), manifest, lane, kind, SessionGoal::Encode, cx);
    }

    /// Proposes a session to its members.
    pub(crate) fn lead(
        &mut self,
        key: CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        kind: SessionKind,
        purpose: SessionGoal,
        cx: &mut Context,
    ) -> bool {
        let session = cx.fresh_session();
        let record = SessionRecord {
            session,
            manifest: manifest.name(),
            kind,
        };
        let Some(derived) = Derived::of(&record, manifest) else {
            return false;
        };
        let now = cx.now;
        if purpose.is_lane_work() {
            let progress = self.lanes.entry(LanePlace::of(manifest, lane)).or_default();
            progress.session = Some(session);
            progress.first_try.get_or_insert(now);
            self.turns.note(&key.namespace);
        }
        let led = LedSession {
            record: record.clone(),
            key,
            lane,
            members: derived.members.clone(),
            sources: derived.sources.len(),
            keepers: (derived.sink_members.iter())
                .filter_map(|at| derived.members.get(*at).cloned())
                .collect(),
            stripe_count: manifest.manifest().chunk.count(derived.blocks.length),
            ready: BTreeSet::new(),
            finished: BTreeSet::new(),
            needs: StripeDemand::default(),
            lacking: MissingStripes::default(),
            begun: None,
            faults: BTreeMap::new(),
            deadline: now.plus(limits::PROPOSE_MAX_MS),
            prepare_by: now.plus(limits::SESSION_STALL_MAX_MS),
            purpose,
            pace: SessionProgress::default(),
        };
        self.led.insert(session, led);
        for member in derived.members {
            if !cx.is_up(&member) {
                let reason = "is down".into();
                self.end_led(
                    session,
                    Err((
                        member.clone(),
                        SessionFault::Neighbour {
                            node: member,
                            reason,
                        },
                    )),
                    cx,
                );
                return true;
            }
            cx.send(&member, PeerMessage::Propose(record.clone()));
        }
        true
    }

    pub(crate) fn member_ready(
        &mut self,
        from: &NodeName,
        session: SessionId,
        stripes: Option<StripeMap>,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.get_mut(&session) else {
            return cx.send(
                from,
                PeerMessage::Close {
                    session,
                    kept: false,
                },
            );
        };
        if !led.members.contains(from) {
            return;
        }
        if led.ready.contains(from) {
            // It may not have heard that the session has begun; one that runs does not listen.
            return self.say_begin(from, session, cx);
        }
        if let Some(map) = stripes {
            let Some(map) = from_wire(&map, led.stripe_count) else {
                let fault = SessionFault::Neighbour {
                    node: from.clone(),
                    reason: "said of other stripes than the lane has what it needs".into(),
                };
                return self.end_led(session, Err((from.clone(), fault)), cx);
            };
            let is_source = led.members.iter().position(|node| node == from) < Some(led.sources);
            match led.purpose {
                SessionGoal::Encode if is_source => led.needs.add_changed(&map),
                SessionGoal::Heal(_) => led.lacking.add(from.clone(), map),
                _ => led.needs.add_lacking(&map),
            }
        }
        led.ready.insert(from.clone());
        if led.ready.len() == led.members.len() {
            self.begin_led(session, cx);
        }
    }

    /// All members are ready: the leader says which stripes move, and of an encode how.
    fn begin_led(&mut self, session: SessionId, cx: &mut Context) {
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        if led.is_in_full_but_for_the_name() {
            return self.lead_without_delta(session, cx);
        }
        led.deadline = cx.now.plus(limits::SESSION_STALL_MAX_MS);
        let led = led.clone();
        let stripes = match led.purpose {
            SessionGoal::Heal(_) => led.lacking.stripes(),
            SessionGoal::Encode | SessionGoal::Open(_) => led.needs.stripes(),
        };
        let stripes = stripes.as_ref().map(to_wire);
        let chosen = match led.purpose {
            SessionGoal::Encode => cx
                .manifest_named(led.record.manifest)
                .and_then(|m| chosen(&m, led.lane, &led.needs, &self.links(cx))),
            _ => None,
        };
        let around = self.around_suspects(&led);
        let chosen = chosen.filter(|_| around.is_none());
        let shape = chosen.map(|chosen| {
            let (key, lane, reason) = (led.key.clone(), led.lane, chosen.reason);
            cx.note(Note::ShapeChosen { key, lane, reason });
            chosen.shape
        });
        let shape = around.or(shape);
        if let Some(led) = self.led.get_mut(&session) {
            led.pace = SessionProgress::begin(cx.now, shape.clone());
            led.begun = Some(Beginning { stripes, shape });
        }
        for member in led.members {
            self.say_begin(&member, session, cx);
        }
    }

    /// Tells a member that its session begins, if it does.
    pub(super) fn say_begin(&mut self, member: &NodeName, session: SessionId, cx: &mut Context) {
        let Some(led) = self.led.get(&session) else {
            return;
        };
        let Some(beginning) = &led.begun else {
            return;
        };
        let begin = PeerMessage::Begin {
            session,
            stripes: beginning.stripes.clone(),
            shape: beginning.shape.clone(),
        };
        cx.send(member, begin);
    }

    pub(crate) fn member_finished(
        &mut self,
        from: &NodeName,
        session: SessionId,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.get_mut(&session) else {
            return cx.send(
                from,
                PeerMessage::Close {
                    session,
                    kept: false,
                },
            );
        };
        if led.begun.is_some() && led.members.contains(from) {
            led.finished.insert(from.clone());
            if led.finished.len() == led.members.len() {
                self.end_led(session, Ok(()), cx);
            }
        }
    }

    pub(crate) fn member_failed(
        &mut self,
        from: &NodeName,
        session: SessionId,
        fault: SessionFault,
        cx: &mut Context,
    ) {
        let peers = &cx.peers;
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        if !led.members.contains(from) {
            return;
        }
        led.faults.insert(from.clone(), fault);
        let (by, fault, waits_for) = root(&led.faults, from);
        let may_tell = waits_for.is_some_and(|node| {
            led.members.contains(&node) && (node == cx.setup.name || peers.contains_key(&node))
        });
        if may_tell && led.begun.is_some() {
            // A failure ends streams, and whoever notices that first need not know why. The one it blames does.
            led.deadline = led.deadline.min(cx.now.plus(limits::REPEAT_MS / 2));
            return;
        }
        self.end_led(session, Err((by, fault)), cx);
    }

    /// Ends a session that this node leads, and says what counts.
    pub(crate) fn end_led(
        &mut self,
        session: SessionId,
        outcome: Result<(), (NodeName, SessionFault)>,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.remove(&session) else {
            return;
        };
        // Members keep only what the leader closes so. One that does not hear of it keeps what it has made for ten minutes as a part,
        // and takes it up when the lane is led again (`resume`).
        let kept = outcome.is_ok();
        for member in &led.members {
            if !planted!("sessions_not_closed") {
                cx.send(member, PeerMessage::Close { session, kept });
            }
        }
        if let Some(progress) = self.lanes.get_mut(&led.place())
            && progress.session == Some(session)
        {
            progress.session = None;
        }
        match outcome {
            Ok(()) => self.session_succeeded(led, cx),
            Err((node, fault)) => self.session_failed(led, node, fault, cx),
        }
    }

    /// Ends a session that nothing is wrong with, so that another one goes on with what it has kept.
    pub(crate) fn interrupt_led(&mut self, session: SessionId, cx: &mut Context) {
        let Some(led) = self.led.remove(&session) else {
            return;
        };
        for member in &led.members {
            let kept = false;
            cx.send(member, PeerMessage::Close { session, kept });
        }
        if let Some(progress) = self.lanes.get_mut(&led.place()) {
            progress.session = None;
        }
    }

    fn session_succeeded(&mut self, led: LedSession, cx: &mut Context) {
        self.learn_rates(&led, cx);
        let place = led.place();
        match led.purpose {
            // This node keeps what it opens, and says so itself when it hears that the session is closed.
            SessionGoal::Open(_) => {}
            SessionGoal::Heal(nodes) => {
                if let Some(progress) = self.lanes.get_mut(&place) {
                    progress.trust();
                }
                let moved = led.lacking.stripes();
                for node in nodes {
                    if let Some(progress) = self.lanes.get_mut(&place) {
                        progress.held.remove(&node);
                    }
                    if !led.lacking.is_whole_with(&node, moved.as_ref()) {
                        continue;
                    }
                    let (key, lane) = (led.key.clone(), led.lane);
                    cx.note(Note::Healed { key, lane, node });
                }
            }
            SessionGoal::Encode => {
                let now = cx.now;
                let progress = self.lanes.get_mut(&place);
                let started = progress.and_then(|progress| {
                    progress.trust();
                    progress.first_try
                });
                if let Some(checkpoint) = cx.checkpoints.get_mut(&led.key) {
                    checkpoint.no_room = None;
                    checkpoint.lanes_led.insert(led.lane);
                }
                let elapsed_ms = now.since(started.unwrap_or(now));
                let lane = led.lane;
                cx.note(Note::LaneProtected {
                    key: led.key.clone(),
                    lane,
                    elapsed_ms,
                });
            }
        }
        // Not before this node has heard that what it has kept itself counts: it would be put back a second time.
        cx.emit(Event::SessionOver);
    }

    fn session_failed(
        &mut self,
        led: LedSession,
        node: NodeName,
        fault: SessionFault,
        cx: &mut Context,
    ) {
        let now = cx.now;
        let place = led.place();
        if let SessionGoal::Open(slot) = led.purpose {
            return cx.emit(Event::OpeningFailed(slot, node, fault));
        }
        let doublings = match &fault {
            SessionFault::Neighbour { .. } => limits::LINK_RETRY_DOUBLINGS,
            SessionFault::NoRoom(_) => limits::NO_ROOM_RETRY_DOUBLINGS,
            _ => limits::SESSION_RETRY_DOUBLINGS,
        };
        if let Some(progress) = self.lanes.get_mut(&place) {
            progress.retry_at = if progress.learn(&led.purpose, &fault) {
                now
            } else {
                now.plus(limits::SESSION_RETRY_MS << progress.failures.min(doublings))
            };
            progress.failures += 1;
            progress.held.clear();
        }
        let has_shard = cx
            .manifest_named(led.record.manifest)
            .is_some_and(|manifest| !manifest.ranks_on(&node).is_empty());
        if led.purpose == SessionGoal::Encode
            && has_shard
            && let SessionFault::Corrupt(reason) = &fault
        {
            let reason = format!(
                "expected the sealed shard on {node} to stay as it was, got a changed one: {reason}; \
                 write to a slot only before its seal"
            );
            return cx.abandon_everywhere(&led.key, &reason);
        }
        let key = led.key;
        if let SessionFault::NoRoom(reason) = &fault
            && self
                .lanes
                .get_mut(&place)
                .is_none_or(|it| it.tells_no_room(now))
        {
            cx.tell_no_room(&key, &node, reason);
        }
        cx.note(Note::SessionFailed { key, node, fault });
        self.lead_lanes(cx);
    }

    pub(crate) fn expire_sessions(&mut self, cx: &mut Context) {
        let now = cx.now;
        let late: Vec<(SessionId, NodeName, SessionFault)> = self
            .led
            .iter()
            .filter(|(_, led)| led.deadline <= now)
            .map(|(session, led)| {
                if let Some(from) = led.faults.keys().next() {
                    let (by, fault, _) = root(&led.faults, from);
                    return (*session, by, fault);
                }
                let done = if led.begun.is_some() {
                    &led.finished
                } else {
                    &led.ready
                };
                let slow = led.members.iter().find(|member| !done.contains(*member));
                let node = slow.unwrap_or(&cx.setup.name).clone();
                let fault = SessionFault::Neighbour {
                    node: node.clone(),
                    reason: "did not answer in time".into(),
                };
                (*session, node, fault)
            })
            .collect();
        for (session, by, fault) in late {
            self.end_led(session, Err((by, fault)), cx);
        }
        self.expire_joined(cx);
    }

    /// A peer is gone: sessions with it are over.
    pub(crate) fn sessions_forget(&mut self, node: &NodeName, cx: &mut Context) {
        let hit: Vec<SessionId> = self
            .led
            .iter()
            .filter(|(_, led)| led.members.contains(node))
            .map(|(session, _)| *session)
            .collect();
        for session in hit {
            let reason = "its link went down".into();
            let fault = SessionFault::Neighbour {
                node: node.clone(),
                reason,
            };
            self.end_led(session, Err((node.clone(), fault)), cx);
        }
        self.joined_forget(node, cx);
    }

    /// Whether a session is at this checkpoint.
    pub(crate) fn has_session_of(&self, key: &CheckpointKey) -> bool {
        self.joined.values().any(|joined| joined.key == *key)
            || self.led.values().any(|led| led.key == *key)
    }

    /// Ends the session that fills the slot of an opening.
    pub(crate) fn end_opening_session(&mut self, slot: SlotId, cx: &mut Context) {
        let session = self
            .led
            .iter()
            .find(|(_, led)| led.purpose == SessionGoal::Open(slot))
            .map(|(session, _)| *session);
        if let Some(session) = session {
            let me = cx.me().clone();
            self.end_led(session, Err((me, SessionFault::Aborted)), cx);
        }
    }

    /// A checkpoint leaves RAM: its sessions are over.
    pub(crate) fn end_sessions_of(&mut self, key: &CheckpointKey, cx: &mut Context) {
        let led: Vec<SessionId> = self
            .led
            .iter()
            .filter(|(_, led)| led.key == *key)
            .map(|(session, _)| *session)
            .collect();
        for session in led {
            if let Some(led) = self.led.remove(&session) {
                for member in &led.members {
                    cx.send(
                        member,
                        PeerMessage::Close {
                            session,
                            kept: false,
                        },
                    );
                }
                if let SessionGoal::Open(slot) = led.purpose {
                    let me = cx.me().clone();
                    cx.emit(Event::OpeningFailed(slot, me, SessionFault::NoManifest));
                }
            }
        }
        self.end_joined_of(key, cx);
        self.drop_parts_of_the_gone(cx);
    }
}

/// A planted bug: steps that are kept beside the newest safe one are not healed.
fn left_unhealed(checkpoint: &Checkpoint, cx: &Context) -> bool {
    planted!("kept_steps_not_healed")
        && cx.newest_safe(&checkpoint.key.namespace) > Some(checkpoint.key.clone())
}

impl Context {
    /// Which of the coding nodes of a lane leads it.
    fn leader_of<'c>(&self, coding: &'c [NodeName], lane: Lane) -> Option<&'c NodeName> {
        let count = coding.len();
        (0..count)
            .map(|turn| &coding[(lane.index as usize + turn) % count])
            .find(|node| self.is_up(node) || planted!("led_by_the_dead"))
    }

    /// The nodes that lead lanes of a checkpoint.
    pub(crate) fn leaders_of<'c>(&self, manifest: &'c ManifestBytes) -> BTreeSet<&'c NodeName> {
        let groups = &manifest.manifest().groups;
        // Lanes take turns: the first ones have had all coding nodes.
        let in_turn =
            |lane: &Lane| (lane.index as usize) < groups[lane.group as usize].coding.len();
        let lanes = lanes_of(manifest).into_iter().filter(in_turn);
        let leaders = lanes.filter_map(|lane| {
            let coding = &groups[lane.group as usize].coding;
            self.leader_of(coding, lane)
        });
        leaders.collect()
    }

    /// The parity blocks of an encode: those of the coding nodes that are up. None while it must wait: a data node is
    /// down, or a coding node that may be back any moment.
    fn parities_to_make(&self, blocks: &LaneBlocks) -> Option<Vec<u32>> {
        let mut data = blocks.data.iter().flatten();
        let waits = |node: &NodeName| !self.is_up(node) && !self.is_gone(node);
        if !data.all(|shard| self.is_up(&shard.node)) || blocks.coding.iter().any(waits) {
            return None;
        }
        let coding = (0u32..).zip(&blocks.coding);
        let up = coding.filter(|(_, node)| self.is_up(node));
        let parities: Vec<u32> = up.map(|(index, _)| index).collect();
        (!parities.is_empty()).then_some(parities)
    }
}

/// Follows who blames whom from one member's fault to the first that tells of something else: that member, its fault,
/// and whom it blames if that one has said nothing yet.
fn root(
    faults: &BTreeMap<NodeName, SessionFault>,
    from: &NodeName,
) -> (NodeName, SessionFault, Option<NodeName>) {
    let mut seen = BTreeSet::from([from]);
    let mut by = from;
    loop {
        let fault = faults.get(by).cloned().unwrap_or(SessionFault::Aborted);
        let SessionFault::Neighbour { node, .. } = &fault else {
            return (by.clone(), fault, None);
        };
        match faults.get_key_value(node) {
            None => {
                let blamed = node.clone();
                return (by.clone(), fault, Some(blamed));
            }
            Some((next, _)) if seen.insert(next) => by = next,
            // They blame each other: one is as good as the other.
            Some(_) => return (by.clone(), fault, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::name;

    fn blames(node: &str) -> SessionFault {
        SessionFault::Neighbour {
            node: name(node),
            reason: String::new(),
        }
    }

    #[test]
    fn blame_is_followed_to_who_knows_why() {
        let mut faults = BTreeMap::from([(name("a"), blames("b"))]);
        let root_of = |faults: &_, from| root(faults, &name(from));
        assert_eq!(
            root_of(&faults, "a"),
            (name("a"), blames("b"), Some(name("b")))
        );
        faults.insert(name("b"), blames("c"));
        assert_eq!(root_of(&faults, "a").2, Some(name("c")));
        let why = SessionFault::WrongResult("chunk 3".into());
        faults.insert(name("c"), why.clone());
        assert_eq!(root_of(&faults, "a"), (name("c"), why, None));
        faults.insert(name("c"), blames("a"));
        assert_eq!(root_of(&faults, "a").2, None);
    }
}
