"""Whole training steps with long-tailed responses, against TRL's GRPOTrainer.

    python -m benchmarks.training_steps [--device cuda] [--quick]

A random model of 10 M parameters whose responses end with a fixed probability (mean 80 tokens, at most 512), float32,
16 prompts x 8 samples a step, two optimizer steps, sampling, grading and weight transfer included. Ours and TRL in
turn, twice; the median is over the steps of both runs, without the first two of each. On GPU the model has the size of
Qwen2.5-0.5B in bf16, and both have one GPU: ours with engine and learner on it in turn. Needs `make setup-bench`.
"""

from __future__ import annotations

import os
import statistics
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
    size, dtype = ("0.5b", "bfloat16") if case["device"] == "cuda" else ("10m", "float32")
    return models.run_config(
        models.random_model(size, dtype=dtype, mean_length=MEAN_LENGTH),
        run={"dir": f"{folder}/run", "steps": case["steps"], "export": False},
        model={"dtype": dtype},
        data={"train": str(train), "eval": str(test), "max_prompt_tokens": 64},
        rollout={"prompts_per_step": case["prompts"], "samples_per_prompt": 8, "max_response_tokens": LONGEST,
                 "gpu_memory_utilization": 0.4},
        reward={"parts": [{"name": "length", "max_tokens": LONGEST, "buffer_tokens": LONGEST - 1}]},
        learner={"minibatches_per_epoch": 2, "max_tokens_per_microbatch": 8192, "optimizer": {"lr": 1e-6}},
        evaluation={"at_start": False, "at_end": False},
        cluster={"device": case["device"], "placement": "colocated" if case["device"] == "cuda" else "separate"},
    )  # fmt: skip


def measure(case: Case) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, folder)
        if case["variant"] == TRL:
            from benchmarks.trl_peer import train_with_trl

            return train_with_trl(config, steps=case["steps"], folder=Path(folder))
        steps = models.steps_of_run(config, folder)
    return {
        "step_seconds": [line["time/step"] for line in steps],
        "lengths": statistics.mean(line["rollout/response_length/mean"] for line in steps),
    }


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    steps, prompts, rounds = (3, 4, 1) if options.quick else (5, 16, 2)
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    environment = one_gpu if options.device == "cuda" else {}  # TRL would spread over all
    times: dict[str, list[float]] = {OURS: [], TRL: []}
    length = 0.0
    for _ in range(rounds):
        for variant, seconds in times.items():
            case = {"function": "measure", "variant": variant, "steps": steps, "prompts": prompts,
                    "device": options.device}  # fmt: skip
            result = harness.fresh("benchmarks.training_steps", case, timeout_s=3600, environment=environment)
            seconds += result["step_seconds"][2:]  # the first two pay for compilation and caches
            length = result.get("lengths", length)
    rows: list[Row] = [
        {"variant": variant, "median step s": statistics.median(seconds), "fastest s": min(seconds),
         "x ours": statistics.median(seconds) / statistics.median(times[OURS])}
        for variant, seconds in times.items()
    ]  # fmt: skip
    rows[0]["mean response"] = length
    title = f"training steps of {prompts} x 8 responses, mean {MEAN_LENGTH}, at most {LONGEST} tokens"
    harness.report("training_steps", title, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
