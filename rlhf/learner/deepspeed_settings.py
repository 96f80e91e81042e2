"""How DeepSpeed is started: its settings for a trained and for a frozen model, and the world of ranks."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import socket
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from rlhf.algo.sizes import REDUCE_BUCKET
from rlhf.config.sections import TrainedConfig
from rlhf.learner.packed_attention import use_flash_attention_3
from rlhf.types import World

SHM_OP = "deepspeed_shm_comm"

with contextlib.ExitStack() as visible_again:
    if "mlflow" not in sys.modules:  # where it is installed, DeepSpeed's autotuner would import it, for seconds
        sys.modules["mlflow"] = None  # type: ignore[assignment]
        visible_again.callback(sys.modules.pop, "mlflow")
    import deepspeed
    from deepspeed.runtime import compiler

# Every start of DeepSpeed imports this module, and with it torch's compiler, which would take 1 s of a core.
with mock.patch.object(compiler, "compile", return_value=compiler.dummy_decorator):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

_meeting_places: list[dist.TCPStore] = []  # they last as long as their process


def join_world(device: str, world: World) -> torch.device:
    """Join the process group of all ranks; -> the device of this rank."""
    rank, ranks, local, port = map(str, (world.rank, world.size, world.local_rank, world.master_port))
    os.environ.update(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=local, MASTER_ADDR=world.master_host, MASTER_PORT=port)
    if world.master_host.startswith(("localhost", "127.")) and not dist.is_initialized():
        _meet_on_loopback(world)
    if device == "cpu":
        torch.set_num_threads(world.threads)
        os.environ["DS_ACCELERATOR"] = "cpu"
        # At the first start on a machine DeepSpeed would compile an all-reduce over shared memory here. If the build is
        # killed, its lock makes every later start wait forever. gloo does the same work.
        deepspeed.ops.__compatible_ops__[SHM_OP] = False
    if world.deterministic:
        torch.manual_seed(0)  # by default each process has another seed
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    deadline = datetime.timedelta(seconds=world.deadline_s)
    # DeepSpeed's groups of fewer ranks, and its copy of the world, which ZeRO uses, take torch's own defaults.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = deadline
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl", verbose=False, timeout=deadline)
    if device == "cpu":
        return torch.device("cpu")
    if not world.deterministic:  # torch documents a deterministic backward pass only for version 2
        use_flash_attention_3()
    return torch.device("cuda", torch.cuda.current_device())


def _meet_on_loopback(world: World) -> None:
    """Let the ranks of one machine listen only on its loopback interface; by default they listen on every interface."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    # The variable of torchrun, whose agent holds the store: every rank then connects to a store that exists already.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if world.rank == 0:
        listener = socket.create_server((world.master_host, world.master_port))
        host, port, fd = world.master_host, world.master_port, listener.detach()
        _meeting_places.append(dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd))


def deepspeed_engine(
    module: nn.Module, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """DeepSpeed's engine around a module."""
    return deepspeed.initialize(model=module, optimizer=optimizer, config=settings)[0]


def any_settings(world: World, *, dtype: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model, trained or not; `zero` is DeepSpeed's section of that name."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world.size,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": zero,
    }


def training_settings(section: TrainedConfig, world: World, *, dtype: str, device: str) -> dict[str, Any]:
    """Settings of a model that is trained, with one optimizer step per call of `step`."""
    zero: dict[str, Any] = {"stage": section.zero_stage}
    if device == "cuda" and section.zero_stage > 0:
        zero |= {"reduce_bucket_size": REDUCE_BUCKET, "stage3_prefetch_bucket_size": REDUCE_BUCKET}
        # While one bucket is reduced, backward fills another; with offloading both would wait for the host.
        zero["overlap_comm"] = section.zero_stage == 3 or not section.offload_optimizer
    in_float32 = dtype == "float32" or section.reduce_dtype == "float32"
    if world.size == 1 and section.zero_stage > 0:
        # Nothing is sent. A bucket is allocated in full, and a gradient that is larger than it is not copied into it.
        # Stage 1 accumulates in float32 and would still round to the type that is sent.
        zero |= {"reduce_bucket_size": 1, "overlap_comm": False}
        in_float32 = in_float32 or section.zero_stage == 1
    if section.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    zero |= section.deepspeed.get("zero_optimization", {})
    return (
        section.deepspeed
        | any_settings(world, dtype=dtype, zero=zero)
        | {
            "gradient_accumulation_steps": 1,
            "communication_data_type": "fp32" if in_float32 else "bf16",
            "gradient_clipping": section.max_grad_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": "fp32" if section.zero_stage > 0 else None},
        }
    )
