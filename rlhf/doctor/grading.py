"""Checks of the scorer and of the model's responses: hanging graders, gold answers, eight sampled prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys
from rlhf.config.printing import printable
from rlhf.config.reward import RewardConfig
from rlhf.doctor.examination import Finding, NotCheckedError, Patient, Status, in_thread
from rlhf.doctor.stack import started
from rlhf.log.diagnosis import RULES, View
from rlhf.log.reductions import to_values
from rlhf.rewards.grade import OK, TIMEOUT
from rlhf.rewards.scorer import Scorer
from rlhf.run.rollout_metrics import rollout_metrics
from rlhf.types import Prompt, RolloutGroup

SAMPLED_PROMPTS, SHOWN = 8, 2
HANGING = "rlhf.doctor.hang:forever"
HANG_S = 1.0  # then the hanging grader is killed


async def check_scorer(_: Patient) -> Finding:
    """A right answer gets 1, a wrong one 0, and a grader that hangs is killed while the others go on."""
    return await in_thread(_self_test)


def _self_test() -> Finding:
    config = RewardConfig.model_validate(
        {"parts": ["math", HANGING], "workers": 2, "spares": 1, "wall_seconds": HANG_S, "cpu_seconds": HANG_S}
    )
    with Scorer(config) as scorer:
        for response, expected in ((r"It is \boxed{5}.", 1.0), (r"It is \boxed{6}.", 0.0)):
            graded, hung = (future.result() for future in scorer.submit(response, "5"))
            if (graded.status, graded.value) != (OK, expected):
                problem = f"math graded {response!r} against 5: {graded.value}, {graded.status} {graded.detail}"
                return Finding("fail", problem, "make setup: a package that the grader uses may be broken")
            if hung.status != TIMEOUT:
                problem = f"a grader that hangs ended with {hung.status}, not with {TIMEOUT}"
                return Finding("fail", problem, "the sandbox of this machine may forbid signals between processes")
    return Finding(
        "ok",
        f"right and wrong answers are graded correctly; a grader that hangs was killed after {HANG_S:.0f} s, twice",
    )


async def check_rewards(patient: Patient) -> Finding:
    """Rewards that compare with an answer grade the gold answers of the first rows as right; the others do not fail."""
    if patient.prompts is None:
        raise NotCheckedError("model or data could not be loaded")
    return await in_thread(_try_rewards, patient.config, patient.prompts)


def _try_rewards(config: GRPOConfig, prompts: Sequence[Prompt]) -> Finding:
    async def score_all(scorer: Scorer) -> None:
        calls = (scorer.score(p, p.answer, finish_reason="stop", response_length=1) for p in prompts)
        await asyncio.gather(*calls)

    with Scorer(config.reward) as scorer:
        bad_rows = scorer.check_gold(prompts)
        try:
            asyncio.run(score_all(scorer))
        except RuntimeError:  # more failures than a run allows
            if not any(scorer.failures(part) for part in config.reward.all_parts):
                raise
        broken = {failures for part in config.reward.all_parts if (failures := scorer.failures(part))}
    if broken:
        remedy = "repair the function; reward.wall_seconds and reward.memory_mb are its limits"
        return Finding("fail", "\n".join(sorted(broken)), remedy)
    names = ", ".join(dict.fromkeys(part.name for part in config.reward.all_parts))
    if bad_rows:
        rows = "\n".join(f"{row.row}: {row.answer!r} ({row.reason})" for row in bad_rows[:3])
        status: Status = "warn" if config.reward.bad_gold == "skip" else "fail"
        remedy = "repair these rows, or leave them out with reward.bad_gold=skip"
        return Finding(status, f"{len(bad_rows)} of {len(prompts)} gold answers cannot be graded:\n{rows}", remedy)
    return Finding("ok", f"{names}: {len(prompts)} rows graded")


async def check_responses(patient: Patient) -> Finding:
    """Sample and grade eight prompts as a step would, judge them by the rules of the diagnosis, and show two."""
    from rlhf.data.model_files import load_tokenizer
    from rlhf.run.sample_and_grade import Sampler

    cluster, config = started(patient), patient.config
    if patient.canary is None:
        raise NotCheckedError("engines and learners do not agree")
    assert patient.prompts is not None
    prompts = patient.prompts[:: max(1, len(patient.prompts) // SAMPLED_PROMPTS)][:SAMPLED_PROMPTS]  # of all sources
    tokenizer = await in_thread(load_tokenizer, config.model)
    with await in_thread(Scorer, config.reward) as scorer:
        sampler = Sampler(config, cluster, scorer, tokenizer)
        groups = await asyncio.gather(*map(sampler.for_training, prompts))
        statuses = {f"reward/status/{name}": float(count) for name, count in scorer.counters.items()}
    return judge_responses(config, groups, statuses, tiny=patient.tiny)


def judge_responses(
    config: GRPOConfig, groups: Sequence[RolloutGroup], statuses: dict[str, float], *, tiny: bool = False
) -> Finding:
    """What the diagnosis would tell a run after this step.

    Args:
        statuses: counters of the grading.
        tiny: the model is the doctor's own, which knows no answer.
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics = rollout_metrics(groups, np.zeros(len(samples)), version=0, asynchronous=False)
    values = to_values(metrics)
    shown = {"mean reward": "reward/mean", "with an answer": "reward/answered_fraction"}
    shown |= {"stopped": "rollout/stopped_fraction", "groups of equal rewards": "reward/equal_group_fraction"}
    numbers = {name: values[name] for name in shown.values() if name in values}
    described = ", ".join(f"{text} {values[name]:.2g}" for text, name in shown.items() if name in values)
    text = f"{len(samples)} responses to {len(groups)} prompts: {described}"
    examples = tuple(line for group in groups[:SHOWN] for line in _example(group))
    view = View([values | statuses], [{}], [], [], flat_keys(config.model_dump(mode="json")))
    found = [found for _, check in RULES if (found := check(view)) is not None]
    if tiny or not found:
        return Finding("ok", text, numbers=numbers, examples=examples)
    text = "\n".join([text, *(seen for seen, _ in found)])
    return Finding("warn", text, " ".join(advice for _, advice in found), numbers, examples)


def _example(group: RolloutGroup) -> Iterator[str]:
    """A prompt, one response and its grade, each cut to a line of a terminal."""
    sample = group.samples[0]
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample.reward_parts.items() if value is not None)
    yield f"prompt    {_line(group.prompt.messages[-1]['content'] if group.prompt.messages else '')}"
    yield f"response  {_line(sample.text)}"
    graded = f"extracted {_line(sample.extracted, 16) or 'nothing'}, gold {_line(group.prompt.answer, 16)}"
    yield f"graded    {parts or 'no reward'}; {sample.status}; {graded}; {sample.rollout.finish_reason}"


def _line(text: str, width: int = 52) -> str:
    """The beginning and the end of a text, which usually has the answer, on one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width // 2 - 3]} ... {line[3 - width // 2 :]}"
