//! Attacks by a hand on the durable directory: what lies there in place of one tenant's objects, while the other one uploads.

use std::fs;
use std::os::unix::fs::{OpenOptionsExt, symlink as link};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, FileType, Mode};
use storaged_sdk::wire::Rank;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::clients::Clients;
use storaged_tests::hostile::as_nobody;

use crate::enemy::{leave, saved};
use crate::honest::DURABLE_EVERY;
use crate::scene::Scene;

/// Restores at once.
const RESTORES: usize = 40;

/// Files below a folder; links are not followed.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Where the tier keeps a job of blue's.
fn folder(scene: &Scene, job: &str) -> Result<PathBuf> {
    let mut entries = fs::read_dir(scene.tier())?.flatten();
    let of_job = entries.find(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.contains("blue") && name.ends_with(job)
    });
    Ok(of_job
        .with_context(|| format!("no folder of {job}"))?
        .path())
}

/// The objects of a job that has saved one durable step and has left RAM, but for its manifest: with it nothing else is read.
fn shards_of(scene: &Scene, job: &str) -> Result<(Vec<PathBuf>, Clients)> {
    let clients = as_nobody(|| {
        let saved = saved(scene, job, 1, DurableWish::Required)?;
        let clients = saved.clients.clone();
        leave(saved)?;
        Ok(clients)
    })?;
    let mut objects = files(&folder(scene, job)?)?;
    objects.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !name.contains("manifest") && path.to_string_lossy().contains("step-")
    });
    ensure!(!objects.is_empty(), "no objects of {job} in the tier");
    Ok((objects, clients))
}

/// How a restore of a job's only step ends; each is bounded by its time-outs.
fn restore(clients: &Clients) -> Result<Vec<u8>> {
    let mut reader = clients.reader(0)?;
    let plan = reader.plan(None, 5_000)?;
    let manifest = reader.manifest(plan.manifest)?;
    let shard = reader.open_shard(&manifest, Rank::new(0), Vec::new(), 5_000)?;
    let mut got = vec![0; 4096];
    shard.read_at(0, &mut got)?;
    Ok(got)
}

/// Restores by many threads while the other tenant's steps become durable; how many were right.
fn restores(scene: &Scene, clients: &Clients) -> Result<(usize, Result<()>)> {
    std::thread::scope(|scope| {
        let all = as_nobody(|| {
            let one = |_| scope.spawn(|| restore(clients));
            Ok((0..RESTORES).map(one).collect::<Vec<_>>())
        })?;
        // At least two durable steps of the other tenant.
        let endured = scene.endure(2 * DURABLE_EVERY);
        let ended = all.into_iter().filter_map(|it| it.join().ok());
        Ok((ended.filter(Result::is_ok).count(), endured))
    })
}

/// Whoever waits for the other end of a pipe goes on.
fn let_go(pipes: &[PathBuf]) {
    for pipe in pipes {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        for _ in 0..2 * RESTORES {
            let opened = fs::File::options()
                .write(true)
                .custom_flags(nonblocking)
                .open(pipe);
            if opened.is_err() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Pipes in place of a job's shards: whoever opens one waits for ever, unless it looks first.
pub fn fifo(scene: &Scene) -> Result<String> {
    let (objects, clients) = shards_of(scene, "pipes")?;
    for object in &objects {
        fs::remove_file(object)?;
        rustix::fs::mknodat(CWD, object, FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    }
    let (right, endured) = restores(scene, &clients)?;
    let_go(&objects);
    endured.context("with pipes in place of another tenant's objects")?;
    ensure!(right == 0, "{right} restores from pipes");
    Ok(format!(
        "{} pipes, {RESTORES} restores refused",
        objects.len()
    ))
}

/// Links: a shard that is another file, and a job's folder that is somewhere else.
pub fn symlink(scene: &Scene) -> Result<String> {
    let (objects, clients) = shards_of(scene, "links")?;
    let secret = scene.system.root.path().join("secret");
    fs::write(&secret, vec![42; 2 << 20])?;
    for object in &objects {
        fs::remove_file(object)?;
        link(&secret, object)?;
    }
    let (right, endured) = restores(scene, &clients)?;
    endured.context("with links in place of another tenant's objects")?;
    ensure!(right == 0, "{right} restores of a file outside of the tier");

    let outside = scene.system.root.path().join("outside");
    fs::create_dir(&outside)?;
    let own = folder(scene, "links")?;
    let name = own.file_name().context("a name")?.to_string_lossy();
    link(&outside, scene.tier().join(name.replace("links", "moved")))?;
    let said = as_nobody(|| saved(scene, "moved", 1, DurableWish::Required).map(drop));
    let written = files(&outside)?.len();
    ensure!(
        written == 0,
        "{written} objects were written outside of the tier through a link, and the save ended with {said:?}"
    );
    let how = said.err().map(|error| error.root_cause().to_string());
    Ok(format!(
        "{RESTORES} restores refused; a save through a link: {how:?}"
    ))
}
