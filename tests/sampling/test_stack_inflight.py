"""What an engine samples: under which settings, and with which weights where they change in the meantime."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from worlds import make_config

from rlhf.learner.tiny_model import make_tokenizer
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion, Parsing, SamplingSettings
from rlhf.types import Prompt, Rollout

pytestmark = pytest.mark.stack

# An untrained model ends a response with a probability of 1/262 at every token: when a later request of 32 tokens has
# been answered, one in eight of the others has ended, and never all of them.
LONGEST = 1500  # tokens
SAMPLES = 16
LATER = SamplingSettings(temperature=1.0, max_tokens=32)
ASKED = [
    (1, replace(LATER, temperature=0.0)),
    (4, replace(LATER, top_p=1e-6)),
    (4, replace(LATER, top_k=1)),
    (4, LATER),
]  # samples and settings

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Sampled(NamedTuple):
    """Responses of which some began before new weights came and ended after; log-probs under old and new weights."""

    rollouts: list[Rollout]
    old: list[np.ndarray]
    new: list[np.ndarray]
    by_settings: list[list[list[int]]]  # token ids for each of ASKED, before
    spoken: list[Completion]  # with messages


async def cancel_requests(engines: Any, prompt: Prompt) -> int:
    """Cancel requests under way. Returns how many sequences the engine has while it works on a later request."""

    def running_requests(worker: Any) -> int:
        return len(worker.model_runner.requests)

    generate, settings = engines.choice.generate, SamplingSettings(1.0, LONGEST, whole=True)
    unwanted = [asyncio.ensure_future(generate(prompt.token_ids, settings, samples=n)) for n in (1, SAMPLES)]
    await generate(prompt.token_ids, LATER)
    ((before,),) = await engines.group.call(lambda engine: engine.on_workers(running_requests))
    assert before >= 1 + SAMPLES
    for request in unwanted:
        request.cancel()
    await asyncio.wait(unwanted)
    await generate(prompt.token_ids, LATER)
    ((after,),) = await engines.group.call(lambda engine: engine.on_workers(running_requests))
    return after


async def sample_across_an_update(config: Any) -> Sampled:
    from rlhf.cluster.engines import started_engines

    prompt = Prompt("p/0", 0, np.arange(60, 80, dtype=np.int32), (), "0", "p")
    async with started_engines(config) as engines:
        generate = engines.choice.generate
        await engines.send_weights(0)
        assert await cancel_requests(engines, prompt) <= 1  # the later one, until the engine's next step
        groups = [await generate(prompt.token_ids, settings, samples=samples) for samples, settings in ASKED]
        parsed = replace(LATER, parsing=Parsing("hermes", tools=(TOOL,)))
        spoken = await generate(prompt.token_ids, parsed, samples=4, prefer=0)
        await engines.learners.call(
            lambda learner: learner.perturb_weights()
        )  # of the learner's; the engine samples with the old ones
        settings = SamplingSettings(1.0, LONGEST)
        sampling = asyncio.ensure_future(generate(prompt.token_ids, settings, samples=SAMPLES))
        await asyncio.sleep(0)  # until it is sent
        await generate(prompt.token_ids, LATER)  # requests are worked on together: the others are under way
        await engines.send_weights(1)
        rollouts = [to_rollout(prompt, sample, completion) for sample, completion in enumerate(await sampling)]
        sequences = [rollout.sequences[0].token_ids for rollout in rollouts]
        (new,) = await engines.learners.call(lambda learner: learner.canary(sequences))
        await engines.learners.call(lambda learner: learner.restore_weights())
        (old,) = await engines.learners.call(lambda learner: learner.canary(sequences))
    by_settings = [[completion.token_ids.tolist() for completion in group] for group in groups]
    assert all(completion.message is None for group in groups for completion in group)
    return Sampled(rollouts, old, new, by_settings, spoken)


@pytest.mark.parametrize(
    ("mode", "lora"),
    [("recompute", None), ("keep_kv", None), pytest.param("keep_kv", {"rank": 8}, marks=pytest.mark.faults)],
)
def test_a_response_continues_with_new_weights_and_every_token_has_its_version(
    tiny_model_dir: Path, mode: str, lora: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for `cancel_requests`
    config = make_config(
        tiny_model_dir / "model",
        model={"lora": lora},
        rollout={"max_response_tokens": LONGEST, "max_policy_lag": 1, "on_weight_update": mode},
        learner={"max_tokens_per_microbatch": 2048},
    )
    rollouts, old, new, (greedy, small_top_p, top_1, whole), spoken = asyncio.run(sample_across_an_update(config))
    assert small_top_p == top_1 == greedy * 4  # only the most probable token
    assert len({tuple(ids) for ids in whole}) == 4
    for said in spoken:  # the engine's own parsers have read it
        text = make_tokenizer().decode(said.token_ids[: -1 if said.finish_reason == "stop" else None].tolist())
        assert (said.message, said.engine) == ({"role": "assistant", "content": text}, 0)
    partial = [i for i, rollout in enumerate(rollouts) if len(rollout.version_spans) == 2]
    assert partial, "no response was under way when the weights changed"
    before, after, foreign = [], [], []
    for i in partial:
        rollout = rollouts[i]
        first, second = rollout.version_spans
        assert (first.version, second.version) == (0, 1)
        assert rollout.oldest_version == 0
        (sequence,) = rollout.sequences
        assert (first.start, first.end, second.end) == (20, second.start, len(sequence.token_ids))
        sampled = sequence.rollout_logprobs
        before.append(np.abs(sampled - old[i])[first.start : first.end])
        after.append(np.abs(sampled - new[i])[second.start : second.end])
        foreign.append(np.abs(sampled - old[i])[second.start : second.end])
    # What is sampled is what is trained: the engine's log-probs are those of the weights that the span names.
    assert np.concatenate(before).max() < 1e-3
    difference = np.concatenate(after).mean()
    assert np.concatenate(foreign).mean() > 0.02  # the perturbation can be seen
    if mode == "recompute":  # the whole prefix went through the new weights
        assert np.concatenate(after).max() < 1e-3
    else:  # new weights over the old ones' keys and values: close to neither, and why a correction is on
        assert difference > 1e-3
