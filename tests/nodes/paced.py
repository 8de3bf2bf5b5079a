"""Runs a training script as it is, with a pause at each of its collectives, so that machines that share a core get on with it.

    paced.py SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import runpy
import sys
import time

import torch.distributed as dist

PAUSE = 0.1
all_reduce = dist.all_reduce


def paced(*arguments, **options):
    time.sleep(PAUSE)
    return all_reduce(*arguments, **options)


dist.all_reduce = paced
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
