//! Figures beside those of other benches in one file: one flat JSON object, one line per key.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use storaged_bench::net::figures::{Figures, shown};

/// Replaces the figures of these names, and keeps all others in their order.
pub fn put_into(path: &Path, figures: &Figures) -> Result<()> {
    let before = fs::read_to_string(path).unwrap_or_default();
    let after = merged(&before, figures);
    fs::write(path, after).with_context(|| format!("writing {}", path.display()))
}

fn merged(before: &str, figures: &Figures) -> String {
    let key_of = |line: &str| {
        Some(
            line.trim()
                .strip_prefix('"')?
                .split_once("\":")?
                .0
                .to_owned(),
        )
    };
    let is_kept = |line: &&str| key_of(line).is_some_and(|key| figures.get(&key).is_none());
    let kept = before.lines().filter(is_kept);
    let kept = kept.map(|line| line.trim_end_matches(',').to_owned());
    let new = (figures.iter()).map(|(key, value)| format!("  \"{key}\": {}", shown(value)));
    let lines: Vec<String> = kept.chain(new).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_other_benches_stay() {
        let mut figures = Figures::default();
        figures.put("idle", 0.5);
        let first = merged("", &figures);
        assert_eq!(first, "{\n  \"idle\": 0.5000\n}\n");
        let before = "{\n  \"commit_ms\": 1.250,\n  \"idle\": 7.000,\n  \"slope\": 1.0\n}\n";
        let after = "{\n  \"commit_ms\": 1.250,\n  \"slope\": 1.0,\n  \"idle\": 0.5000\n}\n";
        assert_eq!(merged(before, &figures), after);
        assert_eq!(merged(after, &figures), after);
    }
}
