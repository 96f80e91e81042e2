"""Rollouts that act: the cost of the pauses of tools, and training steps with a class with a tool, against TRL.

    python -m benchmarks.acting [--quick]

Pauses: 256 rollouts at the same time, each of three turns of 128 tokens with a tool of 0.5 s after the first and the
second (24 tokens of answer), against 256 responses of 384 tokens to the same prompts, on one engine in turn; a random
model of 10 M parameters that never ends by itself. Sampled tokens per wall second.

Training: the quickstart's model for tools, warmed up so that it calls in three rollouts of four (a group of equal
rewards would cost ours no update), with one class and one reward function (`benchmarks/calculator_class.py`), 16
prompts x 8 samples a step, two optimizer steps, whole steps; ours and TRL in turn, twice, without the first two steps
of each. Needs `make setup-bench`. CPU only.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks import harness, models
from benchmarks.harness import Case, Row

OURS, TRL = "rlhf", "TRL GRPOTrainer"
ONE_TURN, TURNS = "one turn", "three turns, tools of 0.5 s"
PAUSE_S, TURN_TOKENS, ANSWER_TOKENS, PROMPT_TOKENS = 0.5, 128, 24, 24

PLAY = """
import asyncio

async def play(row, generate):
    ids = list(row["ids"])
    for turn in range(3):
        said = await generate(ids, max_tokens=row["turn_tokens"])
        if turn < 2:
            await asyncio.sleep(row["pause_s"])
            ids += said.token_ids + row["ids"][: row["answer_tokens"]]
    return 0.0
"""


def pauses(case: Case) -> Row:
    """Tokens per second of both, in turn."""
    return asyncio.run(_pauses(case))


async def _pauses(case: Case) -> Row:
    import numpy as np

    from rlhf.cluster.engines import started_engines
    from rlhf.data.model_files import load_tokenizer
    from rlhf.environments.start import StartedEnvironments
    from rlhf.rollout.purpose import training_purpose
    from rlhf.rollout.worker import RolloutWorker
    from rlhf.types import Prompt

    file = Path(case["folder"]) / "playing.py"
    file.write_text(PLAY)
    longest = 3 * case["turn_tokens"] + 2 * ANSWER_TOKENS
    config = models.run_config(
        models.random_model("10m", dtype="float32", mean_length=math.inf),
        data={"max_prompt_tokens": PROMPT_TOKENS},
        environment={"name": f"{file}:play"},
        rollout={"samples_per_prompt": 8, "prompts_per_step": case["prompts"], "kv_cache_gib": 4,
                 "max_response_tokens": 3 * case["turn_tokens"], "max_rollout_tokens": longest},
        reward={"parts": []},
        learner={"max_tokens_per_microbatch": 2 * longest},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = {"turn_tokens": case["turn_tokens"], "pause_s": PAUSE_S, "answer_tokens": ANSWER_TOKENS}
    prompts = [
        Prompt(f"p/{i}", 0, ids, (), "", "p", {"ids": ids.tolist(), **lengths})
        for i, ids in enumerate(rng.integers(0, 256, (case["prompts"], PROMPT_TOKENS)).astype(np.int32))
    ]

    speeds: dict[str, list[float]] = {ONE_TURN: [], TURNS: []}
    tokenizer = load_tokenizer(config.model)
    with StartedEnvironments(config, tokenizer) as play:
        async with started_engines(config, trains=False) as engines:
            purpose = replace(training_purpose(config, None), kind="texts")
            workers = {
                name: RolloutWorker(config, tokenizer, engines.choice.generate, cast(Any, None), environment)
                for name, environment in ((ONE_TURN, None), (TURNS, play))
            }
            for number in range(case["rounds"] + 1):
                for name, worker in workers.items():
                    began = time.perf_counter()
                    groups = await asyncio.gather(*(worker.rollout_group(prompt, purpose) for prompt in prompts))
                    seconds = time.perf_counter() - began
                    tokens = [sample.rollout.response_length for group in groups for sample in group.samples]
                    assert set(tokens) == {3 * case["turn_tokens"]}, set(tokens)
                    if number:  # the first compiles and fills caches
                        speeds[name].append(sum(tokens) / seconds)
    return {"speeds": speeds}


def training(case: Case) -> Row:
    """Seconds of whole training steps."""
    from rlhf.config.grpo import GRPOConfig
    from rlhf.config.load import load_config

    data, function = case["data"], f"{Path(__file__).with_name('calculator_class.py')}:right"
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            f"model.path={data}/model", f"data.train={data}/train.jsonl", f"data.eval={data}/test.jsonl", "tools=[]",
            f"environment={Path(__file__).with_name('calculator_class.py')}:Calculator", f"reward=['{function}']",
            f"run.dir={folder}/run", f"run.steps={case['steps']}", "run.export=false", "checkpoint.every=null",
            f"rollout.prompts_per_step={case['prompts']}", "evaluation.every=null", "evaluation.at_start=false",
            "evaluation.at_end=false", "logging.wandb.mode=disabled", "learner.optimizer.lr=1e-6",
            "learner.schedule.min_lr=0",
        ]  # fmt: skip
        config = load_config(GRPOConfig, ["configs/tools_quickstart.yaml"], keys)
        if case["variant"] == TRL:
            from benchmarks import calculator_class
            from benchmarks.trl_peer import train_with_trl

            how: dict[str, Any] = {"environment": calculator_class.Calculator, "function": calculator_class.right}
            return train_with_trl(config, steps=case["steps"], folder=Path(folder), **how)
        steps = models.steps_of_run(config, folder)
    return {
        "step_seconds": [line["time/step"] for line in steps],
        "calls": statistics.mean(line["environment/tool_calls"] for line in steps),
        "reward": statistics.mean(line["reward/mean"] for line in steps),
    }


def callers(folder: Path) -> Path:
    """The quickstart's data and model for tools, of whose demonstrations three in four call."""
    if not folder.exists():
        from rlhf import quickstart

        quickstart.CALL_FRACTION = 0.75
        quickstart.write_quickstart(folder, tools=True)
    return folder.resolve()


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"pauses": pauses, "training": training})
    prompts, tokens, rounds, steps = (4, 16, 1, 3) if options.quick else (32, TURN_TOKENS, 3, 6)
    with tempfile.TemporaryDirectory() as folder:
        case: Case = {"function": "pauses", "folder": folder, "prompts": prompts, "turn_tokens": tokens,
                      "rounds": rounds}  # fmt: skip
        speeds = harness.fresh("benchmarks.acting", case, timeout_s=3600)["speeds"]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows: list[Row] = [
        {"variant": name, "tokens/s": speed, "x one turn": speed / medians[ONE_TURN]} for name, speed in medians.items()
    ]
    title = f"{8 * prompts} rollouts at once, {3 * tokens} sampled tokens each, median of {rounds}"
    harness.report("acting_pauses", title, rows, options)

    data = callers(models.FOLDER / "callers")
    times: dict[str, list[float]] = {OURS: [], TRL: []}
    facts: dict[str, dict[str, Any]] = {OURS: {}, TRL: {}}
    for _ in range(1 if options.quick else 2):
        for variant, seconds in times.items():
            case = {"function": "training", "variant": variant, "steps": steps, "prompts": 16, "data": str(data)}
            facts[variant] = harness.fresh("benchmarks.acting", case, timeout_s=3600)
            seconds += facts[variant]["step_seconds"][2:]  # the first two pay for compilation and caches
    rows = [
        {"variant": variant, "median step s": statistics.median(seconds), "fastest s": min(seconds),
         "x ours": statistics.median(seconds) / statistics.median(times[OURS]),
         "calls a rollout": facts[variant]["calls"], "reward": facts[variant]["reward"]}
        for variant, seconds in times.items()
    ]  # fmt: skip
    harness.report("acting_steps", "training steps of 16 x 8 rollouts with a class with a tool", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
