"""The parts of other packages that they do not promise to keep: they exist, and they do what we rely on.

Tests in other files that exercise such parts have the marker `private` too; `make upgrade-check` runs all of them with
the newest releases.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from model_families import make_family
from torch import nn

pytestmark = pytest.mark.private

ROOT = Path(__file__).parent.parent
PARTS = {
    "ray._private.node": "Node.start_api_server",
    "ray._private.ray_constants": "ENABLE_RAY_CLUSTER",
    "ray._private.services": "ConsolePopen",
    "ray._private.utils": "set_sigterm_handler",
    "ray._raylet": "GcsClient",
    "vllm._custom_ops": "onednn_mm",
    "vllm.distributed.device_communicators.shm_broadcast": "SHM_READER_RECHECK_INTERVAL_MS SpinCondition.__init__",
    "vllm.lora.punica_wrapper.punica_cpu": "PunicaWrapperCPU.add_lora_linear",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": "FusedMoEMethodBase",
    "vllm.model_executor.layers.rotary_embedding.base": "RotaryEmbedding.forward_cpu RotaryEmbedding.forward_native",
    "vllm.model_executor.model_loader.reload.layerwise": "_layerwise_process get_numel_loaded materialize_layer",
    "vllm.model_executor.models.gpt_oss": "GptOssRoutedExperts OAIAttention",
    "vllm.v1.executor.multiproc_executor": "WorkerProc.make_worker_process get_mp_context",
    "transformers": "PreTrainedModel._init_weights PreTrainedModel._keep_in_fp32_modules_strict",
    "transformers.masking_utils": "find_packed_sequence_indices",
    "transformers.modeling_utils": "log_state_dict_report",
    "transformers.models.llama.modeling_llama": "LlamaMLP LlamaRMSNorm apply_rotary_pos_emb rotate_half",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.compiler": "compile dummy_decorator",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
    "torch.distributed.distributed_c10d": "default_pg_nccl_timeout default_pg_timeout",
    "torch.utils._python_dispatch": "TorchDispatchMode",
}
RAY_FLAGS = (
    "worker_niceness", "task_events_report_interval_ms", "gcs_rpc_server_reconnect_timeout_s",
    "kill_child_processes_on_worker_exit",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", PARTS)
def test_the_private_parts_exist(module: str) -> None:
    operator.attrgetter(*PARTS[module].split())(importlib.import_module(module))  # AttributeError for a lost one


def names_read_by(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function reads, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_read_by(constant)


@pytest.mark.slow
def test_a_replaced_function_is_the_one_that_is_called() -> None:
    """A caller that had imported the function under another name would go on calling the original."""
    from transformers import masking_utils
    from vllm.model_executor.model_loader.reload import layerwise

    assert "get_numel_loaded" in names_read_by(layerwise.make_online_process_loader.__code__)
    assert "find_packed_sequence_indices" in names_read_by(masking_utils._preprocess_mask_arguments.__code__)


def test_rays_processes_get_sessions_of_their_own(tmp_path: Path) -> None:
    from ray._private import services

    from rlhf.cluster import session

    script = "import os; print(os.getsid(0) == os.getpid())"
    with session._own_cluster(""), (tmp_path / "out").open("w") as output:
        started = services.start_ray_process(
            [sys.executable, "-c", script], "test", fate_share=False, stdout_file=output
        )
    assert started.process.wait() == 0
    assert (tmp_path / "out").read_text() == "True\n"


def test_ray_does_not_replace_the_handler_of_sigterm() -> None:
    import ray

    from rlhf.cluster import session

    before = signal.getsignal(signal.SIGTERM)
    with session._own_sigterm_handler():
        ray._private.utils.set_sigterm_handler(lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) == before
    for caller in (ray._private.node.Node._register_shutdown_hooks, inspect.unwrap(ray.init)):
        assert "set_sigterm_handler" in names_read_by(caller.__code__)


def test_ray_takes_the_loopback_interface_for_its_address() -> None:
    from ray._private import services

    from rlhf.cluster import session

    with session._own_cluster(""):
        assert services.get_node_ip_address() == "127.0.0.1"


def test_ray_starts_none_of_the_processes_that_nobody_needs() -> None:
    from ray._private.node import Node

    from rlhf.cluster import session

    methods = ("start_api_server", "start_log_monitor", "start_monitor")
    read = {*names_read_by(Node.start_head_processes.__code__), *names_read_by(Node.start_ray_processes.__code__)}
    assert read >= {*methods}
    with session._own_cluster(""):
        for method in methods:
            getattr(Node, method)(None)  # the true one would ask None for the names of its files


def test_ray_has_the_flags_that_we_set() -> None:
    import ray

    binary = (Path(ray.__file__).parent / "_raylet.so").read_bytes()
    assert [flag for flag in RAY_FLAGS if flag.encode() not in binary] == []


@pytest.mark.slow
def test_vllm_has_the_environment_variables_that_we_set() -> None:
    from vllm import envs

    named = {
        name
        for path in sorted((ROOT / "rlhf").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"\bVLLM_[A-Z_0-9]+\b", node.value)
    }
    assert len(named) > 4
    assert named - set(envs.environment_variables) == set()


def test_rounded_rotary_frequencies_are_computed_again() -> None:
    from rlhf.learner.packed_attention import _restore_rotary_frequencies

    model = make_family("qwen2")
    true = model.model.rotary_emb.inv_freq.clone()
    for name, buffer in model.model.rotary_emb.named_buffers():
        assert "inv_freq" in name
        buffer.data = buffer.data.bfloat16()
    _restore_rotary_frequencies(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, true)


def test_deepspeed_builds_no_all_reduce_of_its_own_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed

    from rlhf.learner.deepspeed_settings import SHM_OP

    backend = importlib.import_module("deepspeed.comm.torch")
    built: list[Any] = []
    builder = backend.get_accelerator().get_op_builder("ShareMemCommBuilder")
    assert builder.NAME == SHM_OP
    monkeypatch.setattr(builder, "load", lambda _: built.append(True))
    for compatible in (True, False):
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, SHM_OP, compatible)
        backend.build_shm_op()
    assert built == [True]


@pytest.mark.slow
def test_deepspeed_does_not_load_the_compiler_of_torch() -> None:
    script = """
import sys
import rlhf.learner.rank
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon.original_muon import muon_update
print("torch._inductor.lowering" in sys.modules)
print(muon_update.__code__.co_name, compiler.compile().__name__)
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.endswith("False\nmuon_update compile\n")  # after what DeepSpeed logs where there is no GPU


@pytest.mark.slow
def test_elements_that_are_copied_into_real_memory_are_counted() -> None:
    from rlhf.weights.receivers import CopiedInPlace

    with CopiedInPlace() as counted:
        torch.zeros(3, 4)[:2].copy_(torch.ones(2, 4))
        nn.Parameter(torch.zeros(5), requires_grad=False).data.copy_(torch.ones(5))
        torch.zeros(7, device="meta").copy_(torch.ones(7))
    assert counted.elements == 13


@pytest.mark.slow
def test_torch_joins_a_store_that_exists_already() -> None:
    """In a process of its own: two ranks of one world cannot be in one."""
    script = """
import os, socket
import torch.distributed as dist
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
dist.init_process_group("gloo")
print(dist.get_world_size())
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "1\n"
