"""Reads a step of the durable directory with stock PyTorch alone: no storaged is imported."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.pt"
        dcp_to_torch_save(sys.argv[1], str(whole))
        state = torch.load(whole, weights_only=True)
    assert "storaged" not in sys.modules
    model = state["model"]
    count = sum(tensor.numel() for tensor in model.values())
    print(f"{len(model)} tensors of the model, {count} parameters, step {int(state['step'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
