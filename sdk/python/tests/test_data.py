"""`ResumableLoader`: the loader's own order whatever is killed, and batches that are there at once."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch
from daemon import PACKAGE, executable
from storaged import _batches
from storaged.data import ResumableLoader
from storaged.errors import InvalidArgument
from storaged.torch import Checkpointer
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent


class Squares(torch.utils.data.Dataset):
    def __init__(self, length=40, slow=0.0):
        self.length, self.slow, self.read = length, slow, 0

    def __len__(self):
        return self.length

    def __getitem__(self, at):
        self.read += 1
        time.sleep(self.slow)
        return {"x": torch.full((30,), float(at)), "y": at * at}


def plain(epoch=0, length=40, slow=0.0, seed=7):
    """Shuffled as the epoch says, as `set_epoch` does."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return DataLoader(Squares(length, slow), batch_size=4, shuffle=True, generator=generator)


def marks(batches):
    return [batch["y"].tolist() for batch in batches]


def test_batches_come_in_the_loaders_order_and_the_state_says_where(session):
    loader = ResumableLoader(plain(), session=session)
    assert len(loader) == 10 and loader.kept
    taken = []
    for batch in loader:
        taken.append(batch)
        assert loader.state_dict() == {"epoch": 0, "batch": len(taken)}
    assert marks(taken) == marks(plain())
    assert loader.state_dict() == {"epoch": 1, "batch": 0}


def after(session, taken, inner, **settings):
    """A loader whose predecessor took so many batches and left no word but the state."""
    first = ResumableLoader(plain(), session=session, **settings)
    batches = iter(first)
    for _ in range(taken):
        next(batches)
    deadline = time.monotonic() + 5
    while len(first._pass._ready) < min(first.ahead, 10 - taken) and time.monotonic() < deadline:
        time.sleep(0.01)
    batches.close()
    second = ResumableLoader(inner, session=session, **settings)
    second.load_state_dict({"epoch": 0, "batch": taken})
    return second


@pytest.mark.parametrize("taken", [1, 4, 8, 10])
def test_a_restart_has_its_next_batches_without_the_loader_and_misses_none(session, taken):
    slow = plain(slow=0.3)
    loader = after(session, taken, slow)
    batches, began = iter(loader), time.monotonic()
    first = next(batches, None)
    took = time.monotonic() - began
    if taken < 10:
        assert took < 1 < 4 * 0.3 and first is not None
        assert marks([first, *batches]) == marks(plain())[taken:]
        assert loader.recovered == min(loader.ahead, 10 - taken)
    else:
        assert first is None and loader.state_dict() == {"epoch": 1, "batch": 0}


def test_a_restart_that_goes_back_finds_what_was_taken(session):
    loader = after(session, 6, plain(), behind=3)
    loader.load_state_dict({"epoch": 0, "batch": 3})
    assert marks(loader) == marks(plain())[3:]
    assert loader.recovered == 7


def test_what_is_not_there_any_more_comes_from_the_loader(session):
    loader = after(session, 8, plain(), behind=0)
    loader.load_state_dict({"epoch": 0, "batch": 1})
    assert marks(loader) == marks(plain())[1:] and loader.recovered == 0


def test_batches_of_other_data_are_not_taken_for_these(session):
    loader = after(session, 4, plain(length=44))
    assert marks(loader) == marks(plain(length=44))[4:] and loader.recovered == 0
    other = after(session, 4, plain(seed=9), key="seed 7")
    other = ResumableLoader(plain(seed=9), session=session, key="seed 9")
    other.load_state_dict({"epoch": 0, "batch": 4})
    assert marks(other) == marks(plain(seed=9))[4:] and other.recovered == 0


def test_a_job_that_begins_anew_takes_nothing_from_the_one_before(session):
    after(session, 0, plain())
    fresh = ResumableLoader(plain(seed=9), session=session)
    assert marks(fresh) == marks(plain(seed=9)) and fresh.recovered == 0


def test_an_entry_that_was_damaged_is_not_used(session):
    loader = after(session, 4, plain())
    entries, nbytes = loader._ring._layout
    at = _batches.PAGE + (6 % entries) * nbytes + _batches.ALIGNMENT + 300
    loader._ring._board.view[at] ^= 1
    assert marks(loader) == marks(plain())[4:]
    assert loader.recovered == 2


def test_batches_grow_and_are_all_kept_again(session):
    sizes = [1000, 10, 200_000, 3_000_000, 5]

    class Growing:
        def __iter__(self):
            return iter([{"x": torch.arange(size), "n": numpy.arange(size // 2), "s": "x" * size} for size in sizes])

    def same(batch, size):
        return torch.equal(batch["x"], torch.arange(size)) and batch["n"].shape == (size // 2,) and len(batch["s"]) == size

    loader = ResumableLoader(Growing(), session=session, ahead=1)
    assert all(same(batch, size) for batch, size in zip(loader, sizes, strict=True))
    again = ResumableLoader(Growing(), session=session, ahead=1)
    again.load_state_dict({"epoch": 0, "batch": 3})
    assert all(same(batch, size) for batch, size in zip(again, sizes[3:], strict=True)) and again.recovered == 2


def test_every_kind_of_value_comes_back():
    batch = {
        "half": torch.arange(5, dtype=torch.bfloat16), "bool": torch.tensor([True, False]), "none": None, "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3), "complex": torch.ones(2, dtype=torch.complex64), "turned": torch.arange(6).view(2, 3).t(),
        "arrays": [numpy.arange(7.0), numpy.asfortranarray(numpy.ones((3, 4)))], "text": ("a", b"b"), "grad": torch.ones(2, requires_grad=True),
    }
    packed = _batches.Packed(batch, b"state")
    memory = bytearray(packed.nbytes)
    packed.into(memoryview(memory))
    got, state = _batches.unpacked(memory)
    assert state == b"state" and got["none"] is None and got["text"] == ("a", b"b")
    for name in ("half", "bool", "empty", "scalar", "complex", "turned", "grad"):
        assert torch.equal(got[name], batch[name]) and got[name].dtype == batch[name].dtype, name
    assert all(numpy.array_equal(one, other) for one, other in zip(got["arrays"], batch["arrays"]))
    got["turned"].add_(1)


def test_tensors_keep_their_strides_if_their_memory_has_no_gaps(session):
    images = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    batch = {
        "last": images.contiguous(memory_format=torch.channels_last), "one": images[:1].contiguous(memory_format=torch.channels_last),
        "video": torch.ones(2, 3, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d), "turned": images.permute(3, 0, 2, 1),
        "plain": images, "gaps": images[:, :, ::2], "wide": torch.ones(3, 1).expand(3, 4), "apart": images[:, 1:2].transpose(0, 3),
        "half": images.to(torch.bfloat16).permute(1, 0, 3, 2), "zero": torch.tensor(3.0), "none": torch.empty(0, 3).t(),
    }

    class Twice:
        def __iter__(self):
            return iter([batch, batch])

    first = iter(ResumableLoader(Twice(), session=session, ahead=1))
    next(first), next(first)
    again = ResumableLoader(Twice(), session=session, ahead=1)
    again.load_state_dict({"epoch": 0, "batch": 1})
    got = next(iter(again))
    assert again.recovered == 1
    for name, tensor in batch.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype, name
        if name not in ("gaps", "wide", "apart", "none"):
            assert got[name].stride() == tensor.stride(), name
    assert got["last"].is_contiguous(memory_format=torch.channels_last)
    got["last"].add_(1)


def test_a_loaders_error_reaches_the_loop(session):
    class Failing:
        def __iter__(self):
            yield torch.ones(1)
            raise OSError("disk")

    batches = iter(ResumableLoader(Failing(), session=session))
    assert torch.equal(next(batches), torch.ones(1))
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_without_a_daemon_it_is_the_loader_alone(daemons, caplog):
    daemon = daemons()
    session = daemon.session()
    loader = ResumableLoader(plain(), session=session)
    daemon.kill()
    assert marks(loader) == marks(plain())
    alone = ResumableLoader(plain(), session=session)
    alone.load_state_dict({"epoch": 0, "batch": 3})
    assert marks(alone) == marks(plain())[3:]
    assert not alone.kept and "not kept" in caplog.text


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr("storaged._board.LOOK_EVERY", 0.1)


@pytest.mark.parametrize("cause", ["another job needed the room", "the daemon was restarted"])
def test_batches_are_kept_on_a_new_board_where_the_daemon_gave_the_old_one_up(daemons, caplog, looks_often, cause):
    caplog.set_level("INFO", "storaged")
    daemon = daemons('idle_job = "1s"', budget="32MiB")
    session = daemon.session()

    class Large:
        def __iter__(self):
            return iter([{"x": torch.full((300_000,), float(at)), "y": torch.tensor([at])} for at in range(40)])

    loader = ResumableLoader(Large(), session=session, ahead=1, behind=1)
    batches = iter(loader)
    next(batches), next(batches)
    if cause == "the daemon was restarted":
        daemon.kill()
        daemon.start()
    else:
        time.sleep(1.5)
        with Checkpointer(session=daemon.session("other")) as other:
            other.save(1, {"w": torch.zeros(7 << 20)})
            assert other.wait()
        command = [executable(), "drop", "other", "--force", "--socket", str(daemon.socket)]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"STORAGED_TOKEN": "a-secret-of-tests"})
    for _ in range(5):
        time.sleep(0.2)
        next(batches)
    time.sleep(0.3)
    assert loader.kept and "given up the batches" in caplog.text
    again = ResumableLoader(Large(), session=session, ahead=1, behind=1)
    again.load_state_dict({"epoch": 0, "batch": 7})
    assert next(iter(again))["y"].item() == 7 and again.recovered == 1


def test_a_newer_process_of_the_rank_takes_the_board(session, caplog):
    first = ResumableLoader(plain(), session=session)
    batches = iter(first)
    got = [next(batches)]
    first._ring._board.view[_batches.WRITER_AT : _batches.WRITER_AT + 16] = bytes(16)
    assert marks([*got, *batches]) == marks(plain())
    assert not first.kept and "another process" in caplog.text


def test_states_that_cannot_be_are_refused(session):
    loader = ResumableLoader(plain(), session=session)
    for state in ({}, {"epoch": 0}, {"epoch": -1, "batch": 0}, {"epoch": 0, "batch": "2"}):
        with pytest.raises(InvalidArgument, match="epoch and batch"):
            loader.load_state_dict(state)
    with pytest.raises(InvalidArgument, match="ahead"):
        ResumableLoader(plain(), session=session, ahead=0)


# A process that trains for two epochs, and writes down what it took. What it wrote is all that its successor knows.
CONSUMER = """
import base64, hashlib, json, os, pickle, sys, time
from storaged.data import ResumableLoader
from test_data import loader_of

def main():
    kind, log = sys.argv[1], sys.argv[2]
    lines = open(log).read().splitlines() if os.path.exists(log) else []
    if lines and not lines[-1].endswith("}"):
        raise SystemExit("a line was torn")
    loader = ResumableLoader(loader_of(kind), ahead=3, behind=1)
    if lines:
        loader.load_state_dict(pickle.loads(base64.b64decode(json.loads(lines[-1])["state"])))
    said = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while loader.epoch < 2:
        if kind == "plain":
            loader.loader.sampler.set_epoch(loader.epoch)
        for batch in loader:
            digest = hashlib.sha256(batch["x"].numpy().tobytes()).hexdigest()[:12]
            line = {"y": batch["y"].tolist(), "x": digest, "state": base64.b64encode(pickle.dumps(loader.state_dict())).decode(), "recovered": loader.recovered}
            os.write(said, (json.dumps(line) + "\\n").encode())
            time.sleep(0.03)

# Workers of a data loader may be started anew, and import this file.
if __name__ == "__main__":
    main()
"""


def loader_of(kind):
    data = Squares(120, slow=0.0005)
    if kind == "plain":
        sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
        return DataLoader(data, batch_size=4, sampler=sampler)
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    # As docs/python/data.md has it: torchdata's sampler, which has a state, with a generator of its own. With torch's, what a restarted
    # process gets is right only where enough had been kept, and a slow machine may have kept nothing ahead.
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    return StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=2 if kind == "workers" else 0)


def consume(daemon, kind, folder, namespace, kills, seed):
    """What was taken, in the order in which it was, how many batches came from what killed processes had left, and how many were killed."""
    folder.mkdir()
    script, log = folder / "consumer.py", folder / "log"
    script.write_text(CONSUMER)
    environment = os.environ | {
        "STORAGED_SOCKET": str(daemon.socket), "STORAGED_TOKEN": "a-secret-of-tests", "STORAGED_NAMESPACE": namespace, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]),
    }
    draw, recovered, killed = random.Random(seed), 0, 0
    while True:
        worker = subprocess.Popen([sys.executable, str(script), kind, str(log)], env=environment, stderr=subprocess.PIPE, start_new_session=True)
        began, before = time.monotonic(), lines_of(log)
        if kills:
            wanted = before + draw.randrange(1, 7)
            while lines_of(log) < wanted and worker.poll() is None and time.monotonic() - began < 60:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.04)
            kills -= 1
            with contextlib.suppress(ProcessLookupError):  # it may have ended well just now
                os.killpg(worker.pid, signal.SIGKILL)
        _, errors = worker.communicate(timeout=120)
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        if lines[before:]:
            recovered += lines[-1]["recovered"]
        if worker.returncode == 0:
            return [(line["y"], line["x"]) for line in lines], recovered, killed
        assert worker.returncode == -signal.SIGKILL, errors.decode()
        killed += 1


def lines_of(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0


KILLS = int(os.environ.get("STORAGED_TEST_KILLS", "6"))


@pytest.mark.parametrize("kind", ["plain", "stateful", "workers"])
def test_killed_at_random_points_it_gives_what_an_uninterrupted_run_gives(shared_daemon, tmp_path, kind):
    if kind != "plain":
        pytest.importorskip("torchdata.stateful_dataloader")
    straight, _, _ = consume(shared_daemon, kind, tmp_path / "straight", f"straight-{kind}", 0, 0)
    assert len(straight) == 60
    taken, recovered, killed = consume(shared_daemon, kind, tmp_path / "killed", f"killed-{kind}", KILLS, 11)
    assert taken == straight
    # One restart may begin an epoch, of which nothing had been kept.
    assert killed >= min(KILLS, 4) and recovered >= killed - 1


def test_a_batch_that_cannot_be_pickled_stops_the_keeping_and_not_the_training(session, caplog):
    def with_a_lock(batch):
        return {"y": torch.tensor([one["y"] for one in batch]), "lock": threading.Lock()}

    loader = ResumableLoader(DataLoader(Squares(), batch_size=4, collate_fn=with_a_lock), session=session)
    assert len(list(loader)) == 10 and not loader.kept
    assert len([record for record in caplog.records if "not kept" in record.message]) == 1


def test_batches_of_another_size_are_other_data(session):
    def sized(size):
        sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(40)), size, False)
        return ResumableLoader(DataLoader(Squares(), batch_sampler=sampler), session=session)

    first = iter(sized(4))
    next(first), next(first)
    time.sleep(0.3)
    again = sized(3)
    again.load_state_dict({"epoch": 0, "batch": 2})
    assert marks(again)[0] == [at * at for at in (6, 7, 8)]


def test_a_process_that_ends_in_the_middle_of_a_pass_ends_well(session):
    script = (
        "import torch; from storaged.data import ResumableLoader; from torch.utils.data import DataLoader, TensorDataset\n"
        "it = iter(ResumableLoader(DataLoader(TensorDataset(torch.arange(4000.0)), batch_size=2)))\n"
        "[next(it) for _ in range(5)]\n"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=str(PACKAGE))).returncode == 0


def test_the_state_of_a_stateful_loader_is_needed_behind_the_first_epoch(session):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = ResumableLoader(stateful.StatefulDataLoader(Squares(), batch_size=4), session=session)
    loader.load_state_dict({"epoch": 1, "batch": 2})
    with pytest.raises(InvalidArgument, match="load_all"):
        next(iter(loader))
