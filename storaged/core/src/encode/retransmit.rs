//! Proposals that are said again, and proposals that wait.
//!
//! A proposal or its answer is lost if the link that it goes over is just coming up or going down: a member may notice
//! late that its leader was restarted, and forgets then what the new incarnation had proposed. So a leader says a
//! proposal again every second, and at once to a peer that greets it, until the member is ready; to a member that is
//! ready already this makes no difference. The same goes for the beginning and for the end: were one of them lost, the session
//! would keep its lane for ten minutes, and whatever that lane has lost meanwhile would not be healed.
//!
//! The other way round a proposal may come too early. Before the executor has said what the last session of the same
//! block kept: it waits for that, so that nothing that is in place is sent again. Or, of an encode, before the manifest,
//! which another node sends: a refusal would cost the second until the leader tries again. The manifest may never come, and the leader
//! need not be able to say that it has ended the session: what it does not say again is forgotten.

use storaged_plan::Derived;
use storaged_wire::peer::{PeerMessage, SessionKind, SessionRecord};
use storaged_wire::{NodeName, SessionId};

use super::resume::Cancelling;
use super::resume::ParityPlace;
use super::session::{MemberPhase, SessionPlace};
use crate::api::Now;
use crate::context::Context;
use crate::encode::Sessions;
use crate::limits;

/// Proposals that wait here, at most: four of each of 16 leaders. One too many is said again by its leader.
const WAITING_MAX: usize = 64;

/// A proposal that waits.
#[derive(Debug, Clone)]
pub(super) struct DeferredProposal {
    record: SessionRecord,
    /// Its leader says it again before that, or has ended the session.
    until: Now,
}

impl Context {
    /// A number for a session: no incarnation of this node has used it.
    pub(super) fn fresh_session(&mut self) -> SessionId {
        let incarnation = self.setup.generation.get() << 32;
        let fresh = self.fresh();
        SessionId::new(
            incarnation
                ^ if planted!("session_id_used_twice") {
                    1
                } else {
                    fresh
                },
        )
    }
}

impl Sessions {
    /// Says proposals again to members that have not said that they are ready, and of a session that has begun to those
    /// that have not finished: to this one, or to all.
    pub(crate) fn repeat_proposals_to_members(
        &mut self,
        only: Option<&NodeName>,
        cx: &mut Context,
    ) {
        let mut missing: Vec<(NodeName, SessionRecord)> = Vec::new();
        for led in self.led.values() {
            let heard = match &led.begun {
                Some(_) => &led.finished,
                None => &led.ready,
            };
            let silent = led.members.iter().filter(|node| !heard.contains(*node));
            let asked = silent.filter(|node| only.is_none_or(|only| only == *node));
            missing.extend(asked.map(|node| (node.clone(), led.record.clone())));
        }
        for (node, record) in missing {
            cx.send(&node, PeerMessage::Propose(record));
        }
    }

    /// A session that this node has joined is proposed again: its answer was lost, or is on its way.
    pub(super) fn answer_repeated_proposal(
        &mut self,
        from: &NodeName,
        session: SessionId,
        cx: &mut Context,
    ) {
        let joined = self.joined.get(&SessionPlace::of(from, session));
        match joined.map(|joined| joined.phase.clone()) {
            None | Some(MemberPhase::Running) => {}
            Some(MemberPhase::Preparing { .. }) => {
                cx.send(from, PeerMessage::Preparing { session });
                self.prepare(from, session, cx);
            }
            Some(MemberPhase::Finished(tally)) => {
                cx.send(from, PeerMessage::Finished { session, tally });
            }
            Some(MemberPhase::Ready) => self.say_ready(from, session, cx),
        }
    }

    /// Whether a proposal must wait: for its manifest, or for the end of an earlier session that still puts bytes where
    /// this one will.
    pub(super) fn must_defer(&self, record: &SessionRecord, cx: &Context) -> bool {
        let Some(manifest) = cx.manifest_named(record.manifest) else {
            return matches!(record.kind, SessionKind::Encode { .. });
        };
        let Some(derived) = Derived::of(record, &manifest) else {
            return false;
        };
        let me = derived.members.iter().position(|name| name == cx.me());
        let sink = derived.sink_members.iter().position(|at| Some(*at) == me);
        let Some(block) = sink.map(|sink| derived.sinks[sink]) else {
            return false;
        };
        let k = derived.blocks.data.len();
        let rank = derived.blocks.data.get(block).and_then(Option::as_ref);
        self.ending.values().any(|ending| match ending {
            Cancelling::Slot(_, part) => {
                rank.is_some_and(|shard| part.is_of(record.manifest, shard.rank))
            }
            Cancelling::Parity(place, _) => {
                let index = block.checked_sub(k).map(|index| index as u32);
                index.is_some_and(|index| {
                    *place
                        == ParityPlace {
                            manifest: record.manifest,
                            lane: derived.lane,
                            index,
                        }
                })
            }
        })
    }

    pub(super) fn defer(&mut self, from: &NodeName, record: SessionRecord, now: Now) {
        if self.deferred_proposals.len() < WAITING_MAX {
            let place = SessionPlace::of(from, record.session);
            let until = now.plus(limits::PROPOSE_MAX_MS);
            let waits = DeferredProposal { record, until };
            self.deferred_proposals.insert(place, waits);
        }
    }

    /// Forgets what no leader waits for any more. When a link breaks at its leader's end alone, that ends the session and cannot say
    /// so here; kept, 64 of these would leave no room for any other.
    pub(super) fn expire_deferred(&mut self, now: Now) {
        self.deferred_proposals
            .retain(|_, waits| waits.until > now || planted!("proposals_wait_for_ever"));
    }

    /// A session has ended for good, or a manifest is there: proposals that waited are looked at again.
    pub(crate) fn retry_deferred(&mut self, cx: &mut Context) {
        for (place, waits) in std::mem::take(&mut self.deferred_proposals) {
            self.proposed(&place.leader, waits.record, cx);
            // Not said again, it waits no longer.
            if let Some(still) = self.deferred_proposals.get_mut(&place) {
                still.until = waits.until;
            }
        }
        self.tell_deferred_tables(cx);
    }

    /// When a session must be looked at again, at the latest.
    pub(crate) fn deadlines(&self) -> impl Iterator<Item = Now> {
        let led = self.led.values().map(|led| led.deadline);
        let lanes = self.lanes.values().map(|lane| lane.retry_at);
        led.chain(lanes.filter(|at| *at != Now::default()))
    }

    /// Ends sessions whose time is over, and begins those again whose time has come.
    pub(crate) fn tick_sessions(&mut self, cx: &mut Context) {
        let now = cx.now;
        if self.led.values().any(|led| led.deadline <= now) {
            self.expire_sessions(cx);
        }
        let mut due = false;
        for lane in self.lanes.values_mut() {
            if lane.retry_at != Now::default() && lane.retry_at <= now {
                lane.retry_at = Now::default();
                due = true;
            }
        }
        if due {
            self.lead_lanes(cx);
        }
    }

    /// A leader is gone: what it proposed need not be looked at any more.
    pub(super) fn forget_waiting(&mut self, leader: &NodeName) {
        self.deferred_proposals
            .retain(|place, _| place.leader != *leader);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use storaged_codec::{Digest, digest, fingerprint, root_digest};
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::{Lane, SumChecks, TablePage, TablePlace};
    use storaged_wire::shape::EncodeShape;
    use storaged_wire::{Generation, ManifestBytes, Rank};

    use super::*;
    use crate::api::{Input, Output, SessionTally};
    use crate::node::Node;
    use crate::testkit::{chunk, hear, last_of, name, sent};

    /// The shard of `a`, with parity on `b` and `c`.
    fn manifest() -> Arc<ManifestBytes> {
        let root = root_digest(&[digest(b"hello")], 5, chunk());
        let manifest = crate::testkit::manifest(1, &["a"], &["b", "c"], 5, root);
        Arc::new(manifest.seal().expect("a sound manifest"))
    }

    fn member() -> Node {
        last_of(&["a", "b", "c"], 1, 2)
    }

    fn says(node: &mut Node, at: u64, from: &str, message: PeerMessage) -> Vec<PeerMessage> {
        sent(hear(node, at, from, message))
    }

    fn commit_of(manifest: &ManifestBytes) -> PeerMessage {
        PeerMessage::Committed {
            manifest: manifest.shared(),
            durable: DurableWish::Policy,
        }
    }

    fn proposal(session: u64, manifest: Digest) -> PeerMessage {
        let lane = Lane { group: 0, index: 0 };
        PeerMessage::Propose(SessionRecord {
            session: SessionId::new(session),
            manifest,
            kind: SessionKind::Encode {
                lane,
                basis: None,
                checks: SumChecks::Parity,
                parities: vec![0, 1],
            },
        })
    }

    #[test]
    fn a_proposal_before_its_manifest_is_taken_up_when_that_comes() {
        let (mut node, manifest) = (member(), manifest());
        assert_eq!(says(&mut node, 1, "b", proposal(7, manifest.name())), []);
        let committed = commit_of(&manifest);
        let answers = says(&mut node, 2, "a", committed);
        assert!(answers.iter().any(asks_for_a_table), "{answers:?}");
    }

    #[test]
    fn a_proposal_waits_for_its_manifest_as_long_as_its_leader_is_there() {
        for (lost, is_taken_up) in [("a", true), ("b", false)] {
            let (mut node, manifest) = (member(), manifest());
            assert_eq!(says(&mut node, 1, "b", proposal(7, manifest.name())), []);
            let (lost, generation) = (name(lost), Generation::new(1));
            node.handle(Now(2), Input::PeerDown { node: lost.clone() });
            let up = Input::PeerUp {
                node: lost.clone(),
                generation,
            };
            node.handle(Now(3), up);
            let committed = commit_of(&manifest);
            let answers = says(&mut node, 4, "a", committed);
            let asks = answers.iter().any(asks_for_a_table);
            assert_eq!(asks, is_taken_up, "{lost} was lost");
        }
    }

    /// The other end's link comes up first. If the leader dies before this end's does, nothing ends what it had begun here.
    #[test]
    fn a_proposal_that_comes_before_the_link_is_up_here_is_not_kept() {
        let (mut node, manifest) = (member(), manifest());
        let committed = commit_of(&manifest);
        says(&mut node, 1, "a", committed);
        node.handle(Now(2), Input::PeerDown { node: name("b") });
        says(&mut node, 3, "b", proposal(7, manifest.name()));
        assert_eq!(node.audit().sessions, 0);
        let (b, generation) = (name("b"), Generation::new(2));
        node.handle(
            Now(4),
            Input::PeerUp {
                node: b,
                generation,
            },
        );
        says(&mut node, 5, "b", proposal(8, manifest.name()));
        assert_eq!(node.audit().sessions, 1);
    }

    /// The manifest of a step that was retired meanwhile never comes, and the leader's word that the session has ended is lost.
    #[test]
    fn a_proposal_that_its_leader_does_not_say_again_is_forgotten() {
        let (mut node, manifest) = (member(), manifest());
        let said = [1_000, 4_000];
        for at in said {
            assert_eq!(says(&mut node, at, "b", proposal(7, manifest.name())), []);
        }
        // News of other steps do not make it wait longer.
        let other = crate::testkit::manifest(2, &["a"], &["b", "c"], 5, digest(b"any"));
        let told = PeerMessage::Committed {
            manifest: other.seal().expect("a sound manifest").shared(),
            durable: DurableWish::Never,
        };
        says(&mut node, 6_000, "a", told);
        let mut waiting = |at| {
            node.handle(Now(at), Input::Tick);
            node.audit().sessions
        };
        let until = said[1] + limits::PROPOSE_MAX_MS;
        assert_eq!((waiting(until - 1_000), waiting(until + 1_000)), (1, 0));
    }

    fn asks_for_a_table(message: &PeerMessage) -> bool {
        matches!(message, PeerMessage::TableQuery(_))
    }

    /// The table of the shard of `a`, from its beginning on.
    fn table(manifest: Digest) -> PeerMessage {
        PeerMessage::TablePage {
            place: TablePlace {
                manifest,
                rank: Rank::new(0),
                first: 0,
            },
            page: TablePage {
                leaves: vec![digest(b"hello")],
                prints: vec![fingerprint(b"hello")],
            },
        }
    }

    /// Parity of the whole lane here, by way of a chain.
    fn begin(session: u64) -> PeerMessage {
        PeerMessage::Begin {
            session: SessionId::new(session),
            stripes: None,
            shape: Some(EncodeShape::Chain { order: vec![0] }),
        }
    }

    #[test]
    fn a_member_says_again_that_it_has_finished_and_begins_once() {
        let (mut node, manifest) = (member(), manifest());
        let committed = commit_of(&manifest);
        says(&mut node, 1, "a", committed);
        let begins = |node: &mut Node, at| {
            let message = begin(7);
            let from = name("b");
            let outputs = node.handle(Now(at), Input::Message { from, message });
            let runs = |output: &&Output| matches!(output, Output::Run(_));
            outputs.iter().filter(runs).count()
        };
        let asked = says(&mut node, 2, "b", proposal(7, manifest.name()));
        assert!(asked.iter().all(asks_for_a_table), "{asked:?}");
        let ready = says(&mut node, 2, "a", table(manifest.name()));
        assert!(
            matches!(&ready[..], [PeerMessage::Ready { .. }]),
            "{ready:?}"
        );
        assert_eq!((begins(&mut node, 3), begins(&mut node, 4)), (1, 0));
        assert_eq!(says(&mut node, 5, "b", proposal(7, manifest.name())), []);

        let ended = Input::SessionEnded {
            leader: name("b"),
            session: SessionId::new(7),
            outcome: Ok(SessionTally::default()),
            kept: std::iter::once(0..1).collect(),
        };
        let finished = sent(node.handle(Now(6), ended));
        assert!(matches!(&finished[..], [PeerMessage::Finished { .. }]));
        let again = says(&mut node, 7, "b", proposal(7, manifest.name()));
        assert_eq!(again, finished);
        assert_eq!(begins(&mut node, 8), 0);
    }
}
