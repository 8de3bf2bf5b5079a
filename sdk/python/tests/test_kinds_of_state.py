"""What a state dict may hold: objects that come back without trust in pickle, wrapper tensors, and what is refused by name."""

import datetime
import enum
import io
import os
import random
import subprocess
import sys

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import HERE, PACKAGE
from storaged.errors import CheckpointSaveError, UnsafeObject, UnsavableState
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter
from storaged.torch._whole import pack
from torch.distributed.checkpoint.api import CheckpointException
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor


class Color(enum.Enum):
    RED = 1


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Custom:
    def __init__(self):
        self.x = 1


OBJECTS = {
    "numpy float": numpy.float32(1.5),
    "numpy int": numpy.int64(-3),
    "numpy bool": numpy.bool_(True),
    "numpy datetime": numpy.datetime64("2026-01-01"),
    "array": numpy.arange(12).reshape(3, 4),
    "text array": numpy.array(["a", "bc"]),
    "rng": numpy.random.RandomState(3).get_state(),
    "generator": numpy.random.default_rng(3).bit_generator.state,
    "python rng": random.Random(3).getstate(),
    "enum": Color.RED,
    "flags": Bits.A | Bits.B,
    "moment": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    "day": datetime.date(2026, 1, 2),
    "span": datetime.timedelta(seconds=3),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "plain": {"a": [1, 2.5, None, True], "b": (b"x", "y")},
}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def blank(value):
    """DCP takes dicts apart: a template has the same keys."""
    return {key: blank(inner) for key, inner in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize("how", ["checkpointer", "plain"])
def test_known_types_come_back_without_trust(session, how):
    into = {name: blank(value) for name, value in OBJECTS.items()} | {"bytes": None}
    saved = OBJECTS | {"bytes": io.BytesIO(b"abc")}
    if how == "checkpointer":
        with Checkpointer(session=session) as checkpointer:
            checkpointer.save(1, saved)
            checkpointer.wait()
            checkpointer.load(into)
    else:
        dcp.save(saved, storage_writer=StoragedWriter(1, session=session))
        dcp.load(into, storage_reader=StoragedReader(session=session))
    assert into.pop("bytes").getvalue() == b"abc"
    for name, value in OBJECTS.items():
        assert same(into[name], value), (name, into[name])


@pytest.mark.parametrize("value", [Custom(), print, numpy.array([Custom()], dtype=object), {"deep": [1, Custom()]}])
def test_what_could_not_be_loaded_is_refused_by_name(session, value):
    state = {"model": torch.ones(3), "extra": {"thing": value}}
    with pytest.raises(UnsavableState, match="extra.thing"), Checkpointer(session=session, on_error="warn") as checkpointer:
        checkpointer.save(1, state)
    with pytest.raises(CheckpointException, match="extra.thing"):
        dcp.save(state, storage_writer=StoragedWriter(1, session=session))


def test_with_trust_it_is_saved_and_only_with_trust_it_is_loaded(session):
    with Checkpointer(session=session, trust_pickle=True) as trusting:
        trusting.save(1, {"thing": Custom()})
        trusting.wait()
        into = {"thing": None}
        trusting.load(into)
        assert into["thing"].x == 1
    with pytest.raises(CheckpointException, match="not plain data") as caught:
        dcp.load({"thing": None}, storage_reader=StoragedReader(session=session))
    assert "UnsafeObject" in str(caught.value)


def test_an_enum_of_a_module_that_nobody_imported_is_not_imported(session, tmp_path):
    (tmp_path / "absent_module.py").write_text("import enum\nprint('code ran')\nclass Kind(enum.Enum):\n    A = 1\n")
    saving = (
        "import os, sys\nfrom storaged import Session\nfrom storaged.torch import Checkpointer\nimport absent_module\n"
        f"c = Checkpointer(session=Session({session.namespace!r}, socket={session.socket!r}, token=b'a-secret-of-tests'))\n"
        "c.save(1, {'kind': absent_module.Kind.A})\nassert c.wait()\nc.close()\nsys.stdout.flush()\nos._exit(0)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE), str(tmp_path)])}
    subprocess.run([sys.executable, "-c", saving], env=environment, check=True, timeout=300)
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(BaseException) as caught, Checkpointer(session=session) as checkpointer:
            checkpointer.load({"kind": None})
        assert "absent_module.Kind" in str(caught.value) or isinstance(caught.value.__cause__, UnsafeObject)
        assert "absent_module" not in sys.modules
    finally:
        sys.path.remove(str(tmp_path))


def wrapped(scale):
    return TwoTensor(torch.full((4, 5), scale), torch.full((4, 5), -scale))


def test_a_wrapper_tensor_is_taken_apart_and_filled_again(session):
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"model": {"w": wrapped(2.0), "plain": torch.ones(3)}, "step": 1})
        assert checkpointer.wait()
        into = {"model": {"w": wrapped(0.0), "plain": torch.zeros(3)}, "step": 0}
        kept = into["model"]["w"]
        checkpointer.load(into)
    assert into["model"]["w"] is kept and into["step"] == 1 and torch.equal(into["model"]["plain"], torch.ones(3))
    assert torch.equal(kept.a, torch.full((4, 5), 2.0)) and torch.equal(kept.b, torch.full((4, 5), -2.0))


def test_nested_wrappers_too(session):
    outer = TwoTensor(wrapped(1.0), wrapped(2.0))
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": outer})
        assert checkpointer.wait()
        into = {"w": TwoTensor(wrapped(0.0), wrapped(0.0))}
        checkpointer.load(into)
    assert torch.equal(into["w"].b.b, torch.full((4, 5), -2.0)) and torch.equal(into["w"].a.a, torch.ones(4, 5))


def parts_of(tensor):
    """What a wrapper is made of, by name, and what it says of itself."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, str(context)


def quantised_weight(config):
    from torchao.quantization import quantize_

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256, dtype=torch.bfloat16))
        quantize_(model, config())
        return model[0].weight

    return make


def optimizer_state(name):
    from torchao import optim

    def make(seed):
        torch.manual_seed(seed)
        kind = getattr(optim.adam, name)
        state = kind.zeros((64, 256)) if name == "OptimStateFp8" else kind.zeros((64, 256), True)
        return state.copy_(torch.randn(64, 256))

    return make


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_quantised_tensors_of_torchao_come_back_bit_for_bit(session, name):
    quantization = pytest.importorskip("torchao.quantization", reason="make frameworks installs torchao")
    make = optimizer_state(name) if name.startswith("Optim") else quantised_weight(getattr(quantization, name))
    saved, into = make(1), make(2)
    parts, context = parts_of(saved)
    assert any(not torch.equal(bits(part), bits(other)) for part, other in zip(parts.values(), parts_of(into)[0].values()))
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"model": {"w": saved}})
        assert checkpointer.wait()
        state = {"model": {"w": into}}
        checkpointer.load(state)
    assert state["model"]["w"] is into and parts_of(into)[1] == context
    for name, part in parts_of(into)[0].items():
        assert part.dtype == parts[name].dtype and torch.equal(bits(part), bits(parts[name])), name
    assert torch.equal(into.dequantize(), saved.dequantize())


class Scaled(torch.Tensor):
    """A tensor whose scale is no tensor: only its context has it."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self):
        return ["inner"], {"scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise NotImplementedError


def test_a_wrapper_that_says_something_else_of_itself_is_warned_of(session, caplog):
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"m": [Scaled(torch.ones(3, dtype=torch.int8), 0.5)]})
        assert checkpointer.wait()
        for scale in (0.5, 0.25):
            caplog.clear()
            into = {"m": [Scaled(torch.zeros(3, dtype=torch.int8), scale)]}
            checkpointer.load(into)
            assert into["m"][0].inner.sum() == 3
            warned = [record.getMessage() for record in caplog.records if "what they mean may not be" in record.getMessage()]
            assert len(warned) == (scale != 0.5)
        assert "'m.0' was saved as Scaled {'scale': 0.5} and is loaded into Scaled {'scale': 0.25}" in warned[0]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_a_jagged_tensor_is_made_of_tensors_too(session):
    def make(value):
        return torch.nested.nested_tensor([torch.full((3, 4), value), torch.full((5, 4), -value)], layout=torch.jagged)

    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": make(2.0)})
        assert checkpointer.wait()
        into = {"w": make(0.0)}
        checkpointer.load(into)
    assert [one.sum().item() for one in into["w"].unbind()] == [24.0, -40.0]


def test_adapters_that_load_without_a_template_refuse_wrappers_by_name():
    with pytest.raises(UnsavableState, match="'model.0.w' is a TwoTensor.*without a template"):
        pack({"model": [{"w": wrapped(1.0)}]})


def test_a_wrapper_in_a_plain_save_is_refused_by_name(session):
    with pytest.raises(CheckpointException, match="'model.w' is a TwoTensor"):
        dcp.save({"model": {"w": wrapped(1.0)}}, storage_writer=StoragedWriter(1, session=session))


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def freed():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


class Hidden(torch.Tensor):
    """A wrapper without the protocol that takes it apart."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise NotImplementedError


def test_a_subclass_with_memory_is_a_tensor(session):
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(6.0).view(2, 3).as_subclass(Named), "t": torch.arange(6.0).view(2, 3).t()})
        assert checkpointer.wait()
        into = {"w": torch.zeros(2, 3).as_subclass(Named), "t": torch.zeros(3, 2)}
        checkpointer.load(into)
    assert torch.equal(into["w"].as_subclass(torch.Tensor), torch.arange(6.0).view(2, 3)) and torch.equal(into["t"], into["w"].as_subclass(torch.Tensor).t())


@pytest.mark.parametrize(
    "make",
    [
        freed,
        lambda: torch.empty(3, device="meta"),
        lambda: Hidden(torch.ones(3)),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(torch.ones(3, 4), torch.ones(3), torch.zeros(3), 0, torch.qint8),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
    ],
    ids=["freed", "meta", "hidden wrapper", "quantised", "by channel", "sparse", "nested", "masked"],
)
def test_a_tensor_without_memory_is_refused_by_name(session, make):
    with pytest.raises(UnsavableState, match="'model.w'"), Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"model": {"w": make()}})
    with Checkpointer(session=session) as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(3)}})
        assert checkpointer.wait()


def test_what_is_refused_on_one_call_is_not_the_next_calls_failure(session):
    checkpointer = Checkpointer(session=session)
    with pytest.raises(UnsavableState):
        checkpointer.save(1, {"x": Custom()})
    checkpointer.save(2, {"x": 1})
    assert checkpointer.wait() and checkpointer.failed_saves == 1
    checkpointer.close()
    assert isinstance(checkpointer.last_error, CheckpointSaveError)


EMPTY = {
    "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "extra": {}}]}, "nothing": {}, "in a list": [1, {}, [{}], {"x": {}}],
    "only": [{}], "after": torch.ones(2), "lists": [[], ()],
}


def test_empty_dicts_come_back_without_a_template(session):
    expected = EMPTY | {"lists": [[], ()]}
    with Checkpointer(session=session) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, dict(EMPTY))
            assert checkpointer.wait()
            got = checkpointer.load_all()
            assert torch.equal(got.pop("after"), torch.ones(2))
            assert got == {name: value for name, value in expected.items() if name != "after"}
        assert checkpointer._memory.again == 1
        into = {"optimizer": {"state": {}, "param_groups": [{"lr": 0.0, "extra": {}}]}, "after": torch.zeros(2)}
        checkpointer.load(into)
        assert into["optimizer"] == EMPTY["optimizer"] and into["after"].sum() == 2
        checkpointer.save(3, {"all": {}})
        assert checkpointer.wait() and checkpointer.load_all() == {"all": {}}


def test_empty_dicts_of_an_asynchronous_save_come_back_too(session):
    result = dcp.async_save({"a": {}, "w": torch.ones(1)}, storage_writer=StoragedWriter(1, session=session, rank=0, world_size=1))
    getattr(result, "upload_completion", result).result(30)
    with Checkpointer(session=session) as checkpointer:
        assert checkpointer.load_all()["a"] == {}


def nested(levels, kind):
    value = {"w": torch.arange(3.0), "n": levels}
    for _ in range(levels):
        value = {"x": value} if kind == "dicts" else {"x": [value]} if kind == "both" else [value]
    return value if isinstance(value, dict) else {"x": value}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["dicts", "lists", "both"])
def test_a_state_that_is_nested_too_deeply_is_refused_and_one_that_is_not_comes_back(session, kind, background):
    levels = {"dicts": 199, "lists": 198, "both": 99}[kind]
    itself = {}
    itself["again"] = itself
    with Checkpointer(session=session, background=background) as checkpointer:
        for wrong in (nested(900, kind), nested(5000, kind), itself):
            with pytest.raises(UnsavableState, match="200 levels"):
                checkpointer.save(1, wrong)
        for step in (2, 3):
            checkpointer.save(step, nested(levels, kind))
            assert checkpointer.wait()
            got = checkpointer.load_all()
            for _ in range(levels * (2 if kind == "both" else 1) + (kind == "lists")):
                got = got["x"] if isinstance(got, dict) else got[0]
            assert got["n"] == levels and torch.equal(got["w"], torch.arange(3.0))
        into = nested(levels, kind)
        checkpointer.load(into)


def test_numpy_scalars_come_back_where_a_framework_has_allowed_numpys_types(session):
    value = numpy.float32(1.5)
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([numpy.dtype, type(numpy.float32(0))])
    try:
        with Checkpointer(session=session) as checkpointer:
            checkpointer.save(1, {"value": value})
            assert checkpointer.wait()
            assert checkpointer.load_all()["value"] == value
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
