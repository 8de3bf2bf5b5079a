"""The verdict on a restart: its types, and the launchers that act on it, with real daemons, torchrun and the scripts as they are."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import storaged
from daemon import HERE, ON_REQUEST, PACKAGE, ROOT, executable, saved_by_one, saved_by_two
from storaged import Decision, errors
from storaged._verdict import Reason, RestartPlan, RestartVerdict

LAUNCHER = HERE.parent / "examples" / "torchrun_verdict.py"
SLURM = ROOT / "deploy/slurm/restart.sh"

# One rank that saves a step of its own number at each start and then fails, unless `until` starts have been. STEP and its like are
# told to it by the environment.
TRAIN = """
import os, sys, pathlib, torch
from storaged.torch import Checkpointer
log = pathlib.Path(os.environ["TRAIN_LOG"])
with Checkpointer(timeout=30, durable="required") as checkpointer:
    loaded = checkpointer.load_all()
    start = len(log.read_text().splitlines()) if log.exists() else 0
    with log.open("a") as out:
        print(f"{start} {loaded and loaded['step']}", file=out)
    if os.environ["TRAIN_SAVES"] == "1" and start < 4:
        step = (loaded["step"] if loaded else 0) + 10
        checkpointer.save(step, {"w": torch.full((1000,), float(step)), "step": step})
        assert checkpointer.wait(until="durable")
sys.exit(0 if start >= int(os.environ["TRAIN_UNTIL"]) else 9)
"""


def environment(daemon, tmp_path, **extra):
    (tmp_path / "train.py").write_text(TRAIN)
    return os.environ | {
        "PYTHONPATH": str(PACKAGE), "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": "job",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "TRAIN_LOG": str(tmp_path / "starts"),
        "TRAIN_SAVES": "1", "TRAIN_UNTIL": "2",
    } | extra


def starts(tmp_path):
    """What each start has loaded, by its number."""
    log = tmp_path / "starts"
    return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


def launch(environment, tmp_path, *arguments):
    command = [sys.executable, str(LAUNCHER), "--timeout", "5", *arguments, "--", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*command, str(tmp_path / "train.py")], env=environment, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def of(daemon, **settings):
    return storaged.verdict("job", socket=daemon.socket, token=b"a-secret-of-tests", **settings)


def test_each_verdict_in_types(nodes, tmp_path):
    first = of(nodes[0], timeout=20)
    assert first.decision is Decision.IMPOSSIBLE and first.is_first_start and first.exit_code == 13, first
    assert first.plan is None and first.newest_seen is None and not first.needs_allow_older

    saved_by_two(nodes, tmp_path, 10, durable="required")
    saved_by_two(nodes, tmp_path, 20)
    here = of(nodes[1], timeout=20)
    assert here.decision is Decision.RECOVER_IN_PLACE and here.exit_code == 0, here
    assert here.plan.step == 20 and here.newest_seen == (here.plan.run, 20)
    assert [(shard.source, shard.nodes) for shard in here.plan.shards] == [("ram", ("n0",)), ("ram", ("n1",))]
    assert all(shard.nbytes > 4000 for shard in here.plan.shards)
    assert [reason.code for reason in here.reasons] == ["all-in-place"]
    assert here.waiting == () and {part.rate for part in here.expected} == {"first-guess"}

    nodes[0].stop()
    lost = of(nodes[1], timeout=8)
    assert lost.decision is Decision.RECOVER and lost.exit_code == 10, lost
    assert (lost.plan.shards[0].source, lost.plan.shards[0].nodes) == ("decode", ("n1", "n2"))
    (gain,) = lost.waiting
    assert (gain.step, gain.decision, gain.returning[0].of) == (20, Decision.RECOVER_IN_PLACE, ("n0",))

    nodes[1].stop()
    old = of(nodes[2], timeout=8)
    assert old.decision is Decision.RESTART_FROM_DURABLE and old.exit_code == 11, old
    assert old.plan.step == 10 and old.needs_allow_older, old
    assert old.passed_over[0].step == 20
    gain = old.waiting[0]
    assert (gain.step, gain.decision) == (20, Decision.RECOVER), old
    assert all(set(one.of) == {"n0", "n1"} and one.any == 1 for one in gain.returning), old
    nodes[0].go_on()
    back = of(nodes[2], timeout=60)
    assert back.plan.step == 20 and back.decision is Decision.RECOVER, back


def test_a_verdict_is_no_error_and_no_verdict_is_one(daemons):
    daemon = daemons()
    with pytest.raises(errors.InvalidArgument, match="namespace"):
        storaged.verdict("not a name", socket=daemon.socket)
    with pytest.raises(storaged.StoragedError):
        storaged.restart_failed(7, "job", socket=daemon.socket, token=b"a-secret-of-tests", timeout=5)
    daemon.kill()
    with pytest.raises(errors.DaemonUnavailable):
        of(daemon, timeout=2)


def test_the_command_says_the_same(daemons, tmp_path):
    daemon = daemons(ON_REQUEST)
    daemon.newest_state = "committed"
    saved_by_one(daemon, 10)
    command = [executable(), "plan", "job", "--verdict", "--json", "--socket", str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"STORAGED_TOKEN": "a-secret-of-tests"})
    said, verdict = json.loads(done.stdout), of(daemon)
    assert done.returncode == verdict.exit_code == said["exit_code"] == 0
    assert said["verdict"] == verdict.decision.value and said["plan"]["manifest"] == verdict.plan.manifest
    assert [reason["code"] for reason in said["reasons"]] == [reason.code for reason in verdict.reasons]


def test_torchrun_is_started_again_in_place_until_the_job_is_done(daemons, tmp_path):
    daemon = daemons(ON_REQUEST)
    code, text = launch(environment(daemon, tmp_path), tmp_path, "--restarts", "3")
    assert code == 0, text
    assert starts(tmp_path) == ["None", "10", "20"], text
    assert "nobody who answered has heard of a checkpoint" in text and text.count("recover-in-place") == 2, text


def test_torchrun_gets_another_step_after_one_that_failed(daemons, tmp_path):
    """Step 20 kills its trainer at each start, before anything newer is saved: it is not tried a second time while there is another one."""
    daemon = daemons(ON_REQUEST)
    daemon.newest_state = "committed"
    saved_by_one(daemon, 10, durable="required")
    saved_by_one(daemon, 20)
    settings = environment(daemon, tmp_path, TRAIN_SAVES="0", TRAIN_UNTIL="1")
    code, text = launch(settings, tmp_path, "--restarts", "3")
    assert code == 0, text
    assert starts(tmp_path) == ["20", "10"], text
    assert "a restart from step 20 has failed, 1 by now" in text, text


def test_torchrun_is_not_started_where_nothing_is_left(nodes, tmp_path):
    saved_by_two(nodes, tmp_path, 20)
    nodes[0].stop()
    nodes[1].stop()
    code, text = launch(environment(nodes[2], tmp_path), tmp_path)
    assert code == 12 and starts(tmp_path) == [], text
    assert "waiting would gain step 20" in text and "not started: impossible" in text, text


def test_torchrun_waits_for_the_node_that_brings_the_step(nodes, tmp_path):
    saved_by_two(nodes, tmp_path, 20)
    nodes[0].stop()
    nodes[1].stop()
    settings = environment(nodes[2], tmp_path, TRAIN_UNTIL="0", TRAIN_SAVES="0")
    command = [sys.executable, str(LAUNCHER), "--timeout", "5", "--wait", "400", "--", "--standalone", "--nproc-per-node", "1"]
    command.append(str(tmp_path / "train.py"))
    launcher = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in launcher.stdout:
            if "waiting up to" in line:
                break
        nodes[0].go_on()
        text = launcher.communicate(timeout=400)[0]
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 0 and starts(tmp_path) == ["20"], text


# Its first start ends the daemon and fails.
ENDS_DAEMON = """
import os, sys
with open(os.environ["TRAIN_LOG"], "a") as out:
    print(os.getpid(), None, file=out)
if len(open(os.environ["TRAIN_LOG"]).readlines()) == 1:
    os.kill(int(os.environ["DAEMON"]), 9)
    sys.exit(9)
"""


def launched(daemon, tmp_path, script, *arguments):
    """The launcher with a script that saves and loads nothing, from step 10 on."""
    daemon.newest_state = "committed"
    saved_by_one(daemon, 10)
    settings = environment(daemon, tmp_path, DAEMON=str(daemon.process.pid))
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(LAUNCHER), "--timeout", "5", *arguments, "--", "--standalone", "--nproc-per-node", "1", str(tmp_path / "train.py")]
    return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun_is_started_without_a_verdict_where_the_daemon_is_away(daemons, tmp_path):
    launcher = launched(daemons(ON_REQUEST), tmp_path, ENDS_DAEMON, "--restarts", "1", "--wait", "1")
    text = launcher.communicate(timeout=300)[0]
    assert launcher.returncode == 0 and len(starts(tmp_path)) == 2, text
    assert "could not be counted" in text and "waiting up to 1 s more: no verdict" in text and "starting without a verdict" in text, text


def told_to_end(launcher, words):
    """It gets SIGTERM once it has said a line with these words; what it says after that."""
    said = []
    try:
        for line in launcher.stdout:
            said.append(line)
            if words in line:
                launcher.send_signal(signal.SIGTERM)
                return launcher.communicate(timeout=60)[0]
    finally:
        launcher.kill()
    raise AssertionError("".join(said))


def is_gone(pid, limit=30):
    until = time.monotonic() + limit
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    return not os.path.exists(f"/proc/{pid}")


def test_a_launcher_that_is_told_to_end_between_starts_starts_nothing_more(daemons, tmp_path):
    launcher = launched(daemons(ON_REQUEST), tmp_path, ENDS_DAEMON, "--restarts", "1", "--wait", "20")
    text = told_to_end(launcher, "waiting up to")
    assert launcher.returncode == 128 + signal.SIGTERM and len(starts(tmp_path)) == 1 and "starting without" not in text, text


def test_a_launcher_that_is_told_to_end_tells_the_start_that_runs(daemons, tmp_path):
    launcher = launched(daemons(ON_REQUEST), tmp_path, ENDS_DAEMON + "print('SECOND', flush=True); import time; time.sleep(300)", "--restarts", "3")
    text = told_to_end(launcher, "SECOND")
    pids = [line.split()[0] for line in (tmp_path / "starts").read_text().splitlines()]
    assert launcher.returncode != 0 and len(pids) == 2 and is_gone(pids[1]), text


# SIGTERM comes as soon as a child lives; its number is told.
TOLD_AT_ONCE = """
import importlib.util, os, signal, subprocess, sys
spec = importlib.util.spec_from_file_location("torchrun_verdict", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
class Popen(subprocess.Popen):
    def __init__(self, *_, **named):
        super().__init__(["sleep", "300"], stdout=subprocess.DEVNULL, **named)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
launcher.decided = lambda options: None
sys.argv = ["torchrun_verdict.py", "--", "train.py"]
sys.exit(launcher.main())
"""


def test_a_launcher_that_is_told_to_end_while_it_starts_leaves_no_torchrun():
    done = subprocess.run([sys.executable, "-c", TOLD_AT_ONCE, str(LAUNCHER)], stdout=subprocess.PIPE, text=True, timeout=120)
    pid = int(done.stdout)
    is_left = not is_gone(pid, 1)
    if is_left:
        os.kill(pid, signal.SIGKILL)
    assert not is_left and done.returncode == -signal.SIGTERM % 256, done.returncode


@pytest.fixture
def launcher(monkeypatch):
    """The launcher as a module."""
    spec = importlib.util.spec_from_file_location("torchrun_verdict", LAUNCHER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.01)
    return module


@pytest.mark.parametrize("nodes", [["--nnodes", "2"], ["--nnodes=1:2"], ["--nnode", "2"], ["PET_NNODES"]])
def test_a_job_of_several_nodes_is_refused(monkeypatch, launcher, capsys, nodes):
    if nodes == ["PET_NNODES"]:
        nodes = []
        monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setattr(sys, "argv", ["torchrun_verdict.py", "--", *nodes, "train.py"])
    with pytest.raises(SystemExit) as ended:
        launcher.arguments()
    assert ended.value.code == 2 and "--rdzv-backend storaged" in capsys.readouterr().err


def test_a_job_of_one_node_is_taken(monkeypatch, launcher):
    for nodes in ([], ["--nnodes", "1"], ["--nnodes=1:1"]):
        monkeypatch.setattr(sys, "argv", ["torchrun_verdict.py", "--restarts", "2", "--", *nodes, "train.py", "--nnodes", "2"])
        options = launcher.arguments()
        assert options.restarts == 2 and options.torchrun == [*nodes, "train.py", "--nnodes", "2"]


@pytest.mark.parametrize("code", ["nodes-silent", "durable-unreadable"])
def test_the_last_resort_is_taken_only_once_all_were_heard(monkeypatch, launcher, code):
    def found(step, *codes):
        plan = RestartPlan("1-a", step, "digest", 2, "protected", 10, ())
        return RestartVerdict("job", Decision.RECOVER, 10, tuple(Reason(one, one) for one in codes), plan, (), None, (), ())

    said = []
    monkeypatch.setattr(storaged, "verdict", lambda *_, timeout: said.pop(0))
    options = SimpleNamespace(namespace="job", timeout=5, wait=300, allow_older=False)
    for wait, verdicts, step in [
        (300, [found(10, "last-resort", code), found(10, "last-resort", code), found(20)], 20),
        (0, [found(10, "last-resort", code)], 10),
        (300, [found(10, "last-resort")], 10),
    ]:
        said, options.wait = verdicts, wait
        assert launcher.decided(options).plan.step == step and not said, (wait, said)


def slurm(daemon, tmp_path, command, **extra):
    """The script of deploy/, with a scontrol that notes what it is asked."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    settings = environment(daemon, tmp_path, STORAGED_BIN=str(executable()), SCONTROL_BIN=str(scontrol), SLURM_JOB_ID="77")
    settings |= {"STORAGED_ASK_S": "5", "STORAGED_WAIT_S": "0"} | extra
    done = subprocess.run(["bash", str(SLURM), *command], env=settings, capture_output=True, text=True, timeout=500)
    asked = tmp_path / "asked"
    return done.returncode, asked.read_text().splitlines() if asked.exists() else [], done.stdout + done.stderr


def test_a_slurm_job_starts_again_in_place_and_is_requeued_only_when_that_is_of_no_use(daemons, tmp_path):
    daemon = daemons(ON_REQUEST)
    train = [sys.executable, str(tmp_path / "train.py")]
    code, asked, text = slurm(daemon, tmp_path, train)
    assert (code, asked, starts(tmp_path)) == (0, [], ["None", "10", "20"]), text
    # A step that fails is counted, and with nothing left to start the job goes back into the queue.
    code, asked, text = slurm(daemon, tmp_path, ["false"], STORAGED_STARTS_MAX="2")
    assert (code, asked) == (0, ["requeue 77"]), text
    assert "restarts have failed, 1 by now" in text, text
    code, asked, text = slurm(daemon, tmp_path, ["false"], STORAGED_STARTS_MAX="1", SLURM_RESTART_COUNT="5")
    assert (code, asked) == (1, ["requeue 77"]), text


def test_a_slurm_job_is_not_started_from_a_step_that_its_load_refuses(nodes, tmp_path):
    """One of three nodes has all of it, also what describes it, and does not know whether there is something newer."""
    saved_by_one(nodes[2], 20)
    nodes[0].stop()
    nodes[1].stop()
    start = ["touch", str(tmp_path / "started")]
    code, asked, text = slurm(nodes[2], tmp_path, start)
    assert (code, asked) == (0, ["requeue 77"]) and "(too-few-answered)" in text, text
    assert not (tmp_path / "started").exists() and "only a step behind one that was protected" in text, text
    code, asked, text = slurm(nodes[2], tmp_path, start, STORAGED_ALLOW_OLDER="1")
    assert (code, asked) == (0, ["requeue 77"]) and (tmp_path / "started").exists(), text


def test_a_slurm_job_with_too_few_nodes_is_requeued_without_a_start(nodes, tmp_path):
    saved_by_two(nodes, tmp_path, 20)
    nodes[0].stop()
    nodes[1].stop()
    code, asked, text = slurm(nodes[2], tmp_path, ["touch", str(tmp_path / "started")])
    assert (code, asked) == (0, ["requeue 77"]), text
    assert not (tmp_path / "started").exists() and "nothing that was saved can be had" in text, text


def test_a_slurm_job_says_how_a_step_that_is_passed_over_for_good_is_offered_again(tmp_path):
    """Of a daemon that has been told of three failed starts, each half a minute after the one before."""
    said = (
        "job: impossible\n"
        "passed over: run 7-00f step 160: quarantined: restarts from it have failed, 3 by now; it is offered again when an operator lifts that,"
        " once the fault is mended: `storaged plan JOB --lift 160`\n"
        "passed over: run 7-00f step 150: quarantined: restarts from it have failed, 1 by now; it is offered again in 600 s\n"
    )
    (tmp_path / "said").write_text(said)
    fake = tmp_path / "storaged"
    fake.write_text(f"#!/bin/sh\ncat {tmp_path}/said\nexit 12\n")
    fake.chmod(0o755)
    code, asked, text = slurm(SimpleNamespace(socket=tmp_path / "none"), tmp_path, ["false"], STORAGED_BIN=str(fake))
    assert (code, asked) == (0, ["requeue 77"]), text
    assert "'storaged plan job --lift 160'" in text and "--lift 150" not in text, text


class Says:
    """A storaged that says these verdicts one after the other, the last of them again and again, and notes what else it is asked."""

    def __init__(self, tmp_path, *said):
        self.folder = tmp_path / "says"
        self.folder.mkdir()
        for number, (code, text) in enumerate(said):
            (self.folder / f"{number}").write_text(text)
            (self.folder / f"{number}.code").write_text(str(code))
        self.bin = self.folder / "storaged"
        self.bin.write_text(
            f"""#!/bin/sh
cd {self.folder} && echo "$*" >> calls
case "$*" in *--verdict*) ;; *) exit 0 ;; esac
number=$(($(grep -c verdict calls) - 1))
[ -e $number ] || number={len(said) - 1}
cat $number
exit $(cat $number.code)
"""
        )
        self.bin.chmod(0o755)

    def calls(self, word):
        return [line for line in (self.folder / "calls").read_text().splitlines() if word in line]

    def job(self, tmp_path, *command, **extra):
        """The script's exit code, what it asks of scontrol and its log."""
        nowhere = SimpleNamespace(socket=tmp_path / "none")
        settings = {"STORAGED_BIN": str(self.bin), "STORAGED_WAIT_S": "60", "STORAGED_SLEEP_S": "0.1"}
        return slurm(nowhere, tmp_path, command or ["true"], **settings | extra)


def step_of(code, step, *reasons, gain=None):
    text = f"job: as the code says\nrun 7-00f step {step} (protected, 2 ranks), expected 3 ms\n"
    text += "".join(f"because: it is so ({reason})\n" for reason in reasons)
    return code, text + (f"waiting would gain step {gain} of run 7-00f (recover) if n3 returns, RAM intact\n" if gain else "")


def nothing(*reasons):
    return 12, "job: impossible\n" + "".join(f"because: it is so ({reason})\n" for reason in reasons)


GOOD = step_of(0, 160, "all-in-place")
NO_DAEMON = (1, "")


@pytest.mark.parametrize("code", [0, 10, 11])
def test_a_slurm_job_waits_for_a_newer_step_and_not_for_the_same_one(tmp_path, code):
    """150 is protected and 160 committed, but not coded yet, when n3 is cut off: a load would take 150."""
    older = step_of(code, 150, "nodes-silent", gain=160)
    (tmp_path / "first").mkdir()
    says = Says(tmp_path / "first", older, older, GOOD)
    said = says.job(tmp_path)
    assert said[:2] == (0, []) and len(says.calls("--verdict")) == 3 and "more for a node" in said[2], said

    says = Says(tmp_path, older)
    said = says.job(tmp_path, STORAGED_WAIT_S="2")
    assert said[:2] == (0, []) and len(says.calls("--verdict")) > 2, "within its limit, and then from what there is"

    (tmp_path / "same").mkdir()
    says = Says(tmp_path / "same", step_of(code, 160, "nodes-silent", gain=160), GOOD)
    assert says.job(tmp_path)[:2] == (0, []) and len(says.calls("--verdict")) == 1


@pytest.mark.parametrize(
    "silent",
    [NO_DAEMON, *(nothing("nothing-restorable", reason) for reason in ("nodes-silent", "too-few-answered", "durable-unreadable"))],
    ids=["no-daemon", "nodes-silent", "too-few-answered", "durable-unreadable"],
)
def test_a_slurm_job_is_not_requeued_for_who_is_away_for_a_moment(tmp_path, silent):
    """Five of these requeues and the job is over."""
    says = Says(tmp_path, silent, silent, GOOD)
    said = says.job(tmp_path, SLURM_RESTART_COUNT="5")
    assert said[:2] == (0, []) and len(says.calls("--verdict")) == 3, said


def test_a_slurm_job_that_nobody_helps_is_requeued_at_once(tmp_path):
    says = Says(tmp_path, nothing("nothing-restorable"), GOOD)
    assert says.job(tmp_path)[:2] == (0, ["requeue 77"]) and len(says.calls("--verdict")) == 1


def test_a_slurm_job_waits_where_a_step_that_loads_refuse_is_all_while_nodes_are_silent(tmp_path):
    says = Says(tmp_path, step_of(10, 160, "too-few-answered", "nodes-silent"), GOOD)
    assert says.job(tmp_path)[:2] == (0, []) and len(says.calls("--verdict")) == 2


@pytest.mark.parametrize("silent", ["nodes-silent", "durable-unreadable"])
@pytest.mark.parametrize("code", [0, 10])
def test_a_slurm_job_starts_from_a_last_resort_only_where_nobody_is_silent(tmp_path, code, silent):
    """A tier that is away for a minute may hold a good older step."""
    says = Says(tmp_path, step_of(code, 160, "all-in-place", "last-resort", silent), step_of(code, 160, "last-resort"), GOOD)
    said = says.job(tmp_path)
    assert said[:2] == (0, []) and len(says.calls("--verdict")) == 2, said


@pytest.mark.parametrize("after", [["all-in-place"], ["all-in-place", "too-few-answered", "nodes-silent"], ["shards-elsewhere", "goes-back"]])
def test_a_slurm_start_counts_against_its_step_only_if_workers_may_have_run(tmp_path, after):
    """Where nodes fall silent before it torchrun refuses to start any, and ends with 1."""
    says = Says(tmp_path, GOOD, step_of(0, 160, *after))
    code, asked, text = says.job(tmp_path, "false", STORAGED_STARTS_MAX="1")
    assert (code, asked) == (0, ["requeue 77"]), text
    counted = says.calls("--failed")
    assert counted == (["plan job --failed 160 --run 7-00f"] if len(after) == 1 else []), text
