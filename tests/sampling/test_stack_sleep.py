"""Requests whose engine sleeps while learners train go on as if nothing had been: shared GPUs with a policy lag.

On CPU a sleep frees no memory, but all that concerns requests is vLLM's own there too: they are paused, lose their keys
and are computed again after the last part has woken.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_environments import Templates, call
from shared_cpu import REFUSED
from worlds import make_config

from rlhf.config import contradictions
from rlhf.environments.turns import Answers, Limits, play_turns
from rlhf.rollout.worker import to_rollout
from rlhf.run.rollout_log import interruptions
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.types import Outcome, Prompt, Rollout

pytestmark = pytest.mark.stack

SHORT, LONG = 24, 360  # tokens of the two halves of the requests
PROMPTS = [Prompt(f"p/{i}", 0, np.arange(60 + i, 72 + 2 * i, dtype=np.int32), (), "0", "p") for i in range(64)]
LATER = SamplingSettings(temperature=1.0, max_tokens=32, whole=True)
STOP = SamplingSettings(temperature=1.0, max_tokens=LONG, stop=("e",))  # ends where it would without a sleep, too
TIE = 1e-4  # difference of two scores that rounding may decide


class Sampled(NamedTuple):
    through: list[Completion]  # of 64 requests that nothing interrupts
    slept: list[Completion]  # of the same requests
    stopped: tuple[list[Completion], list[Completion]]
    learner: list[np.ndarray]  # its log-probs of the slept sequences
    late: Completion  # of a request that came while the engines slept
    played: Rollout  # its tool answered while the engines slept
    answered_asleep: int
    busy: tuple[float, float]  # seconds of the engine before and after a sleep of a second
    difference: float  # the canary's, on tokens sampled after the last sleep


class Session:
    """Of a rollout whose model calls a tool in every turn."""

    tools = None

    def __init__(self) -> None:
        self.asleep = asyncio.Event()

    async def call(self, calls: Any) -> Answers:
        await self.asleep.wait()
        return Answers([{"role": "tool", "content": "7"}])

    async def finish(self) -> Outcome:
        return Outcome()


class Talk(Templates):
    def can_go_on(self, token_ids: np.ndarray) -> bool:
        return True  # a turn ends at its last token


async def play(session: Any, generate: Any) -> Rollout:
    async def turn(token_ids: np.ndarray, *, turn: int, **_: Any) -> Completion:
        (completion,) = await generate(token_ids, LATER, seed=turn)
        message = {"role": "assistant", "content": "", "tool_calls": [call("wait")]}
        return replace(completion, finish_reason="stop", message=message)

    limits = Limits(LATER.max_tokens, max_rollout_tokens=200, max_turns=2)
    return await play_turns(PROMPTS[3], 0, session, generate=turn, templates=Talk(), limits=limits)  # type: ignore[arg-type]


async def sample_with_sleeps(config: Any) -> Sampled:
    from rlhf.cluster.canary import Canary
    from rlhf.cluster.engines import started_engines

    async with started_engines(config) as engines:
        generate = engines.choice.generate

        def ask_all() -> list[asyncio.Future[list[Completion]]]:
            asked = (
                generate(
                    prompt.token_ids,
                    SamplingSettings(temperature=1.0, max_tokens=LONG if number % 2 else SHORT, whole=True),
                    seed=1000 + number,
                )
                for number, prompt in enumerate(PROMPTS)
            )
            stops = (generate(prompt.token_ids, STOP, seed=number) for number, prompt in enumerate(PROMPTS[:8]))
            return [asyncio.ensure_future(each) for each in (*asked, *stops)]

        await engines.send_weights(0)
        through = [completion for (completion,) in await asyncio.gather(*ask_all())]
        await engines.send_weights(0)  # nothing is left in the prefix cache

        asked, session = ask_all(), Session()
        playing = asyncio.ensure_future(play(session, generate))
        await generate(PROMPTS[0].token_ids, LATER)  # sampled together with the others, so they are under way
        await engines.sleep_if_colocated()
        before, _ = await engines.take_work(), await asyncio.sleep(1.0)
        session.asleep.set()
        late = asyncio.ensure_future(generate(PROMPTS[1].token_ids, LATER, seed=7))
        done = sum(each.done() for each in asked)
        _, asleep_s = await engines.take_work()
        answered = sum(each.done() for each in (*asked, late)) - done
        await engines.send_weights(1)
        await generate(PROMPTS[2].token_ids, LATER)
        await engines.send_weights(2)  # to engines that are awake: they sleep first
        slept = [completion for (completion,) in await asyncio.gather(*asked)]
        rollouts = [to_rollout(prompt, 0, completion) for prompt, completion in zip(PROMPTS, slept, strict=False)]
        rollouts.append(await playing)
        (learner,) = await engines.learners.call(
            lambda learner: learner.canary([rollout.sequences[0].token_ids for rollout in rollouts])
        )
        (said,) = await late
        canary = Canary(engines, PROMPTS, dtype=config.model.dtype, max_tokens=config.max_sequence_tokens)
        difference = await canary.check_sampled(2)
    stopped, busy = (through[64:], slept[64:]), (before[1], asleep_s)
    return Sampled(through[:64], slept[:64], stopped, learner, said, rollouts[-1], answered, busy, difference)


@pytest.fixture(scope="module")
def sampled(tiny_model_dir: Path) -> Sampled:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(contradictions.TRAINING_CONFLICTS, REFUSED)
        config = colocated(tiny_model_dir)
    return asyncio.run(sample_with_sleeps(config))


def colocated(data: Path) -> Any:
    return make_config(
        data / "model",
        rollout={
            "max_response_tokens": LONG, "max_policy_lag": 2, "max_concurrent_sequences": 128,
            "engine": {"max_num_batched_tokens": 65536},
        },
        learner={"max_tokens_per_microbatch": 2048},
        cluster={"placement": "colocated", "device": "cpu"},
    )  # fmt: skip


def logits_after(model: Any, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(ids[None].astype(np.int64))).logits[0, -1]
    return logits


def with_noise(logits: torch.Tensor, seed: int, tokens: int) -> int:
    """The token that vLLM samples on CPU from these logits in a request with this seed, after so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens + 1):
        drawn = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    return int(torch.ops._C.fused_gumbel_argmax(logits[None], drawn))


def lead(logits: torch.Tensor, seed: int, tokens: int, first: int, second: int) -> float:
    """By how much the score of one token, its logit plus its noise, is above that of another."""
    low, high = -50.0, 50.0
    for _ in range(40):
        raised, middle = torch.full_like(logits, -1e4), (low + high) / 2
        raised[first], raised[second] = logits[first], logits[second] + middle
        low, high = (middle, high) if with_noise(raised, seed, tokens) == first else (low, middle)
    return low


def test_requests_that_slept_twice_have_the_tokens_of_those_that_did_not(
    sampled: Sampled, tiny_model_dir: Path
) -> None:
    import vllm._custom_ops  # noqa: F401  # vLLM's kernels
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir / "model", dtype=torch.float32)
    twice = 0
    for number, (prompt, through, slept) in enumerate(zip(PROMPTS, sampled.through, sampled.slept, strict=True)):
        seed, begin = 1000 + number, prompt.token_ids
        twice += len(slept.version_spans) == 3
        assert len(slept.token_ids) == len(through.token_ids)
        if (differ := np.flatnonzero(slept.token_ids != through.token_ids)).size:
            same = int(differ[0])
            logits = logits_after(model, np.concatenate([begin, slept.token_ids[:same]]))
            assert abs(lead(logits, seed, same, slept.token_ids[same], through.token_ids[same])) < TIE
        # a token of each shows that the noise is what this test takes it for
        logits = logits_after(model, np.concatenate([begin, slept.token_ids[:9]]))
        token = int(slept.token_ids[9])
        if with_noise(logits, seed, 9) != token:
            assert abs(lead(logits, seed, 9, token, with_noise(logits, seed, 9))) < TIE
    assert twice >= 24, "the sleeps came too early or too late"


def test_their_log_probs_are_the_learners_and_their_spans_name_the_weights(sampled: Sampled) -> None:
    for prompt, slept, learner in zip(PROMPTS, sampled.slept, sampled.learner, strict=False):
        assert np.abs(slept.logprobs - learner[len(prompt.token_ids) :]).max() < 1e-4
        spans = slept.version_spans
        assert [span.version for span in spans] == [0, 1, 2][: len(spans)]
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(slept.token_ids)
        places = interruptions(to_rollout(prompt, 0, slept))
        assert places == [len(prompt.token_ids) + span.end for span in spans[:-1]]


def test_a_tool_answers_while_the_engines_sleep_and_its_rollout_goes_on(sampled: Sampled) -> None:
    (sequence,) = sampled.played.sequences
    assert sampled.played.facts["turns"] == 2
    assert {span.version for span in sequence.version_spans} >= {0, 1}
    differences = np.abs(sequence.rollout_logprobs - sampled.learner[-1])[sequence.response_mask]
    assert len(differences) == 2 * LATER.max_tokens
    assert differences.max() < 1e-4


def test_the_canary_finds_that_what_is_sampled_after_a_sleep_is_the_learners(sampled: Sampled) -> None:
    assert 0 < sampled.difference < 1e-4


def test_stop_strings_stop_across_a_sleep(sampled: Sampled) -> None:
    through, slept = sampled.stopped
    assert [each.token_ids.tolist() for each in slept] == [each.token_ids.tolist() for each in through]
    assert [each.finish_reason for each in slept] == [each.finish_reason for each in through]


def test_new_requests_wait_and_a_sleeping_engine_is_not_busy(sampled: Sampled) -> None:
    assert sampled.answered_asleep == 0
    assert {span.version for span in sampled.late.version_spans} <= {1, 2}
    assert len(sampled.late.token_ids) == LATER.max_tokens
    assert sampled.late.asleep_s > 0
    assert sampled.busy[0] > 0
    assert sampled.busy[1] == 0
