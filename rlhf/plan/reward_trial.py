"""Before anything starts, each function of the user grades a response, or a group of them, to a row of each source."""

from __future__ import annotations

from typing import Literal

from rlhf.config.grpo import GRPOConfig


def reward_problems(config: GRPOConfig, *, trains: bool = True) -> list[str]:
    """Why the user functions of the reward cannot grade; built-in rewards are tried with every gold answer later.

    A function that raises, runs into a limit or returns no number is refused, unless `reward.failure_fraction` is 1.
    """
    reward = config.reward.model_copy(update={"workers": 1, "spares": 0})
    if not any(part.is_user_function for part in reward.all_parts) or reward.failure_fraction == 1:
        return []
    # imported here, so that --plan needs no numpy
    from rlhf.answers.extract import alternatives, gold_answer
    from rlhf.data.load import first_usable
    from rlhf.rewards.scorer import Scorer

    kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval") if trains else ("eval",)
    rows = [
        (config.rollout if which == "train" else config.evaluations[prompt.source], row, prompt)
        for which in kinds
        for row, prompt in first_usable(config.data, which, gold_answer)
    ]
    problems: dict[tuple[str, str], str] = {}  # by function and error: it is the same for every source
    try:
        with Scorer(reward) as scorer:
            for of, row, prompt in rows:
                responses = _responses(alternatives(prompt.answer)[0], of.samples_per_prompt)
                for name, error in scorer.try_functions(prompt, responses).items():
                    problem = f"reward name={name!r}: it fails for a response to {row}: {error}".removesuffix(".")
                    problems.setdefault((name, error), f"{problem}. Repair the function (docs/rewards.md).")
    except (ValueError, RuntimeError) as error:
        return [*problems.values(), str(error)]
    return list(problems.values())


def _responses(answer: str, count: int) -> list[str]:
    """Responses with the right answer, no two alike."""
    text = f"The answer is \\boxed{{{answer}}}." if answer else "This is the response."
    return [f"{text}{' It is.' * number}" for number in range(count)]
