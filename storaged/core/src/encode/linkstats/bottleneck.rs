//! What held a session up: from what the receivers of all links saw, the rates that the members' links really carried,
//! and whose link is to blame, if it is one or a few.
//!
//! A link is *saturated* for the share of the time in which its receiver waited for a block that had begun to come: then
//! the link carries what it can. Before a slow link blocks wait for room, whole, in the memory of the next hop; behind
//! it receivers wait, but for blocks that have not begun to come. So a slow link among others is the only saturated one,
//! and what the others carry while they are saturated is how fast they are. Where every link is as fast as every other
//! all of them are saturated, and nobody is to blame; where processors set the pace, none is.

use std::collections::{BTreeMap, BTreeSet};

/// Parts per million that are the whole.
pub(super) const WHOLE_PPM: u64 = 1_000_000;
/// A link that is saturated for this share of the time sets the pace.
const SATURATED_PPM: u64 = 600_000;
/// So are, together, the links of one node that share one side of it, if that side is busy for this share of the time;
const SIDE_SATURATED_PPM: u64 = 900_000;
/// of them those that are so many times as busy as is usual, and at least so busy.
const SIDE_TIMES: u64 = 3;
const SIDE_PPM_MIN: u64 = 100_000;
/// Shares below this are taken for it: how much faster an idle link could go is not known from its being idle.
const SATURATED_PPM_MIN: u64 = WHOLE_PPM / 16;
/// So much busier than is usual are the other links of the node whose link is the slow one of two.
const TELLING_PPM: u64 = 150_000;

/// One link of a session's plan in a stretch of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LinkSample {
    /// Sending member.
    pub from: usize,
    /// Receiving member.
    pub to: usize,
    /// What came through.
    pub bytes_per_s: u64,
    /// Share of the time in which its receiver waited for a block on its way.
    pub saturated_ppm: u64,
}

/// A direction of a node's link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Side {
    Up,
    Down,
}

/// How much a figure says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Certainty {
    /// Something else set the pace: the link carries about this or more.
    AtLeast,
    /// This node's link, or the neighbour's on the other end, carries no more.
    Shared,
    /// It was saturated: this is what it carries.
    Measured,
}

/// What one side of a member's link carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SideSeen {
    pub bytes_per_s: u64,
    /// Of what is usual among the other members.
    pub share_ppm: u64,
    pub certainty: Certainty,
}

/// What a session says of its members' links.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Bottleneck {
    /// The median of what the members that are not to blame carry, bytes per second.
    pub usual: u64,
    /// Whether links set the pace.
    pub limit: Limit,
    pub sides: BTreeMap<(usize, Side), SideSeen>,
}

/// What set a session's pace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Limit {
    Links,
    SomethingElse,
}

/// Judges the links of a session. `known_slow` are members that were found slow before: of two that may be to blame
/// it is that one. None if there is nothing to compare.
pub(crate) fn findings(links: &[LinkSample], known_slow: &BTreeSet<usize>) -> Option<Bottleneck> {
    let blamed = blamed(links, known_slow);
    let mut carried = carried(links, &blamed);
    let mut usual = median(&carried, &blamed);
    if usual.is_none() {
        // All links have somebody to blame on them: there is nobody to compare with, so they are as they are.
        carried = self::carried(links, &BTreeMap::new());
        usual = median(&carried, &BTreeMap::new());
    }
    let usual = usual.filter(|rate| *rate > 0)?;
    let share = |rate: u64| {
        let share = u128::from(rate) * u128::from(WHOLE_PPM) / u128::from(usual);
        u64::try_from(share).unwrap_or(u64::MAX).min(WHOLE_PPM)
    };
    let seen = |(at, (bytes_per_s, certainty)): ((usize, Side), (u64, Certainty))| {
        let side = SideSeen {
            bytes_per_s,
            share_ppm: share(bytes_per_s),
            certainty,
        };
        (at, side)
    };
    let limit = if saturated(links).is_empty() {
        Limit::SomethingElse
    } else {
        Limit::Links
    };
    Some(Bottleneck {
        usual,
        limit,
        sides: carried.into_iter().map(seen).collect(),
    })
}

/// Links that set the pace. A node that sends to many sends one block after the other or a bit of each in turn: of a slow
/// one each link is busy for a part of the time only, or all are all the time.
fn saturated(links: &[LinkSample]) -> Vec<LinkSample> {
    let mut sides: BTreeMap<(usize, Side), u64> = BTreeMap::new();
    for link in links {
        for side in [(link.from, Side::Up), (link.to, Side::Down)] {
            let busy = sides.entry(side).or_default();
            *busy = busy.saturating_add(link.saturated_ppm);
        }
    }
    let telling = (SIDE_TIMES.saturating_mul(usual_ppm(links))).max(SIDE_PPM_MIN);
    let is_saturated = |link: &&LinkSample| {
        let side = sides[&(link.from, Side::Up)].max(sides[&(link.to, Side::Down)]);
        link.saturated_ppm >= SATURATED_PPM
            || (side >= SIDE_SATURATED_PPM && link.saturated_ppm >= telling)
    };
    links.iter().filter(is_saturated).copied().collect()
}

/// How busy links usually are: the median, the lower one of two in the middle.
fn usual_ppm(links: &[LinkSample]) -> u64 {
    let mut shares: Vec<u64> = links.iter().map(|link| link.saturated_ppm).collect();
    shares.sort_unstable();
    let middle = shares.len().saturating_sub(1) / 2;
    shares.get(middle).copied().unwrap_or(0)
}

fn touches(link: &LinkSample, member: usize) -> bool {
    link.from == member || link.to == member
}

type Blamed = BTreeMap<usize, Certainty>;

/// The fewest members that all saturated links touch; none if those are more than a few, for then every link is as
/// slow as every other.
fn blamed(links: &[LinkSample], known_slow: &BTreeSet<usize>) -> Blamed {
    let members: BTreeSet<usize> = links.iter().flat_map(|l| [l.from, l.to]).collect();
    let rounds = (members.len() / 4).max(1);
    let mut blamed = Blamed::new();
    let mut left = saturated(links);
    for _ in 0..rounds {
        if left.is_empty() {
            break;
        }
        blamed.extend(worst(&left, links, known_slow));
        left.retain(|link| !blamed.keys().any(|member| touches(link, *member)));
    }
    if left.is_empty() {
        blamed
    } else {
        Blamed::new()
    }
}

/// Who is on most of these saturated links. Of the two on one link it is the one that is known, or whose other links
/// are busier than is usual; if neither tells, both may be.
fn worst(left: &[LinkSample], all: &[LinkSample], known_slow: &BTreeSet<usize>) -> Blamed {
    let mut on: BTreeMap<usize, usize> = BTreeMap::new();
    for link in left {
        *on.entry(link.from).or_default() += 1;
        *on.entry(link.to).or_default() += 1;
    }
    let most = on.values().copied().max().unwrap_or(0);
    let is_worst = |member: &usize| on.get(member) == Some(&most);
    let of_worst = |link: &&LinkSample| is_worst(&link.from) || is_worst(&link.to);
    let fullest = left.iter().filter(of_worst);
    let Some(fullest) = fullest.max_by_key(|link| link.saturated_ppm) else {
        return Blamed::new();
    };
    let mut ends: Vec<usize> = [fullest.from, fullest.to].into_iter().collect();
    ends.retain(is_worst);
    if let Some(known) = only(&ends, |end| known_slow.contains(end)) {
        return Blamed::from([(known, Certainty::Measured)]);
    }
    let usual = usual_ppm(all);
    let nearly = |member: &usize| -> u64 {
        let others = all
            .iter()
            .filter(|link| touches(link, *member) && *link != fullest);
        let more = others.map(|link| link.saturated_ppm.saturating_sub(usual));
        more.fold(0, u64::saturating_add)
    };
    ends.sort_by_key(|end| std::cmp::Reverse(nearly(end)));
    match ends[..] {
        [one] => Blamed::from([(one, Certainty::Measured)]),
        [more, less] if nearly(&more) >= nearly(&less) + TELLING_PPM => {
            Blamed::from([(more, Certainty::Measured)])
        }
        _ => ends.iter().map(|end| (*end, Certainty::Shared)).collect(),
    }
}

/// The one of these that is so, if it is one.
fn only(ends: &[usize], is_so: impl Fn(&usize) -> bool) -> Option<usize> {
    let mut such = ends.iter().filter(|end| is_so(end));
    match (such.next(), such.next()) {
        (Some(one), None) => Some(*one),
        _ => None,
    }
}

/// What each side of each member's link carries: of the blamed all of it, of the others what does not go to a blamed
/// one, for that says nothing of them.
fn carried(links: &[LinkSample], blamed: &Blamed) -> BTreeMap<(usize, Side), (u64, Certainty)> {
    let full = saturated(links)
        .into_iter()
        .map(|link| (link.from, link.to));
    let full: BTreeSet<(usize, usize)> = full.collect();
    let mut sums: BTreeMap<(usize, Side), Carried> = BTreeMap::new();
    for link in links {
        for (member, side, other) in [
            (link.from, Side::Up, link.to),
            (link.to, Side::Down, link.from),
        ] {
            if blamed.contains_key(&member) || !blamed.contains_key(&other) {
                let sum = sums.entry((member, side)).or_default();
                sum.bytes_per_s = sum.bytes_per_s.saturating_add(link.bytes_per_s);
                sum.busy_ppm = sum.busy_ppm.saturating_add(link.saturated_ppm);
                sum.busiest_ppm = sum.busiest_ppm.max(link.saturated_ppm);
                sum.is_full |= full.contains(&(link.from, link.to));
            }
        }
    }
    let rate = |((member, side), sum): ((usize, Side), Carried)| {
        let certainty = if sum.is_full {
            blamed.get(&member).copied().unwrap_or(Certainty::Measured)
        } else {
            Certainty::AtLeast
        };
        // A side with time to spare is as busy as its busiest link at least.
        let busy = if sum.is_full {
            sum.busy_ppm
        } else {
            sum.busiest_ppm
        };
        let busy = busy.clamp(SATURATED_PPM_MIN, WHOLE_PPM);
        let rate = u128::from(sum.bytes_per_s) * u128::from(WHOLE_PPM) / u128::from(busy);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        ((member, side), (rate, certainty))
    };
    sums.into_iter().map(rate).collect()
}

/// What goes over one side of a member's link.
#[derive(Debug, Clone, Copy, Default)]
struct Carried {
    bytes_per_s: u64,
    busy_ppm: u64,
    busiest_ppm: u64,
    is_full: bool,
}

/// Of those not to blame; the lower one of two in the middle.
fn median(carried: &BTreeMap<(usize, Side), (u64, Certainty)>, blamed: &Blamed) -> Option<u64> {
    let free = carried
        .iter()
        .filter(|((member, _), _)| !blamed.contains_key(member));
    let mut rates: Vec<u64> = free.map(|(_, (rate, _))| *rate).collect();
    rates.sort_unstable();
    rates.get(rates.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1_000_000;

    fn link(from: usize, to: usize, saturated: f64) -> LinkSample {
        LinkSample {
            from,
            to,
            bytes_per_s: RATE,
            saturated_ppm: (saturated * WHOLE_PPM as f64) as u64,
        }
    }

    /// A chain of members 0, 1, 2 and so on, whose links are saturated for these shares of the time.
    fn chain(saturated: &[f64]) -> Vec<LinkSample> {
        let links = saturated.iter().enumerate();
        links.map(|(at, share)| link(at, at + 1, *share)).collect()
    }

    fn judged(links: &[LinkSample]) -> Bottleneck {
        findings(links, &BTreeSet::new()).expect("findings")
    }

    fn slow(findings: &Bottleneck) -> Vec<(usize, Side, Certainty)> {
        let sides = findings.sides.iter();
        let slow = sides.filter(|(_, seen)| {
            seen.share_ppm < WHOLE_PPM / 3 && seen.certainty != Certainty::AtLeast
        });
        slow.map(|((member, side), seen)| (*member, *side, seen.certainty))
            .collect()
    }

    #[test]
    fn a_node_whose_link_is_slow_both_ways_is_found_in_a_chain() {
        let findings = judged(&chain(&[0.05, 0.1, 0.98, 0.9, 0.05, 0.1]));
        assert_eq!(findings.limit, Limit::Links);
        let both = [
            (3, Side::Up, Certainty::Measured),
            (3, Side::Down, Certainty::Measured),
        ];
        assert_eq!(slow(&findings), both);
        // What it carries is what came through; the others could go about ten times as fast.
        assert!(findings.sides[&(3, Side::Down)].bytes_per_s < RATE * 11 / 10);
        assert!(findings.usual >= 10 * RATE, "{}", findings.usual);
    }

    #[test]
    fn one_slow_link_is_of_one_of_two_unless_something_tells() {
        let links = chain(&[0.05, 0.1, 0.98, 0.1, 0.05]);
        let either = [
            (2, Side::Up, Certainty::Shared),
            (3, Side::Down, Certainty::Shared),
        ];
        assert_eq!(slow(&judged(&links)), either);
        // Whoever was slow before is slow again.
        let known = findings(&links, &BTreeSet::from([3])).expect("findings");
        assert_eq!(slow(&known), [(3, Side::Down, Certainty::Measured)]);
        // Or the one whose other link is busier than is usual.
        let nearly = judged(&chain(&[0.05, 0.1, 0.98, 0.5, 0.05]));
        assert_eq!(slow(&nearly), [(3, Side::Down, Certainty::Measured)]);
    }

    #[test]
    fn links_that_are_all_alike_have_nobody_to_blame() {
        for links in [
            chain(&[0.9; 9]),
            chain(&[0.9, 0.9]),
            chain(&[0.7, 0.9, 0.8]),
        ] {
            let findings = judged(&links);
            assert_eq!(slow(&findings), []);
            assert!((RATE..=RATE * 2).contains(&findings.usual));
            assert!(
                findings
                    .sides
                    .values()
                    .any(|seen| seen.certainty == Certainty::Measured)
            );
        }
    }

    #[test]
    fn where_processors_set_the_pace_no_link_is_measured() {
        let findings = judged(&chain(&[0.1, 0.3, 0.05, 0.2]));
        assert_eq!(findings.limit, Limit::SomethingElse);
        let mut seen = findings.sides.values();
        assert!(seen.all(|seen| seen.certainty == Certainty::AtLeast));
    }

    #[test]
    fn a_slow_node_is_found_in_a_gather() {
        let all = (0..8).flat_map(|from| (0..8).map(move |to| (from, to)));
        let links: Vec<LinkSample> = all
            .filter(|(from, to)| from != to)
            .map(|(from, to)| {
                if from == 5 {
                    link(from, to, 0.95)
                } else {
                    link(from, to, 0.1)
                }
            })
            .collect();
        let findings = judged(&links);
        assert_eq!(slow(&findings), [(5, Side::Up, Certainty::Measured)]);
    }

    #[test]
    fn so_it_is_where_each_of_its_links_is_busy_in_its_turn() {
        let all = (0..8).flat_map(|from| (0..8).map(move |to| (from, to)));
        let links: Vec<LinkSample> = all
            .filter(|(from, to)| from != to)
            .map(|(from, to)| match (from, to) {
                (5, _) => link(from, to, 0.3),
                (_, 5) => link(from, to, 0.2),
                _ => link(from, to, 0.02),
            })
            .collect();
        let both = [
            (5, Side::Up, Certainty::Measured),
            (5, Side::Down, Certainty::Measured),
        ];
        let findings = judged(&links);
        assert_eq!(slow(&findings), both);
        // Seven links, busy all the time together.
        assert_eq!(findings.sides[&(5, Side::Up)].bytes_per_s, 7 * RATE);
    }

    #[test]
    fn the_first_of_a_chain_is_not_told_from_the_second() {
        // What goes through the rest is all alike, and says nothing of either.
        let links = chain(&[1.0, 0.30, 0.30, 0.29, 0.29, 0.28]);
        let either = [
            (0, Side::Up, Certainty::Shared),
            (1, Side::Down, Certainty::Shared),
        ];
        assert_eq!(slow(&judged(&links)), either);
    }

    #[test]
    fn two_slow_nodes_of_many_are_both_found() {
        let mut links = chain(&[0.05; 11]);
        for at in [2, 3, 7, 8] {
            links[at].saturated_ppm = 900_000;
        }
        let members: BTreeSet<usize> = slow(&judged(&links)).iter().map(|slow| slow.0).collect();
        assert_eq!(members, BTreeSet::from([3, 8]));
    }

    #[test]
    fn nonsense_is_judged_without_harm() {
        assert_eq!(findings(&[], &BTreeSet::new()), None);
        let nothing = LinkSample {
            bytes_per_s: 0,
            ..link(0, 1, 1.0)
        };
        assert_eq!(findings(&[nothing], &BTreeSet::new()), None);
        let most = LinkSample {
            bytes_per_s: u64::MAX,
            saturated_ppm: u64::MAX,
            ..link(1, 1, 0.0)
        };
        let judged = judged(&[most, most, link(1, 2, 0.0)]);
        let mut shares = judged.sides.values().map(|seen| seen.share_ppm);
        assert!(shares.all(|share| share <= WHOLE_PPM));
    }
}
