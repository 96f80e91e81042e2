"""Supervised fine-tuning: ours, packed, against TRL's SFTTrainer, on the same rows in the same order.

    python -m benchmarks.sft [--device cuda] [--quick]

A row is a question and the work of 1 to 16 sums, so that lengths differ. Both have the model, rows, template, trained
tokens, minibatches, AdamW, learning rate and gradient clipping; ours is one learner without Ray. `loss` is the largest
difference of the losses of the steps from ours: in float32, on CPU, the two train the same model; on GPU TRL's weights
are bfloat16 and ours are float32 besides. The first steps pay for compilation and caches and are not timed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

OURS, TRL, PADDING_FREE = "rlhf", "TRL SFTTrainer", "TRL SFTTrainer, padding_free"
LR, UNTIMED = 1e-3, 2


def write_rows(file: Path, count: int) -> None:
    from rlhf.quickstart import make_problems

    rng, problems = random.Random(0), make_problems(count, 0)
    with file.open("w") as lines:
        for problem in problems:
            work = "\n".join(other.worked() for other in rng.sample(problems, rng.randint(1, min(16, count))))
            prompt = [{"role": "user", "content": problem.question}]
            lines.write(json.dumps({"prompt": prompt, "completion": [{"role": "assistant", "content": work}]}) + "\n")


def config_of(case: Case, folder: Path) -> Any:
    """A config of rlhf.sft with rows for the steps of the case, none of them twice."""
    from rlhf.config.supervised import SFTConfig

    rows = case["steps"] * case["per_update"]
    write_rows(folder / "rows.jsonl", rows)
    dtype = "float32" if case["device"] == "cpu" else "bfloat16"
    values = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(models.random_model(case["size"], dtype=dtype)), "dtype": dtype},
        "data": {"train": str(folder / "rows.jsonl")},
        "learner": {
            "sequences_per_update": case["per_update"], "max_tokens_per_microbatch": 16384, "optimizer": {"lr": LR},
            "zero_stage": 0 if dtype == "float32" else 2,
        },
        "cluster": {"device": case["device"]},
    }  # fmt: skip
    return SFTConfig.model_validate_json(json.dumps(values)).with_steps(rows)


def measure(case: Case) -> Row:
    """`losses` and `seconds` of each step, and `tokens` of all."""
    from rlhf.data.conversations import SFTEncoder, load_examples
    from rlhf.data.model_files import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, Path(folder))
        tokenizer = load_tokenizer(config.model)
        tokens = load_examples(config.data, "train", SFTEncoder(tokenizer, None)).tokens
        train = ours if case["variant"] == OURS else trl
        return {**train(config, tokens, tokenizer, case), "tokens": len(tokens.token_ids)}


def ours(config: Any, tokens: Any, _tokenizer: Any, case: Case) -> Row:
    import torch

    from rlhf.learner.port import free_port
    from rlhf.learner.supervised import SFTTrainer
    from rlhf.types import World

    trainer = SFTTrainer(config, World(0, 1, 0, "127.0.0.1", free_port(), torch.get_num_threads()))
    trainer.hold(tokens, None)
    losses, seconds = [], []
    for step in range(config.steps):
        started = time.perf_counter()
        losses.append(trainer.train(step).metrics["train/loss"].value())
        harness.synchronize(case["device"])
        seconds.append(time.perf_counter() - started)
    return {"losses": losses, "seconds": seconds}


def trl(config: Any, _tokens: Any, tokenizer: Any, case: Case) -> Row:
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from rlhf.algo.packing import draw_minibatches

    transformers.logging.set_verbosity_error()
    rows = [json.loads(line) for line in Path(config.data.train[0].path).read_text().splitlines()]
    drawn = draw_minibatches(len(rows), minibatches=config.steps, seed=config.run.seed, step=0, epoch=0)
    optimizer, seconds = config.learner.optimizer, []

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            harness.synchronize(case["device"])
            seconds.append(time.perf_counter() - self.started)

    arguments = SFTConfig(
        output_dir=config.run.dir, use_cpu=case["device"] == "cpu", bf16=False, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True, max_steps=config.steps, max_length=None, gradient_checkpointing=False,
        per_device_train_batch_size=case["per_update"], train_sampling_strategy="sequential",
        padding_free=case["variant"] == PADDING_FREE, learning_rate=optimizer.lr, lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1], adam_epsilon=optimizer.eps, weight_decay=0.0,
        max_grad_norm=config.learner.max_grad_norm,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype)),
        args=arguments, train_dataset=Dataset.from_list([rows[i] for indices in drawn for i in indices]),
        processing_class=tokenizer, callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "seconds": seconds}


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    cuda = options.device == "cuda"
    steps, per_update, rounds = (4, 8, 1) if options.quick else (6, 32, 2)
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]} if cuda else {}
    variants = (OURS, TRL, PADDING_FREE) if cuda else (OURS, TRL)  # without padding TRL needs flash attention
    results: dict[str, list[Row]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, of_variant in results.items():
            case = {"function": "measure", "variant": variant, "size": "0.5b" if cuda else "10m", "steps": steps,
                    "per_update": per_update, "device": options.device}  # fmt: skip
            of_variant.append(harness.fresh("benchmarks.sft", case, timeout_s=3600, environment=one_gpu))
    median = {
        variant: statistics.median(s for row in of_variant for s in row["seconds"][UNTIMED:])
        for variant, of_variant in results.items()
    }
    first = {variant: of_variant[0] for variant, of_variant in results.items()}
    tokens = first[OURS]["tokens"] / steps
    rows: list[Row] = [
        {"variant": variant, "step s": median[variant], "tokens/s": tokens / median[variant],
         "x ours": median[variant] / median[OURS],
         "loss": max(abs(a - b) for a, b in zip(row["losses"], first[OURS]["losses"], strict=True))}
        for variant, row in first.items()
    ]  # fmt: skip
    harness.report("sft", f"{steps} steps of {per_update} rows, {tokens:.0f} tokens a step", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
