"""Rows of supervised data -> examples of one or two sequences, tokenized once; nothing is left out uncounted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from rlhf.algo.packing import pack
from rlhf.config.supervised import SupervisedDataConfig
from rlhf.data.read import Source, config_sources
from rlhf.types import PackedTokens


class MaskedTokens(NamedTuple):
    """A sequence: `token_ids` [L] int32, and `trained` [L] bool, True at the tokens that a loss on tokens is on."""

    token_ids: np.ndarray
    trained: np.ndarray


Encode = Callable[[dict[str, Any]], Sequence[MaskedTokens]]  # columns of a row -> the sequences of its example


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
    """Read and tokenize all sources of `data.train` or `data.eval`.

    Args:
        encode: raises a ValueError with reason and remedy for a row that it cannot read.

    Raises:
        ValueError: a source or a row cannot be used, or no row is left.
    """
    examples: list[Sequence[MaskedTokens]] = []
    too_long, bad_rows = 0, list[str]()
    for key, settings in config_sources(config, which).items():
        source = Source(key, settings, which, skip=config.on_bad_row == "skip")
        for row in source.stream():
            with source.leave_out(row):
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
