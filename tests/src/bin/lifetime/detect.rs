//! How soon a node that falls silent is missed, and whether one that stands still for a second is.

use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use storaged_tests::system::System;

use crate::Figures;
use crate::nodes::until;

const ROUNDS: usize = 12;

fn sees(system: &System, peers: usize) -> Result<()> {
    let status = system.cluster.status(0)?;
    let up = status.matches(r#""up":true"#).count();
    ensure!(up == peers, "{up} peers");
    Ok(())
}

/// Times that node 0 has missed another one.
fn missed(system: &System) -> Result<usize> {
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    Ok(log.matches("peer down").count())
}

/// A node that is stopped says nothing, as one whose power is gone: no port is closed, nobody resets anything.
pub fn measure(figures: &mut Figures) -> Result<()> {
    let system = System::start(3, Some((2, 1)), "")?;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        let node = 1 + round % 2;
        system.cluster.signal(node, Signal::STOP)?;
        took.push(until("a node to be missed", || sees(&system, 1))?);
        system.cluster.signal(node, Signal::CONT)?;
        until("it to be back", || sees(&system, 2))?;
        std::thread::sleep(Duration::from_millis(137 * round as u64 % 500));
    }
    let before = missed(&system)?;
    for round in 0..ROUNDS {
        let node = 1 + round % 2;
        system.cluster.signal(node, Signal::STOP)?;
        std::thread::sleep(Duration::from_secs(1));
        system.cluster.signal(node, Signal::CONT)?;
        std::thread::sleep(Duration::from_millis(700 + 137 * round as u64 % 500));
    }
    until("all to be there", || sees(&system, 2))?;
    let false_deaths = missed(&system)? - before;
    // Of twelve the 99th percentile is the longest.
    let longest = took.into_iter().max().unwrap_or_default();
    figures.insert("detect_p99_s", longest.as_secs_f64());
    figures.insert("false_deaths_1s_stall", false_deaths as f64);
    Ok(())
}
