"""Whole training steps with long-tailed responses, against TRL's GRPOTrainer.

    python -m benchmarks.training_steps [--quick]

A random model of 10 M parameters whose responses end with a fixed probability (mean 80 tokens, at most 512), float32,
16 prompts x 8 samples a step, two optimizer steps, sampling, grading and weight transfer included. Needs
`make setup-bench`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

OURS, TRL = "rlhf", "TRL GRPOTrainer"
MEAN_LENGTH, LONGEST = 80, 512


def config_of(case: Case, folder: str) -> Any:
    train, test = models.write_prompts(models.FOLDER / "data-long", 4096)
    return models.run_config(
        models.random_model("10m", dtype="float32", mean_length=MEAN_LENGTH),
        run={"dir": f"{folder}/run", "steps": case["steps"], "export": False},
        model={"dtype": "float32"},
        data={"train": str(train), "eval": str(test), "max_prompt_tokens": 64},
        rollout={"prompts_per_step": case["prompts"], "samples_per_prompt": 8, "max_response_tokens": LONGEST},
        reward={"parts": [{"name": "length", "max_tokens": LONGEST, "buffer_tokens": LONGEST - 1}]},
        learner={"minibatches_per_epoch": 2, "max_tokens_per_microbatch": 8192, "optimizer": {"lr": 1e-6}},
        evaluation={"at_start": False, "at_end": False},
    )


def measure(case: Case) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, folder)
        if case["variant"] == TRL:
            from benchmarks.trl_peer import train_with_trl

            return train_with_trl(config, steps=case["steps"], evaluate_every=None, folder=Path(folder))
        file = Path(folder) / "config.yaml"
        file.write_text(config.model_dump_json())
        subprocess.run(
            [sys.executable, "-m", "rlhf.grpo", "--config", str(file)], check=True, stdout=subprocess.DEVNULL
        )
        lines = [json.loads(x) for x in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    return {
        "step_seconds": [line["time/step"] for line in steps],
        "lengths": statistics.mean(line["rollout/response_length/mean"] for line in steps),
    }


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    steps, prompts = (3, 4) if options.quick else (8, 16)
    rows: list[Row] = []
    for variant in (OURS, TRL):
        case = {"function": "measure", "variant": variant, "steps": steps, "prompts": prompts}
        found = harness.fresh("benchmarks.training_steps", case, timeout_s=3600)
        later = found["step_seconds"][2:]  # the first two pay for compilation and caches
        rows.append({"variant": variant, "median step s": statistics.median(later), "fastest s": min(later)})
        rows[-1]["x ours"] = rows[-1]["median step s"] / rows[0]["median step s"]
        rows[-1]["mean response"] = found.get("lengths", "")
    title = f"training steps of {prompts} x 8 responses, mean {MEAN_LENGTH}, at most {LONGEST} tokens, 10 M parameters"
    harness.report("training_steps", title, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
