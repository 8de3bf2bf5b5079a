//! Eight places whose registry is a bucket of a real S3 server: nodes are replaced under a saving job, the server's gateway is killed and
//! started again, and two nodes join at once.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged_bench::s3_server::{BUCKET, S3Server, credentials};
use storaged_sdk::wire::{RefusalCode, RunId};
use storaged_sdk::{ClientError, Trainer};
use storaged_tests::system::{System, executable, shards};

use crate::Figures;
use crate::nodes::{save, until};

const PORT: u16 = 7_488;
const PLACES: usize = 8;
/// Machines: two are spares.
const NODES: usize = PLACES + 2;
/// Longer than the place of a lost node is kept, and than a look at the registry takes.
const NOT_REPLACED_FOR: Duration = Duration::from_secs(6);

/// The job, and what it is on.
struct Job {
    system: System,
    run: RunId,
    trainers: Vec<Trainer>,
    step: u64,
}

impl Job {
    /// All places are filled, two spares wait, and step 1 is protected.
    fn start(server: &S3Server, directory: &std::path::Path) -> Result<Self> {
        let registry = format!(
            "{{ kind = \"s3\", bucket = \"{BUCKET}\", prefix = \"members\", endpoint = \"{}\", credentials_file = \"{}\" }}",
            server.endpoint(),
            credentials(directory)?.display()
        );
        let mut system = System::with_registry_in(
            &registry,
            NODES,
            PLACES,
            Some((3, 1)),
            "replace_after = \"3s\"\n",
        )?;
        (0..PLACES).try_for_each(|node| system.cluster.start(node))?;
        (0..PLACES).try_for_each(|node| system.cluster.wait_for_peers(node, PLACES - 1))?;
        (PLACES..NODES).try_for_each(|node| system.cluster.start(node))?;
        let (run, trainers) = system.trainers(2)?;
        let step = 0;
        let mut job = Self {
            system,
            run,
            trainers,
            step,
        };
        job.save()?;
        Ok(job)
    }

    /// Saves a step, which its ranks' nodes call protected.
    fn save(&mut self) -> Result<()> {
        self.step += 1;
        let Self {
            system, trainers, ..
        } = self;
        let saved = save(system, self.run, trainers, self.step, 0..2);
        saved.with_context(|| format!("saving step {}", self.step))
    }

    /// Who fills the places, as node 0 has it.
    fn filled(&self) -> Result<Vec<String>> {
        let page = self.system.cluster.page(0, "/status")?;
        let status: serde_json::Value = serde_json::from_str(&page.body)?;
        let places = status["membership"]["places"].as_array();
        let nodes = places
            .context("places")?
            .iter()
            .map(|it| it["node"].as_str());
        Ok(nodes.map(|node| node.unwrap_or("-").to_owned()).collect())
    }

    /// Waits until `spare` fills a place, and all places are linked.
    fn filled_by(&self, spare: usize) -> Result<()> {
        let found = until("the spare", || {
            let filled = self.filled()?;
            ensure!(filled.contains(&format!("n{spare}")), "{filled:?}");
            Ok(())
        })?;
        println!("n{spare} had a place {:.1} s later", found.as_secs_f64());
        Ok([0, 1, spare]
            .into_iter()
            .try_for_each(|node| self.system.cluster.wait_for_peers(node, PLACES - 1))?)
    }

    /// Which of the spares has a place.
    fn first_spare(&self) -> Result<usize> {
        let mut found = 0;
        until("a spare", || {
            let filled = self.filled()?;
            let spare = (PLACES..NODES).find(|node| filled.contains(&format!("n{node}")));
            found = spare.with_context(|| format!("{filled:?}"))?;
            Ok(())
        })?;
        Ok(found)
    }

    /// No run is opened while nobody can say whose its number is.
    fn is_refused_a_run(&self) -> Result<()> {
        let answer = self.system.reader(1)?.open_run(5_000);
        let Err(ClientError::Refused(refusal)) = answer else {
            anyhow::bail!("{answer:?}");
        };
        ensure!(refusal.code == RefusalCode::TimedOut, "{refusal}");
        Ok(())
    }
}

/// A node is lost while the gateway answers, another one while it does not; then both come back, and all ten have places.
pub fn measure(figures: &mut Figures) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let server = S3Server::start(directory.path().join("s3"), PORT)?;
    let mut job = Job::start(&server, directory.path())?;

    job.system.cluster.kill(2)?;
    let first = job.first_spare()?;
    job.filled_by(first)?;
    job.save()?;

    server.kill_gateway()?;
    job.save()?;
    job.is_refused_a_run()?;
    job.system.cluster.kill(5)?;
    std::thread::sleep(NOT_REPLACED_FOR);
    let filled = job.filled()?;
    ensure!(filled.contains(&"n5".to_owned()), "{filled:?}");
    server.start_gateway()?;
    let second = PLACES + NODES - 1 - first;
    job.filled_by(second)?;
    job.save()?;

    let resize = ["node", "resize", "10", "--config"];
    let resized = Command::new(executable())
        .args(resize)
        .arg(job.system.cluster.config_path(0))
        .output()?;
    ensure!(resized.status.success(), "{resized:?}");
    job.system.cluster.start(2)?;
    job.system.cluster.start(5)?;
    until("all places", || {
        let filled = job.filled()?;
        let all = filled.len() == NODES && !filled.contains(&"-".to_owned());
        ensure!(all, "{filled:?}");
        Ok(())
    })?;
    (0..NODES).try_for_each(|node| job.system.cluster.wait_for_peers(node, NODES - 1))?;
    job.save()?;
    let step = job.step;
    job.system.restore(&[0, 1], step, &shards(2, step))?;
    job.trainers.clear();
    let next = job.system.reader(1)?.open_run(60_000)?;
    ensure!(next.number() > job.run.number(), "{next} after {}", job.run);
    figures.insert("registry_s3_replaced", 2.0);
    Ok(())
}
