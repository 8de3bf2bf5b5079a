"""Shards of other nodes are read while they still come, and what becomes of those that come no more."""

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import cluster, run_ranks
from storaged import errors
from storaged.torch import StoragedReader
from torch.distributed.checkpoint.api import CheckpointException

PATIENCE = 20
#: Many chunks of 4 KiB, and a tensor of zeros, which looks like memory that nobody has written to.
ELEMENTS = 300_001
SAVE = f"""
checkpointer = Checkpointer(timeout=30)
generator = torch.Generator().manual_seed(rank)
state = {{f"w{{rank}}": torch.rand({ELEMENTS}, generator=generator), f"z{{rank}}": torch.zeros(50_000)}}
checkpointer.save(1, state)
said.append(["protected", checkpointer.wait("protected", 30)])
checkpointer.close()
"""
RANKS = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Three nodes at (2, 1) with a step of three ranks, the third of which runs beside the first."""
    folder = tmp_path_factory.mktemp("early")
    nodes = cluster(folder, 3, 2, 1, 'chunk = "4KiB"')
    try:
        said, errors_said = run_ranks(folder, [nodes[0].socket, nodes[1].socket, nodes[0].socket], SAVE)
        assert said == [[["protected", True]]] * RANKS, errors_said
        yield nodes
    finally:
        for node in nodes:
            node.kill()


class Shards:
    """A connection that keeps the shards that it opens, and how they were asked for; `wrap` may put another in place of one."""

    def __init__(self, client, opened, wrap):
        self.client, self.opened, self.wrap = client, opened, wrap

    def __getattr__(self, name):
        return getattr(self.client, name)

    def open_shard(self, manifest, rank, ranges, timeout_ms, without_own_ram, verify, early):
        shard = self.client.open_shard(manifest, rank, ranges, timeout_ms, without_own_ram, verify, early)
        self.opened.append((rank, early, shard.is_early))
        return self.wrap(shard, rank, early)


def watched(node, monkeypatch, wrap=lambda shard, rank, early: shard):
    session, opened = node.session(timeout=PATIENCE), []
    shared, connect = session.client, session.connect
    monkeypatch.setattr(session, "client", lambda deadline=None: Shards(shared(deadline), opened, wrap))

    def connected(deadline=None):
        client = connect(deadline)
        return client if session._lock.locked() else Shards(client, opened, wrap)

    monkeypatch.setattr(session, "connect", connected)
    return session, opened


def wanted(rank):
    return torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(rank))


def load(session, ranks, **options):
    state = {f"w{rank}": torch.ones(ELEMENTS) for rank in ranks} | {f"z{rank}": torch.ones(50_000) for rank in ranks}
    reader = StoragedReader(session=session, timeout=PATIENCE, **options)
    dcp.load(state, storage_reader=reader)
    for rank in ranks:
        assert torch.equal(state[f"w{rank}"], wanted(rank)) and not state[f"z{rank}"].any(), f"rank {rank}"
    return reader


class Breaks:
    """A shard that comes no more once somebody reads it."""

    is_early = True

    def __init__(self, shard, error):
        self.rung, self.error = shard.rung, error

    def read_many(self, parts, threads):
        raise self.error

    read = read_many


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("verify", ["fast", "full"])
def test_what_comes_from_other_nodes_is_read_while_it_comes(nodes, monkeypatch, threads, verify):
    session, opened = watched(nodes[2], monkeypatch)
    reader = load(session, range(RANKS), threads=threads, verify=verify)
    assert sorted(opened) == [(rank, True, True) for rank in range(RANKS)]
    assert reader.rungs.keys() == {"peer ram"}
    limit = time.monotonic() + PATIENCE
    while nodes[2].status()["memory"]["slots"]:
        assert time.monotonic() < limit, "what was read is given back"
        time.sleep(0.02)


def test_what_is_here_is_there_at_once(nodes, monkeypatch):
    session, opened = watched(nodes[1], monkeypatch)
    reader = load(session, [1])
    assert opened == [(1, True, False)] and reader.rungs.keys() == {"own ram"}


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2]])
def test_what_comes_no_more_is_opened_again_and_read_when_it_is_there(nodes, monkeypatch, ranks):
    gone = errors.DaemonUnavailable("its daemon was restarted")
    session, opened = watched(nodes[2], monkeypatch, lambda shard, rank, early: Breaks(shard, gone) if early else shard)
    load(session, ranks)
    again = [(rank, early) for rank, early, _ in opened]
    for rank in ranks:
        assert again.count((rank, True)) >= 1 and again.count((rank, False)) == 1, opened
    assert all(not is_early for _, early, is_early in opened if not early)


@pytest.mark.parametrize(
    "error, attempts",
    [(errors.TooManyLost("two of three"), 2), (errors.CorruptData("a chunk"), 2), (errors.WaitTimeout("it has been 20 s"), 1)],
)
def test_what_is_lost_is_said_of_a_shard_that_came(nodes, monkeypatch, error, attempts):
    session, opened = watched(nodes[2], monkeypatch, lambda shard, rank, early: Breaks(shard, error))
    with pytest.raises(CheckpointException) as raised:
        load(session, [0])
    ((found, _),) = raised.value.failures.values()
    assert found is error and [rank for rank, *_ in opened] == [0] * attempts


def test_a_daemon_that_is_killed_while_a_shard_comes_costs_no_load(nodes, monkeypatch):
    killed = []

    def kills(shard, rank, early):
        if not killed:
            killed.append(rank)
            nodes[2].kill()
            nodes[2].start()
        return shard

    session, opened = watched(nodes[2], monkeypatch, kills)
    load(session, range(RANKS))
    assert killed and opened[0][1:] == (True, True), opened


def test_a_connection_that_is_hung_up_ends_a_read(nodes):
    session = nodes[2].session(timeout=PATIENCE)
    reader = StoragedReader(session=session, timeout=PATIENCE)
    reader.read_metadata()
    client = session.connect()
    length = reader._manifest.shard_lengths[0]
    shard = client.open_shard(reader._manifest, 0, [], 10_000, False, "fast", True)
    assert shard.is_early and shard.length == length
    whole = shard.read(0, length)
    client.close_shard(reader._manifest, 0)
    other = client.open_shard(reader._manifest, 0, [], 10_000, False, "fast", False)
    assert not other.is_early and other.read(0, length) == whole
    with pytest.raises(ValueError):
        shard.read(0, length + 1)
    client.hang_up()
    with pytest.raises(errors.StoragedError):
        client.open_shard(reader._manifest, 0, [], 10_000, False, "fast", True)
