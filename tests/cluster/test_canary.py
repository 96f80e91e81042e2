"""The canary: what a stale or half-updated engine looks like, and that the message names it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from fake_canary import PROMPTS, FakeEngines, Side, all_but_the_head, everything

from rlhf.cluster.actors import ClusterError, record_call
from rlhf.cluster.canary import FAR, MIN_TOKENS, MOVED_FAR, SEQUENCES, TOLERANCE, Canary
from rlhf.log.reductions import ENGINE_KL_FROM, Mean, StepMetrics
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import Support


def make(transfer: Any, *, rounding: float = 0.0) -> tuple[FakeEngines, Canary]:
    """With the rounding of a bfloat16 model, the learner's and the engine's opposite; a float32 run without."""
    engines: Any = FakeEngines(transfer, rounding=rounding)
    return engines, Canary(engines, PROMPTS, dtype="bfloat16" if rounding else "float32", max_tokens=40)


def start(canary: Canary) -> dict[str, float]:
    async def measured() -> dict[str, float]:
        await canary.measure_noise()
        return await canary.check_start(0)

    return asyncio.run(measured())


def test_an_engine_that_follows_passes_and_ends_with_the_true_weights() -> None:
    engines, canary = make(everything)
    metrics = start(canary)
    assert metrics == {"sync/canary_difference": 0.0, "sync/canary_tolerance": 0.001}
    assert (engines.served.body, engines.served.head) == (1.0, 1.0)
    assert engines.sent == [0, 0]


def test_an_engine_that_keeps_its_old_head_stops_the_run_at_start_up_although_the_true_weights_agree() -> None:
    engines, canary = make(all_but_the_head)
    with pytest.raises(ClusterError, match=r"engine 0 .*perturbed weights.*worst at token \d+") as caught:
        start(canary)
    assert "tolerance 0.001" in str(caught.value)
    assert (engines.trained.body, engines.trained.head) == (1.0, 1.0)  # restored all the same


def test_tensors_are_perturbed_a_run_at_a_time_and_the_message_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.cluster.canary.BLOCK_TENSORS", 1)
    engines, canary = make(all_but_the_head)
    with pytest.raises(ClusterError, match=r"perturbed.*\bhead to head\b"):
        start(canary)
    assert engines.sent == [0, 0]
    engines, canary = make(everything)
    start(canary)
    assert engines.sent == [0, 0, 0]


def test_a_stale_engine_is_named_with_its_worst_token_and_both_values() -> None:
    engines, canary = make(everything)
    start(canary)
    engines.trained.head = 2.0
    with pytest.raises(ClusterError) as caught:
        asyncio.run(canary.check(7))
    message = str(caught.value)
    assert "weights of version 7" in message
    assert "learner -1.98" in message  # the largest token id, 49, at head 2
    assert "engine -1.49" in message


def test_what_the_learners_own_type_costs_is_no_disagreement() -> None:
    _, canary = make(everything, rounding=0.07)  # engine and learner differ by 0.14
    metrics = start(canary)
    assert metrics == {"sync/canary_difference": pytest.approx(0.14), "sync/canary_tolerance": pytest.approx(0.21)}


@pytest.mark.parametrize(("rounding", "wrong"), [(0.0, 0.002), (0.07, 0.2)])
def test_a_difference_that_this_models_rounding_does_not_explain_stops_the_run(rounding: float, wrong: float) -> None:
    engines, canary = make(everything, rounding=rounding)
    engines.served.body += wrong
    with pytest.raises(ClusterError, match=r"engine 0 .*untouched weights.*worst at token"):
        asyncio.run(canary.measure_noise())


@pytest.mark.parametrize("sleeps", [False, True])
def test_rounding_that_has_grown_is_measured_again_and_allowed(sleeps: bool) -> None:
    engines, canary = make(everything, rounding=0.01)
    engines.sleeps = sleeps
    start(canary)
    sent = len(engines.sent)
    engines.trained.rounding, engines.served.rounding = 0.04, -0.04  # the weights are the same
    metrics = asyncio.run(canary.check(5))
    difference = 0.08 if sleeps else 0.04  # compared again with the learner; or with its float32 pass
    assert metrics["sync/canary_difference"] == pytest.approx(difference)
    assert metrics["sync/canary_tolerance"] == pytest.approx(0.12)
    assert not engines.asleep
    assert engines.sent[sent:] == ([5] if sleeps else [])
    assert canary.kl_bound == pytest.approx(9 * 0.04**2 / 2, rel=0.05)
    engines.trained.rounding, engines.served.rounding = 0.01, -0.01
    assert asyncio.run(canary.check(6))["sync/canary_tolerance"] == pytest.approx(0.12)  # it never shrinks


@pytest.mark.parametrize(("old", "by"), [("head", 0.8), ("body", 0.2)])
def test_an_old_tensor_is_found_however_much_rounding_has_grown(old: str, by: float) -> None:
    engines, canary = make(everything, rounding=0.01)
    start(canary)
    engines.trained.rounding, engines.served.rounding = 0.04, -0.04
    setattr(engines.trained, old, getattr(engines.trained, old) + by)
    with pytest.raises(ClusterError, match=r"weights of version 3.*tolerance 0\.1"):
        asyncio.run(canary.check(3))


class Quantized(FakeEngines):
    """Engines whose arguments cost log-probs `error` nats, whatever weights they have."""

    def __init__(self, transfer: Any, error: float) -> None:
        super().__init__(transfer)
        self.served.rounding = error


def test_where_engines_return_what_they_sampled_from_the_texts_come_from_few_tokens() -> None:
    asked: list[int | None] = []

    class Recorded(FakeEngines):
        def sample(self, settings: SamplingSettings) -> Completion:
            asked.append(settings.top_k)
            return super().sample(settings)

    for return_support in (False, True):
        engines = Recorded(lambda trained, served: None)
        canary = Canary(engines, PROMPTS[:1], dtype="float32", max_tokens=40, return_support=return_support)
        asyncio.run(canary.measure_noise())
    assert asked == [None, 64]


@pytest.mark.parametrize("own_options", [False, True])
def test_what_the_engines_own_options_cost_is_measured_at_the_start_and_allowed_later(own_options: bool) -> None:
    engines: Any = Quantized(everything, error=0.1)
    canary = Canary(engines, PROMPTS, dtype="float32", max_tokens=40, own_options=own_options)
    if not own_options:
        with pytest.raises(ClusterError, match="untouched weights"):
            start(canary)
        return
    metrics = start(canary)
    assert metrics == {"sync/canary_difference": pytest.approx(0.1), "sync/canary_tolerance": pytest.approx(0.3)}
    assert canary.kl_bound > 9 * 0.1**2 / 2 * 0.9
    engines.trained.body += 0.6
    with pytest.raises(ClusterError, match="weights of version 2"):
        asyncio.run(canary.check(2))


def test_options_that_cost_more_than_importance_weights_correct_are_refused() -> None:
    engines: Any = Quantized(everything, error=0.3)
    with pytest.raises(ClusterError, match=r"untouched weights.*tolerance 0\.2"):
        start(Canary(engines, PROMPTS, dtype="float32", max_tokens=40, own_options=True))


def test_nan_never_passes() -> None:
    engines, canary = make(everything)
    start(canary)
    engines.trained.head = float("nan")
    with pytest.raises(ClusterError, match="nan"):
        asyncio.run(canary.check(1))


def test_the_sequences_are_the_shortest_prompts_each_with_a_response_that_the_engine_samples() -> None:
    engines: Any = FakeEngines(everything)
    canary = Canary(engines, PROMPTS[::-1], dtype="float32", max_tokens=40)
    asyncio.run(canary.measure_noise())
    assert len(canary.sequences) == SEQUENCES
    assert all(len(s) == 39 for s in canary.sequences)
    assert canary.sequences[3].tolist() == [0, 1, 2, 3, 4, 5, *range(49, 16, -1)]


# --- what engines sample after a sleep ---


class Sleepers(FakeEngines):
    """Two engines that share GPUs with learners. A sleep costs what the second one samples `error` nats per token."""

    sleeps, slept, error = True, False, 0.0

    async def sleep_if_colocated(self) -> None:
        self.asleep = self.slept = True

    async def send_weights(self, version: int) -> None:
        await self.sleep_if_colocated()
        await super().send_weights(version)

    def sample_everywhere(self, beginning: np.ndarray, settings: SamplingSettings) -> list[Completion]:
        assert self.slept, "nothing has slept yet"
        assert settings.whole, "engines would sample unequally many tokens"
        (first,) = super().sample_everywhere(beginning, settings)
        return [first, dataclasses.replace(first, logprobs=first.logprobs - self.error)]


def asleep(*, rounding: float = 0.0, error: float = 0.0) -> tuple[Sleepers, Canary]:
    engines: Any = Sleepers(everything, rounding=rounding)
    engines.error = error
    return engines, Canary(engines, PROMPTS, dtype="bfloat16" if rounding else "float32", max_tokens=40)


def test_an_engine_whose_sleep_broke_sampling_alone_is_named_before_the_first_step() -> None:
    _, canary = asleep(error=0.01)
    numbers = r"engine 1 sampled .*difference\| 0\.01 over \d+ tokens.*learner -\S+, engine -\S+\. "
    with pytest.raises(ClusterError, match=numbers + r".*cluster\.placement=separate.*rollout\.enforce_eager=true"):
        start(canary)
    _, canary = asleep(error=math.nan)
    with pytest.raises(ClusterError, match="engine 1 sampled"):
        start(canary)


def test_an_engine_whose_sleep_broke_nothing_passes_and_engines_that_never_sleep_are_not_asked() -> None:
    _, canary = asleep()
    assert start(canary)["sync/sampled_difference"] == pytest.approx(0.0, abs=1e-6)
    engines, canary = make(everything)
    engines.sample_everywhere = None  # type: ignore[assignment, method-assign]
    assert "sync/sampled_difference" not in start(canary)


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (0.4, False)])
def test_sampled_tokens_that_are_rounded_more_are_judged_by_the_rounding_of_these_tokens(
    error: float, passes: bool
) -> None:
    engines, canary = asleep(rounding=0.01, error=error)
    asyncio.run(canary.measure_noise())
    engines.slept, engines.asleep = True, False
    engines.trained.rounding, engines.served.rounding = 0.04, -0.04  # the tolerance is 0.03
    if passes:
        assert asyncio.run(canary.check_sampled(3)) == pytest.approx(0.04)  # to the float32 pass
        assert (engines.asleep, engines.sent) == (False, [3])  # the float32 pass took the GPU
        return
    with pytest.raises(ClusterError, match=r"engine 1 sampled.*tolerance 0\.1;"):
        asyncio.run(canary.check_sampled(3))


def test_tokens_of_a_support_are_scored_among_the_tokens_that_they_were_sampled_from() -> None:
    scored: list[tuple[Any, ...]] = []

    class Restricted(Sleepers):
        def sample_everywhere(self, beginning: np.ndarray, settings: SamplingSettings) -> list[Completion]:
            first, _ = super().sample_everywhere(beginning, settings)
            ids = np.stack([first.token_ids, np.full_like(first.token_ids, 9)], 1).flatten()
            support = Support.from_sizes(ids, np.full(len(first.token_ids), 2))
            return [dataclasses.replace(first, support=support)]

    class Scored(Side):
        async def call(self, ask: Any) -> list[Any]:
            scored.append(record_call(ask))
            return await super().call(ask)

    engines: Any = Restricted(everything)
    engines.learners = Scored(engines, engines.trained)
    canary = Canary(engines, PROMPTS[:1], dtype="float32", max_tokens=40, return_support=True)
    start(canary)
    method, (sequence,), *_, temperature, (support,) = scored[-1]
    assert (method, temperature) == ("canary", 1.0)
    assert support.sizes.tolist() == [0] * 3 + [2] * 36  # of a prompt and its response
    assert support.ids[:4].tolist() == [sequence[3], 9, sequence[4], 9]


# --- the noise of a deterministic run ---


class DependsOnTheBatch(FakeEngines):
    """What it samples first, next to others, has a last token that is rounded differently."""

    def sample(self, settings: SamplingSettings) -> Completion:
        completion = super().sample(settings)
        self.sampled += 1
        last = np.arange(len(completion.token_ids)) == len(completion.token_ids) - 1
        return dataclasses.replace(completion, logprobs=1e-8 * (last & (self.sampled == 1)))

    sampled = 0


def test_a_deterministic_run_is_refused_where_a_response_depends_on_the_others_in_the_batch() -> None:
    for kind, noise_seed in ((FakeEngines, 3), (DependsOnTheBatch, None), (DependsOnTheBatch, 3)):
        engines: Any = kind(everything)
        canary = Canary(engines, PROMPTS, dtype="float32", max_tokens=40, noise_seed=noise_seed)
        refused = kind is DependsOnTheBatch and noise_seed is not None
        expected = pytest.raises(ClusterError, match=r"same noise.*run\.deterministic=false")
        with expected if refused else contextlib.nullcontext():
            asyncio.run(canary.measure_noise())


# --- the rollouts of a step ---


def kl_by_position(*kls: float, tokens: int = MIN_TOKENS) -> StepMetrics:
    return {name: Mean(kl * tokens, tokens) for name, kl in zip(ENGINE_KL_FROM.values(), kls, strict=False)}


def excess(canary: Canary, metrics: StepMetrics, *, temperature: float = 1.0, max_lag: int = 0) -> float | None:
    return canary.check_rollouts(metrics, temperature=temperature, max_lag=max_lag).get("policy/engine_kl_excess")


def measured(rounding: float) -> Canary:
    _, canary = make(everything, rounding=rounding)
    asyncio.run(canary.measure_noise())
    return canary


def test_rollouts_may_differ_by_nine_times_the_kl_of_the_measured_rounding() -> None:
    canary = measured(0.07)
    noise = (math.exp(0.07) + math.exp(-0.07)) / 2 - 1  # the rounding's sign alternates
    assert canary.kl_bound == pytest.approx(9 * noise, rel=0.02)
    assert excess(canary, kl_by_position(0.9 * canary.kl_bound, 0.8 * canary.kl_bound)) == pytest.approx(0.9)
    assert excess(measured(0.0), kl_by_position(0.5)) == pytest.approx(0.5 / TOLERANCE**2)


def test_a_drift_in_long_contexts_alone_is_seen_and_nan_is_a_drift() -> None:
    canary = measured(0.07)
    assert excess(canary, kl_by_position(0.001, 0.001, 0.2, 0.3)) == pytest.approx(0.3 / canary.kl_bound)
    assert excess(canary, kl_by_position(0.001, math.nan, 0.001)) == FAR
    assert excess(canary, {}) is None


def test_few_tokens_are_judged_with_those_of_the_next_steps() -> None:
    canary = measured(0.07)
    assert excess(canary, kl_by_position(9.0, tokens=MIN_TOKENS // 2)) is None
    assert excess(canary, kl_by_position(0.0, tokens=MIN_TOKENS // 2)) == pytest.approx(4.5 / canary.kl_bound)


def test_with_a_lag_a_position_is_compared_with_the_first_where_the_policy_has_moved_too() -> None:
    canary = measured(0.0)
    assert excess(canary, kl_by_position(0.01, 0.02, 0.03), max_lag=1) == pytest.approx(0.03 / 0.04, rel=1e-3)
    assert excess(canary, kl_by_position(0.01, 0.02, 0.05), max_lag=1) == pytest.approx(0.05 / 0.04, rel=1e-3)
    assert excess(canary, kl_by_position(0.2, 0.02), max_lag=1) == pytest.approx(0.2 / MOVED_FAR)


def test_a_low_temperature_makes_more_of_the_rounding() -> None:
    canary = measured(0.07)
    metrics = kl_by_position(3.6 * canary.kl_bound)
    assert excess(canary, metrics, temperature=0.5) == pytest.approx(0.9)
    assert excess(canary, metrics, temperature=0.6) == pytest.approx(3.6 * 0.36)
