//! What a node has learned of the others' links from the sessions that it led. Estimates are weighted exponentially
//! and forgotten after a time; whether a node counts as slow changes only at a distance from the threshold.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::NodeName;

use super::bottleneck::{Bottleneck, Certainty, Limit, Side, SideSeen, WHOLE_PPM};
use crate::api::Now;
use crate::limits;

/// A node whose link carries no more than this share of the usual rate is slow.
pub(super) const SLOW_BELOW_PPM: u64 = WHOLE_PPM / 3;
/// And remains so until it carries this share: between the two it stays what it was.
const SLOW_UNTIL_PPM: u64 = WHOLE_PPM * 2 / 3;

/// What is known of one side of a node's link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    bytes_per_s: u64,
    /// Of what was usual in the same sessions: sessions that share links slow all members down alike.
    share_ppm: u64,
    is_slow: bool,
    /// It, or its neighbour on the other end.
    is_shared: bool,
    at: Now,
}

/// How much a new figure weighs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Weight {
    /// As much as all before it.
    Half,
    /// It replaces what was known: it was seen several times in a row.
    Whole,
}

/// What a node has learned of the others' links.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MeasuredRates {
    usual: Option<(u64, Now)>,
    sides: BTreeMap<(NodeName, Side), Known>,
}

/// A node's measured link, as the operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeRate {
    /// The node.
    pub node: NodeName,
    /// What it sends, if that was measured.
    pub up: Option<SideRate>,
    /// What it receives, if that was measured.
    pub down: Option<SideRate>,
}

/// One direction of a node's link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SideRate {
    /// Bytes per second.
    pub bytes_per_s: u64,
    /// If it counts as slow, its share of what is usual, in parts per million.
    pub slow_ppm: Option<u64>,
}

impl NodeRate {
    /// Whether either side counts as slow.
    pub fn is_slow(&self) -> bool {
        let mut sides = [self.up, self.down].into_iter().flatten();
        sides.any(|side| side.slow_ppm.is_some())
    }
}

fn mean(one: u64, other: u64) -> u64 {
    (one / 2).saturating_add(other / 2)
}

fn is_fresh(at: Now, now: Now) -> bool {
    now.since(at) < limits::RATE_AGE_MAX_MS
}

impl MeasuredRates {
    /// Takes in what a session says of its members.
    pub fn learn(&mut self, now: Now, members: &[NodeName], findings: &Bottleneck, weight: Weight) {
        self.sides.retain(|_, known| is_fresh(known.at, now));
        if findings.limit == Limit::Links {
            let before = self.usual(now).filter(|_| weight == Weight::Half);
            let usual = before.map_or(findings.usual, |before| mean(before, findings.usual));
            self.usual = Some((usual.max(1), now));
        }
        for ((member, side), seen) in &findings.sides {
            if let Some(node) = members.get(*member) {
                self.learn_side(now, node, *side, seen, weight);
            }
        }
    }

    fn learn_side(
        &mut self,
        now: Now,
        node: &NodeName,
        side: Side,
        seen: &SideSeen,
        weight: Weight,
    ) {
        let place = (node.clone(), side);
        let is_shared = seen.certainty == Certainty::Shared;
        let fresh = Known {
            bytes_per_s: seen.bytes_per_s,
            share_ppm: seen.share_ppm,
            is_slow: seen.share_ppm <= SLOW_BELOW_PPM,
            is_shared,
            at: now,
        };
        let known = match (self.sides.get(&place), seen.certainty) {
            // A link that had time to spare has no rate; it only clears who is known to be slow.
            (None, Certainty::AtLeast) => return,
            (Some(known), Certainty::AtLeast) if !known.is_slow => return,
            (None, _) => fresh,
            // What was only suspected gives way to what is known.
            (Some(known), _) if known.is_shared && !is_shared => fresh,
            (Some(_), Certainty::Measured | Certainty::Shared) if weight == Weight::Whole => fresh,
            (Some(known), _) => {
                let share_ppm = mean(known.share_ppm, seen.share_ppm);
                Known {
                    bytes_per_s: mean(known.bytes_per_s, seen.bytes_per_s),
                    share_ppm,
                    is_slow: if known.is_slow {
                        share_ppm < SLOW_UNTIL_PPM
                    } else {
                        share_ppm <= SLOW_BELOW_PPM
                    },
                    is_shared: known.is_shared,
                    at: now,
                }
            }
        };
        self.sides.insert(place, known);
    }

    /// What a link that is not slow carries, bytes per second, if links were measured lately.
    pub fn usual(&self, now: Now) -> Option<u64> {
        let (usual, at) = self.usual?;
        is_fresh(at, now).then_some(usual)
    }

    /// Of a side that is slow, its share of the usual rate.
    pub fn slow_ppm(&self, now: Now, node: &NodeName, side: Side) -> Option<u64> {
        let known = self.sides.get(&(node.clone(), side))?;
        (known.is_slow && is_fresh(known.at, now)).then_some(known.share_ppm.max(1))
    }

    /// Whether any side of it is slow.
    pub fn is_slow(&self, now: Now, node: &NodeName) -> bool {
        let mut sides = [Side::Up, Side::Down].into_iter();
        sides.any(|side| self.slow_ppm(now, node, side).is_some())
    }

    /// All that is known, for the operator.
    pub fn nodes(&self, now: Now) -> Vec<NodeRate> {
        let names: BTreeSet<&NodeName> = self.sides.keys().map(|(node, _)| node).collect();
        let side = |node: &NodeName, side| {
            let known = self.sides.get(&(node.clone(), side))?;
            is_fresh(known.at, now).then_some(SideRate {
                bytes_per_s: known.bytes_per_s,
                slow_ppm: self.slow_ppm(now, node, side),
            })
        };
        let node = |node: &NodeName| NodeRate {
            node: node.clone(),
            up: side(node, Side::Up),
            down: side(node, Side::Down),
        };
        let known = |node: &NodeRate| node.up.is_some() || node.down.is_some();
        names.into_iter().map(node).filter(known).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(index: usize) -> NodeName {
        NodeName::new(format!("n{index}")).expect("a name")
    }

    fn members() -> Vec<NodeName> {
        (0..4).map(name).collect()
    }

    fn seen(share: f64, certainty: Certainty) -> Bottleneck {
        let side = SideSeen {
            bytes_per_s: (share * 1e8) as u64,
            share_ppm: (share * WHOLE_PPM as f64) as u64,
            certainty,
        };
        Bottleneck {
            usual: 100_000_000,
            limit: Limit::Links,
            sides: BTreeMap::from([((1, Side::Up), side)]),
        }
    }

    fn after(shares: &[(f64, Certainty)]) -> MeasuredRates {
        let mut rates = MeasuredRates::default();
        for (at, (share, certainty)) in (0..).zip(shares) {
            let findings = seen(*share, *certainty);
            rates.learn(Now(at), &members(), &findings, Weight::Half);
        }
        rates
    }

    #[test]
    fn a_node_does_not_flap_between_slow_and_not() {
        use Certainty::Measured;
        for (shares, is_slow) in [
            (&[(0.1, Measured)][..], true),
            // Once slow, half the usual rate does not clear it, nor does one good session.
            (&[(0.1, Measured), (0.5, Measured)], true),
            (&[(0.1, Measured), (1.0, Measured)], true),
            (&[(0.1, Measured), (1.0, Measured), (1.0, Measured)], false),
            // Once not, half the usual rate or one bad session does not condemn it.
            (&[(0.5, Measured)], false),
            (&[(1.0, Measured), (0.1, Measured)], false),
            (&[(1.0, Measured), (0.1, Measured), (0.1, Measured)], true),
        ] {
            assert_eq!(
                after(shares).is_slow(Now(9), &name(1)),
                is_slow,
                "{shares:?}"
            );
        }
    }

    #[test]
    fn a_link_with_time_to_spare_clears_but_never_condemns() {
        use Certainty::{AtLeast, Measured};
        assert_eq!(after(&[(0.1, AtLeast)]).nodes(Now(1)), []);
        let cleared = after(&[(0.1, Measured), (1.0, AtLeast), (1.0, AtLeast)]);
        assert!(!cleared.is_slow(Now(9), &name(1)));
    }

    #[test]
    fn a_suspicion_gives_way_to_what_is_known() {
        use Certainty::{AtLeast, Shared};
        let suspected = after(&[(0.1, Shared)]);
        assert!(suspected.is_slow(Now(9), &name(1)));
        let cleared = after(&[(0.1, Shared), (0.9, AtLeast)]);
        assert!(!cleared.is_slow(Now(9), &name(1)));
    }

    #[test]
    fn what_was_seen_several_times_in_a_row_counts_at_once() {
        let mut rates = after(&[(1.0, Certainty::Measured)]);
        let findings = seen(0.1, Certainty::Measured);
        rates.learn(Now(5), &members(), &findings, Weight::Whole);
        assert_eq!(rates.slow_ppm(Now(6), &name(1), Side::Up), Some(100_000));
        assert_eq!(rates.slow_ppm(Now(6), &name(1), Side::Down), None);
    }

    #[test]
    fn what_is_old_is_forgotten() {
        let rates = after(&[(0.1, Certainty::Measured)]);
        let late = Now(limits::RATE_AGE_MAX_MS);
        assert!(rates.usual(Now(9)).is_some() && rates.usual(late).is_none());
        assert!(!rates.is_slow(late, &name(1)));
        assert_eq!(rates.nodes(late), []);
    }

    #[test]
    fn a_member_that_is_none_of_the_session_is_not_learned() {
        let mut rates = MeasuredRates::default();
        let findings = seen(0.1, Certainty::Measured);
        rates.learn(Now(0), &members()[..1], &findings, Weight::Half);
        assert_eq!(rates.nodes(Now(0)), []);
    }
}
