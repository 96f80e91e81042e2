"""The account of a transfer: what counts as loaded, on one worker and on several that share a model."""

from __future__ import annotations

import pytest

from rlhf.weights.client import Loaded, check_account
from rlhf.weights.transfer import ParameterMeta

ANNOUNCED = [ParameterMeta("q", "bfloat16", (4, 8)), ParameterMeta("norm", "float32", (8,))]


def test_one_worker_loads_all_and_two_of_tensor_parallelism_their_parts_of_a_matrix_and_all_of_a_norm() -> None:
    check_account("engine 0", ANNOUNCED, [{"q": [64, 32], "norm": [32, 8]}])
    check_account("engine 0", ANNOUNCED, [{"q": [64, 16], "norm": [32, 8]}] * 2)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([{"q": [64, 32]}], "of norm 0 of 32 bytes arrived at worker 0"),
        ([{"q": [64, 16], "norm": [32, 8]}, {"q": [64, 16]}], "of norm 0 of 32 bytes arrived at worker 1"),
        ([{"q": [32, 16], "norm": [32, 8]}], "of q 32 of 64 bytes arrived at worker 0"),
        ([{"q": [64, 31], "norm": [32, 8]}], "q arrived, and vLLM loaded 31 of its 32 elements"),
        ([{"q": [64, 16], "norm": [32, 8]}, {"q": [64, 0], "norm": [32, 8]}], "vLLM loaded 16 of its 32 elements"),
        ([{"q": [64, 32], "norm": [32, 8], "k": [8, 4]}], "k was loaded, which the learner has not announced"),
        ([{}], r"of q 0 of 64 bytes arrived at worker 0\. 1 other tensors are incomplete too\."),
    ],
)
def test_an_incomplete_tensor_is_named_with_its_engine(workers: list[Loaded], message: str) -> None:
    with pytest.raises(ValueError, match=rf"weight transfer to engine 3: .*{message}"):
        check_account("engine 3", ANNOUNCED, workers)


def test_later_transfers_have_to_bring_every_worker_what_the_first_one_brought_it() -> None:
    first: list[Loaded] = [{"q": [64, 16], "norm": [32, 8]}] * 2
    check_account("engine 0", ANNOUNCED, first, proved=first)
    one_kept_its_norm: list[Loaded] = [first[0], {"q": [64, 16], "norm": [32, 0]}]
    with pytest.raises(ValueError, match=r"norm arrived, and vLLM loaded 8 of its 16 elements"):
        check_account("engine 0", ANNOUNCED, one_kept_its_norm, proved=first)
    constant: list[Loaded] = [{"q": [64, 32], "norm": [32, 0]}]  # vLLM sets it itself
    check_account("engine 0", ANNOUNCED, constant)
    check_account("engine 0", ANNOUNCED, constant, proved=constant)
