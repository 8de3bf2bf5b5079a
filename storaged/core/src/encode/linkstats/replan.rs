//! Learning from sessions, and ending those that another plan would end sooner: what is finished of them stays, and
//! the next session of the lane does the rest (`resume`).

use std::collections::BTreeSet;

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{MemberTally, PeerMessage};
use storaged_wire::{NodeName, SessionId, SlotId};

use super::Links;
use super::bottleneck::{Bottleneck, Certainty, LinkSample, findings};
use super::measured::{NodeRate, SLOW_BELOW_PPM, Weight};
use super::progress::{Bounds, Headway};
use crate::api::{Note, Now, SessionTally};
use crate::context::Context;
use crate::encode::Sessions;
use crate::encode::session::{LanePlace, LedSession, SessionGoal, SessionPlace};
use crate::encode::topology::{chosen, expected_seconds};
use crate::event::Event;
use crate::limits;

/// Another plan must be expected to take no more than this share of the time that the running one takes.
const GAIN_SHARE: f64 = 0.75;
/// Fewer chunks than this over the busiest link say nothing of its rate.
const TELLING_CHUNKS: u64 = 2;

/// Whether an opening would go on without any of these nodes.
pub(crate) type GoesAround<'a> =
    &'a dyn Fn(&Sessions, &Context, SlotId, &BTreeSet<NodeName>) -> bool;

impl SessionTally {
    /// As a member says it.
    pub(crate) fn said(self) -> MemberTally {
        MemberTally {
            elapsed_ms: self.elapsed_ms,
            stripes: self.stripes,
            links: self.links,
        }
    }
}

impl Sessions {
    /// What is known of the links now.
    pub(crate) fn links<'a>(&'a self, cx: &'a Context) -> Links<'a> {
        Links::new(&cx.setup.link_rates, &self.measured, cx.now)
    }

    /// The rates of the other nodes' links, as measured in sessions that this node led.
    pub fn measured_rates(&self, now: Now) -> Vec<NodeRate> {
        self.measured.nodes(now)
    }

    /// A session goes on here: its leader is told how.
    pub(crate) fn session_progress(
        &mut self,
        leader: &NodeName,
        session: SessionId,
        tally: &SessionTally,
        cx: &mut Context,
    ) {
        let until = cx
            .now
            .plus(limits::SESSION_STALL_MAX_MS + limits::PROPOSE_MAX_MS);
        let joined = self.joined.get_mut(&SessionPlace::of(leader, session));
        if let Some(joined) = joined.filter(|joined| joined.is_running()) {
            // The executor ends what stands still, and says nothing of it any more.
            joined.deadline = until;
            let tally = tally.clone().said();
            cx.send(leader, PeerMessage::Progress { session, tally });
        }
    }

    /// A member of a session led here says how it goes. What cannot be counts for nothing.
    pub(crate) fn member_progress(
        &mut self,
        from: &NodeName,
        session: SessionId,
        tally: MemberTally,
        cx: &mut Context,
    ) {
        let now = cx.now;
        let Some(led) = self.led.get(&session).filter(|led| led.begun.is_some()) else {
            return;
        };
        if !led.members.contains(from) {
            return;
        }
        let bounds = cx.bounds(led);
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        let report = led.pace.report(now, from, &led.members, tally, bounds);
        // However long it takes: it ends early only if nothing moves any more.
        if report == Ok(Headway::Some) {
            led.deadline = led.deadline.max(now.plus(limits::SESSION_STALL_MAX_MS));
        }
        if let Err(error) = report {
            let reason = format!("said of a session what cannot be: {error}");
            let node = from.clone();
            cx.note(Note::PeerFault { node, reason });
        }
    }

    /// A session ended well: what its members measured counts, if there was enough of it.
    pub(in crate::encode) fn learn_rates(&mut self, led: &LedSession, cx: &mut Context) {
        let links = led.pace.whole(&led.members);
        let now = cx.now;
        if let Some(findings) = self.telling(led, &links, led.pace.lasted_ms(now), cx) {
            self.measured
                .learn(now, &led.members, &findings, Weight::Half);
        }
    }

    /// What these links say, if enough went over them in this time.
    fn telling(
        &self,
        led: &LedSession,
        links: &[LinkSample],
        within_ms: u64,
        cx: &Context,
    ) -> Option<Bottleneck> {
        let chunk = cx.manifest_named(led.record.manifest)?;
        let chunk = chunk.manifest().chunk.bytes() as u64;
        let most = links.iter().map(|link| link.bytes_per_s).max()?;
        let bytes = most.saturating_mul(within_ms) / 1000;
        if bytes < chunk.saturating_mul(TELLING_CHUNKS) {
            return None;
        }
        let members = led.members.iter().enumerate();
        let slow = members.filter(|(_, node)| self.measured.is_slow(cx.now, node));
        findings(links, &slow.map(|(member, _)| member).collect())
    }

    /// Looks at every session led here, and ends those that a slow member holds up if a plan around it is expected
    /// to end sooner.
    pub(crate) fn judge_sessions(&mut self, goes_around: GoesAround<'_>, cx: &mut Context) {
        let running = self.led.iter().filter(|(_, led)| led.begun.is_some());
        let running: Vec<SessionId> = running.map(|(session, _)| *session).collect();
        for session in running {
            self.judge_session(session, goes_around, cx);
        }
    }

    fn judge_session(&mut self, session: SessionId, goes_around: GoesAround<'_>, cx: &mut Context) {
        let now = cx.now;
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        let Some(links) = led.pace.stretch(now, &led.members) else {
            return;
        };
        let led = self.led[&session].clone();
        let findings = self.telling(&led, &links, limits::PACE_STRETCH_MS, cx);
        let slow = findings.as_ref().map_or_else(BTreeSet::new, slow_members);
        let slow = slow.into_iter().map(|member| led.members[member].clone());
        let slow: BTreeSet<NodeName> = slow.collect();
        let Some(led) = self.led.get_mut(&session) else {
            return;
        };
        let out = led.pace.strike(&slow);
        let led = led.clone();
        let (Some(findings), false) = (findings, out.is_empty()) else {
            return;
        };
        self.measured
            .learn(now, &led.members, &findings, Weight::Whole);
        if let Some(reason) = self.way_around(&led, &out, goes_around, cx) {
            self.replan(session, &out, reason, cx);
        }
    }

    /// Why this session should be ended, if another plan without these members on its way saves enough time.
    fn way_around(
        &self,
        led: &LedSession,
        slow: &BTreeSet<NodeName>,
        goes_around: GoesAround<'_>,
        cx: &Context,
    ) -> Option<String> {
        let place = led.place();
        let replans = self.lanes.get(&place).map_or(0, |lane| lane.replans);
        let stripes = led
            .needs
            .stripes()
            .map_or(led.stripe_count, |map| map.count());
        let left_ms = led.pace.left_ms(stripes, led.keepers.iter())?;
        let manifest = cx.manifest_named(led.record.manifest)?;
        // Whoever gets a block back gets it over its own link.
        let survivors = led.members.iter().take(led.sources);
        let mut survivors = survivors.filter(|node| !led.keepers.contains(*node));
        let is_in_the_way = survivors.any(|node| slow.contains(node));
        let (share, what) = match &led.purpose {
            _ if replans >= limits::REPLANS_MAX || !is_in_the_way => return None,
            SessionGoal::Encode => {
                let links = self.links(cx);
                let (lane, needs) = (led.lane, &led.needs);
                let other = chosen(&manifest, lane, needs, &links)?;
                let running = led.pace.shape.as_ref();
                let now = expected_seconds(&manifest, lane, needs, &links, running)?;
                (other.seconds / now, other.reason)
            }
            SessionGoal::Heal(_) => {
                let blocks = LaneBlocks::of(&manifest, led.lane)?;
                let held = self.held_blocks(place, &blocks, cx);
                blocks.enough(&self.trusted(place, &blocks, &held, cx))?;
                (slow_share(), "there are enough other survivors".into())
            }
            SessionGoal::Open(slot) => {
                goes_around(self, cx, *slot, slow).then_some(())?;
                (slow_share(), "there are enough other survivors".into())
            }
        };
        let gain_ms = (left_ms as f64 * (1.0 - share)) as u64;
        (share <= GAIN_SHARE && gain_ms >= limits::REPLAN_GAIN_MS_MIN)
            .then(|| format!("{left_ms} ms are left at this pace; {what}"))
    }

    /// Blocks of a lane that nodes which are up are known to hold.
    fn held_blocks(&self, place: LanePlace, blocks: &LaneBlocks, cx: &Context) -> Vec<usize> {
        let held = |block: &usize| {
            let progress = self.lanes.get(&place)?;
            let node = blocks.node(*block)?;
            let holds = progress.held.get(node)?.contains(block);
            Some(holds && cx.is_up(node))
        };
        let all = 0..blocks.blocks();
        all.filter(|block| held(block) == Some(true)).collect()
    }

    /// Ends a session so that the next one of its lane goes around these members.
    fn replan(
        &mut self,
        session: SessionId,
        slow: &BTreeSet<NodeName>,
        reason: String,
        cx: &mut Context,
    ) {
        let Some(led) = self.led.remove(&session) else {
            return;
        };
        let kept = false;
        for member in &led.members {
            cx.send(member, PeerMessage::Close { session, kept });
        }
        let place = led.place();
        let retry_at = cx.now.plus(limits::SESSION_RETRY_MS);
        if let Some(progress) = self.lanes.get_mut(&place)
            && progress.session == Some(session)
        {
            progress.session = None;
            progress.retry_at = retry_at;
            progress.replans += 1;
        }
        for node in slow {
            cx.note(Note::Replanned {
                key: led.key.clone(),
                lane: led.lane,
                node: node.clone(),
                reason: reason.clone(),
            });
        }
        if let SessionGoal::Open(slot) = led.purpose {
            cx.emit(Event::OpeningIdle(slot));
        }
    }
}

impl Context {
    fn bounds(&self, led: &LedSession) -> Bounds {
        let manifest = self.manifest_named(led.record.manifest);
        let chunk = manifest.map_or(0, |m| m.manifest().chunk.bytes() as u64);
        let blocks = led.stripe_count.saturating_mul(led.members.len() as u64);
        Bounds {
            stripes: led.stripe_count,
            // No link carries more blocks of a stripe than it has members, each with a header of 16 bytes.
            bytes: blocks.saturating_mul(chunk + 16),
        }
    }
}

/// Of the time that a slow survivor takes, what others are expected to take at most.
fn slow_share() -> f64 {
    SLOW_BELOW_PPM as f64 / super::bottleneck::WHOLE_PPM as f64
}

/// Members whose links are measured as slow in these findings.
fn slow_members(findings: &Bottleneck) -> BTreeSet<usize> {
    let slow = findings.sides.iter().filter(|(_, seen)| {
        seen.certainty != Certainty::AtLeast && seen.share_ppm <= SLOW_BELOW_PPM
    });
    slow.map(|((member, _), _)| *member).collect()
}
