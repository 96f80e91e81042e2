"""What one driver can carry: its CPU per turn and per rollout, with an engine that answers at once.

    python -m benchmarks.driver [--quick]

Groups of 8 rollouts through the real workers, environments, graders and Ray, with 0 workers (in the driver's process),
1 and 2 worker actors. The engine is an actor that computes nothing. Acting: four turns of 32 tokens, with a call of the
calculator after the first three. Single turn: one response of 32 tokens, graded by the reward `math`.

CPU is the time of the driver's own process (all threads). The wall times are of this machine: workers, engine, tools
and driver share its cores. Bytes are those of the pickled group that a worker sends. CPU only.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import harness, models
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from rlhf.sampling.requests import Completion, SamplingSettings

WORKERS = (0, 1, 2)
SAMPLES, TURNS, TURN_TOKENS, PROMPT_TOKENS = 8, 4, 32, 24
TOKEN = 200  # what the engine samples; no prompt has it
ACTING_MS, SINGLE_MS, GAIN = 0.05, 0.15, 1.6  # targets: ms per turn, ms per rollout, turns/s of two workers over one


class InstantEngine:
    """Stands for `sampling.engine.RolloutEngine`: every turn calls the tool, except the last one of a rollout."""

    def __init__(self, config: Any, *_: Any) -> None:
        from rlhf.data.model_files import load_tokenizer

        self._stop = int(load_tokenizer(config.model).eos_token_id)

    async def generate(
        self, token_ids: np.ndarray, settings: SamplingSettings, samples: int, seed: int | None
    ) -> list[Completion]:
        from rlhf.sampling.requests import Completion
        from rlhf.types import VersionSpan

        ids = np.full(TURN_TOKENS, TOKEN, np.int32)
        ids[-1] = self._stop
        turn = int(np.count_nonzero(token_ids == TOKEN)) // (TURN_TOKENS - 1) + 1
        message: dict[str, Any] | None = None
        if settings.parsing is not None:
            message = {"role": "assistant", "content": "x" * 20}
            if turn < TURNS:  # another sum in each group and turn: equal answers are rendered once
                asked = json.dumps({"expression": f"{token_ids[:100].sum()} * {turn}"})
                function = {"name": "calculator", "arguments": asked}
                message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
        spans = (VersionSpan(0, TURN_TOKENS, 0),)
        one = Completion(ids, np.full(TURN_TOKENS, -1.0, np.float32), "stop", spans, 0, message)
        return [one] * samples

    async def check_health(self) -> None:
        pass

    async def close(self) -> None:
        pass


def carry(case: Case) -> Row:
    """Driver CPU and wall seconds of `groups` groups, after as many that warm up."""
    return asyncio.run(_carry(case))


async def _carry(case: Case) -> Row:
    from rlhf.cluster.engines import started_engines
    from rlhf.cluster.rollout_workers import RolloutWorkers
    from rlhf.config import program, roles
    from rlhf.data.model_files import load_tokenizer
    from rlhf.environments.start import StartedEnvironments
    from rlhf.rewards.scorer import Scorer
    from rlhf.rollout.purpose import training_purpose
    from rlhf.types import Prompt

    def instant_engine(config: Any, **how: Any) -> Any:
        role = roles.engine(config, **how)
        return role and replace(role, hosted="benchmarks.driver:InstantEngine")

    program.engine = instant_engine
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])  # for the actors
    acting = case["acting"]
    config = models.run_config(
        Path(case["data"]) / "model",
        data={"max_prompt_tokens": 256},
        environment={"name": "calculator", "processes": 8} if acting else {},
        rollout={"samples_per_prompt": SAMPLES, "max_response_tokens": 2 * TURN_TOKENS}
        | ({"max_rollout_tokens": 4096} if acting else {}),
        reward={"parts": ["math"]},
        learner={"max_tokens_per_microbatch": 8192},
        cluster={"device": "cpu", "rollout_workers": case["workers"]},
    )  # fmt: skip
    tokenizer, rng = load_tokenizer(config.model), np.random.default_rng(0)
    questions = [f"What is {i} * 34?" for i in range(100, 100 + case["groups"])]
    prompts = [
        Prompt(f"p/{i}", 0, rng.integers(65, 90, PROMPT_TOKENS).astype(np.int32),
               ({"role": "user", "content": question},), "408", "p", {"question": question})
        for i, question in enumerate(questions)
    ]  # fmt: skip
    purpose = training_purpose(config, None)
    with Scorer(config.reward) as scorer:
        environments = StartedEnvironments(config, tokenizer) if acting else None
        try:
            async with (
                started_engines(config, trains=False) as engines,
                RolloutWorkers(
                    engines, config, tokenizer, scorer, environments, say=print, check=lambda _: None
                ) as workers,
            ):
                for timed in (False, True):
                    cpu, wall = time.process_time(), time.perf_counter()
                    groups = await asyncio.gather(*(workers.rollout_group(prompt, purpose) for prompt in prompts))
                    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                    assert timed or _turns(groups) == SAMPLES * len(prompts) * (TURNS if acting else 1)
        finally:
            if environments is not None:
                environments.close()
    size = sum(len(pickle.dumps(group)) for group in groups) / len(groups)
    return {"cpu_s": cpu, "wall_s": wall, "turns": _turns(groups), "bytes": size}


def _turns(groups: Sequence[Any]) -> int:
    return sum(int(sample.rollout.facts.get("turns", 1)) for group in groups for sample in group.samples)


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"carry": carry})
    groups = 4 if options.quick else 100
    with tempfile.TemporaryDirectory() as folder:
        from rlhf.quickstart import write_quickstart

        write_quickstart(Path(folder) / "data", warmup_steps=0, train_rows=64, test_rows=2, tools=True)
        rows: dict[str, list[Row]] = {"acting": [], "single turn": []}
        for kind, of_kind in rows.items():
            for workers in WORKERS:
                case: Case = {
                    "function": "carry", "acting": kind == "acting", "workers": workers, "groups": groups,
                    "data": str(Path(folder) / "data"),
                }  # fmt: skip
                row = harness.fresh("benchmarks.driver", case)
                of_kind.append(
                    {"workers": workers, "driver ms per turn": 1e3 * row["cpu_s"] / row["turns"],
                     "turns/s": row["turns"] / row["wall_s"], "groups/s": groups / row["wall_s"],
                     "KiB per group": row["bytes"] / 1024}
                )  # fmt: skip
    for (kind, of_kind), target in zip(rows.items(), (ACTING_MS, SINGLE_MS), strict=True):
        title = f"driver, {kind}: {groups} groups of {SAMPLES}, target {target} ms per turn with worker actors"
        harness.report(f"driver_{kind.replace(' ', '_')}", title, of_kind, options)
    gain = rows["acting"][2]["turns/s"] / rows["acting"][1]["turns/s"]
    print(f"two workers carry {gain:.2f} times the turns per second of one (target {GAIN})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
