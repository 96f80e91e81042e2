"""TRL's GRPOTrainer on the model, data and hyper-parameters of a config of ours, with its own generation.

What is the same: prompts and their chat template, the grader, group size, minibatches, clipping, advantages, loss
aggregation, AdamW, learning rate and schedule, gradient clipping. What cannot be: the order of the prompts and the
noise. TRL pads, generates with transformers' `generate` (no vLLM on CPU), and holds both in one process.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

# How the quickstart's model writes a call, for TRL's parser.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}  # fmt: skip


def train_with_trl(
    config: Any, *, steps: int, folder: Path, evaluate_every: int | None = None, stop_at: float = float("inf"),
    environment: Any = None, function: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train for `steps` of our training steps, or until an evaluation finds a sampled accuracy of `stop_at`.

    Args:
        environment: a class with tools; its attribute `calls` is counted.
        function: the reward, in place of the config's.

    Returns:
        `step_seconds` of each step, evaluation not counted; `evaluations`: [seconds so far, sampled accuracy]; with an
        environment `calls` and `reward`, the mean over all rollouts.
    """
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlhf.rewards.scorer import Scorer

    transformers.logging.set_verbosity_error()
    learner, rollout, optimizer = config.learner, config.rollout, config.learner.optimizer
    updates = learner.minibatches_per_epoch
    dtype = getattr(torch, config.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    train, test = (_rows(getattr(config.data, which)) for which in ("train", "eval"))
    scorer = Scorer(config.reward)

    def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        if config.reward.parts[0].name == "length":
            return [1.0 - len(ids) / rollout.max_response_tokens for ids in completion_ids]
        texts = [completion[0]["content"] for completion in completions]
        return [grade.value or 0.0 for grade in scorer.graded_batch(scorer.submit_batch(texts, answer))]

    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=config.cluster.device == "cpu", bf16=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=config.run.seed, max_steps=steps * updates,
        per_device_train_batch_size=config.rollouts_per_step // updates, steps_per_generation=updates,
        gradient_accumulation_steps=1, num_generations=rollout.samples_per_prompt, gradient_checkpointing=False,
        max_completion_length=rollout.max_response_tokens, temperature=rollout.temperature, beta=0.0, num_iterations=1,
        epsilon=config.algo.clip_low, epsilon_high=config.algo.clip_high, loss_type="dapo", scale_rewards="group",
        learning_rate=optimizer.lr, adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps, weight_decay=optimizer.weight_decay, max_grad_norm=learner.max_grad_norm or 0.0,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": learner.schedule.min_lr},
        warmup_steps=learner.schedule.warmup_steps, shuffle_dataset=True,
    )  # fmt: skip
    result: dict[str, Any] = {"step_seconds": [], "evaluations": []}
    calls: list[int] = []
    rewards: list[float] = []

    def counted(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        values: list[float] = function(completions=completions, **columns)
        calls.extend(each.calls for each in environments)
        rewards.extend(values)
        return values

    acting: dict[str, Any] = {}
    if environment is not None:
        tokenizer.response_template = RESPONSE_TEMPLATE
        arguments.max_completion_length = rollout.longest
        acting = {"environment_factory": environment}
        reward = counted

    class Watch(TrainerCallback):
        """Times whole training steps, and evaluates with the clock stopped."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.monotonic()

        def on_step_end(self, _arguments: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step % updates:
                return
            result["step_seconds"].append(time.monotonic() - self.started)
            if evaluate_every and (state.global_step // updates) % evaluate_every == 0:
                accuracy = sampled_accuracy(model, tokenizer, test, scorer, config)
                result["evaluations"].append([sum(result["step_seconds"]), accuracy])
                control.should_training_stop = accuracy >= stop_at
            self.started = time.monotonic()

    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(train),
        processing_class=tokenizer, callbacks=[Watch()], **acting,
    )  # fmt: skip
    trainer.train()
    scorer.close()
    if environment is not None:
        result |= {"calls": sum(calls) / len(calls), "reward": sum(rewards) / len(rewards)}
    return result


def _rows(sources: Any) -> list[dict[str, Any]]:
    path = sources if isinstance(sources, str) else sources[0].path
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{"prompt": [{"role": "user", "content": line["question"]}], "answer": line["answer"]} for line in lines]


def sampled_accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]], scorer: Any, config: Any) -> float:
    """Share of right answers, one sample a row, as rlhf.run.evaluation samples them."""
    import torch

    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=config.rollout.max_response_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    model.train(training)
    answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    graded = scorer.graded_batch(scorer.submit_batch(answers, [row["answer"] for row in rows]))
    return sum(grade.value == 1.0 for grade in graded) / len(rows)
