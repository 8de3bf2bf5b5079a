"""DTensor, where this torch has it: up to 2.4 in a private module."""

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

__all__ = ["DTensor", "Replicate", "Shard", "distribute_tensor"]
