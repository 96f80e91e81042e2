"""What a rollout worker asks the engines for, and how it grades."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from rlhf.rewards.model_client import RewardModelClient
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import Purpose, evaluation_purpose, texts_purpose, training_purpose
from rlhf.rollout.worker import RolloutWorker, to_rollout
from rlhf.run.reward_scale import normalize_scores
from rlhf.run.state import RunState
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import Prompt, Rollout, ScoredRollout, VersionSpan


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

    worker = RolloutWorker(config, tiny_model.make_tokenizer(), generate, cast(Scorer, Ungraded()))
    for source in ("a", "b", "c"):
        prompt = Prompt(f"{source}/1", 0, np.ones(1, np.int32), (), "", source)
        asyncio.run(worker.rollout_group(prompt, evaluation_purpose(config, None, source)))
    longest = config.rollout.max_response_tokens
    assert asked == [
        (1, 0.5, 0.95, None, 0.0, longest),
        (4, 0.5, 0.9, 7, 0.0, 9),
        (1, 0.5, 0.95, None, 0.2, longest),
    ]
    prompt = Prompt("a/1", 0, np.ones(1, np.int32), (), "", "a")
    asyncio.run(worker.rollout_group(prompt, training_purpose(config, None)))
    assert asked[-1] == (config.rollout.samples_per_prompt, config.rollout.temperature, 1.0, None, 0.0, longest)


# --- as the original RLHF code: the reward model reads up to the first ".", and its scores are normalized ---

RLHF = {
    "data": {"eval": "p.jsonl"},
    "rollout": {"truncate_token": ".", "truncate": "graded_text", "non_stop_reward": -1.0, "samples_per_prompt": 1},
    "reward": {"parts": []},
    "reward_model": {"endpoint": "http://never-asked", "reference_samples": 2},
}


def original_rlhf(tmp_path: Path, texts: list[str]) -> tuple[RolloutWorker, Callable[[Any], Purpose]]:
    """A worker of these texts, one after another; its reward model scores a response by its number of characters."""
    config, tokenizer = make_ppo_config(tmp_path / "model", **RLHF), tiny_model.make_tokenizer()

    async def generate(_: Any, settings: SamplingSettings, **__: Any) -> list[Completion]:
        ids = np.array(tokenizer.encode(texts.pop(0), add_special_tokens=False), np.int32)
        sampled = Completion(ids, np.full(len(ids), -1.0, np.float32), "length", (VersionSpan(0, len(ids), 0),))
        return [settings.stopped_at_token(sampled)]

    async def characters(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        return [float(len(messages[-1]["content"])) for messages in conversations]

    model, token = RewardModelClient([characters], weight=1.0), truncate_token_id(config.rollout, tokenizer)
    worker = RolloutWorker(config, tokenizer, generate, cast(Scorer, Ungraded()), reward_model=model)
    return worker, lambda purpose, *source: purpose(config, token, *source)


def trained(worker: RolloutWorker, purpose: Callable[..., Purpose]) -> ScoredRollout:
    prompt = some_prompts().prompts["p"][0]
    return asyncio.run(worker.rollout_group(prompt, purpose(training_purpose))).samples[0]


def normalize(worker: RolloutWorker, purpose: Callable[..., Purpose], state: RunState) -> None:
    model = worker.reward_model

    def set_scale(mean: float, std: float) -> None:
        assert model is not None
        model.mean, model.std = mean, std

    workers: Any = SimpleNamespace(rollout_group=worker.rollout_group, reward_model=model, set_scale=set_scale)
    asyncio.run(normalize_scores(workers, purpose(texts_purpose), some_prompts(), worker.config, state))


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
    original = original_rlhf(tmp_path, ["12.34.5", "1234567"])
    cut, rejected = (trained(*original) for _ in range(2))
    assert (cut.text, cut.reward, cut.rollout.finish_reason, cut.rollout.response_length) == ("12.", 3.0, "stop", 7)
    assert (rejected.text, rejected.reward, rejected.rollout.response_length) == ("1234567", -1.0, 7)


def test_an_evaluation_has_the_score_of_the_reward_model_next_to_the_parts_of_the_reward(tmp_path: Path) -> None:
    worker, purpose = original_rlhf(tmp_path, ["12.34.5"])
    prompt = some_prompts().prompts["p"][0]
    (sample,) = asyncio.run(worker.rollout_group(prompt, purpose(evaluation_purpose, "p"))).samples
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
    worker = RolloutWorker(config, tokenizer, cast(Any, None), cast(Scorer, Ungraded()))
    purpose = Purpose("texts", 1, SamplingSettings(1.0, 99))
    (sample,) = asyncio.run(worker.grade(some_prompts().prompts["p"][0], [rollout], purpose))
    assert sample.text == "<|channel|>analysis<|message|>2+40"


def test_scores_get_mean_0_and_variance_1_over_responses_of_the_start_policy_and_a_resumed_run_keeps_the_scale(
    tmp_path: Path,
) -> None:
    """Scores 1 and 5: mean 3, std 2. A score of 4 is then 0.5."""
    texts = [".23", "1234.", "123.", "123."]
    state, original = RunState(), original_rlhf(tmp_path, texts)
    normalize(*original, state)
    assert state.reward_scale == {"mean": 3.0, "std": 2.0}
    assert trained(*original).reward == 0.5
    resumed = original_rlhf(tmp_path, texts)
    normalize(*resumed, RunState.from_json(state.to_json()))
    assert trained(*resumed).reward == 0.5


def test_scores_that_are_all_the_same_have_no_scale(tmp_path: Path) -> None:
    original = original_rlhf(tmp_path, ["1.", "2."])
    with pytest.raises(RuntimeError, match=r"reward_model\.reference_samples=2: 2 responses"):
        normalize(*original, RunState())
