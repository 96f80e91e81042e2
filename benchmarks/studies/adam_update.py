"""The first update of a policy with either form of Adam, for the study of Adam's epsilon (benchmarks/studies/adam.py).

Policies: `gpt2_case` has GPT-2's architecture and random weights, `pretrained_case` continues beginnings of stories,
`quickstart_case` is the quickstart's model, of its own or another width, on its own task. Everything runs in this
process on the learner's own model, loss and optimizer; responses are sampled by transformers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies import report
from rlhf.algo.adam import set_step
from rlhf.algo.advantages import whiten
from rlhf.algo.kl import kl_per_token
from rlhf.algo.losses import policy_loss
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.reward import MathOptions
from rlhf.config.sections import ModelConfig
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy, prepare_transformer
from rlhf.learner.update import policy_microbatch
from rlhf.rewards.math import math_reward
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import (
    Minibatch,
    PolicyTargets,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepBatch,
    TokenSequence,
    VersionSpan,
)

VARIANTS = ("torch", "tensorflow")
BETAS = (0.9, 0.999)  # of both frameworks' Adam
CLIP = 0.2
QUERIES, RESPONSE_TOKENS, TEMPERATURE = 64, 24, 0.7  # of the original RLHF work
KINDS = ("norm", "embedding", "attention", "MLP")
SUSPECTS = ("norm", "embedding")  # what the source names; the update is also taken without each
GPT2 = {"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
PEOPLE = "The doctor|My brother|An old sailor|The teacher|Her neighbour|A young painter|The mayor|Our guest"
DEEDS = "opened the door|looked at the sea|sat by the fire|read a letter|left the garden|lost a key|sang|took a train"


@dataclass(frozen=True)
class Case:
    """A policy, a batch that it sampled, and of each token [N] the whitened advantage and the log-prob there."""

    name: str
    model: PolicyModel
    config: GRPOConfig
    batch: StepBatch
    minibatch: Minibatch
    advantages: np.ndarray
    old: np.ndarray
    lr: float


# --- policies and their batches ---


def gpt2_case(seed: int, *, lr: float, name: str = "GPT-2's shape", sizes: dict[str, int] = GPT2) -> Case:
    """LayerNorm, learned positions and a tied head; random weights and queries. The reward is arbitrary."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(seed)
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    transformer = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.float32)
    prepare_transformer(transformer, gradient_checkpointing=False)
    model = PolicyModel(transformer, temperature=TEMPERATURE)
    generator = np.random.default_rng(seed)
    queries = [generator.integers(0, sizes["vocab_size"], 8).astype(np.int32) for _ in range(QUERIES)]
    sampled = sample(model, queries, eos=None)
    return make_case(name, model, sampled, [even_share(rollout) for rollout in sampled], lr)


def pretrained_case(seed: int, folder: Path, *, lr: float) -> Case:
    """A pretrained model continues 64 beginnings of stories. The reward is arbitrary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = read_policy(folder, temperature=TEMPERATURE)
    texts = [f"{who} {did} and" for who, did in itertools.product(PEOPLE.split("|"), DEEDS.split("|"))]
    torch.manual_seed(seed)
    sampled = sample(model, [np.array(tokenizer(text).input_ids, np.int32) for text in texts], eos=None)
    return make_case("SmolLM2-135M", model, sampled, [even_share(rollout) for rollout in sampled], lr)


def quickstart_case(seed: int, data: Path, *, lr: float, name: str = "quickstart") -> Case:
    """The quickstart's policy on problems of its own task, graded as in training."""
    config = study_config(data)
    tokenizer = load_tokenizer(config.model)
    model = read_policy(data / "model", temperature=1.0)
    loaded = load_prompts(config.data, "train", tokenizer)
    prompts = next(iter(loaded.prompts.values()))[seed * QUERIES : (seed + 1) * QUERIES]
    torch.manual_seed(seed)
    sampled = sample(model, [prompt.token_ids for prompt in prompts], eos=tokenizer.eos_token_id)
    rewards = []
    for rollout, prompt in zip(sampled, prompts, strict=True):
        text = tokenizer.decode(rollout.response_ids.tolist(), skip_special_tokens=True)
        rewards.append(math_reward(text, prompt.answer, MathOptions()).value or 0.0)
    return make_case(name, model, sampled, rewards, lr)


def read_policy(folder: Path, *, temperature: float) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder), dtype="float32"), temperature=temperature)


def even_share(rollout: Rollout) -> float:
    """An arbitrary reward: the share of even token ids. Advantages are whitened, so that its scale does not matter."""
    return float((rollout.response_ids % 2 == 0).mean())


def study_config(data: Path) -> GRPOConfig:
    """PPO's loss alone, in one minibatch, without norm clipping."""
    overrides = [
        f"model.path={data / 'model'}", f"data.train={data / 'train.jsonl'}", "data.eval=null",
        f"rollout.max_response_tokens={RESPONSE_TOKENS}", f"algo.clip_low={CLIP}", f"algo.clip_high={CLIP}",
        "learner.minibatches_per_epoch=1", "learner.epochs_per_step=1", "learner.max_tokens_per_microbatch=1024",
        "algo.importance_correction=none",  # the learner's own model samples
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)


def sample(model: PolicyModel, queries: Sequence[np.ndarray], *, eos: int | None) -> list[Rollout]:
    """One response to each query, by transformers; queries are padded to the left."""
    longest = max(map(len, queries))
    ids = torch.zeros(len(queries), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, query in enumerate(queries):
        ids[row, longest - len(query) :] = torch.from_numpy(query)
        attention[row, longest - len(query) :] = 1
    model.transformer.set_attn_implementation("sdpa")
    model.transformer.generation_config.eos_token_id = eos  # None would leave the model's own
    with torch.no_grad():
        generated = model.transformer.generate(
            ids, attention_mask=attention, max_new_tokens=RESPONSE_TOKENS, do_sample=True, top_k=0, top_p=1.0,
            temperature=model.temperature, pad_token_id=eos or 0,
        )  # fmt: skip
    model.transformer.set_attn_implementation(PACKED)
    rollouts = []
    for row, query in enumerate(queries):
        response = generated[row, longest:].numpy()
        ends = np.flatnonzero(response == eos) if eos is not None else []
        response = response[: ends[0] + 1] if len(ends) else response
        together = np.concatenate([query, response]).astype(np.int32)
        mask = np.arange(len(together)) >= len(query)
        span = (VersionSpan(len(query), len(together), 0),)
        sequence = TokenSequence(together, mask, np.zeros(len(mask), np.float32), span)
        rollouts.append(Rollout(str(row), 0, 0, (sequence,), "stop"))
    return rollouts


def make_case(name: str, model: PolicyModel, rollouts: Sequence[Rollout], rewards: Sequence[float], lr: float) -> Case:
    """Pack the batch, whiten the rewards over its tokens, and compute the log-probs of the policy that sampled it."""
    prompt, config = Prompt("p", 0, np.zeros(1, np.int32), (), "", "p"), study_config(Path("of the case"))
    scored = [ScoredRollout(r, "", "", reward, {}, "ok") for r, reward in zip(rollouts, rewards, strict=True)]
    batch = make_batch([RolloutGroup(prompt, (sample,)) for sample in scored], mask_truncated=False)
    (minibatch,) = plan_epochs(batch, config, step=0)[0]
    by_token = torch.from_numpy(broadcast_to_tokens(batch, batch.rewards))
    advantages = whiten(by_token, torch.from_numpy(batch.tokens.response_mask)).numpy()
    old = logprobs_of(model, batch, minibatch)
    return Case(name, model, config, batch, minibatch, advantages, old, lr)


# --- the update ---


@torch.no_grad()
def logprobs_of(model: PolicyModel, batch: StepBatch, minibatch: Minibatch) -> np.ndarray:
    """[N] float64 log-probs of the policy as it is now."""
    column = np.zeros(len(batch.tokens.token_ids))
    for rows in minibatch.microbatches[0]:
        packed = DeviceTokens.of(batch.tokens.take(rows), torch.device("cpu"))
        column[batch.tokens.token_indices(rows)] = model(packed).logprobs.numpy()
    return column


def backward(case: Case) -> None:
    """The gradient of the whole minibatch, as the learner computes it, into the parameters."""
    tokens, targets = case.batch.tokens, PolicyTargets(case.advantages, case.old, None)
    for rows in case.minibatch.microbatches[0]:
        packed, own = DeviceTokens.of(tokens.take(rows), torch.device("cpu")), targets.take(tokens.token_indices(rows))
        loss, _ = policy_microbatch(case.model, packed, own, case.minibatch.denominators, case.config)
        loss.backward()


def first_step(case: Case, variant: str, *, eps: float) -> None:
    """Adam's first step with the gradients that the parameters hold."""
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=case.lr, betas=BETAS, eps=eps, weight_decay=0, fused=True)
    set_step(optimizer, lr=case.lr, adam_step=1, variant=variant, eps=eps, betas=BETAS)
    optimizer.step()


def snapshot(case: Case) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in case.model.named_parameters()}


@torch.no_grad()
def put(case: Case, weights: dict[str, Tensor], kinds: Collection[str] = KINDS) -> None:
    """Give the parameters of these kinds these weights."""
    for name, parameter in case.model.named_parameters():
        if kind_of(name) in kinds:
            parameter.copy_(weights[name])


def kind_of(parameter: str) -> str:
    """The kind of layer by a parameter's name, of GPT-2 and Llama's family; a tied head is the embedding."""
    if "norm" in parameter or ".ln_" in parameter:
        return "norm"
    if any(part in parameter for part in ("embed", "wte", "wpe", "lm_head")):
        return "embedding"
    return "attention" if "attn" in parameter else "MLP"


def layer_of(parameter: str) -> int:
    """The number of the layer; -1 for what is outside of all."""
    number = re.search(r"\.(\d+)\.", parameter)
    return int(number[1]) if number else -1


# --- what it did ---


def moved(case: Case) -> report.Row:
    """The statistics of the policy as it is now, over the response tokens of the batch."""
    mask = case.batch.tokens.response_mask
    new = logprobs_of(case.model, case.batch, case.minibatch)
    return statistics(*(torch.from_numpy(column[mask]).double() for column in (new, case.old, case.advantages)))


def statistics(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> report.Row:
    """The published statistics, from the trainer's own loss and KL. Variances divide by n.

    The clip fraction counts the tokens whose clipped loss is the larger one: the source's definition, and that of
    `policy/clip_fraction`. A ratio can be outside of the bounds without that.
    """
    d = logprobs - old_logprobs
    terms = policy_loss(
        logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=torch.ones_like(d, dtype=torch.bool),
        clip_low=CLIP, clip_high=CLIP,
    )  # fmt: skip
    outside = (terms.ratio.clamp(1 - CLIP, 1 + CLIP) - terms.ratio).abs() > 0
    numbers = {
        "log-prob difference: mean": d.mean(),
        "log-prob difference: variance": d.var(correction=0),
        "log-prob difference: max": d.max(),
        "log-prob difference: min": d.min(),
        "ratio: mean": terms.ratio.mean(),
        "ratio: variance": terms.ratio.var(correction=0),
        "ratio: max": terms.ratio.max(),
        "ratio: min": terms.ratio.min(),
        "approximate KL": kl_per_token(logprobs, old_logprobs, estimator="k2").mean(),
        "policy loss": terms.loss.mean(),
        "clip fraction": terms.clipped.double().mean(),
        "ratios outside 1 ± 0.2": outside.double().mean(),
    }
    return {name: float(value) for name, value in numbers.items()}


def measure(case: Case, *, eps: float, scan: Sequence[float]) -> dict[str, list[report.Row]]:
    """The first update with both variants: statistics, equal sizes, what each kind of layer did, other eps."""
    backward(case)
    start, ends, first = snapshot(case), {}, []
    for variant in VARIANTS:
        first_step(case, variant, eps=eps)
        first.append({"variant": variant} | moved(case))
        ends[variant] = snapshot(case)
        put(case, start)
    layers = weight_changes(case, start, ends)
    kinds = [kind_row(case, start, ends, kind, [row for row in layers if row["kind"] == kind]) for kind in KINDS]
    controls = [equal_size_row(case, start, ends, size, eps=eps) for size in SIZES]
    ends.clear()  # of 124 M parameters: 1 GB
    kls: list[report.Row] = []
    for value in scan:
        row: report.Row = {"eps": value}
        for variant in VARIANTS:
            first_step(case, variant, eps=value)
            row[variant] = moved(case)["approximate KL"]
            put(case, start)
        kls.append(row)
    policy = [policy_row(case, eps=eps)]
    case.model.zero_grad()
    return {"policy": policy, "first": first, "controls": controls, "kinds": kinds, "layers": layers, "scan": kls}


def policy_row(case: Case, *, eps: float) -> report.Row:
    """Its size, its mean reward, and the shares of the gradients of attention and MLPs below eps and up to 32 eps."""
    edges = torch.tensor([eps, eps / math.sqrt(1 - BETAS[1])])
    counts, total = np.zeros(2), 0
    for name, parameter in case.model.named_parameters():
        if kind_of(name) in ("attention", "MLP"):
            gradient = parameter.grad.abs().flatten()  # type: ignore[union-attr]
            counts += [int((gradient < edge).sum()) for edge in edges]
            total += len(gradient)
    below, below_both = (counts / total).tolist()
    return {
        "elements": sum(parameter.numel() for parameter in case.model.parameters()),
        "reward": float(case.batch.rewards.mean()), "below eps": below, "eps to 32 eps": below_both - below,
    }  # fmt: skip


SIZES = {"mean absolute change": 1, "root mean square": 2}  # the power that is summed


def equal_size_row(
    case: Case, start: dict[str, Tensor], ends: dict[str, dict[str, Tensor]], size: str, *, eps: float
) -> report.Row:
    """The variants with changes of one size: tensorflow's rate raised to torch's size, and torch's lowered.

    The first change is proportional to the rate. `cosine` is that of the two changes of all weights.
    """
    power, sums, product = SIZES[size], np.zeros((2, 2)), 0.0
    for name, before in start.items():
        changes = [ends[variant][name] - before for variant in VARIANTS]
        sums += [[float((x.abs() ** n).sum(dtype=torch.float64)) for n in (1, 2)] for x in changes]
        product += float((changes[0] * changes[1]).sum(dtype=torch.float64))
    of_torch, of_tensorflow = sums[:, power - 1] ** (1 / power)
    factor = float(of_torch / of_tensorflow)
    row: report.Row = {"size": size, "factor": factor, "cosine": product / float(np.sqrt(sums[:, 1].prod()))}
    for variant, lr in (("tensorflow", case.lr * factor), ("torch", case.lr / factor)):
        first_step(replace(case, lr=lr), variant, eps=eps)
        now = moved(case)
        row |= {f"{name}: {variant}": now[name] for name in ("approximate KL", "policy loss")}
        put(case, start)
    return row


def weight_changes(case: Case, start: dict[str, Tensor], ends: dict[str, dict[str, Tensor]]) -> list[report.Row]:
    """|change of the weights| / lr by layer and kind, mean over its elements; of each variant, and between the two."""
    sums: dict[tuple[int, str], np.ndarray] = {}
    for name, before in start.items():
        torch_end, tensorflow_end = (ends[variant][name] for variant in VARIANTS)
        pairs = ((torch_end, before), (tensorflow_end, before), (torch_end, tensorflow_end))
        changes = [float((one - other).abs().sum(dtype=torch.float64)) / case.lr for one, other in pairs]
        key = (layer_of(name), kind_of(name))
        sums[key] = sums.get(key, np.zeros(4)) + np.array([before.numel(), *changes])
    return [
        {"layer": layer, "kind": kind, "elements": int(count)}
        | {name: total / count for name, total in zip((*VARIANTS, "difference"), totals, strict=True)}
        for (layer, kind), (count, *totals) in ((key, values.tolist()) for key, values in sums.items())
    ]


def kind_row(
    case: Case, start: dict[str, Tensor], ends: dict[str, dict[str, Tensor]], kind: str, layers: Sequence[report.Row]
) -> report.Row:
    """What the update does to one kind of layer, and to the policy through it; the policy is put back."""
    count = sum(row["elements"] for row in layers)
    gradients = [p.grad.abs().flatten() for n, p in case.model.named_parameters() if kind_of(n) == kind]  # type: ignore[union-attr]
    row: report.Row = {"kind": kind, "elements": count, "gradient, median": float(torch.cat(gradients).median())}
    for name in (*VARIANTS, "difference"):
        row[f"change / lr: {name}"] = sum(layer["elements"] * layer[name] for layer in layers) / count
    for label, kinds in (("alone", {kind}), ("all but", set(KINDS) - {kind})):
        if label == "all but" and kind not in SUSPECTS:
            continue
        for variant in VARIANTS:
            put(case, ends[variant], kinds)
            row[f"KL, {label}: {variant}"] = moved(case)["approximate KL"]
            put(case, start)
    return row
