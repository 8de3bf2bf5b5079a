//! Log lines that come again and again: told at once, then at growing intervals, with the number that was not told. A
//! state that lasts is told once, not once a second for ever.

use std::collections::BTreeMap;
use std::time::Duration;

use storaged_core::Now;

/// The first repetition is told after this time, doubled at each.
const FIRST: Duration = Duration::from_secs(10);
/// The longest silence about something that goes on.
const LONGEST: Duration = Duration::from_secs(3600);
/// Lines that are remembered; with more, those that were told longest ago are forgotten.
const LINES_MAX: usize = 4096;

/// What was told, and when it may be told again.
#[derive(Debug, Default)]
pub struct Repeats {
    lines: BTreeMap<String, Told>,
}

#[derive(Debug)]
struct Told {
    at: Now,
    wait: Duration,
    silent: u64,
}

impl Repeats {
    /// Whether a line is told now; then with how many like it were not told since the last time.
    pub fn tell(&mut self, line: &str, now: Now) -> Option<u64> {
        self.forget(now);
        let Some(told) = self.lines.get_mut(line) else {
            let told = Told {
                at: now,
                wait: FIRST,
                silent: 0,
            };
            self.lines.insert(line.into(), told);
            return Some(0);
        };
        if now.since(told.at) < millis(told.wait) {
            told.silent += 1;
            return None;
        }
        told.at = now;
        told.wait = (told.wait * 2).min(LONGEST);
        Some(std::mem::take(&mut told.silent))
    }

    /// What is over is told at once when it begins again.
    fn forget(&mut self, now: Now) {
        if self.lines.len() < LINES_MAX {
            return;
        }
        self.lines
            .retain(|_, told| now.since(told.at) < 2 * millis(told.wait));
        while self.lines.len() >= LINES_MAX {
            let oldest = self.lines.iter().min_by_key(|(_, told)| told.at);
            let Some(oldest) = oldest.map(|(line, _)| line.clone()) else {
                return;
            };
            self.lines.remove(&oldest);
        }
    }
}

/// A line without its numbers: what a job says of one step after the other is one thing.
pub fn numberless(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_second_for_an_hour_is_told_a_dozen_times() {
        let mut repeats = Repeats::default();
        let times = (0..3600).filter_map(|second| repeats.tell("again", Now(second * 1000)));
        let told: Vec<u64> = times.collect();
        assert_eq!(told[..3], [0, 9, 19]);
        assert!(told.len() < 12, "{told:?}");
        assert_eq!(repeats.tell("another", Now(5)), Some(0));
    }

    #[test]
    fn steps_that_are_given_up_one_after_the_other_are_told_together() {
        let mut repeats = Repeats::default();
        let told = (0..60).filter_map(|step| {
            let reason = format!("step {} of run 1-00aa was protected first", step + 1);
            repeats.tell(&numberless(&reason), Now(step * 1000))
        });
        assert_eq!(told.collect::<Vec<_>>(), [0, 9, 19]);
        let other = numberless("it did not commit within 120 s: missing [\"1\"]");
        assert_eq!(repeats.tell(&other, Now(60_000)), Some(0));
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let mut repeats = Repeats::default();
        for number in 0..3 * LINES_MAX as u64 {
            assert_eq!(repeats.tell(&number.to_string(), Now(number)), Some(0));
        }
        assert!(repeats.lines.len() <= LINES_MAX);
    }
}
