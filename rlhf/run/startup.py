"""The data of a run and its gold answers, read, checked and shown before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf.answers.extract import gold_answer
from rlhf.config.grpo import GRPOConfig
from rlhf.config.sections import ModelConfig
from rlhf.data.load import LoadedPrompts, first_prompt, leave_out, load_prompts, show_prompt
from rlhf.data.model_files import load_tokenizer, truncate_token_id
from rlhf.data.read import too_few_prompts
from rlhf.data.templates import reward_input
from rlhf.rewards.scorer import Scorer

MAX_ROWS_SHOWN = 5


@dataclass(frozen=True)
class RunData:
    """The prompts to train on, and those to evaluate on."""

    train: LoadedPrompts
    evaluation: LoadedPrompts


class Say(Protocol):
    """Prints a text for the user; without `wrap`, long lines are not broken."""

    def __call__(self, text: str, *, wrap: bool = True) -> None: ...


def read_data(config: GRPOConfig, tokenizer: Any) -> RunData:
    """Read and tokenize all prompts, and check what can be checked without grading.

    Raises:
        ValueError: a row, the tokenizer or the reward model's template does not fit the config.
    """
    truncate_token_id(config.rollout, tokenizer)  # must be one token
    train = load_prompts(config.data, "train", tokenizer, gold_answer)
    check_prompts_suffice(config, train)
    check_reward_model_reads(config, train)
    return RunData(train, load_prompts(config.data, "eval", tokenizer, gold_answer))


def check_prompts_suffice(config: GRPOConfig, prompts: LoadedPrompts) -> None:
    """Raise a ValueError if a step takes more prompts than an epoch has."""
    if problem := too_few_prompts(sum(prompts.rows_per_epoch.values()), config.rollout.prompts_per_step):
        raise ValueError(problem)


def check_reward_model_reads(config: GRPOConfig, prompts: LoadedPrompts) -> None:
    """Check that the first prompt of each source can be written in the reward model's template.

    Raises:
        ValueError: its tokenizer cannot be loaded, or has no chat template for such messages.
    """
    reward_model = config.reward_model
    if reward_model is None or reward_model.path is None:
        return
    token_ids = reward_input(config)
    tokenizer = load_tokenizer(ModelConfig(path=reward_model.path), key="reward_model.path")
    for rows in prompts.prompts.values():
        token_ids([*rows[0].messages, {"role": "assistant", "content": ""}], tokenizer)


def show_data(say: Say, prompts: LoadedPrompts, tokenizer: Any, *, max_prompt_tokens: int) -> None:
    """Print how many prompts each source has, and the first prompt as the model receives it."""
    for source, rows in prompts.prompts.items():
        dropped = prompts.dropped_too_long[source]
        left_out = f", {dropped} left out as longer than {max_prompt_tokens} tokens" if dropped else ""
        bad = prompts.bad_rows.get(source)
        left_out += f", {len(bad)} left out as bad rows, the first: {bad[0]}" if bad else ""
        say(f"data {source}: {len(rows)} prompts{left_out}")
    say("first prompt, as the model is given it:")
    say(show_prompt(first_prompt(prompts), tokenizer), wrap=False)


def without_bad_gold(
    which: Literal["train", "eval"], loaded: LoadedPrompts, config: GRPOConfig, scorer: Scorer, say: Say
) -> LoadedPrompts:
    """Grade every gold answer against itself, and leave out the rows whose answer cannot be graded.

    Raises:
        ValueError: there are such rows, and reward.bad_gold is `fail`.
    """
    bad = scorer.check_gold(prompt for rows in loaded.prompts.values() for prompt in rows)
    if not bad:
        return loaded
    named = "\n".join(f"  {row.row}: {row.answer!r} ({row.reason})" for row in bad[:MAX_ROWS_SHOWN])
    more = f"\n  and {len(bad) - MAX_ROWS_SHOWN} more" if len(bad) > MAX_ROWS_SHOWN else ""
    if config.reward.bad_gold == "fail":
        raise ValueError(
            f"{len(bad)} gold answers cannot be graded:\n{named}{more}\n"
            "Repair these rows, or set reward.bad_gold=skip to leave them out."
        )
    say(f"left out {len(bad)} rows whose gold answer cannot be graded:\n{named}{more}")
    return leave_out(config.data, which, loaded, {row.row for row in bad})
