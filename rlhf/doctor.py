"""Program: checks whether a run will start, fit and compute correctly on this machine or cluster, one line per check.

    python -m rlhf.doctor [--config FILE ...] [--program ppo] [--json] [section.key=value ...]

Without --config it makes and examines a tiny model. With --config it starts the engines and learners of that run, where
the run would start them (RAY_ADDRESS, cluster.ray_address), and ends them. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil

from rlhf.check.doctor import grading, machine, nodes, training
from rlhf.check.doctor.runner import Check, Finding, Patient, examine_all, report_lines
from rlhf.check.memory import GIB
from rlhf.check.resources import GPU, local_resources
from rlhf.cluster import node_report
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import say

DESCRIPTION = "Check whether a run will start, fit and compute correctly here; exit status 1 if a check failed."


def checks(config: GRPOConfig) -> tuple[Check, ...]:
    """All checks in order; checks that need no other check come first."""
    wait_s = config.cluster.start_deadline_s
    same_network = "are the ports between the nodes open in both directions, and RAY_AUTH_TOKEN the same?"
    start = "the message names the part; raise cluster.start_deadline_s if it only needs more time"
    canary = "do not train on this: an engine computes with another model than the learner, or with old weights"
    kernel = "a kernel does not run here: is the GPU new enough, and were the packages set up by make setup-gpu?"
    hangs = "a process hangs: `ray stack`, or py-spy on the actors, shows where"
    return (
        Check("versions", machine.check_versions, 60.0, "make setup"),
        Check("config", machine.check_config, wait_s, "a hub or a file system hangs: is a network mount gone?"),
        Check("scorer", grading.check_scorer, 180.0, "the grading processes do not start: memory, /tmp, the sandbox"),
        Check("rewards", grading.check_rewards, wait_s, "a reward of the config does not answer"),
        Check("nodes", nodes.check_nodes, 120.0, same_network),
        Check("gpu", nodes.check_gpus, 60.0, "`nvidia-smi` on each node"),
        Check("start-up", training.check_start, wait_s, start),
        Check("agreement", training.check_agreement, 600.0, canary),
        Check("responses", grading.check_responses, 600.0, "rollout.max_response_tokens is long for this machine"),
        Check("kernels", training.check_kernels, 600.0, kernel),
        Check("update", training.check_update, 600.0, hangs),
        Check("cycle", training.check_cycle, 600.0, canary),
        Check("microbatch", training.check_microbatch, 600.0, "lower learner.max_tokens_per_microbatch"),
        Check("checkpoint", training.check_checkpoint, 600.0, "run.dir is on a slow file system: name a faster one"),
        Check("memory", training.check_memory, 60.0, ""),
    )


@contextmanager
def tiny_run() -> Iterator[list[str]]:
    """Command-line arguments for a run of a tiny model, which exists within this context."""
    with tempfile.TemporaryDirectory(prefix="rlhf-doctor-") as folder:
        quickstart = Path(folder) / "quickstart"
        command = [sys.executable, "-m", "rlhf.quickstart", "--output", str(quickstart), "--warmup-steps", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        resources = local_resources()
        gpus = int(resources[GPU])
        cluster = {"device": "cpu", "learners": min(2, int(resources["CPU"]))}
        if gpus:
            placement = "separate" if gpus > 1 else "colocated"
            cluster = {"device": "cuda", "placement": placement, "learners": min(2, max(1, gpus - 1))}
        config = {
            "run": {"dir": str(Path(folder) / "run"), "steps": 1},
            "model": {"path": str(quickstart / "model"), "dtype": "bfloat16" if gpus else "float32"},
            "data": {"train": str(quickstart / "test.jsonl"), "max_prompt_tokens": 64},
            "reward": ["math"],
            "rollout": {
                "prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 64,
                "gpu_memory_utilization": 0.3,
            },
            "learner": {"max_tokens_per_microbatch": 1024},
            "cluster": cluster,
        }  # fmt: skip
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))
        yield ["--config", str(file)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    cli.program_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; other lines go to standard error")


def _environment(patient: Patient) -> dict[str, Any]:
    """The machine, for a reader of the results."""
    return {
        "versions": {name: version for name, version in node_report.report().items() if name != "node"},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB),
        "gpus": [gpu for node in vars(patient).get("nodes", {}).values() for gpu in node["gpus"]],
    }


def _description(patient: Patient) -> list[str]:
    """The machine and the run as text."""
    about, config, cluster = _environment(patient), patient.config, patient.config.cluster
    return [
        ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        f"{about['platform']}, {about['cpus']} CPUs, {about['memory_gib']} GiB, GPUs: "
        f"{', '.join(about['gpus']) or 'none'}",
        f"{config.model.path}, {config.model.dtype}, {cluster.engines} x {cluster.tensor_parallel} "
        f"engines, {cluster.learners} learners, {cluster.placement}",
    ]


def as_json(results: Sequence[Finding], patient: Patient) -> str:
    """The results and the machine as one object. The status of the whole is the worst of the checks."""
    statuses = {result.status for result in results}
    checks = [
        {"name": r.name, "status": r.status, "seconds": r.seconds, "message": r.text, "remedy": r.remedy}
        for r in results
    ]
    whole = next((status for status in ("fail", "warn") if status in statuses), "ok")
    return json.dumps({"status": whole, "checks": checks, "environment": _environment(patient)}, indent=2)


@contextmanager
def _output_on_stderr() -> Iterator[None]:
    """A context in which lines for standard output, also those of child processes, go to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _report(result: Finding) -> None:
    say("\n".join(report_lines(result)))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    tiny = not any(argument.split("=")[0] in ("--config", "--help", "-h") for argument in arguments)
    with ExitStack() as stack:
        if "--json" in arguments:
            stack.enter_context(_output_on_stderr())
        if tiny:
            arguments = [*stack.enter_context(tiny_run()), *arguments]
        schema = cli.program_schema(arguments)
        config, flags = cli.parse("rlhf.doctor", DESCRIPTION, schema, arguments, add_flags=add_flags)
        patient = Patient(config, tiny)
        results = cli.run_async(examine_all(checks(config), patient, _report))
    say(as_json(results, patient) if flags.json else "\n".join(["", *_description(patient)]))
    if failed := [result.name for result in results if result.status == "fail"]:
        raise RuntimeError(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
