"""Study: an adapter that the engine serves beside its weights, against one that is merged into bfloat16 weights.

    python -m benchmarks.studies.lora --output runs/studies/lora [--workers 2] [--seeds 0,1,2] [--quick]

Two ways to give an engine what the learner has trained: the adapter itself, as this trainer does, so that it computes
W x + s B A x; or its sum with the weights, W + s B A, rounded to bfloat16, as others do at every step. Three learning
rates, three seeds, 40 steps of the quickstart's task in bfloat16 with adapters of rank 16, in the manner of the study
of the KL (`kl.py`): transformers samples in place of an engine, in the same type and with the same weights.

By step: the KL of what samples to the learner at the sampled tokens, and the accuracy of what is sampled. There is no
importance correction, so that the difference shows as it is. All runs begin with the same A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.studies import in_process, kl, report
from rlhf.algo.lora import AdaptedLinear, adapt, linear_names
from rlhf.config.grpo import GRPOConfig
from rlhf.types import StepBatch

SERVED, MERGED = "served", "merged"
LEARNING_RATES = (1e-4, 5e-4, 3e-3)
LORA = {"rank": 16, "alpha": 32}
LAST = 5  # steps over which the columns of the table are means


@dataclass(frozen=True)
class Run:
    """One run; `lr` is that of its trainer already."""

    engine: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.lr:g}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        return base.model_copy(update={"run": base.run.model_copy(update={"seed": self.seed})})


def study_config(data: Path, lr: float, *, steps: int, prompts: int) -> GRPOConfig:
    """That of the study of the KL, without a KL in the loss, in bfloat16 and with adapters."""
    base = kl.study_config(data, steps=steps, prompts=prompts)
    values = base.model_dump()
    values["model"] |= {"dtype": "bfloat16", "lora": LORA}
    values["algo"] |= {"kl_coef": 0.0}  # `log_kl` keeps the reference
    values["learner"]["optimizer"] |= {"lr": lr}
    return GRPOConfig.model_validate(values)


class Trainer(kl.Trainer):
    """What samples has the layers of the learner; its adapter is on, or merged and off."""

    def __init__(self, config: GRPOConfig) -> None:
        super().__init__(config)
        lora = config.model.lora
        assert lora is not None
        names = linear_names(self.engine, targets=lora.targets, exclude=lora.exclude)
        adapt(self.engine, names, rank=lora.rank, scale=lora.scale)
        layers: list[AdaptedLinear] = [self.engine.get_submodule(name) for name in names]
        self._base = [(layer, layer.weight.detach().clone()) for layer in layers]

    @torch.no_grad()
    def publish(self, run: Any) -> None:
        missing = self.engine.load_state_dict(dict(self.learner.published), strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        for layer, weight in self._base:
            layer.adapts = run.engine == SERVED
            layer.weight.copy_(weight if layer.adapts else merged(layer, weight))

    def compare(self, batch: StepBatch, old: np.ndarray | None) -> report.Row:
        assert old is not None, "two minibatches need them"
        mask = batch.tokens.response_mask
        return {"engine_kl": float((batch.tokens.rollout_logprobs - old)[mask].mean(dtype=np.float64))}


def merged(layer: AdaptedLinear, weight: torch.Tensor) -> torch.Tensor:
    """W + s B A, computed in float32 and rounded once to the type of W."""
    change = layer.scale * (layer.lora_B.float() @ layer.lora_A.float())
    return (weight.float() + change).to(weight.dtype)


def table(records: Sequence[dict[str, Any]]) -> list[report.Row]:
    """One row for each learning rate and kind: means over the last steps, and the range of the seeds."""

    def spread(kind: str, lr: float, key: str) -> str:
        chosen = [record for record in records if (record["engine"], record["lr"]) == (kind, lr)]
        values = [report.mean(row[key] for row in record["steps"][-LAST:]) for record in chosen]
        low, middle, high = (report.number(float(v)) for v in (min(values), np.median(values), max(values)))
        return f"{middle} ({low} to {high})"

    found = sorted({(record["lr"], record["engine"]) for record in records}, key=lambda key: (key[0], key[1] == MERGED))
    return [
        {
            "learning rate": f"{lr:g}",
            "the engine's adapter": kind,
            "KL of engine and learner, nats per token": spread(kind, lr, "engine_kl"),
            "KL of learner and start": spread(kind, lr, "k3"),
            "accuracy": spread(kind, lr, "reward"),
        }
        for lr, kind in found
    ]


def draw(records: Sequence[dict[str, Any]], path: Path, results: report.Row) -> None:
    """By step, one column for each learning rate: accuracy above, KL of engine and learner below."""
    rates = sorted({record["lr"] for record in records})
    drawn, axes = report.figure(2, len(rates), width=8, height=4, sharex=True, sharey="row")
    for column, lr in enumerate(rates):
        for kind, colour in ((SERVED, "C0"), (MERGED, "C3")):
            runs = [record["steps"] for record in records if (record["engine"], record["lr"]) == (kind, lr)]
            if not runs:
                continue
            for row, key in enumerate(("reward", "engine_kl")):
                by_step = np.array([[step[key] for step in steps] for steps in runs])
                steps = np.arange(1, by_step.shape[1] + 1)
                axes[row][column].plot(steps, np.median(by_step, 0), colour, label=kind)
                axes[row][column].fill_between(steps, by_step.min(0), by_step.max(0), color=colour, alpha=0.15, lw=0)
        axes[0][column].set_title(f"lr {lr:g}")
        axes[1][column].set_xlabel("step")
    axes[0][0].set_ylabel("accuracy of what is sampled")
    axes[1][0].set_ylabel("KL of engine and learner, nats")
    axes[0][0].legend()
    report.save(drawn, path, results)


def study_results(records: Sequence[dict[str, Any]]) -> report.Row:
    """Everything that the JSON of the picture has."""
    seeds = sorted({record["seed"] for record in records})
    lines = [
        {key: record[key] for key in ("engine", "lr", "seed", "seconds", "commit")}
        | {key: [step[key] for step in record["steps"]] for key in ("reward", "engine_kl", "k3")}
        for record in records
    ]
    command = f"python -m benchmarks.studies.lora --seeds {','.join(map(str, seeds))}"
    return report.results(command, records, seeds=seeds, tables={"runs": table(records)}, runs=lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "lora", "An adapter served beside the weights, and merged into them.", trains=True, scans=True
    )
    options = report.parse(parser, arguments)
    size = {"steps": kl.STEPS, "prompts": kl.PROMPTS}
    if options.quick:
        options.seeds, size = options.seeds[:1], {"steps": kl.QUICK_STEPS, "prompts": kl.QUICK_PROMPTS}
    folder, data = options.output / "runs", report.ensure_data(options.data)
    runs = [Run(kind, lr, seed) for lr in LEARNING_RATES for seed in options.seeds for kind in (SERVED, MERGED)]
    for lr in LEARNING_RATES:
        own = [run for run in runs if run.lr == lr]
        config = study_config(data, lr, **size)
        in_process.scan(config, own, folder, workers=options.workers, kind=Trainer)
    records = list(in_process.read(config, runs, folder))
    if not records:
        raise ValueError(f"{folder}: there are no runs yet. Take --workers 1 or more.")
    results = study_results(records)
    report.write_table(options.output / "lora", results["tables"]["runs"])
    print(report.markdown(results["tables"]["runs"]))
    draw(records, options.output / "lora.png", results)


if __name__ == "__main__":
    main()
