//! Refusals in the log. A tenant can bring them about as fast as it asks, and puts words of its own into them: how many
//! lines it gets is bounded by whose socket it uses and what it is refused for, never by what it says.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use storaged_core::{ConnId, Now, Viewer};
use storaged_wire::{Refusal, RefusalCode};

use crate::repeats::{Repeats, numberless};

/// Sentences of one tenant and code that are told apart: enough that one job's trouble seldom hides another's, and few
/// enough that a tenant which varies its words gets only so many lines.
const SENTENCES_MAX: u64 = 16;

/// Who is connected, and what was told of whom. Apart from the lines about nodes, so that no tenant pushes those out.
#[derive(Debug, Default)]
pub(super) struct RefusalLines {
    viewers: BTreeMap<ConnId, Viewer>,
    repeats: Repeats,
}

/// A refusal that is logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RefusalLine {
    /// Who was refused.
    pub whom: String,
    /// How many like it were not told since the last one.
    pub silent: u64,
}

impl RefusalLines {
    pub fn connected(&mut self, conn: ConnId, viewer: Viewer) {
        self.viewers.insert(conn, viewer);
    }

    pub fn forget(&mut self, conn: ConnId) {
        self.viewers.remove(&conn);
    }

    /// Whether a refusal is told now. What everybody meets in the course of things is not.
    pub fn tell(&mut self, conn: ConnId, refusal: &Refusal, now: Now) -> Option<RefusalLine> {
        let is_expected = matches!(
            refusal.code,
            RefusalCode::TimedOut | RefusalCode::Busy | RefusalCode::NoCheckpoint
        );
        if is_expected {
            return None;
        }
        let whom = name(self.viewers.get(&conn));
        let sentence = sentence(&refusal.message);
        let line = format!("{whom} {:?} {sentence}", refusal.code);
        let silent = self.repeats.tell(&line, now)?;
        Some(RefusalLine { whom, silent })
    }
}

/// Clients in the same process say nothing of a socket: they count as the tenant without a name.
fn name(viewer: Option<&Viewer>) -> String {
    match viewer {
        Some(Viewer::Operator) => "an operator".into(),
        Some(Viewer::Tenant(Some(tenant))) => format!("tenant {tenant}"),
        Some(Viewer::Tenant(None) | Viewer::Public) | None => "the tenant without a name".into(),
    }
}

/// Which of so many sentences it counts as.
fn sentence(message: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    numberless(message).hash(&mut hasher);
    hasher.finish() % SENTENCES_MAX
}

#[cfg(test)]
mod tests {
    use storaged_wire::TenantName;

    use super::*;

    fn refusal(message: &str) -> Refusal {
        Refusal::new(RefusalCode::UnknownNamespace, message)
    }

    fn of(tenant: &str) -> Viewer {
        Viewer::Tenant(Some(TenantName::new(tenant).expect("a tenant")))
    }

    /// A word without digits for each number.
    fn word(number: u64) -> String {
        let digits = number.to_string();
        let letters = digits.bytes().map(|digit| char::from(digit - b'0' + b'a'));
        letters.collect()
    }

    #[test]
    fn a_tenant_that_is_refused_thousands_of_times_gets_a_few_lines_and_hides_nobody_elses() {
        let mut lines = RefusalLines::default();
        // It comes with a new connection each time, and asks for another job.
        let mut told = 0;
        for number in 0..20_000 {
            let conn = ConnId(number);
            lines.connected(conn, of("red"));
            let refused = refusal(&format!("nobody knows {}", word(number)));
            told += u64::from(lines.tell(conn, &refused, Now(number / 10)).is_some());
            lines.forget(conn);
        }
        assert!((1..=SENTENCES_MAX).contains(&told), "{told} lines");
        assert!(lines.viewers.is_empty());
        let blue = ConnId(100_000);
        lines.connected(blue, of("blue"));
        let first = lines.tell(blue, &refusal("nobody knows a"), Now(2000));
        let whom = "tenant blue".into();
        assert_eq!(first, Some(RefusalLine { whom, silent: 0 }));
    }

    #[test]
    fn a_refusal_again_and_again_is_told_at_growing_intervals_with_what_was_left_out() {
        let mut lines = RefusalLines::default();
        let tell = |second: u64| {
            let refused = refusal(&format!("slot {second} is not this connection's"));
            lines.tell(ConnId(1), &refused, Now(second * 1000))
        };
        let told: Vec<u64> = (0..60).filter_map(tell).map(|line| line.silent).collect();
        assert_eq!(told, [0, 9, 19]);
    }

    #[test]
    fn what_everybody_meets_in_the_course_of_things_is_not_told() {
        let mut lines = RefusalLines::default();
        let busy = Refusal::new(RefusalCode::Busy, "all slots are in use");
        assert_eq!(lines.tell(ConnId(1), &busy, Now(0)), None);
    }
}
