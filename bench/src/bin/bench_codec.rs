//! `make bench-codec`: measures the erasure code and everybody beside it, and writes figures, table and plot.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::Value;
use storaged_bench::codec::case::Case;
use storaged_bench::codec::figures::Figures;
use storaged_bench::codec::machine::Machine;
use storaged_bench::codec::measure::{Bench, Series, Settings};
use storaged_bench::codec::{plot, table};

/// Measures storaged's erasure code against ISA-L, Rust crates and memcpy, all in the same rounds on pinned cores.
/// Rates are 1e9 bytes of data per second. Figures go to standard output as JSON unless --write says where.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Rounds; each has every contender once
    #[arg(long, default_value_t = 48)]
    rounds: usize,
    /// Only cases whose name begins so, such as encode_8_2 or fold
    #[arg(long, default_value = "")]
    cases: String,
    /// Only these contenders
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Numbers of cores to work on at once
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    cores: Vec<usize>,
    /// Takes in the figures of a run of reed-solomon-erasure built without its C kernels
    #[arg(long, value_name = "FILE")]
    merge: Option<PathBuf>,
    /// Writes codec.json, codec.md and codec.svg into this folder
    #[arg(long, value_name = "FOLDER")]
    write: Option<PathBuf>,
    /// The commit to name
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// The version of ISA-L to name
    #[arg(long, default_value = "unknown")]
    isal_version: String,
}

/// Bytes of data from RAM, at least, and of outputs; four times the last-level cache if that is more.
const ARENA_BYTES_MIN: usize = 512 << 20;

fn main() -> Result<()> {
    let options = Options::parse();
    let machine = Machine::read();
    let engine = storaged_codec::engine_from_env()?.name();
    let apart = options.merge.as_deref().map(read).transpose()?;
    let series = measure(&options, &machine)?;
    let mut figures = Figures::of(&series, engine);
    if let Some(apart) = &apart {
        figures.merge_apart(apart);
    }
    let said: [(&str, Value); 6] = [
        ("machine", machine.description.into()),
        (
            "date",
            time::OffsetDateTime::now_utc().date().to_string().into(),
        ),
        ("commit", options.commit.into()),
        ("engine", engine.into()),
        ("isal_version", options.isal_version.into()),
        ("rounds", options.rounds.into()),
    ];
    match options.write {
        None => println!("{:#}", figures.to_json(&said)),
        Some(folder) => write(&folder, &figures, &said)?,
    }
    Ok(())
}

fn read(path: &Path) -> Result<Figures> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    Figures::from_json(&text).with_context(|| format!("reading {}", path.display()))
}

fn measure(options: &Options, machine: &Machine) -> Result<Vec<Series>> {
    let settings = Settings {
        rounds: options.rounds.max(1),
        only: options.only.clone(),
        caches: machine.caches,
    };
    // Whole mebibytes times the number of windows, so that the windows begin at pages.
    let arena_bytes = ARENA_BYTES_MIN.max((4 * machine.last_level_bytes).next_multiple_of(4 << 20));
    let mut all = Vec::new();
    for cores in &options.cores {
        let mut bench = Bench::new(*cores, arena_bytes)?;
        let cases = Case::all().into_iter();
        for case in cases.filter(|case| case.to_string().starts_with(&options.cases)) {
            eprintln!("{case} on {cores}");
            all.extend(bench.measure(case, &settings)?);
        }
    }
    Ok(all)
}

fn write(folder: &Path, figures: &Figures, said: &[(&str, Value)]) -> Result<()> {
    let json = format!("{:#}\n", figures.to_json(said));
    let files = [
        ("codec.json", json),
        ("codec.md", table::markdown(figures, said)),
        ("codec.svg", plot::svg(figures, said)),
    ];
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    print!("{}", table::markdown(figures, said));
    Ok(())
}
