"""Study: the first PPO updates with Adam as PyTorch and as TensorFlow write it.

    python -m benchmarks.studies.adam --output runs/studies/adam

Both variants start from the same policy and take the same batch, four epochs of one minibatch, eps 1e-5, as the
original RLHF work does. They differ by a per-step epsilon (rlhf/algo/optim.py): at the first update TensorFlow's is
eps / sqrt(1 - 0.999) = 32 eps. A parameter with gradient g then moves by lr g / (g + eps_t), so the variants differ
only where gradients are not large compared with eps_t. Two policies:

    warm    the quickstart's model, 0.7 M parameters, which has learned to imitate
    large   0.12 G parameters in the shape of GPT-2 small, random weights

A larger eps has the effect of smaller gradients: a scan of eps takes the warm policy from no difference between the
variants to a factor of 200. Everything runs in this process on the learner's own model, loss and
optimizer; responses are sampled by transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.studies import report
from rlhf.algo.kl import kl_per_token
from rlhf.algo.optim import adam_epsilon, set_step
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.reward import MathOptions
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.learner.update import policy_microbatch
from rlhf.rewards.answers.extract import gold_answer
from rlhf.rewards.math import math_reward
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.step.response_advantages import step_advantages
from rlhf.types import (
    Minibatch,
    PolicyTargets,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepBatch,
    VersionSpan,
)

ADAM_VARIANTS = ("torch", "tensorflow")
BETAS = (0.9, 0.999)  # of both frameworks' Adam
EPS = 1e-5  # of the original RLHF code
UPDATES = 4
CLIP = 0.2
# huggingface.co/blog/the_n_implementation_details_of_rlhf_with_ppo: the first PPO update of GPT-2 (124 M), lr 1e-5,
# means over its four epochs
PUBLISHED = {
    "torch": {"approximate KL": 0.002367, "clip fraction": 0.0202, "ratio variance": 0.00537},
    "tensorflow": {"approximate KL": 0.000375, "clip fraction": 0.0052, "ratio variance": 0.00079},
}
SCAN = tuple(10.0**power for power in range(-9, -1))
KINDS = ("LayerNorm", "embedding", "attention", "MLP")
COLOURS = {"torch": "tab:red", "tensorflow": "tab:blue"}


@dataclass(frozen=True)
class Case:
    """A policy, the batch that it sampled, and its log-probs [N] there: what every update starts from."""

    name: str
    model: PolicyModel
    config: GRPOConfig
    batch: StepBatch
    minibatch: Minibatch
    advantages: np.ndarray
    old: np.ndarray
    lr: float

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())


# --- policies and their batches ---


def study_config(model: Path | str, data: Path | str, *, response_tokens: int) -> GRPOConfig:
    """One PPO epoch of one minibatch after another; advantages are the rewards, whitened over the batch."""
    overrides = [
        f"model.path={model}", f"data.train={data}", "data.eval=null", "learner.minibatches_per_epoch=1",
        f"rollout.max_response_tokens={response_tokens}", "algo.advantage=reinforce_pp", f"algo.clip_low={CLIP}",
        f"algo.clip_high={CLIP}", f"learner.epochs_per_step={UPDATES}", "learner.max_tokens_per_microbatch=4096",
        "algo.importance_correction=none",  # the learner's own model samples
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)


def sample(model: PolicyModel, prompts: Sequence[np.ndarray], *, tokens: int, eos: int | None) -> list[Rollout]:
    """One response to each prompt, by transformers; prompts are padded to the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        attention[row, longest - len(prompt) :] = 1
    model.transformer.set_attn_implementation("sdpa")
    with torch.no_grad():
        generated = model.transformer.generate(
            ids, attention_mask=attention, max_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0,
            temperature=model.temperature, eos_token_id=eos, pad_token_id=eos or 0,
        )  # fmt: skip
    model.transformer.set_attn_implementation(PACKED)
    rollouts = []
    for row, prompt in enumerate(prompts):
        response = generated[row, longest:].numpy()
        ends = np.flatnonzero(response == eos) if eos is not None else []
        response = response[: ends[0] + 1] if len(ends) else response
        mask = np.arange(len(prompt) + len(response)) >= len(prompt)
        together = np.concatenate([prompt, response]).astype(np.int32)
        span = (VersionSpan(len(prompt), len(together), 0),)
        rollouts.append(Rollout(str(row), 0, 0, together, mask, np.zeros(len(mask), np.float32), span, "stop"))
    return rollouts


def make_case(
    name: str, model: PolicyModel, config: GRPOConfig, rollouts: Sequence[Rollout], rewards: Sequence[float], lr: float
) -> Case:
    """Pack the batch and compute the log-probs of the policy that sampled it."""
    prompt = Prompt("p", 0, np.zeros(1, np.int32), (), "", "p")
    scored = [ScoredRollout(r, "", "", reward, {}, "ok") for r, reward in zip(rollouts, rewards, strict=True)]
    batch = make_batch([RolloutGroup(prompt, (sample,)) for sample in scored], mask_truncated=False)
    (minibatch,) = plan_epochs(batch, config, step=0)[0]
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    case = Case(name, model, config, batch, minibatch, advantages, np.zeros(0, np.float32), lr)
    return replace(case, old=logprobs_of(case))


def warm_case(data: Path, *, rollouts: int, seed: int, lr: float) -> Case:
    """The quickstart's policy on its own task, graded as in training."""
    config = study_config(data / "model", data / "train.jsonl", response_tokens=24)
    tokenizer = load_tokenizer(config.model)
    model = load_policy(
        str(data / "model"), dtype="float32", temperature=1.0, gradient_checkpointing=False, trust_remote_code=False
    )
    loaded = load_prompts(config.data, "train", tokenizer, gold_answer)
    prompts = next(iter(loaded.prompts.values()))[:rollouts]
    torch.manual_seed(seed)
    sampled = sample(model, [p.token_ids for p in prompts], tokens=24, eos=tokenizer.eos_token_id)
    texts = [tokenizer.decode(r.token_ids[r.response_mask].tolist(), skip_special_tokens=True) for r in sampled]
    grades = [
        math_reward(text, prompt.answer, MathOptions(), lambda *_: None)
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    return make_case("warm", model, config, sampled, [grade.value or 0.0 for grade in grades], lr)


def large_case(data: Path, *, rollouts: int, seed: int, lr: float, shape: dict[str, int] | None = None) -> Case:
    """Random weights in the shape of GPT-2 small (12 layers of 768, vocabulary 50,257); the reward is arbitrary."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {
        "vocab_size": 50_257, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    } | (shape or {})  # fmt: skip
    torch.manual_seed(seed)
    transformer = AutoModelForCausalLM.from_config(
        Qwen2Config(**sizes, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=None),
        attn_implementation=PACKED, dtype=torch.float32,
    )  # fmt: skip
    config = study_config(data / "model", data / "train.jsonl", response_tokens=24)
    model = PolicyModel(transformer, temperature=1.0)
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(0, sizes["vocab_size"], 8).astype(np.int32) for _ in range(rollouts)]
    sampled = sample(model, prompts, tokens=24, eos=None)
    rewards = [float((r.token_ids[r.response_mask] % 2).mean()) for r in sampled]
    return make_case("large", model, config, sampled, rewards, lr)


# --- updates ---


@torch.no_grad()
def logprobs_of(case: Case) -> np.ndarray:
    """[N] log-probs of the policy as it is now."""
    tokens = case.batch.tokens
    column = np.zeros(len(tokens.token_ids), np.float32)
    for rows in case.minibatch.microbatches[0]:
        packed = DeviceTokens.of(tokens.take(rows), torch.device("cpu"))
        column[tokens.token_indices(rows)] = case.model(packed).logprobs.numpy()
    return column


def moved(case: Case) -> report.Row:
    """The distance of the policy from the one that sampled, over the tokens of the batch."""
    mask = case.batch.tokens.response_mask
    return distance(torch.from_numpy(logprobs_of(case)[mask]), torch.from_numpy(case.old[mask]))


def distance(logprobs: Tensor, old_logprobs: Tensor) -> report.Row:
    """The published measures: k2 of new against old, share of clipped ratios, variance of the ratio."""
    ratio = (logprobs.double() - old_logprobs.double()).exp()
    return {
        "approximate KL": float(kl_per_token(logprobs.double(), old_logprobs.double(), estimator="k2").mean()),
        "clip fraction": float(((ratio - 1).abs() > CLIP).double().mean()),
        "ratio variance": float(ratio.var(correction=0)),
    }


def backward(case: Case) -> None:
    """The gradient of the whole minibatch, as the learner computes it."""
    tokens = case.batch.tokens
    targets = PolicyTargets(broadcast_to_tokens(case.batch, case.advantages), case.old, None)
    for rows in case.minibatch.microbatches[0]:
        packed, own = DeviceTokens.of(tokens.take(rows), torch.device("cpu")), targets.take(tokens.token_indices(rows))
        loss, _ = policy_microbatch(case.model, packed, own, case.minibatch.denominators, case.config)
        loss.backward()


def updates(case: Case, variant: str, *, eps: float = EPS, count: int = UPDATES) -> list[report.Row]:
    """The distance after each update; the policy keeps the last update. Gradients are not clipped by norm."""
    optimizer = torch.optim.AdamW(
        case.model.parameters(), lr=case.lr, betas=BETAS, eps=eps, weight_decay=0.0, fused=True
    )
    rows = []
    for step in range(1, count + 1):
        optimizer.zero_grad()
        backward(case)
        set_step(optimizer, lr=case.lr, adam_step=step, variant=variant, eps=eps, betas=BETAS)
        optimizer.step()
        effective = adam_epsilon(step, variant=variant, eps=eps, betas=BETAS)
        rows.append({"policy": case.name, "variant": variant, "update": step, "eps_t": effective} | moved(case))
    case.model.zero_grad()
    return rows


def snapshot(case: Case) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in case.parameters}


@torch.no_grad()
def put_back(case: Case, state: dict[str, Tensor], kinds: Sequence[str] = KINDS) -> None:
    for name, parameter in case.parameters:
        if kind_of(name) in kinds:
            parameter.copy_(state[name])


def kind_of(parameter: str) -> str:
    """The kind of layer by a parameter's name; Qwen2's RMSNorms count as LayerNorm, the tied head as embedding."""
    if "norm" in parameter:
        return "LayerNorm"
    if "embed" in parameter or "lm_head" in parameter:
        return "embedding"
    return "attention" if "attn" in parameter else "MLP"


# --- measurements ---


def compare(case: Case, *, eps: float = EPS) -> tuple[list[report.Row], list[report.Row]]:
    """By step, and by kind of layer: what the updates of that kind alone do to the policy."""
    start = snapshot(case)
    gradients = gradient_sizes(case)
    steps, kinds = [], []
    for variant in ADAM_VARIANTS:
        steps += updates(case, variant, eps=eps)
        end = snapshot(case)
        first_eps = adam_epsilon(1, variant=variant, eps=eps, betas=BETAS)
        for kind in KINDS:
            put_back(case, start)
            put_back(case, end, [kind])
            sizes = gradients[kind]
            kinds.append(
                {
                    "policy": case.name,
                    "layers": kind,
                    "variant": variant,
                    "elements": len(sizes),
                    "gradient, median": float(sizes.median()),
                    "first step / lr, mean": float((sizes / (sizes + first_eps)).mean()),
                }
                | moved(case)
            )
        put_back(case, start)
    return steps, kinds


def gradient_sizes(case: Case) -> dict[str, Tensor]:
    """Absolute values of the first gradient's elements, by kind of layer."""
    case.model.zero_grad()
    backward(case)
    sizes = {
        kind: torch.cat([p.grad.abs().flatten() for name, p in case.parameters if kind_of(name) == kind])  # type: ignore[union-attr]
        for kind in KINDS
    }
    case.model.zero_grad()
    return sizes


def scan(case: Case, values: Sequence[float]) -> list[report.Row]:
    """The distance after the updates for each eps, which does to Adam what gradients smaller by as much would do."""
    start = snapshot(case)
    median = float(torch.cat(list(gradient_sizes(case).values())).median())
    rows = []
    for eps in values:
        ends = {}
        for variant in ADAM_VARIANTS:
            ends[variant] = updates(case, variant, eps=eps)[-1]
            put_back(case, start)
        kl = {variant: row["approximate KL"] for variant, row in ends.items()}
        rows.append(
            {
                "policy": case.name,
                "eps": eps,
                "median gradient / eps": median / eps,
                "approximate KL, torch": kl["torch"],
                "approximate KL, tensorflow": kl["tensorflow"],
                "KL, torch / tensorflow": kl["torch"] / kl["tensorflow"],
            }
        )
    return rows


def beside_published(steps: Sequence[report.Row]) -> list[report.Row]:
    """Means over the four epochs' forward passes, the first of which still finds the old policy: as published."""
    rows = []
    for measure in PUBLISHED["torch"]:
        row: report.Row = {"measure": measure}
        for source in ("GPT-2, published", *dict.fromkeys(step["policy"] for step in steps)):
            means = {}
            for variant in ADAM_VARIANTS:
                seen = [s[measure] for s in steps if (s["policy"], s["variant"]) == (source, variant)]
                means[variant] = sum(seen[:-1]) / len(seen) if seen else PUBLISHED[variant][measure]
                row[f"{source}: {variant}"] = means[variant]
            row[f"{source}: ratio"] = means["torch"] / means["tensorflow"] if means["tensorflow"] else float("nan")
        rows.append(row)
    return rows


# --- picture ---


def draw(steps: Sequence[report.Row], kinds: Sequence[report.Row], scanned: Sequence[report.Row], path: Path) -> None:
    drawn, axes = report.figure(2, 3, width=10.5, height=6.2)
    policies = list(dict.fromkeys(row["policy"] for row in steps))
    for row, policy in enumerate(policies):
        _draw_steps(axes[row, 0], [s for s in steps if s["policy"] == policy], policy)
        _draw_kinds(axes[row, 1], [k for k in kinds if k["policy"] == policy], policy)
    _draw_scan(axes[0, 2], scanned)
    _draw_ratio(axes[1, 2], scanned)
    report.save(drawn, path)


def _draw_steps(panel: Any, steps: Sequence[report.Row], policy: str) -> None:
    for variant in ADAM_VARIANTS:
        rows = [s for s in steps if s["variant"] == variant]
        panel.plot([s["update"] for s in rows], [s["approximate KL"] for s in rows], "o-", color=COLOURS[variant],
                   label=variant)  # fmt: skip
        panel.axhline(PUBLISHED[variant]["approximate KL"], ls=":", lw=1, color=COLOURS[variant],
                      label=f"GPT-2, published, {variant}")  # fmt: skip
    panel.set(title=f"{policy} policy: approximate KL, eps 1e-5", xlabel="update", yscale="log")
    panel.set_xticks(range(1, UPDATES + 1))
    panel.legend(fontsize=6.5)


def _draw_kinds(panel: Any, kinds: Sequence[report.Row], policy: str) -> None:
    for shift, variant in enumerate(ADAM_VARIANTS):
        rows = [k for k in kinds if k["variant"] == variant]
        at = np.arange(len(rows)) + 0.38 * (shift - 0.5)
        panel.bar(at, [k["approximate KL"] for k in rows], 0.36, color=COLOURS[variant], label=variant)
    panel.set_xticks(range(len(KINDS)), KINDS)
    panel.set(title=f"{policy} policy: KL after {UPDATES} updates\nof one kind of layer alone", yscale="log")
    panel.legend(fontsize=6.5)


def _draw_scan(panel: Any, scanned: Sequence[report.Row]) -> None:
    eps = [row["eps"] for row in scanned]
    for variant in ADAM_VARIANTS:
        panel.plot(eps, [row[f"approximate KL, {variant}"] for row in scanned], "o-", ms=3, color=COLOURS[variant],
                   label=variant)  # fmt: skip
    median = scanned[0]["median gradient / eps"] * eps[0]
    panel.axvline(median, color="0.5", ls="--", lw=1, label="median gradient element")
    panel.set(title=f"warm policy: KL after {UPDATES} updates", xlabel="eps", xscale="log", yscale="log")
    panel.legend(fontsize=6.5)


def _draw_ratio(panel: Any, scanned: Sequence[report.Row]) -> None:
    eps = [row["eps"] for row in scanned]
    panel.plot(eps, [row["KL, torch / tensorflow"] for row in scanned], "o-", ms=3, color="0.2")
    published = PUBLISHED["torch"]["approximate KL"] / PUBLISHED["tensorflow"]["approximate KL"]
    panel.axhline(published, ls=":", lw=1, color="tab:purple", label=f"GPT-2, published, at eps 1e-5: {published:.1f}")
    panel.axvline(EPS, ls="--", lw=1, color="0.6", label="eps 1e-5")
    panel.set(title="warm policy: KL with torch / with tensorflow", xlabel="eps", xscale="log", yscale="log")
    panel.legend(fontsize=6.5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("adam", "The first PPO updates with both forms of Adam.", trains=True)
    parser.add_argument("--warm-lr", type=float, default=1e-4)
    parser.add_argument("--large-lr", type=float, default=1e-5, help="the published run's")
    parser.add_argument("--rollouts", type=int, default=512, help="of the warm policy; the large one has an eighth")
    options = report.parse(parser, arguments)
    began = time.monotonic()
    torch.set_num_threads(2)
    data = report.ensure_data(options.data)
    warm = warm_case(data, rollouts=options.rollouts, seed=options.seed, lr=options.warm_lr)
    steps, kinds = compare(warm)
    scanned = scan(warm, SCAN)
    print(f"warm policy: {time.monotonic() - began:.0f} s", flush=True)
    large = compare(large_case(data, rollouts=options.rollouts // 8, seed=options.seed, lr=options.large_lr))
    steps, kinds = steps + large[0], kinds + large[1]
    tables = {"adam": beside_published(steps), "adam-steps": steps, "adam-layers": kinds, "adam-eps": scanned}
    for name, rows in tables.items():
        report.write_table(options.output / name, rows)
        print(report.markdown(rows))
    draw(steps, kinds, scanned, options.output / "adam.png")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
