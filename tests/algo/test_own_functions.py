"""A user's own loss and advantage: tried before a run, and trained with as our own."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented import check_documented
from fake_run import drive
from torch import Tensor, nn
from worlds import make_config, make_groups

from rlhf.algo.losses import policy_loss
from rlhf.algo.own_functions import check_advantage, check_policy_loss
from rlhf.check.start_checks import own_function_problems
from rlhf.learner.policy_model import DeviceTokens, PolicyOutput
from rlhf.learner.step import make_microbatches
from rlhf.learner.update import on_host, policy_microbatch
from rlhf.log.reductions import merge_metrics, to_values
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import rows_with_gradient
from rlhf.types import Denominators, Minibatch, PolicyTargets, RolloutGroup


def as_ppo(logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def without_mask(logprobs: Tensor, *, advantages: Tensor, **_: Any) -> Tensor:
    return -(logprobs - logprobs.mean()) * advantages


def over_sequences(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    return -(logprobs - torch.where(response_mask, logprobs, 0.0).sum()) * advantages


def prefix_sums(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    return -torch.where(response_mask, logprobs, 0.0).cumsum(0) * advantages


def weight_over_sequences(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    """Its value is 0: other sequences are in the gradient alone."""
    return -torch.where(response_mask, advantages, 0.0).sum() * (logprobs - logprobs.detach())


def of_advantages_elsewhere(logprobs: Tensor, *, advantages: Tensor, **_: Any) -> Tensor:
    return -logprobs * (advantages - advantages.sum())


def as_loss(logprobs: Tensor) -> Tensor:
    return -logprobs


def metric_over_sequences(logprobs: Tensor, *, response_mask: Tensor, **_: Any) -> Any:
    return -logprobs, {"x": logprobs * 0 + torch.where(response_mask, logprobs, 0.0).sum()}


def by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, ...]:
    return rewards.split(groups.unique_consecutive(return_counts=True)[1].tolist())


def test_a_loss_that_is_ours_gives_our_values_and_gradients() -> None:
    check_policy_loss(as_ppo)
    generator = torch.Generator().manual_seed(1)
    mask = torch.tensor([False, True, True, False, False, True, True])
    old, advantages, rollout = (torch.randn(7, generator=generator) for _ in range(3))
    results = []
    for kind in ("ppo", as_ppo):
        logprobs = (old + 0.5 * torch.randn(7, generator=torch.Generator().manual_seed(2))).requires_grad_()
        terms = policy_loss(
            logprobs, old_logprobs=old, advantages=advantages, rollout_logprobs=rollout, response_mask=mask,
            cu_seqlens=torch.tensor([0, 3, 7]), clip_low=0.2, clip_high=0.2, kind=kind,
        )  # fmt: skip
        terms.loss.sum().backward()
        results.append((terms.loss.detach(), terms.ratio, logprobs.grad))
    for ours, own in zip(*results, strict=True):
        assert torch.equal(ours, own)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_mask, "outside of response_mask"),
        (of_advantages_elsewhere, "outside of response_mask"),
        (over_sequences, "one sequence change the loss of another"),
        (prefix_sums, "one sequence change the loss of another"),
        (weight_over_sequences, "one sequence change the loss of another"),
        (lambda logprobs, **_: logprobs.sum(), r"a tensor \[\], not the loss of each token"),
        (lambda logprobs, **_: logprobs.tolist(), "returns list"),
        (lambda logprobs, advantages, **_: -logprobs.detach() * advantages, "no gradient"),
        (lambda logprobs, **_: logprobs * 0, "gradient is 0"),
        (lambda logprobs, response_mask, **_: (logprobs * response_mask).abs().sqrt() * float("inf"), "not finite"),
        (
            lambda logprobs, **_: (as_loss(logprobs), {"x": logprobs.mean()}),
            r"\[\], not a value of each token for",
        ),
        (lambda logprobs, **_: (as_loss(logprobs), {"x": logprobs * 0 + logprobs.sum()}), "outside of response_mask"),
        (metric_over_sequences, "one sequence change the loss of another or its metrics"),
        (lambda logprobs, **_: (as_loss(logprobs), logprobs), r"a tuple \(Tensor, Tensor\), not \(tensor, dictionary"),
        (lambda logprobs, **_: (as_loss(logprobs), {"a b": logprobs}), "its metric 'a b' has no usable name"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused_with_the_reason(
    function: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_policy_loss(function)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda rewards, groups: rewards[:1], r"a tensor \[1\]"),
        (lambda rewards, groups: (rewards - rewards.mean()) / rewards.std(), "not finite"),
        (lambda rewards, groups: list(rewards), "returns list"),
        (lambda rewards, groups: (rewards, {"x": rewards}), r"its metric x is 'tensor\(.*, not a number"),
        (lambda rewards, groups: (rewards, {"x": "1.0"}), "its metric x is '1.0', not a number"),
        (lambda rewards, groups: (rewards, {1: 1.0}), "its metric 1 has no usable name"),
        (
            lambda rewards, groups: torch.cat(
                [part - part.mean() + 0 * part.std() for part in by_group(rewards, groups)]
            ),
            "not finite",  # a group of one has no std
        ),
    ],
)
def test_an_advantage_that_cannot_be_trained_with_is_refused_with_the_reason(
    function: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_advantage(function)
    check_advantage(lambda rewards, groups: rewards - rewards.mean())


OWN = """
import torch

def reinforce(logprobs, *, advantages, response_mask, **_):
    return -torch.where(response_mask, logprobs, 0.0) * advantages

def leaks(logprobs, *, advantages, **_):
    return -(logprobs - logprobs.mean()) * advantages

def raises(logprobs, **given):
    return given["entropy"]

def nan(rewards, groups):
    return rewards * float("nan")


def large(rewards, groups):
    return rewards.double() * 1e300

def centered(rewards, groups):
    means = torch.zeros(int(groups.max()) + 1, dtype=rewards.dtype)
    means = means.index_reduce(0, groups, rewards, "mean", include_self=False)
    return 2 * (rewards - means[groups])
"""


def test_a_file_is_named_and_what_is_wrong_with_it_is_said_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)

    def problems(**algo: str) -> list[str]:
        return own_function_problems(make_config(tmp_path / "model", algo=algo))

    assert problems() == []
    assert problems(policy_loss=f"{file}:reinforce", advantage=f"{file}:centered") == []
    (leak,) = problems(policy_loss=f"{file}:leaks")
    assert leak.startswith(f"algo.policy_loss={file}:leaks: tokens outside of response_mask")
    (missing,) = problems(advantage=f"{file}:nothing")
    assert missing.startswith(f"algo.advantage={file}:nothing: the module has no function nothing. Define it, ")
    (broken,) = problems(policy_loss=f"{file}:raises")
    assert broken.startswith(f"algo.policy_loss={file}:raises: it raises KeyError on an example: 'entropy'. See ")


def test_own_advantages_get_the_scorable_rewards_and_their_groups(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    batch = make_batch(make_groups(groups=2, samples=3, vocabulary=9, longest=4, seed=0), mask_truncated=False)
    rewards = np.array([1.0, 0.0, np.nan, 0.5, 0.0, 1.0])
    assert step_advantages(batch, rewards, f"{file}:centered").tolist() == [1.0, -1.0, 0.0, 0.0, -1.0, 1.0]
    assert not step_advantages(batch, np.full(6, np.nan), f"{file}:centered").any()
    for name in ("nan", "large"):
        with pytest.raises(RuntimeError, match=rf"algo.advantage=.*:{name}: its advantages are not finite"):
            step_advantages(batch, rewards, f"{file}:{name}")


def test_an_own_loss_may_have_a_gradient_where_the_advantage_is_0(tmp_path: Path) -> None:
    batch = make_batch(make_groups(groups=2, samples=3, vocabulary=9, longest=4, seed=0), mask_truncated=False)
    own, ours = (make_config(tmp_path, algo={"policy_loss": name}) for name in ("mine.py:reinforce", "ppo"))
    assert rows_with_gradient(batch, np.zeros(6), own).all()
    assert not rows_with_gradient(batch, np.zeros(6), ours).any()


WITH_ROWS = """
import torch

def by_level(logprobs, *, advantages, response_mask, cu_seqlens, sources, columns, lengths, **_):
    def of_tokens(values):
        return torch.as_tensor(values, dtype=torch.float32).repeat_interleave(cu_seqlens.diff())
    level = of_tokens([row["level"] for row in columns])
    metrics = {"level": level, "hard": torch.where(level > 1, logprobs, torch.nan), "length": of_tokens(lengths)}
    assert all(source in ("p", "train") for source in sources)
    return -torch.where(response_mask, logprobs, 0.0) * advantages, metrics

def by_source(rewards, groups, *, sources, columns, lengths):
    columns[0]["level"] = 99   # a copy
    own = torch.tensor([source == "q" for source in sources])
    numbers = {"q/mean": rewards[own].mean(), "none": rewards[:0].mean(), "tokens": lengths.sum()}
    return rewards - rewards.mean(), numbers

def changed(logprobs, *, columns, **_):
    return -logprobs, {"x": logprobs[:1]}
"""


@pytest.fixture
def with_rows(tmp_path: Path) -> Path:
    file = tmp_path / "with_rows.py"
    file.write_text(WITH_ROWS)
    return file


class Fixed(nn.Module):
    """A policy with these log-probs [N] at the tokens of a step, for a microbatch of its tokens `index`."""

    def __init__(self, logprobs: Tensor, index: np.ndarray) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(logprobs[torch.from_numpy(index)])

    def forward(self, tokens: DeviceTokens, *, for_update: bool) -> PolicyOutput:
        return PolicyOutput(self.logprobs, torch.zeros(len(self.logprobs)), None)


def groups_with_rows() -> list[RolloutGroup]:
    """Four groups of three rollouts, of the sources p and q, with their number as column."""
    groups = make_groups(groups=4, samples=3, vocabulary=9, longest=6, seed=0)
    return [
        replace(group, prompt=replace(group.prompt, source="pq"[number // 2], columns={"level": number}))
        for number, group in enumerate(groups)
    ]


def test_the_metrics_of_an_own_loss_are_means_over_the_tokens_of_the_minibatch_however_it_is_split(
    with_rows: Path,
) -> None:
    name = f"{with_rows}:by_level"
    config = make_config(with_rows, algo={"policy_loss": name, "importance_correction": "none"})
    groups = [replace(group, prompt=replace(group.prompt, source="p")) for group in groups_with_rows()]
    batch = make_batch(groups, mask_truncated=False, policy_loss=name)
    tokens, rows = batch.tokens, np.arange(12)
    logprobs = torch.linspace(-3, -1, len(tokens.token_ids))
    targets = PolicyTargets(np.ones(len(logprobs), np.float32), None, None)
    counts = Denominators(int(batch.response_lengths.sum()), 12, 12)
    put = functools.partial(DeviceTokens.of, device=torch.device("cpu"))
    seen = []
    for split in ([rows], [rows[::-1]], np.array_split(rows, 4), [rows[:1], rows[1:], rows[:0]]):
        parts = []
        held = make_microbatches(tokens, Minibatch((tuple(split),), counts), put, shard=0)
        for each in held:
            model = Fixed(logprobs, each.index)
            parts.append(on_host(policy_microbatch(model, each.tokens, targets.take(each.index), counts, config)[1]))
        seen.append(to_values(merge_metrics(parts)))
    in_loss, of_token = tokens.response_mask, np.repeat(batch.groups, tokens.lengths)
    hard = logprobs.numpy()[in_loss & (of_token > 1)].mean()
    lengths = np.repeat(tokens.rollout_tokens, tokens.lengths)[in_loss].mean()
    for values in seen:
        own = {key: value for key, value in values.items() if key.startswith("own/")}
        assert own == pytest.approx(
            {"own/loss/level": of_token[in_loss].mean(), "own/loss/hard": hard, "own/loss/length": lengths}, rel=1e-6
        )
    check_documented(seen, logged={"an own loss returns some"})
    assert make_batch(groups, mask_truncated=False, policy_loss="ppo").tokens.prompt_rows is None
    wrong = make_config(with_rows, algo={"policy_loss": f"{with_rows}:changed", "importance_correction": "none"})
    with pytest.raises(ValueError, match=r"^algo\.policy_loss=.*:changed: it returns a tensor \[1\], not a value of "):
        policy_microbatch(model, each.tokens, targets.take(each.index), counts, wrong)


def test_own_advantages_see_rows_and_lengths_and_log_numbers(
    with_rows: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(groups_with_rows(), mask_truncated=False)
    rewards, metrics = np.arange(12.0), dict[str, float]()
    rewards[7] = np.nan
    step_advantages(batch, rewards, f"{with_rows}:by_source", metrics=metrics)
    lengths = np.delete(batch.response_lengths, 7).sum()
    assert metrics == {"own/advantage/q/mean": (6 + 8 + 9 + 10 + 11) / 5, "own/advantage/tokens": lengths}
    assert batch.prompt_rows[0].columns == {"level": 0}
    config = make_config(
        tiny_model_dir / "model",
        run={"dir": str(with_rows.parent / "run"), "steps": 2},
        algo={"advantage": f"{with_rows}:by_source"},
    )
    asyncio.run(drive(config, monkeypatch))
    logged = [json.loads(line) for line in (with_rows.parent / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["own/advantage/tokens"] for row in logged] == [4 * 4 * 3] * 2
    check_documented(logged, logged={"an own advantage returns some"})


def test_a_function_that_asks_for_columns_is_tried_on_rows_of_the_data(with_rows: Path) -> None:
    def problems(row: dict[str, Any], **data: str) -> list[str]:
        (with_rows.parent / "train.jsonl").write_text(json.dumps({"question": "1 + 1", "answer": "2", **row}) + "\n")
        train = {"train": str(with_rows.parent / "train.jsonl"), "max_prompt_tokens": 64, **data}
        algo = {"policy_loss": f"{with_rows}:by_level", "advantage": f"{with_rows}:by_source"}
        return own_function_problems(make_config(with_rows, algo=algo, data=train))

    assert problems({"level": 3}) == []
    (missing,) = problems({})
    assert missing.startswith(f"algo.policy_loss={with_rows}:by_level: it raises KeyError on an example: 'level'. See ")
