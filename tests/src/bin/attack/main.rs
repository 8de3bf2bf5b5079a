//! Attacks on a node by its own users, by a hand on its durable directory and by another node of its cluster, each with real processes, while the job of another tenant saves
//! and restores. Says which of them held, what each cost, and writes the keys of `docs/bench/security.json`.
//!
//!     attack [--write FILE] [--quick] [--only NAME,NAME] [--memory-wait 60]
//!
//! Run as root: the hostile programs are threads of user id 65534.

mod connections;
mod cross;
mod enemy;
mod honest;
mod peer;
mod planted;
mod report;
mod requests;
mod scene;
mod slots;
mod tier;
mod trial;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use report::Report;
use scene::{Enemy, Scene};
use trial::{Attack, Length, Trial};

#[derive(Parser)]
struct Args {
    /// File whose keys are replaced by what is measured
    #[arg(long)]
    write: Option<PathBuf>,
    /// The short attacks alone, in about a minute
    #[arg(long)]
    quick: bool,
    /// These attacks alone
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Seconds within which memory that an attack took is given back
    #[arg(long, default_value_t = 60)]
    memory_wait: u64,
}

/// An attack that runs in seconds is one of the quick set.
const fn quick(name: &'static str, run: fn(&Scene) -> Result<String>) -> Attack {
    Attack {
        name,
        length: Length::Quick,
        enemy: Enemy::User,
        run,
    }
}

const fn long(name: &'static str, run: fn(&Scene) -> Result<String>) -> Attack {
    Attack {
        name,
        length: Length::Long,
        enemy: Enemy::User,
        run,
    }
}

/// The same by a node.
const fn by_a_node(attack: Attack) -> Attack {
    Attack {
        enemy: Enemy::Node,
        ..attack
    }
}

/// All of them. Those that leave files in the durable directory come late, and then the one after which the tenant may open no job for a while.
/// A node's come last, in a cluster of their own.
const ATTACKS: [Attack; 37] = [
    quick("frames_of_a_stranger", connections::frames_of_a_stranger),
    quick(
        "connections_of_a_stranger",
        connections::connections_of_a_stranger,
    ),
    quick(
        "connections_of_a_tenant",
        connections::connections_of_a_tenant,
    ),
    quick("half_open_http", connections::half_open_http),
    quick("wrong_tokens", connections::wrong_tokens),
    long("status_flood", connections::status_flood),
    long("list_flood", connections::list_flood),
    long("waits_by_the_thousand", connections::waits_by_the_thousand),
    quick(
        "descriptors_with_a_frame",
        connections::descriptors_with_a_frame,
    ),
    quick("frames_of_a_tenant", connections::frames_of_a_tenant),
    long("commit_of_64_mib", requests::commit_of_64_mib),
    long("commit_of_16_mib", requests::commit_of_16_mib),
    quick("five_waiting_commits", requests::five_waiting_commits),
    quick("commits_again_and_again", requests::commits_again_and_again),
    quick("millions_of_ranges", requests::millions_of_ranges),
    quick("longest_list_of_ranges", requests::longest_list_of_ranges),
    quick("ranges_of_the_tier", requests::ranges_of_the_tier),
    quick("huge_run_numbers", requests::huge_run_numbers),
    quick(
        "metadata_that_unpacks_to_a_gib",
        requests::metadata_that_unpacks_to_a_gib,
    ),
    long(
        "schema_that_unpacks_to_a_gib",
        requests::schema_that_unpacks_to_a_gib,
    ),
    quick("holes_in_a_slot", slots::holes_in_a_slot),
    quick("writes_after_the_seal", slots::writes_after_the_seal),
    quick("writes_of_a_reader", slots::writes_of_a_reader),
    quick("descriptors_reopened", slots::descriptors_reopened),
    quick("all_memory_taken", slots::all_memory_taken),
    quick("descriptors_kept", slots::descriptors_kept),
    long("acquired_never_sealed", slots::acquired_never_sealed),
    long("boards_without_end", slots::boards_without_end),
    long("fifo_in_the_tier", tier::fifo),
    long("symlink_in_the_tier", tier::symlink),
    long("twenty_thousand_runs", requests::twenty_thousand_runs),
    by_a_node(quick("fences_of_a_node", peer::fences_without_end)),
    by_a_node(long("questions_of_a_node", peer::questions_without_end)),
    by_a_node(quick("lies_of_a_node", peer::lies_about_steps)),
    by_a_node(long("sessions_of_a_node", peer::sessions_without_end)),
    by_a_node(long("parcels_of_a_node", peer::parcels_that_never_come)),
    by_a_node(long("noise_of_a_node", peer::noise)),
];

/// By this name alone: each of them must be told of.
const PLANTED: [Attack; 3] = [
    quick("planted_kill", planted::kill),
    quick("planted_drop", planted::drop_job),
    quick("planted_memory", planted::keep_memory),
];

impl Args {
    fn names(&self, name: &str) -> bool {
        self.only.iter().any(|only| only == name)
    }

    fn attacks(&self) -> impl Iterator<Item = &'static Attack> {
        let chosen = |attack: &&Attack| {
            let named = self.only.is_empty() || self.names(attack.name);
            named && !(self.quick && attack.length == Length::Long)
        };
        let planted = PLANTED.iter().filter(|_| self.names("planted"));
        ATTACKS.iter().filter(chosen).chain(planted)
    }
}

/// A thousand connections have two ends; the daemons, which are started by this process, have limits of their own.
fn raise_descriptors() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        rustix::process::geteuid().is_root(),
        "expected root: the hostile programs become user id 65534"
    );
    raise_descriptors()?;
    let mut report = Report::default();
    let mut trial = Trial::new(Duration::from_secs(args.memory_wait));
    for attack in args.attacks() {
        trial.run(attack, &mut report)?;
    }
    if args.only.is_empty() || args.names(cross::NAME) {
        trial.cross(&mut report)?;
    }
    report.print();
    if let Some(file) = &args.write {
        report.write(file)?;
    }
    report.check()
}
