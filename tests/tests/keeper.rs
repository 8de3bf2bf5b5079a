//! Daemons below a keeper, and below what looks like systemd: how they are started again, and which descriptors they find then.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use storaged::cluster::child_of;
use storaged::keep::keeper::{Program, keep};
use storaged::keep::{Holding, KeptName};
use storaged_sdk::Client;
use storaged_tests::system::{executable, write_program};
use tempfile::TempDir;

/// A daemon of a busy machine is up within this time.
const UP: Duration = Duration::from_secs(20);

/// Looks again and again until something is there.
fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        ensure!(began.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn tell(process: u32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(process.try_into()?).context("a process")?;
    Ok(kill_process(process, signal)?)
}

/// A process that ends with the test, and what it started with it.
struct Started(Child);

impl Started {
    fn wait(&mut self) -> Result<ExitStatus> {
        until("the end of a process", UP, || self.0.try_wait().transpose())?.context("waiting")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let child = child_of(self.0.id());
        let _ = self.0.kill();
        let _ = self.0.wait();
        if let Some(child) = child {
            let _ = tell(child, Signal::KILL);
        }
    }
}

/// One node in a folder of its own.
struct Node {
    folder: TempDir,
    started: Started,
}

fn configured(settings: &str) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let run = folder.path().join("run");
    let config = format!(
        "[node]\nname = \"n0\"\nruntime_dir = \"{}\"\nops_listen = \"127.0.0.1:0\"\n[memory]\nbudget = \"64MiB\"\n{settings}",
        run.display()
    );
    fs::write(folder.path().join("storaged.toml"), config)?;
    Ok(folder)
}

impl Node {
    /// A daemon below its keeper.
    fn start(program: &Path, settings: &str) -> Result<Self> {
        let folder = configured(settings)?;
        let mut command = Command::new(program);
        command.args(["run", "--config"]);
        command.arg(folder.path().join("storaged.toml"));
        Self::run(folder, command)
    }

    fn run(folder: TempDir, mut command: Command) -> Result<Self> {
        let log = File::create(folder.path().join("log"))?;
        let child = command
            .env_remove("STORAGED_KEEP")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()?;
        let started = Started(child);
        Ok(Self { folder, started })
    }

    /// A daemon of a binary of its own, which can be replaced.
    fn replaceable() -> Result<(TempDir, PathBuf, Self)> {
        let folder = tempfile::tempdir()?;
        let program = folder.path().join("storaged");
        write_program(Command::new("cp").arg(executable()).arg(&program))?;
        let node = Self::start(&program, "")?;
        Ok((folder, program, node))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn answers(&self) -> bool {
        self.status().is_some()
    }

    fn status(&self) -> Option<String> {
        let socket = self.folder.path().join("run/storaged.sock");
        Client::connect_anonymous(&socket).ok()?.status().ok()
    }

    fn keeper(&self) -> u32 {
        self.started.0.id()
    }

    /// The daemon's process once it answers, if it is not that one.
    fn daemon_after(&self, before: Option<u32>, limit: Duration) -> Result<u32> {
        let another = || child_of(self.keeper()).filter(|it| Some(*it) != before && self.answers());
        let found = until("a daemon that answers", limit, another);
        found.with_context(|| self.log())
    }

    fn daemon(&self) -> Result<u32> {
        self.daemon_after(None, UP)
    }
}

/// Puts a script in the place of a binary, in one step as package managers do.
fn replace(program: &Path, script: &str) -> Result<()> {
    let new = program.with_extension("new");
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
    write_program(Command::new("sh").args(["-c", write]).arg(&new).arg(script))?;
    Ok(fs::rename(new, program)?)
}

#[test]
fn a_daemon_that_is_killed_is_started_again_and_answers() -> Result<()> {
    let node = Node::start(&executable(), "")?;
    let mut daemon = node.daemon()?;
    for _ in 0..2 {
        tell(daemon, Signal::KILL)?;
        daemon = node.daemon_after(Some(daemon), UP)?;
    }
    let log = node.log();
    let said = "the daemon died and is started again how=signal: 9 (SIGKILL) descriptors=1";
    ensure!(log.matches(said).count() == 2, "{log}");
    Ok(())
}

#[test]
fn a_keeper_that_is_stopped_stops_its_daemon_and_ends_as_it_does() -> Result<()> {
    for signal in [Signal::TERM, Signal::INT] {
        let mut node = Node::start(&executable(), "")?;
        let daemon = node.daemon()?;
        tell(node.keeper(), signal)?;
        let ended = node.started.wait()?;
        ensure!(ended.code() == Some(0), "{ended}: {}", node.log());
        ensure!(!Path::new(&format!("/proc/{daemon}")).exists());
        ensure!(!node.log().contains("started again"), "{}", node.log());
    }
    Ok(())
}

#[test]
fn the_code_of_a_daemon_that_ends_by_itself_is_the_keepers() -> Result<()> {
    for code in [0, 75] {
        let (_folder, program, mut node) = Node::replaceable()?;
        let daemon = node.daemon()?;
        replace(&program, &format!("exit {code}"))?;
        tell(daemon, Signal::KILL)?;
        let ended = node.started.wait()?;
        ensure!(ended.code() == Some(code), "{ended}: {}", node.log());
    }
    Ok(())
}

#[test]
fn a_hangup_reaches_the_daemon_and_others_end_nobody() -> Result<()> {
    let node = Node::start(&executable(), "")?;
    let daemon = node.daemon()?;
    for signal in [Signal::USR1, Signal::ALARM, Signal::HUP] {
        tell(node.keeper(), signal)?;
    }
    until("a reload", UP, || {
        node.log()
            .contains("reloaded the configuration")
            .then_some(())
    })?;
    ensure!(node.daemon()? == daemon);
    Ok(())
}

#[test]
fn a_daemon_is_upgraded_below_its_keeper() -> Result<()> {
    let (folder, program, node) = Node::replaceable()?;
    let daemon = node.daemon()?;
    let marker = folder.path().join("upgraded");
    let (marked, real) = (marker.display(), executable());
    let script = format!("echo yes > '{marked}'; exec '{}' \"$@\"", real.display());
    replace(&program, &script)?;
    tell(node.keeper(), Signal::USR2)?;
    node.daemon_after(Some(daemon), UP)?;
    ensure!(marker.exists());
    let log = node.log();
    ensure!(log.contains("starting the daemon again, as told how=exit status: 74"));
    ensure!(!log.contains(" WARN "), "{log}");
    Ok(())
}

#[test]
fn a_daemon_that_does_not_end_for_its_upgrade_is_killed() -> Result<()> {
    let node = Node::start(&executable(), "")?;
    let daemon = node.daemon()?;
    tell(daemon, Signal::STOP)?;
    tell(node.keeper(), Signal::USR2)?;
    node.daemon_after(Some(daemon), UP)?;
    ensure!(!node.log().contains(" WARN "), "{}", node.log());
    Ok(())
}

#[test]
fn a_configuration_that_cannot_be_used_is_not_tried_again() -> Result<()> {
    let mut node = Node::start(&executable(), "bugdet = 1\n")?;
    let ended = node.started.wait()?;
    ensure!(ended.code() == Some(78), "{ended}: {}", node.log());
    let log = node.log();
    ensure!(log.matches("cannot be used").count() == 1, "{log}");
    Ok(())
}

#[test]
fn a_keeper_that_is_killed_takes_its_daemon_with_it() -> Result<()> {
    let mut node = Node::start(&executable(), "")?;
    let daemon = node.daemon()?;
    tell(node.keeper(), Signal::KILL)?;
    node.started.wait()?;
    // It is told to stop, and does so in order. Its number may be a zombie's where nobody waits for orphans.
    until("the daemon's end", UP, || (!node.answers()).then_some(()))?;
    let stat = format!("/proc/{daemon}/stat");
    until("the daemon's end", UP, || {
        let stat = fs::read_to_string(&stat).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    })
}

#[test]
fn a_daemon_that_dies_of_its_start_is_started_ever_less_often_until_it_is_mended() -> Result<()> {
    let (_folder, program, mut node) = Node::replaceable()?;
    let daemon = node.daemon()?;
    replace(&program, "exit 1")?;
    tell(daemon, Signal::KILL)?;
    // What the keeper says it waits is looked at; how long the starts of a busy machine take beside it is nobody's promise.
    let waits = until("five deaths", UP, || {
        let log = node.log();
        let waits: Vec<_> = log
            .lines()
            .filter(|it| it.contains("the daemon died"))
            .filter_map(|it| Some(it.rsplit_once("after=")?.1.to_owned()))
            .collect();
        (waits.len() == 5).then_some(waits)
    })?;
    ensure!(
        waits == ["100ms", "200ms", "400ms", "800ms", "1.6s"],
        "{waits:?}"
    );
    ensure!(
        node.log().contains("how=exit status: 1 descriptors=1"),
        "{}",
        node.log()
    );
    tell(node.keeper(), Signal::TERM)?;
    let ended = node.started.wait()?;
    // The last start may not have come to its end by itself yet: then the signal that is passed on ends it.
    ensure!(matches!(ended.code(), Some(1 | 143)), "{ended}");
    Ok(())
}

#[test]
fn a_binary_that_is_missing_for_a_while_is_waited_for() -> Result<()> {
    let (_folder, program, node) = Node::replaceable()?;
    let daemon = node.daemon()?;
    let away = program.with_extension("away");
    fs::rename(&program, &away)?;
    tell(daemon, Signal::KILL)?;
    until("a start that fails", UP, || {
        let log = node.log();
        log.contains("the daemon cannot be started").then_some(())
    })?;
    fs::rename(&away, &program)?;
    node.daemon_after(Some(daemon), UP)?;
    Ok(())
}

/// Below the keeper of another process, which it does not find.
#[test]
fn a_daemon_without_its_keeper_does_not_start() -> Result<()> {
    let folder = configured("")?;
    let output = Command::new(executable())
        .args(["run", "--config"])
        .arg(folder.path().join("storaged.toml"))
        .env_remove("STORAGED_KEEP")
        .env("STORAGED_KEPT_BY", "1")
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && said.contains("expected the keeper"),
        "{said}"
    );
    Ok(())
}

/// Waits until a daemon says this of who keeps its memory.
fn says(node: &Node, kept: &str) -> Result<()> {
    until("what is known of the keeper", UP, || {
        node.status()?.contains(kept).then_some(())
    })
    .with_context(|| node.log())
}

#[test]
fn a_daemon_whose_keeper_has_no_holder_says_so() -> Result<()> {
    let node = Node::start(&executable(), "")?;
    let said = r#""kept_by":"keeper","holder":"absent","holder_lacks_since":null"#;
    says(&node, said)?;
    let daemon = node.daemon()?;
    tell(daemon, Signal::KILL)?;
    node.daemon_after(Some(daemon), UP)?;
    says(&node, said)?;
    ensure!(!node.log().contains("does not take"), "{}", node.log());
    Ok(())
}

/// A daemon whose keeper this process is.
fn below_this_process(tells: Option<&str>) -> Result<(Node, UnixDatagram)> {
    let folder = configured("")?;
    let (here, there) = UnixDatagram::pair()?;
    here.set_read_timeout(Some(UP))?;
    let mut command = Command::new(executable());
    command.args(["run", "--config"]);
    command.arg(folder.path().join("storaged.toml"));
    command.env_remove("STORAGED_KEEP");
    command.env("STORAGED_KEPT_BY", std::process::id().to_string());
    if let Some(tells) = tells {
        command.env("STORAGED_KEEPER_TELLS", tells);
    }
    let log = File::create(folder.path().join("log"))?;
    let child = command.stdin(OwnedFd::from(there)).stderr(log).spawn()?;
    let started = Started(child);
    let node = Node { folder, started };
    ensure!(next(&here)? == "FDLIST=1", "{}", node.log());
    here.send(b"END=0")?;
    Ok((node, here))
}

/// It would call what it does not know odd, and a daemon that waits for its word would not start.
#[test]
fn a_keeper_of_an_earlier_release_is_not_asked_about_a_holder() -> Result<()> {
    let (node, keeper) = below_this_process(None)?;
    let said = r#""kept_by":"keeper","holder":null,"holder_lacks_since":null"#;
    says(&node, said)?;
    keeper.set_nonblocking(true)?;
    while let Ok(asked) = next(&keeper) {
        ensure!(asked.starts_with("FDSTORE"), "{asked}");
    }
    Ok(())
}

#[test]
fn what_a_keeper_tells_of_its_holder_is_in_the_status() -> Result<()> {
    let (node, keeper) = below_this_process(Some("holder"))?;
    ensure!(next(&keeper)? == "FDHOLDER=1");
    for (told, said) in [
        (
            "HOLDER=all",
            r#""holder":"has-all","holder_lacks_since":null"#,
        ),
        (
            "HOLDERLACKS=7",
            r#""holder":"lacks","holder_lacks_since":7"#,
        ),
        (
            "HOLDER=none",
            r#""holder":"absent","holder_lacks_since":null"#,
        ),
    ] {
        keeper.send(told.as_bytes())?;
        says(&node, said)?;
    }
    Ok(())
}

fn next(socket: &UnixDatagram) -> Result<String> {
    let mut body = [0; 512];
    let length = socket.recv(&mut body)?;
    Ok(str::from_utf8(&body[..length])?.to_owned())
}

#[test]
fn a_daemon_takes_what_systemd_kept_and_ends_to_be_started_again() -> Result<()> {
    let folder = configured("")?;
    let notify = folder.path().join("notify");
    let systemd = UnixDatagram::bind(&notify)?;
    systemd.set_read_timeout(Some(UP))?;
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg("export LISTEN_PID=$$; exec \"$0\" run --keep systemd --config \"$1\" 3</dev/null 4</dev/null")
        .arg(executable())
        .arg(folder.path().join("storaged.toml"))
        .env("NOTIFY_SOCKET", &notify)
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDNAMES", "slot-1:strange");
    let mut node = Node::run(folder, command)?;
    // What can never be used goes, once it is known that no other release has left it.
    for name in ["slot-1", "strange"] {
        ensure!(next(&systemd)? == format!("FDSTOREREMOVE=1\nFDNAME={name}"));
    }
    until("a daemon that answers", UP, || node.answers().then_some(()))?;
    let log = node.log();
    let closed = log.lines().filter(|it| it.contains("a kept descriptor"));
    ensure!(closed.count() == 1 && log.contains("strange"), "{log}");
    tell(node.started.0.id(), Signal::USR2)?;
    let ended = node.started.wait()?;
    ensure!(ended.code() == Some(74), "{ended}: {}", node.log());
    Ok(())
}

#[test]
fn a_daemon_without_systemd_says_what_it_lacks_and_one_that_nobody_keeps_ignores_sigusr2()
-> Result<()> {
    let folder = configured("")?;
    let config = folder.path().join("storaged.toml");
    let mut command = Command::new(executable());
    command.args(["run", "--keep", "systemd", "--config"]);
    let output = command.arg(&config).env_remove("NOTIFY_SOCKET").output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(2) && said.contains("expected NOTIFY_SOCKET"),
        "{said}"
    );
    let mut command = Command::new(executable());
    command
        .args(["run", "--keep", "none", "--config"])
        .arg(config);
    let mut node = Node::run(folder, command)?;
    until("a daemon that answers", UP, || node.answers().then_some(()))?;
    ensure!(child_of(node.keeper()).is_none());
    tell(node.keeper(), Signal::USR2)?;
    std::thread::sleep(Duration::from_millis(200));
    ensure!(node.answers());
    tell(node.keeper(), Signal::TERM)?;
    ensure!(node.started.wait()?.success());
    Ok(())
}

/// The file in which the processes below say what they saw.
const SEEN: &str = "STORAGED_TEST_SEEN";
/// More than a queue has room for, and more than a process may open unless it asks.
const SEGMENTS: u64 = 1500;
/// So many are in the queue when the daemon dies.
const QUEUED: u64 = 120;

fn this_test(name: &str) -> Result<Program> {
    let arguments = ["--exact", name, "--ignored", "--nocapture"];
    Ok(Program {
        path: std::env::current_exe()?,
        arguments: arguments.map(Into::into).into(),
    })
}

#[test]
fn descriptors_are_there_after_the_daemon_was_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let seen = folder.path().join("seen");
    let keeper = this_test("as_a_keeper")?;
    // As most systems start a process.
    let few = "ulimit -Sn 1024; exec \"$0\" \"$@\"";
    let child = Command::new("sh")
        .args(["-c", few])
        .arg(&keeper.path)
        .args(&keeper.arguments)
        .env(SEEN, &seen)
        .stderr(File::create(folder.path().join("log"))?)
        .spawn()?;
    let mut started = Started(child);
    let is_stored = || fs::read_to_string(&seen).is_ok_and(|it| it == "stored");
    let is_dead = || is_stored() && child_of(started.0.id()).is_none();
    until("the first daemon's end", UP, || is_dead().then_some(()))?;
    tell(started.0.id(), Signal::CONT)?;
    let ended = started.wait()?;
    let log = fs::read_to_string(folder.path().join("log"))?;
    ensure!(ended.code() == Some(75), "{ended}: {log}");
    let expected = format!("{} held, newer", 1 + SEGMENTS + QUEUED);
    ensure!(fs::read_to_string(seen)? == expected, "{log}");
    Ok(())
}

#[test]
#[ignore = "a part of the test above, in a process of its own"]
fn as_a_keeper() -> Result<()> {
    if std::env::var_os(SEEN).is_some() {
        let code = keep(this_test("as_a_daemon")?, None)?;
        std::process::exit(code.into());
    }
    Ok(())
}

#[test]
#[ignore = "a part of the test above, in a process of its own"]
fn as_a_daemon() -> Result<()> {
    let Some(seen) = std::env::var_os(SEEN) else {
        return Ok(());
    };
    let holding = Holding::by_keeper()?;
    let slot = KeptName::Slot(storaged_sdk::wire::SlotId::new(1));
    let held = &holding.inherited.descriptors;
    if held.is_empty() {
        for content in ["older", "newer"] {
            let file = tempfile::tempfile()?;
            std::io::Write::write_all(&mut &file, content.as_bytes())?;
            holding.store.store(slot, file.as_fd())?;
        }
        let file = tempfile::tempfile()?;
        for segment in 0..=SEGMENTS {
            holding
                .store
                .store(KeptName::Parity(segment), file.as_fd())?;
        }
        holding.store.remove(KeptName::Parity(0));
        // What is in the queue must be enough: nobody reads it before this process has died.
        let keeper = rustix::process::getppid().context("a parent")?;
        let held = || fs::read_dir(format!("/proc/{keeper}/fd")).map_or(0, Iterator::count);
        until("an empty queue", UP, || {
            (held() as u64 > SEGMENTS).then_some(())
        })?;
        kill_process(keeper, Signal::STOP)?;
        for number in 0..QUEUED {
            holding
                .store
                .store(KeptName::Journal(number), file.as_fd())?;
        }
        fs::write(&seen, "stored")?;
        tell(std::process::id(), Signal::KILL)?;
    }
    let found = held.iter().find(|(name, _)| *name == slot);
    let (_, descriptor) = found.context("the slot is there")?;
    let file = File::from(descriptor.try_clone()?);
    let mut content = [0; 5];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut content, 0)?;
    let content = str::from_utf8(&content)?;
    fs::write(seen, format!("{} held, {content}", held.len()))?;
    std::process::exit(75)
}
