//! What the status says of who decides and leads what, and of what has still to be put back.

use std::time::Duration;

use anyhow::Result;
use serde_json::Value;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, said, shards};

use crate::node::{status, until};

const LONG: Duration = Duration::from_secs(30);

fn names(of: &Value) -> Vec<&str> {
    let all = of.as_array().into_iter().flatten();
    all.filter_map(Value::as_str).collect()
}

/// The status of the first of these nodes that counts what is missing of the step that is there.
fn counted(system: &System, nodes: &[usize]) -> Result<(usize, Value)> {
    for node in nodes {
        let status = status(system, *node)?;
        if status["checkpoints"][0]["lacking"].is_array() {
            return Ok((*node, status));
        }
    }
    anyhow::bail!("no home node among {nodes:?}")
}

#[test]
fn the_status_names_who_decides_who_leads_and_what_is_to_be_put_back() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 7, &shards(2, 7), DurableWish::Never)?;
    (0..3).try_for_each(|node| system.wait(node, run, 7, CheckpointState::Protected))?;
    let text = status(&system, 0)?;
    assert_eq!(text["epoch"], 1);
    assert_eq!(text["to_put_back"]["blocks"], 0);
    let job = &text["runs"][0];
    assert_eq!(job["namespace"], "job");
    assert_eq!(job["run"], run.to_string());
    let step = &text["checkpoints"][0];
    assert_eq!(step["epoch"], 1);
    let homes = names(&step["homes"]);
    assert_eq!(homes.len(), 2, "{step}");
    let leaders = names(&step["led_by"]);
    assert_eq!(leaders.len(), 1, "{step}");
    let coding = leaders[0].to_owned();

    let lost = (0..3).find(|node| format!("n{node}") == coding).unwrap();
    let left: Vec<usize> = (0..3).filter(|node| *node != lost).collect();
    system.cluster.kill(lost)?;
    let is_owed = || {
        let (_, status) = counted(&system, &left)?;
        Ok(status["to_put_back"]["blocks"] == 1)
    };
    until("its parity is owed", LONG, is_owed)?;
    let (home, counts) = counted(&system, &left)?;
    let lacking = &counts["checkpoints"][0]["lacking"][0];
    let longest = shards(2, 7).iter().map(Vec::len).max().unwrap();
    assert_eq!(lacking["node"], coding);
    assert_eq!(lacking["down"], true);
    assert_eq!(lacking["bytes"], longest);
    assert_eq!(counts["to_put_back"]["bytes"], longest);
    let text = said(&system.storaged(home, &["status"])?);
    for part in [
        "to put back 1 block, ".into(),
        format!("{coding} (DOWN) lacks 1 block, "),
        format!("job job  run {run}"),
        format!("decided by {}", homes.join(", ")),
    ] {
        assert!(text.contains(&part), "{part:?} in {text}");
    }

    system.cluster.start(lost)?;
    let is_back = || {
        let (_, status) = counted(&system, &left)?;
        Ok(status["to_put_back"]["blocks"] == 0)
    };
    until("it is put back", LONG, is_back)
}
