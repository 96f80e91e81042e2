"""Start-up: imports, --help, --plan, and the time to the first rollout against a bare AsyncLLM in a Ray actor.

    python -m benchmarks.startup [--device cuda] [--quick]

`a run's first rollouts` is everything that a run does until the groups of its first step are there: data, gold answers,
Ray, engine and learner side by side, the first weight transfers and the canary that proves them. The peer starts Ray
and one actor with one AsyncLLM of the same arguments and environment and samples as many prompts; it has no learner.
With one GPU engine and learner share it, and start one after the other.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from rlhf.config.grpo import GRPOConfig

SIZE = "10m"
PROMPTS = 8


def run_config(case: Case) -> GRPOConfig:
    train, test = models.write_prompts(models.FOLDER / "data", 256)
    return models.run_config(
        models.random_model(SIZE, dtype=case["dtype"]),
        run={"dir": f"{case['folder']}/run", "steps": 1, "export": False},
        model={"dtype": case["dtype"]},
        data={"train": str(train), "eval": str(test), "max_prompt_tokens": 64},
        rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": 2, "max_response_tokens": 16,
                 "gpu_memory_utilization": 0.4},
        reward={"parts": [{"name": "math"}]},
        cluster={"device": case["device"], "placement": models.placement(case["device"])},
    )  # fmt: skip


def first_rollouts(case: Case) -> Row:
    from rlhf.run.rollout_loop import rollout_loop
    from rlhf.run.run import Run

    async def run() -> float:
        async with rollout_loop(Run(run_config(case), resume=False)) as loop:
            await loop.buffer.take()
            return time.time() - case["started"]

    return {"seconds": asyncio.run(run())}


def bare(case: Case) -> Row:
    """Ray, an actor, an AsyncLLM, the first samples."""
    import os

    import ray

    os.environ.update(RAY_worker_niceness="0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Engine:
        def __init__(self) -> None:
            os.environ.update(case["environment"])

        async def sample(self) -> int:
            from vllm import AsyncEngineArgs, SamplingParams
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM

            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**case["engine"]))
            params = SamplingParams(
                n=2, max_tokens=16, detokenize=False, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
            )

            async def one(i: int) -> int:
                prompt: Any = {"prompt_token_ids": list(range(40, 60))}
                outputs = [output async for output in engine.generate(prompt, params, request_id=str(i))]
                return len(outputs[-1].outputs)

            samples = sum(await asyncio.gather(*(one(i) for i in range(PROMPTS))))
            engine.shutdown()
            return samples

    gpus = 0 if case["device"] == "cpu" else 1
    actor: Any = Engine.options(num_gpus=gpus, num_cpus=0.5).remote()  # type: ignore[attr-defined]
    assert ray.get(actor.sample.remote()) == 2 * PROMPTS
    seconds = time.time() - case["started"]
    ray.shutdown()
    return {"seconds": seconds}


def command_seconds(arguments: list[str], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"first_rollouts": first_rollouts, "bare": bare})
    rounds = 1 if options.quick else 5
    python = command_seconds(["-c", "pass"], rounds)
    rows: list[Row] = [{"what": "python itself", "seconds": python}]
    for what, arguments, target in (
        ("import rlhf", ["-c", "import rlhf"], 0.1),
        ("--help", ["-m", "rlhf.grpo", "--help"], 0.5),
        ("--plan", ["-m", "rlhf.grpo", "--config", "configs/math.yaml", "--plan"], 1.0),
    ):
        rows.append({"what": what, "seconds": command_seconds(arguments, rounds), "target": target})
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    models.random_model(SIZE, dtype=dtype)
    best = {"first_rollouts": float("inf"), "bare": float("inf")}
    for _ in range(1 if options.quick else 2):
        for function in best:
            with tempfile.TemporaryDirectory() as folder:
                case: Case = {"function": function, "dtype": dtype, "device": options.device, "folder": folder}
                case["engine"], case["environment"] = models.bare_engine(run_config(case))
                result = harness.fresh("benchmarks.startup", case | {"started": time.time()})
                best[function] = min(best[function], result["seconds"])
    rows.append({"what": "bare AsyncLLM in Ray, first rollouts", "seconds": best["bare"]})
    rows.append({"what": "a run's first rollouts", "seconds": best["first_rollouts"],
                 "target": 1.5 * best["bare"], "x bare": best["first_rollouts"] / best["bare"]})  # fmt: skip
    harness.report("startup", f"start-up, model of {SIZE} parameters, {dtype}", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
