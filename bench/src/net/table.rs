//! The figures as Markdown: the marks first, then every number.

use std::fmt::Write;

use super::figures::{Figures, shown};

/// What a figure is to be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Mark {
    AtLeast(f64),
    AtMost(f64),
}

impl Mark {
    /// Whether a figure keeps it.
    pub fn is_met(self, figure: f64) -> bool {
        match self {
            Self::AtLeast(mark) => figure >= mark,
            Self::AtMost(mark) => figure <= mark,
        }
    }

    /// In words.
    pub fn shown(self) -> String {
        match self {
            Self::AtLeast(mark) => format!("at least {}", shown(mark)),
            Self::AtMost(mark) => format!("at most {}", shown(mark)),
        }
    }
}

/// A figure's name, what it is to be, and what it is.
pub type Marked = (&'static str, Mark, &'static str);

/// What a figure could be at best on the machine that it was measured on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Floor {
    /// A ratio is taken to its own floor: it would be 1.
    Ratio,
    /// Another figure of the same run.
    Figure(&'static str),
}

/// How figures are written down.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Heading of the table.
    pub title: &'static str,
    /// Heading of the plot.
    pub plot: &'static str,
    /// How they were made, a paragraph.
    pub made: &'static str,
    /// What is aimed at.
    pub marks: &'static [Marked],
    /// Of those that have one, by their names.
    pub floors: &'static [(&'static str, Floor)],
    /// What one must know to read them.
    pub notes: &'static str,
}

impl Report {
    /// The floor of this figure, if it has one that was measured.
    pub fn floor(&self, key: &str, figures: &Figures) -> Option<f64> {
        let (_, floor) = self.floors.iter().find(|(name, _)| *name == key)?;
        match floor {
            Floor::Ratio => Some(1.0),
            Floor::Figure(name) => figures.get(name),
        }
    }
}

/// That of plans, repair and transport.
pub const NET: Report = Report {
    title: "Plans on a network",
    plot: "Plans on a network, against their marks",
    made: "Made by `make bench-net`: real daemons in network namespaces, each link shaped both ways. Efficiency is the\n\
           time that the busiest link needs for its bytes at its rate, over the time measured.",
    marks: &MARKS,
    floors: &[],
    notes: NOTES,
};

/// What is aimed at.
const MARKS: [Marked; 12] = [
    (
        "chain_efficiency_k8",
        Mark::AtLeast(0.9),
        "chain, k=8, ideal time / measured time",
    ),
    ("chain_efficiency_k16", Mark::AtLeast(0.9), "chain, k=16"),
    ("chain_efficiency_k32", Mark::AtLeast(0.9), "chain, k=32"),
    (
        "chain_k32_vs_k8_time",
        Mark::AtMost(1.1),
        "chain, time at k=32 / time at k=8",
    ),
    (
        "incremental_0p1_share",
        Mark::AtMost(0.021),
        "0.1 % of the chunks dirty, time / full time",
    ),
    (
        "incremental_60_share",
        Mark::AtMost(0.62),
        "60 % of the chunks dirty, time / full time",
    ),
    (
        "gather_vs_chain_time_8_2",
        Mark::AtMost(0.62),
        "rotating gather, time / the chain's on the same nodes",
    ),
    (
        "gather_wire_bytes_per_byte_8_2",
        Mark::AtMost(1.15),
        "rotating gather, bytes sent per node / bytes of a shard",
    ),
    (
        "repair_one_vs_copy",
        Mark::AtMost(1.15),
        "one lost node, time / a plain copy's",
    ),
    (
        "repair_two_vs_copy",
        Mark::AtMost(1.25),
        "two lost nodes, time / a plain copy's",
    ),
    (
        "executor_vs_raw_quinn",
        Mark::AtLeast(0.9),
        "executor, bytes per second / raw tuned quinn's",
    ),
    (
        "tuned_vs_default_quinn",
        Mark::AtLeast(2.0),
        "tuned quinn, bytes per second / quinn's as it comes",
    ),
];

/// All of it.
pub fn markdown(report: &Report, figures: &Figures, said: &[(&str, String)]) -> String {
    let mut text = format!("# {}\n\n", report.title);
    for (key, value) in said {
        let _ = writeln!(text, "- {key}: {value}");
    }
    let _ = writeln!(text, "\n{}\n", report.made);
    if !report.marks.is_empty() {
        marks(&mut text, report, figures);
    }
    text.push_str("## All figures\n\n| figure | number |\n| --- | ---: |\n");
    for (key, value) in figures.iter() {
        let _ = writeln!(text, "| `{key}` | {} |", shown(value));
    }
    text.push_str(report.notes);
    text
}

fn marks(text: &mut String, report: &Report, figures: &Figures) {
    text.push_str(
        "## Marks\n\n| figure | what | floor | mark | got | met |\n| --- | --- | ---: | ---: | ---: | --- |\n",
    );
    for (key, mark, what) in report.marks {
        let got = figures.get(key);
        let number = got.map_or("not measured".into(), shown);
        let met = got.map_or("", |got| if mark.is_met(got) { "yes" } else { "no" });
        let floor = report.floor(key, figures).map(shown).unwrap_or_default();
        let mark = mark.shown();
        let _ = writeln!(
            text,
            "| `{key}` | {what} | {floor} | {mark} | {number} | {met} |"
        );
    }
    text.push('\n');
}

/// What one must know to read the figures.
const NOTES: &str = "
## How to read them

- Every time runs from the last rank's seal until the step is reported protected, and so has digests, agreement and the
  filling of the chain in it; the best of two rounds counts. Every scenario loses nodes afterwards, decodes, and compares
  the bytes with what was staged.
- The same chunks are dirty on all ranks in increments. A chain carries the union of the dirty chunks.
- `_cpu_busy` is how busy all cores of the machine were, `_daemons_cores` how many of them the daemons used. Where the
  first is near 1, the cores set the pace and not the links: the figure is a lower bound. All nodes share this machine.
- `_wire_bytes_per_byte` is what the last data node sent, with all headers and acknowledgements, over its payload.
- `copy_tcp_seconds` and `copy_quic_seconds` are plain copies of a shard over the link that repair uses; repair is
  compared with the faster one. `repair_one` decodes a lost shard on a coding node. `repair_two` restarts two lost nodes
  with empty RAM and runs from the first bytes of a shard on one of their links until both shards are there;
  `open_two` decodes both at the same time on two coding nodes, as readers that know nothing of each other.
- `gather_*` is what the daemons choose when they know the rate of their links, `chain_16_nodes_*` what they do without.
  Two groups of 8 code for each other; `_most` is of the node that sent most. There and in repairs links carry 100 Mbit/s
  and their queues (20 ms) drop frames one by one, as a switch does: up to fifteen nodes send to each at once.
- `slow_hop_efficiency` takes the slow link as the busiest. `coding_node_killed_seconds` has the coding node's restart with
  empty RAM in it, `repair_hop_killed_seconds` the two seconds until its peers take a silent node for dead.
- `raw_*` are plain processes on links without a limit, `raw_quinn_tuned` on the daemons' own transport; CPU seconds are
  those of both ends. `executor_encode` runs from commit until protected, from one data node to one coding node.
  `cpu_s_per_gb_encode` is what both daemons use for 1e9 bytes in that time; without a size both are of chunks of 1 MiB.
- A figure that is not here was not measured.
";

#[cfg(test)]
mod tests {
    use super::{Floor, Mark, NET, markdown};
    use crate::net::figures::Figures;
    use crate::node::NODE;

    #[test]
    fn marks_are_met_or_not_or_not_measured() {
        assert!(Mark::AtLeast(0.9).is_met(0.9) && !Mark::AtLeast(0.9).is_met(0.89));
        assert!(Mark::AtMost(1.1).is_met(1.1) && !Mark::AtMost(1.1).is_met(1.11));
        let mut figures = Figures::default();
        figures.put("chain_efficiency_k8", 0.95);
        figures.put("repair_one_vs_copy", 1.3);
        let text = markdown(&NET, &figures, &[("date", "today".into())]);
        assert!(text.contains("- date: today\n"));
        assert!(text.contains("| at least 0.9000 | 0.9500 | yes |"));
        assert!(text.contains("| at most 1.150 | 1.300 | no |"));
        assert!(text.contains("| at most 1.250 | not measured |  |"));
        assert!(text.contains("| `repair_one_vs_copy` | 1.300 |\n"));
    }

    #[test]
    fn floors_are_of_the_same_run() {
        let mut figures = Figures::default();
        figures.put("encode_cpu_s_per_gb_4_2", 3.0);
        let floor = |key, figures: &Figures| NODE.floor(key, figures);
        assert_eq!(floor("encode_cpu_s_per_gb_4_2", &figures), None);
        figures.put("encode_floor_cpu_s_per_gb", 2.0);
        assert_eq!(floor("encode_cpu_s_per_gb_4_2", &figures), Some(2.0));
        assert_eq!(floor("digest_vs_floor", &figures), Some(1.0));
        assert_eq!(floor("rss_beyond_mib", &figures), None);
        let text = markdown(&NODE, &figures, &[]);
        assert!(
            text.contains("| 2.000 | at most 2.800 | 3.000 | no |"),
            "{text}"
        );
        for (key, floor) in NODE.floors {
            let is_marked = |key: &str| NODE.marks.iter().any(|(name, ..)| *name == key);
            assert!(is_marked(key), "{key} has no mark to be drawn beside");
            assert_ne!(*floor, Floor::Figure(key));
        }
    }
}
