"""The table of docs/upgrading.md is whole, and what it says of other packages holds for the installed ones."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import private_parts
import pytest
import torch
import upgrade_check
from model_families import make_family
from torch import nn

ROWS = private_parts.rows()


def covers(name: str, use: str) -> bool:
    """Whether a name of the table is this use, a part of it, or an attribute of any object."""
    if use.startswith("."):
        return name.endswith(use)
    return f"{name}.".startswith(f"{use}.") or f"{use}.".startswith(f"{name}.")


@pytest.mark.slow
def test_every_private_part_that_we_use_is_in_the_table_and_none_is_there_in_vain() -> None:
    listed = {(file, name) for row in ROWS for file in row.files for name in row.names}
    unlisted = [use for use in private_parts.uses() if not any(f == use[0] and covers(n, use[1]) for f, n in listed)]
    assert unlisted == []
    for row in ROWS:
        texts = [(private_parts.ROOT / file).read_text() for file in row.files]
        last = [name.rpartition(".")[2] for name in row.names if name not in UNNAMED]
        assert [name for name in last if not any(name in text for text in texts)] == []
        assert all(any(name in text for name in last) for text in texts if last)


# what we rely on without naming it
UNNAMED = {
    "multiprocessing.spawn.get_preparation_data",
    "torch.distributed.rendezvous._torchelastic_use_agent_store",
}


def test_a_new_use_of_a_private_part_is_found() -> None:
    source = """
import torch._inductor
from ray._private import worker as w
from vllm.distributed import parallel_state
from transformers import PreTrainedModel as P
w.global_worker.mode = None
parallel_state._TP, other = None, None
setattr(parallel_state, "get_tp_group", None)
P.forward = None
renamed: Any = P
renamed.generate = None
self._mine = other._theirs
other.method(_hidden=1)
os.environ["RAY_some_flag"] = "1"
sys.argv = []
os._exit(0)
"""
    assert set(private_parts.uses_of(ast.parse(source), own={"_mine"})) == {
        "torch._inductor", "ray._private.worker", "ray._private.worker.global_worker.mode",
        "vllm.distributed.parallel_state._TP", "vllm.distributed.parallel_state.get_tp_group",
        "transformers.PreTrainedModel.forward", "transformers.PreTrainedModel.generate", "._theirs", "._hidden",
        "RAY_some_flag",
    }  # fmt: skip


def test_the_files_and_tests_of_the_table_are_there() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        assert row.names
        assert row.files
        assert row.tests
        for test in row.tests:
            file, _, name = test.partition("::")
            tree = ast.parse((private_parts.ROOT / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("name", upgrade_check.private_names())
def test_the_private_part_is_in_the_installed_package(name: str) -> None:
    assert INSTALLED.find(name) is not None


INSTALLED = upgrade_check.site_packages()


# --- what we assume of them ---


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
    flags = [name for row in ROWS for name in row.names if private_parts.RAY_FLAG.fullmatch(name)]
    assert len(flags) == 4
    assert [flag for flag in flags if flag.removeprefix("RAY_").encode() not in binary] == []


@pytest.mark.slow
def test_vllm_has_the_environment_variables_that_we_set() -> None:
    from vllm import envs

    named = {
        name
        for path in sorted((private_parts.ROOT / "rlhf").rglob("*.py"))
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
def test_deepspeed_loads_neither_mlflow_nor_torchs_compiler() -> None:
    script = """
import sys
import rlhf.learner.rank
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.muon.original_muon import muon_update
print({"mlflow", "torch._inductor.lowering"} & {*sys.modules})
print(muon_update.__code__.co_name, compiler.compile().__name__)
import mlflow
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.endswith("set()\nmuon_update compile\n")  # after what DeepSpeed logs where there is no GPU


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
