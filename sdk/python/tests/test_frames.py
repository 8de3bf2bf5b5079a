"""A record of every dtype is what `torch.load(weights_only=True)` reads."""

import io
import pickle

import pytest
import torch
from storaged import _native
from storaged.errors import InvalidArgument

KNOWN = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 complex32 uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()


def record_of(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    (record,), frames, end = _native.layout([(dtype, list(tensor.shape))], 0)
    data = bytearray(end)
    for offset, piece in frames:
        data[offset : offset + len(piece)] = piece
    offset, length, data_offset, data_length = record
    raw = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    data[data_offset : data_offset + data_length] = bytes(raw.tolist())
    return bytes(data[offset : offset + length])


def stock_loads(name):
    """torch 2.4 does not save and load its own unsigned tensors."""
    saved = io.BytesIO()
    try:
        torch.save(torch.empty(1, dtype=getattr(torch, name)), saved)
        saved.seek(0)
        return torch.load(saved, weights_only=True) is not None
    except (KeyError, pickle.UnpicklingError):
        return False


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (5, 7), (300, 100)])
@pytest.mark.parametrize("name", [n for n in KNOWN if hasattr(torch, n) and stock_loads(n)])
def test_a_record_is_a_torch_save_of_the_tensor(name, shape):
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        tensor = (torch.arange(count) % 3 == 0).view(shape)
    else:
        raw = (torch.arange(count * dtype.itemsize) % 127).to(torch.uint8)
        tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    loaded = torch.load(io.BytesIO(record_of(tensor)), weights_only=True)
    assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape and loaded.stride() == tensor.stride()
    if count:
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_what_cannot_be_laid_out_is_refused_in_words():
    with pytest.raises(InvalidArgument, match="float33"):
        _native.layout([("float33", [1])], 0)
    with pytest.raises(InvalidArgument):
        _native.layout([("float32", [1 << 62])], 0)
