"""What older versions of torch lack, and the package has for them: tested with the newest too."""

import collections
import datetime
import enum
import io

import numpy
import torch
from storaged.torch import _objects
from storaged.torch._alone import load_alone, save_alone
from storaged.torch import StoragedLoadPlanner, StoragedReader, StoragedWriter


class Colour(enum.Enum):
    RED = 1


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_the_names_in_a_value_are_those_that_torch_finds():
    for value in (b"bytes", {"day": datetime.date(2026, 11, 22)}, numpy.arange(3.0), [Colour.RED], collections.Counter("ab"), 7):
        names = _objects.names_in(saved(value))
        ask = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
        if ask is not None:
            assert set(ask(saved(value))) <= set(names)
        assert all("." in name for name in names)


def test_types_are_allowed_for_one_load_alone():
    value = {"day": datetime.date(2026, 11, 22), "raw": b"\x00\xff"}
    before = set(torch.serialization.get_safe_globals())
    file = saved(value)
    with _objects.allowing_before_2_5(list(_objects._known(_objects.names_in(file)))):
        file.seek(0)
        assert torch.load(file, weights_only=True) == value
    assert set(torch.serialization.get_safe_globals()) == before


class Model:
    """Stateful, as DCP knows it."""

    def __init__(self, value):
        self.weights = torch.full((5,), value)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


def test_one_process_saves_and_loads_alone(session):
    save_alone({"model": Model(3.0), "step": 7}, StoragedWriter(7, session=session, rank=0, world_size=1))
    into = {"model": Model(0.0), "step": 0}
    load_alone(into, StoragedReader(session=session), StoragedLoadPlanner())
    assert into["step"] == 7 and torch.equal(into["model"].weights, torch.full((5,), 3.0))
