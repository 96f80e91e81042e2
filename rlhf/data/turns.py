"""Finds where a turn of the assistant ends: for the engines, the tokenizer and the chat template.

Engines and servers end a response at its stop ids (`stop_token_ids`). A chat template writes control tokens after a
turn of the assistant, such as Gemma's <end_of_turn>. The model learns to write them, so one of them should be a stop
id; otherwise no engine ends a response there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.config.data import PLAIN, TemplateName
from rlhf.config.grpo import GRPOConfig
from rlhf.config.model_folder import local_model_folder, read_json
from rlhf.data.templates import apply_template, tagged_ids, template_marks, template_source, tokenize

KEY = "data.template"
TALK = [
    {"role": role, "content": f"{said} {number}"}
    for number in (1, 2)
    for role, said in (("user", "Question"), ("assistant", "Reply"))
]
REFUSALS = (ValueError, TypeError, LookupError, AttributeError)  # raised by templates that refuse TALK


def stop_token_ids(path: str, tokenizer: Any) -> frozenset[int]:
    """The ids that end a response in vLLM: the tokenizer's eos, and those of generation_config.json or config.json."""
    folder = local_model_folder(path)
    file = folder / "generation_config.json"
    values = read_json(file if file.is_file() else folder / "config.json")
    inner = values.get("text_config")
    ids = {**(inner if isinstance(inner, dict) else {}), **values}.get("eos_token_id")
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*own, *([ids] if isinstance(ids, int) else ids or [])])


@dataclass(frozen=True)
class TurnEnds:
    """How a turn ends.

    Attributes:
        stop_ids: ids that end a response in an engine.
        written: ids of the control tokens that the template writes after the assistant's content, up to the first stop
            id; () if it writes none.
    """

    stop_ids: frozenset[int]
    written: tuple[int, ...] = ()

    @property
    def unnamed(self) -> int | None:
        """The token with which the template ends a turn, if that is no stop id."""
        return self.written[-1] if self.written and self.written[-1] not in self.stop_ids else None

    @property
    def ids(self) -> frozenset[int]:
        """All ids with which a turn may end."""
        return self.stop_ids.union(self.written[-1:])

    def names(self, tokenizer: Any) -> str:
        """The tokens with which a turn should end, for messages."""
        return " or ".join(map(repr, tokenizer.convert_ids_to_tokens(list(self.written[-1:] or sorted(self.stop_ids)))))

    def with_end(self, ids: np.ndarray, trained: np.ndarray, tokenizer: Any) -> np.ndarray:
        """The mask [L] bool, extended by the end of each turn that follows trained tokens, and what is in between."""
        with_end = trained.copy()
        for start in np.flatnonzero(trained[:-1] & ~trained[1:]) + 1:
            stop = start
            while stop < len(ids) and ids[stop] not in self.ids:
                if ids[stop] not in self.written and tokenizer.decode([int(ids[stop])]).strip():
                    break
                stop += 1
            if stop < len(ids) and ids[stop] in self.ids:
                with_end[start : stop + 1] = True
        return with_end


def turn_ends(
    tokenizer: Any, template: TemplateName, arguments: Mapping[str, Any] | None, stop_ids: frozenset[int]
) -> TurnEnds:
    """How turns in this template end. If it refuses a conversation of two turns, only the stop ids are known."""
    if template in PLAIN or not template_source(template, tokenizer):
        return TurnEnds(stop_ids)
    try:
        last, inside = (_text(TALK[:count], template, tokenizer, arguments).rpartition("Reply 1") for count in (2, 3))
    except REFUSALS:
        return TurnEnds(stop_ids)
    if not last[1]:
        return TurnEnds(stop_ids)
    source, control = template_source(template, tokenizer), set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder.items()
    control |= {id for id, token in added if token.special or (token.content.strip() and token.content in source)}
    # the text that the template writes at every end; if it is empty, the text at the end of a conversation
    for text in (os.path.commonprefix([last[2], inside[2]]), last[2]):
        written = [id for id in tokenize([text], template, tokenizer)[0].tolist() if id in control]
        if written:
            stop = next((number for number, id in enumerate(written) if id in stop_ids), len(written))
            return TurnEnds(stop_ids, tuple(written[: stop + 1]))
    return TurnEnds(stop_ids)


def unnamed_end(ends: TurnEnds, tokenizer: Any, template: TemplateName) -> Iterator[str]:
    """A warning if engines do not stop where the template ends a turn."""
    if (end := ends.unnamed) is not None:
        known = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(ends.stop_ids)))) or "none"
        yield (
            f"{KEY}={template}: the template ends a turn with {tokenizer.convert_ids_to_tokens(end)!r}, where no "
            f"engine or server stops: the tokenizer's eos and generation_config.json name {known}. A model that ends a "
            f"turn would be sampled further. Add {end} to eos_token_id in the model's generation_config.json."
        )


def rollout_warnings(config: GRPOConfig, tokenizer: Any) -> Iterator[str]:
    """The warning of `unnamed_end` for a run, unless its config makes the engines stop there."""
    data, rollout = config.data, config.rollout
    stops = stop_token_ids(config.model.path, tokenizer)
    ends = turn_ends(tokenizer, data.template, data.template_arguments, stops)
    written = tokenizer.convert_ids_to_tokens(list(ends.written[-1:]))
    if written and written[0] not in (*rollout.stop, rollout.truncate_token):
        yield from unnamed_end(ends, tokenizer, data.template)


def tag_warnings(tokenizer: Any, template: TemplateName, arguments: Mapping[str, Any] | None) -> Iterator[str]:
    """Warnings about {% generation %} tags that cover part of the prompt, or only one of two turns."""
    try:
        ids, trained = tagged_ids(TALK, template, tokenizer, KEY, {"tools": None, **(arguments or {})})
        text = _text(TALK[:1], template, tokenizer, arguments, add_generation_prompt=True)
    except REFUSALS:
        return
    inside = [reply in tokenizer.decode(ids[trained].tolist()) for reply in ("Reply 1", "Reply 2")]
    if any(inside) and not all(inside):
        yield (
            f"{KEY}={template}: the {{% generation %}} tags cover only one of two turns, so of several turns in a row "
            "not all are trained. Put them around every turn of the assistant."
        )
    prompt = tokenize([text], template, tokenizer)[0][: len(ids)]
    alike = np.append(ids[: len(prompt)] == prompt, False).argmin()  # a prompt may open a thought that a row lacks
    covered = tokenizer.decode(prompt[:alike][trained[:alike]].tolist())
    for mark in (mark for form in template_marks(template, tokenizer) for mark in form.begins + form.ends):
        covered = covered.replace(mark.strip(), "")  # of a thought that the prompt opens, or leaves empty
    if covered.strip():
        yield (
            f"{KEY}={template}: the {{% generation %}} tags begin too early: {covered!r} is trained, which is part of "
            "the prompt. Begin them after it."
        )


def _text(messages: Any, template: TemplateName, tokenizer: Any, arguments: Any, **options: Any) -> str:
    text: str = apply_template(messages, template, tokenizer, KEY, {"tools": None, **(arguments or {}), **options})
    return text
