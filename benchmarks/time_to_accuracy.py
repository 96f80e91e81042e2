"""Time to a sampled accuracy of 0.8 on the quickstart's task, after start-up, against TRL's GRPOTrainer.

    python -m benchmarks.time_to_accuracy [--quick] [--seeds 3]

configs/quickstart.yaml for both: model, data, hyper-parameters, grader. The accuracy is that of one sampled response to
each of the 512 test problems, measured every 5 training steps with the clock stopped; the time is that of the training
steps before the first measurement of at least 0.8, where training stops. Both follow the schedule of the whole run.
Ours twice: as the quickstart is, synchronous, and with `rollout.max_policy_lag=1`, where sampling and training overlap.
Seed after seed, ours, ours at lag 1, TRL. Needs `make setup-bench`. The quickstart's data are made first. CPU only.

Our engine samples for the next steps, lag and one more, while an evaluation runs and the clock stands: such a step
counts as much as the median of the others. TRL samples within its steps.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case, Row
from rlhf.config.grpo import GRPOConfig

TARGET, EVERY = 0.8, 5
TRL = "TRL GRPOTrainer"
OURS = {"rlhf": 0, "rlhf, lag 1": 1}


def overrides(data: str, seed: int, lag: int, folder: str, steps: int | None) -> list[str]:
    keys = [
        f"model.path={data}/model", f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl",
        f"run.seed={seed}", f"run.dir={folder}/run", f"evaluation.every={EVERY}", "checkpoint.every=null",
        f"rollout.max_policy_lag={lag}",
        "logging.wandb.mode=disabled", "run.export=false",
    ]  # fmt: skip
    return keys + ([f"run.steps={steps}"] if steps else [])


def measure(case: Case) -> Row:
    from rlhf.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        lag = OURS.get(case["variant"], 0)
        keys = overrides(case["data"], case["seed"], lag, folder, case["steps"])
        config = load_config(GRPOConfig, ["configs/quickstart.yaml"], keys)
        if case["variant"] == TRL:
            from benchmarks.trl_peer import train_with_trl

            result = train_with_trl(
                config, steps=config.run.steps, evaluate_every=EVERY, stop_at=TARGET, folder=Path(folder)
            )
            return result | {"target_s": time_to_target(result["evaluations"])}
        asyncio.run(train_until_target(config))
        lines = [json.loads(x) for x in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return found_in(lines, lag)


async def train_until_target(config: GRPOConfig) -> None:
    """rlhf.grpo's loop, left at the target."""
    from rlhf import grpo
    from rlhf.run.rollout_loop import rollout_loop
    from rlhf.run.run import Run

    run = Run(config, resume=False)
    async with rollout_loop(run) as loop:
        for done in range(1, config.run.steps + 1):
            await grpo.train_step(run, loop, done - 1)
            await loop.evaluate_if_due(done)
            if (accuracy_in(run.state.evaluations.get(done, {})) or 0.0) >= TARGET:
                break


def accuracy_in(values: dict[str, Any]) -> float | None:
    return next((value for key, value in values.items() if key.startswith("eval/") and key.endswith("avg@1")), None)


def found_in(lines: list[dict[str, Any]], lag: int) -> Row:
    """Step times and evaluations of the metrics.jsonl of a run at this lag."""
    times: dict[int, float] = {line["step"]: line["time/step"] for line in lines if "time/step" in line}
    accuracies = {
        line["step"]: accuracy for line in lines if line["step"] and (accuracy := accuracy_in(line)) is not None
    }
    ahead = {step + later for step in accuracies for later in range(1, lag + 2)}  # sampled during that evaluation
    usual = statistics.median(seconds for step, seconds in times.items() if step not in ahead)
    times |= {step: usual for step in times.keys() & ahead}
    evaluations = [
        [sum(seconds for step, seconds in times.items() if step <= measured), accuracy]
        for measured, accuracy in accuracies.items()
    ]
    return {
        "step_seconds": list(times.values()), "evaluations": evaluations, "target_s": time_to_target(evaluations),
    }  # fmt: skip


def time_to_target(evaluations: list[list[float]]) -> float | None:
    return next((seconds for seconds, accuracy in evaluations if accuracy >= TARGET), None)


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="of rlhf.quickstart; made anew without it")
    options = parser.parse_args()
    harness.run_if_case(options, {"measure": measure})
    title = f"time to {TARGET} sampled accuracy, quickstart"
    if options.device == "cuda":
        why = "CPU only: the quickstart's model of 0.7 M parameters would leave a GPU idle"
        return harness.not_measured("time_to_accuracy", title, why, options)
    data = options.data or options.output / "quickstart-data"
    if not data.exists():
        subprocess.run([sys.executable, "-m", "rlhf.quickstart", "--output", str(data)], check=True)
    rows: list[Row] = []
    for seed in range(1 if options.quick else options.seeds):
        for variant in (*OURS, TRL):
            case = {"function": "measure", "variant": variant, "seed": seed, "data": str(data.resolve()),
                    "steps": 12 if options.quick else None}  # fmt: skip
            result = harness.fresh("benchmarks.time_to_accuracy", case, timeout_s=3600)
            rows.append({
                "seed": seed, "variant": variant, "s to 0.8": result["target_s"] or "not reached",
                "steps": len(result["step_seconds"]), "median step s": statistics.median(result["step_seconds"]),
                "last accuracy": result["evaluations"][-1][1],
            })  # fmt: skip
            harness.report("time_to_accuracy", title, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
