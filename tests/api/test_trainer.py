"""A loop of one's own on a cluster that starts nothing: what its calls do, and what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import FakeCluster, FakeLearners, FakeScorer, Sampling, drive
from waiting import WAIT_S
from worlds import make_config

import rlhf
from rlhf.config.grpo import GRPOConfig
from rlhf.run import rollout_loop, run
from rlhf.types import RolloutGroup

STEPS, PROMPTS, SAMPLES = 3, 2, 4
USES = ("trained", "filtered", "stale", "failed", "waiting")


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> GRPOConfig:
    return make_config(
        tiny_model_dir / "model",
        run={"dir": str(tmp_path / "run"), "steps": STEPS},
        rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        learner={"minibatches_per_epoch": 2},
        checkpoint={"every": 2},
    )


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Sampling:
    sampling = Sampling()
    started: Any = functools.partial(rollout_loop.rollout_loop, make_engines=sampling.of_cluster)
    monkeypatch.setattr(rollout_loop, "rollout_loop", started)
    monkeypatch.setattr(rollout_loop, "Scorer", FakeScorer)
    monkeypatch.setattr(run, "Run", functools.partial(run.Run, make_cluster=FakeCluster))
    return sampling


@pytest.fixture
def trainer(config: GRPOConfig, engines: Sampling) -> Iterator[rlhf.Trainer]:
    with rlhf.Trainer(config) as opened:
        yield opened


def sampled(trainer: rlhf.Trainer) -> list[RolloutGroup]:
    return trainer.sample(trainer.next_prompts())


def step(trainer: rlhf.Trainer, advantages: Any = None) -> dict[str, Any]:
    trainer.update(sampled(trainer), advantages)
    return trainer.publish()


def metrics_of(config: GRPOConfig) -> list[dict[str, Any]]:
    rows = map(json.loads, (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "time/step" in row]


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ValueError, match=r"\. ") as caught:
        call(*arguments, **named)
    return str(caught.value)


def with_rewards(group: RolloutGroup, *rewards: float | None) -> RolloutGroup:
    return replace(group, samples=tuple(replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True)))


# --- a loop ---


def test_a_loop_of_calls_trains_what_a_run_of_the_program_trains_and_leaves_the_same_folder(
    config: GRPOConfig, engines: Sampling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with rlhf.Trainer(config) as trainer:
        assert not trainer.closed
        returned = [step(trainer) for _ in range(STEPS)]
    assert trainer.closed
    assert trainer.step == STEPS
    logged = metrics_of(config)
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert [{name: row[name] for name in given} for given, row in zip(returned, logged, strict=True)] == returned
    whole = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "program")})})
    monkeypatch.undo()
    _, of_program = asyncio.run(drive(whole, monkeypatch))
    assert engines.prompts == of_program.prompts
    timed = re.compile(r"^time|tokens_per|data/epoch")  # the program draws the prompts of the next step early
    for ours, theirs in zip(logged, metrics_of(whole), strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name] and not timed.search(name)] == []
    names = {path.name for path in Path(config.run.dir).iterdir()}
    assert names == {path.name for path in Path(whole.run.dir).iterdir()}
    assert {"model", "summary.json"} <= names
    summaries = [
        json.loads((Path(run_dir) / "summary.json").read_text()) for run_dir in (config.run.dir, whole.run.dir)
    ]
    assert summaries[0]["account/trained"] == summaries[1]["account/trained"] == STEPS * PROMPTS * SAMPLES


def test_every_rollout_is_counted_once_as_trained_dropped_or_waiting(trainer: rlhf.Trainer, config: GRPOConfig) -> None:
    first, second = sampled(trainer)
    own = trainer.group(first.prompt, trainer.generate([first.prompt], samples=SAMPLES)[0], [0, 1, None, 1])
    trainer.drop([second])
    trainer.update([first, own])
    trainer.publish()
    (row,) = metrics_of(config)
    counts = {use: row[f"account/{use}"] for use in USES}
    assert counts == {"trained": 2 * SAMPLES - 1, "filtered": SAMPLES, "stale": 0, "failed": 1, "waiting": 0}
    assert row["account/sampled"] == sum(counts.values())
    rows = [json.loads(line) for line in (Path(config.run.dir) / "rollouts/step-000001.jsonl").read_text().splitlines()]
    assert [each["reward"] for each in rows[SAMPLES:]] == [0.0, 1.0, None, 1.0]
    assert [each["sample"] for each in rows[SAMPLES:]] == [0, 1, 2, 3]


def test_prompts_that_are_neither_trained_nor_dropped_are_drawn_again_by_a_resumed_loop(
    config: GRPOConfig, engines: Sampling
) -> None:
    with rlhf.Trainer(config) as trainer:
        step(trainer)
        drawn = trainer.next_prompts(4)
        sampled = trainer.sample(drawn[:2])
        trainer.drop([sampled[0], drawn[3]])
    left = Path(config.run.dir)
    assert (left / "checkpoints/step-000001").is_dir()
    assert not (left / "summary.json").exists()
    with rlhf.Trainer(config, resume=True) as resumed:
        assert resumed.step == 1
        again = resumed.next_prompts(3)
        assert [prompt.id for prompt in again[:2]] == [drawn[1].id, drawn[2].id]
        assert again[2].id not in {prompt.id for prompt in drawn}
        resumed.update(resumed.sample(again))
        account = {use: resumed.publish()[f"account/{use}"] for use in ("sampled",)}
    assert account["sampled"] == (PROMPTS + 1 + 3) * SAMPLES


@pytest.mark.parametrize("mine", [lambda rewards, groups: rewards - 1.0, np.array([-1, 0, 1, 2] * PROMPTS)])
def test_advantages_are_those_of_a_function_or_the_numbers_that_were_given(trainer: rlhf.Trainer, mine: Any) -> None:
    groups = sampled(trainer)
    groups[0] = with_rewards(groups[0], 0.0, 1.0, None, 3.0)  # as replaced by the loop
    report = trainer.update(groups, advantages=mine)
    expected = [-1.0, 0.0, 0.0, 2.0, -1.0, 0.0, 1.0, 2.0]  # the unscorable rollout has none
    assert report.advantages.tolist() == expected
    assert (report.step, report.taken, report.skipped) == (1, 2, 0)
    targets = trainer._run.cluster.learners.targets  # type: ignore[attr-defined]
    assert sorted({*targets.advantages.tolist()}) == [-1.0, 0.0, 1.0, 2.0]


def test_with_a_lag_of_1_the_next_groups_are_sampled_before_and_while_the_last_ones_are_trained(
    config: GRPOConfig, engines: Sampling
) -> None:
    asynchronous = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_policy_lag": 1})})

    async def loop() -> list[int]:
        lags = []
        async with rlhf.Trainer(asynchronous) as trainer:
            groups = await trainer.sample_async(await trainer.next_prompts_async())
            for number in range(STEPS):
                following = asyncio.ensure_future(trainer.sample_async(await trainer.next_prompts_async()))
                await asyncio.sleep(0)  # that call begins
                await trainer.update_async(groups)
                lags.append(number - groups[0].oldest_version)
                await trainer.publish_async()
                groups = await following
        return lags

    assert asyncio.run(loop()) == [0, 1, 1]
    assert [row["rollout/lag/max"] for row in metrics_of(config)] == [0, 1, 1]


class SharedCluster(FakeCluster):
    shares_gpus = True


class CountedLock(asyncio.Lock):
    asked = 0

    async def acquire(self) -> Any:
        self.asked += 1
        return await super().acquire()


class Sleeping(Sampling):
    """Engines on the learners' GPUs. They take long to wake: until another call waits for the learners."""

    sleeps, lock = True, CountedLock()
    under_way, most_under_way = 0, 0

    async def cached_sequences(self) -> float:
        return SAMPLES * (PROMPTS + 1.5)

    async def wake_if_asleep(self, version: int) -> bool:
        while self.asleep and self.lock.asked < 2:
            await asyncio.sleep(0.01)
        return await super().wake_if_asleep(version)

    async def generate(self, *arguments: Any, **how: Any) -> Any:
        assert not self.asleep, "nobody wakes them before the evaluation has ended"
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return await super().generate(*arguments, **how)


@pytest.fixture
def sleeping(engines: Sampling, monkeypatch: pytest.MonkeyPatch) -> Sleeping:
    shared = Sleeping()
    started: Any = functools.partial(rollout_loop.rollout_loop, make_engines=shared.of_cluster)
    monkeypatch.setattr(rollout_loop, "rollout_loop", started)
    monkeypatch.setattr(run, "Run", functools.partial(run.Run, make_cluster=SharedCluster))
    return shared


def test_on_shared_gpus_no_more_groups_are_sampled_at_once_than_the_caches_hold(
    config: GRPOConfig, sleeping: Sleeping
) -> None:
    with rlhf.Trainer(config) as trainer:
        trainer.drop(trainer.sample(trainer.next_prompts(3 * PROMPTS)))
    assert sleeping.most_under_way == PROMPTS + 1


def test_on_shared_gpus_an_update_waits_for_the_evaluation_that_came_first(
    config: GRPOConfig, sleeping: Sleeping, tiny_model_dir: Path
) -> None:
    data = config.data.model_dump() | {"eval": str(tiny_model_dir / "test.jsonl"), "eval_rows": 4}
    keys = {"evaluation.at_start": False, "rollout.max_policy_lag": 1}

    async def loop() -> int:
        async with rlhf.Trainer([config, {"data": data}], **keys) as trainer:
            groups = await trainer.sample_async(await trainer.next_prompts_async())
            trainer._learners, sleeping.asleep = sleeping.lock, True
            evaluation = asyncio.ensure_future(trainer.evaluate_async())
            await asyncio.sleep(0)  # that call begins
            await trainer.update_async(groups)
            assert "eval/test/avg@1" in await evaluation
            await trainer.publish_async()
            return trainer.step

    assert asyncio.run(asyncio.wait_for(loop(), WAIT_S)) == 1


def test_on_shared_gpus_a_call_that_blocks_does_not_wait_for_a_publish_that_comes_after_it(
    config: GRPOConfig, sleeping: Sleeping
) -> None:
    with rlhf.Trainer(config, **{"rollout.max_policy_lag": 1}) as trainer:
        trainer.update(trainer.sample(trainer.next_prompts()))
        prompts = trainer.next_prompts()
        assert "sleep until step 1 is published. Call publish first" in refused(trainer.sample, prompts)
        trainer.publish()
        trainer.drop(trainer.sample(prompts))


def test_calls_work_in_a_program_whose_event_loop_runs(config: GRPOConfig, engines: Sampling) -> None:
    async def cell() -> int:
        with rlhf.Trainer(config) as trainer:
            step(trainer)
            return trainer.step

    assert asyncio.run(cell()) == 1


def test_a_model_is_exported_at_any_step_and_a_checkpoint_saved(trainer: rlhf.Trainer, tmp_path: Path) -> None:
    assert "no step is published" in refused(trainer.save)
    step(trainer)
    assert trainer.save().name == "step-000001"
    assert (trainer.save() / "driver.json").is_file()
    out = trainer.save(tmp_path / "models/out")
    assert (out / "README.md").read_text().count("step 1") > 0
    assert "is not an empty folder" in refused(trainer.save, out)


def test_evaluations_and_checkpoints_come_as_the_config_says_and_when_they_are_asked_for(
    config: GRPOConfig, engines: Sampling, tiny_model_dir: Path
) -> None:
    data = config.data.model_dump() | {"eval": str(tiny_model_dir / "test.jsonl"), "eval_rows": 4}
    with rlhf.Trainer([config, {"data": data}], **{"evaluation.every": 2}) as trainer:
        assert [*trainer._run.state.evaluations] == [0]
        assert "eval/test/avg@1" not in step(trainer)
        assert "eval/test/avg@1" in trainer.evaluate()
        assert "eval/test/avg@1" in step(trainer)
        assert [*trainer._run.state.evaluations] == [0, 1, 2]
    assert (Path(config.run.dir) / "checkpoints/step-000002").is_dir()


# --- refusals ---


def test_groups_are_sampled_only_when_those_before_are_trained_or_dropped(trainer: rlhf.Trainer) -> None:
    groups = sampled(trainer)
    problem = refused(trainer.sample, trainer.next_prompts())
    assert problem == (
        "sample: groups of 1 earlier calls are neither trained nor dropped, and rollout.max_policy_lag=0 allows those "
        "of 0. Call update, or drop(groups)."
    )
    trainer.update(groups[:1])
    trainer.publish()
    assert refused(trainer.sample, trainer.next_prompts()) == problem  # one of the two waits
    trainer.drop(groups[1:])
    assert "sample: a str is not a Prompt." in refused(trainer.sample, ["What is 1 + 1?"])
    assert len(sampled(trainer)) == PROMPTS


def test_between_update_and_publish_nothing_is_updated_sampled_or_saved(trainer: rlhf.Trainer) -> None:
    assert refused(trainer.publish) == "publish: nothing was updated after step 0. Call update first."
    trainer.update(sampled(trainer))
    old = "the engines have the weights of step 0 until step 1 is published. Call publish first."
    assert refused(trainer.sample, []) == f"sample: {old}"
    assert refused(trainer.generate, []) == f"generate: {old}"
    assert refused(trainer.update, []) == "update: step 1 is not published. Call publish first."
    assert refused(trainer.save) == "save: step 1 is not published. Call publish first."
    trainer.publish()


def test_groups_that_are_not_whole_mixed_not_finite_or_that_do_not_wait_are_not_trained(trainer: rlhf.Trainer) -> None:
    first, second = groups = sampled(trainer)
    mixed = replace(first, samples=(*first.samples[1:], second.samples[0]))
    of_first = f"update: the group of prompt {first.prompt.id}"
    cases = {
        f"{of_first} has 3 rollouts, and rollout.samples_per_prompt=4.": replace(first, samples=first.samples[1:]),
        f"update: rollout 3 in the group of prompt {first.prompt.id} is of prompt {second.prompt.id}.": mixed,
        f"update: rollout 1 of prompt {first.prompt.id} has the reward nan.": with_rewards(first, 0, math.nan, 0, 0),
        f"update: rollout 0 of prompt {first.prompt.id} has the reward 1e+39.": with_rewards(first, 1e39, 0, 0, 0),
        f"{of_first} does not wait:": replace(first, samples=first.samples[::-1]),
    }
    for problem, group in cases.items():
        assert refused(trainer.update, [group]).startswith(problem)
    assert refused(trainer.update, [first, first]).startswith(f"{of_first} was given twice.")
    assert "0 groups of 4 rollouts for learner.minibatches_per_epoch=2" in refused(trainer.update, [])
    trainer.update(groups)
    trainer.publish()
    assert refused(trainer.update, groups).startswith(f"{of_first} does not wait: it was trained or dropped before")
    assert refused(trainer.drop, groups).startswith(f"drop: the group of prompt {first.prompt.id} does not wait")


def test_groups_older_than_the_lag_are_not_trained_and_counted_as_stale_when_they_are_dropped(
    trainer: rlhf.Trainer, config: GRPOConfig
) -> None:
    first, second = sampled(trainer)
    trainer.update([first])
    trainer.publish()
    assert refused(trainer.update, [second]) == (
        f"update: the group of prompt {second.prompt.id} was sampled with the weights of step 0, and those of step 1 "
        "are trained: rollout.max_policy_lag=0. Drop it with drop(groups), or raise the lag."
    )
    trainer.drop([second])
    assert step(trainer)["account/stale"] == SAMPLES


def test_no_update_is_taken_after_the_schedule_has_ended(trainer: rlhf.Trainer) -> None:
    for _ in range(STEPS):
        step(trainer)
    assert refused(trainer.update, sampled(trainer)).startswith("update: run.steps=3: all steps are done")


def test_advantages_that_cannot_be_used_are_refused_and_the_groups_still_wait(trainer: rlhf.Trainer) -> None:
    groups = sampled(trainer)
    cases: list[tuple[Any, str]] = [
        ([1.0], "update: advantages of shape [1] for 8 rollouts."),
        ([0.0, math.inf] * 4, "update: advantage 1 is inf."),
        (lambda rewards, groups: rewards[:1], "update: advantages: it returns a tensor [1], not"),
        (lambda rewards, groups: rewards / 0, "update: advantages: its advantages are not finite"),
        (lambda rewards, groups: [].pop(), "update: advantages: IndexError: pop from empty list"),
    ]
    for mine, problem in cases:
        assert refused(trainer.update, groups, advantages=mine).startswith(problem)
    assert trainer.update(groups).step == 1
    trainer.publish()


def test_a_group_of_ones_own_needs_whole_rollouts_of_its_prompt_at_the_trained_temperature(
    trainer: rlhf.Trainer,
) -> None:
    first, second = trainer.next_prompts()
    rollouts, others = trainer.generate([first, second], samples=SAMPLES)
    (cold,) = trainer.generate([first], temperature=0.5)
    rewards = [0.0, 1.0, 0.0, 1.0]
    of_prompt = f"group: prompt {first.id}"
    cases = [
        (rollouts, rewards[1:], f"{of_prompt}: 3 rewards for 4 rollouts."),
        (rollouts[1:], rewards[1:], f"group: the group of prompt {first.id} has 3 rollouts"),
        ((*rollouts[1:], others[0]), rewards, f"group: rollout 3 in the group of prompt {first.id} is of prompt"),
        ((*rollouts[1:], *cold), rewards, f"{of_prompt}: rollout 3 was sampled at temperature 0.5"),
        ((*rollouts[1:], rollouts[1]), rewards, f"{of_prompt}: rollout 3 is in a group already."),
        (rollouts, [math.inf, *rewards[1:]], f"group: rollout 0 of prompt {first.id} has the reward inf."),
    ]
    for given, values, problem in cases:
        assert refused(trainer.group, first, given, values).startswith(problem)
    trainer.group(first, rollouts, rewards)
    assert "rollout 0 is in a group already" in refused(trainer.group, first, rollouts, rewards)
    assert rollouts[0].rollout.response_ids.tolist() == [40, 41, 42]
    assert rollouts[0].rollout.rollout_logprobs.tolist() == [-1.0] * 3
    assert "the engines have room for rollout.max_response_tokens=64" in refused(
        trainer.generate, [first], max_tokens=65
    )
    assert "Ask for 1 sample or more" in refused(trainer.generate, [first], samples=0)
    assert "would all be equal" in refused(trainer.generate, [first], samples=2, temperature=0.0)


def test_without_a_reward_the_loop_grades_or_nothing_does(config: GRPOConfig, engines: Sampling) -> None:
    with rlhf.Trainer(config, reward=[]) as trainer:
        assert refused(trainer.sample, trainer.next_prompts()).startswith("sample: reward=[] grades nothing.")
        prompts = trainer.next_prompts()
        generated = trainer.generate(prompts, samples=SAMPLES)
        groups = [trainer.group(p, r, [0, 1, 1, 0]) for p, r in zip(prompts, generated, strict=True)]
        trainer.update(groups)
        assert trainer.publish()["reward/part/own"] == 0.5


def test_log_probs_are_asked_of_tokens_that_the_model_has_room_for(trainer: rlhf.Trainer) -> None:
    assert "has 2 tokens of a prompt and 0 of a response" in refused(trainer.logprobs, [([1, 2], [])])
    assert "at most learner.max_tokens_per_microbatch=512" in refused(trainer.logprobs, [([1] * 500, [2] * 13)])
    assert "an id outside of 0 to" in refused(trainer.logprobs, [([1], [2]), ([1], [-1])])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"rollout.dynamic_sampling": True}, "rollout.dynamic_sampling=true: a loop of one's own replaces groups"),
        ({"rollout.on_stale": "drop", "rollout.max_policy_lag": 1}, "rollout.on_stale=drop: a loop of one's own drops"),
        ({"run.stepz": 3}, "run.stepz=3: there is no such key"),
        ({"critic.warmup_steps": 1}, "critic"),
    ],
)
def test_a_config_that_the_loop_cannot_keep_is_refused_by_its_key(
    config: GRPOConfig, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        rlhf.Trainer(config, **keys)


# --- start and end ---


def test_a_call_outside_of_the_context_is_refused(config: GRPOConfig, engines: Sampling) -> None:
    trainer = rlhf.Trainer(config)
    assert trainer.closed
    assert "trainer.sample: the run has not started." in refused(trainer.sample, [])
    assert "trainer.step: the run has not started." in refused(lambda: trainer.step)
    with trainer:
        pass
    assert "the trainer is closed. Make another one" in refused(trainer.next_prompts)
    assert "a Trainer starts once." in refused(trainer.open)


def test_a_start_that_fails_raises_the_message_of_the_command_line(config: GRPOConfig, engines: Sampling) -> None:
    with rlhf.Trainer(config) as trainer:
        step(trainer)
    again = rlhf.Trainer(config)
    with pytest.raises(ValueError, match="already holds a run"):
        again.open()
    assert again.closed
    with pytest.raises(ValueError, match="already holds a run"), rlhf.Trainer(config):
        pass


def test_an_exception_of_the_loop_ends_the_run_unsaved_and_is_raised_with_its_own_trace(
    config: GRPOConfig, engines: Sampling
) -> None:
    trainer = rlhf.Trainer(config)

    def loop() -> None:
        with trainer:
            step(trainer)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        loop()
    assert trainer.closed
    assert [entry.name for entry in caught.traceback][1:] == ["loop"]
    assert not [*(Path(config.run.dir) / "checkpoints").glob("step-*")]


def test_ctrl_c_in_a_call_raises_keyboard_interrupt_and_the_last_step_is_saved(
    config: GRPOConfig, engines: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = rlhf.Trainer(config)

    async def never(*_: Any, **__: Any) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.sleep(WAIT_S)

    def loop() -> None:
        with trainer:
            step(trainer)
            monkeypatch.setattr(FakeScorer, "score_group", never)
            trainer.sample(trainer.next_prompts(1))

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert trainer.closed
    assert (Path(config.run.dir) / "checkpoints/step-000001").is_dir()


def test_an_update_that_ctrl_c_interrupts_is_not_saved(
    config: GRPOConfig, engines: Sampling, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never(*_: Any) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        for _ in range(100):  # an end that takes many turns of the event loop
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(WAIT_S if not _ else 0)

    def loop() -> None:
        with rlhf.Trainer(config) as trainer:
            step(trainer)
            monkeypatch.setattr(FakeLearners, "start_step", never)
            trainer.update(sampled(trainer))

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert "step 2 was not published, so nothing is saved" in " ".join(capsys.readouterr().out.split())
    assert not [*(Path(config.run.dir) / "checkpoints").glob("step-*")]


def test_after_an_update_that_failed_or_was_interrupted_no_call_goes_on(
    config: GRPOConfig, engines: Sampling, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing(*_: Any) -> None:
        raise RuntimeError("learner 0 is lost")

    with rlhf.Trainer(config) as trainer:
        groups = sampled(trainer)
        monkeypatch.setattr(FakeLearners, "start_step", failing)
        with pytest.raises(RuntimeError, match="learner 0 is lost"):
            trainer.update(groups)
        with pytest.raises(
            RuntimeError, match=r"trainer.update: a call of update failed or was interrupted, so nobody"
        ):
            trainer.update(groups)
    assert "step 1 was not published, so nothing is saved" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_ends_by_itself_ends_the_call_that_waits_with_its_reason(
    config: GRPOConfig, engines: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end_with(*_: Any, **__: Any) -> Any:
        trainer._thread.cancel()  # type: ignore[union-attr]  # as a cluster does that has lost a learner
        await asyncio.sleep(WAIT_S)

    async def leave(_: FakeCluster, *__: Any) -> None:
        raise RuntimeError("learner 0 is lost")

    monkeypatch.setattr(FakeScorer, "score_group", end_with)
    monkeypatch.setattr(FakeCluster, "__aexit__", leave)
    with rlhf.Trainer(config) as trainer:
        with pytest.raises(RuntimeError, match="learner 0 is lost"):
            sampled(trainer)
        assert trainer.closed
        with pytest.raises(RuntimeError, match="learner 0 is lost"):
            trainer.next_prompts()
        trainer._thread = None  # it has said so
