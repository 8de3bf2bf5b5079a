//! Somebody who may write in the durable tier, and has no job's token: what he puts there is not followed, not waited for and not believed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::plan::CopyFault;
use storaged_sdk::wire::{
    CheckpointState, Digest, ManifestBytes, Namespace, Rank, Refusal, RunId, Step,
};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::system::{System, shards, wait};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\n";

/// The folder of a job's run in the tier.
fn run_folder(system: &System, run: RunId) -> PathBuf {
    system.root.path().join(format!("tier/job/run-{run}"))
}

/// Saves steps that become durable; the run.
fn save_all(system: &System, clients: &Clients, steps: &[u64]) -> Result<RunId> {
    let (run, mut trainers) = clients.trainers(1)?;
    for step in steps {
        let bytes = shards(1, *step);
        clients.save(&mut trainers, *step, &bytes, DurableWish::Required)?;
        clients.wait(0, run, *step, CheckpointState::Durable)?;
    }
    ensure!(system.root.path().join("tier").is_dir());
    Ok(run)
}

/// One node whose steps are durable, and whose RAM is lost.
fn restarted(extra: &str, steps: &[u64]) -> Result<(System, RunId)> {
    let mut system = System::start(1, None, &format!("{TIER}{extra}"))?;
    let run = save_all(&system, &system, steps)?;
    system.cluster.kill(0)?;
    system.cluster.start_all()?;
    Ok((system, run))
}

/// Another tenant of the same node.
fn another_job(system: &System) -> Result<Clients> {
    Ok(Clients {
        namespace: Namespace::new("other")?,
        token: b"another token of 16 bytes or more".to_vec(),
        ..(**system).clone()
    })
}

fn refusal<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> Result<Refusal> {
    match outcome {
        Err(ClientError::Refused(refusal)) => Ok(refusal),
        other => anyhow::bail!("expected a refusal, got {other:?}"),
    }
}

fn names(text: &str, at: &Path, what: &str) -> Result<()> {
    let at = at.display().to_string();
    ensure!(
        text.contains(&at) && text.contains(what),
        "expected {what} at {at} to be named: {text}"
    );
    Ok(())
}

#[test]
fn a_fifo_in_one_jobs_folder_holds_up_nobody() -> Result<()> {
    let (system, run) = restarted("", &[10])?;
    let plan = system.reader(0)?.plan(None, WAIT_MS)?;
    let manifest = system.reader(0)?.manifest(plan.manifest)?;
    let leaves = run_folder(&system, run).join("step-10/storaged.leaves.0");
    fs::remove_file(&leaves)?;
    mknodat(CWD, &leaves, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    std::thread::scope(|threads| {
        let restores: Vec<_> = (0..40)
            .map(|_| {
                threads.spawn(|| {
                    let mut reader = system.reader(0)?;
                    let opened = reader.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS);
                    names(&refusal(opened.map(|_| ()))?.message, &leaves, "a FIFO")
                })
            })
            .collect();
        let other = another_job(&system)?;
        save_all(&system, &other, &[10, 20])?;
        for restore in restores {
            restore.join().expect("it does not panic")?;
        }
        Ok(())
    })
}

#[test]
fn a_run_folder_that_is_a_link_is_refused_by_name_and_nothing_is_written_behind_it() -> Result<()> {
    let system = System::start(1, None, TIER)?;
    let elsewhere = system.root.path().join("elsewhere");
    fs::create_dir(&elsewhere)?;
    let (run, mut trainers) = system.trainers(1)?;
    let folder = run_folder(&system, run);
    fs::create_dir_all(folder.parent().context("a parent")?)?;
    symlink(&elsewhere, &folder)?;
    let bytes = shards(1, 10);
    system.save(&mut trainers, 10, &bytes, DurableWish::Required)?;
    wait("the upload to be refused", || {
        let mut reader = system.reader(0)?;
        let waited = reader.wait(run, Step::new(10), CheckpointState::Durable, 200);
        names(&refusal(waited)?.message, &folder, "a symbolic link")
    })?;
    save_all(&system, &another_job(&system)?, &[10])?;
    ensure!(fs::read_dir(&elsewhere)?.count() == 0, "written elsewhere");
    // Nothing but the link was wrong.
    fs::remove_file(&folder)?;
    system.wait(0, run, 10, CheckpointState::Durable)?;
    system.restore(&[0], 10, &bytes).map(drop)
}

#[test]
fn a_plan_names_the_link_that_it_does_not_follow() -> Result<()> {
    let (system, run) = restarted("", &[10])?;
    let folder = run_folder(&system, run);
    let away = system.root.path().join("away");
    fs::rename(&folder, &away)?;
    symlink(&away, &folder)?;
    let planned = system.reader(0)?.plan(None, WAIT_MS);
    names(&refusal(planned)?.message, &folder, "a symbolic link")
}

/// A step that is like another one, with all digests right, and an entry in the index.
fn forge(system: &System, run: RunId, like: u64, step: u64) -> Result<()> {
    let folder = run_folder(system, run);
    let (from, to) = (
        folder.join(format!("step-{like}")),
        folder.join(format!("step-{step}")),
    );
    fs::create_dir(&to)?;
    for entry in fs::read_dir(&from)? {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    let object = fs::read(from.join("storaged.manifest"))?;
    let (bytes, name) = object.split_last_chunk::<32>().context("a manifest")?;
    let real = ManifestBytes::verify(bytes.to_vec(), Digest::from_bytes(name))?;
    let mut record = real.manifest().clone();
    record.step = Step::new(step);
    let forged = record.seal()?;
    let object = [forged.bytes(), forged.name().as_bytes()].concat();
    fs::write(to.join("storaged.manifest"), object)?;
    let numbers = [run.number(), run.identity(), step];
    let numbers = numbers.map(|number| format!("{:016x}", !number));
    let index = system.root.path().join("tier/job/.storaged/steps");
    fs::write(index.join(format!("{}.full", numbers.join("-"))), b"")?;
    Ok(())
}

#[test]
fn a_forged_step_is_not_offered_and_said() -> Result<()> {
    let (system, run) = restarted("", &[10, 20])?;
    forge(&system, run, 20, 30)?;
    let provenance = run_folder(&system, run).join("step-30/storaged.provenance");
    let says = |expected: CopyFault| -> Result<()> {
        let plan = system.reader(0)?.plan(None, WAIT_MS)?;
        let copy = plan.passed_over.first().and_then(|one| one.copy);
        let got = (plan.step, copy);
        ensure!(got == (Step::new(20), Some(expected)), "{plan:?}");
        Ok(())
    };
    says(CopyFault::Forged)?;
    fs::remove_file(&provenance)?;
    says(CopyFault::WithoutMac)?;
    system.restore(&[0], 20, &shards(1, 20))?;
    let refused = refusal(system.reader(0)?.plan(Some(Step::new(30)), WAIT_MS))?;
    ensure!(refused.message.contains("has no MAC"), "{refused:?}");
    Ok(())
}
