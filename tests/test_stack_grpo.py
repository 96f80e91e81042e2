"""Whole runs of the program on the real stack (Ray, DeepSpeed ZeRO-2, vLLM, the scorer), started as a user does."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import signal
import socket
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from documented import check_documented, check_shown
from processes import Process, below, outliving, running
from waiting import STACK_WAIT_S, eventually

from rlhf import export
from rlhf.run.evaluation import read_responses
from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.stack

CANARY_BOUND = 1e-4  # float32; measured: at most 2e-5


WATCH = """
import json

class Watch:
    def on_step(self, step, metrics, groups):
        with open(__file__ + ".jsonl", "a") as file:
            print(json.dumps([step, len(groups), metrics["policy/loss"]]), file=file)
"""


def write_config(folder: Path, data: Path, /, **overrides: Any) -> Path:
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "steps": 3, "seed": 1},
        "model": {"path": str(data / "model"), "dtype": "float32"},
        "data": {
            "train": str(data / "train.jsonl"),
            "eval": str(data / "test.jsonl"),
            "max_prompt_tokens": 64,
            "eval_rows": 16,
        },
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_response_tokens": 24},
        "algo": {"kl_coef": 0.05, "kl_estimator": "k3"},
        "learner": {
            "minibatches_per_epoch": 2,
            "max_tokens_per_microbatch": 512,
            "optimizer": {"lr": 1e-3},
            "schedule": {"name": "cosine", "warmup_steps": 1},
        },
        # Random letters earn nothing from a grader: the length gives an untrained model rewards that differ.
        "reward": [{"name": "math"}, {"name": "length", "max_tokens": 24, "buffer_tokens": 20}],
        "checkpoint": {"every": 2},
        "evaluation": {},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "offline"}},
    }
    for name, section in overrides.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def run_grpo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf.grpo", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False
    )


def read_log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The training steps of metrics.jsonl; evaluations have lines of their own."""
    return [row for row in read_log(run) if "time/step" in row]


def check_account(steps: list[dict[str, Any]]) -> None:
    for row in steps:
        parts = [row[f"account/{name}"] for name in ("trained", "filtered", "stale", "failed", "waiting")]
        assert row["account/sampled"] == sum(parts)
        assert min(parts) >= 0


def test_a_run_with_two_learners_trains_checkpoints_exports_and_resumes_from_a_whole_checkpoint_without_repeating_data(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_model_dir, cluster={"learners": 2, "peak_tflops": 1.0})
    (tmp_path / "watch.py").write_text(WATCH)
    callback = f"run.callbacks=[{tmp_path}/watch.py:Watch]"
    done = run_grpo("--config", config, "logging.profile_steps=[2]", callback)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    (trace,) = (run / "profile").iterdir()
    assert "aten::mm" in {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    check_shown("rlhf grpo --config mine.yaml", done.stdout, runs__first=str(run))
    steps = read_steps(run)
    assert [row["step"] for row in steps] == [1, 2, 3]
    seen = [json.loads(line) for line in (tmp_path / "watch.py.jsonl").read_text().splitlines()]
    assert seen == [[row["step"], 8, row["policy/loss"]] for row in steps]  # once each, with two learners too
    check_account(steps)
    has = {"", "GRPO", "reference", "the reward reads answers", "algo.importance_correction", "peak known"}
    has |= {"evaluation", "evaluation, the reward reads answers", "1,024 tokens"}
    check_documented(read_log(run), logged=has | {"there was one", "rewards besides a model", "callbacks"})

    # The policy that sampled the first rollouts is the reference, whatever the updates on them do; the next one is not.
    assert steps[0]["policy/kl_k3"] == 0.0
    assert steps[0]["policy/kl_old"] > 0.0
    assert steps[1]["policy/kl_k3"] > 0.0
    assert all(np.isfinite(row["policy/loss"]) and row["learner/grad_norm"] > 0 for row in steps)
    assert all(row["sync/canary_difference"] < CANARY_BOUND for row in steps)
    assert all(row["policy/engine_logprob_difference"] < CANARY_BOUND for row in steps)
    assert {f"policy/kl_{name}" for name in ("k1", "k2", "k3", "k4")} <= steps[0].keys()
    # u = 6, w = 1: cosine from the peak at u = 1 to 0 at u = 6; the log shows the last update of each step
    expected = [1e-3 * (1 + np.cos(np.pi * (u - 1) / 5)) / 2 for u in (2, 4, 6)]
    assert [row["learner/lr"] for row in steps] == pytest.approx(expected, abs=1e-12)

    summary = json.loads((run / "summary.json").read_text())
    assert (summary["updates_planned"], summary["updates_taken"], summary["updates_skipped"]) == (6, 6, 0)
    assert summary["account/sampled"] == summary["account/trained"] == 96
    assert "eval/test/avg@1" in summary["evaluation_before"]
    assert "eval/test/avg@1" in summary["evaluation_after"]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000002", "step-000003"]
    assert list((run / "wandb").glob("offline-run-*"))
    first = seen_prompts(run, (1, 2, 3))
    assert len(set(first)) == 24

    again = run_grpo("--config", config)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert all(remedy in again.stderr for remedy in ("--resume", "run.dir=", "rm -r"))

    # Longer, on one learner and with two engines: the same run goes on, from the last whole checkpoint.
    shard = run / "checkpoints" / "step-000003" / "weights-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = run_grpo("--config", config, "--resume", "run.steps=5", "cluster.learners=1", "cluster.engines=2")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    (notice,) = [line for line in resumed.stdout.splitlines() if "outside the healthy range" in line]
    assert notice.startswith("warning: ")
    assert "reward/answered_fraction 0" in notice
    assert "step-000003: weights-00000.safetensors has another checksum" in resumed.stdout
    assert f"resuming from {run / 'checkpoints' / 'step-000002'}" in resumed.stdout
    assert RunFolder(run, resume=True).restored == run / "checkpoints" / "step-000005"
    steps = read_steps(run)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    check_account(steps)
    assert len(set(seen_prompts(run, (1, 2, 3, 4, 5)))) == 40
    assert json.loads((run / "summary.json").read_text())["updates_taken"] == 10
    exported_model_agrees_in_transformers(run)

    # vLLM loads the exported model, and another program reads the same config.
    command = [sys.executable, "-m", "rlhf.evaluate", "--config", str(config), f"model.path={run / 'model'}"]
    command += ["evaluation.samples_per_prompt=2", "--output", str(tmp_path / "evaluation.json")]
    command += ["--responses", str(tmp_path / "responses.jsonl")]
    evaluated = subprocess.run(command, capture_output=True, text=True, timeout=STACK_WAIT_S, check=False)
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    assert {"eval/test/avg@2", "eval/test/pass@2"} <= json.loads((tmp_path / "evaluation.json").read_text()).keys()
    assert len(read_responses(tmp_path / "responses.jsonl", samples_per_prompt={2}, metrics={"math"})) == 2 * 16


@pytest.mark.faults
def test_a_first_hour_a_start_that_fails_no_wandb_and_no_signal(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("COLUMNS", "1000")
    config = write_config(tmp_path, tiny_model_dir, logging={"wandb": {"mode": "auto"}}, checkpoint={"every": "auto"})
    one = ["--config", config, "reward=[{name: gsm8k}]"]  # random letters hold no ####; a box is one token
    run = tmp_path / "run"

    failed = run_grpo(*one, "cluster.start_deadline_s=0.1")
    assert failed.returncode == 1, failed.stderr[-3000:]
    assert (run / "config.yaml").is_file()

    done = run_grpo(*one)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "error: run.max_useless_steps=20: all 3 steps of the run taught the policy nothing: no group" in done.stderr
    assert done.stdout.count("does not take the run") == 1
    assert len(list((run / "wandb").glob("offline-run-*"))) == 2  # that of the failed start is left as it was
    assert done.stdout.count("no answers: 0.0% of the responses held an answer") == 1
    assert done.stderr.count("0.0% of the responses held an answer") == 1
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-000002", "step-000003"]


def seen_prompts(run: Path, steps: tuple[int, ...]) -> list[str]:
    """Prompt ids in the order of training, one a group."""
    found = []
    for step in steps:
        rows = [json.loads(line) for line in (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]
        assert len(rows) == 32
        for group in range(8):
            ids = {row["prompt_id"] for row in rows[4 * group : 4 * group + 4]}
            assert len(ids) == 1  # a group is the samples of one prompt, in order
            found.append(ids.pop())
    return found


def exported_model_agrees_in_transformers(run: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf.learner.rank_checkpoint import WEIGHTS, LearnerIndex, SliceReader

    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    index = LearnerIndex.read(checkpoint)
    reader = SliceReader(checkpoint, WEIGHTS, ranks=range(index.ranks))
    master = {name: reader.read(name, 0, math.prod(shape)).view(shape) for name, shape in index.shapes.items()}
    parameters = dict(model.named_parameters())
    assert parameters.keys() == master.keys()
    for name, value in master.items():
        torch.testing.assert_close(parameters[name].detach(), value, rtol=0, atol=0)

    export.main([str(run), str(run.parent / "exported")])
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (run.parent / "exported" / name).read_bytes() == (run / "model" / name).read_bytes(), name
    assert "| 5 | " in (run / "model" / "README.md").read_text()


def wait_for_step(run: Path, step: int, program: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        assert program.poll() is None, program.communicate()[1][-3000:]
        return (run / "metrics.jsonl").exists() and any(row["step"] >= step for row in read_steps(run))

    assert eventually(reached, STACK_WAIT_S), f"step {step} was not reached"


def test_with_a_lag_of_1_and_shared_rows_no_token_is_older_the_correction_is_on_and_sigterm_ends_every_process(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model_dir,
        run={"steps": 100000},
        rollout={"max_policy_lag": 1},
        algo={"dual_clip": 3.0},
        learner={"epochs_per_step": 2},
        evaluation={"samples_per_prompt": 2},
        model={"dtype": "bfloat16"},
        weights={"transfer": "delta"},
        logging={"wandb": {"mode": "disabled"}, "token_values": True},
        cluster={"learners": 2, "sequence_parallel": 2},
    )
    program = subprocess.Popen(
        [sys.executable, "-m", "rlhf.grpo", "--config", str(config)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 6, program)  # checkpoints are of every second step: that of step 4 is complete
    started = below({program.pid})
    program.terminate()
    _, stderr = program.communicate(timeout=STACK_WAIT_S)
    assert program.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    assert outliving(started) == []

    steps = read_steps(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]['step']:06d}").is_dir()  # saved at the signal
    check_account(steps)
    has = {"", "lag", "algo.dual_clip", "evaluation, k above 1", "weights.transfer=delta"}
    check_documented(read_log(tmp_path / "run"), logged=has)
    assert steps[0]["rollout/lag/max"] == 0
    assert max(row["rollout/lag/max"] for row in steps) == 1
    assert all(0 < row["policy/effective_sample_fraction"] <= 1 for row in steps)
    assert all(row["sync/canary_difference"] < 0.02 for row in steps)
    assert [row["learner/updates_taken"] for row in steps] == [4 * row["step"] for row in steps]
    for row in steps:
        lines = (tmp_path / "run" / "rollouts" / f"step-{row['step']:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        versions = [span[2] for line in rows for span in line["versions"]]
        for line in rows:  # a KL is in the loss, so log-probs of all of them were computed
            assert {len(line[f"token{of}"]) for of in ("s", "_advantages", "_differences")} == {line["response_tokens"]}
            assert line["token_advantages"] == pytest.approx([line["advantage"]] * line["response_tokens"], abs=1e-4)
        differences = [abs(difference) for line in rows for difference in line["token_differences"]]
        assert np.mean(differences) == pytest.approx(row["policy/engine_logprob_difference"], abs=1e-4)
        assert all(row["step"] - 1 - version <= 1 for version in versions)


def reachable_from_outside(processes: dict[Process, str]) -> list[str]:
    """What listens on another address than the loopback interface."""
    found = []
    for process, command in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            for open_port in psutil.Process(process.pid).net_connections("tcp"):
                ip = open_port.laddr.ip if open_port.status == psutil.CONN_LISTEN else "127.0.0.1"
                if not ip_address(ip.removeprefix("::ffff:")).is_loopback:
                    found.append(f"{command}: {ip}:{open_port.laddr.port}")
    return found


@pytest.mark.faults
def test_when_a_vllm_worker_is_killed_the_run_ends_with_the_cause_and_leaves_no_process_and_no_secret(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    once = {"steps": 100000, "max_restarts": 0}
    config = write_config(tmp_path, tiny_model_dir, run=once)
    secrets = {"environment": "fake-env-key-123", "argument": "fake-argument-59", "wandb": "0fake" * 8}
    judge = tmp_path / "judge.py"
    judge.write_text("def score(response, *, api_key, **_): raise RuntimeError(f'no answer with {api_key}')\n")
    parts = f"[{{name: '{judge}:score', api_key: {secrets['argument']}}}, {{name: math}}]"
    reward = f"reward={{parts: {parts}, failure_fraction: 1}}"
    program = subprocess.Popen(
        [sys.executable, "-m", "rlhf.grpo", "--config", str(config), reward],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"FAKE_API_KEY": secrets["environment"], "WANDB_API_KEY": secrets["wandb"]},
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 1, program)
    started = running(below({program.pid}))
    assert reachable_from_outside(started) == []
    (worker,) = [process for process, command in started.items() if "VLLM::Worker" in command]
    os.kill(worker.pid, signal.SIGKILL)
    stdout, stderr = program.communicate(timeout=STACK_WAIT_S)
    assert program.returncode == 1, stderr[-3000:]
    assert "engine" in stderr.splitlines()[-1]
    assert f"What the actors printed is in {tmp_path / 'run' / 'logs'}." in stderr.splitlines()[-1]
    logs = tmp_path / "run" / "logs"
    assert {"engine-0.log", "learner-0.log"} <= {log.name for log in logs.iterdir()}
    assert "EngineCore" in (logs / "engine-0.log").read_text()
    assert "Traceback" not in stderr
    assert outliving(started) == []
    assert "RuntimeError: no answer with <secret>" in stdout
    written = {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    written["output"] = (stdout + stderr).encode()
    assert [(file, name) for file, text in written.items() for name in secrets if secrets[name].encode() in text] == []


@pytest.mark.faults
def test_sigterm_while_the_engine_starts_ends_every_process(tiny_model_dir: Path, tmp_path: Path) -> None:
    endless = {"steps": 10_000}  # it has not ended, however late the engine's process is seen
    config = write_config(tmp_path, tiny_model_dir, run=endless, logging={"wandb": {"mode": "disabled"}})
    program = subprocess.Popen(
        [sys.executable, "-m", "rlhf.grpo", "--config", str(config)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started: dict[Process, str] = {}

    def engine_starts() -> bool:
        started.update(running(below({program.pid})))
        assert program.poll() is None, (program.communicate()[1][-3000:], sorted(started.values()))
        return any("EngineCore" in command for command in started.values())

    assert eventually(engine_starts, STACK_WAIT_S), sorted(started.values())
    program.terminate()
    _, stderr = program.communicate(timeout=STACK_WAIT_S)
    assert program.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == "terminated"
    assert "Traceback" not in stderr
    assert outliving(started) == []
