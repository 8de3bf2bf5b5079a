//! The figures that have a mark, as bars beside it and, where they have one, their floor: an SVG without scripts or fonts of its own.

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
/// The colour of floors.
const FLOOR: &str = "#3b5bdb";

/// All of it.
pub fn svg(report: &Report, figures: &Figures, said: &[(&str, String)]) -> String {
    let rows = report.marks.iter().filter_map(|(key, mark, what)| {
        Some(Row {
            got: figures.get(key)?,
            mark: *mark,
            floor: report.floor(key, figures),
            what,
        })
    });
    let rows: Vec<Row<'_>> = rows.collect();
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
    if rows.iter().any(|row| row.floor.is_some()) {
        let floor = format!("text-anchor=\"end\" fill=\"{FLOOR}\"");
        label(&mut text, WIDTH - 20.0, 72.0, &floor, "| floor");
    }
    for (index, row) in rows.iter().enumerate() {
        row.draw(&mut text, TOP + ROW * index as f64);
    }
    let _ = writeln!(
        text,
        "<line x1=\"{0}\" y1=\"{TOP}\" x2=\"{0}\" y2=\"{1}\" stroke=\"#222\"/>\n</svg>",
        LEFT + UNIT,
        height - 16.0
    );
    text
}

struct Row<'a> {
    got: f64,
    mark: Mark,
    floor: Option<f64>,
    what: &'a str,
}

impl Row<'_> {
    fn draw(&self, text: &mut String, y: f64) {
        let (got, mark) = (self.got, self.mark);
        let (Mark::AtLeast(wanted) | Mark::AtMost(wanted)) = mark;
        let length = |figure: f64| UNIT * (figure / wanted).clamp(0.0, LONGEST);
        let width = length(got);
        let colour = if mark.is_met(got) {
            "#2a7f62"
        } else {
            "#c2562d"
        };
        label(
            text,
            LEFT - 10.0,
            y + 17.0,
            "text-anchor=\"end\"",
            self.what,
        );
        let _ = writeln!(
            text,
            "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{colour}\"/>",
            y + 4.0
        );
        // One that is further out than bars reach would be drawn where it is not.
        let floor = self.floor.filter(|floor| floor / wanted <= LONGEST);
        if let Some(floor) = floor {
            let x = LEFT + length(floor);
            let _ = writeln!(
                text,
                "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"{FLOOR}\" stroke-width=\"3\"/>",
                y + 1.0,
                y + 25.0
            );
        }
        let said = format!("{} ({})", shown(got), mark.shown());
        let beside = floor.map_or(width, |floor| width.max(length(floor)));
        label(text, LEFT + beside + 6.0, y + 17.0, "", &said);
    }
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
    use super::{FLOOR, LEFT, UNIT, svg};
    use crate::net::figures::Figures;
    use crate::net::table::NET;
    use crate::node::NODE;

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
        assert!(!text.contains(FLOOR));
    }

    #[test]
    fn floors_are_drawn_where_they_were_measured() {
        let mut figures = Figures::default();
        figures.put("encode_cpu_s_per_gb_4_2", 2.8);
        assert!(!svg(&NODE, &figures, &[]).contains("stroke-width"));
        figures.put("encode_floor_cpu_s_per_gb", 1.4);
        let text = svg(&NODE, &figures, &[]);
        // Half of what just meets the mark.
        let x = LEFT + UNIT / 2.0;
        assert!(text.contains(&format!("<line x1=\"{x:.1}\"")), "{text}");
        assert!(text.contains("| floor"));
        // A ratio that could be four times its mark has its floor outside.
        figures.put("local_load_vs_memcpy_1t", 0.3);
        let more = svg(&NODE, &figures, &[]);
        assert_eq!(more.matches("stroke-width").count(), 1);
    }
}
