//! What one tenant of a node can do to another with the settings that are shipped and no token on either side: each operation of the local
//! protocol, by the job's own name, by the one that operators see, by its run, by the name of its manifest and by the number of its slot.

use anyhow::{Context, Result, ensure};
use storaged_sdk::Trainer;
use storaged_sdk::wire::drain::{DrainOrder, PlaceAfter};
use storaged_sdk::wire::failed::FailureReport;
use storaged_sdk::wire::local::{
    BoardKind, DurableWish, Keep, LiveRun, PinnedOnes, Removal, Reply, Request,
};
use storaged_sdk::wire::succession::{SEAL_BYTES, TokenStanding};
use storaged_sdk::wire::{CheckpointState, Digest, Namespace, Rank, Rotation, RunId, SlotId, Step};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::hostile::{as_nobody, call, hello};
use storaged_tests::system::shards;

use crate::enemy::{connect, greeted, say_hello_as_trainer, trainer};
use crate::report::Report;
use crate::scene::Scene;
use crate::slots::open_shard;

/// As `--only` has it.
pub const NAME: &str = "cross_tenant";
const JOB: &str = "vault";
const STEP: u64 = 7;
const SHORT_MS: u32 = 1_000;
const BURGLARS_TOKEN: &[u8] = b"the token of a burglar";

/// What the other tenant's job has, and everything of it that a log or a page could have told.
struct Vault<'a> {
    scene: &'a Scene,
    clients: Clients,
    trainer: Trainer,
    run: RunId,
    manifest: Digest,
    /// A slot that its trainer has acquired and not sealed.
    slot: storaged_sdk::StagedSlot,
}

/// Whether an operation came about: what shows it.
type Crossing = Result<Option<String>>;

impl<'a> Vault<'a> {
    fn fill(scene: &'a Scene) -> Result<Self> {
        let mut clients = (*scene.system).clone();
        clients.namespace = Namespace::new(JOB)?;
        let (run, mut trainers) = clients.trainers(1)?;
        clients.save(&mut trainers, STEP, &shards(1, STEP), DurableWish::Required)?;
        clients.wait(0, run, STEP, CheckpointState::Durable)?;
        let mut reader = clients.reader(0)?;
        reader.board(Rank::new(0), BoardKind::Steps, 4096)?;
        let manifest = reader.plan(None, WAIT_MS)?.manifest;
        let mut trainer = trainers.remove(0);
        let slot = trainer.acquire(1 << 20, WAIT_MS)?;
        Ok(Self {
            scene,
            clients,
            trainer,
            run,
            manifest,
            slot,
        })
    }

    /// What blue's job of the same name is answered.
    fn asked(&self, request: &Request) -> Result<Reply> {
        as_nobody(|| call(&mut greeted(&self.scene.blue[0], JOB)?, request))
    }

    /// The same of a program that says no hello.
    fn asked_unnamed(&self, request: &Request) -> Result<Reply> {
        as_nobody(|| call(&mut connect(&self.scene.blue[0])?, request))
    }

    /// Whether an answer tells of red: of its name, its run or its manifest.
    fn tells(&self, reply: &Reply) -> Option<String> {
        let text = format!("{reply:?}");
        let signs = [
            "red~".to_owned(),
            self.run.to_string(),
            self.manifest.to_string(),
        ];
        signs.iter().any(|sign| text.contains(sign)).then_some(text)
    }

    /// An answer that must be a refusal, and tell nothing.
    fn refused(&self, reply: &Reply) -> Option<String> {
        match reply {
            Reply::Refused(_) => self.tells(reply),
            other => Some(format!("{other:?}")),
        }
    }

    fn is_there(&self) -> Option<String> {
        let restored = self.clients.restore(&[0], STEP, &shards(1, STEP));
        restored.err().map(|error| format!("{error:#}"))
    }
}

/// Each operation that is tried.
type Operation = (&'static str, fn(&Vault<'_>) -> Crossing);

const OPERATIONS: [Operation; 28] = [
    ("hello_by_full_name", hello_by_full_name),
    ("others_socket", others_socket),
    ("operators_socket", operators_socket),
    ("status_names", status_names),
    ("list", list),
    ("http_names", http_names),
    ("restart_safe", restart_safe),
    ("plan", plan),
    ("plan_drill", plan_drill),
    ("verdict", verdict),
    ("read_by_name", read_by_name),
    ("read_by_manifest", read_by_manifest),
    ("follow_its_shard", follow_its_shard),
    ("manifest_by_digest", manifest_by_digest),
    ("verify", verify),
    ("wait", wait),
    ("board", board),
    ("join_its_run", join_its_run),
    ("seal_its_slot", seal_its_slot),
    ("release_its_slot", release_its_slot),
    ("mark_failed", mark_failed),
    ("lift_quarantine", lift_quarantine),
    ("pin", pin),
    ("remove", remove),
    ("drop", drop_job),
    ("rotate_its_token", rotate_its_token),
    ("open_run_and_fence", open_run_and_fence),
    ("drain", drain),
];

/// # Errors
/// If there is no job to attack, or it does not go on after.
pub fn measure(scene: &Scene, report: &mut Report) -> Result<()> {
    let mut vault = Vault::fill(scene)?;
    for (name, operation) in OPERATIONS {
        let came_to = operation(&vault).with_context(|| format!("trying {name}"))?;
        report.cross(name, came_to);
    }
    let Vault { trainer, slot, .. } = &mut vault;
    let went_on = slot
        .copy_in(0, &shards(1, STEP + 1)[0])
        .and_then(|()| {
            trainer.seal(
                slot,
                Step::new(STEP + 1),
                shards(1, STEP + 1)[0].len() as u64,
            )
        })
        .and_then(|()| {
            trainer.commit(Step::new(STEP + 1), vec![1], Vec::new(), DurableWish::Never)
        });
    let spoilt = went_on.err().map(|error| error.to_string());
    report.cross("hold_up_its_next_save", spoilt);
    scene.endure(1)
}

fn hello_by_full_name(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked_unnamed(&hello("red~vault", b"")?)?;
    Ok(vault
        .refused(&said)
        .filter(|_| matches!(said, Reply::Welcome { .. })))
}

fn others_socket(vault: &Vault<'_>) -> Crossing {
    let said = as_nobody(|| call(&mut connect(vault.scene.red())?, &hello(JOB, b"")?));
    Ok(said.ok().and_then(|said| vault.refused(&said)))
}

fn operators_socket(vault: &Vault<'_>) -> Crossing {
    let socket = vault.scene.red().with_file_name("admin.sock");
    let said = as_nobody(|| call(&mut connect(&socket)?, &Request::Status));
    Ok(said.ok().and_then(|said| vault.refused(&said)))
}

fn status_names(vault: &Vault<'_>) -> Crossing {
    let named = vault.tells(&vault.asked(&Request::Status)?);
    Ok(named.or(vault.tells(&vault.asked_unnamed(&Request::Status)?)))
}

fn list(vault: &Vault<'_>) -> Crossing {
    let all = vault.asked(&Request::List { namespace: None })?;
    let full = Namespace::new("red~vault")?;
    let by_name = vault.asked(&Request::List {
        namespace: Some(full),
    })?;
    let is_list = matches!(&by_name, Reply::Checkpoints(found) if !found.is_empty());
    Ok(vault
        .tells(&all)
        .or(is_list.then(|| format!("{by_name:?}"))))
}

fn http_names(vault: &Vault<'_>) -> Crossing {
    for page in ["/", "/status", "/metrics", "/healthz", "/readyz"] {
        let shown = as_nobody(|| Ok(vault.scene.system.cluster.page(0, page)?))?;
        if shown.body.contains(JOB) {
            return Ok(Some(format!("{page} names it")));
        }
    }
    Ok(None)
}

fn restart_safe(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::RestartSafe { bears: None })?;
    Ok(vault.tells(&said))
}

fn plan(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Plan {
        step: Some(Step::new(STEP)),
        timeout_ms: SHORT_MS,
        allow_older: true,
    })?;
    Ok(vault.refused(&said))
}

fn plan_drill(vault: &Vault<'_>) -> Crossing {
    for step in [None, Some(Step::new(STEP))] {
        let timeout_ms = SHORT_MS;
        let said = vault.asked(&Request::PlanDrill { step, timeout_ms })?;
        if let Some(told) = vault.refused(&said) {
            return Ok(Some(told));
        }
    }
    Ok(None)
}

fn verdict(vault: &Vault<'_>) -> Crossing {
    let timeout_ms = SHORT_MS;
    Ok(vault.tells(&vault.asked(&Request::Verdict { timeout_ms })?))
}

fn read_by_name(vault: &Vault<'_>) -> Crossing {
    let read = as_nobody(|| {
        let clients = vault.scene.job(JOB)?;
        Ok(clients.restore(&[0], STEP, &shards(1, STEP)).is_ok())
    })?;
    Ok(read.then(|| "its bytes".into()))
}

fn read_by_manifest(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&open_shard(vault.manifest))?;
    Ok(vault
        .refused(&said)
        .filter(|_| !matches!(said, Reply::Refused(_))))
}

fn follow_its_shard(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::FollowShard {
        manifest: vault.manifest,
        rank: Rank::new(0),
        timeout_ms: SHORT_MS,
    })?;
    Ok(vault.refused(&said))
}

fn manifest_by_digest(vault: &Vault<'_>) -> Crossing {
    let manifest = vault.manifest;
    let said = vault.asked(&Request::GetManifest { manifest })?;
    Ok(vault
        .refused(&said)
        .filter(|_| !matches!(said, Reply::Refused(_))))
}

fn verify(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Verify {
        step: Some(Step::new(STEP)),
        timeout_ms: SHORT_MS,
    })?;
    Ok(vault.refused(&said))
}

fn wait(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Wait {
        run: vault.run,
        step: Step::new(STEP),
        state: CheckpointState::Committed,
        timeout_ms: SHORT_MS,
    })?;
    // The refusal may name the run that was asked for.
    let reached = matches!(said, Reply::Reached { .. });
    Ok(reached.then(|| format!("{said:?}")))
}

fn board(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes: 0,
    })?;
    Ok(vault.refused(&said))
}

fn join_its_run(vault: &Vault<'_>) -> Crossing {
    let said = as_nobody(|| {
        let mut stream = connect(&vault.scene.blue[0])?;
        say_hello_as_trainer(&mut stream, JOB, vault.run, 1)
    })?;
    let joined = matches!(said, Reply::Welcome { .. });
    Ok(joined.then(|| format!("{said:?}")))
}

/// What a trainer of blue's job is answered.
fn asked_as_trainer(vault: &Vault<'_>, request: fn(SlotId) -> Request) -> Result<Reply> {
    as_nobody(|| {
        let mut stream = trainer(&vault.scene.blue[0], "burglar", 1)?.stream;
        call(&mut stream, &request(vault.slot.id()))
    })
}

fn seal_its_slot(vault: &Vault<'_>) -> Crossing {
    let said = asked_as_trainer(vault, |slot| Request::SealSlot {
        slot,
        step: Step::new(STEP + 1),
        length: 4096,
    })?;
    Ok(vault.refused(&said))
}

fn release_its_slot(vault: &Vault<'_>) -> Crossing {
    let said = asked_as_trainer(vault, |slot| Request::ReleaseSlot { slot })?;
    Ok(vault.refused(&said))
}

fn mark_failed(vault: &Vault<'_>) -> Crossing {
    let report = |run| {
        Request::RestartFailed(FailureReport {
            run,
            step: Step::new(STEP),
            timeout_ms: SHORT_MS,
        })
    };
    for run in [None, Some(vault.run)] {
        let said = vault.asked(&report(run))?;
        if !matches!(said, Reply::Refused(_)) {
            return Ok(Some(format!("{said:?}")));
        }
    }
    Ok(vault.is_there())
}

/// Red says that a restart from its step has failed; blue takes that back.
fn lift_quarantine(vault: &Vault<'_>) -> Crossing {
    let step = Step::new(STEP);
    let mut red = vault.clients.reader(0)?;
    red.restart_failed(None, step, WAIT_MS)?;
    let said = vault.asked(&Request::LiftQuarantine { step })?;
    // Red has something to take back as long as nobody else has.
    let lifted = red.lift_quarantine(step).err();
    let lifted = lifted.map(|error| error.to_string());
    Ok(vault.refused(&said).or(lifted).or(vault.is_there()))
}

fn pin(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Keep {
        run: Some(vault.run),
        step: Step::new(STEP),
        keep: Keep::Pin,
    })?;
    let pinned = !matches!(said, Reply::Refused(_));
    Ok(pinned.then(|| format!("{said:?}")))
}

fn remove(vault: &Vault<'_>) -> Crossing {
    for removal in [
        Removal::All,
        Removal::Run { run: vault.run },
        Removal::Step {
            run: Some(vault.run),
            step: Step::new(STEP),
        },
    ] {
        let said = vault.asked(&Request::Remove(
            removal,
            LiveRun::Too,
            Some(PinnedOnes::Too),
        ))?;
        if matches!(said, Reply::Removed { checkpoints, .. } if checkpoints > 0) {
            return Ok(Some(format!("{said:?}")));
        }
    }
    Ok(vault.is_there())
}

fn drop_job(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Drop {
        force: true,
        timeout_ms: 10_000,
    })?;
    Ok(vault.tells(&said).or(vault.is_there()))
}

/// With no token on red's side anybody can write the record that would let its job go to another one.
fn rotate_its_token(vault: &Vault<'_>) -> Crossing {
    let told = vault.tells(&vault.asked(&Request::Succession)?);
    let standing = TokenStanding {
        namespace: Namespace::new("red~vault")?,
        succession: None,
        durable: None,
    };
    let rotation = Rotation::new(&standing, b"", BURGLARS_TOKEN, [3; SEAL_BYTES])?;
    let said = vault.asked(&Request::Rotate(Box::new(rotation)))?;
    Ok(told.or(vault.refused(&said)).or(vault.is_there()))
}

fn open_run_and_fence(vault: &Vault<'_>) -> Crossing {
    as_nobody(|| {
        let mut stream = greeted(&vault.scene.blue[0], JOB)?;
        for _ in 0..3 {
            let opened = call(&mut stream, &Request::OpenRun { timeout_ms: 10_000 })?;
            ensure!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
        }
        Ok(())
    })?;
    let again = vault.clients.trainer(0, vault.run, 0, 1);
    Ok(again.err().map(|error| format!("{error:#}")))
}

fn drain(vault: &Vault<'_>) -> Crossing {
    let said = vault.asked(&Request::Drain(DrainOrder {
        within_ms: 600_000,
        place: PlaceAfter::Kept,
        bears: None,
    }))?;
    Ok(vault.refused(&said))
}
