"""Shards that are not in own RAM are opened ahead, each while the one before it is read; and what goes wrong then."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import Daemon, cluster, run_ranks
from storaged import errors
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter
from storaged.torch._openings import Ahead, Prospect
from storaged.torch._reader import Wanted
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

RANKS = 3
#: Longer than anything here takes: what does not come by then never does.
PATIENCE = 10
TIER = '[durable]\nkind = "directory"\npath = "TIER"\n'
SAVE = """
checkpointer = Checkpointer(timeout=30, durable="required")
checkpointer.save(1, {f"w{rank}": torch.full((100_000,), float(rank + 1))})
said.append(["durable", checkpointer.wait("durable", 30)])
checkpointer.close()
"""
PROTECT = SAVE.replace(', durable="required"', "").replace("durable", "protected")


@pytest.fixture(scope="module")
def tier_of_three(tmp_path_factory):
    """A node with a durable tier that has a step of three ranks."""
    folder = tmp_path_factory.mktemp("three")
    daemon = Daemon(folder / "node", TIER)
    try:
        said, errors_said = run_ranks(folder, [daemon.socket] * RANKS, SAVE)
        assert said == [[["durable", True]]] * RANKS, errors_said
        yield daemon
    finally:
        daemon.kill()


@pytest.fixture
def saved(tier_of_three):
    """The same with nothing in its RAM, and the tier as it was."""
    tier_of_three.kill()
    pristine = tier_of_three.folder / "pristine"
    if not pristine.exists():
        shutil.copytree(tier_of_three.tier, pristine)
    shutil.rmtree(tier_of_three.tier)
    shutil.copytree(pristine, tier_of_three.tier)
    tier_of_three.start()
    return tier_of_three


class Spy:
    """A connection that writes down what is asked of it and when it is done, and calls `before` first."""

    def __init__(self, client, told, before):
        self.client, self.told, self.before = client, told, before

    def __getattr__(self, name):
        return getattr(self.client, name)

    def open_shard(self, manifest, rank, *rest):
        self.before(self.client, rank)
        try:
            shard = self.client.open_shard(manifest, rank, *rest)
        except errors.StoragedError as error:
            self.told(type(error).__name__, rank)
            raise
        self.told("opened", rank)
        return shard

    def close_shard(self, manifest, rank, *rest):
        self.client.close_shard(manifest, rank, *rest)
        self.told("closed", rank)


class Events:
    """What happened, in order; others wait for it."""

    def __init__(self):
        self.all = []
        self._changed = threading.Condition()

    def told(self, what, rank):
        with self._changed:
            self.all.append((what, rank))
            self._changed.notify_all()

    def wait(self, what, rank, limit=PATIENCE):
        with self._changed:
            return self._changed.wait_for(lambda: (what, rank) in self.all, limit)

    def open_at_most(self):
        is_open = most = 0
        for what, _ in self.all:
            is_open += {"opened": 1, "closed": -1}.get(what, 0)
            most = max(most, is_open)
        return most


def spied(daemon, monkeypatch, before=lambda client, rank: None):
    session, events = daemon.session(timeout=PATIENCE), Events()
    shared, connect = session.client, session.connect
    monkeypatch.setattr(session, "client", lambda deadline=None: Spy(shared(deadline), events.told, before))

    def connected(deadline=None):
        # The session's own connection is made by this too.
        is_inner = session._lock.locked()
        client = connect(deadline)
        return client if is_inner else Spy(client, events.told, before)

    monkeypatch.setattr(session, "connect", connected)
    return session, events


class Reading(DefaultLoadPlanner):
    """Says when tensors are read, and calls `then` while their shard is open."""

    def __init__(self, events, then=lambda rank: None):
        super().__init__()
        self.events, self.then = events, then

    def commit_tensor(self, read_item, tensor):
        rank = int(read_item.dest_index.fqn[1:])
        self.events.told("read", rank)
        self.then(rank)
        super().commit_tensor(read_item, tensor)


def blank(ranks=range(RANKS)):
    return {f"w{rank}": torch.zeros(100_000) for rank in ranks}


def load(session, planner, state=None):
    state = blank() if state is None else state
    reader = StoragedReader(session=session, timeout=PATIENCE)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert all(bool((tensor == int(name[1:]) + 1).all()) for name, tensor in state.items())
    return reader


def openers():
    return [thread for thread in threading.enumerate() if thread.name == "storaged-open-ahead"]


def assert_nothing_is_held(daemon):
    """No slot that a reader has, and no thread."""
    assert not openers()
    limit = time.monotonic() + PATIENCE
    while daemon.status()["memory"]["slots"]:
        assert time.monotonic() < limit, daemon.status()["memory"]
        time.sleep(0.02)


def test_a_shard_is_opened_while_the_one_before_it_is_read(saved, monkeypatch):
    session, events = spied(saved, monkeypatch)
    came = []
    reader = load(session, Reading(events, lambda rank: came.append(rank + 1 == RANKS or events.wait("opened", rank + 1))))
    assert came == [True] * RANKS, events.all
    assert set(reader.rungs) == {"durable tier"}
    # One that is read and one that comes, whatever is still to be read.
    assert events.open_at_most() == 2, events.all
    assert [event for event in events.all if event[0] == "read"] == [("read", rank) for rank in range(RANKS)]
    assert_nothing_is_held(saved)


def test_what_is_in_own_ram_is_read_while_the_rest_is_decoded(tmp_path, monkeypatch):
    nodes = cluster(tmp_path, 3, 2, 1, 'chunk = "4KiB"')
    try:
        here, lost, _ = nodes
        said, errors_said = run_ranks(tmp_path, [lost.socket, here.socket] * 2, PROTECT)
        assert said == [[["protected", True]]] * 4, errors_said
        lost.kill()
        session, events = spied(here, monkeypatch)
        came = []

        def wait(rank):
            came.append((rank, rank == 2 or events.wait("opened", {1: 0, 3: 0, 0: 2}[rank])))

        reader = load(session, Reading(events, wait), blank(range(4)))
        assert came == [(1, True), (3, True), (0, True), (2, True)], events.all
        assert reader.rungs.keys() == {"own ram", "decoded"} and not openers()
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_shard_that_cannot_be_had_is_told_in_its_turn(saved, monkeypatch, lost):
    session, events = spied(saved, monkeypatch)
    (saved.step_folder(session, 1) / f"__{lost}_0.distcp").unlink()
    with pytest.raises(CheckpointException) as raised:
        load(session, Reading(events))
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, errors.CorruptData) and f"rank {lost}" in str(error), error
    assert [event for event in events.all if event[0] == "read"] == [("read", rank) for rank in range(lost)]
    assert_nothing_is_held(saved)


def test_a_failure_while_a_shard_is_read_ends_the_opening_of_the_next(saved, monkeypatch):
    on_its_way = threading.Event()

    def stopped(client, rank):
        if rank == 1:
            on_its_way.set()
            saved.stop()

    session, events = spied(saved, monkeypatch, stopped)

    def fail(rank):
        assert on_its_way.wait(PATIENCE)
        raise ValueError("no room on the device")

    started = time.monotonic()
    with pytest.raises(CheckpointException, match="no room on the device"):
        load(session, Reading(events, fail))
    assert time.monotonic() - started < PATIENCE / 2
    assert not openers()
    saved.go_on()
    assert_nothing_is_held(saved)


def test_ctrl_c_ends_the_wait_for_a_shard_that_is_opened_ahead(saved, monkeypatch):
    def stopped(client, rank):
        if rank == 1:
            saved.stop()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    session, events = spied(saved, monkeypatch, stopped)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        # DCP makes no difference between failures.
        with pytest.raises((KeyboardInterrupt, CheckpointException), match="^$|KeyboardInterrupt"):
            load(session, Reading(events))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < PATIENCE / 2
    assert not openers()
    saved.go_on()
    assert_nothing_is_held(saved)


@pytest.fixture
def small(saved):
    """With room for two slots."""
    config = saved.config.read_text()
    saved.config.write_text(config.replace('budget = "256MiB"', 'budget = "4MiB"'))
    saved.kill()
    saved.start()
    yield saved
    saved.config.write_text(config)


def test_a_shard_that_does_not_fit_beside_the_one_that_is_read_is_opened_after_it(small, monkeypatch):
    session, events = spied(small, monkeypatch)
    # Somebody took the rest after it was looked at.
    real = Prospect.has_room
    others = StoragedWriter(1, session=small.session("other"))

    def has_room(prospect, *wanted):
        answer = real(prospect, *wanted)
        others.stage({"x": torch.ones(10)})
        return answer

    monkeypatch.setattr(Prospect, "has_room", has_room)
    load(session, Reading(events, lambda rank: events.wait("ArenaTooSmall", 1)))
    assert events.all[:3] == [("opened", 0), ("read", 0), ("ArenaTooSmall", 1)], events.all
    assert events.open_at_most() == 1 and events.all[-1] == ("closed", 2), events.all
    others.close()
    others.session.drop_connections()
    assert_nothing_is_held(small)


def test_without_room_for_all_ranks_of_the_node_nothing_is_opened_ahead(saved, monkeypatch):
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread, real=threading.Thread.start: (started.append(thread.name), real(thread)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "65")
    session, events = spied(saved, monkeypatch)
    load(session, Reading(events))
    assert "storaged-open-ahead" not in started and events.open_at_most() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "60")
    load(session, Reading(events))
    assert started.count("storaged-open-ahead") == 1


def test_what_this_node_holds_itself_is_opened_in_turn(session, monkeypatch):
    monkeypatch.setattr(Ahead, "__init__", None)
    with Checkpointer(session=session, alone=True) as checkpointer:
        checkpointer.save(1, {"w0": torch.ones(10)})
        assert checkpointer.wait()
    reader = StoragedReader(session=session)
    ((rank, _, source),) = reader.resolve()["shards"]
    assert Prospect(json.loads(session.client().status())).holds(source), source
    wanted = [Wanted(number, [], [(0, 1)], [(0, 1)]) for number in (rank, rank)]
    reader.read_metadata()
    assert reader._prospect(wanted) == (wanted, [], None)


def test_hanging_up_ends_the_call_of_another_thread_and_the_connection(session):
    client = session.connect()
    run = client.open_run(5000)
    outcomes = []

    def wait():
        try:
            client.wait(run, 1, "committed", PATIENCE * 1000)
        except errors.StoragedError as error:
            outcomes.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    started = time.monotonic()
    client.hang_up()
    thread.join()
    assert time.monotonic() - started < 1
    (error,) = outcomes
    assert isinstance(error, errors.WaitTimeout) and "ended by the caller" in str(error)
    for _ in range(200):
        # Its answer comes before anybody looks whether it was to be waited for.
        with pytest.raises(errors.StoragedError, match="ended by the caller"):
            client.status()
    client.hang_up()


def test_room_is_what_the_budget_and_the_tenants_share_leave():
    def prospect(used, own_used, most):
        own = {"tenant": "red", "used": own_used, "guaranteed": 0, "most": most}
        return Prospect({"node": "n0", "memory": {"budget": 64 << 20, "used": used, "tenants": [own]}})

    assert prospect(0, 0, None).has_room(8, 2, 4 << 20)
    assert not prospect(1, 1, None).has_room(8, 2, 4 << 20)
    # Slots are rounded up.
    assert not prospect(0, 0, None).has_room(8, 2, (4 << 20) + 1)
    assert not prospect(20 << 20, 20 << 20, 40 << 20).has_room(8, 2, 2 << 20)
    assert prospect(20 << 20, 0, 40 << 20).has_room(8, 2, 2 << 20)
    assert prospect(0, 0, None).holds("ram of n0") and not prospect(0, 0, None).holds("ram of n00")
