"""One response to a real row is graded by each function of the user before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward import RewardConfig

if TYPE_CHECKING:
    from rlhf.types import Prompt


def reward_problems(config: GRPOConfig, *, trains: bool = True) -> list[str]:
    """Why the user functions of the reward cannot grade; built-in rewards are tried with every gold answer later.

    A function that raises, runs into a limit or returns no number is refused, unless `reward.failure_fraction` is 1.
    """
    functions = _only_functions(config.reward)
    if not functions.all_parts or config.reward.failure_fraction == 1:
        return []
    # imported here, so that --plan needs no numpy
    from rlhf.data.load import first_usable
    from rlhf.rewards.answers.extract import gold_answer
    from rlhf.rewards.scorer import Scorer

    kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval") if trains else ("eval",)
    prompts = [row for which in kinds for row in first_usable(config.data, which, gold_answer)]
    problems: dict[tuple[str, str], str] = {}  # by function and error: it is the same for every source
    try:
        with Scorer(functions) as scorer:
            for row, prompt in prompts:
                for name, error in scorer.try_functions(prompt, _responses(config, prompt)).items():
                    problem = f"reward name={name!r}: it fails for a response to {row}: {error}".removesuffix(".")
                    problems.setdefault((name, error), f"{problem}. Repair the function (docs/rewards.md).")
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    return list(problems.values())


def _only_functions(reward: RewardConfig) -> RewardConfig:
    """The user functions of a reward, in one process per set of grants."""

    def functions(parts: Any) -> Any:
        return tuple(part for part in parts if part.is_user_function)

    by_source = {source: functions(parts) for source, parts in reward.by_source.items()}
    changed = {"parts": functions(reward.parts), "by_source": by_source, "workers": 1, "spares": 0}
    return reward.model_copy(update=changed)


def _responses(config: GRPOConfig, prompt: Prompt) -> list[str]:
    """Responses with the right answer, as many as a group has, and no two alike."""
    answer = f"The answer is \\boxed{{{prompt.answer}}}." if prompt.answer else "This is the response."
    return [f"{answer}{' It is.' * number}" for number in range(config.rollout.samples_per_prompt)]
