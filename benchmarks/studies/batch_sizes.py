"""Study: one learning curve for any number of learners and microbatches, and what it costs not to have that.

    python -m benchmarks.studies.batch_sizes [--workers 2] [--seeds 0,1,2,3,4] [--quick]

Curves: a learner is trained on the quickstart's task, and its rollouts are kept. Then the same rollouts are trained on
by the learner's own ranks, DeepSpeed worlds of one and two, each with three values of
`learner.max_tokens_per_microbatch`. All of them must draw the curves of the first run: what is left is the order in
which float32 numbers are added. Without engines, because sampled tokens would differ after the first rounding that
decides one. The rollouts are sampled by transformers from the learner's own model.

Outcomes: whole runs that sample for themselves (`outcomes.py`), ours with 1 and 2 learners, and with batch sizes that
are wrong by a factor of 2, 4 or 8 as they are elsewhere:

    sizes per device      each process samples as many as one did, for minibatches that grow alike; the run ends when it
                          has seen as many rollouts, so it takes fewer steps and updates
    accumulation count    microbatches are cut to a half, a fourth or an eighth, to fit into memory, and an update
                          accumulates as many of them as before, so it consumes less, and a step takes more updates

Each seed and run ends as one file below `--output`; what is there is not made again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import batch_outcomes, outcomes, report, runs
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion
from rlhf.types import Prompt, RolloutGroup, ScoredRollout, VersionSpan

STEPS = 20
LEARNERS = (1, 2)
BUDGETS = (16384, 512, 128)  # tokens of a microbatch
METRICS = {
    "policy/loss": "loss",
    "learner/grad_norm": "gradient norm",
    "policy/kl_k3": "KL to the start, nats per token",
}


def config_of(data: Path, *, steps: int, seed: int, learners: int, budget: int) -> GRPOConfig:
    overrides = [
        *report.RECORDED_WITH,
        f"run.steps={steps}", f"run.seed={seed}", f"model.path={data}/model", f"data.train={data}/train.jsonl",
        "data.eval=null", "evaluation.every=null", "rollout.prompts_per_step=16", "algo.log_kl=true",
        "algo.importance_correction=none",  # the learner's own model samples
        f"cluster.learners={learners}", f"learner.max_tokens_per_microbatch={budget}",
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)


# --- on a rank ---


def recording_rank(
    rank: int, processes: int, port: int, config: GRPOConfig
) -> tuple[list[list[RolloutGroup]], list[Any]]:
    """Sample and train; the rollouts of every training step, and what was logged of it."""
    import torch

    from rlhf.data.load import load_prompts
    from rlhf.data.model_files import load_tokenizer
    from rlhf.data.order import PromptStream

    learner = make_learner(config, rank, processes, port)
    tokenizer = load_tokenizer(config.model)
    prompts = PromptStream(load_prompts(config.data, "train", tokenizer).prompts, seed=config.run.seed)
    torch.manual_seed(config.run.seed)
    record, logged = [], []
    for step in range(config.run.steps):
        taken = prompts.take(config.rollout.prompts_per_step)
        record.append(sample_groups(learner.transformer, taken, config, tokenizer))
        logged.append(outcomes.train_step(learner, config, record[-1], step))
    learner.close()
    return record, logged


def training_rank(
    rank: int, processes: int, port: int, configs: Sequence[GRPOConfig], record: Sequence[Sequence[RolloutGroup]]
) -> list[list[Any]]:
    """Train on the record with each config; by config and training step, what was logged."""
    logged = []
    for config in configs:
        learner = make_learner(config, rank, processes, port)
        logged.append([outcomes.train_step(learner, config, groups, step) for step, groups in enumerate(record)])
    learner.close()
    return logged


def make_learner(config: GRPOConfig, rank: int, processes: int, port: int) -> Any:
    from rlhf.learner.policy import Learner
    from rlhf.types import World

    return Learner(config, World(rank, processes, rank, "127.0.0.1", port, threads=1))


def sample_groups(
    transformer: Any, prompts: Sequence[Prompt], config: GRPOConfig, tokenizer: Any
) -> list[RolloutGroup]:
    """Graded responses to prompts of equal length, as the quickstart's are."""
    import torch

    from rlhf.learner.packed_attention import PACKED

    samples, eos = config.rollout.samples_per_prompt, tokenizer.eos_token_id
    ids = torch.from_numpy(np.repeat([prompt.token_ids for prompt in prompts], samples, 0)).long()
    transformer.set_attn_implementation("sdpa")
    with torch.no_grad():
        generated = transformer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=config.rollout.max_response_tokens,
            do_sample=True, top_k=0, top_p=1.0, temperature=config.rollout.temperature, eos_token_id=eos,
            pad_token_id=eos,
        )  # fmt: skip
    transformer.set_attn_implementation(PACKED)
    responses = generated[:, ids.shape[1] :].numpy()
    return [
        RolloutGroup(prompt, tuple(graded(prompt, i, row, tokenizer) for i, row in enumerate(of_prompt)))
        for prompt, of_prompt in zip(prompts, np.split(responses, len(prompts)), strict=True)
    ]


def graded(prompt: Prompt, sample: int, response: np.ndarray, tokenizer: Any) -> ScoredRollout:
    """One response, up to its first end token, with the quickstart's reward."""
    from rlhf.config.reward import MathOptions
    from rlhf.rewards.math import math_reward

    ends = np.flatnonzero(response == tokenizer.eos_token_id)
    response = response[: ends[0] + 1] if len(ends) else response
    text = tokenizer.decode(response.tolist(), skip_special_tokens=True)
    grade = math_reward(text, prompt.answer, MathOptions())
    reason, spans = "stop" if len(ends) else "length", (VersionSpan(0, len(response), 0),)
    rollout = to_rollout(prompt, sample, Completion(response, np.zeros(len(response)), reason, spans))
    return ScoredRollout(rollout, text, "", grade.value, {"math": grade.value}, "ok")


# --- curves ---


def curve_of(by_rank: Sequence[Sequence[tuple[Any, int]]]) -> runs.Steps:
    """What the driver would log, from what each rank has logged of every training step."""
    from rlhf.log.reductions import mean_over_updates, merge_outcomes, to_values

    curve = []
    for step, ranks in enumerate(zip(*by_rank, strict=True), start=1):
        updates = [merge_outcomes(parts) for parts in zip(*(updates for updates, _ in ranks), strict=True)]
        microbatches = sum(count for _, count in ranks) / len(updates)
        curve.append(to_values(mean_over_updates(updates)) | {"step": step, "microbatches": microbatches})
    return curve


Curves = dict[tuple[int, int, int], runs.Steps]  # by seed, learners, budget


def train_seed(file: Path, data: Path, *, steps: int, seed: int) -> tuple[report.Row, Curves]:
    """The curve of the recorded run with its stamp, and those of all worlds that are trained on its rollouts.

    All of it is kept in `file`.
    """

    def config(learners: int, budget: int) -> GRPOConfig:
        return config_of(data, steps=steps, seed=seed, learners=learners, budget=budget)

    if not file.is_file():
        ((record, logged),) = runs.run_world(recording_rank, 1, config(1, BUDGETS[0]))
        worlds: list[tuple[int, int, runs.Steps]] = []
        for learners in LEARNERS:
            by_rank = runs.run_world(training_rank, learners, [config(learners, budget) for budget in BUDGETS], record)
            for budget, ranks in zip(BUDGETS, zip(*by_rank, strict=True), strict=True):
                worlds.append((learners, budget, curve_of(ranks)))
        report.write_json(file, {"recorded": curve_of([logged]), "worlds": worlds} | report.stamp())
    made = json.loads(file.read_text())
    return made, {(seed, learners, budget): curve for learners, budget, curve in made["worlds"]}


# --- table ---


def difference(curve: runs.Steps, recorded: runs.Steps, name: str) -> float:
    """The largest distance of two curves over all steps."""
    return max(abs(a[name] - b[name]) for a, b in zip(curve, recorded, strict=True))


def summarize(curves: Curves, recorded: dict[int, runs.Steps]) -> list[report.Row]:
    """A line for each number of learners and each budget, and what the recorded runs themselves span."""
    settings = dict.fromkeys((learners, budget) for _, learners, budget in curves)
    rows = []
    for learners, budget in settings:
        of_seeds = {seed: curves[seed, learners, budget] for seed in recorded}
        counts = [step["microbatches"] for curve in of_seeds.values() for step in curve]
        rows.append(
            {"learners": learners, "max_tokens_per_microbatch": budget, "microbatches per update": report.mean(counts)}
            | {
                f"{label}: largest difference": max(difference(of_seeds[s], recorded[s], name) for s in recorded)
                for name, label in METRICS.items()
            }
        )
    values = {name: [step[name] for steps in recorded.values() for step in steps] for name in METRICS}
    spans = {
        f"{label}: largest difference": f"{report.number(min(values[name]))} to {report.number(max(values[name]))}"
        for name, label in METRICS.items()
    }
    everything = {
        "learners": "recorded",
        "max_tokens_per_microbatch": "lowest to highest",
        "microbatches per update": "",
    }
    return [*rows, everything | spans]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "batch_sizes", "One curve for any learners and microbatches.", trains=True, scans=True, seeds=range(5)
    )
    options = report.parse(parser, arguments)
    began = time.monotonic()
    data = report.ensure_data(options.data)
    seeds, steps = (options.seeds[:1], 6) if options.quick else (options.seeds, STEPS)
    recorded: dict[int, runs.Steps] = {}
    curves: Curves = {}
    stamps: list[report.Row] = []
    for seed in seeds:
        file = options.output / f"seed-{seed}.json"
        if not options.workers and not file.is_file():
            continue
        made, of_seed = train_seed(file, data, steps=steps, seed=seed)
        recorded[seed] = made["recorded"]
        curves |= of_seed
        stamps.append(made)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s so far", flush=True)
    base = (outcomes.quick_config if options.quick else outcomes.study_config)(data)
    records = batch_outcomes.scan(
        base, options.output / "runs", seeds=seeds, quick=options.quick, workers=options.workers
    )
    tables = {"curves": summarize(curves, recorded), "outcomes": batch_outcomes.summarize(records, base)}
    for name, rows in tables.items():
        report.write_table(options.output / name, rows)
        print(report.markdown(rows))
    command = "python -m benchmarks.studies.batch_sizes"
    results = report.results(command, [*records, *stamps], tables=tables, runs=outcomes.by_run(records))
    report.save_results(results, options.output / "batch_sizes.json")


if __name__ == "__main__":
    main()
