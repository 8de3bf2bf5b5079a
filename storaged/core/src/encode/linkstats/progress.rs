//! What the members of a session that this node leads have said of it, and its links as their receivers saw them.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::NodeName;
use storaged_wire::peer::{LinkTally, MemberTally};
use storaged_wire::shape::EncodeShape;
use thiserror::Error;

use super::bottleneck::{LinkSample, WHOLE_PPM};
use crate::api::Now;
use crate::limits;

/// Why a member's report is not taken.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum ReportError {
    #[error("expected links to members of the session, got one to {0}")]
    NoMember(NodeName),
    #[error("expected one entry per link, got two of the one to {0}")]
    Twice(NodeName),
    #[error("expected at most {expected} {what}, got {got}")]
    TooMuch {
        what: &'static str,
        expected: u64,
        got: u64,
    },
    #[error("expected {what} that only grow, got {got} after {before}")]
    Shrunk {
        what: &'static str,
        before: u64,
        got: u64,
    },
}

/// What a session can come to at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bounds {
    /// Stripes of the lane.
    pub stripes: u64,
    /// Bytes over one link.
    pub bytes: u64,
}

/// A member's reports: at the beginning of the stretch that is looked at, and the newest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Reports {
    first: MemberTally,
    last: MemberTally,
}

/// Whether a member has moved anything between two reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Headway {
    Some,
    None,
}

/// How a session goes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct SessionProgress {
    began_at: Now,
    judged_at: Now,
    /// What it runs in.
    pub shape: Option<EncodeShape>,
    reports: BTreeMap<NodeName, Reports>,
    /// For how many stretches in a row a member was slow.
    strikes: BTreeMap<NodeName, u32>,
}

impl SessionProgress {
    /// Of a session that begins now.
    pub fn begin(now: Now, shape: Option<EncodeShape>) -> Self {
        Self {
            began_at: now,
            judged_at: now,
            shape,
            ..Self::default()
        }
    }

    /// Takes in what a member says, and whether it got on since it said so last.
    ///
    /// # Errors
    /// [`ReportError`] if it cannot be; then it counts for nothing.
    pub fn report(
        &mut self,
        now: Now,
        from: &NodeName,
        members: &[NodeName],
        tally: MemberTally,
        bounds: Bounds,
    ) -> Result<Headway, ReportError> {
        let lasted = now.since(self.began_at) + limits::REPORT_SLACK_MS;
        check(&tally, members, bounds, lasted)?;
        let reports = self.reports.entry(from.clone()).or_default();
        if tally.elapsed_ms < reports.last.elapsed_ms {
            // Its failure got lost with a link, so that it was asked again and runs from the beginning. Held against
            // what it said in the run before, an honest member would be named as one that says what cannot be.
            *reports = Reports {
                first: MemberTally::default(),
                last: tally,
            };
            return Ok(Headway::None);
        }
        grows("stripes", reports.last.stripes, tally.stripes)?;
        for before in &reports.last.links {
            let after = link_to(&tally, &before.node);
            grows("bytes", before.bytes, after.bytes)?;
            grows("milliseconds waiting", before.waiting_ms, after.waiting_ms)?;
        }
        let bytes = |tally: &MemberTally| -> u128 {
            let links = tally.links.iter();
            links.map(|link| u128::from(link.bytes)).sum()
        };
        let before = (reports.last.stripes, bytes(&reports.last));
        let headway = if (tally.stripes, bytes(&tally)) == before {
            Headway::None
        } else {
            Headway::Some
        };
        reports.last = tally;
        Ok(headway)
    }

    /// The links in the stretch since the last one that was judged, once it is long enough; a new stretch begins.
    pub fn stretch(&mut self, now: Now, members: &[NodeName]) -> Option<Vec<LinkSample>> {
        if now.since(self.judged_at) < limits::PACE_STRETCH_MS {
            return None;
        }
        self.judged_at = now;
        let links = self.links(members, |reports| &reports.first);
        for reports in self.reports.values_mut() {
            reports.first = reports.last.clone();
        }
        Some(links)
    }

    /// The links since the session began.
    pub fn whole(&self, members: &[NodeName]) -> Vec<LinkSample> {
        let nothing = MemberTally::default();
        self.links(members, |_| &nothing)
    }

    fn links<'a>(
        &'a self,
        members: &[NodeName],
        since: impl Fn(&'a Reports) -> &'a MemberTally,
    ) -> Vec<LinkSample> {
        let places: BTreeMap<&NodeName, usize> = members.iter().zip(0..).collect();
        let mut links = Vec::new();
        for (to, receiver) in members.iter().enumerate() {
            let Some(reports) = self.reports.get(receiver) else {
                continue;
            };
            for link in &reports.last.links {
                if let Some(from) = places.get(&link.node) {
                    let first = since(reports);
                    links.extend(seen(*from, to, first, &reports.last, &link.node));
                }
            }
        }
        links
    }

    /// Milliseconds since the session began.
    pub fn lasted_ms(&self, now: Now) -> u64 {
        now.since(self.began_at)
    }

    /// Counts these members as slow in one more stretch, and all others as not. Gives those that were so in
    /// [`limits::PACE_STRIKES`] stretches in a row.
    pub fn strike(&mut self, slow: &BTreeSet<NodeName>) -> BTreeSet<NodeName> {
        self.strikes.retain(|node, _| slow.contains(node));
        for node in slow {
            *self.strikes.entry(node.clone()).or_default() += 1;
        }
        let out = self.strikes.iter();
        out.filter(|(_, strikes)| **strikes >= limits::PACE_STRIKES)
            .map(|(node, _)| node.clone())
            .collect()
    }

    /// Milliseconds until `stripes` are done by all of these members, if they go on as they did; none before anything
    /// is done.
    pub fn left_ms<'a>(
        &self,
        stripes: u64,
        members: impl Iterator<Item = &'a NodeName>,
    ) -> Option<u64> {
        let reports: Option<Vec<&Reports>> = members.map(|node| self.reports.get(node)).collect();
        let slowest = reports?
            .into_iter()
            .min_by_key(|reports| reports.last.stripes)?;
        let done = slowest.last.stripes;
        let left = u128::from(stripes.saturating_sub(done)) * u128::from(slowest.last.elapsed_ms);
        (done > 0).then(|| u64::try_from(left / u128::from(done)).unwrap_or(u64::MAX))
    }
}

fn check(
    tally: &MemberTally,
    members: &[NodeName],
    bounds: Bounds,
    lasted_ms: u64,
) -> Result<(), ReportError> {
    at_most(
        "milliseconds since the session began",
        lasted_ms,
        tally.elapsed_ms,
    )?;
    at_most("stripes", bounds.stripes, tally.stripes)?;
    let mut named = BTreeSet::new();
    for link in &tally.links {
        if !members.contains(&link.node) {
            return Err(ReportError::NoMember(link.node.clone()));
        }
        if !named.insert(&link.node) {
            return Err(ReportError::Twice(link.node.clone()));
        }
        at_most("bytes over a link", bounds.bytes, link.bytes)?;
        at_most("milliseconds waiting", lasted_ms, link.waiting_ms)?;
    }
    Ok(())
}

fn at_most(what: &'static str, expected: u64, got: u64) -> Result<(), ReportError> {
    let error = ReportError::TooMuch {
        what,
        expected,
        got,
    };
    (got <= expected).then_some(()).ok_or(error)
}

fn grows(what: &'static str, before: u64, got: u64) -> Result<(), ReportError> {
    let error = ReportError::Shrunk { what, before, got };
    (before <= got).then_some(()).ok_or(error)
}

/// What a member says of its link to a neighbour; nothing is as good as zeros.
fn link_to(tally: &MemberTally, node: &NodeName) -> LinkTally {
    let found = tally.links.iter().find(|link| link.node == *node);
    found.cloned().unwrap_or_else(|| LinkTally {
        node: node.clone(),
        bytes: 0,
        waiting_ms: 0,
    })
}

/// One link, by what its receiver said at the beginning and the end of a stretch; none if nothing came over it, or the
/// reports are too close to each other.
fn seen(
    from: usize,
    to: usize,
    first: &MemberTally,
    last: &MemberTally,
    sender: &NodeName,
) -> Option<LinkSample> {
    let elapsed_ms = last.elapsed_ms - first.elapsed_ms;
    let (before, after) = (link_to(first, sender), link_to(last, sender));
    if elapsed_ms < limits::EVIDENCE_MS_MIN || after.bytes == 0 {
        return None;
    }
    let waited_ms = (after.waiting_ms - before.waiting_ms).min(elapsed_ms);
    Some(LinkSample {
        from,
        to,
        bytes_per_s: (after.bytes - before.bytes).saturating_mul(1000) / elapsed_ms,
        saturated_ppm: waited_ms * WHOLE_PPM / elapsed_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        stripes: 100,
        bytes: 1 << 30,
    };

    fn name(index: usize) -> NodeName {
        NodeName::new(format!("n{index}")).expect("a name")
    }

    fn members() -> Vec<NodeName> {
        (0..3).map(name).collect()
    }

    fn link(node: usize, bytes: u64, waiting_ms: u64) -> LinkTally {
        LinkTally {
            node: name(node),
            bytes,
            waiting_ms,
        }
    }

    fn tally(elapsed_ms: u64, stripes: u64, links: Vec<LinkTally>) -> MemberTally {
        MemberTally {
            elapsed_ms,
            stripes,
            links,
        }
    }

    fn report(
        pace: &mut SessionProgress,
        now: u64,
        from: usize,
        tally: MemberTally,
    ) -> Result<Headway, ReportError> {
        pace.report(Now(now), &name(from), &members(), tally, BOUNDS)
    }

    #[test]
    fn a_link_is_as_saturated_as_its_receiver_waits_for_what_has_begun_to_come() {
        let mut pace = SessionProgress::begin(Now(0), None);
        let of_n1 = tally(2000, 3, vec![link(0, 8000, 1000)]);
        report(&mut pace, 2000, 1, of_n1).expect("a report");
        let seen = |from, to, bytes_per_s, saturated_ppm| LinkSample {
            from,
            to,
            bytes_per_s,
            saturated_ppm,
        };
        assert_eq!(pace.whole(&members()), [seen(0, 1, 4000, 500_000)]);
        let of_n2 = tally(1000, 2, vec![link(1, 1000, 1000), link(0, 0, 0)]);
        report(&mut pace, 2000, 2, of_n2).expect("a report");
        let both = [seen(0, 1, 4000, 500_000), seen(1, 2, 1000, WHOLE_PPM)];
        assert_eq!(pace.whole(&members()), both);
        let left = pace.left_ms(12, [name(1), name(2)].iter());
        assert_eq!(left, Some(5000));
        assert_eq!(pace.left_ms(12, [name(7)].iter()), None);
        // A stretch is what came since the last one was judged.
        assert_eq!(pace.stretch(Now(1999), &members()), None);
        assert_eq!(pace.stretch(Now(2000), &members()), Some(both.to_vec()));
        let of_n1 = tally(4000, 9, vec![link(0, 10_000, 1200)]);
        report(&mut pace, 4000, 1, of_n1).expect("a report");
        let second = pace.stretch(Now(4000), &members());
        assert_eq!(second, Some(vec![seen(0, 1, 1000, 100_000)]));
    }

    #[test]
    fn the_reports_of_a_member_that_ran_the_session_again_begin_anew() {
        let mut pace = SessionProgress::begin(Now(0), None);
        let first = tally(3000, 7, vec![link(0, 9000, 2000), link(2, 10, 0)]);
        assert_eq!(report(&mut pace, 3000, 1, first), Ok(Headway::Some));
        pace.stretch(Now(3000), &members()).expect("a stretch");
        // Its failure got lost with a link: it was asked again, and runs from the beginning.
        let again =
            |elapsed_ms, stripes, bytes| tally(elapsed_ms, stripes, vec![link(0, bytes, 0)]);
        let began_anew = report(&mut pace, 4000, 1, again(100, 1, 500));
        assert_eq!(began_anew, Ok(Headway::None));
        let went_on = report(&mut pace, 6000, 1, again(2100, 2, 4200));
        assert_eq!(went_on, Ok(Headway::Some));
        let links = pace.stretch(Now(6000), &members()).expect("a stretch");
        let rates: Vec<u64> = links.iter().map(|link| link.bytes_per_s).collect();
        assert_eq!(rates, [2000]);
        // Within one run nothing shrinks.
        let shrunk = report(&mut pace, 7000, 1, again(3100, 1, 4200));
        assert!(
            matches!(shrunk, Err(ReportError::Shrunk { .. })),
            "{shrunk:?}"
        );
    }

    #[test]
    fn headway_is_bytes_or_stripes_that_moved_and_not_time_that_went_by() {
        let mut pace = SessionProgress::begin(Now(0), None);
        let mut says = |now, stripes, bytes| {
            let tally = tally(now, stripes, vec![link(1, bytes, 0)]);
            report(&mut pace, now, 0, tally)
        };
        assert_eq!(says(1000, 0, 500), Ok(Headway::Some));
        assert_eq!(says(2000, 0, 500), Ok(Headway::None));
        assert_eq!(says(3000, 1, 500), Ok(Headway::Some));
    }

    #[test]
    fn what_cannot_be_counts_for_nothing() {
        let good = || tally(1000, 5, vec![link(1, 500, 800)]);
        let spoilt = |spoil: &dyn Fn(&mut MemberTally)| {
            let mut pace = SessionProgress::begin(Now(0), None);
            report(&mut pace, 1000, 0, good()).expect("a good one");
            let mut bad = good();
            spoil(&mut bad);
            let before = pace.clone();
            let refused = report(&mut pace, 1000, 0, bad).expect_err("a bad one");
            assert_eq!(pace, before);
            refused.to_string()
        };
        type Spoil<'a> = &'a dyn Fn(&mut MemberTally);
        let cases: [(Spoil<'_>, &str); 9] = [
            (
                &|t| t.elapsed_ms = u64::MAX,
                "milliseconds since the session",
            ),
            (&|t| t.stripes = 101, "at most 100 stripes, got 101"),
            (&|t| t.stripes = 4, "stripes that only grow, got 4 after 5"),
            (&|t| t.links[0].bytes = u64::MAX, "bytes over a link"),
            (
                &|t| t.links[0].waiting_ms = u64::MAX,
                "milliseconds waiting",
            ),
            (&|t| t.links[0].bytes = 1, "bytes that only grow, got 1"),
            (
                &|t| t.links.clear(),
                "bytes that only grow, got 0 after 500",
            ),
            (
                &|t| t.links.push(t.links[0].clone()),
                "two of the one to n1",
            ),
            (&|t| t.links[0].node = name(9), "got one to n9"),
        ];
        for (spoil, expected) in cases {
            let refused = spoilt(spoil);
            assert!(refused.contains(expected), "{refused:?}, not {expected:?}");
        }
    }

    #[test]
    fn a_member_is_out_after_as_many_stretches_in_a_row_as_it_takes() {
        let mut pace = SessionProgress::begin(Now(0), None);
        let slow = BTreeSet::from([name(1)]);
        for _ in 1..limits::PACE_STRIKES {
            assert!(pace.strike(&slow).is_empty());
        }
        assert_eq!(pace.strike(&slow), slow);
        // One stretch without it, and it begins anew.
        assert!(pace.strike(&BTreeSet::new()).is_empty());
        assert!(pace.strike(&slow).is_empty());
    }
}
