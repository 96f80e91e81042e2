"""Turns data sets into prompts: choose columns, extract the answer, render, tokenize, drop prompts that are too long.

This happens once, before any model is loaded, and needs only the tokenizer. No row is skipped silently: a row that
cannot be used raises an error with its number, or is counted (`data.on_bad_row`), as are prompts that are too long.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from rlhf.answers.thoughts import opens_thought
from rlhf.config.data import USUAL_COLUMNS, AnswerFormat, DataConfig, SourceConfig
from rlhf.data.answers import extract_answer
from rlhf.data.messages import Message, check_text, messages_in, read_arguments, read_messages, read_tools, with_system
from rlhf.data.model_files import check_ids
from rlhf.data.read import Row, Source, check_without_images, config_sources, rows_per_epoch
from rlhf.data.templates import render, tokenize, unread_arguments
from rlhf.data.thoughts import marks_of
from rlhf.types import Prompt

Messages = tuple[Message, ...]
MAX_PROMPT_CHARS = 4 * 2**20  # about a million tokens, for which a tokenizer needs seconds
SOURCES_SHOWN = 5  # shown names of a column `data_source`, which verl's rows have
FIRST_ROWS = 16  # rows that are read to find a usable one
MADE_PROMPTS = {"train": 4096, "eval": 128}  # prompts per epoch if an environment makes them and `rows` is not set


@dataclass(frozen=True)
class LoadedPrompts:
    """The prompts of `data.train` or `data.eval`.

    Attributes:
        prompts: by source; ids are `source/row`, rows counted from 1.
        dropped_too_long: by source, the number of dropped rows with more than `data.max_prompt_tokens`.
        bad_rows: by source, the reason for each dropped row (`data.on_bad_row=skip`).
        notes: by source, notes about parts of rows that the template does not write, with the number of prompts.
        rows_per_epoch: by source, the number of its prompts per epoch; all, unless weights or row counts are set.
    """

    prompts: dict[str, list[Prompt]]
    dropped_too_long: dict[str, int]
    rows_per_epoch: dict[str, int]
    bad_rows: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, Counter[str]] = field(default_factory=dict)


def load_prompts(
    config: DataConfig,
    which: Literal["train", "eval"],
    tokenizer: Any,
    *,
    vocab_size: float = math.inf,
    has_environment: bool = False,
) -> LoadedPrompts:
    """Read and tokenize all sources; ValueError if a source, column or row is unusable, or every prompt too long.

    Args:
        vocab_size: vocabulary of the model; a row with a higher token id is unusable.
        has_environment: the run has environments; they later write the prompts of rows without one.
    """
    loaded = LoadedPrompts({}, {}, {}, {})
    sources, longest = config_sources(config, which), config.max_prompt_tokens
    for key, settings in sources.items():
        if settings.is_environment:
            loaded.prompts[settings.label] = _made_prompts(config, which, settings)
            loaded.dropped_too_long[settings.label], loaded.bad_rows[settings.label] = 0, []
            continue
        source = Source(key, settings, which, skip=config.on_bad_row == "skip")
        rows = source.read()
        if settings.rows is not None and settings.rows > len(rows):
            given = f"{key}: rows={settings.rows}: {settings.path} has only {len(rows)}"
            raise ValueError(f"{given}. Use at most {len(rows)}, or null.")
        if which == "eval":
            rows = rows[: settings.rows or config.eval_rows]
        prompts = _make_prompts(config, source, rows, tokenizer, has_environment=has_environment, vocab_size=vocab_size)
        short = loaded.prompts[settings.label] = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
        if not short:
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise ValueError(
                f"{key}={settings.path}: all {len(rows)} prompts are too long: the shortest has {shortest} tokens, the "
                f"limit is {longest}. Raise data.max_prompt_tokens to at least {shortest}, if the model's "
                "context has room for that and rollout.max_response_tokens."
            )
        loaded.dropped_too_long[settings.label] = len(prompts) - len(short)
        loaded.bad_rows[settings.label] = source.reasons
        loaded.notes[settings.label] = source.notes
    return replace(loaded, rows_per_epoch=rows_per_epoch(sources.values(), loaded.prompts))


def first_usable(config: DataConfig, which: Literal["train", "eval"]) -> Iterator[tuple[str, Prompt]]:
    """(row, as messages name it; its prompt, without tokens) of the first usable row of each source that has one."""
    for key, settings in config_sources(config, which).items():
        if settings.is_environment:
            continue
        with contextlib.suppress(ValueError, IndexError):
            source = Source(key, settings, which, skip=True)
            row, messages, answer, is_text = usable_rows(config, source, [*islice(source.stream(), FIRST_ROWS)])[0]
            name, no_tokens, label = f"{settings.label}/{row.number}", np.empty(0, np.int32), settings.label
            prompt = Prompt(name, 0, no_tokens, messages, answer, label, row.columns, is_text=is_text)
            yield f"row {row.number} of {key}={settings.path}", prompt


def read_first_prompt(config: DataConfig, tokenizer: Any, *, has_environment: bool = False) -> Prompt:
    """The first prompt of data.train. Only its first rows are read; ValueError if none of them can be used."""
    key, settings = next(iter(config_sources(config, "train").items()))
    if settings.is_environment:
        return _made_prompts(config, "train", settings)[0]
    source = Source(key, settings, "train", skip=True)
    rows = [*islice(source.stream(), FIRST_ROWS)]
    return _make_prompts(config, source, rows, tokenizer, has_environment=has_environment, vocab_size=math.inf)[0]


def leave_out(
    config: DataConfig, which: Literal["train", "eval"], loaded: LoadedPrompts, ids: set[str]
) -> LoadedPrompts:
    """The prompts without those with these ids, mixed again; ValueError if a source becomes empty."""
    remaining = {source: [p for p in prompts if p.id not in ids] for source, prompts in loaded.prompts.items()}
    for source, prompts in remaining.items():
        if not prompts:
            raise ValueError(f"data.{which}: no row of {source} is left after leaving out bad rows. Remove the source.")
    sources = config_sources(config, which).values()
    return replace(loaded, prompts=remaining, rows_per_epoch=rows_per_epoch(sources, remaining))


def show_prompt(prompt: Prompt, tokenizer: Any) -> str:
    """The text of a prompt as the model sees it, with special tokens, and its gold answer."""
    text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"prompt {prompt.id} ({len(prompt.token_ids)} tokens):\n{text}\nanswer: {prompt.answer or 'none'}"


def first_prompt(loaded: LoadedPrompts) -> Prompt:
    """The first row of the first source."""
    return next(iter(loaded.prompts.values()))[0]


def with_rows(
    config: DataConfig, which: Literal["train", "eval"], loaded: LoadedPrompts, problems: int | None
) -> LoadedPrompts:
    """The prompts with as many made ones as the environment has `problems`; None: any number. ValueError: too few."""
    prompts, sources = dict(loaded.prompts), config_sources(config, which)
    for key, settings in sources.items():
        if problems is None or not settings.is_environment:
            continue
        if problems == 0:
            remedy = "`environment.args: {eval: 100}` holds some out, with verifiers; else remove the key."
            raise ValueError(f"{key}={settings.path}: the environment has no problems for it. {remedy}")
        if settings.rows is not None and settings.rows > problems:
            reason = f"the environment has only {problems} problems. Use at most {problems}, or null."
            raise ValueError(f"{key}: rows={settings.rows}: {reason}")
        prompts[settings.label] = _made_prompts(config, which, settings, problems)
    return replace(loaded, prompts=prompts, rows_per_epoch=rows_per_epoch(sources.values(), prompts))


def _made_prompts(
    config: DataConfig, which: Literal["train", "eval"], settings: SourceConfig, problems: int | None = None
) -> list[Prompt]:
    """Prompts without text, for environments that write them. Evaluation prompts have other ids, so other seeds.

    `problems`: how many the environment has; None: as many as it is asked for.
    """
    usual = MADE_PROMPTS[which]
    if which == "eval":
        usual = min(config.eval_rows or usual, problems or config.eval_rows or usual)
    count = settings.rows or (problems if problems and which == "train" else usual)
    begin = settings.label if which == "train" else f"{settings.label}/{which}"
    no_tokens = np.empty(0, np.int32)
    return [
        Prompt(f"{begin}/{number}", 0, no_tokens, (), "", settings.label, {"number": number, "split": which})
        for number in range(1, count + 1)
    ]


def _make_prompts(
    config: DataConfig,
    source: Source[SourceConfig],
    rows: list[Row],
    tokenizer: Any,
    *,
    has_environment: bool,
    vocab_size: float,
) -> list[Prompt]:
    """The prompts of all usable rows. ValueError if a row is unusable and not dropped, or if no row is usable."""
    usable = usable_rows(config, source, rows, has_environment=has_environment)
    rendered, texts, notes, arguments = [], [], source.notes, config.template_arguments
    for each in usable:
        row, messages, *_ = each
        how: dict[str, Any] = {"tools": read_tools(row.columns), "notes": notes}
        with source.leave_out(row):
            how["arguments"] = read_arguments(row.columns, arguments)
            if has_environment and how["arguments"] != arguments:
                raise ValueError(
                    "`chat_template_kwargs`: the later turns of an environment would be written without them. Remove "
                    "the column, and set data.chat_template_kwargs."
                )
            notes.update(unread_arguments(how["arguments"], config.template, tokenizer))
            texts.append(render(messages, config.template, tokenizer, **how) if messages else "")
            rendered.append(each)
    marks = marks_of(tokenizer, config.template)
    token_ids, label = tokenize(texts, config.template, tokenizer), source.settings.label
    named = Counter(str(row.columns["data_source"]) for row, *_ in rendered if row.columns.get("data_source"))
    for name, count in named.most_common(SOURCES_SHOWN):
        if name != label:
            notes[f"`data_source` is {name}, while rewards and metrics use the label {label} (`source`)"] += count
    prompts = []
    for (row, messages, answer, is_text), text, ids in zip(rendered, texts, token_ids, strict=True):
        with source.leave_out(row):
            if not len(ids) and messages:
                reason = "the tokenizer knows none of its characters. Remove the row, or use a tokenizer for this data."
                raise ValueError(f"the prompt has no token: {reason}")
            check_ids(ids, vocab_size)
            fields = (answer, label, row.columns, opens_thought(text, marks), is_text)
            prompts.append(Prompt(f"{label}/{row.number}", 0, ids, messages, *fields))
    if not prompts:
        raise ValueError(f"{source.key}={source.path}: no row can be used. The first one: {source.reasons[0]}")
    return prompts


def usable_rows(
    config: DataConfig, source: Source[SourceConfig], rows: list[Row], *, has_environment: bool = False
) -> list[tuple[Row, Messages, str, bool]]:
    """Each readable row with its messages, its answer, and True if the prompt is a text."""
    columns = list({name: None for row in rows for name in row.columns})  # in the order of the file
    nested = [name for names in USUAL_COLUMNS.values() for name in names if "." in name]
    columns += [name for name in nested if any(_column_value(row.columns, name) is not None for row in rows)]
    if "question" in columns and not isinstance(rows[0].columns.get("prompt"), str | None):
        columns.remove("question")  # verl's rows: `prompt` holds the messages that were made of it
    prompt_column = _pick_column("prompt_column", config, source, columns, optional=has_environment)
    answer_format, answer_column, answer = source.settings.answer_format or config.answer_format, "", ""
    if answer_format != "none":
        answer_column = _pick_column("answer_column", config, source, columns, optional=has_environment)
    usable = []
    for row in rows:
        with source.leave_out(row):
            check_without_images(row.columns)
            messages = _read_prompt(config, row, prompt_column) if prompt_column else ()
            read_tools(row.columns)
            if answer_column:
                answer = _read_answer(row, answer_column, answer_format)
            value = _column_value(row.columns, prompt_column)
            is_text = isinstance(value, str) and messages_in(value, prompt_column) is None
            usable.append((row, messages, answer, is_text))
    return usable


def _pick_column(
    setting: str, config: DataConfig, source: Source[SourceConfig], columns: list[str], *, optional: bool = False
) -> str:
    """The column that the config names, or the first usual one in any case; empty if it is `optional` and missing."""
    if explicit := getattr(source.settings, setting) or getattr(config, setting):
        if explicit in columns or explicit.split(".")[0] in columns:
            return str(explicit)
        problem = f"{setting}={explicit}: {source.path} has no such column"
    else:
        usual, by_lower_case = USUAL_COLUMNS[setting], {column.lower(): column for column in reversed(columns)}
        if existing := [by_lower_case[name] for name in usual if name in by_lower_case]:
            return existing[0]
        if optional:
            return ""
        problem = f"{setting} is not set, and {source.path} has none of {', '.join(usual)}"
    raise ValueError(f"{source.key}: {problem}, only {', '.join(columns)}. Name one of these.")


def _column_value(columns: dict[str, Any], column: str) -> Any:
    """The value of a column, or of `a.b` in a nested one; None if it is missing."""
    if column in columns:
        return columns[column]
    value: Any = columns
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _read_answer(row: Row, column: str, answer_format: AnswerFormat) -> str:
    try:
        answer = extract_answer(_column_value(row.columns, column), answer_format)
    except ValueError as error:
        raise ValueError(
            f"no usable answer: `{column}` {error}. Correct or remove the row, name another answer_column or "
            "answer_format, or set data.answer_format=none if no reward needs answers."
        ) from None
    check_text(answer, column)
    return answer


def _read_prompt(config: DataConfig, row: Row, column: str) -> Messages:
    """The prompt as messages, with the config's system prompt and suffix."""
    value = _column_value(row.columns, column)
    if value is None:
        raise ValueError(f"`{column}` is missing. Correct or remove the row.")
    rest = row.columns.get("input")  # Alpaca's rows
    if column == "instruction" and isinstance(value, str) and isinstance(rest, str) and rest.strip():
        value = f"{value}\n{rest}"
    messages = with_system(read_messages(value, column, "user"), row.columns)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"the last message of `{column}` is the assistant's: there is nothing to answer. Remove it.")
    if not messages[-1]["content"].strip():
        raise ValueError(f"`{column}` is empty. Correct or remove the row.")
    if config.prompt_suffix:
        user_messages = [message for message in messages if message["role"] == "user"] or messages
        user_messages[-1]["content"] += f"\n{config.prompt_suffix}"
    if config.system_prompt:
        if messages[0]["role"] == "system" and not messages[0]["content"].strip():
            del messages[0]  # converters write it for rows that have none
        if messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": config.system_prompt})
    if (length := sum(len(message["content"]) for message in messages)) > MAX_PROMPT_CHARS:
        raise ValueError(f"`{column}` has {length:,} characters, over {MAX_PROMPT_CHARS:,}. Correct or remove the row.")
    return tuple(messages)
