"""The prompts of a run: read, checked and shown before anything is started, then drawn in their order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

from rlhf.config.data import CurriculumConfig
from rlhf.config.grpo import GRPOConfig
from rlhf.config.sections import ModelConfig
from rlhf.data.load import LoadedPrompts, leave_out, load_prompts
from rlhf.data.model_files import check_ids, embedding_rows, load_tokenizer, truncate_token_id
from rlhf.data.order import PromptStream
from rlhf.data.read import left_out_text, too_few_prompts
from rlhf.data.templates import check_reward_input, reward_input
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.buffer import Ticket
from rlhf.run.evaluation import RIGHT, metric_value
from rlhf.run.state import RunState
from rlhf.types import Prompt, RolloutGroup

MAX_ROWS_SHOWN = 5


class RunData(NamedTuple):
    """The prompts to train on, and those to evaluate on."""

    train: LoadedPrompts
    evaluation: LoadedPrompts

    def row_keys(self, config: GRPOConfig) -> tuple[Iterator[Hashable], dict[str, list[Hashable]]]:
        """Keys of the training rows, and of the rows of each evaluation set; equal rows have equal keys.

        The key of a row is the tokens of its prompt. With an environment it includes the columns, since the environment
        may write more of the prompt from them. Equal rows have no key then: each may become another world.
        """

        def keys(prompts: Iterable[Prompt]) -> Iterator[Hashable]:
            if not config.environment.parts:
                return (prompt.token_ids.tobytes() for prompt in prompts)
            rows = Counter(f"{p.token_ids.tolist()} {sorted(p.columns.items())}" for p in prompts if p.columns)
            return (row for row, count in rows.items() if count == 1)

        held_out = {f"eval/{source}": [*keys(rows)] for source, rows in self.evaluation.prompts.items()}
        return keys(chain.from_iterable(self.train.prompts.values())), held_out


def read_data(config: GRPOConfig, tokenizer: Any) -> RunData:
    """Read and tokenize all prompts; ValueError if a row, the tokenizer or the reward model's template does not fit."""
    truncate_token_id(config.rollout, tokenizer)  # must be one token
    vocab_size = embedding_rows(config.model.path)
    load = partial(load_prompts, vocab_size=vocab_size, has_environment=config.uses_environment_or_tools)
    train = load(config.data, "train", tokenizer)
    _check_prompts_suffice(config, train)
    if config.reward_model is not None and config.reward_model.path is not None:
        token_ids = reward_input(config)
        path = config.reward_model.path
        reads = load_tokenizer(ModelConfig(path=path), key="reward_model.path")
        for rows in train.prompts.values():
            if not rows[0].messages:
                continue  # an environment makes them
            for prompt in rows:  # a template may not write the messages of one row
                check_reward_input(config, prompt, reads)
            ids = token_ids([*rows[0].messages, {"role": "assistant", "content": ""}], reads)
            try:
                check_ids(ids, embedding_rows(path))
            except ValueError as error:
                raise ValueError(f"reward_model.path={path}: {rows[0].id}: {error}") from None
    return RunData(train, load(config.data, "eval", tokenizer))


def sized(
    data: RunData, config: GRPOConfig, with_rows: Callable[[Literal["train", "eval"], LoadedPrompts], LoadedPrompts]
) -> RunData:
    """The prompts, with as many as the environment has problems. ValueError if they are fewer than asked for."""
    data = RunData(with_rows("train", data.train), with_rows("eval", data.evaluation))
    _check_prompts_suffice(config, data.train)
    return data


def _check_prompts_suffice(config: GRPOConfig, prompts: LoadedPrompts) -> None:
    if problem := too_few_prompts(sum(prompts.rows_per_epoch.values()), config.rollout.prompts_per_step):
        raise ValueError(problem)


def source_lines(key: str, prompts: LoadedPrompts, max_prompt_tokens: int) -> Iterator[str]:
    """Lines with the number of prompts of each source, of rows that were left out, and notes about the template."""
    for source, rows in prompts.prompts.items():
        left_out = left_out_text(prompts.dropped_too_long[source], max_prompt_tokens, prompts.bad_rows.get(source, ()))
        yield f"{key} {source}: {len(rows)} prompts{left_out}"
        for note, count in prompts.notes.get(source, {}).items():
            yield f"{key} {source}: in {count} prompts {note}"


def without_bad_gold(data: RunData, config: GRPOConfig, scorer: Scorer, say: Callable[[str], None]) -> RunData:
    """Grade every gold answer against itself, and leave out the rows whose answer cannot be graded.

    ValueError if there are such rows and reward.bad_gold is `fail`, or if too few are left.
    """

    def with_gradable_gold(which: Literal["train", "eval"], loaded: LoadedPrompts) -> LoadedPrompts:
        bad = scorer.check_gold(prompt for rows in loaded.prompts.values() for prompt in rows)
        if not bad:
            return loaded
        named = "\n".join(f"  {row.row}: {row.answer!r} ({row.reason})" for row in bad[:MAX_ROWS_SHOWN])
        named += f"\n  and {len(bad) - MAX_ROWS_SHOWN} more" if len(bad) > MAX_ROWS_SHOWN else ""
        if config.reward.bad_gold == "fail":
            raise ValueError(
                f"{len(bad)} gold answers cannot be graded:\n{named}\n"
                "Repair these rows, or set reward.bad_gold=skip to leave them out."
            )
        say(f"left out {len(bad)} rows whose gold answer cannot be graded:\n{named}")
        return leave_out(config.data, which, loaded, {row.row for row in bad})

    left = RunData(with_gradable_gold("train", data.train), with_gradable_gold("eval", data.evaluation))
    _check_prompts_suffice(config, left.train)
    return left


class PromptTickets:
    """Draws prompts in order; a resumed run first repeats the prompts that were dispatched and not trained on.

    `metric_of`: source -> the metric that tells the curriculum which responses are right. `waiting` has the restored
    prompts that are not dispatched again yet.
    """

    def __init__(
        self,
        loaded: LoadedPrompts,
        *,
        seed: int,
        restored: RunState | None,
        curriculum: CurriculumConfig | None = None,
        metric_of: Callable[[str], str] = str,
    ) -> None:
        rows = loaded.rows_per_epoch
        self.stream = PromptStream(loaded.prompts, rows_per_epoch=rows, seed=seed, curriculum=curriculum)
        self._metric_of = metric_of
        self.waiting = deque[Ticket]()
        if restored is not None:
            self.stream.restore(restored.stream)
            drawn = self.stream.drawn
            for position in restored.outstanding:
                self.stream.drawn = position
                self.waiting.append(self._draw())
            self.stream.drawn = drawn

    def next(self) -> Ticket:
        return self.waiting.popleft() if self.waiting else self._draw()

    def record(self, ticket: Ticket, group: RolloutGroup) -> None:
        """Tell the curriculum, if there is one, how many of a group's graded samples are right."""
        if self.stream.curriculum is None:
            return
        values = [metric_value(sample, self._metric_of(group.prompt.source)) for sample in group.samples]
        if right := [value > RIGHT for value in values if value is not None]:
            self.stream.curriculum.record(ticket.position, sum(right) / len(right))

    def _draw(self) -> Ticket:
        position = self.stream.drawn
        return Ticket(position, self.stream.take(1)[0])
