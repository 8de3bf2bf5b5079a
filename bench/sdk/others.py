"""Others on the same state: torch.save, stock torch.distributed.checkpoint, HyperPod's client against storaged, DLRover."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measure import blocked_and_done, timed
from own import ended
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

HYPERPOD_HOST = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
HYPERPOD_NEEDS = ("amzn_sagemaker_checkpointing", "boto3", "s3torchconnector", "tenacity", "xxhash")


class Folder:
    """In shared memory, gone afterwards."""

    def __enter__(self):
        self.path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-sdk-"))
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


def torch_save(contest, out):
    with Folder() as shm:
        file = shm / "state.pt"
        saved = contest.ratios(lambda: {"save": timed(lambda: torch.save(contest.state, file))[0]})
        loaded = contest.ratios(lambda: {"load": timed(lambda: torch.load(file))[0]})
    out["torch_save_vs_memcpy"], out["torch_load_vs_memcpy"] = saved["save"], loaded["load"]
    out["torch_save_cpu_s_per_gb"] = saved["cpu"]


def stock_dcp(contest, out):
    with Folder() as shm:
        sync = lambda: dcp.save(contest.state, storage_writer=dcp.FileSystemWriter(shm / "sync"), no_dist=True)  # noqa: E731
        out["dcp_sync_shm_vs_memcpy"] = contest.ratios(lambda: {"block": timed(sync)[0]})["block"]
        load = lambda: dcp.load(contest.copy, storage_reader=dcp.FileSystemReader(shm / "sync"), no_dist=True)  # noqa: E731
        out["dcp_load_shm_vs_memcpy"] = contest.ratios(lambda: {"load": timed(load)[0]})["load"]
    cached = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    ahead = StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False)
    for name, options in (("dcp_async", None), ("dcp_async_cached", cached), ("dcp_async_background", ahead)):
        stager = DefaultStager(options) if options else None

        def save(to):
            given = {"async_stager": stager} if stager else {}  # noqa: B023
            return dcp.async_save(contest.state, storage_writer=dcp.FileSystemWriter(to), **given)

        with Folder() as shm:
            got = contest.ratios(lambda: blocked_and_done(lambda: save(shm / "async"), ended))  # noqa: B023
        out[f"{name}_block_vs_memcpy"], out[f"{name}_total_vs_memcpy"] = got["block"], got["total"]
        if stager is None:
            out["dcp_async_cpu_s_per_gb"] = got["cpu"]
        else:
            stager.close()


def hyperpod(contest, out, make_node):
    """The client as it is on PyPI: what it asks its own host for goes to the daemon here."""
    if missing := [name for name in HYPERPOD_NEEDS if importlib.util.find_spec(name) is None]:
        return f"HyperPod's client was not measured: {', '.join(missing)} not installed"
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import SageMakerTieredStorageReader, SageMakerTieredStorageWriter
    from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig

    node, port, token, folder = make_node()
    netrc = folder / "netrc"
    netrc.write_text(f"machine {HYPERPOD_HOST} login anybody password {token}\n")
    netrc.chmod(0o600)
    before = dict(os.environ)
    os.environ |= {"http_proxy": f"http://127.0.0.1:{port}", "NETRC": str(netrc)}
    # It logs to a file below /var/log unless its logger does already.
    quiet = logging.FileHandler("/var/log/sagemaker_checkpointing/bench_checkpointing.log", delay=True)
    quiet.setLevel(logging.CRITICAL + 1)
    logger = logging.getLogger("bench-hyperpod")
    logger.addHandler(quiet)
    config = SageMakerCheckpointConfig(namespace="bench", world_size=1, logger=logger)
    steps = iter(range(1, 1000))

    def save():
        return dcp.async_save(contest.state, storage_writer=SageMakerTieredStorageWriter(checkpoint_config=config, step=next(steps)))

    def load():
        for tensor in contest.copy.values():
            tensor.zero_()
        reader = SageMakerTieredStorageReader(checkpoint_config=config)
        took = timed(lambda: dcp.load(contest.copy, storage_reader=reader))[0]
        # It says nothing where it could not load.
        assert all(torch.equal(contest.copy[name], tensor) for name, tensor in saved.items()), "HyperPod's client loaded other bytes"
        return {"load": took}

    try:
        got = contest.ratios(lambda: blocked_and_done(save, ended), daemon=node.process.pid)
        saved = {name: tensor.clone() for name, tensor in contest.state.items()}
        loaded = contest.ratios(load)
    finally:
        node.kill()
        os.environ.clear()
        os.environ |= before
    out["hyperpod_block_vs_memcpy"], out["hyperpod_total_vs_memcpy"] = got["block"], got["total"]
    out["hyperpod_load_vs_memcpy"] = loaded["load"]
    out["hyperpod_cpu_s_per_gb"], out["hyperpod_daemon_cpu_s_per_gb"] = got["cpu"], got["daemon_cpu"]
    out["hyperpod_version"] = version("amzn-sagemaker-checkpointing")
    return None


def dlrover(contest, out):
    """Its handler of shared memory alone, which its checkpointers copy with: neither its agent nor its locks."""
    if importlib.util.find_spec("dlrover") is None:
        return "DLRover was not measured: dlrover is not installed"
    logging.disable(logging.WARNING)
    try:
        from dlrover.python.elastic_agent.torch.ckpt_saver import DLROVER_CKPT_CONFIG_KEY, CheckpointConfig, SharedMemoryHandler
    except ImportError as error:
        return f"DLRover was not measured: {error}"
    finally:
        logging.disable(logging.NOTSET)
    # It logs every save, and made the root logger log everybody's.
    logging.getLogger().setLevel(logging.ERROR)
    for name in list(logging.root.manager.loggerDict):
        if "dlrover" in name:
            logging.getLogger(name).setLevel(logging.ERROR)
    handler = SharedMemoryHandler(0, host=True)
    steps = iter(range(1, 1000))

    def save():
        config = CheckpointConfig(step=next(steps), world_size=1)
        return {"block": timed(lambda: handler.save_state_dict({**contest.state, DLROVER_CKPT_CONFIG_KEY: config}))[0]}

    try:
        got = contest.ratios(save)
        back = handler.load_state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in contest.state.items()), "DLRover gave other bytes"
        del back
    finally:
        handler.close()
        handler.unlink()
    out["dlrover_block_vs_memcpy"], out["dlrover_cpu_s_per_gb"] = got["block"], got["cpu"]
    out["dlrover_version"] = version("dlrover")
    return None
