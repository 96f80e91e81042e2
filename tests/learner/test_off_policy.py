"""What docs/off_policy.md says of the policy gradient, by enumeration, through the head and the loss of a real update.

All 15 responses of a policy over three tokens are one microbatch. The gradient that a sampled minibatch estimates is
the sum over them, weighed by the probabilities of the policy that sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from worlds import make_config

from benchmarks.studies.enumeration import (
    LENGTHS,
    PREFIX_OF_TOKEN,
    PREFIXES,
    RESPONSES,
    SPREAD,
    TOKEN,
    WORDS,
    gradient_of,
    per_response,
)
from rlhf.algo.logprobs import TokenSupport, token_logprobs
from rlhf.algo.losses import importance_weights
from rlhf.algo.packing import pack
from rlhf.learner.policy_model import DeviceTokens, PolicyOutput
from rlhf.learner.update import policy_microbatch
from rlhf.types import Denominators, PolicyTargets

PAGE = Path(__file__).parents[2] / "docs/off_policy.md"
EXACT = 1e-12
ALL = torch.ones(len(PREFIXES), WORDS, dtype=torch.bool)
NONE = {"importance_correction": "none"}
ENGINE = {"old_policy": "engine", **NONE}
UNBOUNDED = {"importance_cap": 1e9}
FREE = {"clip_low": 0.999, "clip_high": 1e9}  # clips no ratio of these policies

# The responses in a row, each after one token of a prompt.
SAMPLED = torch.tensor([at > 0 for ids in RESPONSES for at in range(len(ids) + 1)])
STATES = torch.tensor([PREFIXES.index(ids[:at]) for ids in RESPONSES for at in (*range(len(ids)), 0)])  # last: unused
TOKENS = DeviceTokens.of(
    pack(
        [np.zeros(len(ids) + 1) for ids in RESPONSES],
        np.split(SAMPLED.numpy(), np.cumsum(LENGTHS.numpy() + 1)[:-1]),
        [np.zeros(len(ids) + 1, np.float32) for ids in RESPONSES],
    ),
    torch.device("cpu"),
)


class Case(NamedTuple):
    """Logits are [prefixes, words]."""

    policy: Tensor
    sampler: Tensor  # of the policy that sampled, as the engine computes it
    rewards: Tensor  # [responses] 0 or 1
    kept: Tensor = ALL  # [prefixes, words] bool, the supports


def make_case(seed: int, distance: float) -> Case:
    """A policy, one that samples whose logits differ by noise of this std, and rewards."""
    generator = torch.Generator().manual_seed(seed)
    policy, noise = torch.randn(2, len(PREFIXES), WORDS, generator=generator, dtype=torch.float64)
    rewards = (torch.rand(len(RESPONSES), generator=generator) < 0.5).double()
    return Case(SPREAD * policy, SPREAD * policy + distance * noise, rewards)


def in_row(values: Tensor) -> Tensor:
    """The row with the values [T] of the sampled tokens."""
    return torch.zeros(len(SAMPLED), dtype=values.dtype).masked_scatter(SAMPLED, values)


def allowed(kept: Tensor) -> Tensor:
    """[responses] bool: all tokens are in their supports."""
    return per_response(~kept[PREFIX_OF_TOKEN, TOKEN]) == 0


def logprobs_of(logits: Tensor, kept: Tensor = ALL) -> Tensor:
    """[T] by the trainer's head; 0 in responses that are not allowed."""
    trained = in_row(allowed(kept).repeat_interleave(LENGTHS))
    ids = [kept[STATES[at - 1]].nonzero().squeeze(1) if trained[at] else torch.arange(0) for at in range(len(SAMPLED))]
    support = TokenSupport(torch.cat(ids).int(), torch.tensor([0, *itertools.accumulate(map(len, ids))]))
    states = torch.nn.functional.one_hot(STATES, len(PREFIXES)).to(logits.dtype)
    output = token_logprobs(states, logits.T, in_row(TOKEN), trained, TOKENS.cu_seqlens, support=support)
    return output.logprobs[SAMPLED]


def probabilities(logits: Tensor, kept: Tensor = ALL) -> Tensor:
    """[responses] of a policy, 0 where not allowed."""
    return torch.where(allowed(kept), per_response(logprobs_of(logits, kept)).exp(), 0.0)


class Fixed(nn.Module):
    """A policy with given log-probs."""

    def __init__(self, logprobs: Tensor) -> None:
        super().__init__()
        self.logprobs = nn.Parameter(logprobs)

    def forward(self, tokens: DeviceTokens, *, for_update: bool) -> PolicyOutput:
        logprobs = torch.where(tokens.response_mask, self.logprobs, 0.0)
        return PolicyOutput(logprobs, torch.zeros(len(logprobs)), None)


def factors(case: Case, algo: dict[str, Any], *, old: Tensor | None = None, shift: float = 0.0) -> Tensor:
    """[T] by what the loss multiplies the gradient of the log-prob of each token. The baseline is the expected reward.

    Args:
        old: logits of the learner before the step's first update; None: the policy itself, in this first update.
        shift: added to all advantages.
    """
    config = make_config(Path("nowhere/model"), algo={"loss_aggregation": "constant", "constant_length": 1, **algo})
    advantages = case.rewards - probabilities(case.sampler, case.kept) @ case.rewards + shift
    model = Fixed(in_row(logprobs_of(case.policy, case.kept)))
    targets = PolicyTargets(
        advantages=in_row(advantages.repeat_interleave(LENGTHS)).numpy(),
        old_logprobs=None if old is None else in_row(logprobs_of(old, case.kept)).numpy(), ref_logprobs=None,
    )  # fmt: skip
    tokens = dataclasses.replace(TOKENS, rollout_logprobs=in_row(logprobs_of(case.sampler, case.kept)))
    denominators = Denominators(tokens=len(TOKEN), rollouts=1, sequences=len(RESPONSES))
    loss, _ = policy_microbatch(model, tokens, targets, denominators, config)
    (gradient,) = torch.autograd.grad(loss, model.logprobs)
    return -gradient[SAMPLED]


def scores(case: Case) -> Tensor:
    """[T, parameters] gradients of the log-prob of each token."""
    of_policy = functools.partial(logprobs_of, kept=case.kept)
    jacobian: Tensor = torch.autograd.functional.jacobian(of_policy, case.policy)
    return jacobian.flatten(1)


def expected(case: Case, algo: dict[str, Any], **options: Any) -> Tensor:
    """Expected gradient of a response of the sampler, in the direction of the optimizer."""
    weight = probabilities(case.sampler, case.kept).repeat_interleave(LENGTHS)
    return (weight * factors(case, algo, **options)) @ scores(case)


def exact(case: Case, kept: Tensor | None = None) -> Tensor:
    """Gradient of the expected reward of the policy, with these supports, or those of the case."""
    sets = case.kept if kept is None else kept
    return gradient_of(lambda theta: probabilities(theta, sets) @ case.rewards, case.policy).flatten()


def error(ours: Tensor, right: Tensor) -> float:
    return float((ours - right).norm() / right.norm())


# --- the table ---

SEEDS, DISTANCES = range(10), (0.02, 0.2, 0.6)


def rows_of_the_page() -> dict[str, list[str]]:
    """Keys of a row of the table, as they stand -> its other cells."""
    rows = re.findall(r"^\| `([a-z_]+: .*)` \|(.*)\|$", PAGE.read_text(), flags=re.MULTILINE)
    return {keys: [cell.strip() for cell in cells.split("|")] for keys, cells in rows}


@functools.cache
def cases(distance: float) -> list[tuple[Case, Tensor, Tensor]]:
    """Each with the scores of its tokens and the exact gradient."""
    made = [make_case(seed, distance) for seed in SEEDS]
    return [(case, scores(case), exact(case)) for case in made]


def cells(algo: dict[str, Any]) -> list[str]:
    """Errors at each distance, then noise and the tokens that are left out at the largest."""
    shown = []
    for distance in DISTANCES:
        errors, noises, left_out = [], [], []
        for case, of_token, right in cases(distance):
            ours, probability = factors(case, algo), probabilities(case.sampler)
            weight = probability.repeat_interleave(LENGTHS)
            mean = (weight * ours) @ of_token
            each = torch.stack([part.sum(0) for part in (ours[:, None] * of_token).split(LENGTHS.tolist())])
            errors.append(error(mean, right))
            noises.append(float((probability @ each.square().sum(1) - mean.square().sum()) / right.square().sum()))
            left_out.append(float(weight[ours == 0].sum() / weight.sum()))
        middle, lowest, highest = (f"{0 if x < EXACT else x:.2g}" for x in (median(errors), min(errors), max(errors)))
        shown.append(f"{middle} ({lowest} to {highest})")
    return [*shown, f"{median(noises):.2g}", f"{median(left_out):.2f}"]


def test_the_table_of_the_page_is_what_the_enumeration_gives() -> None:
    rows = rows_of_the_page()
    assert len(rows) == 14
    for keys, shown in rows.items():
        assert shown == cells(yaml.safe_load(f"{{{keys}}}")), keys


def test_where_the_policy_itself_sampled_every_row_has_the_gradient_of_the_expected_reward() -> None:
    case = make_case(0, 0.0)
    for keys in rows_of_the_page():
        assert error(expected(case, yaml.safe_load(f"{{{keys}}}")), exact(case)) < EXACT, keys


# --- a lag, and several updates ---

FAR = make_case(0, 0.6)


def sampler_kl_gradient(case: Case) -> Tensor:
    """Of KL(pi_roll, pi) of whole responses."""
    probability = probabilities(case.sampler)
    return gradient_of(lambda theta: -probability @ per_response(logprobs_of(theta)), case.policy).flatten()


def test_without_a_correction_a_mean_advantage_that_is_not_0_pulls_towards_the_policy_that_sampled_or_pushes_away():
    """With a correction of whole responses it does nothing, as on-policy."""
    for shift in (0.5, -0.5):
        added = expected(FAR, NONE, shift=shift) - expected(FAR, NONE)
        assert (added + shift * sampler_kl_gradient(FAR)).abs().max() < EXACT
        exact_weights = {"importance_level": "sequence", **UNBOUNDED}
        assert (expected(FAR, exact_weights, shift=shift) - expected(FAR, exact_weights)).abs().max() < EXACT


def test_weights_of_whole_responses_are_exact_without_a_cap_and_a_cap_is_the_only_error():
    assert error(expected(FAR, {"importance_level": "sequence", **UNBOUNDED}), exact(FAR)) < EXACT
    assert error(expected(FAR, {"importance_level": "sequence"}), exact(FAR)) > 0.01


def test_weights_of_tokens_have_the_gradient_of_deviating_from_the_sampler_at_one_token():
    """Prefixes are as the sampler reaches them, and the sampler goes on after the token."""
    of_response = probabilities(FAR.sampler)

    def surrogate(theta: Tensor) -> Tensor:
        change = (logprobs_of(theta) - logprobs_of(FAR.sampler)).exp()  # of the probability of each token
        return (of_response * FAR.rewards).repeat_interleave(LENGTHS) @ change

    ours = expected(FAR, UNBOUNDED, shift=float(of_response @ FAR.rewards))  # advantages are the rewards
    assert (ours - gradient_of(surrogate, FAR.policy).flatten()).abs().max() < EXACT


def test_a_ratio_of_several_updates_and_a_weight_of_a_lag_are_one_factor_that_the_engines_ratio_has_at_once():
    between = FAR.policy + 0.5 * (FAR.sampler - FAR.policy)
    both = factors(FAR, {**UNBOUNDED, **FREE}, old=between)
    assert (both - factors(FAR, {**ENGINE, **FREE})).abs().max() < EXACT
    assert (both - factors(FAR, UNBOUNDED)).abs().max() < EXACT
    # Bounds apply to either part, or to the product.
    assert (factors(FAR, {}, old=between) - factors(FAR, ENGINE)).abs().max() > 0.01


def test_the_error_is_of_first_order_in_the_distance_to_the_sampler():
    for algo in (NONE, UNBOUNDED):
        near, nearer = ([error(expected(case, algo), right) for case, _, right in cases(d)] for d in (0.02, 0.002))
        assert median(nearer) == pytest.approx(median(near) / 10, rel=0.1)


def test_the_noise_of_weights_of_whole_responses_grows_as_a_power_of_the_length():
    """E[w^2] of a response is the product of that of its tokens: 1 + chi^2 to the power of the length."""
    policy, sampler = (logits[0].log_softmax(-1) for logits in (FAR.policy, FAR.sampler))
    of_token = float((2 * policy - sampler).exp().sum())
    assert of_token > 1
    for length in (1, 2, 5):
        tokens = torch.cartesian_prod(*[torch.arange(WORDS)] * length).reshape(-1, length)
        weights = importance_weights(
            policy[tokens].flatten(), sampler[tokens].flatten(), torch.ones(tokens.numel(), dtype=torch.bool),
            torch.arange(0, tokens.numel() + 1, length), mode="truncated", level="sequence", cap=1e9,
        ).weights.reshape(-1, length)[:, 0]  # fmt: skip
        assert float(sampler[tokens].sum(1).exp() @ weights.square()) == pytest.approx(of_token**length)


# --- rounding ---


def test_a_rounding_of_a_logit_changes_the_ratio_of_a_rare_token_most_and_its_probability_least():
    rounding = 1e-3
    for probability in (0.999, 0.5, 0.001):
        logits = torch.tensor([math.log(probability), math.log1p(-probability)], dtype=torch.float64)
        moved = (logits + torch.tensor([rounding, 0.0])).log_softmax(-1)[0]
        assert float(moved - logits[0]) == pytest.approx((1 - probability) * rounding, rel=1e-2)
        assert float(moved.exp()) - probability == pytest.approx(probability * (1 - probability) * rounding, rel=1e-2)


# --- a support ---

TOP = 2
SUPPORT_SEEDS = range(30)


def top(logits: Tensor) -> Tensor:
    return torch.zeros_like(ALL).scatter_(1, logits.topk(TOP, -1).indices, value=True)


def restricted(seed: int, distance: float) -> Case:
    case = make_case(seed, distance)
    return case._replace(kept=top(case.sampler))


def test_over_supports_the_gradient_is_exact_on_policy_and_with_weights_of_whole_responses_at_any_distance():
    """Exact for the policy that is restricted to the supports that the engine recorded."""
    for seed in SUPPORT_SEEDS:
        for distance, algo in ((0.0, NONE), (0.6, {"importance_level": "sequence", **UNBOUNDED})):
            case = restricted(seed, distance)
            assert (expected(case, algo) - exact(case)).abs().max() < EXACT


def test_where_the_learners_own_sets_differ_the_gradient_is_that_of_another_policy_by_what_the_page_says():
    errors = []
    for seed in SUPPORT_SEEDS:
        case = restricted(seed, 0.2)
        own = top(case.policy)
        away = error(exact(case), exact(case, own))
        assert (away > EXACT) <= bool((own != case.kept).any())
        errors += [away] * bool((own != case.kept).any())
    said = f"in {len(errors)} of {len(SUPPORT_SEEDS)} policies the sets differ, and there the median error is "
    assert f"{said}{median(errors):.2f}" in " ".join(PAGE.read_text().split())


def test_a_learner_that_normalizes_over_the_whole_vocabulary_is_wrong_on_policy_by_what_the_page_says():
    errors = []
    for seed in SUPPORT_SEEDS:
        case = restricted(seed, 0.0)
        probability = probabilities(case.sampler, case.kept)
        advantages = case.rewards - probability @ case.rewards
        ours = (probability * advantages).repeat_interleave(LENGTHS) @ scores(case._replace(kept=ALL))
        errors.append(error(ours, exact(case)))
    said = f"a median error of {median(errors):.2f} ({min(errors):.2f} to {max(errors):.2f}) on-policy"
    assert said in " ".join(PAGE.read_text().split())
