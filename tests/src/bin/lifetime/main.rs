//! What a cluster's months are made of, measured with real processes: restarts, upgrades, nodes that are lost and replaced, every loss of
//! up to m nodes, an S3 server as registry, drains, the scrub, and kills at any moment. Writes the keys of `docs/bench/lifetime.json`.
//!
//!     lifetime [--write FILE] [--kills 200] [--only restart,restart-much,upgrade,foreseen,replace,registry,detect,losses,losses-replaced,losses-mid-epoch,losses-beyond,drain,scrub,torture]

mod beyond;
mod care;
mod detect;
mod foreseen;
mod losses;
mod mid_epoch;
mod nodes;
mod registry;
mod replace;
mod restart;
mod torture;
mod trainer;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// Figures by their keys.
type Figures = BTreeMap<&'static str, f64>;

/// Figures of which any but zero is a defect.
const PROMISES: [&str; 10] = [
    "restart_repair_bytes",
    "restart_repair_bytes_4gib",
    "upgrade_steps_lost",
    "upgrade_repair_bytes",
    "loss_subsets_failed",
    "loss_subsets_replaced_failed",
    "loss_subsets_mid_epoch_failed",
    "loss_beyond_m_failed",
    "kills_lost",
    "kills_leaking_nodes",
];

#[derive(Parser)]
struct Args {
    /// File whose keys are replaced by what is measured
    #[arg(long)]
    write: Option<PathBuf>,
    /// Kills of the torture
    #[arg(long, default_value_t = 200)]
    kills: u32,
    /// Seed of the torture
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// What the torture kills: one rank
    #[arg(long, hide = true, num_args = 5)]
    trainer: Vec<String>,
    /// These parts alone
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

fn write(file: &PathBuf, figures: &Figures) -> Result<()> {
    let known = std::fs::read_to_string(file).unwrap_or_else(|_| "{}".into());
    let mut known: BTreeMap<String, serde_json::Value> = serde_json::from_str(&known)?;
    for (key, figure) in figures {
        let rounded = (figure * 1000.0).round() / 1000.0;
        known.insert((*key).into(), rounded.into());
    }
    let text = serde_json::to_string_pretty(&known)? + "\n";
    std::fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.trainer.is_empty() {
        return trainer::serve(&args.trainer);
    }
    let mut figures = Figures::new();
    let torture = |figures: &mut Figures| torture::measure(figures, args.kills, args.seed);
    type Part<'a> = (&'a str, &'a dyn Fn(&mut Figures) -> Result<()>);
    let parts: [Part<'_>; 14] = [
        ("restart", &restart::restarts),
        ("restart-much", &restart::restarts_with_much),
        ("upgrade", &restart::upgrades),
        ("foreseen", &foreseen::measure),
        ("detect", &detect::measure),
        ("replace", &replace::measure),
        ("registry", &registry::measure),
        ("losses", &losses::measure),
        ("losses-replaced", &losses::while_replaced),
        ("losses-mid-epoch", &mid_epoch::measure),
        ("losses-beyond", &beyond::measure),
        ("drain", &care::drain),
        ("scrub", &care::scrub),
        ("torture", &torture),
    ];
    for (name, measure) in parts {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        let began = Instant::now();
        measure(&mut figures).with_context(|| format!("measuring {name}"))?;
        println!("{name}: {:.0} s", began.elapsed().as_secs_f64());
        if let Some(file) = &args.write {
            write(file, &figures)?;
        }
    }
    for (key, figure) in &figures {
        println!("{key} {figure:.3}");
    }
    for promise in PROMISES {
        let broken = figures.get(promise).copied().unwrap_or_default();
        ensure!(broken == 0.0, "{promise} is {broken}: must be 0");
    }
    Ok(())
}
