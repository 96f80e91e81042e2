"""Checks of the scorer: it grades correctly, it kills a grader that hangs, and the config's rewards return."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward import RewardConfig
from rlhf.doctor.examination import Finding, NotCheckedError, Patient, Status, in_thread
from rlhf.rewards.grade import OK, TIMEOUT
from rlhf.rewards.scorer import Scorer
from rlhf.types import Prompt

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
    """The config's rewards grade the gold answers of the first rows: as right, and without errors in user functions."""
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
