"""tools/vllm_calls.py: our calls fit the installed vLLM, and a call that no longer fits is named."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm_calls

(VLLM,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
BROKEN = [
    ("v1/engine/async_llm.py", "async def sleep(self, level", "async def sleep(self, depth", "has no parameter level"),
    ("v1/worker/gpu_worker.py", "def wake_up(", "def awake(", "gpu_worker.Worker.wake_up is not there"),
    (
        "distributed/weight_transfer/nccl_engine.py", "    world_size: int\n", "    world_size: int\n    token: str\n",
        "NCCLTrainerInitInfo needs token",
    ),
    ("engine/arg_utils.py", "    scheduling_policy:", "    policy:", "has no argument scheduling_policy"),
    ("usage/usage_lib.py", "class UsageContext", "class Context", "usage_lib.UsageContext is not there"),
]  # fmt: skip


def test_all_calls_fit_the_installed_vllm() -> None:
    assert list(vllm_calls.problems(Path(VLLM).parent)) == []


@pytest.mark.slow
def test_a_call_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    shutil.copytree(VLLM, tmp_path / "vllm", ignore=lambda _, names: [n for n in names if n.endswith((".so", ".pyc"))])
    for file, old, new, _ in BROKEN:
        path = tmp_path / "vllm" / file
        original = path.read_text()
        assert old in original
        path.write_text(original.replace(old, new))
    found = list(vllm_calls.problems(tmp_path))
    for *_, problem in BROKEN:
        assert any(problem in line for line in found), problem
