"""Checks of the scorer: it knows right from wrong, it kills a grader that hangs, and the config's rewards answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlhf.config.reward import RewardConfig
from rlhf.config.run import GRPOConfig
from rlhf.doctor.examination import Finding, NotCheckedError, Patient, Status, in_thread
from rlhf.rewards.grade import OK, TIMEOUT
from rlhf.rewards.scorer import Scorer
from rlhf.types import Prompt

HANGING = "rlhf.doctor.hang:forever"
HANG_S = 1.0  # after which the hanging grader is killed


async def check_scorer(_: Patient) -> Finding:
    """A right answer is worth 1, a wrong one 0, and what hangs is killed without harm to the rest."""
    return await in_thread(_self_test)


def _self_test() -> Finding:
    config = RewardConfig.model_validate(
        {"parts": ["math", HANGING], "workers": 2, "spares": 1, "wall_seconds": HANG_S, "cpu_seconds": HANG_S}
    )
    with Scorer(config) as scorer:
        for response, expected in ((r"It is \boxed{5}.", 1.0), (r"It is \boxed{6}.", 0.0)):
            graded, hung = (future.result() for future in scorer.submit(response, "5"))
            if (graded.status, graded.value) != (OK, expected):
                found = f"math graded {response!r} against 5: {graded.value}, {graded.status} {graded.detail}"
                return Finding("fail", found, "make setup: a package that the grader uses may be broken")
            if hung.status != TIMEOUT:
                found = f"a grader that hangs ended with {hung.status}, not with {TIMEOUT}"
                return Finding("fail", found, "the sandbox of this machine may forbid signals between processes")
    return Finding("ok", f"right and wrong are told apart; a grader that hangs was killed after {HANG_S:.0f} s, twice")


async def check_rewards(patient: Patient) -> Finding:
    """The config's rewards on the gold answers of the first rows: graded as right, and user functions answer."""
    if patient.prompts is None:
        raise NotCheckedError("model or data could not be loaded")
    return await in_thread(_try_rewards, patient.config, patient.prompts)


def _try_rewards(config: GRPOConfig, prompts: Sequence[Prompt]) -> Finding:
    async def score_all(scorer: Scorer) -> None:
        calls = (scorer.score(p, p.answer, finish_reason="stop", response_length=1) for p in prompts)
        await asyncio.gather(*calls)

    with Scorer(config.reward) as scorer:
        bad = scorer.check_gold(prompts)
        try:
            asyncio.run(score_all(scorer))
        except RuntimeError:  # more failures than a run allows
            if not any(scorer.failures(part) for part in config.reward.all_parts):
                raise
        broken = {failures for part in config.reward.all_parts if (failures := scorer.failures(part))}
    if broken:
        remedy = "repair the function; reward.wall_seconds and reward.memory_mb are its bounds"
        return Finding("fail", "\n".join(sorted(broken)), remedy)
    names = ", ".join(dict.fromkeys(part.name for part in config.reward.all_parts))
    if bad:
        rows = "\n".join(f"{row.row}: {row.answer!r} ({row.reason})" for row in bad[:3])
        status: Status = "warn" if config.reward.bad_gold == "skip" else "fail"
        remedy = "repair these rows, or leave such rows out with reward.bad_gold=skip"
        return Finding(status, f"{len(bad)} of {len(prompts)} gold answers cannot be graded:\n{rows}", remedy)
    return Finding("ok", f"{names}: {len(prompts)} rows tried")
