"""A process group that is destroyed and made anew is another one, wherever it lies in memory: its job has runs of its own."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from storaged.torch import StoragedWriter, _ranks


class Group:
    """As much of one as a key needs."""


@pytest.fixture
def no_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def end():
    # Up to torch 2.6 a group that is freed waits for Gloo's threads with the interpreter's lock, and one of these may want
    # that lock to let a tensor of the last collective go: both wait for ever. They are given time to do it before.
    time.sleep(0.1)
    dist.destroy_process_group()
    gc.collect()


def test_no_group_has_the_key_of_an_earlier_one():
    keys, addresses = set(), set()
    for _ in range(50):
        group = Group()
        addresses.add(id(group))
        keys.add(_ranks.run_key(group))
        assert _ranks.run_key(group) in keys
        del group
        gc.collect()
    assert len(addresses) < 50, "memory was used again, or this test tests nothing"
    assert len(keys) == 50
    one, other = Group(), Group()
    assert _ranks.run_key(one) != _ranks.run_key(other)


def test_no_real_group_has_the_key_of_an_earlier_one(no_group):
    keys, alone = set(), _ranks.run_key()
    for _ in range(20):
        begin()
        keys.add(_ranks.run_key())
        assert _ranks.run_key() in keys and _ranks.run_key(dist.group.WORLD) in keys
        end()
    assert len(keys) == 20 and alone not in keys and _ranks.run_key() == alone


def test_each_group_saves_in_a_run_of_its_own_and_nothing_is_kept_of_those_before(session, no_group):
    runs, kept = [], len(_ranks._words)
    for step in range(1, 7):
        begin()
        writer = StoragedWriter(session=session)
        for part in (0, 1):
            dcp.save({"w": torch.full((9,), float(step))}, storage_writer=writer, checkpoint_id=f"step-{10 * step + part}")
            runs.append(writer.handle.run)
        del writer
        end()
        assert len(_ranks._words) == kept, "what ranks told each other through a store that is gone"
    assert runs[::2] == runs[1::2] and len(set(runs)) == 6
