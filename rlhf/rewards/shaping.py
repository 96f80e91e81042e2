"""Rewards and penalties for the length and the repetition of a response; its answer does not matter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf.config.reward import LengthOptions, RepetitionOptions

# Scripts that are written without spaces: Thai to Tibetan, Burmese, Khmer, kana, Chinese
NO_SPACES = r"\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{NO_SPACES}]|[^\s{NO_SPACES}]+|\s{{101,}}")  # of these scripts a character
LONG_WORD = 100  # characters; a longer word, or blank, that mostly repeats itself is counted by its characters


def length_reward(response_length: int, options: LengthOptions) -> float:
    """0 within the bounds; -1 where they are passed by the buffer or more, linear in between.

    The soft punishment of overlong responses (DAPO, arXiv:2503.14476, eq. 13) with L_max = max_tokens and L_cache =
    buffer_tokens: it begins at L_max - L_cache. Below min_tokens its mirror image holds. Sampled tokens are counted.
    """
    short, long = options.min_tokens - response_length, 0
    if options.max_tokens is not None:
        long = response_length - (options.max_tokens - options.buffer_tokens)
    return 0.0 - min(1.0, max(0, short, long) / max(1, options.buffer_tokens))


def repetition_reward(text: str, options: RepetitionOptions) -> float:
    """0 up to the free fraction of repeated word n-grams, then linear to -1 where every n-gram is a repetition."""
    repeated = _repeated(tuple(_words(text, options.ngram)), options.ngram)
    return min(0.0, -(repeated - options.free_fraction) / (1 - options.free_fraction))


def _repeated(items: str | tuple[str, ...], ngram: int) -> float:
    """The share of n-grams that occurred before."""
    count = len(items) - ngram + 1
    return 1 - len({items[start : start + ngram] for start in range(count)}) / count if count > 0 else 0.0


def _words(text: str, ngram: int) -> Iterator[str]:
    for word in WORD.findall(text):
        yield from word if len(word) > LONG_WORD and _repeated(word, ngram) > 0.5 else (word,)
