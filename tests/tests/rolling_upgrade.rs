//! All nodes' daemons are upgraded in turn below their keepers, while a job saves without pause over connections that nobody makes again.

use anyhow::{Result, ensure};
use storaged_tests::rolling::{SavingJob, upgrade};
use storaged_tests::system::System;

const NODES: usize = 3;

#[test]
fn a_job_that_saves_all_the_time_loses_no_step_and_at_most_one_save_per_node() -> Result<()> {
    let system = System::start_kept(NODES, Some((2, 1)), "")?;
    let mut job = SavingJob::start((*system).clone(), 2)?;
    for node in [2, 0, 1, 0, 2, 1] {
        let upgraded = upgrade(&system, &job, node)?;
        println!("n{node}: {upgraded:?}");
        ensure!(upgraded.lost == 0, "n{node}: {upgraded:?}");
        ensure!(upgraded.failed.len() <= 1, "n{node}: {upgraded:?}");
        ensure!(upgraded.repaired == 0, "n{node}: {upgraded:?}");
    }
    let newest = job.stop()?;
    let failed = job.failed().len() as u64;
    println!("{newest} steps, {failed} saves failed");
    ensure!(newest > 2 * failed + 12, "{newest} steps, {failed} failed");
    Ok(())
}
