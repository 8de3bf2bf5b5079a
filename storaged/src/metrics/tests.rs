//! What is exposed, and that the operator's page has every metric.

use storaged_core::SideRate;

use super::*;

const PAGE: &str = include_str!("../../../docs/operate/metrics.md");

#[test]
fn what_is_observed_is_exposed() {
    let metrics = Metrics::new();
    metrics.observe_state("protected");
    metrics.observe_digest(7);
    let text = metrics.text();
    assert!(
        text.contains("storaged_checkpoint_states_total{state=\"protected\"} 1"),
        "{text}"
    );
    assert!(
        text.contains("storaged_stage_digest_bytes_total 7"),
        "{text}"
    );
}

#[test]
fn every_counter_is_there_before_its_first_event() {
    let metrics = Metrics::new();
    let member = Member {
        name: NodeName::new("n1").expect("a name"),
        failure_domain: "r1".into(),
        cordon: Default::default(),
        seat: None,
    };
    metrics.expect_nodes(&[member]);
    let text = metrics.text();
    for name in [
        "checkpoint_states_total{state=\"protected\"}",
        "checkpoint_states_total{state=\"durable\"}",
        "checkpoint_states_total{state=\"abandoned\"}",
        "trickle_increment_records_total{kind=\"raw\"}",
        "trickle_refused_total{kind=\"forged\"}",
        "trickle_refused_total{kind=\"missing\"}",
        "encode_wrong_bytes_total{node=\"n1\"}",
        "place_false_statements_total{node=\"n1\"}",
        "trickle_failures_total",
        "place_peer_faults_total",
    ] {
        assert!(
            text.contains(&format!("storaged_{name} 0")),
            "{name} in {text}"
        );
    }
    // Of a family without a single line the text does not say that there is one; the page does.
    for row in PAGE.lines().filter(|row| row.contains("` | counter |")) {
        let name = row.trim_start_matches("| `");
        let name = name.split(['`', '{']).next().expect("a name");
        assert!(text.contains(&format!("\n{name}")), "{name} in {text}");
    }
    metrics.observe_unpublished();
    assert!(metrics.text().contains("storaged_trickle_failures_total 1"));
}

#[test]
fn what_is_not_known_of_a_link_any_more_is_not_exposed() {
    let metrics = Metrics::new();
    let up = SideRate {
        bytes_per_s: 7,
        slow_ppm: Some(100_000),
    };
    let node = NodeRate {
        node: storaged_wire::NodeName::new("n1").expect("a name"),
        up: Some(up),
        down: None,
    };
    metrics.observe_link_rates(&[node]);
    let text = metrics.text();
    let row = "storaged_encode_link_bytes_per_second{node=\"n1\",side=\"up\"} 7";
    assert!(text.contains(row) && text.contains("storaged_encode_slow_nodes 1"));
    metrics.observe_link_rates(&[]);
    let text = metrics.text();
    assert!(!text.contains("n1") && text.contains("storaged_encode_slow_nodes 0"));
}

#[test]
fn a_registry_that_is_away_is_a_fault_with_an_age_until_it_is_back() {
    let metrics = Metrics::new();
    let says = |lines: [&str; 2]| {
        let text = metrics.text();
        let has = |line: &&str| text.contains(&format!("\nstoraged_membership_{line}\n"));
        assert!(lines.iter().all(has), "{lines:?} in {text}");
    };
    says(["fault 0", "fault_seconds 0.0"]);
    metrics.observe_registry(Some(Duration::from_millis(1_500)));
    says(["fault 1", "fault_seconds 1.5"]);
    metrics.observe_registry(None);
    says(["fault 0", "fault_seconds 0.0"]);
}

#[test]
fn a_holder_has_all_or_lacks_something_or_is_not_told_of() {
    let metrics = Metrics::new();
    let says = |at_holder: u8, lacks: u8| {
        let text = metrics.text();
        let lines = [
            format!("at_holder {at_holder}"),
            format!("holder_lacks {lacks}"),
        ];
        let has = |line: &String| text.contains(&format!("\nstoraged_memory_{line}\n"));
        assert!(lines.iter().all(has), "{lines:?} in {text}");
    };
    says(0, 0);
    metrics.observe_holder(Some(HolderReport::HasAll));
    says(1, 0);
    metrics.observe_holder(Some(HolderReport::Lacks { since: 7 }));
    says(0, 1);
    for report in [Some(HolderReport::Absent), None] {
        metrics.observe_holder(report);
        says(0, 0);
    }
}

#[test]
fn the_operators_page_has_every_metric() {
    let text = Metrics::new().text();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for line in names {
        let (name, kind) = line.split_once(' ').expect("a name and a type");
        let total = if kind == "counter" { "_total" } else { "" };
        let row = format!("| `{name}{total}` | {kind} |");
        assert!(PAGE.contains(&row), "the page has no row {row}");
    }
}
