"""Turns rows of supervised data into examples: conversations with a mask of trained tokens (SFT), and preference pairs.

An SFT row has `messages`, or `prompt` and `completion`, each text or messages. The assistant's turns are trained; with
a prompt, only those of the completion. The tokens of a turn are found in one of three ways:

- The template has {% generation %} tags: the tokens inside them are trained, and the end of the turn after them.
- It has none: the conversation is rendered up to the turn, with the generation prompt, and then with the turn. The
  added tokens are trained. Each text must begin with the previous one, token for token. Else the row is refused, since
  the model would be trained on other tokens than it will be given.
- Prompt and completion are texts: prompt, completion and eos are joined, as in TRL, without a template unless one is
  named.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product, takewhile
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhf.algo.packing import pack
from rlhf.answers.thoughts import opens_thought, split_thoughts
from rlhf.config.data import PLAIN, TemplateName
from rlhf.config.supervised import SupervisedDataConfig
from rlhf.data.control_tokens import without_marks
from rlhf.data.forms import Form, dropped_notes, split_message
from rlhf.data.messages import Message, read_arguments, read_messages, read_tools, with_system
from rlhf.data.model_files import check_ids
from rlhf.data.read import Source, check_without_images, config_sources
from rlhf.data.templates import (
    STAND_IN,
    check_has_template,
    check_whole,
    conversation,
    conversation_ids,
    first_difference,
    form_for,
    render,
    render_in_form,
    render_whole,
    safe_tools,
    tagged_ids,
    template_marks,
    template_messages,
    template_source,
    tokenize,
    unread_arguments,
)
from rlhf.data.turns import TurnEnds, tag_warnings, turn_ends, unnamed_end
from rlhf.types import PackedTokens

KEY = "data.template"
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
CONVERSATION_COLUMNS = ("messages", "conversations")  # the second one: ShareGPT
WEIGHTS = ("weight", "train", "training", "loss")  # keys of a message; 0 or false: it is not to be trained
# (reason, remedy) if the text of a conversation does not begin with the text of its beginning
JOINED = (
    "the tokenizer joins the end of the prompt and the beginning of the completion",
    "Move the space at the end of the prompt to the beginning of the completion.",
)
NOT_BEHIND = (
    "the template does not write this turn behind the prompt that the model is given",
    "Set what both of them read, such as data.chat_template_kwargs={enable_thinking: true} for a turn with a thought; "
    "or name a template that writes the turn so.",
)
REWRITTEN = (
    "the template writes the beginning of this conversation otherwise when more follows",
    "Give only its last turn as completion, the rest as prompt; or use a template that keeps what it has written, or "
    "one with {% generation %} tags in the model's folder.",
)


class MaskedTokens(NamedTuple):
    """A sequence: `token_ids` [L] int32, and `trained` [L] bool, True at tokens that enter a token loss."""

    token_ids: np.ndarray
    trained: np.ndarray


Encode = Callable[[dict[str, Any]], Sequence[MaskedTokens]]  # columns of a row -> the sequences of its example


def pair_encoder(
    tokenizer: Any,
    template: TemplateName,
    arguments: Mapping[str, Any] | None = None,
    *,
    notes: Counter[str] | None = None,
) -> Encode:
    """Make a function: columns of a row -> the chosen and the rejected sequence. It raises as `SFTEncoder` does.

    Args:
        notes: counts the parts of rows that the template does not write.
    """
    check_has_template(template, tokenizer, KEY)

    def encode(columns: dict[str, Any]) -> list[MaskedTokens]:
        sides = pair_conversations(columns)
        how: dict[str, Any] = {"template": template, "key": KEY, "trained": True, "tools": read_tools(columns)}
        how |= {"arguments": read_arguments(columns, arguments or {}), "notes": notes}
        ids = [conversation_ids(side, tokenizer, **how) for side in sides]
        if not all(map(len, ids)):
            raise ValueError("`chosen` or `rejected` has no token. Correct or remove the row.")
        return [MaskedTokens(each, np.zeros(len(each), bool)) for each in ids]

    return encode


def pair_conversations(columns: dict[str, Any]) -> tuple[list[Message], list[Message]]:
    """The conversations of `chosen` and `rejected`: answers of the assistant to one prompt.

    A side that begins with the assistant's message follows the messages of `prompt`.

    Raises:
        ValueError: the sides are equal, have different prompts, or one of them does not end with an answer.
    """
    _check_columns(columns, ("chosen", "rejected"), "`chosen` and `rejected`, and `prompt` if these are answers alone")
    chosen, rejected = (with_system(_side(columns, column), columns) for column in ("chosen", "rejected"))
    for column, side in (("chosen", chosen), ("rejected", rejected)):
        if side[-1]["role"] != "assistant":
            reason = "a pair compares answers of the assistant. Remove that message, or the row."
            raise ValueError(f"`{column}` ends with a message of {side[-1]['role']}, but {reason}")
        if not side[-1]["content"].strip() and not side[-1].get("tool_calls"):
            raise ValueError(f"the answer of `{column}` is empty. Correct or remove the row.")
    if chosen == rejected:
        raise ValueError("`chosen` and `rejected` are equal, so neither is better. Remove the row.")
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if same == min(len(chosen), len(rejected)):
        raise ValueError("one of `chosen` and `rejected` is a prefix of the other. Correct or remove the row.")
    if not same or {chosen[same]["role"], rejected[same]["role"]} != {"assistant"}:
        raise ValueError(
            f"`chosen` and `rejected` have different prompts: {chosen[same]['content']!r:.60} and "
            f"{rejected[same]['content']!r:.60}. A pair compares two answers to one prompt: correct or remove the row."
        )
    return chosen, rejected


def _side(columns: dict[str, Any], column: str) -> list[Message]:
    """The messages of one side, after the messages of `prompt`."""
    messages = _messages(columns, column, "assistant")
    if messages[0]["role"] == "assistant":
        _check_columns(columns, ("prompt",), f"`prompt`, or `{column}` as messages that begin with the prompt")
        return _messages(columns, "prompt", "user") + messages
    if columns.get("prompt") is not None:
        prompt = _messages(columns, "prompt", "user")
        if prompt[0]["role"] == "system" and messages[0]["role"] != "system":
            messages = [prompt[0], *messages]
        user_texts = [message["content"].strip() for message in messages if message["role"] == "user"]
        is_text = len(prompt) == 1 and prompt[0]["content"].strip() in user_texts
        if messages[: len(prompt)] != prompt and not is_text:
            raise ValueError(
                f"`prompt` is {prompt[-1]['content']!r:.60}, but `{column}` has another prompt: "
                f"{messages[0]['content']!r:.60}. Correct one of them, or remove the column `prompt`."
            )
    return messages


def trained_conversation(columns: dict[str, Any]) -> tuple[list[Message], list[int], int, bool]:
    """Read an SFT row.

    Returns its messages, indices of its trained turns, the number of prompt messages, and whether prompt and completion
    are texts.
    """
    given: list[Message] = []
    are_texts = False
    column = next((name for name in CONVERSATION_COLUMNS if columns.get(name) is not None), None)
    if column is not None:
        messages = with_system(_messages(columns, column, "user"), columns)
    else:
        _check_columns(columns, ("prompt", "completion"), "`messages`, or `prompt` and `completion`")
        given = with_system(_messages(columns, "prompt", "user"), columns)
        messages = given + _messages(columns, "completion", "assistant")
        are_texts = isinstance(columns["prompt"], str) and isinstance(columns["completion"], str)
    turns = [i for i in range(len(given), len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise ValueError("it has no message of the assistant to train on. Correct or remove the row.")
    _check_weights(messages, turns)
    return messages, turns, len(given), are_texts


class _Row(NamedTuple):
    """A row: messages up to the last trained turn, indices of trained turns, and the number of prompt messages."""

    messages: list[Message]
    turns: list[int]
    given: int
    tools: Any
    template: TemplateName
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class SFTEncoder:
    """Encodes the columns of a row as one sequence, up to the last trained token.

    Attributes:
        template: None uses the tokenizer's own template for messages, and none for texts.
        arguments: arguments of a chat template (`SFTDataConfig.template_arguments`).
        stop_ids: ids at which engines end a response (`turns.stop_token_ids`), besides the tokenizer's eos.
        notes: parts of rows that the template does not write, with the number of rows.

    Raises:
        ValueError: by a call, if the row cannot be read or no token of it would be trained, with the remedy.
    """

    tokenizer: Any
    template: TemplateName | None
    arguments: Mapping[str, Any] | None = None
    stop_ids: frozenset[int] = frozenset()
    notes: Counter[str] = field(default_factory=Counter)

    def __call__(self, columns: dict[str, Any]) -> list[MaskedTokens]:
        messages, turns, given, are_texts = trained_conversation(columns)
        template = self.template or ("raw" if are_texts else "model")
        arguments = read_arguments(columns, self.arguments or {})
        row = _Row(messages[: turns[-1] + 1], turns, given, read_tools(columns), template, arguments)
        self.notes.update(unread_arguments(arguments, template, self.tokenizer))
        ids, trained = self._plain(row) if template in PLAIN else self._chat(row)
        trained[:1] = False  # nothing predicts the first token
        if not trained.any():
            raise ValueError(
                "no token of the row is trained: the assistant's messages are empty. Correct or remove it."
            )
        end = int(trained.nonzero()[0][-1]) + 1
        return [MaskedTokens(ids[:end], trained[:end])]

    @cached_property
    def ends(self) -> TurnEnds:
        """How a turn ends."""
        stops = self.stop_ids.union([self.tokenizer.eos_token_id]) - {None}
        return turn_ends(self.tokenizer, self.template or "model", self.arguments, stops)

    def warnings(self, tokens: PackedTokens) -> Iterator[str]:
        """Warnings: unwritten parts of rows, ends of turns (untrained, or where no engine stops), misplaced tags."""
        yield from (f"data: in {rows} rows {note}." for note, rows in self.notes.items())
        template, trained = self.template or "model", np.where(tokens.response_mask, tokens.token_ids, -1)
        ends = np.isin(trained, list(self.ends.ids))
        without = int((np.add.reduceat(ends, tokens.cu_seqlens[:-1], dtype=np.int64) == 0).sum())
        if without:
            yield (
                f"data.train: {without} of {len(tokens.lengths)} rows train no {self.ends.names(self.tokenizer)}, with "
                "which a response ends: the model does not learn to stop there. Use a template that writes it."
            )
        if self.ends.unnamed in trained:
            yield from unnamed_end(self.ends, self.tokenizer, template)
        if template not in PLAIN and GENERATION_TAG.search(template_source(template, self.tokenizer)):
            yield from tag_warnings(self.tokenizer, template, self.arguments)

    def shown(self, tokens: PackedTokens) -> str:
        """The first sequence as text, with trained parts between >>> and <<<."""
        row = slice(0, int(tokens.cu_seqlens[1]))
        ids, mask = tokens.token_ids[row], tokens.response_mask[row]
        starts = np.flatnonzero(np.diff(mask)) + 1
        texts = [self.tokenizer.decode(part.tolist()) for part in np.split(ids, starts)]
        marked = [mask[start] for start in (0, *starts)]
        return "".join(f">>>{text}<<<" if inside else text for inside, text in zip(marked, texts, strict=True))

    def _plain(self, row: _Row) -> MaskedTokens:
        template = row.template
        if row.turns != [len(row.messages) - 1]:
            remedy = "Use a chat template, or columns prompt and completion."
            raise ValueError(f"as plain text ({KEY}={template}) a row has one answer, at its end. {remedy}")
        end = self.tokenizer.eos_token
        if end is None:
            remedy = "Set eos_token in its tokenizer_config.json, or use a chat template."
            raise ValueError(f"{KEY}={template}: the tokenizer has no eos token, with which an answer ends. {remedy}")
        render_whole(row.messages, template, self.tokenizer, KEY, {"tools": row.tools}, strict=row.turns)
        prompt = render(row.messages[:-1], template, self.tokenizer)
        texts = [prompt, prompt + row.messages[-1]["content"].removesuffix(end) + end]
        return self._trained_differences(tokenize(texts, template, self.tokenizer), template)

    def _chat(self, row: _Row) -> MaskedTokens:
        """Encode a row with a chat template. Control tokens in contents are text, except in the assistant's own."""
        tagged = GENERATION_TAG.search(template_source(row.template, self.tokenizer))
        if row.turns[0] == 0 and not tagged:
            raise ValueError("its first message is the assistant's, which answers nothing. Put a prompt before it.")
        options = {"tools": row.tools, **row.arguments, "keep_assistant": True}
        before = row.messages[:-1]
        is_single = len(row.turns) == 1 and len(before) > 0
        self._check_turns(row)
        said = conversation(row.messages, row.template, self.tokenizer, row.tools)
        try:
            form = form_for(said, row.template, self.tokenizer, KEY, options, strict=row.turns)
        except ValueError:
            if not is_single:
                raise
            prompt = render_whole(before, row.template, self.tokenizer, KEY, {**options, "add_generation_prompt": True})
            if not self._ends_inside_thought(prompt, row.template):
                raise
            return self._after_opened_thought(prompt, row, options)

        def text(messages: Sequence[Message], **more: Any) -> str:
            return render_in_form(form, messages, row.template, self.tokenizer, KEY, {**options, **more})

        self.notes.update(dropped_notes(row.messages, form, template_source(row.template, self.tokenizer)))
        whole = text(row.messages)
        ends = [(turn + done, not done) for turn in row.turns for done in (False, True)][:-1]
        ends = ends if is_single or not tagged else []
        texts = [text(row.messages[:end], add_generation_prompt=is_prompt) for end, is_prompt in ends]
        texts.append(whole)
        if is_single and not whole.startswith(texts[0]) and self._ends_inside_thought(texts[0], row.template):
            return self._after_opened_thought(texts[0], row, options)
        if tagged:
            tokens = self._tagged(form, row, text)
        else:
            tokens = self._trained_differences(tokenize(texts, row.template, self.tokenizer), row.template)
        check_whole(said, whole, form, f"{KEY}={row.template}", row.turns)
        return tokens

    def _check_turns(self, row: _Row) -> None:
        """Raise a ValueError for a turn whose thoughts cannot be told from its answer."""
        marks = template_marks(row.template, self.tokenizer)
        for number in row.turns:
            message = row.messages[number]
            _, answer = split_message(message, marks)
            if any(form.ends[0] in answer for form in marks) and split_thoughts(answer, marks)[1] != answer:
                raise ValueError(
                    f"message {number + 1} has several thoughts, or one that is not at its beginning or has no "
                    "end, but the template writes one thought before the answer. Correct or remove the row."
                )

    def _ends_inside_thought(self, prompt: str, template: TemplateName) -> bool:
        return opens_thought(without_marks(prompt), template_marks(template, self.tokenizer))

    def _tagged(self, form: Form, row: _Row, text: Callable[..., str]) -> MaskedTokens:
        messages = template_messages(form, row.messages, row.template, self.tokenizer, keep_assistant=True)
        options = {**row.arguments, "tools": safe_tools(row.tools, row.template, self.tokenizer)}
        ids, trained = tagged_ids(messages, row.template, self.tokenizer, KEY, options)
        if not trained.any() and any(messages[turn].get("content") for turn in row.turns):
            raise ValueError(
                f"no token of the row is trained: the {{% generation %}} tags of {KEY}={row.template} enclose no text "
                "of the assistant. Move them around its turns, or remove them."
            )
        trained = self.ends.with_end(ids, trained, self.tokenizer)
        if row.given:
            prompt = text(row.messages[: row.given], add_generation_prompt=True)
            beginnings = [*tokenize([prompt], row.template, self.tokenizer), ids]
            trained &= self._trained_differences(beginnings, row.template).trained
        return MaskedTokens(ids, trained)

    def _after_opened_thought(self, opened: str, row: _Row, options: Mapping[str, Any]) -> MaskedTokens:
        """Encode the last turn after a prompt that opens a thought, if the template writes no turn so (DeepSeek-R1).

        The trained tokens are the thought, its end mark, the answer, and the template's text after a turn.
        """
        *before, turn = row.messages
        marks = template_marks(row.template, self.tokenizer)
        thought, answer = split_message(turn, marks)
        begins = [(begin.strip(), form) for form in marks for begin in form.begins]
        _, form = max((each for each in begins if opened.rstrip().endswith(each[0])), key=lambda each: len(each[0]))
        shorter = {name: value for name, value in turn.items() if name != "reasoning_content"} | {"content": STAND_IN}
        text = render_whole([*before, shorter], row.template, self.tokenizer, KEY, options, checked=False)
        written = f"{opened}{thought or ''}\n{form.ends[0]}\n\n{answer}{text.rpartition(STAND_IN)[2]}"
        return self._trained_differences(tokenize([opened, written], row.template, self.tokenizer), row.template)

    def _trained_differences(self, beginnings: list[np.ndarray], template: TemplateName) -> MaskedTokens:
        """The last of these sequences of ids, each of which must begin with the previous one.

        Every second difference between neighbours is trained.
        """
        whole = beginnings[-1]
        trained = np.zeros(len(whole), bool)
        for number, (shorter, longer) in enumerate(pairwise(beginnings)):
            if not np.array_equal(shorter, longer[: len(shorter)]):
                difference = first_difference(shorter, longer, self.tokenizer)
                chat = NOT_BEHIND if len(beginnings) == 2 else REWRITTEN
                reason, remedy = JOINED if template in PLAIN else chat
                raise ValueError(f"{KEY}={template}: {reason}: {difference}. {remedy}")
            trained[len(shorter) : len(longer)] = number % 2 == 0
        return MaskedTokens(whole, trained)


def _check_columns(columns: dict[str, Any], needed: Sequence[str], usable: str) -> None:
    """Raise a ValueError if a row lacks a column that is needed."""
    if missing := [name for name in needed if columns.get(name) is None]:
        there = ", ".join(name for name, value in columns.items() if value is not None)
        raise ValueError(f"it has no `{missing[0]}`, only {there}. Give each row {usable}.")


def _check_weights(messages: Sequence[Message], turns: Sequence[int]) -> None:
    """Raise a ValueError for a turn that the row says is not to be trained."""
    for number, name in product(turns, WEIGHTS):
        if name in messages[number] and not messages[number][name]:
            raise ValueError(
                f"message {number + 1} has {name}={messages[number][name]!r}, but every assistant turn is trained. "
                "Give the turns that are not trained as `prompt`, and the last one as `completion`."
            )


def _messages(columns: dict[str, Any], column: str, role: str) -> list[Message]:
    return read_messages(columns.get(column), column, role)


@dataclass(frozen=True)
class Examples:
    """The examples of `data.train` or `data.eval`, in the order of the rows.

    Attributes:
        tokens: their sequences; the response mask is True at trained tokens.
        rows: number of examples.
        too_long: number of dropped rows with a sequence of more than `data.max_tokens`.
        bad_rows: the reason for each dropped row that is unusable (`data.on_bad_row=skip`).
    """

    tokens: PackedTokens
    rows: int
    too_long: int
    bad_rows: list[str]

    @property
    def row_keys(self) -> Iterator[bytes]:
        """The tokens of each example's sequences as bytes: equal for equal examples."""
        bounds = self.tokens.cu_seqlens[:: len(self.tokens.lengths) // self.rows]
        return (self.tokens.token_ids[start:end].tobytes() for start, end in pairwise(bounds))

    @property
    def fingerprint(self) -> str:
        """A digest of all tokens, their mask and the bounds of the sequences."""
        digest = hashlib.blake2b(digest_size=8)
        for column in (self.tokens.token_ids, self.tokens.response_mask, self.tokens.cu_seqlens):
            digest.update(column.tobytes())
        return digest.hexdigest()


class TrainEval(NamedTuple):
    """The examples of a run; `held_out` None without `data.eval`."""

    train: Examples
    held_out: Examples | None


def read_examples(config: SupervisedDataConfig, encode: Encode, *, vocab_size: float = math.inf) -> TrainEval:
    """Load the examples of data.train, and of data.eval if it is set."""
    load = partial(load_examples, config, encode=encode, vocab_size=vocab_size)
    return TrainEval(load("train"), load("eval") if config.eval else None)


def load_examples(
    config: SupervisedDataConfig, which: Literal["train", "eval"], encode: Encode, *, vocab_size: float = math.inf
) -> Examples:
    """Read and tokenize all sources; ValueError if a source or row (id >= vocab_size) is unusable or no row is left."""
    examples: list[Sequence[MaskedTokens]] = []
    too_long, bad_rows = 0, list[str]()
    for key, settings in config_sources(config, which).items():
        source = Source(key, settings, which, skip=config.on_bad_row == "skip")
        for row in source.stream():
            with source.leave_out(row):
                check_without_images(row.columns)
                sequences = encode(row.columns)
                for sequence in sequences:
                    check_ids(sequence.token_ids, vocab_size)
                if max(len(sequence.token_ids) for sequence in sequences) > config.max_tokens:
                    too_long += 1
                else:
                    examples.append(sequences)
        bad_rows += source.reasons
    if not examples:
        first = f" The first bad row: {bad_rows[0]}" if bad_rows else ""
        raise ValueError(
            f"data.{which}: no row is left: {too_long} have more than data.max_tokens={config.max_tokens} tokens, "
            f"{len(bad_rows)} cannot be used. Raise max_tokens, or name other data.{first}"
        )
    flat = [sequence for sequences in examples for sequence in sequences]
    tokens = pack([sequence.token_ids for sequence in flat], [sequence.trained for sequence in flat])
    return Examples(tokens, len(examples), too_long, bad_rows)
