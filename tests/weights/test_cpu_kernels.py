"""Rows of a CPU engine in a deterministic run are alike in every batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.weights.cpu_kernels import add_adapter_in_two_products, round_rows_alike

pytestmark = pytest.mark.slow


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in an engine of a deterministic run."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM was built for GPUs")
    current_platform.import_kernels()
    monkeypatch.setattr(ops, "onednn_mm", ops.onednn_mm)  # put back afterwards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.private
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (384, 128), (262, 896)])
def test_a_row_of_a_product_is_the_same_in_every_batch(
    dtype: torch.dtype, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops as ops

    monkeypatch.setenv("RLHF_EQUAL_ROWS", "1")
    round_rows_alike()
    round_rows_alike()  # the plugin runs more than once in some processes
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    try:
        product = functools.partial(ops.onednn_mm, ops.create_onednn_mm(weight.t(), 32), bias=bias)
    except RuntimeError as error:  # oneDNN has none of this type for this processor: vLLM then takes torch's
        if "could not create a primitive descriptor" not in str(error):
            raise
        product = functools.partial(torch.nn.functional.linear, weight=weight, bias=bias)
    x = torch.randn(300, inputs).to(dtype)
    every_row = product(x)
    for rows in (1, 2, 3, 5, 17, 63, 64, 129):
        assert torch.equal(product(x[:rows]), every_row[:rows]), rows
        assert torch.equal(product(x[-rows:]), every_row[-rows:]), rows
    assert torch.equal(product(x[0]), every_row[0])


@pytest.mark.usefixtures("one_thread")
def test_other_engines_keep_vllms_product() -> None:
    from vllm import _custom_ops as ops

    product = ops.onednn_mm
    round_rows_alike()
    assert ops.onednn_mm is product


@pytest.mark.private
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_changes_the_rows_of_its_requests_alone_and_each_equally_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setenv("RLHF_EQUAL_ROWS", "1")
    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_linear", PunicaWrapperCPU.add_lora_linear)
    add_adapter_in_two_products()
    x, a, b = (torch.randn(shape).to(dtype) / 4 for shape in ((300, 128), (16, 128), (96, 16)))
    adapted = torch.arange(300) % 3 - 1  # -1 is no adapter; 0 the one of the slot
    adapted[adapted > 0] = 0
    slots_a, slots_b = (x.new_zeros(1, 1, 16, 128), a[None, None]), (x.new_zeros(1, 1, 32, 16), b[None, None])

    def added(rows: slice) -> Tensor:
        y = torch.ones(300, 128, dtype=dtype)[rows]
        wrapper: Any = SimpleNamespace(token_lora_indices=adapted[rows])
        PunicaWrapperCPU.add_lora_linear(wrapper, y, x[rows], slots_a, slots_b, 2.0, (32, 96))
        return y

    whole, product = added(slice(None)), 2.0 * (x @ a.T).float() @ b.T.float()
    expected = torch.ones(300, 128)
    expected[:, 32:] += product * (adapted >= 0)[:, None]
    torch.testing.assert_close(whole.float(), expected, rtol=1e-2, atol=0.1 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(whole[adapted < 0], torch.ones_like(whole[adapted < 0]))
    for count in (1, 2, 3, 5, 63, 64, 129):
        assert torch.equal(added(slice(count)), whole[:count])
        assert torch.equal(added(slice(-count, None)), whole[-count:])
