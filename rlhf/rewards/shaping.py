"""Rewards and penalties for the length and the repetition of a response; its answer does not matter."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config.reward import LengthOptions, RepetitionOptions


def overlong_penalty(response_length: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Soft punishment of overlong responses (DAPO, arXiv:2503.14476, eq. 13).

    Args:
        response_length: sampled tokens, |y|.
        max_tokens: L_max, the longest response that is allowed.
        buffer_tokens: L_cache; the penalty begins at L_max - L_cache.

    Returns:
        0 up to L_max - L_cache, falling linearly to -1 at L_max, -1 beyond.
    """
    free = max_tokens - buffer_tokens
    if response_length <= free:
        return 0.0
    if response_length > max_tokens:
        return -1.0
    return (free - response_length) / buffer_tokens


def short_penalty(response_length: int, *, min_tokens: int, buffer_tokens: int) -> float:
    """The mirror image of the overlong penalty: 0 from min_tokens up, linear to -1 at min_tokens - buffer_tokens."""
    if response_length >= min_tokens:
        return 0.0
    missing = min_tokens - response_length
    return -1.0 if missing >= buffer_tokens else -missing / buffer_tokens


def repeated_fraction(words: Sequence[str], *, ngram: int) -> float:
    """Fraction of the n-grams that repeat an earlier one; 0 for a text shorter than an n-gram."""
    count = len(words) - ngram + 1
    if count <= 0:
        return 0.0
    return 1 - len({tuple(words[start : start + ngram]) for start in range(count)}) / count


def length_reward(response_length: int, options: LengthOptions) -> float:
    """0 within the bounds, falling to -1 outside."""
    short = short_penalty(response_length, min_tokens=options.min_tokens, buffer_tokens=options.buffer_tokens)
    if options.max_tokens is None:
        return short
    long = overlong_penalty(response_length, max_tokens=options.max_tokens, buffer_tokens=options.buffer_tokens)
    return min(short, long)


def repetition_reward(text: str, options: RepetitionOptions) -> float:
    """0 up to the free fraction of repeated n-grams, then linear to -1 where every n-gram is a repetition."""
    repeated = repeated_fraction(text.split(), ngram=options.ngram)
    return min(0.0, -(repeated - options.free_fraction) / (1 - options.free_fraction))
