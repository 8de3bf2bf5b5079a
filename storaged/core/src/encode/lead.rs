//! Leading sessions: parity of committed checkpoints, and blocks that a protected checkpoint has lost (healing).
//! A lane is led by the first of its coding nodes that is up, starting at another one for each lane.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_plan::{Derived, LaneBlocks, lanes_coded_by};
use storaged_wire::peer::{
    CheckpointKey, Lane, PeerMessage, SessionFault, SessionKind, SessionRecord,
};
use storaged_wire::shape::StripeMap;
use storaged_wire::{CheckpointState, Digest, ManifestBytes, NodeName, SessionId, SlotId};

use super::begin::{Beginning, heard, said};
use super::lacking::Lacking;
use super::rates::Pace;
use super::shapes::{Needs, chosen};
use crate::api::{Note, Now};
use crate::event::Event;
use crate::limits;
use crate::node::Node;

/// What a leader knows of its lanes.
pub(crate) type LaneTable = BTreeMap<(Digest, Lane), LaneProgress>;

/// How far one lane is.
#[derive(Debug, Clone, Default)]
pub(crate) struct LaneProgress {
    pub session: Option<SessionId>,
    /// After a failure, not again before this time.
    pub retry_at: Now,
    /// Some member has no basis: encode in full.
    pub in_full: bool,
    pub first_try: Option<Now>,
    /// What the members hold, as far as they have said since they came up.
    pub held: BTreeMap<NodeName, BTreeSet<usize>>,
    pub asked_at: BTreeMap<NodeName, Now>,
    /// Nodes that were blamed for a repair that failed: others are asked first.
    pub suspects: BTreeSet<NodeName>,
    /// A block came out wrong: every block and every sum is checked by the one who gets it.
    pub wary: bool,
    /// Sessions that were ended because of a slow member.
    pub replans: u32,
    /// Failures in a row: what fails again and again is tried less often.
    pub failures: u32,
}

/// Why a session is led.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionGoal {
    Encode,
    Heal(Vec<NodeName>),
    Open(SlotId),
}

/// A session that this node leads.
#[derive(Debug, Clone)]
pub(crate) struct Led {
    pub record: SessionRecord,
    pub key: CheckpointKey,
    pub lane: Lane,
    pub members: Vec<NodeName>,
    /// How many of them, from the first, read blocks.
    pub sources: usize,
    /// Those that keep what is computed.
    pub keepers: BTreeSet<NodeName>,
    /// Stripes of the lane.
    pub stripe_count: u64,
    pub ready: BTreeSet<NodeName>,
    pub finished: BTreeSet<NodeName>,
    /// Which stripes the members need.
    pub needs: Needs,
    /// Which of them the newcomers of a heal lack.
    pub lacking: Lacking,
    /// What members hear when it begins; none before.
    pub begun: Option<Beginning>,
    /// What members that failed said.
    pub faults: BTreeMap<NodeName, SessionFault>,
    pub deadline: Now,
    /// The members' preparations may take until then, however busy they say they are.
    pub prepare_by: Now,
    pub purpose: SessionGoal,
    /// What its members say of it while it runs.
    pub pace: Pace,
}

impl Node {
    /// A checkpoint came further: what counts now, and what there is to lead.
    pub(crate) fn lanes_hear(&mut self, key: &CheckpointKey, state: CheckpointState) {
        if state >= CheckpointState::Protected {
            self.count_finished_parity(key);
        }
        self.lead_lanes();
    }

    /// Starts the sessions that this node should lead and has not.
    pub(crate) fn lead_lanes(&mut self) {
        if self.setup.geometry.is_none() {
            return;
        }
        let committed: Vec<(CheckpointKey, Arc<ManifestBytes>, CheckpointState)> = self
            .checkpoints
            .values()
            .filter(|c| !self.is_only_base(c))
            .filter_map(|c| Some((c.key.clone(), c.manifest.clone()?, c.state)))
            .collect();
        self.lanes
            .retain(|(name, _), _| self.by_name.contains_key(name));
        // The newest first: once it is protected, older ones need no healing.
        for (key, manifest, state) in committed.into_iter().rev() {
            for lane in lanes_coded_by(&manifest, self.me()).collect::<Vec<_>>() {
                self.lead_lane(&key, &manifest, lane, state);
            }
        }
    }

    fn lead_lane(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        state: CheckpointState,
    ) {
        let Some(blocks) = LaneBlocks::of(manifest, lane) else {
            return;
        };
        if self.leader_of(&blocks, lane).as_ref() != Some(self.me()) {
            return;
        }
        let now = self.now;
        let progress = self.lanes.entry((manifest.name(), lane)).or_default();
        if let Some(session) = progress.session {
            return self.look_again(session, manifest, &blocks, state);
        }
        if now < progress.retry_at {
            return;
        }
        if self.led.len() >= limits::SESSIONS_LED_MAX {
            return;
        }
        let led_already = self.checkpoints[key].lanes_led.contains(&lane);
        if state >= CheckpointState::Protected || led_already {
            self.heal_lane(key, manifest, lane, &blocks);
        } else {
            self.encode_lane(key, manifest, lane, &blocks);
        }
    }

    fn leader_of(&self, blocks: &LaneBlocks, lane: Lane) -> Option<NodeName> {
        let count = blocks.coding.len();
        (0..count)
            .map(|turn| &blocks.coding[(lane.index as usize + turn) % count])
            .find(|node| self.is_up(node) || planted!("led_by_the_dead"))
            .cloned()
    }

    fn encode_lane(
        &mut self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
    ) {
        let Some(parities) = self.parities_to_make(blocks) else {
            return;
        };
        let in_full = self
            .lanes
            .get(&(manifest.name(), lane))
            .is_some_and(|p| p.in_full || p.wary);
        let basis = if in_full {
            None
        } else {
            self.basis_for(key, manifest, lane, blocks)
        };
        let checks = self.checks_of(manifest.name(), lane);
        let kind = SessionKind::Encode {
            lane,
            basis,
            checks,
            parities,
        };
        self.lead(key.clone(), manifest, lane, kind, SessionGoal::Encode);
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

    /// Proposes a session to its members.
    pub(crate) fn lead(
        &mut self,
        key: CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        kind: SessionKind,
        purpose: SessionGoal,
    ) -> bool {
        let session = self.fresh_session();
        let record = SessionRecord {
            session,
            manifest: manifest.name(),
            kind,
        };
        let Some(derived) = Derived::of(&record, manifest) else {
            return false;
        };
        let now = self.now;
        if purpose.is_lane_work() {
            let progress = self.lanes.entry((manifest.name(), lane)).or_default();
            progress.session = Some(session);
            progress.first_try.get_or_insert(now);
        }
        let led = Led {
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
            needs: Needs::default(),
            lacking: Lacking::default(),
            begun: None,
            faults: BTreeMap::new(),
            deadline: now.plus(limits::PROPOSE_MAX_MS),
            prepare_by: now.plus(limits::SESSION_STALL_MAX_MS),
            purpose,
            pace: Pace::default(),
        };
        self.led.insert(session, led);
        for member in derived.members {
            if !self.is_up(&member) {
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
                );
                return true;
            }
            self.send(&member, PeerMessage::Propose(record.clone()));
        }
        true
    }

    pub(crate) fn member_ready(
        &mut self,
        from: &NodeName,
        session: SessionId,
        stripes: Option<StripeMap>,
    ) {
        let Some(led) = self.led.get_mut(&session) else {
            return self.send(
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
            return self.say_begin(from, session);
        }
        if let Some(map) = stripes {
            let Some(map) = heard(&map, led.stripe_count) else {
                let fault = SessionFault::Neighbour {
                    node: from.clone(),
                    reason: "said of other stripes than the lane has what it needs".into(),
                };
                return self.end_led(session, Err((from.clone(), fault)));
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
            self.begin_led(session);
        }
    }

    /// All members are ready: the leader says which stripes move, and of an encode how.
    fn begin_led(&mut self, session: SessionId) {
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        if led.is_in_full_but_for_the_name() {
            return self.lead_in_full(session);
        }
        led.deadline = self.now.plus(limits::SESSION_STALL_MAX_MS);
        let led = led.clone();
        let stripes = match led.purpose {
            SessionGoal::Heal(_) => led.lacking.stripes(),
            SessionGoal::Encode | SessionGoal::Open(_) => led.needs.stripes(),
        };
        let stripes = stripes.as_ref().map(said);
        let chosen = match led.purpose {
            SessionGoal::Encode => self
                .manifest_named(led.record.manifest)
                .and_then(|m| chosen(&m, led.lane, &led.needs, &self.links())),
            _ => None,
        };
        let around = self.around_suspects(&led);
        let chosen = chosen.filter(|_| around.is_none());
        let shape = chosen.map(|chosen| {
            let (key, lane, reason) = (led.key.clone(), led.lane, chosen.reason);
            self.note(Note::ShapeChosen { key, lane, reason });
            chosen.shape
        });
        let shape = around.or(shape);
        if let Some(led) = self.led.get_mut(&session) {
            led.pace = Pace::begin(self.now, shape.clone());
            led.begun = Some(Beginning { stripes, shape });
        }
        for member in led.members {
            self.say_begin(&member, session);
        }
    }

    /// Tells a member that its session begins, if it does.
    pub(super) fn say_begin(&mut self, member: &NodeName, session: SessionId) {
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
        self.send(member, begin);
    }

    pub(crate) fn member_finished(&mut self, from: &NodeName, session: SessionId) {
        let Some(led) = self.led.get_mut(&session) else {
            return self.send(
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
                self.end_led(session, Ok(()));
            }
        }
    }

    pub(crate) fn member_failed(
        &mut self,
        from: &NodeName,
        session: SessionId,
        fault: SessionFault,
    ) {
        let peers = &self.peers;
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        if !led.members.contains(from) {
            return;
        }
        led.faults.insert(from.clone(), fault);
        let (by, fault, waits_for) = root(&led.faults, from);
        let may_tell = waits_for.is_some_and(|node| {
            led.members.contains(&node) && (node == self.setup.name || peers.contains_key(&node))
        });
        if may_tell && led.begun.is_some() {
            // A failure ends streams, and whoever notices that first need not know why. The one it blames does.
            led.deadline = led.deadline.min(self.now.plus(limits::REPEAT_MS / 2));
            return;
        }
        self.end_led(session, Err((by, fault)));
    }

    /// Ends a session that this node leads, and says what counts.
    pub(crate) fn end_led(
        &mut self,
        session: SessionId,
        outcome: Result<(), (NodeName, SessionFault)>,
    ) {
        let Some(led) = self.led.remove(&session) else {
            return;
        };
        let kept = outcome.is_ok();
        for member in &led.members {
            if !planted!("sessions_not_closed") {
                self.send(member, PeerMessage::Close { session, kept });
            }
        }
        if let Some(progress) = self.lanes.get_mut(&(led.record.manifest, led.lane))
            && progress.session == Some(session)
        {
            progress.session = None;
        }
        match outcome {
            Ok(()) => self.session_succeeded(led),
            Err((node, fault)) => self.session_failed(led, node, fault),
        }
    }

    /// Ends a session that nothing is wrong with, so that another one goes on with what it has kept.
    pub(crate) fn interrupt_led(&mut self, session: SessionId) {
        let Some(led) = self.led.remove(&session) else {
            return;
        };
        for member in &led.members {
            let kept = false;
            self.send(member, PeerMessage::Close { session, kept });
        }
        if let Some(progress) = self.lanes.get_mut(&(led.record.manifest, led.lane)) {
            progress.session = None;
        }
    }

    fn session_succeeded(&mut self, led: Led) {
        self.learn_rates(&led);
        let name = led.record.manifest;
        match led.purpose {
            // This node keeps what it opens, and says so itself when it hears that the session is closed.
            SessionGoal::Open(_) => {}
            SessionGoal::Heal(nodes) => {
                if let Some(progress) = self.lanes.get_mut(&(name, led.lane)) {
                    progress.trust();
                }
                let moved = led.lacking.stripes();
                for node in nodes {
                    if let Some(progress) = self.lanes.get_mut(&(name, led.lane)) {
                        progress.held.remove(&node);
                    }
                    if !led.lacking.is_whole_with(&node, moved.as_ref()) {
                        continue;
                    }
                    let (key, lane) = (led.key.clone(), led.lane);
                    self.note(Note::Healed { key, lane, node });
                }
            }
            SessionGoal::Encode => {
                let now = self.now;
                let progress = self.lanes.get_mut(&(name, led.lane));
                let started = progress.and_then(|progress| {
                    progress.trust();
                    progress.first_try
                });
                if let Some(checkpoint) = self.checkpoints.get_mut(&led.key) {
                    checkpoint.no_room = None;
                    checkpoint.lanes_led.insert(led.lane);
                }
                let elapsed_ms = now.since(started.unwrap_or(now));
                let lane = led.lane;
                self.note(Note::LaneProtected {
                    key: led.key.clone(),
                    lane,
                    elapsed_ms,
                });
            }
        }
        self.lead_lanes();
    }

    fn session_failed(&mut self, led: Led, node: NodeName, fault: SessionFault) {
        let now = self.now;
        let place = (led.record.manifest, led.lane);
        if let SessionGoal::Open(slot) = led.purpose {
            return self.emit(Event::OpeningFailed(slot, node, fault));
        }
        if let Some(progress) = self.lanes.get_mut(&place) {
            progress.retry_at = match progress.learn(&led.purpose, &fault) {
                true => now,
                false => now.plus(limits::SESSION_RETRY_MS << progress.failures.min(5)),
            };
            progress.failures += 1;
            progress.held.clear();
        }
        if led.purpose == SessionGoal::Encode
            && let SessionFault::Corrupt(reason) = &fault
        {
            let reason = format!(
                "expected the sealed shard on {node} to stay as it was, got a changed one: {reason}; \
                 write to a slot only before its seal"
            );
            return self.abandon_everywhere(&led.key, &reason);
        }
        let key = led.key;
        if let SessionFault::NoRoom(reason) = &fault {
            self.tell_no_room(&key, &node, reason);
        }
        self.note(Note::SessionFailed { key, node, fault });
        self.lead_lanes();
    }

    pub(crate) fn expire_sessions(&mut self) {
        let now = self.now;
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
                let node = slow.unwrap_or(&self.setup.name).clone();
                let fault = SessionFault::Neighbour {
                    node: node.clone(),
                    reason: "did not answer in time".into(),
                };
                (*session, node, fault)
            })
            .collect();
        for (session, by, fault) in late {
            self.end_led(session, Err((by, fault)));
        }
        self.expire_joined();
    }

    /// A peer is gone: sessions with it are over.
    pub(crate) fn sessions_forget(&mut self, node: &NodeName) {
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
            self.end_led(session, Err((node.clone(), fault)));
        }
        self.joined_forget(node);
    }

    /// A checkpoint leaves RAM: its sessions are over.
    pub(crate) fn end_sessions_of(&mut self, key: &CheckpointKey) {
        let led: Vec<SessionId> = self
            .led
            .iter()
            .filter(|(_, led)| led.key == *key)
            .map(|(session, _)| *session)
            .collect();
        for session in led {
            if let Some(led) = self.led.remove(&session) {
                for member in &led.members {
                    self.send(
                        member,
                        PeerMessage::Close {
                            session,
                            kept: false,
                        },
                    );
                }
                if let SessionGoal::Open(slot) = led.purpose {
                    let me = self.me().clone();
                    self.emit(Event::OpeningFailed(slot, me, SessionFault::NoManifest));
                }
            }
        }
        self.end_joined_of(key);
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

impl SessionGoal {
    fn is_lane_work(&self) -> bool {
        !matches!(self, Self::Open(_))
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
