"""Rewards and penalties for the length and the repetition of a response; its answer does not matter."""

from __future__ import annotations

from rlhf.config.reward import LengthOptions, RepetitionOptions


def length_reward(response_length: int, options: LengthOptions) -> float:
    """0 within the bounds; -1 where they are passed by the buffer or more, linear in between.

    The soft punishment of overlong responses (DAPO, arXiv:2503.14476, eq. 13) with L_max = max_tokens and L_cache =
    buffer_tokens: it begins at L_max - L_cache. Below min_tokens its mirror image holds.

    Args:
        response_length: sampled tokens, |y|.
    """
    short, long = options.min_tokens - response_length, 0
    if options.max_tokens is not None:
        long = response_length - (options.max_tokens - options.buffer_tokens)
    return 0.0 - min(1.0, max(0, short, long) / max(1, options.buffer_tokens))


def repetition_reward(text: str, options: RepetitionOptions) -> float:
    """0 up to the free fraction of repeated word n-grams, then linear to -1 where every n-gram is a repetition."""
    words, ngram = text.split(), options.ngram
    count = len(words) - ngram + 1
    if count <= 0:
        return 0.0
    repeated = 1 - len({tuple(words[start : start + ngram]) for start in range(count)}) / count
    return min(0.0, -(repeated - options.free_fraction) / (1 - options.free_fraction))
