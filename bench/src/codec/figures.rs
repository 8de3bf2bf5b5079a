//! Numbers from measurements, under the names that the table, the plot and others look them up by: rates as
//! `CASE_NAME_gbps` and `CASE_NAME_best_gbps`, ratios of our engine as `CASE_vs_NAME`; `_two_cores` at the end where
//! two cores worked.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::contender::{MEMCPY, NAMES};
use super::measure::Series;

/// What stands at the end of a key, for one core and for two.
pub const SUFFIXES: [&str; 2] = ["", "_two_cores"];

/// The contender that is measured by itself, because one build has the crate either with its C kernels or without.
const APART: &str = "rse_default";

/// Numbers by name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Figures(BTreeMap<String, f64>);

impl Figures {
    /// Rates of all, and ratios of `ours` to all that are not engines of ours; where `ours` did not take part, of
    /// all to memcpy. A ratio is the median of the ratios within each round.
    pub fn of(series: &[Series], ours: &str) -> Self {
        let mut figures = Self::default();
        for one in series {
            let (case, name) = (one.case, one.name);
            let suffix = suffix(one.cores);
            figures.put(
                format!("{case}_{name}_gbps{suffix}"),
                median(&one.rates) / 1e9,
            );
            figures.put(
                format!("{case}_{name}_best_gbps{suffix}"),
                best(&one.rates) / 1e9,
            );
            let beside = |name: &str| {
                let mut all = series.iter();
                all.find(|other| {
                    other.name == name && other.case == case && other.cores == one.cores
                })
            };
            match (beside(ours), beside(MEMCPY)) {
                (Some(first), _) if !is_ours(name) => {
                    figures.put(format!("{case}_vs_{name}{suffix}"), ratio(first, one));
                }
                (None, Some(memcpy)) if name != MEMCPY => {
                    let key = format!("{case}_{name}_vs_{MEMCPY}{suffix}");
                    figures.put(key, ratio(one, memcpy));
                }
                _ => {}
            }
        }
        figures
    }

    /// The number of this name.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.0.get(key).copied()
    }

    /// Takes in the figures of the contender that was measured in another run, with memcpy beside it both times: how
    /// our engine compares to it follows from how both compare to memcpy.
    pub fn merge_apart(&mut self, other: &Self) {
        let theirs = other.0.iter().filter(|(key, _)| key.contains(APART));
        for (key, value) in theirs {
            self.put(key.clone(), *value);
            let Some((case, suffix)) = key.split_once(&format!("_{APART}_vs_{MEMCPY}")) else {
                continue;
            };
            if let Some(ours) = self.get(&format!("{case}_vs_{MEMCPY}{suffix}")) {
                self.put(format!("{case}_vs_{APART}{suffix}"), ours / value);
            }
        }
    }

    /// One flat JSON object, with what else is to be said.
    pub fn to_json(&self, said: &[(&str, Value)]) -> Value {
        let numbers = self
            .0
            .iter()
            .map(|(key, value)| (key.clone(), round(*value)));
        let said = said
            .iter()
            .map(|(key, value)| ((*key).into(), value.clone()));
        Value::Object(said.chain(numbers).collect::<Map<_, _>>())
    }

    /// The numbers of [`Self::to_json`].
    ///
    /// # Errors
    /// If the text is no JSON object.
    pub fn from_json(text: &str) -> Result<Self> {
        let object: Map<String, Value> =
            serde_json::from_str(text).context("expected figures as a JSON object")?;
        let numbers = object
            .into_iter()
            .filter_map(|(key, value)| Some((key, value.as_f64()?)));
        Ok(Self(numbers.collect()))
    }

    fn put(&mut self, key: String, value: f64) {
        self.0.insert(key, value);
    }
}

/// Three decimals say all that repeats.
fn round(value: f64) -> Value {
    ((value * 1000.0).round() / 1000.0).into()
}

fn suffix(cores: usize) -> &'static str {
    SUFFIXES[usize::from(cores > 1)]
}

/// Engines of ours stand before the others in the list of names.
fn is_ours(name: &str) -> bool {
    let others = NAMES.iter().skip_while(|name| **name != "isal");
    !others.into_iter().any(|other| *other == name)
}

fn ratio(one: &Series, other: &Series) -> f64 {
    let rounds = one.rates.iter().zip(&other.rates);
    median(&rounds.map(|(a, b)| a / b).collect::<Vec<_>>())
}

/// 0 of none.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        length if length % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

fn best(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::{Figures, Series, median};
    use crate::codec::case::{Case, Level};

    fn series(name: &'static str, cores: usize, rates: &[f64]) -> Series {
        let rates = rates.iter().map(|rate| rate * 1e9).collect();
        let (sums, level) = (2, Level::Second);
        let case = Case::Fold { sums, level };
        Series {
            case,
            cores,
            name,
            rates,
        }
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let figures = Figures::of(
            &[
                series("gfni512", 1, &[10.0, 20.0, 4.0]),
                series("avx2", 1, &[5.0, 5.0, 5.0]),
                series("memcpy", 1, &[5.0, 5.0, 4.0]),
                series("gfni512", 2, &[8.0]),
                series("memcpy", 2, &[4.0]),
            ],
            "gfni512",
        );
        assert_eq!(figures.get("fold_2_vs_memcpy"), Some(2.0));
        assert_eq!(figures.get("fold_2_vs_memcpy_two_cores"), Some(2.0));
        assert_eq!(figures.get("fold_2_gfni512_gbps"), Some(10.0));
        assert_eq!(figures.get("fold_2_gfni512_best_gbps"), Some(20.0));
        assert_eq!(figures.get("fold_2_vs_avx2"), None);
        assert_eq!(figures.get("fold_2_vs_gfni512"), None);
    }

    #[test]
    fn another_run_is_taken_in_by_way_of_memcpy() {
        let mut figures = Figures::of(
            &[series("avx2", 2, &[6.0]), series("memcpy", 2, &[3.0])],
            "avx2",
        );
        let apart = Figures::of(
            &[
                series("rse_default", 2, &[1.0]),
                series("memcpy", 2, &[4.0]),
            ],
            "avx2",
        );
        assert_eq!(
            apart.get("fold_2_rse_default_vs_memcpy_two_cores"),
            Some(0.25)
        );
        figures.merge_apart(&apart);
        assert_eq!(figures.get("fold_2_vs_rse_default_two_cores"), Some(8.0));
        assert_eq!(figures.get("fold_2_memcpy_gbps_two_cores"), Some(3.0));
    }

    #[test]
    fn figures_survive_json() {
        let figures = Figures::of(&[series("memcpy", 1, &[1.5])], "avx2");
        let text = figures.to_json(&[("date", "today".into())]).to_string();
        assert_eq!(Figures::from_json(&text).expect("an object"), figures);
        assert!(Figures::from_json("[1]").is_err());
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
