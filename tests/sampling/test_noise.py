"""Where the noise of a deterministic run comes from: the seed of a request."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlhf.sampling.requests import request_seed
from rlhf.types import Prompt

PROMPT = Prompt("train/7", 2, np.arange(5, dtype=np.int32), (), "", "train")


def test_a_seed_follows_from_the_runs_seed_the_epoch_and_the_prompt_and_is_the_same_in_every_process() -> None:
    assert request_seed(3, PROMPT) == 14851346982448339
    others = [
        request_seed(4, PROMPT),
        request_seed(3, dataclasses.replace(PROMPT, epoch=3)),
        request_seed(3, dataclasses.replace(PROMPT, id="train/8")),
        request_seed(3, dataclasses.replace(PROMPT, id="test/7")),
    ]
    assert len({request_seed(3, PROMPT), *others}) == 5
    same = dataclasses.replace(PROMPT, token_ids=PROMPT.token_ids[:2], columns={"x": 1})
    assert request_seed(3, same) == request_seed(3, PROMPT)


def test_the_seeds_of_all_samples_of_a_run_differ_and_fit_what_vllm_takes() -> None:
    rows = [dataclasses.replace(PROMPT, id=f"train/{row}") for row in range(20_480)]
    first = np.array([request_seed(0, prompt) for prompt in rows])
    seeds = (first[:, None] + np.arange(16)).ravel()
    assert len(np.unique(seeds)) == len(seeds)
    # torch seeds its generators on CPU with the lower half: two samples of a step must not share it
    assert all(len(np.unique(step & 0xFFFFFFFF)) == len(step) for step in seeds.reshape(-1, 1024))
    assert 0 <= seeds.min() < seeds.max() < 2**63


def test_without_a_noise_seed_a_request_has_none() -> None:
    assert request_seed(None, PROMPT) is None
