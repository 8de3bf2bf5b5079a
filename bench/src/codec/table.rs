//! The figures as tables in Markdown: rates, ratios, and the marks that are aimed at.

use std::fmt::Write;

use serde_json::Value;

use super::case::{Case, Level, Place};
use super::contender::NAMES;
use super::figures::{Figures, SUFFIXES};

/// What our engine is to reach, on one core.
const MARKS: [(&str, f64); 7] = [
    ("encode_8_2_ram_vs_isal", 1.25),
    ("encode_8_2_ram_vs_rse_simd", 3.0),
    ("encode_8_2_ram_vs_memcpy", 1.2),
    ("encode_8_2_cache_vs_isal", 2.0),
    ("fold_1_vs_memcpy", 1.1),
    ("fold_2_vs_memcpy", 1.1),
    ("fold_4_vs_memcpy", 1.1),
];

/// A part of the tables and a panel of the plot.
pub struct Section {
    /// What it shows.
    pub title: String,
    /// The end of its keys.
    pub suffix: &'static str,
    /// Its cases, with what they are called here.
    pub cases: Vec<(Case, String)>,
}

/// What sections show, each on one core and on two.
const KINDS: [&str; 4] = [
    "Encode from RAM",
    "Encode in second-level cache",
    "Fold into sums in second-level cache",
    "Fold into sums in first-level cache",
];

/// All sections, one core and two side by side.
pub fn sections() -> Vec<Section> {
    let of = |kind: usize, cores: usize| Section {
        title: format!("{}, {}", KINDS[kind], ["one core", "two cores"][cores]),
        suffix: SUFFIXES[cores],
        cases: Case::all()
            .into_iter()
            .filter(|case| kind_of(*case) == kind)
            .map(|case| (case, short(case)))
            .collect(),
    };
    (0..KINDS.len())
        .flat_map(|kind| [of(kind, 0), of(kind, 1)])
        .collect()
}

fn kind_of(case: Case) -> usize {
    match case {
        Case::Encode { place, .. } => match place {
            Place::Ram => 0,
            Place::Cache => 1,
        },
        Case::Fold { level, .. } => match level {
            Level::Second => 2,
            Level::First => 3,
        },
    }
}

fn short(case: Case) -> String {
    match case {
        Case::Encode { geometry, .. } => format!("({},{})", geometry.k(), geometry.m()),
        Case::Fold { sums: 1, .. } => "1 sum".into(),
        Case::Fold { sums, .. } => format!("{sums} sums"),
    }
}

/// All tables.
pub fn markdown(figures: &Figures, said: &[(&str, Value)]) -> String {
    let mut text = String::from("# The erasure code beside others\n\n");
    for (key, value) in said {
        let value = value.as_str().map_or_else(|| value.to_string(), Into::into);
        let _ = writeln!(text, "- {key}: {value}");
    }
    text.push_str(
        "\nMade by `make bench-codec`. Rates are 1e9 bytes of data per second, the median of the rounds and in\n\
         brackets the best; ratios are medians of the ratios within each round. README.md says more.\n\n",
    );
    marks(&mut text, figures);
    for section in sections() {
        rates(&mut text, figures, &section);
        ratios(&mut text, figures, &section);
    }
    text
}

fn marks(text: &mut String, figures: &Figures) {
    text.push_str("## Marks\n\n");
    let rows = MARKS.iter().filter_map(|(key, wanted)| {
        let got = figures.get(key)?;
        let met = if got >= *wanted { "yes" } else { "no" };
        let cells = [format!("{wanted:.2}"), format!("{got:.2}"), met.into()];
        Some((format!("`{key}`"), cells.to_vec()))
    });
    let head = ["at least", "got", "met"].map(String::from);
    table(text, "ratio", &head, &rows.collect::<Vec<_>>());
}

fn rates(text: &mut String, figures: &Figures, section: &Section) {
    let suffix = section.suffix;
    let cell = |case: &Case, name: &str| {
        let middle = figures.get(&format!("{case}_{name}_gbps{suffix}"))?;
        let best = figures.get(&format!("{case}_{name}_best_gbps{suffix}"))?;
        Some(format!("{middle:.1} ({best:.1})"))
    };
    let _ = writeln!(text, "## {}\n", section.title);
    body(text, section, "GB/s", "", cell);
}

fn ratios(text: &mut String, figures: &Figures, section: &Section) {
    let suffix = section.suffix;
    let cell = |case: &Case, name: &str| {
        let ratio = figures.get(&format!("{case}_vs_{name}{suffix}"))?;
        Some(format!("{ratio:.2}"))
    };
    body(text, section, "our engine", "over ", cell);
}

/// A row for each case, a column for each contender that has a number.
fn body(
    text: &mut String,
    section: &Section,
    corner: &str,
    before: &str,
    cell: impl Fn(&Case, &str) -> Option<String>,
) {
    let has = |name: &&str| {
        section
            .cases
            .iter()
            .any(|(case, _)| cell(case, name).is_some())
    };
    let names: Vec<&str> = NAMES.iter().copied().filter(has).collect();
    let head: Vec<String> = names.iter().map(|name| format!("{before}{name}")).collect();
    let row = |(case, short): &(Case, String)| {
        let cells = names
            .iter()
            .map(|name| cell(case, name).unwrap_or_default());
        (short.clone(), cells.collect())
    };
    let rows: Vec<(String, Vec<String>)> = section.cases.iter().map(row).collect();
    if !names.is_empty() {
        table(text, corner, &head, &rows);
    }
}

fn table(text: &mut String, corner: &str, head: &[String], rows: &[(String, Vec<String>)]) {
    let _ = writeln!(text, "| {corner} | {} |", head.join(" | "));
    let _ = writeln!(text, "| --- |{}", " ---: |".repeat(head.len()));
    for (first, cells) in rows {
        let _ = writeln!(text, "| {first} | {} |", cells.join(" | "));
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::{markdown, sections};
    use crate::codec::figures::Figures;

    #[test]
    fn tables_have_what_was_measured_and_nothing_else() {
        let figures = r#"{"encode_8_2_ram_isal_gbps": 10.04, "encode_8_2_ram_isal_best_gbps": 11,
            "encode_8_2_ram_vs_isal": 1.2, "fold_2_vs_memcpy_two_cores": 3}"#;
        let figures = Figures::from_json(figures).expect("an object");
        let text = markdown(&figures, &[("date", "today".into())]);
        assert!(text.contains("- date: today\n"));
        assert!(text.contains("| `encode_8_2_ram_vs_isal` | 1.25 | 1.20 | no |"));
        assert!(
            text.contains("| GB/s | isal |\n| --- | ---: |\n| (4,2) |  |\n| (8,2) | 10.0 (11.0) |")
        );
        assert!(text.contains(
            "| our engine | over memcpy |\n| --- | ---: |\n| 1 sum |  |\n| 2 sums | 3.00 |"
        ));
        assert!(!text.contains("rs_simd"));
        assert_eq!(sections().len(), 8);
    }
}
