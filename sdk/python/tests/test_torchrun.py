"""The rendezvous backend that asks for the verdict before each start: what nodes agree on, and real torchruns with real daemons."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import storaged
import torch.distributed as dist
from daemon import HERE, ON_REQUEST, PACKAGE, free_port, saved_by_one, saved_by_two
from storaged import Decision, errors
from storaged._verdict import FailedRestart, Reason, RestartPlan, RestartVerdict, WaitingGain
from storaged.torchrun import AgreedVerdict, agreed_verdict
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters, RendezvousTimeoutError

if not hasattr(registry, "_register_out_of_tree_handlers"):
    pytest.skip("this torch takes no rendezvous backends of other packages", allow_module_level=True)

from storaged import _failed_start, _rendezvous  # noqa: E402
from storaged._rendezvous import Settings, VerdictRendezvous  # noqa: E402

EXAMPLE = HERE.parent / "examples" / "torchrun_rendezvous.py"
NOW = Settings(wait_s=0, ask_s=5, allow_older=False)
FIRST = Reason("nothing-saved", "nobody has heard of a checkpoint")


def found(decision, step=None, *reasons, gains=(), newest=None):
    """A verdict of `decision` on a step of run 1; `gains` are the steps that waiting would gain, `newest` is one that is lost."""
    plan = None if step is None else RestartPlan("1-a", step, "digest", 2, "protected", 10, ())
    waiting = tuple(WaitingGain("1-a", gain, Decision.RECOVER, (), f"step {gain} if n1 returns") for gain in gains)
    code = {Decision.RECOVER: 10, Decision.RESTART_FROM_DURABLE: 11}.get(decision, 13 if FIRST in reasons else 12)
    return RestartVerdict("job", decision, code, reasons, plan, (), ("1-a", newest) if newest else None, (), waiting)


RECOVER = found(Decision.RECOVER, 20)
LOST = found(Decision.IMPOSSIBLE, None, Reason("nothing-restorable", "it is lost"))
OLDER = found(Decision.RESTART_FROM_DURABLE, 10, Reason("goes-back", "step 20 was protected"))


class Rounds:
    """A rendezvous whose rounds are given."""

    use_agent_store = True

    def __init__(self, *rounds):
        self.rounds = list(rounds)

    def next_rendezvous(self):
        store, rank, size = self.rounds.pop(0)
        return RendezvousInfo(store, rank, size, None)

    def num_nodes_waiting(self):
        return 1


class Nodes:
    """As many agents as there are daemons, each in a thread. A daemon says verdicts one after the other, or raises."""

    def __init__(self, monkeypatch, *daemons, settings=NOW):
        self.daemons, self.settings = daemons, settings
        self.asked = [0] * len(daemons)
        self.outcomes = [None] * len(daemons)
        self.store = dist.HashStore()
        monkeypatch.setattr(_rendezvous, "verdict", self.verdict)
        monkeypatch.setattr(_rendezvous, "ASK_AGAIN_S", 0.01)
        monkeypatch.setattr(_rendezvous, "LOOK_EVERY_S", 0.01)
        monkeypatch.delenv("STORAGED_VERDICT", raising=False)

    def verdict(self, *, timeout):
        assert timeout == self.settings.ask_s
        rank = int(threading.current_thread().name)
        said = self.daemons[rank]
        now = said[min(self.asked[rank], len(said) - 1)]
        self.asked[rank] += 1
        if isinstance(now, Exception):
            raise now
        return now

    def meet(self, rank):
        rendezvous = VerdictRendezvous(Rounds((self.store, rank, len(self.daemons))), self.settings, "127.0.0.1")
        try:
            assert rendezvous.next_rendezvous().rank == rank
            self.outcomes[rank] = agreed_verdict()
        except Exception as error:
            self.outcomes[rank] = error

    def run(self):
        threads = [threading.Thread(target=self.meet, args=(rank,), name=str(rank)) for rank in range(len(self.daemons))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.outcomes


AWAY = errors.DaemonUnavailable("no daemon at /run/storaged.sock")


def test_one_node_asks_and_all_do_what_it_says(monkeypatch):
    nodes = Nodes(monkeypatch, [RECOVER], [LOST], [LOST], [LOST])
    outcomes = nodes.run()
    assert nodes.asked == [1, 0, 0, 0]
    assert outcomes == [AgreedVerdict.of(RECOVER, allow_older=False)] * 4, outcomes
    assert (outcomes[0].decision, outcomes[0].step, outcomes[0].run, outcomes[0].exit_code) == (Decision.RECOVER, 20, "1-a", 10)


def test_the_workers_of_each_round_have_a_store_of_their_own(monkeypatch):
    """What a start has written there is nothing that the next one reads."""
    nodes = Nodes(monkeypatch, [RECOVER], [RECOVER])
    handlers = [VerdictRendezvous(Rounds(*((nodes.store, rank, 2), (second, rank, 2))), NOW, "127.0.0.1") for second in [dist.HashStore()] for rank in (0, 1)]

    def meet():
        met = []
        threads = [threading.Thread(target=lambda one=one: met.append(one.next_rendezvous()), name=str(rank)) for rank, one in enumerate(handlers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        ((address, port),) = {(one.bootstrap_store_info.master_addr, one.bootstrap_store_info.master_port) for one in met}
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))

    first = meet()
    first.set("word", "of the first")
    assert not meet().check(["word"])


def test_where_a_daemon_is_away_the_next_node_asks_its_own(monkeypatch):
    nodes = Nodes(monkeypatch, [AWAY], [RECOVER], [LOST])
    assert [one.step for one in nodes.run()] == [20, 20, 20], nodes.outcomes
    assert nodes.asked == [1, 1, 0]


def test_where_no_daemon_answers_all_start_without_a_verdict(monkeypatch, caplog):
    nodes = Nodes(monkeypatch, *[[AWAY]] * 5)
    for one in nodes.run():
        assert one.decision is None and one.may_start and "no daemon at" in one.text, nodes.outcomes
    assert nodes.asked == [1, 1, 1, 0, 0], "with a thousand nodes nobody waits for the daemon of each"
    assert "starting without a verdict" in caplog.text


def test_no_node_starts_where_nothing_of_what_was_saved_can_be_had(monkeypatch):
    nodes = Nodes(monkeypatch, [LOST], [RECOVER], [RECOVER])
    for one in nodes.run():
        assert isinstance(one, errors.RestartRefused) and one.exit_code == 12 and "it is lost" in str(one), nodes.outcomes
    assert nodes.asked == [1, 0, 0] and "STORAGED_VERDICT" not in os.environ


def test_a_first_start_is_never_refused(monkeypatch):
    nodes = Nodes(monkeypatch, [found(Decision.IMPOSSIBLE, None, FIRST)])
    (first,) = nodes.run()
    assert (first.decision, first.exit_code, first.step, first.may_start) == (Decision.IMPOSSIBLE, 13, None, True), first


def test_a_step_that_a_load_would_refuse_is_started_from_only_where_that_is_allowed(monkeypatch):
    (refused,) = Nodes(monkeypatch, [OLDER]).run()
    assert isinstance(refused, errors.RestartRefused) and refused.exit_code == 11, refused
    (started,) = Nodes(monkeypatch, [OLDER], settings=Settings(0, 5, True)).run()
    assert started.needs_allow_older and started.step == 10, started


def test_nodes_that_would_bring_a_newer_step_are_waited_for_within_limits(monkeypatch):
    older = found(Decision.RECOVER, 10, gains=[20])
    nodes = Nodes(monkeypatch, [older, older, RECOVER], [LOST], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [20, 20] and nodes.asked == [3, 0], nodes.outcomes

    nodes = Nodes(monkeypatch, [older], settings=Settings(1, 5, False))
    began = time.monotonic()
    assert [one.step for one in nodes.run()] == [10] and nodes.asked[0] > 2, nodes.outcomes
    assert 1 <= time.monotonic() - began < 10

    # The same step, from nearer: nothing to wait for.
    nodes = Nodes(monkeypatch, [found(Decision.RECOVER, 20, gains=[20])], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [20] and nodes.asked == [1], nodes.outcomes


@pytest.mark.parametrize("code", ["nodes-silent", "too-few-answered", "durable-unreadable"])
def test_what_would_be_refused_is_asked_again_while_somebody_is_silent(monkeypatch, code):
    silent = found(Decision.IMPOSSIBLE, None, Reason(code, "somebody has not answered"))
    nodes = Nodes(monkeypatch, [silent, silent, RECOVER], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [20] and nodes.asked == [3], nodes.outcomes
    # What is certain is said at once.
    nodes = Nodes(monkeypatch, [LOST, RECOVER], settings=Settings(300, 5, False))
    assert isinstance(nodes.run()[0], errors.RestartRefused) and nodes.asked == [1], nodes.outcomes


@pytest.mark.parametrize("code", ["nodes-silent", "durable-unreadable"])
def test_a_step_that_has_failed_is_the_last_resort_only_once_all_were_heard(monkeypatch, code):
    failed = Reason("last-resort", "nothing but step 10 is restorable, and restarts from it have failed before")
    doubtful = found(Decision.RECOVER, 10, failed, Reason(code, "somebody has not answered"))
    nodes = Nodes(monkeypatch, [doubtful, doubtful, RECOVER], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [20] and nodes.asked == [3], nodes.outcomes
    nodes = Nodes(monkeypatch, [doubtful])
    assert [one.step for one in nodes.run()] == [10] and nodes.asked == [1], nodes.outcomes
    nodes = Nodes(monkeypatch, [found(Decision.RECOVER, 10, failed), RECOVER], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [10] and nodes.asked == [1], nodes.outcomes


def test_a_daemon_that_goes_while_a_node_is_waited_for_ends_the_wait(monkeypatch):
    nodes = Nodes(monkeypatch, [found(Decision.RECOVER, 10, gains=[20]), AWAY], [RECOVER], settings=Settings(300, 5, False))
    assert [one.step for one in nodes.run()] == [20, 20] and nodes.asked == [2, 1], nodes.outcomes


def test_a_node_that_hears_nothing_meets_the_others_anew_and_not_for_ever(monkeypatch):
    nodes = Nodes(monkeypatch, [RECOVER])
    monkeypatch.setattr(_rendezvous, "SLACK_S", -14.5)
    silent = (dist.HashStore(), 1, 2)
    monkeypatch.setattr(threading.current_thread(), "name", "0")
    met = VerdictRendezvous(Rounds(silent, silent, (nodes.store, 0, 1)), NOW, "127.0.0.1").next_rendezvous()
    assert (met.rank, agreed_verdict().step) == (0, 20)
    with pytest.raises(RendezvousTimeoutError, match="does one of them hang"):
        VerdictRendezvous(Rounds(*[silent] * 9), NOW, "127.0.0.1").next_rendezvous()


@pytest.mark.parametrize("store_is_silent", [True, False])
def test_torchruns_signals_end_every_wait(monkeypatch, store_is_silent):
    """Its handlers raise, and what it waits for in them is over then."""
    nodes = Nodes(monkeypatch, [found(Decision.RECOVER, 10, gains=[20])], settings=Settings(300, 5, False))
    monkeypatch.setattr(_rendezvous, "ASK_AGAIN_S", 60)
    monkeypatch.setattr(threading.current_thread(), "name", "0")

    def end(*_):
        raise InterruptedError("told to end")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(InterruptedError, match="told to end"):
            VerdictRendezvous(Rounds((nodes.store, 1, 2) if store_is_silent else (nodes.store, 0, 1)), nodes.settings, "127.0.0.1").next_rendezvous()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_who_refuses_stays_until_all_have_read_why(monkeypatch):
    """The store may be this node's: without it the others would only see a connection end."""
    nodes = Nodes(monkeypatch, [LOST], [LOST])
    first = threading.Thread(target=nodes.meet, args=(0,), name="0")
    first.start()
    nodes.store.wait(["storaged/verdict/0"], timedelta(seconds=10))
    first.join(0.3)
    assert first.is_alive()
    nodes.meet(1)
    first.join(10)
    assert not first.is_alive() and all(isinstance(one, errors.RestartRefused) for one in nodes.outcomes), nodes.outcomes


def test_who_refuses_says_why_when_the_store_goes_with_the_node_that_had_it(monkeypatch):
    """That node leaves when all have read, which the last of the others sees only at its next look."""
    nodes = Nodes(monkeypatch, [LOST], [LOST])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    server.set("storaged/verdict/0", AgreedVerdict.of(LOST, allow_older=False).to_json())
    nodes.store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    second = threading.Thread(target=nodes.meet, args=(1,), name="1")
    second.start()
    server.wait(["storaged/read"], timedelta(seconds=10))
    assert second.is_alive(), nodes.outcomes
    del server
    second.join(5)
    assert not second.is_alive() and isinstance(nodes.outcomes[1], errors.RestartRefused), nodes.outcomes


class Job:
    """Agents that stay over several starts, and what the first of them counts as failed."""

    def __init__(self, monkeypatch, nodes):
        self.agents = [self.agent() for _ in range(nodes)]
        self.counted, self.said, self.is_away = [], [], False
        monkeypatch.setattr(_rendezvous, "verdict", lambda *, timeout: self.said.pop(0))
        monkeypatch.setattr(_rendezvous, "restart_failed", self.count)
        monkeypatch.setattr(_failed_start, "COME_WITHIN_S", 0.5)
        monkeypatch.setattr(_failed_start, "LOOK_EVERY_S", 0.01)
        monkeypatch.delenv("STORAGED_VERDICT", raising=False)

    @staticmethod
    def agent():
        return VerdictRendezvous(Rounds(), NOW, "127.0.0.1")

    def count(self, step, *, run, timeout):
        assert (run, timeout) == ("1-a", NOW.ask_s)
        if self.is_away:
            raise AWAY
        self.counted.append(step)
        return FailedRestart(run, step, len(self.counted), 600_000 if len(self.counted) < 3 else None)

    def start(self, *said, failed=(0,)):
        """The step of the next start, for which the first agent's daemon says these verdicts. Workers of `failed` have ended the last one; the
        other agents have seen that somebody waits."""
        self.said, store = list(said), dist.HashStore()
        threads, met = [], []
        for rank, agent in enumerate(self.agents):
            agent._over.rounds.append((store, rank, len(self.agents)))
            if rank not in failed:
                assert agent.num_nodes_waiting() == 1
            threads.append(threading.Thread(target=lambda one=agent: met.append(one.next_rendezvous())))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(met) == len(self.agents) and not self.said, (met, self.said)
        return agreed_verdict().step


TENTH = found(Decision.RECOVER, 10)


def test_a_step_that_workers_fail_from_twice_is_counted_before_the_next_start(monkeypatch, caplog):
    job = Job(monkeypatch, 3)
    assert job.start(RECOVER) == 20
    # A process that was killed, a link that was cut: once is no fault of the step.
    assert job.start(RECOVER, failed=[2]) == 20 and job.counted == []
    assert job.start(RECOVER, TENTH, failed=[1]) == 10 and job.counted == [20]
    assert "a restart from step 20 has failed, 1 by now" in caplog.text
    # It is the last one, and was offered for want of another: counted in each round from its second failure on.
    assert [job.start(TENTH), job.start(TENTH, TENTH)] == [10, 10] and "--lift" not in caplog.text
    assert job.start(TENTH, RECOVER) == 20 and "`storaged plan job --lift 10`" in caplog.text
    assert job.start(RECOVER, failed=[0, 1, 2]) == 20 and job.counted == [20, 10, 10]


def test_a_step_behind_something_newer_has_not_failed(monkeypatch):
    job = Job(monkeypatch, 2)
    assert [job.start(one) for one in (TENTH, RECOVER)] == [10, 20]
    # What was saved since is lost with the machine that failed: the start got somewhere all the same.
    lost = found(Decision.RECOVER, 20, newest=30)
    assert job.start(lost) == 20 and job.counted == []
    # It was lost before these starts, which have saved nothing.
    assert job.start(lost) == 20 and job.start(lost, TENTH) == 10 and job.counted == [20]


def test_a_round_that_ends_because_nodes_come_or_go_is_no_failure_of_a_step(monkeypatch):
    job = Job(monkeypatch, 3)
    job.start(RECOVER)
    job.agents.append(job.agent())
    assert job.start(RECOVER) == 20
    # One is lost, and then another agent comes in its place.
    del job.agents[1]
    assert job.start(RECOVER) == 20
    job.agents[2] = job.agent()
    assert job.start(RECOVER) == 20
    job.agents[0] = job.agent()
    assert job.start(RECOVER) == 20
    # The same ones meet anew, and nobody's workers have failed.
    assert job.start(RECOVER, failed=()) == 20 and job.counted == []
    # What failed before somebody came or went is another row.
    assert job.start(RECOVER) == 20
    job.agents[1] = job.agent()
    assert job.start(RECOVER) == 20 and job.start(RECOVER) == 20 and job.counted == []
    assert job.start(RECOVER, TENTH) == 10 and job.counted == [20]


def test_a_job_whose_failure_cannot_be_counted_goes_on(monkeypatch, caplog):
    job = Job(monkeypatch, 2)
    job.start(RECOVER)
    job.start(RECOVER)
    job.is_away = True
    assert job.start(RECOVER, RECOVER) == 20 and "could not be counted" in caplog.text
    # The other node is the first one now: they are the same two.
    job.is_away = False
    job.agents.reverse()
    assert job.start(RECOVER, TENTH) == 10 and job.counted == [20]


def test_nothing_is_counted_after_a_start_without_a_step(monkeypatch):
    job = Job(monkeypatch, 2)
    nothing = found(Decision.IMPOSSIBLE, None, FIRST)
    assert [job.start(nothing), job.start(nothing), job.start(RECOVER)] == [None, None, 20]
    monkeypatch.setattr(_rendezvous, "verdict", lambda *, timeout: (_ for _ in ()).throw(AWAY))
    assert job.start() is None
    monkeypatch.setattr(_rendezvous, "verdict", lambda *, timeout: job.said.pop(0))
    assert [job.start(RECOVER), job.start(RECOVER)] == [20, 20] and job.counted == []


def parameters(**conf):
    return RendezvousParameters("storaged", f"localhost:{free_port()}", "7", 1, 1, **conf)


def test_settings_that_cannot_be_are_refused_by_every_node(monkeypatch):
    for conf, text in [
        ({"over": "static"}, "over=static"), ({"over": "storaged"}, "over=storaged"), ({"wait_s": "-1"}, "wait_s from 0"),
        ({"ask_s": "0"}, "ask_s from 1"), ({"allow_older": "perhaps"}, "allow_older"), ({"wait_s": "long"}, "wait_s"),
    ]:
        with pytest.raises(ValueError, match=text):
            registry.get_rendezvous_handler(parameters(**conf))


def test_torch_finds_the_backend_and_workers_are_told_who_the_job_is(monkeypatch, tmp_path):
    for name in ("NAMESPACE", "SOCKET", "TOKEN_FILE"):
        monkeypatch.setenv(f"STORAGED_{name}", "before")
    conf = {"namespace": "other", "socket": "/run/other.sock", "token_file": str(tmp_path / "token")}
    handler = registry.get_rendezvous_handler(parameters(**conf))
    try:
        assert handler.get_backend() == "storaged" and handler.get_run_id() == "7"
        assert not handler.is_closed() and handler.num_nodes_waiting() == 0
        told = [os.environ[f"STORAGED_{name}"] for name in ("NAMESPACE", "SOCKET", "TOKEN_FILE")]
        assert told == ["other", "/run/other.sock", str(tmp_path / "token")]
        handler.set_closed()
        assert handler.is_closed()
    finally:
        assert handler.shutdown()


def test_the_package_finds_no_torch_where_there_is_none():
    code = (
        "import sys; sys.modules['torch'] = None; import storaged.torchrun as t, storaged_rendezvous as r; r.backend(); "
        "assert t.agreed_verdict() is None"
    )
    settings = {name: value for name, value in os.environ.items() if name != "STORAGED_VERDICT"}
    subprocess.run([sys.executable, "-c", code], env=settings | {"PYTHONPATH": str(PACKAGE)}, check=True, timeout=60)


def test_the_backend_is_there_whatever_is_imported_first():
    """torch looks for it while its own package is half imported, which may be because the backend's module is."""
    for first in ("storaged.torchrun", "storaged._rendezvous", "torch.distributed.elastic.rendezvous"):
        code = f"import {first}; from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as r; assert 'storaged' in r._registry"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Exception while registering" not in done.stderr, done.stderr


def test_programs_that_import_torch_do_not_import_storaged():
    """It is in their environment: stock PyTorch reads durable copies without it, and theirs is the time that it takes."""
    code = (
        "import sys, torch.distributed.checkpoint; from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler; "
        "from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry as r; "
        "assert 'storaged' in r._registry and 'storaged' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# What a start was told and has loaded, without training anything.
LOOK = """
from storaged.torch import Checkpointer
from storaged.torchrun import agreed_verdict
told = agreed_verdict()
loaded = "nothing"
if told.decision is not None:
    with Checkpointer(timeout=30) as checkpointer:
        whole = checkpointer.load_all(allow_older=told.needs_allow_older)
        loaded = whole and whole["step"]
print(f"TOLD {told.decision and told.decision.value} {told.step} LOADED {loaded}", flush=True)
"""


class Agent:
    """One torchrun, as a node has it, beside one daemon."""

    def __init__(self, tmp_path, socket, script, *arguments, nodes=1, ranks=1, port=None, restarts=3, conf="wait_s=0,ask_s=5"):
        self.log = tmp_path / f"agent-{len(list(tmp_path.glob('agent-*')))}"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]), "STORAGED_SOCKET": str(socket), "STORAGED_TOKEN": "a-secret-of-tests",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--max-restarts", str(restarts),
            "--rdzv-backend", "storaged", "--rdzv-id", "7", "--rdzv-endpoint", f"127.0.0.1:{port or free_port()}", "--local-addr", "127.0.0.1",
            "--rdzv-conf", f"namespace=job,{conf}", str(script), *arguments,
        ]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def text(self):
        return self.log.read_text()

    def until(self, pattern, count=1, limit=120):
        """What the pattern has found, once it has that often."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            hits = re.findall(pattern, self.text())
            if len(hits) >= count:
                return hits
            assert self.process.poll() is None or len(re.findall(pattern, self.text())) >= count, self.text()
            time.sleep(0.05)
        raise AssertionError(f"{pattern} {count} times: {self.text()[-4000:]}")

    def ended(self, limit=120):
        """Its exit code, and what it said."""
        return self.process.wait(limit), self.text()

    def kill(self):
        if self.process.poll() is None:
            # Its workers have sessions of their own; it ends them.
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture
def agents(tmp_path):
    """Makes agents, and ends those that are left."""
    made = []

    def make(*arguments, **settings):
        made.append(Agent(tmp_path, *arguments, **settings))
        return made[-1]

    yield make
    for agent in made:
        agent.kill()


BEGINS = r"rank (\d) pid (\d+) told (\S+) step (\S+), begins after step (\d+)"


def test_a_killed_worker_is_started_again_and_told_what_it_gets(daemons, agents):
    agent = agents(daemons().socket, EXAMPLE, "--steps", "60", ranks=2)
    first = agent.until(BEGINS, 2)
    assert {one[2:] for one in first} == {("impossible", "None", "0")}, first
    time.sleep(2)
    os.kill(int(first[0][1]), signal.SIGKILL)
    again = agent.until(BEGINS, 4)[2:]
    assert {one[2] for one in again} == {"recover-in-place"} and {one[3] for one in again} == {one[4] for one in again}, again
    assert len({one[4] for one in again}) == 1 and int(again[0][4]) > 0, again
    code, text = agent.ended()
    assert code == 0 and text.count("ends after step 60") == 2, text
    assert re.search(r"INFO storaged.torchrun: starting: job: recover-in-place step", text), text


def test_a_step_that_kills_its_workers_is_not_started_from_again(daemons, agents, tmp_path):
    daemon = daemons(ON_REQUEST)
    daemon.newest_state = "committed"
    saved_by_one(daemon, 10, durable="required")
    saved_by_one(daemon, 20)
    (tmp_path / "fails.py").write_text(LOOK + "assert loaded != 20\n")
    code, text = agents(daemon.socket, tmp_path / "fails.py").ended()
    assert code == 0 and re.findall(r"LOADED (\d+)", text) == ["20", "20", "10"], text
    assert "a restart from step 20 has failed, 1 by now" in text, text


def test_nodes_of_one_job_are_told_the_same_after_a_kill(nodes, agents):
    port = free_port()
    two = [agents(one.socket, EXAMPLE, "--steps", "60", nodes=2, port=port) for one in nodes[:2]]
    first = [agent.until(BEGINS)[0] for agent in two]
    assert {one[2:] for one in first} == {("impossible", "None", "0")}, first
    time.sleep(2)
    os.kill(int(first[1][1]), signal.SIGKILL)
    again = [agent.until(BEGINS, 2)[1] for agent in two]
    assert len({one[2:] for one in again}) == 1 and again[0][2].startswith("recover") and int(again[0][4]) > 0, again
    for agent in two:
        code, text = agent.ended()
        assert code == 0 and "ends after step 60" in text, text


def test_a_job_starts_without_a_verdict_where_daemons_are_away(daemons, agents, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    agent = agents(tmp_path / "nobody.sock", tmp_path / "look.py")
    code, text = agent.ended()
    assert code == 0 and "TOLD None None LOADED nothing" in text and "WARNING storaged.torchrun: starting without a verdict" in text, text
    # One that is there and does nothing takes its time, and no more.
    daemon = daemons()
    daemon.stop()
    began = time.monotonic()
    code, text = agents(daemon.socket, tmp_path / "look.py", conf="wait_s=300,ask_s=2").ended()
    assert code == 0 and "TOLD None None LOADED nothing" in text, text
    assert time.monotonic() - began < 60, text


def test_the_daemon_of_another_node_is_asked_where_the_first_nodes_is_away(nodes, agents, tmp_path):
    saved_by_two(nodes, tmp_path, 20)
    (tmp_path / "look.py").write_text(LOOK.replace("told.decision is not None", "False"))
    port = free_port()
    without = agents(tmp_path / "nobody.sock", tmp_path / "look.py", nodes=2, port=port)
    beside = agents(nodes[1].socket, tmp_path / "look.py", nodes=2, port=port)
    for agent in (without, beside):
        code, text = agent.ended()
        assert code == 0 and "TOLD recover-in-place 20" in text, text


def test_nothing_is_started_where_nothing_can_be_had_until_a_node_brings_it(nodes, agents, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    saved_by_two(nodes, tmp_path, 20)
    nodes[0].stop()
    nodes[1].stop()
    port = free_port()
    two = [agents(nodes[2].socket, tmp_path / "look.py", nodes=2, port=port) for _ in range(2)]
    for agent in two:
        code, text = agent.ended()
        assert code != 0 and "TOLD" not in text, text
        assert "RestartRefused: not started" in text and "waiting would gain step 20" in text, text

    waiting = agents(nodes[2].socket, tmp_path / "look.py", conf="wait_s=400,ask_s=5")
    waiting.until("waiting up to")
    nodes[0].go_on()
    code, text = waiting.ended(400)
    assert code == 0 and "TOLD recover 20 LOADED 20" in text, text


def test_an_older_step_is_started_from_where_the_settings_allow_it(nodes, agents, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    saved_by_two(nodes, tmp_path, 10, durable="required")
    saved_by_two(nodes, tmp_path, 20)
    nodes[0].stop()
    nodes[1].stop()
    code, text = agents(nodes[2].socket, tmp_path / "look.py").ended()
    assert code != 0 and "TOLD" not in text and "RestartRefused: not started" in text, text
    code, text = agents(nodes[2].socket, tmp_path / "look.py", conf="wait_s=0,ask_s=5,allow_older=1").ended()
    assert code == 0 and "TOLD restart-from-durable 10 LOADED 10" in text, text
