//! `make bench-net`: coding plans, repair and transport on a network of shaped links; figures, table and plot.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use storaged_bench::codec::machine::Machine;
use storaged_bench::net::command::obstacle;
use storaged_bench::net::network::{
    LinkRate, Network, NetworkSpec, Packets, remove_leftovers, remove_own,
};
use storaged_bench::net::raw::{self, Ends, How, Load, RawArgs};
use storaged_bench::net::scenario::{ALL, Bench, Scenario};
use storaged_bench::net::table::{NET, Report};
use storaged_bench::net::{plot, table};
use storaged_bench::node::{self, NODE, ONLY_FLOORS};

/// Measures plans, repair and transport between real daemons in network namespaces joined by shaped links. Needs root,
/// ip, tc and nft; without them it says so and ends well. Traffic stays inside the namespaces.
#[derive(Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    what: Option<What>,
    /// Which figures
    #[arg(long, value_enum, default_value_t = Suite::Net)]
    suite: Suite,
    /// Only this scenario, such as chain8 or repair; an unknown one gets the list
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The storaged executable; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    executable: Option<PathBuf>,
    /// Writes net.json, net.md and net.svg (or node.*, floors.*) into this folder
    #[arg(long, value_name = "FOLDER")]
    write: Option<PathBuf>,
    /// The commit to name
    #[arg(long, default_value = "unknown")]
    commit: String,
}

/// Figures that belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Suite {
    /// Plans, repair and transport on shaped links
    Net,
    /// What a node costs, on links without a limit
    Node,
    /// What bytes cost at least on this machine
    Floors,
}

impl Suite {
    fn scenarios(self) -> Vec<(&'static str, Scenario)> {
        match self {
            Self::Net => ALL.to_vec(),
            Self::Node => node::ALL.to_vec(),
            Self::Floors => node::ALL[..1].to_vec(),
        }
    }

    fn report(self) -> &'static Report {
        match self {
            Self::Net => &NET,
            Self::Node => &NODE,
            Self::Floors => &ONLY_FLOORS,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Node => "node",
            Self::Floors => "floors",
        }
    }
}

#[derive(Subcommand)]
enum What {
    /// One end of a plain transfer (the bench starts it)
    #[command(hide = true)]
    RawReceive(RawArgs),
    /// The other end
    #[command(hide = true)]
    RawSend(RawArgs),
    /// Tries one transport between two namespaces, without daemons
    Raw(TryArgs),
}

#[derive(Args)]
struct TryArgs {
    /// By what
    #[arg(long, value_enum)]
    how: How,
    /// Settings of quinn such as mtu=8952,cc=bbr; one try for each
    #[arg(long, default_value = "")]
    settings: Vec<String>,
    /// Bytes of a round
    #[arg(long, default_value = "1GiB")]
    bytes: String,
    /// Rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Largest IP packet of the link
    #[arg(long, default_value_t = 9000)]
    mtu: u16,
    /// Megabits per second that the link carries each way; without it there is no limit
    #[arg(long)]
    rate: Option<u64>,
}

fn main() -> ExitCode {
    match start(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-net: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(options: Options) -> Result<()> {
    match &options.what {
        Some(What::RawReceive(args)) => return raw::receive(args),
        Some(What::RawSend(args)) => return raw::send(args),
        Some(What::Raw(_)) | None => {}
    }
    if let Some(obstacle) = obstacle() {
        println!("bench-net is skipped: {obstacle}");
        return Ok(());
    }
    remove_leftovers().context("removing what an earlier bench left behind")?;
    let directory = Directory::make()?;
    remove_when_told_to_stop(directory.0.clone())?;
    match &options.what {
        Some(What::Raw(args)) => try_raw(args, &directory.0),
        _ => measure(&options, &directory.0),
    }
}

fn measure(options: &Options, directory: &Path) -> Result<()> {
    let executable = match &options.executable {
        Some(given) => given.clone(),
        None => std::env::current_exe()?.with_file_name("storaged"),
    };
    ensure!(
        executable.is_file(),
        "expected the storaged executable at {}: build it with `cargo build --release -p storaged`",
        executable.display()
    );
    let mut bench = Bench::new(executable, directory.to_owned());
    let mut failed = Vec::new();
    for (name, scenario) in chosen(options.suite, &options.only)? {
        let started = Instant::now();
        if let Err(error) = scenario(&mut bench) {
            eprintln!("scenario {name} failed: {error:#}");
            failed.push(name);
        }
        eprintln!("{name} took {:.0} s", started.elapsed().as_secs_f64());
    }
    let said = [
        ("machine", Machine::read().description),
        ("date", time::OffsetDateTime::now_utc().date().to_string()),
        ("commit", options.commit.clone()),
    ];
    match &options.write {
        None => println!("{:#}", bench.figures.to_json(&said)),
        Some(folder) => write(folder, options.suite, &bench, &said)?,
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn chosen(suite: Suite, only: &[String]) -> Result<Vec<(&'static str, Scenario)>> {
    let all = suite.scenarios();
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!(
            "expected a scenario out of {}, got {unknown}",
            names.join(", ")
        );
    }
    let wanted = |name: &str| only.is_empty() || only.iter().any(|only| only == name);
    Ok(all.into_iter().filter(|(name, _)| wanted(name)).collect())
}

fn try_raw(args: &TryArgs, directory: &Path) -> Result<()> {
    let bytes: bytesize::ByteSize = args.bytes.parse().map_err(anyhow::Error::msg)?;
    let certificates = directory.join("certs");
    raw::certificates(&certificates)?;
    let network = Network::make(NetworkSpec {
        nodes: 2,
        rate: args.rate.map(LinkRate::megabits),
        mtu: args.mtu,
        packets: Packets::Whole,
    })?;
    println!(
        "{:>10} {:>12} {:>8}  settings",
        "GB/s", "CPU s/GB", "kernel"
    );
    for settings in &args.settings {
        let load = Load {
            how: args.how,
            settings,
            bytes: bytes.as_u64(),
            rounds: args.rounds,
        };
        let done = raw::transfer(&network, &certificates, Ends { from: 0, to: 1 }, &load)?;
        println!(
            "{:>10.3} {:>12.3} {:>8.2}  {settings}",
            done.rate / 1e9,
            done.cpu_per_gb,
            done.system_share
        );
    }
    Ok(())
}

fn write(folder: &Path, suite: Suite, bench: &Bench, said: &[(&str, String)]) -> Result<()> {
    let (report, figures) = (suite.report(), &bench.figures);
    let table = table::markdown(report, figures, said);
    let mut files = vec![
        ("json", format!("{:#}\n", figures.to_json(said))),
        ("md", table.clone()),
    ];
    if !report.marks.is_empty() {
        files.push(("svg", plot::svg(report, figures, said)));
    }
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for (extension, text) in files {
        let path = folder.join(format!("{}.{extension}", suite.name()));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    print!("{table}");
    Ok(())
}

/// A directory that goes when the bench ends.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("stbn-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left behind in the temporary directory harms nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// On SIGINT or SIGTERM: removes the namespaces, kills what runs in them, and ends.
fn remove_when_told_to_stop(directory: PathBuf) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            use tokio::signal::unix::{SignalKind, signal};
            runtime.block_on(async {
                let Ok(mut term) = signal(SignalKind::terminate()) else {
                    return;
                };
                tokio::select! {
                    _ = term.recv() => {}
                    _ = tokio::signal::ctrl_c() => {}
                }
                if let Err(error) = remove_own() {
                    eprintln!("removing the network failed: {error:#}");
                }
                let _ = fs::remove_dir_all(&directory);
                std::process::exit(130);
            });
        })?;
    Ok(())
}
