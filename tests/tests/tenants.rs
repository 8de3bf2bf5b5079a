//! Two tenants of one node, with real processes: neither reaches, sees or holds up the other.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::{DurableWish, Reply, Request};
use storaged_sdk::wire::{CheckpointState, Digest, Rank, RefusalCode, RunId};
use storaged_tests::hostile::{NOBODY, as_nobody, call, hello, open_to_all, refusal};
use storaged_tests::system::{System, executable, shards, wait};

/// A node with two tenants: `red`, whom the tests are, and `blue`, another user. Both use the names and the token (none) that they get by themselves.
struct TwoTenants {
    system: System,
    blue: PathBuf,
}

impl TwoTenants {
    fn start(extra: &str) -> Result<Self> {
        let mut system = System::prepared(1, None, "")?;
        let red = system.cluster.socket(0);
        let red = red.parent().context("a directory")?;
        let blue = system.root.path().join("blue");
        let tenants = format!(
            "[[tenants]]\nname = \"red\"\ndirectory = \"{}\"\nuids = [0]\n\n[[tenants]]\nname = \"blue\"\ndirectory = \"{}\"\nuids = [{NOBODY}]\n{extra}",
            red.display(),
            blue.display(),
        );
        system.cluster.configure(0, &tenants)?;
        system.cluster.start_all()?;
        system.token = Vec::new();
        let blue = blue.join("storaged.sock");
        open_to_all(&system)?;
        Ok(Self { system, blue })
    }

    /// The tests' own job saves a step.
    fn saves(&self, step: u64) -> Result<RunId> {
        let (run, mut trainers) = self.system.trainers(1)?;
        let expected = shards(1, step);
        self.system
            .save(&mut trainers, step, &expected, DurableWish::Never)?;
        self.system.wait(0, run, step, CheckpointState::Committed)?;
        self.system.restore(&[0], step, &expected)?;
        Ok(run)
    }

    /// What the other user hears, after a hello as this job.
    fn blue_hears(&self, job: &str, request: &Request) -> Result<Reply> {
        as_nobody(|| {
            let mut stream = UnixStream::connect(&self.blue)?;
            let welcome = call(&mut stream, &hello(job, b"")?)?;
            ensure!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
            call(&mut stream, request)
        })
    }
}

fn open_shard(manifest: Digest) -> Request {
    Request::OpenShard {
        manifest,
        rank: Rank::new(0),
        ranges: Vec::new(),
        timeout_ms: 1000,
        without: None,
        withheld: None,
        early: None,
    }
}

/// Without a token on either side, as the daemon is shipped: what another user's job could do before there were tenants.
#[test]
fn another_tenant_reads_writes_fences_and_lists_nothing() -> Result<()> {
    let two = TwoTenants::start("")?;
    two.saves(1)?;
    let manifest = two.system.reader(0)?.plan(None, 60_000)?.manifest;

    // Named: by its own name, and by the one that operators see.
    let list = Request::List { namespace: None };
    let listed = two.blue_hears("job", &list)?;
    ensure!(
        matches!(&listed, Reply::Checkpoints(all) if all.is_empty()),
        "{listed:?}"
    );
    let status = two.blue_hears("job", &Request::Status)?;
    let told = format!("{status:?}");
    ensure!(!told.contains("red~") && !told.contains("\"job"), "{told}");
    let said = as_nobody(|| {
        call(
            &mut UnixStream::connect(&two.blue)?,
            &hello("red~job", b"")?,
        )
    })?;
    ensure!(refusal(said)? == RefusalCode::WrongUser);

    // Read: by the name of the job, and by that of the bytes.
    let plan = Request::Plan {
        step: None,
        timeout_ms: 1000,
        allow_older: false,
    };
    let planned = two.blue_hears("job", &plan)?;
    ensure!(matches!(planned, Reply::Refused(_)), "{planned:?}");
    let opened = two.blue_hears("job", &open_shard(manifest))?;
    ensure!(matches!(opened, Reply::Refused(_)), "{opened:?}");

    // Fenced and overwritten: its runs and steps are its own.
    as_nobody(|| {
        let mut stream = UnixStream::connect(&two.blue)?;
        call(&mut stream, &hello("job", b"")?)?;
        for _ in 0..3 {
            let opened = call(&mut stream, &Request::OpenRun { timeout_ms: 10_000 })?;
            ensure!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
        }
        Ok(())
    })?;
    let expected = shards(1, 1);
    two.system.restore(&[0], 1, &expected)?;
    two.saves(2)?;
    Ok(())
}

/// What a command says and how it ends.
fn run(command: &mut Command) -> Result<(String, Option<i32>)> {
    let done = command.output()?;
    let said = [done.stdout, done.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into(), done.status.code()))
}

#[test]
fn a_token_lies_in_a_file_that_its_owner_alone_can_read() -> Result<()> {
    let mut system = System::start(1, None, "")?;
    let file = system.root.path().join("token");
    let make = || run(Command::new(executable()).arg("token").arg(&file));
    ensure!(make()?.1 == Some(0));
    let token = std::fs::read(&file)?;
    ensure!(token.trim_ascii().len() == 64, "{} bytes", token.len());
    let mode = std::fs::metadata(&file)?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{mode:o}");
    let (said, code) = make()?;
    ensure!(code == Some(1) && std::fs::read(&file)? == token, "{said}");

    system.token = token.trim_ascii().to_vec();
    let (run_id, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 1, &shards(1, 1), DurableWish::Never)?;
    system.wait(0, run_id, 1, CheckpointState::Committed)?;
    let plan = || {
        let mut command = Command::new(executable());
        command.args(["plan", "job", "--socket"]);
        command.arg(&system.sockets[0]).env_remove("STORAGED_TOKEN");
        command
    };
    let named = run(plan().arg("--token-file").arg(&file))?;
    ensure!(named.1 == Some(0), "{named:?}");
    let inherited = run(plan().env("STORAGED_TOKEN_FILE", &file))?;
    ensure!(inherited.1 == Some(0), "{inherited:?}");
    let without = run(&mut plan())?;
    ensure!(without.1 == Some(1), "{without:?}");
    // Everybody can read a process's arguments.
    let shown = run(plan().args(["--token", "0123456789abcdef"]))?;
    ensure!(shown.1 == Some(2), "{shown:?}");
    let weak = run(plan().env("STORAGED_TOKEN", "secret"))?;
    ensure!(
        weak.0.contains("16 to 1024 bytes") && weak.1 == Some(1),
        "{weak:?}"
    );

    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644))?;
    let open = run(plan().arg("--token-file").arg(&file))?;
    ensure!(open.0.contains("0644") && open.1 == Some(1), "{open:?}");
    Ok(())
}

/// A tenant with as many clients as it may have gets no more of the daemon than it is given.
#[test]
fn a_tenants_requests_keep_to_its_pace() -> Result<()> {
    let two = TwoTenants::start("requests_max = 50\n")?;
    two.saves(1)?;
    let began = std::time::Instant::now();
    as_nobody(|| {
        let mut streams = (0..10).map(|_| UnixStream::connect(&two.blue));
        let mut streams = streams.by_ref().collect::<Result<Vec<_>, _>>()?;
        for _ in 0..12 {
            for stream in &mut streams {
                let status = call(stream, &Request::Status)?;
                ensure!(matches!(status, Reply::Status(_)), "{status:?}");
            }
        }
        Ok(())
    })?;
    // 120 requests at 50 per second, less those of a burst.
    let took = began.elapsed();
    ensure!(took > Duration::from_secs(2), "{took:?}");
    two.saves(2).map(drop)
}

#[test]
fn a_tenant_has_no_more_connections_than_it_is_given() -> Result<()> {
    let two = TwoTenants::start("connections_max = 3\n")?;
    let greeted = || {
        let mut stream = UnixStream::connect(&two.blue)?;
        let reply = call(&mut stream, &hello("job", b"")?)?;
        anyhow::Ok((stream, reply))
    };
    as_nobody(|| {
        let mut open = Vec::new();
        for _ in 0..3 {
            let (stream, reply) = greeted()?;
            ensure!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
            open.push(stream);
        }
        let (_, reply) = greeted()?;
        ensure!(refusal(reply)? == RefusalCode::Busy, "the fourth");
        open.pop();
        wait("a place to be free", || {
            let (_, reply) = greeted()?;
            ensure!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
            Ok(())
        })
    })?;
    two.saves(1).map(drop)
}

/// A daemon that has lost its memory asks the durable tier whose a name is before it gives it away.
#[test]
fn after_a_restart_nobody_comes_before_a_jobs_own_token() -> Result<()> {
    let tier = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n\n[trickle]\nevery = 1\n";
    let mut system = System::start(1, None, tier)?;
    let (run, mut trainers) = system.trainers(1)?;
    let expected = shards(1, 1);
    system.save(&mut trainers, 1, &expected, DurableWish::Policy)?;
    system.wait(0, run, 1, CheckpointState::Durable)?;
    drop(trainers);
    system.cluster.kill(0)?;
    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 0)?;

    let own = std::mem::replace(&mut system.token, b"of a stranger who is first".to_vec());
    let opened = system.reader(0)?.open_run(60_000);
    ensure!(is_wrong_token(&opened), "{opened:?}");
    let planned = system.reader(0)?.plan(None, 60_000);
    ensure!(planned.is_err(), "{planned:?}");
    let trainer = system.trainer(0, run, 0, 1);
    ensure!(trainer.is_err(), "a stranger goes on with the job's run");

    system.token = own;
    system.restore(&[0], 1, &expected)?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 2, &shards(1, 2), DurableWish::Policy)?;
    system.wait(0, run, 2, CheckpointState::Durable)
}

fn is_wrong_token(opened: &Result<RunId, ClientError>) -> bool {
    matches!(opened, Err(ClientError::Refused(refusal)) if refusal.code == RefusalCode::WrongToken)
}
