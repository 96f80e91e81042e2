"""KL(policy || teacher) over the whole vocabulary at each response token, and its gradient.

A single sampled token carries little information about the teacher. This compares the whole distributions, so the
gradient has no noise from the choice of the token. As in `logprobs`, logits exist in tiles only, and the backward pass
computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.algo.logprobs import Head, response_states
from rlhf.algo.numerics import add_rows, has_kernels
from rlhf.algo.sizes import HEAD_TILE


class HeadInput(NamedTuple):
    """The inputs from which a model computes the logits of N response tokens.

    states [N, H'], weight [V', H'], bias [V'] or None. With y = states weight^T + bias, the logits are scale y, or
    limit tanh(scale y / limit).
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    limit: float | None


def teacher_kl(
    hidden: Tensor,
    head: HeadInput,
    teacher: HeadInput,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    expand: Tensor | None = None,
    tiles: tuple[int, int] | None = None,
) -> Tensor:
    """[T] sum_j p_j (log p_j - log q_j) of each response token, p of the policy and q of the teacher; 0 elsewhere.

    Differentiable in the policy's hidden states, weight and bias. Where one of the two vocabularies is longer (rows
    that only pad it), both are normalized over the ids that both have.

    Args:
        hidden: [T, H], or [U, H] with `expand`, as in `token_logprobs`. head: of the policy; its states are not read.
    """
    positions, rows = response_states(response_mask, cu_seqlens)
    if expand is not None:
        rows = expand[rows]
    tiles = tiles or HEAD_TILE["cuda" if has_kernels(head.weight) else "cpu"]
    kl = _TeacherKL.apply(
        hidden, head.weight, head.bias, rows, (head.scale, head.limit), teacher, tiles, expand is not None
    )
    return kl.new_zeros(len(response_mask)).index_copy(0, positions, kl)


class _TeacherKL(torch.autograd.Function):
    """(hidden [U, H], weight [V, H], bias [V]) -> KL [N] of N chosen rows, which may be `repeated`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor,
        transform: tuple[float, float | None], teacher: HeadInput, tiles: tuple[int, int], repeated: bool,
    ) -> Tensor:  # fmt: skip
        ctx.form, ctx.teacher, ctx.repeated = (transform, tiles), teacher, repeated
        own, other = _heads(hidden[rows], weight, bias, transform, teacher, tiles)
        lses, lses_of_teacher, gaps = own.logits.new_empty(3, len(own.vocab_tiles), len(rows))
        for part, vocab in enumerate(own.vocab_tiles):
            for span in own.row_tiles:
                z, t = own.tile(span, vocab), other.tile(span, vocab)
                lses[part, span], lses_of_teacher[part, span] = z.logsumexp(-1), t.logsumexp(-1)
                gaps[part, span] = (z.softmax(-1) * (z - t)).sum(-1)
        lse, lse_of_teacher = lses.logsumexp(0), lses_of_teacher.logsumexp(0)
        # Differences first, so that the shares of the tiles, which carry the rounding of `lse`, multiply small numbers.
        kl = ((lses - lse).exp() * (gaps - (lse - lse_of_teacher))).sum(0)
        ctx.save_for_backward(hidden, weight, bias, rows, lse, lse_of_teacher, kl)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        """With p = softmax(z), the gradient of logit z_j is p_j (log p_j - log q_j - KL)."""
        hidden, weight, bias, rows, lse, lse_of_teacher, kl = ctx.saved_tensors
        (scale, limit), tiles = ctx.form
        own, other = _heads(hidden[rows], weight, bias, (scale, limit), ctx.teacher, tiles)
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_states = own.logits.new_zeros(own.states.shape)
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = own.logits.new_zeros(len(weight)) if wants_bias else None
        pull = (grad_kl * scale)[:, None]
        for vocab in own.vocab_tiles:
            part = own.logits.new_zeros(own.weight[vocab].shape) if wants_weight else None
            for span in own.row_tiles:
                z, t = own.tile(span, vocab), other.tile(span, vocab)
                log_p = z - lse[span, None]
                grad = log_p.exp() * (log_p - (t - lse_of_teacher[span, None]) - kl[span, None]) * pull[span]
                if limit is not None:
                    grad *= 1 - (z / limit).square()
                if grad_bias is not None:
                    grad_bias[vocab] += grad.sum(0)
                rounded = grad.to(weight.dtype)
                if part is not None:
                    part += own.multiply(rounded.t(), own.states[span])
                grad_states[span] += own.multiply(rounded, own.weight[vocab])
            if grad_weight is not None and part is not None:
                grad_weight[vocab] = part
        grad_hidden = None
        if wants_states and ctx.repeated:
            grad_hidden = add_rows(grad_states, rows, len(hidden)).to(hidden.dtype)
        elif wants_states:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_states.to(hidden.dtype))
        return grad_hidden, grad_weight, None if grad_bias is None else grad_bias.to(weight.dtype), *[None] * 5


def _heads(
    states: Tensor, weight: Tensor, bias: Tensor | None, transform: tuple[float, float | None], teacher: HeadInput,
    tiles: tuple[int, int],
) -> tuple[Head, Head]:  # fmt: skip
    """The heads of policy and teacher, cut to the token ids that both have."""
    size = min(len(weight), len(teacher.weight))

    def head(states: Tensor, weight: Tensor, bias: Tensor | None, scale: float, limit: float | None) -> Head:
        shared = None if bias is None else bias[:size]
        return Head(states.to(weight.dtype), weight[:size], shared, None, scale, limit, tiles, kernels=False)

    return head(states, weight, bias, *transform), head(*teacher)
