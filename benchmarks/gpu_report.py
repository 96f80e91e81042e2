"""One page of what this machine's GPU does with the trainer: speeds, memory, a model that learns, runs that repeat.

    python -m benchmarks.gpu_report [--minutes 28] [--output runs/gpu-report] [--quick] [--only PHASE ...]

Each phase is a command of its own with a limit and a result file; the page, report.md in the output folder, is written
anew after each. Called again, it goes on where it stopped: a phase that has a result is kept, one that failed is tried
again. A phase whose packages or data are missing is named, and none waits for another. With --quick all phases run with
tiny shapes, on CPU too: a check that they run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, models
from benchmarks.harness import Row

TORCH = ("torch", "transformers")
STACK = (*TORCH, "vllm", "ray", "deepspeed")
REAL_MODEL = Path("runs/real-model-data")
QUICKSTART = Path("runs/quickstart-data")
ONE_GPU = "configs/one_gpu_80gb.yaml"
END_S = 60.0  # that a phase beyond its limit gets to end its run
SHORT_WARMUP = "learner.schedule.warmup_steps=1"
STEP_PARTS = ("step", "sampling", "logprobs", "update", "transfer", "canary")


@dataclass(frozen=True)
class Phase:
    """`run` is called in a process of its own and returns title and rows; None: the benchmark of this name."""

    name: str
    limit_s: float
    needs: tuple[str, ...]
    run: Callable[[argparse.Namespace], tuple[str, list[Row]]] | None = None
    data: Path | None = None


def place(device: str) -> list[str]:
    """On a GPU engine and learner share it, in turn."""
    return [f"cluster.device={device}", f"cluster.placement={'colocated' if device == 'cuda' else 'separate'}"]


def train(options: argparse.Namespace, program: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program, in a folder of this name -> the lines of its metrics."""
    run = options.output / name
    command = [sys.executable, "-m", f"rlhf.{program}", *arguments, *place(options.device), f"run.dir={run}",
               "run.export=false", "logging.wandb.mode=disabled", "checkpoint.every=null"]  # fmt: skip
    print(" ".join(command), flush=True)
    shutil.rmtree(run, ignore_errors=True)  # of a try that failed
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"rlhf.{program} ended with status {status}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def row_of(lines: list[dict[str, Any]], **first: Any) -> Row:
    """Medians of the steps after the first two, which pay for compilation."""
    steps = [line for line in lines if "time/step" in line]
    later = steps[2:] or steps
    row: Row = {**first, "steps": len(steps)}
    for part in STEP_PARTS:
        values = [line[f"time/{part}"] for line in later if f"time/{part}" in line]
        if values:
            row[f"{part} s"] = statistics.median(values)
    for name, key in (
        ("sampled tokens/s", "rollout/tokens_per_second"), ("learner tokens/s", "learner/tokens_per_second"),
        ("MFU", "learner/mfu"), ("mean response", "rollout/response_length/mean"), ("engine KL", "policy/engine_kl"),
        ("canary", "sync/canary_difference"), ("its tolerance", "sync/canary_tolerance"),
        ("interrupted", "rollout/interrupted"), ("recomputed tokens", "rollout/recomputed_tokens"),
    ):  # fmt: skip
        values = [line[key] for line in later if key in line]
        if values:
            row[name] = statistics.median(values)
    return row


def accuracies(lines: list[dict[str, Any]]) -> dict[str, Any]:
    found = [value for line in lines for key, value in line.items() if re.fullmatch(r"eval/\w+/avg@1", key)]
    return {"accuracy before": found[0], "after": found[-1]} if found else {}


def doctor(options: argparse.Namespace) -> tuple[str, list[Row]]:
    model = QUICKSTART / "model" if options.quick else models.random_model("1.5b")
    train_file, test_file = models.write_prompts(models.FOLDER / "data-long", 512)
    command = [sys.executable, "-m", "rlhf.doctor", "--json", "--config", "configs/real_model_cpu.yaml",
               f"model.path={model}", f"data.train={train_file}", f"data.eval={test_file}",
               "model.dtype=bfloat16", "run.steps=2", "rollout.max_response_tokens=24", SHORT_WARMUP,
               *place(options.device)]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    findings = json.loads(done.stdout)
    return f"doctor, {model.name}", [{key: finding[key] for key in ("name", "status", "text")} for finding in findings]


def real(options: argparse.Namespace) -> tuple[str, list[Row]]:
    """A pretrained model learns: full training, then an adapter on the same model."""
    rows = []
    steps = 2 if options.quick else 40
    for kind, more in (
        ("all weights", []),
        ("adapter, rank 16", ["model.lora={rank: 16}", "learner.optimizer.lr=2e-4"]),
    ):
        arguments = [f"run.steps={steps}", "evaluation.at_start=true", SHORT_WARMUP, *more]
        if options.quick:
            arguments = ["--config", "configs/quickstart.yaml", *quickstart_arguments(), *arguments]
        else:
            task = REAL_MODEL / "task"
            arguments = [
                "--config", "configs/real_model_cpu.yaml", f"data.train={task}/train.jsonl",
                f"data.eval={task}/test.jsonl", "rollout.gpu_memory_utilization=0.3", *arguments,
                f"model.path={REAL_MODEL}/SmolLM2-135M-Instruct",
            ]  # fmt: skip
        lines = train(options, "grpo", f"real-{kind.split(',')[0].replace(' ', '-')}", *arguments)
        rows.append(row_of(lines, trained=kind) | accuracies(lines))
    return "SmolLM2-135M learns to pick the largest of four numbers, bf16", rows


def long_tail(options: argparse.Namespace, name: str, size: str, *arguments: str) -> list[dict[str, Any]]:
    """GRPO on a random model, with responses as long as GSM8K's solutions and a few longer ones -> its metrics."""
    model = models.random_model(size, mean_length=20 if options.quick else 200)
    prompts, test = models.write_prompts(models.FOLDER / "data-long", 4096)
    longest = 64 if options.quick else 1024
    return train(
        options, "grpo", name, "--config", ONE_GPU,
        f"model.path={model}", f"data.train={prompts}", f"data.eval={test}", "data.prompt_suffix=null",
        f"rollout.prompts_per_step={4 if options.quick else 64}",
        f"rollout.max_response_tokens={longest}", "rollout.gpu_memory_utilization=0.4",
        f"reward=[{{name: length, max_tokens: {longest}, buffer_tokens: {longest - 1}}}]",
        "learner.minibatches_per_epoch=2", "learner.max_tokens_per_microbatch=8192", "logging.rollouts=false",
        "evaluation.at_start=false", "evaluation.at_end=false", "model.gradient_checkpointing=true", *arguments,
    )  # fmt: skip


def lengths(options: argparse.Namespace) -> tuple[str, list[Row]]:
    """Steps at the lengths of GSM8K's solutions: all weights of 1.5B, adapters of 7B with the config of one GPU."""
    rows = []
    for size, trained, arguments in (("1.5b", "all weights", ["model.lora=null"]), ("7b", "adapters", [])):
        size = "10m" if options.quick else size
        steps = f"run.steps={2 if options.quick else 5}"
        lines = long_tail(options, f"lengths-{trained.replace(' ', '-')}", size, steps, *arguments)
        rows.append(row_of(lines, model=size, trained=trained))
    return "GRPO steps with random weights, responses of 200 tokens on average, at most 1,024", rows


def shared_lag(options: argparse.Namespace) -> tuple[str, list[Row]]:
    """The same steps without a policy lag and with one, in which responses are interrupted by training and go on."""
    rows = []
    for lag in (0, 1):
        lines = long_tail(
            options, f"shared-lag-{lag}", "10m" if options.quick else "1.5b", "model.lora=null",
            f"run.steps={3 if options.quick else 8}", f"rollout.max_policy_lag={lag}",
            "learner.optimizer.lr=0",  # lengths stay those of the start
        )  # fmt: skip
        sampled = [line["sync/sampled_difference"] for line in lines if "sync/sampled_difference" in line]
        rows.append(row_of(lines, lag=lag) | ({"canary on sampled tokens": sampled[0]} if sampled else {}))
    return "GRPO where engine and learner share the GPU, with and without a policy lag", rows


def repeated(options: argparse.Namespace) -> tuple[str, list[Row]]:
    """Two deterministic runs, at the same time, must log the same numbers."""
    steps = 2 if options.quick else 3

    def run(name: str) -> list[dict[str, Any]]:
        return train(
            options, "grpo", name, "--config", "configs/quickstart.yaml", *quickstart_arguments(), f"run.steps={steps}",
            "run.deterministic=true", "evaluation.at_start=false", "rollout.gpu_memory_utilization=0.2",
            "run.max_useless_steps=null", SHORT_WARMUP,
        )  # fmt: skip

    with ThreadPoolExecutor() as both:
        first, second = both.map(run, ("repeated-0", "repeated-1"))
    timed = ("time/", "tokens_per_second", "mfu", "seconds", "idle")
    names = {k for line in (*first, *second) for k in line if not any(part in k for part in timed)}
    pairs = [(k, repr(a.get(k)), repr(b.get(k))) for a, b in zip(first, second, strict=True) for k in names]
    differing = sorted({name for name, a, b in pairs if a != b})  # by their text, so that NaN equals NaN
    return "run.deterministic twice", [
        {"steps": steps, "metrics compared": len(names), "that differ": ", ".join(differing) or "none"}
    ]


def ppo(options: argparse.Namespace) -> tuple[str, list[Row]]:
    lines = train(
        options, "ppo", "ppo", "--config", "configs/ppo_quickstart.yaml", *quickstart_arguments(),
        f"run.steps={2 if options.quick else 12}", "rollout.gpu_memory_utilization=0.3",
        SHORT_WARMUP, "critic.warmup_steps=1", "critic.schedule.warmup_steps=1",
    )  # fmt: skip
    return "PPO with a critic, the quickstart's model", [row_of(lines) | accuracies(lines)]


def quickstart_arguments() -> list[str]:
    data = [f"data.{which}={QUICKSTART}/{name}.jsonl" for which, name in (("train", "train"), ("eval", "test"))]
    return [f"model.path={QUICKSTART}/model", *data]


PHASES = (
    Phase("learner_shapes", 400, TORCH),
    Phase("logprobs", 200, (*TORCH, "trl")),
    Phase("learner_step", 300, (*TORCH, "trl")),
    Phase("real", 500, STACK, real, REAL_MODEL / "task"),
    Phase("lengths", 500, STACK, lengths),
    Phase("shared_lag", 400, STACK, shared_lag),
    Phase("repeated", 300, STACK, repeated, QUICKSTART),
    Phase("ppo", 250, STACK, ppo, QUICKSTART),
    Phase("doctor", 500, STACK, doctor),
    Phase("training_steps", 500, (*STACK, "trl")),
)


def missing(phase: Phase, quick: bool) -> str:
    """What keeps a phase from running here; empty if nothing does."""
    absent = [name for name in phase.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs the packages {', '.join(absent)}: make setup-gpu setup-bench"
    data = QUICKSTART if quick and phase.run else phase.data
    if data is not None and not data.exists():
        return f"needs {data}: make {'quickstart' if data == QUICKSTART else 'real-model'} makes it"
    return ""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a phase and its run, which then ends its Ray; the next phase needs the GPU."""
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()  # reaps the leader
            os.killpg(process.pid, 0)
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_phase(phase: Phase, options: argparse.Namespace, left_s: float) -> str:
    """Run a phase within its limit; -> "" or why it has no result. Its output is in NAME.log."""
    if phase.run is None:
        command = [sys.executable, "-m", f"benchmarks.{phase.name}"]
    else:
        command = [sys.executable, "-m", "benchmarks.gpu_report", "--phase", phase.name]
    command += ["--output", str(options.output), "--device", options.device, *(["--quick"] if options.quick else [])]
    log = options.output / f"{phase.name}.log"
    limit = min(phase.limit_s, left_s)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            end_group(process)
            return f"not done within {limit:.0f} s"
    if status == 0 and (options.output / f"{phase.name}.json").is_file():
        return ""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in said if line.startswith("error:")] or said
    return f"failed with status {status}: {said[-1][:300] if said else 'no output'}"


def page(options: argparse.Namespace, problems: dict[str, str]) -> str:
    """The results so far as Markdown."""
    machine = ", ".join(f"{key} {value}" for key, value in harness.machine(options.device).items())
    text = [f"# GPU report\n\n{machine}\n"]
    for phase in PHASES:
        file = options.output / f"{phase.name}.json"
        if not file.is_file():
            text.append(f"## {phase.name}\n\nno result: {problems.get(phase.name, 'not run')}\n")
            continue
        result = json.loads(file.read_text())
        columns = list(dict.fromkeys(key for row in result["rows"] for key in row))
        text.append(f"## {phase.name}: {result['title']}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in result["rows"]:
            text.append("| " + " | ".join(harness.shown(row.get(c, "")).replace("|", "/") for c in columns) + " |")
        text += ["", *result["notes"], ""]
    return "\n".join(text)


def main() -> int:
    options_parser = harness.parser(__doc__ or "")
    options_parser.set_defaults(output=Path("runs/gpu-report"), device="cuda" if models.gpus() else "cpu")
    options_parser.add_argument("--minutes", type=float, default=28.0, help="no phase starts or goes on after these")
    options_parser.add_argument("--only", nargs="+", choices=[phase.name for phase in PHASES], help="these phases")
    options_parser.add_argument("--phase", help=argparse.SUPPRESS)
    options = options_parser.parse_args()
    if options.phase:
        phase = next(phase for phase in PHASES if phase.name == options.phase)
        assert phase.run is not None
        harness.report(phase.name, *phase.run(options), options)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    problems: dict[str, str] = {}
    for phase in PHASES:
        if (options.output / f"{phase.name}.json").is_file() or (options.only and phase.name not in options.only):
            continue
        started = time.monotonic()
        left = ends - started
        problem = missing(phase, options.quick) or ("" if left > 20 else "no time was left")
        problem = problem or run_phase(phase, options, left)
        if problem:
            problems[phase.name] = problem
        print(f"{phase.name}: {problem or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        (options.output / "report.md").write_text(page(options, problems))
    print(f"written: {options.output / 'report.md'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
