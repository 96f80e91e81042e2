"""Kernels for GPUs, in Triton: RMSNorm, rotary positions, the gated product of an MLP, and the softmax of the head.

Each reads and writes memory once, where torch makes several passes. They round at the same points as the transformers
code that they replace, so that a learner in bfloat16 stays as close to its engine. Sums are in float32 and in a fixed
order: the same inputs give the same bits.

Imported only where `numerics.has_kernels` is True, because a CPU build of torch brings no Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 512  # they share the rows of a norm's backward pass; each has its own sum of the weight's gradient
ELEMENTS = 2048  # per program, where elements are independent
COLUMNS = 4096  # columns of a tile of logits that one program holds at a time


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel. Each tensor argument is read or written once; benchmarks count bytes by this rule."""
    kernel[programs](*arguments, **constants)


# --- RMSNorm: y = weight round(x / sqrt(mean(x^2) + eps)) ---


@triton.jit
def _norm_forward(x, weight, y, scales, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    tl.store(scales + row, scale, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = (values * scale[:, None]).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (normed * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(x, weight, scales, grad, grad_x, grad_weights, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(g * normed.to(grad.dtype.element_ty).to(tl.float32), 0)
        g = g * w[None, :]
        along = tl.sum(g * normed, 1)[:, None] / width
        tl.store(grad_x + at, ((g - normed * along) * scale).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weights + tl.program_id(0) * width + column, total, mask=column < width)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        y, scales = torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)
        width = triton.next_power_of_2(rows.shape[1])
        ctx.sizes = {"ROWS": max(1, ELEMENTS // width), "WIDTH": width, "num_warps": 4 if width <= ELEMENTS else 16}
        programs = (triton.cdiv(len(rows), ctx.sizes["ROWS"]),)
        launch(_norm_forward, programs, rows, weight, y, scales, *rows.shape, eps, **ctx.sizes)
        ctx.save_for_backward(rows, weight, scales)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = ctx.saved_tensors
        programs = min(PROGRAMS, triton.cdiv(len(rows), ctx.sizes["ROWS"]))
        grad_x, grad_weights = torch.empty_like(rows), scales.new_empty(programs, rows.shape[1])
        launch(
            _norm_backward, (programs,), rows, weight, scales, grad.contiguous(), grad_x, grad_weights, *rows.shape,
            **ctx.sizes,
        )  # fmt: skip
        return grad_x.view(grad.shape), grad_weights.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] over the root of its mean square, rounded, times weight [H]; both of the same type."""
    return _Norm.apply(x, weight, eps)


# --- rotary positions: (a, b) -> (a cos - b sin, b cos + a sin), with a and b the halves of a head ---


@triton.jit
def _rotate(
    x, cos, sin, y, heads, half, token_stride, head_stride, token_stride_y, head_stride_y,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    real = x.dtype.element_ty
    a = tl.load(x + token * token_stride + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + token * token_stride + head * head_stride + half + column, mask=inside, other=0.0).to(tl.float32)
    cos += token * 2 * half + column
    sin += token * 2 * half + column
    cos_a = tl.load(cos, mask=column < half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + half, mask=column < half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin, mask=column < half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + half, mask=column < half, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed rotation
        sin_a, sin_b = -sin_b, -sin_a
    y += token * token_stride_y + head * head_stride_y + column
    y_a = (a * cos_a).to(real).to(tl.float32) - (b * sin_a).to(real).to(tl.float32)
    y_b = (b * cos_b).to(real).to(tl.float32) + (a * sin_b).to(real).to(tl.float32)
    tl.store(y, y_a.to(real), mask=inside)
    tl.store(y + half, y_b.to(real), mask=inside)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grad, *ctx.saved_tensors, backward=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(x)
    _, heads, tokens, width = x.shape
    strides = (x.stride(2), x.stride(1), y.stride(2), y.stride(1))
    sizes = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(width // 2)}
    launch(
        _rotate, (tokens,), x, cos.contiguous(), sin.contiguous(), y, heads, width // 2, *strides,
        BACKWARD=backward, **sizes,
    )  # fmt: skip
    return y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, heads, U, d] with each head turned by its token's angles; cos and sin [1, U, d], all of the same type."""
    return _Rotary.apply(x, cos, sin)


# --- the gated product of an MLP: silu(gate) up ---


@triton.jit
def _gated_forward(gate, up, y, size, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (activated * u).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _gated_backward(gate, up, grad, grad_gate, grad_up, size, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    g = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    gain = 1.0 / (1.0 + tl.exp(-g))
    tl.store(grad_up + at, (d * g * gain).to(grad_up.dtype.element_ty), mask=at < size)
    slope = gain * (1.0 + g * (1.0 - gain))
    tl.store(grad_gate + at, (d * u * slope).to(grad_gate.dtype.element_ty), mask=at < size)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        launch(_gated_forward, (triton.cdiv(y.numel(), ELEMENTS),), gate, up, y, y.numel(), ELEMENTS=ELEMENTS)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        launch(
            _gated_backward, (triton.cdiv(grad.numel(), ELEMENTS),), gate, up, grad.contiguous(), *grads,
            grad.numel(), ELEMENTS=ELEMENTS,
        )  # fmt: skip
        return grads


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate), rounded, times up; the same shape and type."""
    return _Gated.apply(gate, up)


# --- tiles of logits; y is a product of the head, z = y SLOPE or cap tanh(y SLOPE temperature / cap) / temperature ---


@triton.jit
def _transformed(y, SLOPE: tl.constexpr, LIMIT: tl.constexpr):
    z = y * SLOPE
    if LIMIT is not None:
        # tanh by way of exp of a number that is not positive
        fall = tl.exp(-2.0 * tl.abs(z / LIMIT))
        z = tl.where(z < 0, -LIMIT, LIMIT) * ((1.0 - fall) / (1.0 + fall))
    return z


@triton.jit
def _tile_forward(
    products, columns, lse, picked, expected, width, SLOPE: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    products += row * width
    highest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        z = _transformed(tl.load(products + column, mask=column < width, other=0.0), SLOPE, LIMIT)
        new = tl.maximum(highest, tl.max(tl.where(column < width, z, -float("inf")), 0))
        p = tl.where(column < width, tl.exp(z - new), 0.0)
        total = total * tl.exp(highest - new) + tl.sum(p, 0)
        weighted = weighted * tl.exp(highest - new) + tl.sum(p * z, 0)
        highest = new
    tl.store(lse + row, highest + tl.log(total))
    tl.store(expected + row, weighted / total)
    tl.store(picked + row, _transformed(tl.load(products + tl.load(columns + row)), SLOPE, LIMIT))


@triton.jit
def _tile_backward(
    products, columns, inside, lse, entropy, pull, push, grad, at_column, width,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = _transformed(tl.load(products + row * width + column, mask=column < width, other=0.0), SLOPE, LIMIT)
    shifted = z - tl.load(lse + row)
    chosen = tl.load(columns + row)
    force = tl.load(pull + row)
    g = force
    if ENTROPY:
        g += tl.load(push + row) * (shifted + tl.load(entropy + row))
    g = -g * tl.exp(shifted)
    g += tl.where((column == chosen) & (tl.load(inside + row) != 0), force, 0.0)
    if LIMIT is not None:
        g *= 1.0 - (z / LIMIT) * (z / LIMIT)
    tl.store(grad + row * width + column, g.to(grad.dtype.element_ty), mask=column < width)
    tl.store(at_column + row + 0 * column, g, mask=column == chosen)


def tile_softmax(
    products: Tensor, columns: Tensor, lse: Tensor, picked: Tensor, expected: Tensor, slope: float, limit: float | None
) -> None:
    """For each row of a tile of logits z: log-sum-exp, the logit at one column, and the mean of z under the softmax.

    All three are always computed: without the mean the compiler could round the other two differently, and a pass
    without entropies must give the same bits as a pass with them.

    Args:
        products: [n, width] float32, contiguous; z = slope products, or limit tanh(slope products / limit).
        columns: [n] int64. lse, picked, expected: [n] float32, written.
    """
    width = products.shape[1]
    launch(
        _tile_forward, (len(products),), products, columns, lse, picked, expected, width,
        SLOPE=slope, LIMIT=limit, COLUMNS=min(COLUMNS, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip


def tile_gradient(
    products: Tensor, columns: Tensor, inside: Tensor, lse: Tensor, entropy: Tensor | None, pull: Tensor,
    push: Tensor | None, grad: Tensor, slope: float, limit: float | None,
) -> Tensor:  # fmt: skip
    """-> [n] float32, the gradient at each row's column; writes the gradient of the whole tile [n, width] to `grad`.

    With p = exp(z - lse): pull (1[j is the column, inside] - p_j) - push p_j (z_j - lse + entropy), times the slope of
    the limit. The factor `slope` is in pull and push already.

    Args:
        products, columns, slope, limit: as in `tile_softmax`. inside: [n] bool, the column is the sampled token's.
        lse, entropy, pull, push: [n] float32; no entropy term where `push` is None.
    """
    at_column = torch.empty_like(lse)
    width = products.shape[1]
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(
        _tile_backward, (len(products), triton.cdiv(width, block)), products, columns, inside, lse, entropy, pull,
        push, grad, at_column, width, SLOPE=slope, LIMIT=limit, ENTROPY=push is not None, COLUMNS=block, num_warps=8,
    )  # fmt: skip
    return at_column
