"""Log-probabilities and entropies of sampled tokens straight from hidden states, without a T x V matrix of logits.

The head, the log-softmax and the choice of the sampled token are one operation, computed in tiles of tokens and
vocabulary; the backward pass computes each tile of logits again. The factors of a product have the type of the head's
weight (for tensor cores or AMX). The product is float32 on GPUs and has the weight's type on CPU; everything after it
is float32, the sums of both gradients over tiles too. float64 stays float64.

A token that was sampled from a part of the vocabulary, its support, is normalized over that part: in each tile the
logits of all other tokens become MASKED before the softmax. That takes one tile of booleans.

Only response tokens are computed. Positions shift in `response_states` and nowhere else: the state at t - 1 predicts
token t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.algo.numerics import add_rows, full_precision, has_kernels
from rlhf.algo.sizes import HEAD_TILE

# Logit of a token outside of the support: exp of it is 0, and 0 times it is 0, not NaN as for infinity. It stays finite
# in float32 when it is divided by a small temperature and summed over a tile.
MASKED = -1e30


class TokenSupport(NamedTuple):
    """As `rlhf.types.Support`, on the device: ids [K] int32, offsets [T+1] int64."""

    ids: Tensor
    offsets: Tensor

    def take(self, index: Tensor) -> TokenSupport:
        """Those of these tokens [T'], in their order."""
        sizes = self.offsets.diff()[index]
        ends = sizes.cumsum(0)
        starts = (self.offsets[index] - ends + sizes).repeat_interleave(sizes)
        offsets = torch.cat([ends.new_zeros(1), ends])
        return TokenSupport(self.ids[starts + torch.arange(len(starts), device=starts.device)], offsets)


class TokenLogprobs(NamedTuple):
    """`logprobs` and `entropy` [T] float32, both 0 outside of the response mask; `entropy` None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    expand: Tensor | None = None,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_cap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    support: TokenSupport | None = None,
    tiles: tuple[int, int] | None = None,
) -> TokenLogprobs:
    """Log-probability of each response token given the tokens before it in its segment, and the entropy there.

    With y = scale (hidden[t-1] W^T + b), the logits are z = y / temperature, or cap tanh(y / cap) / temperature. Then
    logprobs[t] = z[token t] - logsumexp(z), and entropy[t] = logsumexp(z) - sum softmax(z) z, in nats, with sums over
    the support of token t, which contains it. Both are differentiable in hidden states, weight and bias; without
    gradients nothing is kept. The same inputs give the same bits, with and without gradients.

    Args:
        hidden: [T, H] of the packed row, as the transformer's last norm leaves them; [U, H] with `expand`.
        head_weight: [V, H], the embedding itself where the two are tied; it must be the parameter itself, not a copy.
        token_ids: [T] int.
        response_mask: [T] bool. Elsewhere the results are 0; states and tokens there do not matter.
        cu_seqlens: [S+1].
        expand: [T] int64, index of each token's state among the U states, if sequences share their beginnings.
        head_bias: [V].
        logit_scale, logit_cap: of the model, None without a cap. temperature: of the sampling, after the cap.
        support: of all T tokens; None: the whole vocabulary.
        tiles: tokens and vocabulary of a tile, for memory and speed; results differ only by rounding. None: HEAD_TILE.
    """
    positions, states = response_states(response_mask, cu_seqlens)
    if expand is not None:
        states = expand[states]
    tiles = tiles or HEAD_TILE["cuda" if has_kernels(head_weight) else "cpu"]
    logprobs, entropy = _FusedHead.apply(
        hidden, head_weight, head_bias, states, token_ids[positions].long(),
        logit_scale / temperature, None if logit_cap is None else logit_cap / temperature, with_entropy, tiles,
        expand is not None, None if support is None else support.take(positions),
    )  # fmt: skip
    empty = logprobs.new_zeros(len(token_ids))
    return TokenLogprobs(
        empty.index_copy(0, positions, logprobs), empty.index_copy(0, positions, entropy) if with_entropy else None
    )


def response_states(response_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the response tokens, and of the states in which they were chosen: both [N] int64.

    A policy takes the log-probability of token t from that state, a critic the value V_t.

    Args:
        response_mask: [T] bool with N True. cu_seqlens: [S+1]; a True mask at the first token of a segment is a
            programming error.
    """
    positions = response_mask.nonzero().squeeze(1)
    assert not response_mask[cu_seqlens[:-1].long()[cu_seqlens.diff() > 0]].any(), (
        "response_mask is True at the first token of a segment, which nothing predicts"
    )
    return positions, positions - 1


def _spans(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


class Head:
    """Tiles of logits in accumulation precision, made in two buffers that every tile of a pass shares.

    Logits are scale y, or limit tanh(scale y / limit), of a product y. With `kernels`, tiles are products that the
    kernels transform; otherwise they are transformed logits.

    With a support, of the rows of `states`, other logits are MASKED. The transform of the kernels would take those to
    -limit, so a limit is then computed without kernels.
    """

    def __init__(
        self, states: Tensor, weight: Tensor, bias: Tensor | None, support: TokenSupport | None, scale: float,
        limit: float | None, tiles: tuple[int, int], *, kernels: bool = True,
    ) -> None:  # fmt: skip
        self.states, self.weight, self.bias, self.scale, self.limit = states, weight, bias, scale, limit
        self.on_gpu, self.support = has_kernels(weight), support
        self.kernels = kernels and self.on_gpu and (support is None or limit is None)
        self.row_tiles, self.vocab_tiles = _spans(len(states), tiles[0]), _spans(len(weight), tiles[1])
        size = min(tiles[0], len(states)) * min(tiles[1], len(weight))
        self.product = weight.new_empty(size)
        self.logits = full_precision(self.product[:0]).new_empty(size)
        self.offsets = None if support is None else support.offsets.tolist()

    def tile(self, rows: slice, vocab: slice) -> Tensor:
        """[rows, vocab] of states W^T + b, overwritten by the next call."""
        shape = rows.stop - rows.start, vocab.stop - vocab.start
        logits = self.multiply(self.states[rows], self.weight[vocab].t(), out=_view(self.logits, shape))
        if self.bias is not None:
            logits.add_(self.bias[vocab])
        if not self.kernels:
            if self.limit is not None:
                logits.mul_(self.scale / self.limit).tanh_().mul_(self.limit)
            elif self.scale != 1:
                logits.mul_(self.scale)
        return logits if self.support is None else logits.masked_fill_(self.outside(self.support, rows, vocab), MASKED)

    def outside(self, support: TokenSupport, rows: slice, vocab: slice) -> Tensor:
        """[rows, vocab] bool, True for tokens outside of a row's support."""
        assert self.offsets is not None
        height, width = rows.stop - rows.start, vocab.stop - vocab.start
        ids = support.ids[self.offsets[rows.start] : self.offsets[rows.stop]].long()
        sizes = support.offsets[rows.start : rows.stop + 1].diff()
        row = torch.arange(height, device=ids.device).repeat_interleave(sizes, output_size=len(ids))
        places = torch.where((ids >= vocab.start) & (ids < vocab.stop), row * width + ids - vocab.start, height * width)
        outside = ids.new_ones(height * width + 1, dtype=torch.bool)  # the last place takes ids of other tiles
        outside = outside.index_fill_(0, places, False)[:-1].view(height, width)
        return outside.logical_and_((sizes > 0)[:, None])

    def multiply(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a b in accumulation precision; on CPU it is rounded to the weight's type first."""
        if self.product.dtype == self.logits.dtype:
            return torch.mm(a, b, out=out) if out is not None else a @ b
        if self.on_gpu:
            options: dict[str, Any] = {} if out is None else {"out": out}
            return torch.mm(a, b, out_dtype=self.logits.dtype, **options)
        if out is None:
            return a @ b
        return out.copy_(torch.mm(a, b, out=_view(self.product, (out.shape[0], out.shape[1]))))

    def softmax(self, tile: Tensor, column: Tensor, scratch: Tensor, with_entropy: bool) -> tuple[Tensor, ...]:
        """-> log-sum-exp of each row of the tile, the logit at `column` [n, 1], and the mean (if asked): [n]."""
        if self.kernels:
            from rlhf.algo import kernels

            lse, picked, expected = tile.new_empty(3, len(tile))
            kernels.tile_softmax(tile, column[:, 0], lse, picked, expected, self.scale, self.limit)
            return lse, picked, expected
        # log_softmax is one kernel where logsumexp is several; at the maximum the difference loses no digits.
        local = torch.log_softmax(tile, dim=-1, out=_view(scratch, (len(tile), tile.shape[1])))
        outputs = tile.amax(-1) - local.amax(-1), tile.gather(1, column).squeeze(1)
        return (*outputs, local.exp_().mul_(tile).sum(-1)) if with_entropy else outputs

    def gradient(
        self, tile: Tensor, inside: Tensor, column: Tensor, lse: Tensor, entropy: Tensor | None, pull: Tensor,
        push: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of a tile of products [n, v], in the weight's type, and at `column` [n, 1] before it is rounded.

        With p = softmax(z), the gradient of logit z_j is pull (1[j = target] - p_j) - push p_j (z_j - lse + entropy);
        times the transform's slope there it is the gradient of the product. The slope at 0 is in pull and push already.
        """
        if self.kernels:
            from rlhf.algo import kernels

            grad = _view(self.product, (tile.shape[0], tile.shape[1]))
            return grad, kernels.tile_gradient(
                tile, column[:, 0], inside, lse, entropy, pull, push, grad, self.scale, self.limit
            ).unsqueeze(1)
        # a masked logit has the slope 0 of the limit
        slope = None if self.limit is None else (tile / self.limit).clamp_(min=-1).square_().neg_().add_(1)
        tile.sub_(lse[:, None])
        if entropy is None or push is None:
            grad = tile.exp_().mul_(-pull[:, None])
        else:
            grad = (tile + entropy[:, None]).mul_(push[:, None]).add_(pull[:, None])
            grad = grad.mul_(tile.exp_()).neg_()
        at_column = grad.gather(1, column) + torch.where(inside, pull, 0.0)[:, None]
        if slope is not None:
            grad.mul_(slope)
            at_column *= slope.gather(1, column)
        grad.scatter_(1, column, at_column)
        if self.product.dtype == grad.dtype:
            return grad, at_column
        return _view(self.product, (grad.shape[0], grad.shape[1])).copy_(grad), at_column


def _view(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)


def _in_tile(targets: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in this part of the vocabulary [n], and their columns [n, 1] there (0 for the others)."""
    inside = (targets >= vocab.start) & (targets < vocab.stop)
    return inside, torch.where(inside, targets - vocab.start, 0).unsqueeze(1)


def _forward_tiles(head: Head, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> log-sum-exp [N], the targets' logits [N], entropy [N] (empty unless asked for)."""
    partial = head.logits.new_empty(len(head.vocab_tiles), len(targets))
    expected = torch.empty_like(partial) if with_entropy else partial[:0]
    chosen = head.logits.new_zeros(len(targets))
    scratch = head.logits[:0] if head.kernels else torch.empty_like(head.logits)
    for part, vocab in enumerate(head.vocab_tiles):
        for rows in head.row_tiles:
            inside, column = _in_tile(targets[rows], vocab)
            partial[part, rows], at_column, *mean = head.softmax(head.tile(rows, vocab), column, scratch, with_entropy)
            chosen[rows] = torch.where(inside, at_column, chosen[rows])
            if with_entropy:
                expected[part, rows] = mean[0]
    lse = partial.logsumexp(0)
    if not with_entropy:
        return lse, chosen, lse[:0]
    # Differences first, so that the shares of the tiles, which carry the rounding of `lse`, multiply small numbers.
    return lse, chosen, ((lse - expected) * (partial - lse).exp()).sum(0)


def _backward_tiles(
    head: Head, targets: Tensor, lse: Tensor, entropy: Tensor | None, grad_logprobs: Tensor,
    grad_entropy: Tensor | None, wants: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """-> gradients of states [N, H] in accumulation precision, weight [V, H] and bias [V] in their own types."""
    states, weight, bias = head.states, head.weight, head.bias
    accumulate = head.logits.dtype
    grad_states = torch.zeros_like(states, dtype=accumulate) if wants[0] else None
    grad_weight = torch.empty_like(weight) if wants[1] else None
    grad_bias = torch.zeros_like(bias, dtype=accumulate) if wants[2] and bias is not None else None
    pull = grad_logprobs * head.scale
    push = None if grad_entropy is None else grad_entropy * head.scale
    one_tile = len(head.row_tiles) == 1
    own = torch.zeros_like(lse)  # the gradient of each target's logit
    for vocab in head.vocab_tiles:
        part = None if one_tile else torch.zeros_like(weight[vocab], dtype=accumulate)
        for rows in head.row_tiles:
            inside, column = _in_tile(targets[rows], vocab)
            grad, at_column = head.gradient(
                head.tile(rows, vocab), inside, column, lse[rows], None if entropy is None else entropy[rows],
                pull[rows], None if push is None else push[rows],
            )  # fmt: skip
            if grad_bias is not None:
                grad_bias[vocab] += grad.sum(0, dtype=accumulate)
            if grad_weight is not None:
                if part is None:
                    torch.mm(grad.t(), states[rows], out=grad_weight[vocab])
                else:
                    part += head.multiply(grad.t(), states[rows])
            if grad_states is not None:
                # The target's own term is most of a state's gradient: it stays out of the rounded product.
                own[rows] = torch.where(inside, at_column.squeeze(1), own[rows])
                grad.scatter_(1, column, torch.where(inside[:, None], 0.0, at_column).to(grad.dtype))
                grad_states[rows] += head.multiply(grad, weight[vocab])
        if grad_weight is not None and part is not None:
            grad_weight[vocab] = part
    if grad_states is not None:
        for rows in head.row_tiles:
            grad_states[rows] += own[rows, None] * weight[targets[rows]]
    return grad_states, grad_weight, grad_bias if grad_bias is None or bias is None else grad_bias.to(bias.dtype)


class _FusedHead(torch.autograd.Function):
    """(hidden [U,H], weight [V,H], bias [V]) -> logprobs [N], entropy [N] of N chosen rows, which may be `repeated`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, targets: Tensor, scale: float,
        limit: float | None, with_entropy: bool, tiles: tuple[int, int], repeated: bool, support: TokenSupport | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.form, ctx.repeated, ctx.support = (scale, limit, tiles), repeated, support
        head = Head(hidden[rows].to(weight.dtype), weight, bias, support, *ctx.form)
        lse, chosen, entropy = _forward_tiles(head, targets, with_entropy)
        ctx.save_for_backward(hidden, weight, bias, rows, targets, lse, entropy)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return chosen - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, rows, targets, lse, entropy = ctx.saved_tensors
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        # A clipped token or one without an advantage has no gradient: it is left out of the backward pass.
        active = grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0)
        used = active.nonzero().squeeze(1)
        support = None if ctx.support is None else ctx.support.take(used)
        head = Head(hidden[rows[used]].to(weight.dtype), weight, bias, support, *ctx.form)
        of_entropy = (None, None) if grad_entropy is None else (entropy[used], grad_entropy[used])
        grad_states, grad_weight, grad_bias = _backward_tiles(
            head, targets[used], lse[used], of_entropy[0], grad_logprobs[used], of_entropy[1], ctx.needs_input_grad[:3]
        )
        grad_hidden = None
        if grad_states is not None:
            if ctx.repeated:
                grad_hidden = add_rows(grad_states, rows[used], len(hidden)).to(hidden.dtype)
            else:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows[used], grad_states.to(hidden.dtype))
        return grad_hidden, grad_weight, grad_bias, *[None] * 8
