"""Models parallelised by PyTorch's own means, trained, saved and loaded into models that were trained otherwise: bit for bit, and the
next loss is the same."""

import pytest
import torch
from daemon import run_ranks

COMMON = """
# No number of ranks divides it; TP alone cannot multiply such parts.
WIDTH = 33
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

def plain(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 7))

def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}

def put(model, optimizer, state):
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
"""
KINDS = {
    "fsdp1": (2, """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

def parallel(model):
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, **SETTINGS)

def state_of(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}

def put(model, optimizer, state):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
"""),
    "hsdp": (4, """
from torch.distributed.fsdp import fully_shard

def parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model
"""),
    "tp": (2, """
WIDTH = 34
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def parallel(model):
    return parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""),
}
# ShardedTensors without a mesh, DTensors with one.
KINDS["fsdp1-mesh"] = (2, KINDS["fsdp1"][1].replace("**SETTINGS", 'device_mesh=init_device_mesh("cpu", (world,))'))
KINDS["fsdp1"] = (2, KINDS["fsdp1"][1].replace(", **SETTINGS", ""))
RUN = """
def trained(seed, steps):
    model = parallel(plain(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss_of(model, seed + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

def loss_of(model, seed):
    return model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()

def local(value):
    return value.to_local() if hasattr(value, "to_local") else value

def bits(model, optimizer):
    tensors = [*model.parameters(), *(value for one in optimizer.state.values() for value in one.values())]
    return [local(tensor).detach().clone() for tensor in tensors]

FULL = "@FULL@"
model, optimizer = trained(1, 3)
before, state, checkpointer = bits(model, optimizer), state_of(model, optimizer), Checkpointer(timeout=120)
attempt(checkpointer.save, 1, state)
said.append(["saved", checkpointer.wait()])
next_loss = loss_of(model, 99).item()

other, its = trained(2, 2)
said.append(["differs", any(not torch.equal(a, b) for a, b in zip(before, bits(other, its)) if a.numel())])
into = state_of(other, its)
attempt(checkpointer.load, into)
put(other, its, into)
after = bits(other, its)
said.append(["equal", len(before) == len(after) and all(map(torch.equal, before, after)), sum(one.numel() for one in after)])
said.append(["loss", loss_of(other, 99).item() == next_loss])

# What stock DCP writes of the same state says what the whole is.
attempt(dcp.save, state, storage_writer=dcp.FileSystemWriter(FULL))
checkpointer.close()
"""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_parallel_model_comes_back_bit_for_bit(daemons, tmp_path, kind):
    import torch.distributed.checkpoint as dcp
    from storaged.torch import Checkpointer

    if kind == "hsdp":
        import torch.distributed.fsdp as fsdp

        if not hasattr(fsdp, "fully_shard"):
            pytest.skip("torch 2.6 is the first with a public fully_shard")
        if not hasattr(torch.cpu.Stream, "record_event"):
            pytest.skip("fully_shard of torch 2.6 fails on CPUs, in the first forward pass")
    daemon, (ranks, build) = daemons(), KINDS[kind]
    body = COMMON + build + RUN.replace("@FULL@", str(tmp_path / "stock"))
    said, errors = run_ranks(tmp_path, [daemon.socket] * ranks, body, limit=500)
    assert all(said), errors
    for lines in said:
        assert all(line[0] == "ok" or line[1] is True for line in lines), (lines, errors)
        assert {line[0] for line in lines} == {"ok", "saved", "differs", "equal", "loss"}, lines
    # One process without any mesh has the whole of it, as stock PyTorch has.
    weights = Checkpointer(session=daemon.session(), alone=True).load_all()["model"]
    stock = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()}["0.weight"] == (34 if kind == "tp" else 33, 16)
    assert all(torch.equal(tensor, stock["model"][name]) and tensor.any() for name, tensor in weights.items())
