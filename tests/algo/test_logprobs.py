"""Log-probabilities straight from hidden states equal those of full logits (rlhf/algo/logprobs.py)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rlhf.algo.logprobs import TokenSupport, token_logprobs

V, H = 37, 8
BOUNDS = torch.tensor([0, 5, 5, 13], dtype=torch.int32)  # one segment is empty
MASK = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool)  # with holes
T = len(MASK)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(dtype: torch.dtype, *, bias: bool = False, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, V, (T,), generator=generator)


def full_logits(
    hidden, weight, bias, token_ids, mask, bounds, temperature=1.0, scale=1.0, cap=None, kept=None
) -> tuple[Tensor, Tensor]:
    """The plain way, segment by segment: logits of all but the last token, log-softmax, choose, entropy.

    `kept` [T, V] bool: the support of each token; the logits of all others are -inf.
    """
    logprobs, entropy = hidden.new_zeros(len(token_ids)), hidden.new_zeros(len(token_ids))
    for start, end in itertools.pairwise(bounds.tolist()):
        logits = scale * (hidden[start:end][:-1] @ weight.T + (0 if bias is None else bias))
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        where = torch.arange(start, end)[1:]
        if kept is not None:
            logits = logits.masked_fill(~kept[where], float("-inf"))
        log_pi = (logits / temperature).log_softmax(-1)
        logprobs = logprobs.index_copy(0, where, log_pi.gather(1, token_ids[where, None]).squeeze(1))
        entropy = entropy.index_copy(0, where, -(log_pi.exp() * log_pi.clamp(min=-1e9)).sum(-1))
    return torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)


def supports(token_ids: Tensor) -> tuple[Tensor, TokenSupport]:
    """Supports of 1 to V tokens, as [T, V] bool and as ids; some tokens have the whole vocabulary, and no ids."""
    generator = torch.Generator().manual_seed(1)
    share = torch.tensor([0.0, 0.1, 0.5])[torch.arange(T) % 3]
    kept = torch.rand(T, V, generator=generator) < share[:, None]
    kept.scatter_(1, token_ids[:, None], True)
    whole = torch.arange(T) % 4 == 0
    ids = [row.nonzero().squeeze(1)[: 0 if all_ else None] for row, all_ in zip(kept, whole, strict=True)]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, ids))])
    return kept | whole[:, None], TokenSupport(torch.cat(ids).int(), offsets)


@pytest.mark.parametrize("tiles", [(3, 10), (4, 37), (100, 100), None])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.5, 3.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("restricted", [False, True])
def test_values_and_gradients_equal_those_of_full_logits(tiles, bias, scale, cap, dtype, tolerance, restricted):
    hidden, weight, offset, token_ids = inputs(dtype, bias=bias)
    kept, support = supports(token_ids) if restricted else (None, None)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    pull, push = torch.randn(2, T, dtype=dtype)
    ours = token_logprobs(
        hidden,
        weight,
        token_ids,
        MASK,
        BOUNDS,
        head_bias=offset,
        logit_scale=scale,
        logit_cap=cap,
        temperature=0.7,
        with_entropy=True,
        support=support,
        tiles=tiles,
    )
    logprobs, entropy = full_logits(hidden, weight, offset, token_ids, MASK, BOUNDS, 0.7, scale, cap, kept)
    assert (ours.logprobs - logprobs).abs().max() < tolerance
    assert (ours.entropy - entropy).abs().max() < tolerance
    for loss, reference in (
        ((ours.logprobs * pull).sum(), (logprobs * pull).sum()),
        ((ours.entropy * push).sum(), (entropy * push).sum()),
        ((ours.logprobs * pull + ours.entropy * push).sum(), (logprobs * pull + entropy * push).sum()),
    ):
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        expected = torch.autograd.grad(reference, leaves, retain_graph=True)
        for a, b in zip(gradients, expected, strict=True):
            assert (a - b).abs().max() < tolerance


def test_hand_numbers_and_the_shift():
    # State 0 has logits (0, 0) and decides token 1; state 1 has (3, -3) and decides token 2; state 2 decides nothing.
    hidden = torch.tensor([[0.0], [3.0], [7.0]])
    weight = torch.tensor([[1.0], [-1.0]])
    mask = torch.tensor([False, True, True])
    ours = token_logprobs(hidden, weight, torch.tensor([0, 1, 0]), mask, torch.tensor([0, 3]), with_entropy=True)
    assert ours.logprobs.tolist() == pytest.approx([0, -0.6931472, -0.0024757], abs=1e-6)
    assert ours.entropy.tolist() == pytest.approx([0, 0.6931472, 0.0173113], abs=1e-6)


def test_gradcheck_in_every_differentiable_input():
    hidden, weight, offset, token_ids = inputs(torch.float64, bias=True)

    def function(hidden: Tensor, weight: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            token_logprobs(
                hidden,
                weight,
                token_ids,
                MASK,
                BOUNDS,
                head_bias=offset,
                temperature=1.3,
                with_entropy=True,
                tiles=(3, 16),
            )
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, offset), fast_mode=True)


def test_tied_head_sums_the_gradients_of_embedding_and_head():
    _, weight, _, token_ids = inputs(torch.float64)
    ours = token_logprobs(torch.tanh(weight[token_ids]), weight, token_ids, MASK, BOUNDS).logprobs
    plain, _ = full_logits(torch.tanh(weight[token_ids]), weight, None, token_ids, MASK, BOUNDS)
    (gradient,) = torch.autograd.grad(ours.square().sum(), weight)
    (expected,) = torch.autograd.grad(plain.square().sum(), weight)
    assert (gradient - expected).abs().max() < 1e-12


def test_in_bf16_the_error_is_no_larger_than_that_of_full_float32_logits():
    generator = torch.Generator().manual_seed(0)
    rows, vocabulary, width = 300, 3000, 128
    hidden = torch.randn(rows, width, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(vocabulary, width, generator=generator)).bfloat16()
    token_ids = torch.randint(0, vocabulary, (rows,), generator=generator)
    mask, bounds = torch.ones(rows, dtype=torch.bool), torch.tensor([0, rows])
    mask[0] = False
    pull = torch.randn(rows, generator=generator)

    def outcome(kind: str, dtype: torch.dtype) -> list[Tensor]:
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        if kind == "ours":
            logprobs = token_logprobs(h, w, token_ids, mask, bounds, tiles=(1024, 512)).logprobs
        else:
            logits = (h @ w.T)[:-1].to(torch.float64 if dtype == torch.float64 else torch.float32)
            logprobs = logits.log_softmax(-1).gather(1, token_ids[1:, None]).squeeze(1)
            logprobs = torch.cat([logprobs.new_zeros(1), logprobs])
        (logprobs * pull.to(logprobs.dtype)).sum().backward()
        return [x.double() for x in (logprobs.detach(), h.grad, w.grad)]

    exact = outcome("full", torch.float64)
    ours, full = outcome("ours", torch.bfloat16), outcome("full", torch.bfloat16)
    for name, a, b, truth in zip(("logprobs", "hidden", "weight"), ours, full, exact, strict=True):
        assert (a - truth).norm() <= 1.001 * (b - truth).norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("restricted", [False, True])
def test_gradient_mode_and_entropy_change_no_bit_of_the_logprobs(dtype, restricted):
    hidden, weight, offset, token_ids = inputs(dtype, bias=True)
    arguments = (hidden, weight, token_ids, MASK, BOUNDS)
    options: dict[str, Any] = {"head_bias": offset, "temperature": 0.7}
    options["support"] = supports(token_ids)[1] if restricted else None
    with_gradient = token_logprobs(*arguments, **options).logprobs
    with_entropy = token_logprobs(*arguments, **options, with_entropy=True).logprobs
    with torch.no_grad():
        without = token_logprobs(*arguments, **options)
    assert torch.equal(with_gradient, without.logprobs)
    assert torch.equal(with_gradient, with_entropy)
    assert with_gradient.dtype == torch.float32
    assert without.entropy is None
    assert not without.logprobs.requires_grad


def test_states_weights_and_supports_of_what_was_not_sampled_change_nothing():
    """Logits outside of a support may even overflow; supports where the mask is False are not read."""
    hidden, weight, _, token_ids = inputs(torch.float32)
    mask = MASK & (torch.arange(T) == 3)  # its state is hidden[2]
    offsets = torch.zeros(T + 1, dtype=torch.int64)
    offsets[4:] = 3

    def outcome(weight: Tensor, support: TokenSupport) -> list[Tensor]:
        out = token_logprobs(hidden, weight, token_ids, mask, BOUNDS, with_entropy=True, support=support, tiles=(2, 7))
        loss = out.logprobs.sum() + out.entropy.sum()
        return [out.logprobs, out.entropy, *torch.autograd.grad(loss, (hidden, weight))]

    kept = torch.tensor([token_ids[3], (token_ids[3] + 5) % V, (token_ids[3] + 20) % V], dtype=torch.int32)
    expected = outcome(weight, TokenSupport(kept, offsets))
    assert torch.isfinite(expected[1]).all()
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, kept.long(), False)
    garbage = weight.detach().clone()
    garbage[outside] = 1e4 * torch.randn(int(outside.sum()), H)
    elsewhere = offsets + torch.cat([torch.zeros(6), torch.full((T - 5,), 2.0)]).long()
    with_more = TokenSupport(torch.cat([kept, torch.tensor([V + 9, -1], dtype=torch.int32)]), elsewhere)
    for value, exact in zip(outcome(garbage.requires_grad_(), with_more), expected, strict=True):
        assert torch.equal(value, exact)
    assert not expected[3][outside].any()


def test_a_frozen_head_or_frozen_states_get_no_gradient_and_the_other_its_own():
    hidden, weight, _, token_ids = inputs(torch.float64)
    token_logprobs(hidden, weight, token_ids, MASK, BOUNDS).logprobs.sum().backward()
    both = hidden.grad.clone(), weight.grad.clone()
    for frozen, trained, expected in ((weight, hidden, both[0]), (hidden, weight, both[1])):
        hidden.grad = weight.grad = None
        frozen.requires_grad_(False)
        token_logprobs(hidden, weight, token_ids, MASK, BOUNDS).logprobs.sum().backward()
        assert frozen.grad is None
        assert torch.allclose(trained.grad, expected)
        frozen.requires_grad_(True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_the_same_under_activation_checkpointing(reentrant):
    hidden, weight, _, token_ids = inputs(torch.float64)

    def head(hidden: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, token_ids, MASK, BOUNDS, with_entropy=True).logprobs

    plain = torch.autograd.grad(head(hidden).square().sum(), [hidden, weight])
    checkpoint(head, hidden, use_reentrant=reentrant).square().sum().backward()
    for a, b in zip(plain, (hidden.grad, weight.grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_states_that_predict_no_response_token_do_not_matter(garbage):
    hidden, weight, _, token_ids = inputs(torch.float32)
    used = torch.zeros(T, dtype=torch.bool)
    used[MASK.nonzero().squeeze(1) - 1] = True
    dirty = torch.where(used[:, None], hidden.detach(), garbage).requires_grad_()
    outcomes = []
    for states in (hidden, dirty):
        ours = token_logprobs(states, weight, token_ids, MASK, BOUNDS, with_entropy=True)
        loss = ours.logprobs.sum() + ours.entropy.sum()
        outcomes.append([ours.logprobs.detach(), ours.entropy.detach(), *torch.autograd.grad(loss, [states, weight])])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert (outcomes[1][2][~used] == 0).all()
    assert (outcomes[0][0][~MASK] == 0).all()


def test_a_filler_stays_in_the_graph_with_a_gradient_of_exactly_zero():
    hidden, weight, offset, _ = inputs(torch.bfloat16, bias=True)
    nothing = torch.zeros(2, dtype=torch.bool)
    ours = token_logprobs(
        hidden[:2], weight, torch.zeros(2, dtype=torch.int32), nothing, torch.tensor([0, 2]), head_bias=offset
    )
    for gradient in torch.autograd.grad(ours.logprobs.sum(), [hidden, weight, offset]):
        assert (gradient == 0).all()


def test_tokens_without_a_gradient_cost_nothing_and_change_nothing():
    hidden, weight, _, token_ids = inputs(torch.float64)
    pull = torch.randn(T, dtype=torch.float64) * (torch.arange(T) != 3)
    smaller = MASK & (torch.arange(T) != 3)
    outcomes = [
        torch.autograd.grad((token_logprobs(hidden, weight, token_ids, mask, BOUNDS).logprobs * pull).sum(), weight)[0]
        for mask in (MASK, smaller)
    ]
    assert torch.equal(*outcomes)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_neither_direction_ever_holds_tokens_times_vocabulary():
    rows, vocabulary, width = 256, 4096, 4
    hidden, weight = torch.randn(rows, width).requires_grad_(), torch.randn(vocabulary, width).requires_grad_()
    mask = torch.arange(rows) > 0
    with LargestTensor() as largest:
        ours = token_logprobs(
            hidden,
            weight,
            torch.randint(0, vocabulary, (rows,)),
            mask,
            torch.tensor([0, rows]),
            with_entropy=True,
            tiles=(64, 256),
        )
        (ours.logprobs.sum() + ours.entropy.sum()).backward()
    assert largest.elements <= max(64 * 256, weight.numel())


def test_a_response_cannot_start_at_the_first_token_of_a_segment():
    hidden, weight, _, token_ids = inputs(torch.float32)
    for start in (0, 5):
        mask = torch.arange(T) == start
        with pytest.raises(AssertionError, match="first token of a segment"):
            token_logprobs(hidden, weight, token_ids, mask, BOUNDS)
