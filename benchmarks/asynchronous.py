"""Asynchronous against synchronous training with long-tailed response lengths, and both against the bound.

    python -m benchmarks.asynchronous [--device cuda] [--quick]

A random model of 10 M parameters whose responses end with a fixed probability (mean 80 tokens, at most 512). On CPU the
engine's processes are pinned to the first core and the learner to the second. The bound is max(sampling, training) +
transfer: for it engine and learner first run flat out side by side, neither waiting for the other, so that each is
measured with the other core busy. Then come whole training steps at lag 0 and at lag 2. The JSON is what
`python -m benchmarks.simulator --replay` reads. Each lag is run once, one after the other, since a run is measured
against the bound that was taken in the same minutes. On GPU the model has the size of Qwen2.5-0.5B in bf16, and engine
and learner need a GPU each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness, models
from benchmarks.harness import Case, Row

SAMPLES, MEAN_LENGTH, LONGEST, SLOTS = 8, 80, 512, 64
PROMPT_TOKENS = 21  # of the quickstart's questions; samples of a group share its prefill


def run_config(case: Case, lag: int) -> Any:
    train, test = models.write_prompts(models.FOLDER / "data-long", 4096)
    folder = Path("runs/benchmarks/asynchronous")
    shutil.rmtree(folder, ignore_errors=True)
    size, dtype = ("0.5b", "bfloat16") if case["device"] == "cuda" else ("10m", "float32")
    return models.run_config(
        models.random_model(size, dtype=dtype, mean_length=MEAN_LENGTH),
        run={"dir": str(folder), "steps": 1000, "export": False},
        model={"dtype": dtype},
        data={"train": str(train), "eval": str(test), "max_prompt_tokens": 64},
        rollout={"prompts_per_step": case["prompts"], "samples_per_prompt": SAMPLES, "max_response_tokens": LONGEST,
                 "max_policy_lag": lag, "max_concurrent_sequences": SLOTS, "gpu_memory_utilization": 0.4},
        logging={"rollouts": True},
        reward={"parts": [{"name": "length", "max_tokens": LONGEST, "buffer_tokens": LONGEST - 1}]},
        learner={"max_tokens_per_microbatch": 4096, "optimizer": {"lr": 1e-7}},
        cluster={"device": case["device"], "threads_per_learner": 1 if case["device"] == "cpu" else None},
    )  # fmt: skip


def pin(pids: list[int], core: int) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def pin_processes() -> None:
    """The learner to core 1, everything else of this run to core 0."""
    processes = harness.tree(os.getpid())
    learners = [pid for pid, command in processes.items() if "ray::HostedActor" in command]
    assert len(learners) == 1, processes
    pin([pid for pid in processes if pid not in learners], 0)
    pin(learners, 1)


async def flat_out(run: Any, loop: Any, seconds: float) -> dict[str, float]:
    """Engine and learner at once, neither waiting: seconds of a step's sampling and of its training and transfer."""
    from rlhf.rollout.purpose import training_purpose
    from rlhf.step.batch import broadcast_to_tokens, make_batch
    from rlhf.step.minibatches import plan_epochs
    from rlhf.types import PolicyTargets

    config, groups_per_step = run.config, run.config.rollout.prompts_per_step
    prompts = [loop.tickets.stream.take(1)[0] for _ in range(64)]
    purpose = training_purpose(config, None)
    groups = await asyncio.gather(
        *(loop.workers.rollout_group(prompt, purpose) for prompt in prompts[:groups_per_step])
    )
    batch, learners = make_batch(groups, mask_truncated=False), run.cluster.learners
    epochs = plan_epochs(batch, config, step=0)
    advantages = broadcast_to_tokens(batch, np.resize([1.0, -1.0], len(batch.rewards)))
    finished: list[float] = []
    deadline = time.monotonic() + seconds

    async def keep_sampling(i: int) -> None:
        while time.monotonic() < deadline:
            await loop.workers.rollout_group(prompts[i % len(prompts)], purpose)
            finished.append(time.monotonic())

    async def keep_training() -> list[float]:
        times = []
        while time.monotonic() < deadline:
            started = time.monotonic()
            await learners.start_step(batch, epochs)
            old, ref = await learners.compute(lambda learner: learner.logprobs())
            await loop.engines.update_learners(PolicyTargets(advantages, old, ref))
            times.append(time.monotonic() - started)
        return times

    samplers = [asyncio.ensure_future(keep_sampling(i)) for i in range(3 * groups_per_step)]
    times = await keep_training()
    half = [t for t in finished if t > deadline - seconds / 2]  # after the first responses, when lengths have mixed
    rate = (len([t for t in half if t <= deadline])) / (seconds / 2)
    await asyncio.gather(*samplers)
    transfers = []
    for _ in range(3):
        started = time.monotonic()
        await loop.publish(0)
        transfers.append(time.monotonic() - started)
    return {
        "sampling_s": groups_per_step / rate,
        "training_s": statistics.median(times[1:] or times),
        "transfer_s": min(transfers),
    }


async def token_seconds(loop: Any, running: int) -> tuple[float, float]:
    """Seconds of a token of each sequence, with about `running` of them, and the mean number that ran."""
    from rlhf.sampling.requests import SamplingSettings

    prompt = loop.tickets.stream.take(1)[0]
    settings = SamplingSettings(1.0, 1)
    await loop.engines.choice.generate(prompt.token_ids, settings, samples=running)
    started = time.monotonic()
    completions = await loop.engines.choice.generate(prompt.token_ids, SamplingSettings(1.0, 64), samples=running)
    lengths = sorted(len(completion.token_ids) for completion in completions)
    seconds = time.monotonic() - started
    # sequences end on the way: the mean number that ran over the longest one's tokens
    return seconds / lengths[-1], sum(lengths) / lengths[-1]


async def prefill_token_seconds(loop: Any) -> float:
    """Seconds of a prompt's token, 32 prompts of 64 tokens at once."""
    from rlhf.sampling.requests import SamplingSettings

    rng = np.random.default_rng(0)
    best = float("inf")
    for _ in range(3):
        prompts = [rng.integers(0, 256, 64).astype(np.int32) for _ in range(32)]
        started = time.monotonic()
        settings = SamplingSettings(1.0, 1)
        await asyncio.gather(*(loop.engines.choice.generate(prompt, settings) for prompt in prompts))
        best = min(best, time.monotonic() - started)
    return best / (32 * 64)


def measure(case: Case) -> Row:
    """One run: its flat-out phase if asked for, then steps."""
    from rlhf import grpo
    from rlhf.run.rollout_loop import rollout_loop
    from rlhf.run.run import Run

    if case["device"] == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"

    async def go() -> Row:
        result: Row = {}
        run = Run(run_config(case, case["lag"]), resume=False)
        async with rollout_loop(run) as loop:
            if case["device"] == "cpu":
                pin_processes()
            if case["flat_out_s"]:
                result |= await flat_out(run, loop, case["flat_out_s"])
                points = [await token_seconds(loop, n) for n in (8, SLOTS)]
                result["decode"] = points
                result["prefill_token_s"] = await prefill_token_seconds(loop)
            for step in range(case["steps"]):
                await grpo.train_step(run, loop, step)
        lines = [json.loads(line) for line in (Path(run.config.run.dir) / "metrics.jsonl").read_text().splitlines()]
        rows = [line for line in lines if "time/step" in line][case["first"] :]
        keys = ("time/step", "time/update", "time/logprobs", "time/transfer", "time/canary", "time/engine_idle",
                "time/learner_idle", "rollout/lag/max", "rollout/response_length/mean")  # fmt: skip
        result["steps"] = [{key: row[key] for key in keys if key in row} for row in rows]
        result["stale"] = rows[-1]["account/stale"]
        result["lengths"] = recorded_lengths(Path(run.config.run.dir) / "rollouts")
        return result

    return asyncio.run(go())


def recorded_lengths(folder: Path) -> list[list[int]]:
    """Tokens of every response that was trained on, group by group."""
    lengths = []
    for file in sorted(folder.glob("*.jsonl")):
        lengths += [json.loads(line)["response_tokens"] for line in file.read_text().splitlines()]
    return [lengths[start : start + SAMPLES] for start in range(0, len(lengths), SAMPLES)]


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    if options.device == "cuda" and models.gpus() < 2:
        why = f"needs 2 GPUs, one for the engine and one for the learner; here are {models.gpus()}"
        return harness.not_measured("asynchronous", "asynchronous against synchronous training", why, options)
    steps, first, prompts, flat = (3, 1, 4, 6.0) if options.quick else (16, 4, 16, 60.0)
    base = {"function": "measure", "device": options.device, "steps": steps, "first": first, "prompts": prompts}
    asynchronous = harness.fresh("benchmarks.asynchronous", {**base, "lag": 2, "flat_out_s": flat})
    synchronous = harness.fresh("benchmarks.asynchronous", {**base, "lag": 0, "flat_out_s": 0.0})
    bound = max(asynchronous["sampling_s"], asynchronous["training_s"]) + asynchronous["transfer_s"]
    rows: list[Row] = []
    runs = []
    for name, lag, result in (("synchronous", 0, synchronous), ("asynchronous", 2, asynchronous)):
        times = [step["time/step"] for step in result["steps"]]
        step_s = statistics.mean(times)
        phases = {
            key: statistics.mean(step.get(f"time/{key}", 0.0) for step in result["steps"])
            for key in ("update", "logprobs", "transfer", "canary")
        }
        rows.append({
            "run": name, "lag": lag, "step s": step_s, "bound s": bound, "above the bound": step_s / bound - 1,
            "x synchronous": step_s / rows[0]["step s"] if rows else 1.0, "stale": result["stale"],
            "engine idle s": statistics.mean(step["time/engine_idle"] for step in result["steps"]),
            "learner idle s": statistics.mean(step["time/learner_idle"] for step in result["steps"]),
        })  # fmt: skip
        runs.append({
            "name": name, "lengths": result["lengths"], "step_seconds": times,
            "system": {"max_policy_lag": lag, "training_s": phases["update"] + phases["logprobs"],
                       "transfer_s": phases["transfer"] + phases["canary"]},
        })  # fmt: skip
    (few_s, few), (many_s, many) = asynchronous["decode"]
    slope = max(0.0, (many_s - few_s) / (many - few))
    system = {
        "engines": 1, "slots": SLOTS, "base_s": few_s - slope * few, "sequence_s": slope,
        "request_s": PROMPT_TOKENS * asynchronous["prefill_token_s"] / SAMPLES, "prompt_tokens": PROMPT_TOKENS,
        "prefill_token_s": asynchronous["prefill_token_s"], "groups_per_step": prompts,
    }  # fmt: skip
    measured = {key: asynchronous[key] for key in ("sampling_s", "training_s", "transfer_s")}
    harness.report(
        "asynchronous",
        f"{prompts} x {SAMPLES} responses of {MEAN_LENGTH} tokens on average",
        rows,
        options,
        [str(measured)],
        {"calibration": {"system": system, "runs": runs}},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
