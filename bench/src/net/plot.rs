//! The figures that have a mark, as bars beside it: an SVG without scripts or fonts of its own.

use std::fmt::Write;

use super::figures::{Figures, shown};
use super::table::{Mark, Report};

const WIDTH: f64 = 900.0;
const ROW: f64 = 30.0;
const TOP: f64 = 84.0;
/// Where bars begin.
const LEFT: f64 = 430.0;
/// Width of a bar that just meets its mark.
const UNIT: f64 = 250.0;
/// Longest bar, in units: longer ones are cut there, and their number tells.
const LONGEST: f64 = 1.6;

/// All of it.
pub fn svg(report: &Report, figures: &Figures, said: &[(&str, String)]) -> String {
    let rows = report
        .marks
        .iter()
        .filter_map(|(key, mark, what)| Some((figures.get(key)?, *mark, *what)));
    let rows: Vec<(f64, Mark, &str)> = rows.collect();
    let height = TOP + ROW * rows.len() as f64 + 20.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(
        &mut text,
        20.0,
        28.0,
        "font-size=\"17\" font-weight=\"bold\"",
        report.plot,
    );
    let said: Vec<String> = said.iter().map(|(_, value)| value.clone()).collect();
    label(&mut text, 20.0, 47.0, "fill=\"#555\"", &said.join(", "));
    label(
        &mut text,
        LEFT + UNIT,
        72.0,
        "text-anchor=\"middle\" fill=\"#555\"",
        "mark",
    );
    for (index, (got, mark, what)) in rows.iter().enumerate() {
        row(&mut text, TOP + ROW * index as f64, *got, *mark, what);
    }
    let _ = writeln!(
        text,
        "<line x1=\"{0}\" y1=\"{TOP}\" x2=\"{0}\" y2=\"{1}\" stroke=\"#222\"/>\n</svg>",
        LEFT + UNIT,
        height - 16.0
    );
    text
}

fn row(text: &mut String, y: f64, got: f64, mark: Mark, what: &str) {
    let (Mark::AtLeast(wanted) | Mark::AtMost(wanted)) = mark;
    let width = UNIT * (got / wanted).clamp(0.0, LONGEST);
    let colour = if mark.is_met(got) {
        "#2a7f62"
    } else {
        "#c2562d"
    };
    label(text, LEFT - 10.0, y + 17.0, "text-anchor=\"end\"", what);
    let _ = writeln!(
        text,
        "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{colour}\"/>",
        y + 4.0
    );
    let said = format!("{} ({})", shown(got), mark.shown());
    label(text, LEFT + width + 6.0, y + 17.0, "", &said);
}

fn label(text: &mut String, x: f64, y: f64, how: &str, said: &str) {
    let said = said
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" {how}>{said}</text>");
}

#[cfg(test)]
mod tests {
    use super::svg;
    use crate::net::figures::Figures;
    use crate::net::table::NET;

    #[test]
    fn bars_stand_for_what_was_measured() {
        let mut figures = Figures::default();
        figures.put("chain_efficiency_k8", 0.95);
        figures.put("repair_two_vs_copy", 99.0);
        figures.put("unknown", 1.0);
        let text = svg(&NET, &figures, &[("machine", "a <b> & c".into())]);
        assert!(text.contains("a &lt;b&gt; &amp; c"));
        assert_eq!(text.matches("height=\"18\"").count(), 2);
        assert!(text.contains("99.00 (at most 1.250)"));
        assert!(!text.contains("NaN") && text.ends_with("</svg>\n"));
    }
}
