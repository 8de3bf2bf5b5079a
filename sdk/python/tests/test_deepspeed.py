"""The checkpoint engine by itself: files of a tag are one checkpoint, and what goes wrong is typed. DeepSpeed runs it in test_frameworks."""

import importlib.util
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from storaged.errors import InvalidArgument, NoCheckpointError, UnsavableState

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make frameworks installs it")


class Scaler:
    """Of a type that nothing allows: Megatron-Core allows some of Python's own for the whole process."""


def test_files_of_a_tag(session, tmp_path):
    from storaged.deepspeed import StoragedCheckpointEngine

    engine = StoragedCheckpointEngine(session=session, alone=True)
    files = {
        "mp_rank_00_model_states.pt": {"module": OrderedDict(w=torch.arange(6.0).view(2, 3)), "param_shapes": [torch.Size([2, 3])], "steps": 7},
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"state": {0: {"step": torch.tensor(7.0)}}, "scaler": None},
    }
    folder = tmp_path / "global_step7"
    folder.mkdir()
    info = SimpleNamespace(tag="global_step7", save_dir=str(tmp_path), save_latest=True)
    engine.create(info)
    for name, state in files.items():
        engine.save(state, str(folder / name))
    assert engine.commit(info) and sorted(path.name for path in folder.iterdir()) == sorted(files)

    model, optimizer = (engine.load(str(folder / name)) for name in files)
    assert torch.equal(model["module"]["w"], torch.arange(6.0).view(2, 3)) and type(model["module"]) is OrderedDict
    assert model["param_shapes"] == [torch.Size([2, 3])] and model["steps"] == 7
    assert optimizer["state"][0]["step"] == 7 and optimizer["scaler"] is None

    with pytest.raises(NoCheckpointError, match="has no file 'other.pt'"):
        engine.load(str(folder / "other.pt"))
    with pytest.raises(NoCheckpointError):
        engine.load(str(tmp_path / "global_step8" / "mp_rank_00_model_states.pt"))
    with pytest.raises(InvalidArgument, match="ends with its step"):
        engine.create(SimpleNamespace(tag="best", save_dir=str(tmp_path), save_latest=True))
    with pytest.raises(UnsavableState, match="trust"):
        engine.save({"loss_scaler": Scaler()}, str(folder / "x.pt"))
    engine.cleanup()
