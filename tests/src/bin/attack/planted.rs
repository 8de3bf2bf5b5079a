//! What no daemon holds, done by whoever may do it: an attack program that does not tell of these tells of nothing. Run by `--only planted`.

use anyhow::Result;
use rustix::process::Signal;
use storaged_sdk::WithTrainers;
use storaged_sdk::wire::local::{DurableWish, Request};
use storaged_tests::hostile::{as_nobody, call};

use crate::enemy::{acquire, seal, trainer};
use crate::scene::Scene;

/// A daemon ends.
pub fn kill(scene: &Scene) -> Result<String> {
    scene.system.cluster.signal(2, Signal::KILL)?;
    scene.until("its end", || {
        anyhow::ensure!(scene.aborted() > 0, "it goes on");
        Ok(())
    })?;
    Ok("a daemon was killed".into())
}

/// The honest job loses what it has saved, at one moment or another while it would read it.
pub fn drop_job(scene: &Scene) -> Result<String> {
    let before = scene.honest.count().faults.len();
    for _ in 0..400 {
        let mut reader = scene.system.reader(0)?;
        reader.drop_job(WithTrainers::Too, 20_000)?;
        if scene.honest.count().faults.len() > before {
            break;
        }
    }
    Ok("its steps were dropped".into())
}

/// A daemon keeps memory: the description of a checkpoint whose other rank never seals, of a trainer that stays.
pub fn keep_memory(scene: &Scene) -> Result<String> {
    let stream = as_nobody(|| {
        let mut stream = trainer(&scene.blue[0], "stays", 2)?.stream;
        let granted = acquire(&mut stream, 4096)?;
        seal(&mut stream, granted.slot, 4096)?;
        let commit = Request::Commit {
            step: storaged_sdk::wire::Step::new(1),
            schema: vec![7; 60 << 20].into(),
            torch_metadata: Vec::new().into(),
            durable: DurableWish::Never,
        };
        let said = call(&mut stream, &commit)?;
        anyhow::ensure!(said == storaged_sdk::wire::local::Reply::Done, "{said:?}");
        Ok(stream)
    })?;
    // It is closed when this process ends.
    std::mem::forget(stream);
    Ok("60 MiB are kept".into())
}
