//! The figures as a plot in SVG: a panel for each section, a group of bars for each case, a bar for each contender,
//! and a whisker up to its best round.

use std::fmt::Write;

use serde_json::Value;

use super::contender::NAMES;
use super::figures::Figures;
use super::table::{Section, sections};

const WIDTH: f64 = 1240.0;
const TOP: f64 = 96.0;
const PANEL_WIDTH: f64 = 600.0;
const PANEL_HEIGHT: f64 = 250.0;
/// Room of a panel beside its bars: the scale at the left, the title above, the cases below.
const LEFT: f64 = 44.0;
const ABOVE: f64 = 30.0;
const BELOW: f64 = 34.0;

/// One colour for each of [`NAMES`]: ours are greens, memcpy is grey.
const COLOURS: [&str; NAMES.len()] = [
    "#00563f", "#1b8a5a", "#6cc08b", "#c3e6cb", "#1f5fa8", "#c8541b", "#f0b08a", "#8e4ea8",
    "#8a8a8a",
];

/// The whole plot.
pub fn svg(figures: &Figures, said: &[(&str, Value)]) -> String {
    let sections = sections();
    let rows = sections.len().div_ceil(2) as f64;
    let height = TOP + rows * PANEL_HEIGHT + 10.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(
        &mut text,
        20.0,
        26.0,
        "font-size=\"17\" font-weight=\"bold\"",
        "The erasure code beside others: 1e9 bytes of data per second, median of the rounds, whisker to the best",
    );
    let machine = said.iter().find(|(key, _)| *key == "machine");
    let machine = machine.and_then(|(_, value)| value.as_str()).unwrap_or("");
    label(&mut text, 20.0, 46.0, "fill=\"#555\"", machine);
    legend(&mut text, figures, &sections);
    for (i, section) in sections.iter().enumerate() {
        let x = 20.0 + (i % 2) as f64 * PANEL_WIDTH;
        let y = TOP + (i / 2) as f64 * PANEL_HEIGHT;
        panel(&mut text, figures, section, x, y);
    }
    text.push_str("</svg>\n");
    text
}

fn rate(figures: &Figures, section: &Section, case: usize, name: &str, which: &str) -> Option<f64> {
    let (case, _) = section.cases.get(case)?;
    let suffix = section.suffix;
    figures.get(&format!("{case}_{name}{which}_gbps{suffix}"))
}

fn takes_part(figures: &Figures, section: &Section, name: &str) -> bool {
    (0..section.cases.len()).any(|case| rate(figures, section, case, name, "").is_some())
}

fn legend(text: &mut String, figures: &Figures, sections: &[Section]) {
    let mut x = 20.0;
    for (name, colour) in NAMES.iter().zip(COLOURS) {
        let mut sections = sections.iter();
        if sections.any(|section| takes_part(figures, section, name)) {
            let area = Area {
                x,
                y: 62.0,
                width: 12.0,
                height: 12.0,
            };
            bar(text, &area, colour, name);
            label(text, x + 17.0, 73.0, "", name);
            x += 40.0 + 7.5 * name.len() as f64;
        }
    }
}

fn panel(text: &mut String, figures: &Figures, section: &Section, x: f64, y: f64) {
    let names: Vec<(&str, &str)> = NAMES
        .iter()
        .copied()
        .zip(COLOURS)
        .filter(|(name, _)| takes_part(figures, section, name))
        .collect();
    label(
        text,
        x + LEFT,
        y + 18.0,
        "font-size=\"14\" font-weight=\"bold\"",
        &section.title,
    );
    let best = |(name, _): &(&str, &str)| {
        let cases = 0..section.cases.len();
        let rates = cases.filter_map(|case| rate(figures, section, case, name, "_best"));
        rates.fold(0.0, f64::max)
    };
    let scale = Scale {
        bottom: y + PANEL_HEIGHT - BELOW,
        height: PANEL_HEIGHT - ABOVE - BELOW,
        most: names.iter().map(best).fold(0.0, f64::max).max(1.0),
    };
    let width = PANEL_WIDTH - LEFT - 16.0;
    lines(text, &scale, x + LEFT, width);
    let group = width / section.cases.len() as f64;
    let thick = group * 0.86 / names.len().max(1) as f64;
    for (case, (_, short)) in section.cases.iter().enumerate() {
        let left = x + LEFT + group * (case as f64 + 0.07);
        let middle = x + LEFT + group * (case as f64 + 0.5);
        label(
            text,
            middle,
            scale.bottom + 17.0,
            "text-anchor=\"middle\"",
            short,
        );
        for (i, (name, colour)) in names.iter().enumerate() {
            let Some(middle) = rate(figures, section, case, name, "") else {
                continue;
            };
            let at = left + thick * i as f64;
            let top = scale.y(middle);
            let said = format!("{name} {short}: {middle:.1} GB/s");
            let area = Area {
                x: at,
                y: top,
                width: (thick - 1.0).max(1.0),
                height: scale.bottom - top,
            };
            bar(text, &area, colour, &said);
            if let Some(best) = rate(figures, section, case, name, "_best") {
                let at = at + (thick - 1.0) / 2.0;
                let from = Point { x: at, y: top };
                let to = Point {
                    x: at,
                    y: scale.y(best),
                };
                line(text, from, to, "#222");
            }
        }
    }
}

/// From rates to places on the page.
struct Scale {
    bottom: f64,
    height: f64,
    most: f64,
}

impl Scale {
    fn y(&self, rate: f64) -> f64 {
        self.bottom - self.height * rate / self.most
    }

    /// A round number that makes four to nine lines.
    fn step(&self) -> f64 {
        let power = 10f64.powf((self.most / 4.0).log10().floor());
        let steps = [5.0, 2.0, 1.0].map(|times| times * power);
        let fits = |step: &f64| self.most / step >= 4.0;
        steps.into_iter().find(fits).unwrap_or(power)
    }
}

fn lines(text: &mut String, scale: &Scale, x: f64, width: f64) {
    let step = scale.step();
    let mut at = 0.0;
    while at <= scale.most {
        let y = scale.y(at);
        line(text, Point { x, y }, Point { x: x + width, y }, "#ddd");
        let anchor = "text-anchor=\"end\" fill=\"#555\"";
        label(text, x - 6.0, y + 4.0, anchor, &format!("{at}"));
        at += step;
    }
}

/// A place on the page.
#[derive(Debug, Clone, Copy)]
struct Point {
    x: f64,
    y: f64,
}

/// A part of the page, from its upper left corner.
struct Area {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

fn bar(text: &mut String, area: &Area, colour: &str, said: &str) {
    let Area {
        x,
        y,
        width,
        height,
    } = area;
    let _ = writeln!(
        text,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\">\
         <title>{}</title></rect>",
        escaped(said)
    );
}

fn line(text: &mut String, from: Point, to: Point, colour: &str) {
    let (Point { x: x1, y: y1 }, Point { x: x2, y: y2 }) = (from, to);
    let _ = writeln!(
        text,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
    );
}

fn label(text: &mut String, x: f64, y: f64, how: &str, said: &str) {
    let _ = writeln!(
        text,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" {how}>{}</text>",
        escaped(said)
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::{Scale, svg};
    use crate::codec::figures::Figures;

    #[test]
    fn bars_stand_for_what_was_measured() {
        let figures = r#"{"encode_8_2_ram_isal_gbps": 10, "encode_8_2_ram_isal_best_gbps": 20}"#;
        let figures = Figures::from_json(figures).expect("an object");
        let text = svg(&figures, &[("machine", "a <b> & c".into())]);
        assert!(text.contains("a &lt;b&gt; &amp; c"));
        assert_eq!(text.matches("isal (8,2): 10.0 GB/s").count(), 1);
        assert!(!text.contains("NaN") && !text.contains("inf"));
        assert!(text.ends_with("</svg>\n"));
    }

    #[test]
    fn a_scale_has_few_lines_at_round_numbers() {
        let step = |most: f64| {
            let (bottom, height) = (0.0, 1.0);
            Scale {
                bottom,
                height,
                most,
            }
            .step()
        };
        assert_eq!((step(20.0), step(45.0), step(100.0)), (5.0, 10.0, 20.0));
        assert_eq!((step(1.0), step(9.0)), (0.2, 2.0));
    }
}
