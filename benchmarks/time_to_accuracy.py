"""Time to a sampled accuracy of 0.8 on the quickstart's task, after start-up, against TRL's GRPOTrainer.

    python -m benchmarks.time_to_accuracy [--quick] [--seeds 3]

configs/quickstart.yaml for both: model, data, hyper-parameters, grader. The accuracy is that of one sampled response to
each of the 512 test problems, measured every 5 training steps with the clock stopped; the time is that of the training
steps before the first measurement of at least 0.8. Needs `make setup-bench`. The quickstart's data are made first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Case, Row

TARGET, EVERY = 0.8, 5
OURS, TRL = "rlhf", "TRL GRPOTrainer"


def overrides(data: str, seed: int, folder: str, steps: int | None) -> list[str]:
    found = [
        f"model.path={data}/model", f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl",
        f"run.seed={seed}", f"run.dir={folder}/run", f"evaluation.every={EVERY}", "checkpoint.every=null",
        "logging.wandb.mode=disabled", "run.export=false",
    ]  # fmt: skip
    return found + ([f"run.steps={steps}"] if steps else [])


def measure(case: Case) -> Row:
    from rlhf.config.load import load_config
    from rlhf.config.run import GRPOConfig

    with tempfile.TemporaryDirectory() as folder:
        keys = overrides(case["data"], case["seed"], folder, case["steps"])
        if case["variant"] == TRL:
            from benchmarks.trl_peer import train_with_trl

            config = load_config(GRPOConfig, ["configs/quickstart.yaml"], keys)
            # One schedule for both: that of the whole run. It is left as soon as the target is reached.
            found = train_with_trl(config, steps=config.run.steps, evaluate_every=EVERY, folder=Path(folder))
            return found | {"target_s": time_to_target(found["evaluations"])}
        command = [sys.executable, "-m", "rlhf.grpo", "--config", "configs/quickstart.yaml", *keys]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(x) for x in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return found_in(lines)


def found_in(lines: list[dict[str, Any]]) -> Row:
    """Step times and evaluations of a metrics.jsonl."""
    times = {line["step"]: line["time/step"] for line in lines if "time/step" in line}
    evaluations = []
    for line in lines:
        accuracy = next(
            (value for key, value in line.items() if key.startswith("eval/") and key.endswith("avg@1")), None
        )
        if accuracy is not None and line["step"] > 0:
            evaluations.append([sum(s for step, s in times.items() if step <= line["step"]), accuracy])
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
    data = options.data or options.output / "quickstart-data"
    if not data.exists():
        subprocess.run([sys.executable, "-m", "rlhf.quickstart", "--output", str(data)], check=True)
    rows: list[Row] = []
    for seed in range(1 if options.quick else options.seeds):
        for variant in (OURS, TRL):
            case = {"function": "measure", "variant": variant, "seed": seed, "data": str(data.resolve()),
                    "steps": 12 if options.quick else None}  # fmt: skip
            found = harness.fresh("benchmarks.time_to_accuracy", case, timeout_s=3600)
            rows.append({
                "seed": seed, "variant": variant, "s to 0.8": found["target_s"] or "not reached",
                "steps": len(found["step_seconds"]), "median step s": statistics.median(found["step_seconds"]),
                "last accuracy": found["evaluations"][-1][1],
            })  # fmt: skip
            harness.report("time_to_accuracy", "time to 0.8 sampled accuracy, quickstart", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
