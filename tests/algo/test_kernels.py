"""The kernels against the lines of torch that they replace: on a GPU itself, elsewhere in Triton's interpreter.

The reference is float64. In half precision the kernels round where the lines of torch do. The type of half precision is
float16 here: the interpreter cuts bfloat16 off where a GPU rounds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algo import numerics
from rlhf.algo.logprobs import TokenLogprobs, TokenSupport, token_logprobs

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("rlhf.algo.kernels", reason="Triton is not installed", exc_type=ImportError)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Piece = Callable[..., Tensor]


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "KERNEL_DEVICES", {DEVICE.type})


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = numerics.full_precision(x)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)


def by_head(x: Tensor) -> Tensor:
    """[1, U, heads, d] as projections leave it -> [1, heads, U, d] as attention takes it."""
    return x.transpose(1, 2)


# Odd sizes, and the two forms of a norm: of states, and of the heads of queries and keys.
PIECES: dict[str, tuple[Piece, Piece, list[tuple[int, ...]]]] = {
    "norm": (lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_norm, [(1, 9, 200), (200,)]),
    "norm of heads": (lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_norm, [(1, 13, 3, 64), (64,)]),
    "rotary": (
        lambda x, c, s: kernels.rotary(by_head(x), c, s),
        lambda x, c, s: plain_rotary(by_head(x), c, s),
        [(1, 7, 3, 24), (1, 7, 24), (1, 7, 24)],
    ),
    "gated": (kernels.gated_silu, lambda g, u: torch.nn.functional.silu(g) * u, [(1, 11, 300), (1, 11, 300)]),
}


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def outputs(piece: Piece, inputs: list[Tensor], trained: int) -> list[Tensor]:
    """Output and gradients of the first `trained` inputs, for an incoming gradient that is drawn."""
    inputs = [x.clone().requires_grad_(i < trained) for i, x in enumerate(inputs)]
    out = piece(*inputs)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, dtype=torch.float64, device=out.device).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs[:trained], grad)]


@pytest.mark.parametrize("name", PIECES)
def test_a_fused_piece_and_its_gradients_are_the_plain_ones(name: str) -> None:
    fused, plain, shapes = PIECES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes]
    trained = 1 if name == "rotary" else 2
    expected = outputs(plain, [x.double() for x in inputs], trained)
    for value, exact in zip(outputs(fused, inputs, trained), expected, strict=True):
        assert relative_error(value, exact) < 1e-6
    half = [x.half() for x in inputs]
    in_half, plain_half = outputs(fused, half, trained), outputs(plain, half, trained)
    assert (in_half[0] != plain_half[0]).float().mean() < 1e-3  # an exponential may differ in its last bit
    exact_half = outputs(plain, [x.double() for x in half], trained)
    for value, peer, exact in zip(in_half, plain_half, exact_half, strict=True):
        assert relative_error(value, exact) < 1.1 * relative_error(peer, exact)


@pytest.fixture
def products_in_float32() -> Iterator[None]:
    """The operator for products of half precision in float32, which torch has on GPUs alone."""
    if DEVICE.type == "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
    library.impl("mm.dtype_out", lambda a, b, dtype, *, out: torch.mm(a.to(dtype), b.to(dtype), out=out), "CPU")
    yield
    library._destroy()


def head(dtype: torch.dtype, options: dict[str, Any], *, bias: bool, restricted: bool = False) -> list[Tensor]:
    """Log-probs, entropies and gradients of two sequences, over several tiles; the same numbers for each type."""
    torch.manual_seed(0)
    drawn = [torch.randn(14, 16), torch.randn(150, 16) / 4, torch.randn(150)]
    inputs = [x.half().to(DEVICE, dtype).requires_grad_() for x in drawn]
    ids = torch.randint(0, 150, (14,), device=DEVICE)
    mask = (torch.arange(14, device=DEVICE) % 7) > 1
    bounds = torch.tensor([0, 7, 14], device=DEVICE)
    if restricted:  # every other token has a support, of four tokens
        kept = (ids[::2, None] + torch.tensor([0, 3, 40, 90], device=DEVICE)) % 150
        offsets = 4 * torch.arange(15, device=DEVICE).add(1).div(2, rounding_mode="floor")
        options = options | {"support": TokenSupport(kept.flatten().int(), offsets)}
    out: TokenLogprobs = token_logprobs(
        inputs[0], inputs[1], ids, mask, bounds, head_bias=inputs[2] if bias else None, tiles=(6, 64),
        **options,
    )  # fmt: skip
    loss = (out.logprobs * torch.linspace(-1, 1, 14, device=DEVICE)).sum()
    if out.entropy is not None:
        loss = loss + out.entropy.square().sum()
    grads = torch.autograd.grad(loss, inputs[: 3 if bias else 2])
    return [x.detach() for x in (out.logprobs, out.entropy, *grads) if x is not None]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.usefixtures("on_kernels", "products_in_float32")
def test_the_head_by_kernels_is_the_one_of_float64(with_entropy: bool, cap: float | None, restricted: bool) -> None:
    options = {"with_entropy": with_entropy, "logit_cap": cap, "logit_scale": 1.3, "temperature": 0.8}
    sizes = {"bias": with_entropy, "restricted": restricted}
    expected = head(torch.float64, options, **sizes)
    for value, exact in zip(head(torch.float32, options, **sizes), expected, strict=True):
        assert relative_error(value, exact) < 1e-6
    in_half = head(torch.float16, options, **sizes)
    for value, exact in zip(in_half[: 1 + with_entropy], expected, strict=False):
        assert relative_error(value, exact) < 1e-6  # products are not rounded to half precision
    for value, exact in zip(in_half[1 + with_entropy :], expected[1 + with_entropy :], strict=True):
        assert relative_error(value, exact) < 2e-3


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus_without_spilling_registers() -> None:
    """The interpreter takes what the compiler refuses; Triton brings the assembler, so that this needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent.parent / "fixtures" / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: stack for name, stack in (line.split() for line in done.stdout.splitlines())}
    assert set(found) == {name for name in vars(kernels) if hasattr(vars(kernels)[name], "arg_names")} - {
        "_transformed"
    }
    assert set(found.values()) == {"0"}
