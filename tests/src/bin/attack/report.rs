//! Figures and what was seen, as they are printed and written.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::honest::Count;

const MIB: f64 = (1 << 20) as f64;

/// What a figure should be.
enum Mark {
    AtLeast(f64),
    AtMost(f64),
}

const MARKS: [(&str, Mark); 5] = [
    ("rss_over_budget_mib_max", Mark::AtMost(64.0)),
    ("honest_saves_during_attacks_share", Mark::AtLeast(0.95)),
    ("status_p99_ms_during_attacks", Mark::AtMost(20.0)),
    ("cross_tenant_operations_possible", Mark::AtMost(0.0)),
    ("daemon_aborts", Mark::AtMost(0.0)),
];

/// How an attack ended.
pub struct Outcome {
    pub name: &'static str,
    /// What the hostile side saw, or why nothing more came of it.
    pub seen: String,
    /// What was broken; nothing, and the attack was held.
    pub fell: Vec<String>,
    /// The most that any daemon had of memory of its own above what it had at rest, in bytes.
    pub memory: u64,
    /// Of the honest job.
    pub saves: Count,
    /// Answers to `status` on the operator's socket.
    pub status: Vec<Duration>,
    /// Daemons that are not there any more.
    pub aborts: usize,
}

/// All attacks that were run.
#[derive(Default)]
pub struct Report {
    outcomes: Vec<Outcome>,
    /// Between two tenants: what each operation came to.
    crossed: BTreeMap<&'static str, Option<String>>,
    /// Answers to `status` before the first attack.
    rest: Vec<Duration>,
}

/// The time that 99 of 100 are within, in milliseconds.
fn p99_ms(times: impl IntoIterator<Item = Duration>) -> f64 {
    let mut times: Vec<Duration> = times.into_iter().collect();
    times.sort_unstable();
    let at = (times.len() * 99).div_ceil(100).saturating_sub(1);
    times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

impl Report {
    pub fn rested(&mut self, status: Vec<Duration>) {
        self.rest.extend(status);
    }

    pub fn add(&mut self, outcome: Outcome) {
        let verdict = verdict(&outcome);
        let (memory, saves) = (outcome.memory as f64 / MIB, &outcome.saves);
        println!(
            "{}: {verdict}\n    +{memory:.1} MiB, {} of {} saves in time, status p99 {:.0} ms",
            outcome.name,
            saves.in_time,
            saves.tried,
            p99_ms(outcome.status.iter().copied())
        );
        self.outcomes.push(outcome);
    }

    pub fn cross(&mut self, operation: &'static str, came_to: Option<String>) {
        let what = came_to.as_deref().unwrap_or("refused");
        println!("between tenants, {operation}: {what}");
        self.crossed.insert(operation, came_to);
    }

    fn figures(&self) -> BTreeMap<String, f64> {
        let all = || self.outcomes.iter();
        let sum = |count: fn(&Outcome) -> u64| all().map(count).sum::<u64>() as f64;
        let tried = sum(|it| it.saves.tried);
        let most = all().map(|it| it.memory).max().unwrap_or_default();
        let times = all().flat_map(|it| it.status.iter().copied());
        let worst = all().map(|it| p99_ms(it.status.iter().copied()));
        let mut figures = BTreeMap::from([
            ("attacks", self.outcomes.len() as f64),
            ("attacks_held", sum(|it| u64::from(it.fell.is_empty()))),
            ("rss_over_budget_mib_max", most as f64 / MIB),
            ("honest_saves_during_attacks", tried),
            (
                "honest_saves_during_attacks_share",
                sum(|it| it.saves.in_time) / tried.max(1.0),
            ),
            ("status_p99_ms_during_attacks", p99_ms(times)),
            ("status_p99_ms_in_worst_attack", worst.fold(0.0, f64::max)),
            ("status_p99_ms_at_rest", p99_ms(self.rest.iter().copied())),
            ("daemon_aborts", sum(|it| it.aborts as u64)),
        ]);
        if !self.crossed.is_empty() {
            let possible = self.crossed.values().flatten().count();
            let tried = self.crossed.len();
            figures.insert("cross_tenant_operations_tried", tried as f64);
            figures.insert("cross_tenant_operations_possible", possible as f64);
        }
        let owned = figures.into_iter();
        owned.map(|(key, figure)| (key.into(), figure)).collect()
    }

    pub fn print(&self) {
        let figures = self.figures();
        for (key, figure) in &figures {
            println!("{key} {figure:.3}");
        }
        for (key, mark) in MARKS {
            let Some(&got) = figures.get(key) else {
                continue;
            };
            let (is_met, mark) = match mark {
                Mark::AtLeast(least) => (got >= least, format!("at least {least}")),
                Mark::AtMost(most) => (got <= most, format!("at most {most}")),
            };
            let how = if is_met { "met" } else { "MISSED" };
            println!("{key}: {mark}, {how}");
        }
    }

    /// Replaces the keys that were measured; those of others stay.
    ///
    /// # Errors
    /// If the file is no object, or cannot be written.
    pub fn write(&self, file: &Path) -> Result<()> {
        let known = std::fs::read_to_string(file).unwrap_or_else(|_| "{}".into());
        let mut known: BTreeMap<String, Value> = serde_json::from_str(&known)?;
        for (key, figure) in self.figures() {
            known.insert(key, rounded(figure));
        }
        for outcome in &self.outcomes {
            let name = outcome.name;
            known.insert(format!("attack_{name}"), verdict(outcome).into());
            for (what, figure) in outcome.costs() {
                known.insert(format!("attack_{name}_{what}"), rounded(figure));
            }
        }
        for (operation, came_to) in &self.crossed {
            let what = came_to.clone().unwrap_or_else(|| "refused".into());
            known.insert(format!("cross_tenant_{operation}"), what.into());
        }
        known.insert("machine".into(), machine().into());
        let text = serde_json::to_string_pretty(&known)? + "\n";
        std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
    }

    /// # Errors
    /// If an attack was not held, or one tenant reached another.
    pub fn check(&self) -> Result<()> {
        let fallen = self.outcomes.iter().filter(|it| !it.fell.is_empty());
        let fallen: Vec<&str> = fallen.map(|it| it.name).collect();
        let crossed = self.crossed.iter().filter(|(_, it)| it.is_some());
        let crossed: Vec<&str> = crossed.map(|(operation, _)| *operation).collect();
        ensure!(
            fallen.is_empty() && crossed.is_empty(),
            "attacks that were not held: {fallen:?}; possible between tenants: {crossed:?}"
        );
        Ok(())
    }
}

impl Outcome {
    /// What it cost, by key.
    fn costs(&self) -> [(&'static str, f64); 2] {
        let p99 = p99_ms(self.status.iter().copied());
        [("mib", self.memory as f64 / MIB), ("p99_ms", p99)]
    }
}

fn rounded(figure: f64) -> Value {
    ((figure * 1000.0).round() / 1000.0).into()
}

fn verdict(outcome: &Outcome) -> String {
    let how = match outcome.fell.as_slice() {
        [] => "held".to_owned(),
        fell => format!("FELL: {}", fell.join("; ")),
    };
    format!("{how}; {}", outcome.seen)
}

fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = text.lines();
    let model = lines.find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    format!("{model}, {cores} cores")
}
