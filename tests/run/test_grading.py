"""What the sampler asks the engines for, and its measure of their speed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken
from worlds import make_config, make_ppo_config

from rlhf.answers.thoughts import Marks
from rlhf.data.load import LoadedPrompts
from rlhf.data.model_files import truncate_token_id
from rlhf.learner import tiny_model
from rlhf.log.clock import BusyMeter
from rlhf.rewards.model_client import RewardModelClient
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.requests import Completion, SamplingSettings
from rlhf.rollout.sampler import Sampler, to_rollout
from rlhf.run.grading import Grading, normalize_scores, silent_rewards
from rlhf.run.state import RunState
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout, VersionSpan


def test_tokens_that_arrive_during_an_evaluation_are_in_the_rate_of_the_next_step() -> None:
    meter = BusyMeter()
    meter.begin()
    time.sleep(0.01)
    meter.end()
    meter.tokens += 30
    rate, busy_s = meter.take()
    assert busy_s >= 0.01
    assert rate == pytest.approx(30 / busy_s)
    assert meter.take() == (0.0, 0.0)


def test_an_evaluation_set_is_sampled_as_it_asks(tmp_path: Path) -> None:
    sets = [
        {"path": "a.jsonl"},
        {"path": "b.jsonl", "samples_per_prompt": 4, "max_response_tokens": 9, "top_p": 0.9, "top_k": 7},
        {"path": "c.jsonl", "min_p": 0.2},
    ]
    config = make_config(tmp_path / "model", data={"eval": sets}, evaluation={"temperature": 0.5, "top_p": 0.95})
    asked: list[tuple[int, float, float, int | None, float, int]] = []

    async def generate(_: Any, settings: SamplingSettings, *, samples: int, **__: Any) -> list[Completion]:
        restriction = settings.top_p, settings.top_k, settings.min_p
        asked.append((samples, settings.temperature, *restriction, settings.max_tokens))
        return []

    async def grade(*_: Any, **__: Any) -> tuple[ScoredRollout, ...]:
        return ()

    sampler = Sampler(config, None, generate, grade)
    for source in ("a", "b", "c"):
        asyncio.run(sampler.for_evaluation(Prompt(f"{source}/1", 0, np.ones(1, np.int32), (), "", source)))
    longest = config.rollout.max_response_tokens
    assert asked == [
        (1, 0.5, 0.95, None, 0.0, longest),
        (4, 0.5, 0.9, 7, 0.0, 9),
        (1, 0.5, 0.95, None, 0.2, longest),
    ]
    asyncio.run(sampler.for_training(Prompt("a/1", 0, np.ones(1, np.int32), (), "", "a")))
    assert asked[-1] == (config.rollout.samples_per_prompt, config.rollout.temperature, 1.0, None, 0.0, longest)


# --- rewards that say nothing ---

VALUE, NONE = {"exact": 1.0, "format": 1.0}, {"exact": None, "format": 1.0}


@pytest.mark.parametrize(
    ("sections", "parts", "rewards", "warning", "note"),
    [
        ({}, [VALUE, NONE], [1.0, None], "", ""),
        ({}, [NONE, NONE], [None, None], "reward: every reward of step 1 was None: exact: it returned None each time. ",
         ""),
        ({}, [NONE, {"exact": 1.0, "format": None}], [None, None],
         "reward: every reward of step 1 was None: no response has a value of each part (exact 1 of 2, format 1 of 2).",
         ""),
        ({}, [NONE, NONE], [1.0, 1.0], "", "reward: exact judged none of the 2 responses of step 1: it returned None"),
        ({"reward": {"by_source": {"p": ["exact"]}}}, [NONE, NONE], [None, None],
         "reward.by_source.p: every reward of step 1 for prompts of p was None: exact: it returned", ""),
        ({"reward": {"parts": []}, "reward_model": {"path": "m"}}, [{"reward_model": None}] * 2, [None, None],
         "reward: every reward of step 1 was None: reward_model: it gave no score.", ""),
        ({"reward": {"parts": []}, "environment": {"name": "game.py:Game"}}, [{}, {}], [None, None],
         "reward: every reward of step 1 was None: environment: it gave no reward.", ""),
        ({"reward": {"parts": []}, "algo": {"teacher": {"path": "t"}}}, [{}, {}], [None, None], "", ""),
    ],
)  # fmt: skip
def test_a_step_whose_rewards_say_nothing_names_what_is_silent(
    tmp_path: Path, sections: dict[str, Any], parts: list[Any], rewards: list[float | None], warning: str, note: str
) -> None:
    config = make_config(tmp_path / "model", **({"reward": {"parts": ["exact", "format"]}} | sections))
    prompt = Prompt("p/1", 0, np.ones(1, np.int32), (), "", "p")
    ended = Completion(np.ones(1, np.int32), np.zeros(1, np.float32), "stop", (VersionSpan(0, 1, 0),))
    samples = [
        ScoredRollout(to_rollout(prompt, sample, ended), "", "", reward, values, "ok")
        for sample, (values, reward) in enumerate(zip(parts, rewards, strict=True))
    ]
    scorer: Any = SimpleNamespace(
        missing_value_reason=lambda _: "it returned None each time", failed_always=lambda _: False
    )
    for told, expected in zip(
        silent_rewards(config, scorer, [RolloutGroup(prompt, tuple(samples))], step=1), (warning, note), strict=True
    ):
        assert len(told) == bool(expected)
        assert "".join(told).startswith(expected)


# --- as the original RLHF code: the reward model reads up to the first ".", and its scores are normalized ---

RLHF = {
    "data": {"eval": "p.jsonl"},
    "rollout": {"truncate_token": ".", "truncate": "graded_text", "non_stop_reward": -1.0, "samples_per_prompt": 1},
    "reward": {"parts": []},
    "reward_model": {"endpoint": "http://never-asked", "reference_samples": 2},
}


def original_rlhf(tmp_path: Path, texts: list[str]) -> tuple[Sampler, Grading]:
    """A sampler of these texts, one after another; its reward model scores a response by its number of characters."""
    config, tokenizer = make_ppo_config(tmp_path / "model", **RLHF), tiny_model.make_tokenizer()

    async def generate(_: Any, settings: SamplingSettings, **__: Any) -> list[Completion]:
        ids = np.array(tokenizer.encode(texts.pop(0), add_special_tokens=False), np.int32)
        sampled = Completion(ids, np.full(len(ids), -1.0, np.float32), "length", (VersionSpan(0, len(ids), 0),))
        return [settings.stopped_at_token(sampled)]

    async def characters(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        return [float(len(messages[-1]["content"])) for messages in conversations]

    grading = Grading(config, cast(Scorer, Ungraded()), tokenizer, RewardModelClient([characters], weight=1.0))
    return Sampler(config, truncate_token_id(config.rollout, tokenizer), generate, grading), grading


async def normalize(sampler: Sampler, grading: Grading, state: RunState) -> None:
    await normalize_scores(grading, sampler, some_prompts(), sampler._config, state)


class Ungraded:
    """No verifier: the reward model alone judges."""

    async def score_group(
        self, _: Prompt, rollouts: list[Rollout], texts: list[str], marks: Marks, *, metric: str | None
    ) -> tuple[ScoredRollout, ...]:
        return tuple(ScoredRollout(*graded, "", None, {}, "not_judged") for graded in zip(rollouts, texts, strict=True))


def some_prompts() -> LoadedPrompts:
    prompts = [Prompt(f"p/{row}", 0, np.ones(2, np.int32), (), "", "p") for row in (1, 2)]
    return LoadedPrompts({"p": prompts}, {"p": 0}, {"p": 2})


def test_the_reward_model_reads_up_to_the_token_and_all_tokens_after_it_are_trained(tmp_path: Path) -> None:
    sampler, _ = original_rlhf(tmp_path, ["12.34.5", "1234567"])
    prompt = some_prompts().prompts["p"][0]
    (cut,), (rejected,) = (asyncio.run(sampler.for_training(prompt)).samples for _ in range(2))
    assert (cut.text, cut.reward, cut.rollout.finish_reason, cut.rollout.response_length) == ("12.", 3.0, "stop", 7)
    assert (rejected.text, rejected.reward, rejected.rollout.response_length) == ("1234567", -1.0, 7)


def test_an_evaluation_has_the_score_of_the_reward_model_next_to_the_parts_of_the_reward(tmp_path: Path) -> None:
    sampler, _ = original_rlhf(tmp_path, ["12.34.5"])
    (sample,) = asyncio.run(sampler.for_evaluation(some_prompts().prompts["p"][0])).samples
    assert sample.reward_parts == {"reward_model": 3.0}


def test_the_marks_of_channels_stay_in_the_text_that_is_graded(tmp_path: Path) -> None:
    """gpt-oss: the channels are special tokens, and without them a thought would be read as the answer. transformers
    does not count them among `all_special_tokens`.
    """
    config, tokenizer = make_config(tmp_path / "model"), tiny_model.make_tokenizer()
    names = ["<|channel|>", "<|message|>", "<|return|>"]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    said = "<|channel|>analysis<|message|>2+40<|return|>"
    ids = tokenizer(said)["input_ids"]
    assert "<|channel|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    sampled = Completion(np.array(ids, np.int32), np.zeros(len(ids)), "stop", (VersionSpan(0, len(ids), 0),))
    rollout = to_rollout(some_prompts().prompts["p"][0], 0, sampled)
    grading = Grading(config, cast(Scorer, Ungraded()), tokenizer)
    assert grading.text(rollout, SamplingSettings(1.0, 99)) == "<|channel|>analysis<|message|>2+40"


def test_scores_get_mean_0_and_variance_1_over_responses_of_the_start_policy_and_a_resumed_run_keeps_the_scale(
    tmp_path: Path,
) -> None:
    """Scores 1 and 5: mean 3, std 2. A score of 4 is then 0.5."""
    texts = [".23", "1234.", "123.", "123."]
    state, (sampler, grading) = RunState(), original_rlhf(tmp_path, texts)
    asyncio.run(normalize(sampler, grading, state))
    assert state.reward_scale == {"mean": 3.0, "std": 2.0}
    prompt = some_prompts().prompts["p"][0]
    assert asyncio.run(sampler.for_training(prompt)).samples[0].reward == 0.5
    resumed, grading = original_rlhf(tmp_path, texts)
    asyncio.run(normalize(resumed, grading, RunState.from_json(state.to_json())))
    assert asyncio.run(resumed.for_training(prompt)).samples[0].reward == 0.5


def test_scores_that_are_all_the_same_have_no_scale(tmp_path: Path) -> None:
    sampler, grading = original_rlhf(tmp_path, ["1.", "2."])
    with pytest.raises(RuntimeError, match=r"reward_model\.reference_samples=2: 2 responses"):
        asyncio.run(normalize(sampler, grading, RunState()))
