//! A job's token is changed for another one, under a job that saves: with processes, a durable directory, and the command that does it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::plan::CopyFault;
use storaged_sdk::wire::{CheckpointState, ManifestKey, Provenance, RefusalCode, RunId, Step};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::system::{System, executable, shards, wait};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\n";
const NODES: usize = 3;
const NEW: &[u8] = b"another secret of tests";

fn token_file(system: &System, name: &str, token: &[u8]) -> Result<PathBuf> {
    let path = system.root.path().join(name);
    fs::write(&path, token)?;
    fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
    Ok(path)
}

/// `storaged rotate`, as an operator runs it.
fn rotate(system: &System, old: &[u8], new: &[u8]) -> Result<()> {
    let (old, new) = (
        token_file(system, "old", old)?,
        token_file(system, "new", new)?,
    );
    let ended = Command::new(executable())
        .args(["rotate", "job", "--token-file"])
        .arg(old)
        .arg("--new-token-file")
        .arg(new)
        .arg("--socket")
        .arg(&system.sockets[1])
        .output()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

fn is_refused_everywhere(old: &Clients) -> Result<()> {
    for node in 0..NODES {
        let refused = old.reader(node).err().and_then(|it| it.downcast().ok());
        match refused {
            Some(ClientError::Refused(refusal)) if refusal.code == RefusalCode::WrongToken => {}
            other => anyhow::bail!("n{node}: expected the old token to be refused, got {other:?}"),
        }
    }
    Ok(())
}

fn provenance_of(system: &System, run: RunId, step: u64) -> PathBuf {
    let folder = format!("tier/job/run-{run}/step-{step}/storaged.provenance");
    system.root.path().join(folder)
}

/// What somebody makes who has a token: the record that is there, in that token's name.
fn sign(system: &System, path: &Path, by: &[u8], again_by: &[u8]) -> Result<()> {
    let key = |token: &[u8]| ManifestKey::of_token(&system.namespace, token);
    let record = Provenance::from_object(&fs::read(path)?, &key(by))?;
    Ok(fs::write(path, record.to_object(&key(again_by)))?)
}

#[test]
fn a_leaked_token_is_worth_nothing_once_the_job_has_another_one() -> Result<()> {
    let mut system = System::start(NODES, Some((2, 1)), TIER)?;
    let old = (*system).clone();
    let (run, mut trainers) = system.trainers(2)?;
    let saved = |step| shards(2, step);
    system.save(&mut trainers, 10, &saved(10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Durable)?;

    rotate(&system, &old.token, NEW)?;
    // Whoever did not hear the end of it asks again.
    rotate(&system, &old.token, NEW)?;
    let another = rotate(&system, &old.token, b"a third secret of tests");
    ensure!(another.is_err(), "the old token changes it again");
    system.token = NEW.to_vec();
    wait("all nodes to have heard of it", || {
        is_refused_everywhere(&old)
    })?;
    // The job goes on as it is.
    system.save(&mut trainers, 20, &saved(20), DurableWish::Required)?;
    system.wait(1, run, 20, CheckpointState::Durable)?;
    let path = provenance_of(&system, run, 20);
    sign(&system, &path, NEW, &old.token)?;
    drop(trainers);

    for node in 0..NODES {
        system.cluster.kill(node)?;
    }
    system.cluster.start_all()?;
    is_refused_everywhere(&old)?;
    let plan = system.reader(0)?.plan(None, WAIT_MS)?;
    let newest = plan.passed_over.first();
    let newest = newest.map(|one| (one.step, one.copy));
    ensure!(
        newest == Some((Step::new(20), Some(CopyFault::Forged))),
        "{plan:?}"
    );
    // What was durable before has the old token's MAC.
    ensure!(plan.step == Step::new(10), "{plan:?}");
    sign(&system, &path, &old.token, NEW)?;
    let rungs = system.restore(&[1, 2], 20, &saved(20))?;
    ensure!(rungs == [Rung::Durable; 2], "{rungs:?}");
    system.restore_step(&[0, 1], 10, &saved(10))?;
    let (_, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 30, &saved(30), DurableWish::Never)?;
    is_refused_everywhere(&old)
}
