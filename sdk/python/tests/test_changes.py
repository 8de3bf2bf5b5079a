"""What changes between two saves of a structure that is known: every change is saved as it is, bit for bit, or refused by name."""

from collections import UserDict

import pytest
import torch
from storaged.errors import UnsavableState
from storaged.torch import Checkpointer


def state(step):
    """Plain tensors, ones that need more than a byte copy, and objects."""
    weights = torch.arange(12.0).view(3, 4) + step
    return {
        "w": weights,
        "same shape": torch.arange(12.0).view(3, 4) - step,
        "tied": weights,
        "t": torch.arange(6.0).view(2, 3).t() + step,
        "z": torch.complex(torch.arange(4.0), torch.ones(4) * step),
        "p": torch.nn.Parameter(torch.full((5,), float(step))),
        "nested": {"a": [torch.tensor(step), torch.zeros(2, dtype=torch.int64)], "b": (torch.ones(3), step)},
        "keys": {1: torch.full((2,), float(step))},
        "empty": torch.empty(0, 4),
        "lr": 1e-3 * step,
        "list": [1, 2, step],
        "rng": b"x" * 100,
    }


def renamed(tensors):
    tensors["new name"] = tensors.pop("same shape")


def reordered(tensors):
    tensors["w"] = tensors.pop("w")


def equal_key(tensors):
    """1 and True are equal, their names are not."""
    tensors["keys"] = {True: tensors["keys"][1]}


def swapped(tensors):
    tensors["w"], tensors["same shape"] = tensors["same shape"], tensors["w"]


def through_data(tensors):
    tensors["same shape"].data = torch.full((3, 4), 7.0)


def into_another_storage(tensors):
    tensors["same shape"].set_(torch.arange(40.0).untyped_storage(), 5, (3, 4), (4, 1))


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    change.__name__ = f"{name}: {make.__name__}"
    return change


def inside(make):
    def change(tensors):
        tensors["nested"]["a"][1] = make(tensors["nested"]["a"][1])

    change.__name__ = f"inside: {make.__name__}"
    return change


def another_one(tensor):
    return tensor.detach().clone() + 1


def transposed(tensor):
    return torch.arange(12.0).view(4, 3).t()


def every_second(tensor):
    return torch.arange(24.0)[::2].view(3, 4) if tensor.numel() == 12 else torch.arange(10.0)[::2]


def expanded(tensor):
    return torch.arange(4.0).expand(3, 4)


def at_an_offset(tensor):
    return torch.arange(40.0)[9:21].view(3, 4)


def longer(tensor):
    return torch.arange(24.0).view(6, 4)


def other_dimensions(tensor):
    return tensor.detach().clone().view(4, 3)


def wider(tensor):
    return tensor.detach().double()


def other_numbers(tensor):
    return tensor.detach().clone().view(torch.int32)


def conjugated(tensor):
    return tensor.clone().conj()


def negated(tensor):
    return torch._neg_view(tensor.detach().clone())


def without_a_parameter(tensor):
    return tensor.detach().clone() * 2


def with_elements(tensor):
    return torch.ones(2, 4)


def number(tensor):
    return 12345


def tensor_of_it(value):
    return torch.tensor([4.0, 2.0])


def longer_object(value):
    return "y" * 3000


def other_object(value):
    return b"z" * 100


def one_more(value):
    return [*value, 4]


CHANGES = [
    renamed, reordered, equal_key, swapped, through_data, into_another_storage,
    put("w", another_one), put("same shape", another_one), put("tied", another_one), put("p", without_a_parameter),
    put("same shape", transposed), put("same shape", every_second), put("same shape", expanded), put("same shape", at_an_offset),
    put("same shape", longer), put("same shape", other_dimensions), put("same shape", wider), put("same shape", other_numbers),
    put("t", another_one), put("z", conjugated), put("same shape", negated), put("empty", with_elements),
    put("same shape", number), put("lr", tensor_of_it), put("lr", longer_object), put("rng", other_object), put("list", one_more),
    inside(another_one), inside(number),
]  # fmt: skip


def bits(value):
    """A state as plain data: of each tensor its type, shape and bits. What DCP makes of names and tuples is made here too."""
    if isinstance(value, dict):
        return {str(key): bits(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return str(plain.dtype), tuple(plain.shape), bytes(plain.flatten().view(torch.uint8).tolist()) if plain.numel() else b""
    return value


def saved_and_loaded(checkpointer, step, tensors):
    expected = bits(tensors)
    checkpointer.save(step, tensors)
    # Training goes on as soon as the save has returned.
    for tensor in (tensors["w"], tensors["p"].data):
        if isinstance(tensor, torch.Tensor) and tensor.is_contiguous():
            tensor += 1
    assert checkpointer.wait()
    whole = checkpointer.load_all(step)
    assert list(whole) == list(tensors) or set(whole) == set(tensors)
    assert bits(whole) == expected, step


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_saved_as_it_is(session, change):
    with Checkpointer(session=session, durable="never") as checkpointer:
        tensors = state(1)
        for step in (1, 2, 3):
            saved_and_loaded(checkpointer, step, tensors)
        # On a machine that is busy elsewhere the first one may be planned twice.
        assert checkpointer._memory.again >= 1
        change(tensors)
        # In every slot, and also once what is new is known.
        for step in (4, 5, 6):
            saved_and_loaded(checkpointer, step, tensors)
        tensors = state(9)
        for step in (7, 8):
            saved_and_loaded(checkpointer, step, tensors)


def test_an_object_that_is_changed_in_place_is_saved_as_it_was(session):
    with Checkpointer(session=session) as checkpointer:
        tensors = state(1) | {"progress": {"seen": [1, 2]}}
        for step in (1, 2, 3, 4):
            tensors["progress"]["seen"][1] = step
            checkpointer.save(step, tensors)
            tensors["progress"]["seen"][1] = -1
            assert checkpointer.wait()
            assert checkpointer.load_all(step)["progress"]["seen"] == [1, step]


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def partly_freed(tensor):
    tensor.untyped_storage().resize_(40)
    return tensor


def partly_freed_columns(tensor):
    columns = tensor.view(3, 4).t()
    columns.untyped_storage().resize_(40)
    return columns


def sparse(tensor):
    return tensor.detach().to_sparse()


def nowhere(tensor):
    return tensor.detach().to("meta")


@pytest.mark.parametrize("make", [freed, partly_freed, partly_freed_columns, sparse, nowhere], ids=lambda make: make.__name__)
def test_what_has_no_memory_any_more_is_refused_by_name_and_nothing_else_is_lost(session, make):
    with Checkpointer(session=session, on_error="warn") as checkpointer:
        tensors = {"whole": torch.ones(4), "changed": torch.arange(12.0)}
        for step in (1, 2, 3):
            checkpointer.save(step, tensors)
            assert checkpointer.wait()
        with pytest.raises(UnsavableState, match="'changed'"):
            checkpointer.save(4, tensors | {"changed": make(tensors["changed"])})
        tensors["changed"] = torch.arange(12.0) * 2
        checkpointer.save(5, tensors)
        assert checkpointer.wait()
        assert bits(checkpointer.load_all()) == bits(tensors)


def test_columns_that_were_freed_are_refused_though_they_were_known(session):
    with Checkpointer(session=session, on_error="warn") as checkpointer:
        columns = torch.arange(12.0).view(3, 4).t()
        for step in (1, 2, 3):
            checkpointer.save(step, {"columns": columns})
            assert checkpointer.wait()
        columns.untyped_storage().resize_(40)
        with pytest.raises(UnsavableState, match="'columns'"):
            checkpointer.save(4, {"columns": columns})


class Counting:
    """A `Stateful` among the tensors: asked for its state at every save."""

    def __init__(self):
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        return {"asked": self.asked, "w": torch.full((3,), float(self.asked))}

    def load_state_dict(self, state_dict):
        self.asked = state_dict["asked"]


def test_what_gives_its_own_state_is_asked_every_time(session):
    with Checkpointer(session=session) as checkpointer:
        counting = Counting()
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.ones(3), "counting": counting})
            assert checkpointer.wait()
            whole = checkpointer.load_all(step)
            assert whole["counting"]["asked"] == step and whole["counting"]["w"].sum() == 3 * step


def many(count=10_000):
    return {f"layer{i}.weight": torch.full((64,), float(i)) for i in range(count)}


def test_many_small_tensors_are_right_after_each_save(session):
    with Checkpointer(session=session, timeout=300) as checkpointer:
        tensors = many()
        for step in (1, 2, 3, 4):
            for tensor in tensors.values():
                tensor += 1
            checkpointer.save(step, tensors)
            assert checkpointer.wait()
        whole = checkpointer.load_all()
        assert whole.keys() == tensors.keys() and all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())


def test_a_mapping_that_is_no_dict_is_saved_as_it_is_each_time(session):
    with Checkpointer(session=session, alone=True, trust_pickle=True) as checkpointer:
        for step, values in enumerate([{"a": 1}, {"a": 1}, {"a": 1}, {"a": 1, "b": 2}, {"b": 2}], start=1):
            checkpointer.save(step, {"w": torch.ones(3), "m": UserDict(values)})
            checkpointer.wait()
            assert checkpointer.load_all(step)["m"] == values


def test_saves_in_inference_mode_leave_later_ones_alone(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        for step in range(1, 6):
            with torch.inference_mode(step < 3):
                weights = torch.arange(6.0).view(2, 3).t() + step
                checkpointer.save(step, {"t": weights})
                checkpointer.wait()
        assert torch.equal(checkpointer.load_all(5)["t"], torch.arange(6.0).view(2, 3).t() + 5)


def test_keys_that_are_equal_and_have_other_names_are_told_apart(session):
    with Checkpointer(session=session, alone=True) as checkpointer:
        for step, key in enumerate([0.0, 0.0, -0.0, (1,), (True,)], start=1):
            checkpointer.save(step, {"k": {key: torch.full((2,), float(step))}})
            checkpointer.wait()
            assert str(key) in str(checkpointer.load_all(step)), key
