//! Measured and configured rates together, as the chooser asks for them.
//!
//! Only two things are taken from measurements: what is usual, and which nodes are far below it and how far. Nodes
//! that are not slow count as equal, or a plan would change from step to step with the noise of its figures.

use storaged_plan::chooser::NodeMeasure;
use storaged_wire::NodeName;

use super::bottleneck::{Side, WHOLE_PPM};
use super::measured::MeasuredRates;
use crate::api::{LinkRates, Now, RateBasis};

impl LinkRates {
    fn of(&self, node: &NodeName) -> Option<u64> {
        self.unusual.get(node).copied().or(self.usual)
    }

    /// Whether the operator says that a node is so slow that others are asked first where there are enough.
    fn is_slow(&self, node: &NodeName) -> bool {
        let half = self.usual.map_or(0, |usual| usual / 2);
        self.of(node).is_some_and(|rate| rate < half)
    }
}

/// What is known of the links now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Links<'a> {
    configured: &'a LinkRates,
    measured: Option<&'a MeasuredRates>,
    now: Now,
}

impl<'a> Links<'a> {
    pub fn new(configured: &'a LinkRates, measured: &'a MeasuredRates, now: Now) -> Self {
        let counts = configured.basis == RateBasis::Measured;
        Self {
            configured,
            measured: Some(measured).filter(|_| counts),
            now,
        }
    }

    /// What was measured of it.
    pub fn usual_measured(&self) -> Option<u64> {
        self.measured?.usual(self.now)
    }

    /// Bytes per second of a link that is not slow; none if nobody said and nothing was measured.
    pub fn usual(&self) -> Option<u64> {
        self.usual_measured().or(self.configured.usual)
    }

    /// Of a node that is measured slow, the share of the usual rate that its side carries.
    fn slow_ppm(&self, node: &NodeName, side: Side) -> Option<u64> {
        self.measured?.slow_ppm(self.now, node, side)
    }

    /// A node's links. What the operator says of one node counts even if it was measured faster.
    pub fn measure(&self, node: &NodeName) -> Option<NodeMeasure> {
        let usual = self.usual()?;
        let told = match (self.configured.unusual.get(node), self.configured.usual) {
            (None, _) => usual,
            (Some(own), Some(of)) => part(usual, *own, of),
            (Some(own), None) => usual.min(*own),
        };
        let rate = |side| {
            let slow = self.slow_ppm(node, side);
            let measured = slow.map_or(told, |share| part(usual, share, WHOLE_PPM));
            told.min(measured).max(1)
        };
        Some(NodeMeasure {
            up_bytes_per_s: rate(Side::Up),
            down_bytes_per_s: rate(Side::Down),
            ..NodeMeasure::on_link(usual)
        })
    }

    /// Whether a node is so slow that others are asked first where there are enough.
    pub fn is_slow(&self, node: &NodeName) -> bool {
        let measured = self.measured.is_some_and(|m| m.is_slow(self.now, node));
        measured || self.configured.is_slow(node)
    }

    /// What a choice among these nodes rests on.
    pub fn basis(&self, nodes: &[&NodeName]) -> String {
        let origin = match self.usual_measured() {
            Some(_) => "measured",
            None => "configured",
        };
        let mut text = format!("links at {} MB/s as {origin}", megabytes(self.usual()));
        for node in nodes {
            let sides = [Side::Up, Side::Down].into_iter();
            if let Some(share) = sides.filter_map(|side| self.slow_ppm(node, side)).min() {
                let share = share as f64 / WHOLE_PPM as f64;
                text += &format!(", {node} measured at {share:.2} of that");
            } else if self.configured.unusual.contains_key(node) {
                text += &format!(", {node} configured as another");
            }
        }
        text
    }
}

fn megabytes(rate: Option<u64>) -> String {
    let megabytes = rate.unwrap_or(0) as f64 / 1e6;
    match megabytes {
        few if few < 10.0 => format!("{few:.2}"),
        many => format!("{many:.0}"),
    }
}

/// `whole * part / of`, without leaving the range.
fn part(whole: u64, part: u64, of: u64) -> u64 {
    let product = u128::from(whole) * u128::from(part) / u128::from(of.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::bottleneck::{Bottleneck, Certainty, Limit, SideSeen};
    use super::super::measured::Weight;
    use std::collections::BTreeMap;

    use super::*;

    fn name(index: usize) -> NodeName {
        NodeName::new(format!("n{index}")).expect("a name")
    }

    /// 100 MB/s as usual, and the uplink of n1 at a tenth of it.
    fn measured() -> MeasuredRates {
        let slow = SideSeen {
            bytes_per_s: 10_000_000,
            share_ppm: WHOLE_PPM / 10,
            certainty: Certainty::Measured,
        };
        let findings = Bottleneck {
            usual: 100_000_000,
            limit: Limit::Links,
            sides: BTreeMap::from([((1, Side::Up), slow)]),
        };
        let mut measured = MeasuredRates::default();
        measured.learn(Now(0), &[name(0), name(1)], &findings, Weight::Half);
        measured
    }

    fn rates(configured: &LinkRates, measured: &MeasuredRates, node: usize) -> Option<(u64, u64)> {
        let links = Links::new(configured, measured, Now(1));
        let measure = links.measure(&name(node))?;
        Some((measure.up_bytes_per_s, measure.down_bytes_per_s))
    }

    #[test]
    fn what_is_measured_counts_before_what_is_configured() {
        let configured = LinkRates {
            usual: Some(50_000_000),
            unusual: BTreeMap::from([(name(2), 25_000_000)]),
            basis: RateBasis::Measured,
        };
        let (nothing, measured) = (MeasuredRates::default(), measured());
        assert_eq!(
            rates(&configured, &nothing, 0),
            Some((50_000_000, 50_000_000))
        );
        assert_eq!(
            rates(&configured, &nothing, 2),
            Some((25_000_000, 25_000_000))
        );
        assert_eq!(
            rates(&configured, &measured, 0),
            Some((100_000_000, 100_000_000))
        );
        assert_eq!(
            rates(&configured, &measured, 1),
            Some((10_000_000, 100_000_000))
        );
        // Half of what is usual by configuration is half of what is by measurement.
        assert_eq!(
            rates(&configured, &measured, 2),
            Some((50_000_000, 50_000_000))
        );
        let links = Links::new(&configured, &measured, Now(1));
        assert!(links.is_slow(&name(1)) && !links.is_slow(&name(0)));
        let text = links.basis(&[&name(0), &name(1), &name(2)]);
        let expected =
            "links at 100 MB/s as measured, n1 measured at 0.10 of that, n2 configured as another";
        assert_eq!(text, expected);
    }

    #[test]
    fn measurements_can_be_left_out_of_account() {
        let configured = LinkRates {
            basis: RateBasis::Configured,
            ..LinkRates::default()
        };
        assert_eq!(rates(&configured, &measured(), 1), None);
        assert!(!Links::new(&configured, &measured(), Now(1)).is_slow(&name(1)));
    }

    #[test]
    fn a_node_is_configured_as_slow_beside_the_usual_rate_only() {
        let slow = name(1);
        let mut configured = LinkRates::default();
        configured.unusual.insert(slow.clone(), 40);
        let nothing = MeasuredRates::default();
        assert!(!Links::new(&configured, &nothing, Now(0)).is_slow(&slow));
        configured.usual = Some(100);
        assert!(Links::new(&configured, &nothing, Now(0)).is_slow(&slow));
        assert!(!Links::new(&configured, &nothing, Now(0)).is_slow(&name(2)));
    }
}
