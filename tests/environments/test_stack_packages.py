"""Three steps on the real stack with environments of other packages, from one line of config each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packages import python_with
from waiting import STACK_WAIT_S, free_port, read_until

from rlhf.quickstart import write_quickstart

# two minutes each, and of the adapters every line is tried with these packages by test_packages.py
pytestmark = [pytest.mark.stack, pytest.mark.registry, pytest.mark.faults]

SERVE = """
import os, sys
import uvicorn
from openenv.cli.commands.init import init

init("my_env", os.getcwd())
sys.path.insert(0, "my_env")
from server.app import app
uvicorn.run(app, port=int(sys.argv[1]))
"""


@contextmanager
def template_of_openenv(folder: Path) -> Iterator[dict[str, Any]]:
    """The server of OpenEnv's template, which has one place for a rollout; the line that trains with it."""
    port = free_port()
    command = [python_with("openenv==0.10.0"), "-c", SERVE, str(port)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as server:
        # its requests are logged to standard output
        server.stdout = server.stderr
        read_until(server, "Uvicorn running")
        try:
            yield {"name": "openenv", "url": f"http://127.0.0.1:{port}"}
        finally:
            server.terminate()


@contextmanager
def reasoning_gym(dataset: str, **args: Any) -> Iterator[dict[str, Any]]:
    python = str(python_with("reasoning-gym==0.1.25"))
    yield {"name": "reasoning_gym", "dataset": dataset, "args": args, "python": python}


@pytest.mark.parametrize("name", ["leg_counting", "chain_sum", "openenv"])
def test_an_environment_of_a_package_is_trained_with_from_one_line(tmp_path: Path, name: str) -> None:
    write_quickstart(tmp_path / "data", warmup_steps=0, train_rows=1, test_rows=1, tools=True)
    opened = template_of_openenv(tmp_path) if name == "openenv" else reasoning_gym(name, size=8)
    with opened as environment:
        config = {
            "run": {"dir": str(tmp_path / "run"), "steps": 3, "max_useless_steps": None},
            "model": {"path": str(tmp_path / "data/model"), "dtype": "float32"},
            "data": {"eval": {"path": "environment", "rows": 2}},
            "environment": environment,
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "max_response_tokens": 6,
                "max_rollout_tokens": 128,
                "max_turns": 3,
            },
            "learner": {"max_tokens_per_microbatch": 2048, "optimizer": {"lr": 1e-3}},
            "cluster": {"device": "cpu"},
            "logging": {"wandb": {"mode": "disabled"}},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.grpo", "--config", tmp_path / "config.yaml"],
            capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "time/step" in row]
    assert len(steps) == 3
    assert all(row["account/failed"] == 0 for row in steps)
    assert any("eval/environment/avg@1" in row for row in logged)
    files = sorted((tmp_path / "run/rollouts").glob("step-*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 24
    if name == "openenv":  # 0.1 for each character of a message
        assert len({row["reward"] for row in rows}) > 1
        assert all(row["reward"] >= 0 for row in rows)
    else:  # an epoch has eight problems
        assert sorted({row["prompt_id"] for row in rows[:16]}) == [f"environment/{number}" for number in range(1, 9)]
        by_prompt = {row["prompt_id"]: row["facts"]["answer"] for row in rows[:16]}
        assert all(row["facts"]["answer"] == by_prompt[row["prompt_id"]] for row in rows[:16])
        assert any(row["facts"]["answer"] != by_prompt[row["prompt_id"]] for row in rows[16:])  # a new epoch
