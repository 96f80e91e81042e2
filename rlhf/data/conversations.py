"""Rows of supervised data -> examples: conversations with a mask of what is trained (SFT), and preference pairs.

A row of SFT has `messages`, whose assistant turns are trained, or `prompt` and `completion`, each text or messages, of
which the completion's turns are. How the tokens of a turn are found:

- the template has {% generation %} tags: they say it, and the end token right after a turn is trained too;
- it has none: a turn is what the conversation up to it has more than its beginning with the generation prompt. Each of
  these beginnings must be the beginning of the next, token for token, else the row is refused: the model would be
  trained on other tokens than it is given;
- prompt and completion are texts: as in TRL, prompt, completion and eos one after another, without a template unless
  one is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhf.algo.packing import pack
from rlhf.config.data import PLAIN, TemplateName
from rlhf.config.supervised import SupervisedDataConfig
from rlhf.data.read import Source, check_without_images, config_sources, read_messages, read_tools
from rlhf.data.templates import (
    chat_text,
    check_has_template,
    conversation_ids,
    render,
    safe_messages,
    safe_tools,
    tagged_ids,
    template_source,
    tokenize,
)
from rlhf.types import PackedTokens

Message = dict[str, Any]
KEY = "data.template"
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
TOKENS_SHOWN = 8
# why a beginning of a conversation is not that of a longer one, as plain text and in a chat template; and what to do
JOINED = (
    "the tokenizer joins the end of the prompt and the beginning of the completion",
    "Move the space at the end of the prompt to the beginning of the completion.",
)
REWRITTEN = (
    "the template writes the beginning of this conversation otherwise when more follows",
    "Give only its last turn as completion, the rest as prompt; or use a template that keeps what it has written, or "
    "one with {% generation %} tags in the model's folder.",
)


class MaskedTokens(NamedTuple):
    """A sequence: `token_ids` [L] int32, and `trained` [L] bool, True at the tokens that a loss on tokens is on."""

    token_ids: np.ndarray
    trained: np.ndarray


Encode = Callable[[dict[str, Any]], Sequence[MaskedTokens]]  # columns of a row -> the sequences of its example


def pair_encoder(tokenizer: Any, template: TemplateName, arguments: Mapping[str, Any] | None = None) -> Encode:
    """columns of a row -> the chosen and the rejected conversation; raises as `SFTEncoder` does."""
    check_has_template(template, tokenizer, KEY)
    token_ids = partial(conversation_ids, tokenizer=tokenizer, template=template, key=KEY, arguments=arguments)

    def encode(columns: dict[str, Any]) -> list[MaskedTokens]:
        sides = [token_ids(pair_conversation(columns, column)) for column in ("chosen", "rejected")]
        if not all(map(len, sides)):
            raise ValueError("one of its sides has no token. Correct or remove the row.")
        return [MaskedTokens(ids, np.zeros(len(ids), bool)) for ids in sides]

    return encode


def pair_conversation(columns: dict[str, Any], column: str) -> list[Message]:
    """The messages of `chosen` or `rejected`, after those of `prompt` if they begin with the assistant's."""
    messages = _messages(columns, column, "assistant")
    return _messages(columns, "prompt", "user") + messages if messages[0]["role"] == "assistant" else messages


@dataclass(frozen=True)
class SFTEncoder:
    """columns of a row -> its sequence, up to the last trained token.

    Attributes:
        template: None: messages as the tokenizer's own writes them, texts as they are.
        arguments: of a chat template (`SFTDataConfig.template_arguments`).

    Raises:
        ValueError: from a call: the row cannot be read, or nothing of it would be trained; says what to change.
    """

    tokenizer: Any
    template: TemplateName | None
    arguments: Mapping[str, Any] | None = None

    def __call__(self, columns: dict[str, Any]) -> list[MaskedTokens]:
        given: list[Message] = []
        are_texts = False
        if columns.get("messages") is not None:
            messages = _messages(columns, "messages", "user")
        else:
            given = _messages(columns, "prompt", "user")
            messages = given + _messages(columns, "completion", "assistant")
            are_texts = isinstance(columns["prompt"], str) and isinstance(columns["completion"], str)
        turns = [i for i in range(len(given), len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise ValueError("it has no message of the assistant to train on. Correct or remove the row.")
        tools = read_tools(columns)
        template = self.template or ("raw" if are_texts else "model")
        if template in PLAIN:
            ids, trained = self._plain(messages, turns, template)
        elif GENERATION_TAG.search(template_source(template, self.tokenizer)):
            ids, trained = self._tagged(messages, len(given), tools, template)
        else:
            ids, trained = self._by_difference(messages, turns, tools, template)
        trained[:1] = False  # nothing predicts the first token
        if not trained.any():
            raise ValueError("no token of it is trained: what the assistant says is empty. Correct or remove the row.")
        end = int(trained.nonzero()[0][-1]) + 1
        return [MaskedTokens(ids[:end], trained[:end])]

    def warnings(self, tokens: PackedTokens) -> Iterator[str]:
        """A warning if sequences have no trained end token: a model does not learn to stop there."""
        ends = tokens.response_mask & (tokens.token_ids == self.tokenizer.eos_token_id)
        without = int((np.add.reduceat(ends, tokens.cu_seqlens[:-1], dtype=np.int64) == 0).sum())
        if without:
            yield (
                f"data.train: {without} of {len(tokens.lengths)} rows train no {self.tokenizer.eos_token!r}, with "
                "which a response ends: the model does not learn to stop there. Use a template that writes it."
            )

    def shown(self, tokens: PackedTokens) -> str:
        """The first sequence as text, with what is trained between >>> and <<<."""
        row = slice(0, int(tokens.cu_seqlens[1]))
        ids, mask = tokens.token_ids[row], tokens.response_mask[row]
        starts = np.flatnonzero(np.diff(mask)) + 1
        texts = [self.tokenizer.decode(part.tolist()) for part in np.split(ids, starts)]
        marked = [mask[start] for start in (0, *starts)]
        return "".join(f">>>{text}<<<" if inside else text for inside, text in zip(marked, texts, strict=True))

    def _text(self, messages: list[Message], tools: Any, template: TemplateName, **options: Any) -> Any:
        """A conversation in a chat template; control tokens are text, but for those that the assistant is to learn."""
        messages = safe_messages(messages, template, self.tokenizer, keep_assistant=True)
        options |= {"tools": safe_tools(tools, template, self.tokenizer), **(self.arguments or {})}
        return chat_text(messages, template, self.tokenizer, KEY, **options)

    def _plain(self, messages: list[Message], turns: list[int], template: TemplateName) -> MaskedTokens:
        if turns != [len(messages) - 1]:
            raise ValueError(
                f"as plain text ({KEY}={template}) a row has one answer, at its end. Use a chat template, or columns "
                "prompt and completion."
            )
        end = self.tokenizer.eos_token
        if end is None:
            raise ValueError(f"{KEY}={template}: the tokenizer has no eos token, with which an answer ends.")
        prompt = render(messages[:-1], template, self.tokenizer)
        texts = [prompt, prompt + messages[-1].get("content", "").removesuffix(end) + end]
        return self._differences(tokenize(texts, template, self.tokenizer), template)

    def _tagged(self, messages: list[Message], given: int, tools: Any, template: TemplateName) -> MaskedTokens:
        messages = safe_messages(messages, template, self.tokenizer, keep_assistant=True)
        options = {"tools": safe_tools(tools, template, self.tokenizer), **(self.arguments or {})}
        ids, trained = tagged_ids(messages, template, self.tokenizer, KEY, **options)
        trained[1:] |= trained[:-1] & (ids[1:] == self.tokenizer.eos_token_id)
        if given:
            prompt = self._text(messages[:given], tools, template, add_generation_prompt=True)
            trained &= self._differences([*tokenize([prompt], template, self.tokenizer), ids], template).trained
        return MaskedTokens(ids, trained)

    def _by_difference(
        self, messages: list[Message], turns: list[int], tools: Any, template: TemplateName
    ) -> MaskedTokens:
        if turns[0] == 0:
            raise ValueError("its first message is the assistant's, which answers nothing. Put a prompt before it.")
        texts = [
            self._text(messages[:end], tools, template, add_generation_prompt=end == turn)
            for turn in turns
            for end in (turn, turn + 1)
        ]
        return self._differences(tokenize(texts, template, self.tokenizer), template)

    def _differences(self, beginnings: list[np.ndarray], template: TemplateName) -> MaskedTokens:
        """The last of these; from the first on, every second difference between neighbours is trained.

        Raises:
            ValueError: one of them is not the beginning of the next.
        """
        whole = beginnings[-1]
        trained = np.zeros(len(whole), bool)
        for number, (shorter, longer) in enumerate(pairwise(beginnings)):
            if not np.array_equal(shorter, longer[: len(shorter)]):
                overlap = min(len(shorter), len(longer))
                different = np.flatnonzero(shorter[:overlap] != longer[:overlap])
                at = int(different[0]) if len(different) else overlap
                was, now = (self.tokenizer.decode(ids[at : at + TOKENS_SHOWN].tolist()) for ids in (shorter, longer))
                reason, remedy = JOINED if template in PLAIN else REWRITTEN
                raise ValueError(f"{KEY}={template}: {reason}: {was!r} becomes {now!r}. {remedy}")
            trained[len(shorter) : len(longer)] = number % 2 == 0
        return MaskedTokens(whole, trained)


def _messages(columns: dict[str, Any], column: str, role: str) -> list[Message]:
    return read_messages(columns.get(column), column, role)


@dataclass(frozen=True)
class Examples:
    """The examples of `data.train` or `data.eval`, in the order of the rows.

    Attributes:
        tokens: their sequences; the response mask is True at trained tokens.
        rows: number of examples.
        too_long: rows left out because a sequence has more than `data.max_tokens`.
        bad_rows: why the rows were left out that cannot be used (`data.on_bad_row=skip`).
    """

    tokens: PackedTokens
    rows: int
    too_long: int
    bad_rows: list[str]

    @property
    def fingerprint(self) -> str:
        """A digest of all tokens, of their mask and of where the sequences end."""
        digest = hashlib.blake2b(digest_size=8)
        for column in (self.tokens.token_ids, self.tokens.response_mask, self.tokens.cu_seqlens):
            digest.update(column.tobytes())
        return digest.hexdigest()


class TrainEval(NamedTuple):
    """The examples of a run; `held_out` None without `data.eval`."""

    train: Examples
    held_out: Examples | None


def read_examples(config: SupervisedDataConfig, encode: Encode) -> TrainEval:
    """`load_examples` of both."""
    return TrainEval(
        load_examples(config, "train", encode), load_examples(config, "eval", encode) if config.eval else None
    )


def load_examples(config: SupervisedDataConfig, which: Literal["train", "eval"], encode: Encode) -> Examples:
    """Read and tokenize all sources; ValueError if a source or a row is of no use to `encode`, or no row is left."""
    examples: list[Sequence[MaskedTokens]] = []
    too_long, bad_rows = 0, list[str]()
    for key, settings in config_sources(config, which).items():
        source = Source(key, settings, which, skip=config.on_bad_row == "skip")
        for row in source.stream():
            with source.leave_out(row):
                check_without_images(row.columns)
                sequences = encode(row.columns)
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
