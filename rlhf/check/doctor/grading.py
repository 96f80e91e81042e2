"""Checks of the graders and of the model's responses: hanging graders, gold answers, eight sampled prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from rlhf.check.doctor.runner import Finding, Patient, Status
from rlhf.cluster.rollout_workers import RolloutWorkers
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys
from rlhf.config.printing import printable, to_stderr
from rlhf.config.reward import RewardConfig
from rlhf.data.model_files import load_tokenizer, truncate_token_id
from rlhf.environments.start import StartedEnvironments
from rlhf.log.diagnosis import View
from rlhf.log.reductions import to_values
from rlhf.rewards.grade import TIMEOUT
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import training_purpose
from rlhf.run.reward_outcomes import RewardOutcomes
from rlhf.run.rollout_log import rollout_metrics
from rlhf.run.threads import in_thread
from rlhf.types import RolloutGroup

SAMPLED_PROMPTS, SHOWN = 8, 2
HANGING = "rlhf.check.doctor:forever"
HANG_S = 1.0  # then the hanging grader is killed


async def check_scorer(_: Patient) -> Finding:
    """A right answer gets 1, a wrong answer 0, and a hanging grader is killed while the others go on."""
    config = RewardConfig.model_validate(
        {"parts": ["math", HANGING], "workers": 2, "wall_seconds": HANG_S, "cpu_seconds": HANG_S}
    )
    responses, gold = [r"It is \boxed{5}.", r"It is \boxed{6}."], ["5", "5"]
    with await in_thread(Scorer, config) as scorer:
        right, wrong = await in_thread(lambda: scorer.graded_batch(scorer.submit_batch(responses, gold)))
    values, statuses = [grade.metrics["math"] for grade in (right, wrong)], {right.status, wrong.status}
    if values != [1.0, 0.0]:
        problem = f"math gave a right and a wrong answer {values}, not 1 and 0"
        return Finding("fail", problem, "make setup: a package that the grader uses may be broken")
    if statuses != {TIMEOUT}:
        problem = f"a grader that hangs ended with {' and '.join(sorted(statuses))}, not with {TIMEOUT}"
        return Finding("fail", problem, "the sandbox of this machine may forbid signals between processes")
    return Finding(
        "ok",
        f"right and wrong answers are graded correctly; a grader that hangs was killed after {HANG_S:.0f} s, twice",
    )


async def check_rewards(patient: Patient) -> Finding:
    """The rewards that compare answers accept the gold answers of the first rows."""
    reward, prompts = patient.config.reward, patient.prompts
    with await in_thread(Scorer, reward) as scorer:
        bad_rows = await in_thread(scorer.check_gold, prompts)
    if not bad_rows:
        return Finding("ok", f"{', '.join(dict.fromkeys(part.name for part in reward.all_parts))}: {len(prompts)} rows")
    rows = "\n".join(f"{row.row}: {row.answer!r} ({row.reason})" for row in bad_rows[:3])
    remedy = "repair these rows, or leave them out with reward.bad_gold=skip"
    status: Status = "warn" if reward.bad_gold == "skip" else "fail"
    return Finding(status, f"{len(bad_rows)} of {len(prompts)} gold answers cannot be graded:\n{rows}", remedy)


async def check_responses(patient: Patient) -> Finding:
    """Sample and grade eight prompts as in a step, apply the rules of the run's diagnosis, and show two prompts."""
    engines, config = patient.engines, patient.config
    _ = patient.canary  # responses of an engine that disagrees with the learner say nothing
    rows = patient.rows if config.uses_environment_or_tools else patient.prompts
    prompts = rows[:: max(1, len(rows) // SAMPLED_PROMPTS)][:SAMPLED_PROMPTS]  # of all sources
    tokenizer = await in_thread(load_tokenizer, config.model)
    with contextlib.ExitStack() as exit_stack:
        scorer = exit_stack.enter_context(await in_thread(Scorer, config.reward))
        play = None
        if config.uses_environment_or_tools:
            play = exit_stack.enter_context(await in_thread(StartedEnvironments, config, tokenizer))
        purpose = training_purpose(config, truncate_token_id(config.rollout, tokenizer))
        outcomes = RewardOutcomes(config.reward)
        async with RolloutWorkers(
            engines, config, tokenizer, scorer, play, say=to_stderr, check=outcomes.check
        ) as workers:
            groups = await asyncio.gather(*(workers.rollout_group(prompt, purpose) for prompt in prompts))
        outcomes.add_step(groups)
        statuses = {f"reward/status/{name}": float(count) for name, count in outcomes.counters.items()}
    return judge_responses(config, groups, statuses, tiny=patient.tiny)


def judge_responses(
    config: GRPOConfig, groups: Sequence[RolloutGroup], statuses: dict[str, float], *, tiny: bool = False
) -> Finding:
    """The diagnosis that a run would print after this step; the doctor's own `tiny` model knows no answer."""
    samples = [sample for group in groups for sample in group.samples]
    metrics = rollout_metrics(groups, np.zeros(len(samples)), version=0, asynchronous=False)
    values = to_values(metrics)
    shown = {"mean reward": "reward/mean", "with an answer": "reward/answered_fraction"}
    shown |= {"stopped": "rollout/stopped_fraction", "groups of equal rewards": "reward/equal_group_fraction"}
    described = ", ".join(f"{text} {values[name]:.2g}" for text, name in shown.items() if name in values)
    text = f"{len(samples)} responses to {len(groups)} prompts: {described}"
    text = "\n".join([text, *(line for group in groups[:SHOWN] for line in _example_lines(group))])
    view = View([values | statuses], {}, [], flat_keys(config.model_dump(mode="json")))
    findings = list(view.findings())
    if tiny or not findings:
        return Finding("ok", text)
    text = "\n".join([text, *(seen for _, seen, _ in findings)])
    return Finding("warn", text, " ".join(advice for _, _, advice in findings))


def _example_lines(group: RolloutGroup) -> Iterator[str]:
    """A prompt, one response and its grade, each shortened to a line."""
    sample = group.samples[0]
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample.reward_parts.items() if value is not None)
    yield f"prompt    {_shortened(group.prompt.messages[-1]['content'] if group.prompt.messages else '')}"
    yield f"response  {_shortened(sample.text)}"
    graded = f"extracted {_shortened(sample.extracted, 16) or 'nothing'}, gold {_shortened(group.prompt.answer, 16)}"
    yield f"graded    {parts or 'no reward'}; {sample.status}; {graded}; {sample.rollout.finish_reason}"


def _shortened(text: str, width: int = 52) -> str:
    """The beginning of a text and its end, where the answer usually is, on one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width // 2 - 3]} ... {line[3 - width // 2 :]}"
