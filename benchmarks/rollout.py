"""The cost of the trainer on top of vLLM: rollouts through actor, scorer and arrays, against bare engines.

    python -m benchmarks.rollout [--device cuda] [--quick]

The same prompts, 8 samples each, a random model of 0.1 B parameters that never ends by itself. Ours is
what a training step does up to its groups: the Ray actor, the grader in its own processes, arrays. Peers: one
AsyncLLM with one request per prompt, and LLM.generate, with the arguments and the environment of our engine. All three
engines stay up and take turns, round after round; wall and CPU seconds are medians. CPU seconds are those of the
process that drives the engine and everything below it; of Ray's processes only the engine's actor counts. On GPU the
model has the size of Qwen2.5-0.5B.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from rlhf.config.grpo import GRPOConfig

OURS, ASYNC, OFFLINE = "rlhf", "AsyncLLM", "LLM.generate"
SAMPLES, PROMPT_TOKENS = 8, 24
RAY_DAEMONS = (
    "raylet",
    "gcs_server",
    "ray/dashboard",
    "ray/_private",
    "ray::IDLE",
    "DashboardAgent",
    "RuntimeEnvAgent",
)


def own_processes() -> list[int]:
    """This process and its descendants, without Ray's daemons."""
    processes = harness.tree(os.getpid())
    return [pid for pid, command in processes.items() if not any(daemon in command for daemon in RAY_DAEMONS)]


def prompts_of(count: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, PROMPT_TOKENS).tolist() for _ in range(count)]


def run_config(case: Case) -> GRPOConfig:
    return models.run_config(
        case["model"],
        data={"max_prompt_tokens": PROMPT_TOKENS},
        rollout={"samples_per_prompt": SAMPLES, "max_response_tokens": case["tokens"],
                 "gpu_memory_utilization": 0.25, "prompts_per_step": case["prompts"]},
        reward={"parts": [{"name": "math"}]},
        cluster={"device": case["device"]},
    )  # fmt: skip


def sampling(case: Case) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=SAMPLES, max_tokens=case["tokens"], temperature=1.0, detokenize=False, logprobs=0,
        flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


class Bare:
    """AsyncLLM: one request per prompt, all at the same time."""

    def __init__(self, case: Case) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._params, self._prompts, self._sent = sampling(case), prompts_of(case["prompts"]), 0

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**case["engine"]))

        self._engine: Any = self._loop.run_until_complete(start())

    async def _one(self, ids: list[int]) -> int:
        self._sent += 1
        prompt: Any = {"prompt_token_ids": ids}
        stream = self._engine.generate(prompt, self._params, request_id=str(self._sent))
        outputs = [output async for output in stream]
        return sum(len(o.token_ids) for o in outputs[-1].outputs)

    def round(self) -> int:
        async def all_of_them() -> int:
            return sum(await asyncio.gather(*(self._one(ids) for ids in self._prompts)))

        return self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        self._engine.shutdown()


class Offline:
    """LLM.generate."""

    def __init__(self, case: Case) -> None:
        from vllm import LLM

        self._engine: Any = LLM(**case["engine"])
        self._params = sampling(case)
        self._prompts = [{"prompt_token_ids": ids} for ids in prompts_of(case["prompts"])]

    def round(self) -> int:
        requests = self._engine.generate(self._prompts, self._params, use_tqdm=False)
        return sum(len(output.token_ids) for request in requests for output in request.outputs)

    def close(self) -> None:
        self._engine.llm_engine.engine_core.shutdown()


class Trainer:
    """Engine actor, rollout worker and scorer of a run, without its learner."""

    def __init__(self, case: Case) -> None:
        import numpy as np

        from rlhf.cluster.engines import started_engines
        from rlhf.data.model_files import load_tokenizer
        from rlhf.rewards.scorer import Scorer
        from rlhf.rollout.purpose import training_purpose
        from rlhf.rollout.worker import RolloutWorker
        from rlhf.types import Prompt

        config = run_config(case)
        self._loop = asyncio.new_event_loop()
        self._started = started_engines(config, trains=False)
        engines = self._loop.run_until_complete(self._started.__aenter__())
        self._scorer = Scorer(config.reward)
        self._worker = RolloutWorker(config, load_tokenizer(config.model), engines.choice.generate, self._scorer)
        self._purpose = training_purpose(config, None)
        self._prompts = [
            Prompt(f"p/{i}", 0, np.asarray(ids, np.int32), (), "1", "p")
            for i, ids in enumerate(prompts_of(case["prompts"]))
        ]

    def round(self) -> int:
        async def all_of_them() -> Any:
            return await asyncio.gather(
                *(self._worker.rollout_group(prompt, self._purpose) for prompt in self._prompts)
            )

        groups = self._loop.run_until_complete(all_of_them())
        return sum(sample.rollout.response_length for group in groups for sample in group.samples)

    def close(self) -> None:
        self._scorer.close()
        self._loop.run_until_complete(self._started.__aexit__(None, None, None))


def serve(case: Case) -> Row:
    """One variant's process: a round for every line that arrives, until the parent has enough."""
    variant = {OURS: Trainer, ASYNC: Bare, OFFLINE: Offline}[case["variant"]](case)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() != "round":
            break
        pids = own_processes()
        before, started = harness.cpu_seconds(pids), time.perf_counter()
        tokens = variant.round()
        wall = time.perf_counter() - started
        print(f"{wall} {harness.cpu_seconds(pids) - before} {tokens}", flush=True)
    variant.close()
    return {}


class Served:
    """A variant in a process of its own."""

    def __init__(self, case: Case, log: Path) -> None:
        import json
        import subprocess

        command = [sys.executable, "-m", "benchmarks.rollout", "--case", json.dumps({"function": "serve", **case})]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, **case["environment"]},
        )
        self._log = log
        self._answer("ready")

    def _answer(self, wanted: str = "") -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # vLLM also writes there
            text = line.strip()
            if text == wanted or (not wanted and text.replace(".", "").replace(" ", "").replace("e-", "").isdigit()):
                return text
        raise RuntimeError(f"a variant ended early:\n{self._log.read_text()[-3000:]}")

    def round(self) -> tuple[float, float, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        wall, cpu, tokens = self._answer().split()
        return float(wall), float(cpu), int(tokens)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"serve": serve})
    size, count, tokens, rounds = ("10m", 4, 16, 2) if options.quick else ("0.1b", 16, 64, 7)
    if options.device == "cuda":
        size, count, tokens, rounds = "0.5b", 64, 256, rounds
    model = str(models.random_model(size, mean_length=math.inf))
    options.output.mkdir(parents=True, exist_ok=True)
    case: Case = {"model": model, "prompts": count, "tokens": tokens, "device": options.device}
    case["engine"], case["environment"] = models.bare_engine(run_config(case))
    served = {
        name: Served({**case, "variant": name}, options.output / f"rollout-{i}.log")
        for i, name in enumerate((OURS, ASYNC, OFFLINE))
    }
    measured: dict[str, list[tuple[float, float, int]]] = {name: [] for name in served}
    for number in range(rounds + 1):
        for name, variant in served.items():
            measurement = variant.round()
            if number:  # the first compiles and fills caches
                measured[name].append(measurement)
    for variant in served.values():
        variant.close()
    rows: list[Row] = []
    medians = {name: [statistics.median(v[i] for v in values) for i in range(2)] for name, values in measured.items()}
    for name, (wall, cpu) in medians.items():
        sampled = {v[2] for v in measured[name]}
        assert sampled == {count * SAMPLES * tokens}, (name, sampled)
        rows.append({
            "variant": name, "wall s": wall, "CPU s": cpu, "tokens/s": count * SAMPLES * tokens / wall,
            "x wall": wall / medians[ASYNC][0], "x CPU": cpu / medians[ASYNC][1],
        })  # fmt: skip
    title = f"{count} prompts x {SAMPLES} samples x {tokens} tokens, {size}, bf16, median of {rounds}"
    harness.report("rollout", title, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
