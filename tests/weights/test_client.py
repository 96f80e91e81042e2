"""The account of a transfer: what counts as loaded, on one worker and on several that share a model."""

from __future__ import annotations

import pytest

from rlhf.weights.client import Loaded, check_account
from rlhf.weights.parameters import ParameterMeta

ANNOUNCED = [ParameterMeta("q", "bfloat16", (4, 8)), ParameterMeta("norm", "float32", (8,))]


def test_one_worker_loads_all_and_two_of_tensor_parallelism_their_parts_of_a_matrix_and_all_of_a_norm() -> None:
    check_account("engine 0", ANNOUNCED, [{"q": [64, 32], "norm": [32, 8]}])
    check_account("engine 0", ANNOUNCED, [{"q": [64, 16], "norm": [32, 8]}] * 2)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([{"q": [64, 32]}], r"norm: 0 of 32 bytes.*\bworker 0\b"),
        ([{"q": [64, 16], "norm": [32, 8]}, {"q": [64, 16]}], r"norm: 0 of 32 bytes.*\bworker 1\b"),
        ([{"q": [32, 16], "norm": [32, 8]}], r"q: 32 of 64 bytes.*\bworker 0\b"),
        ([{"q": [64, 31], "norm": [32, 8]}], "q: .* 31 of 32 elements"),
        ([{"q": [64, 16], "norm": [32, 8]}, {"q": [64, 0], "norm": [32, 8]}], "q: .* 16 of 32 elements"),
        ([{"q": [64, 32], "norm": [32, 8], "k": [8, 4]}], "k: vLLM loaded it"),
        ([{}], r"q: 0 of 64 bytes.*\bworker 0\b.* 1 other tensors"),
    ],
)
def test_an_incomplete_tensor_is_named_with_its_engine(workers: list[Loaded], message: str) -> None:
    with pytest.raises(ValueError, match=rf"engine 3: .*\b{message}"):
        check_account("engine 3", ANNOUNCED, workers)


def test_later_transfers_have_to_bring_every_worker_what_the_first_one_brought_it() -> None:
    first: list[Loaded] = [{"q": [64, 16], "norm": [32, 8]}] * 2
    check_account("engine 0", ANNOUNCED, first, proved=first)
    one_kept_its_norm: list[Loaded] = [first[0], {"q": [64, 16], "norm": [32, 0]}]
    with pytest.raises(ValueError, match=r"norm: .* 8 of 16 elements"):
        check_account("engine 0", ANNOUNCED, one_kept_its_norm, proved=first)
    constant: list[Loaded] = [{"q": [64, 32], "norm": [32, 0]}]  # vLLM sets it itself
    check_account("engine 0", ANNOUNCED, constant)
    check_account("engine 0", ANNOUNCED, constant, proved=constant)
