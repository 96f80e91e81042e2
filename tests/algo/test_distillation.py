"""The KL to a teacher over the whole vocabulary: values and gradients, against torch on full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf.algo.distillation import HeadInput, teacher_kl

LENGTHS = (5, 1, 7, 4)
CU_SEQLENS = torch.tensor([0, 5, 6, 13, 17])


def logits(states: Tensor, head: HeadInput, size: int) -> Tensor:
    y = states @ head.weight.T + (0 if head.bias is None else head.bias)
    z = head.scale * y if head.limit is None else head.limit * torch.tanh(head.scale * y / head.limit)
    return z[:, :size]


def mask_and_rows() -> tuple[Tensor, Tensor]:
    mask = torch.zeros(17, dtype=torch.bool)
    mask[[2, 3, 4, 8, 9, 12, 14, 16]] = True  # with a hole
    return mask, mask.nonzero().squeeze(1) - 1


@pytest.mark.parametrize("of_teacher", [23, 19, 31], ids=["as long", "shorter", "longer"])
@pytest.mark.parametrize(
    ("bias", "scale", "limit"), [(False, 1.0, None), (True, 0.7, None), (True, 1.3, 2.5)], ids=["plain", "bias", "cap"]
)
def test_value_and_gradients_are_those_of_full_logits(
    of_teacher: int, bias: bool, scale: float, limit: float | None
) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    mask, rows = mask_and_rows()
    hidden, weight = draw(17, 6).requires_grad_(), draw(23, 6).requires_grad_()
    own_bias = draw(23).requires_grad_() if bias else None
    own = HeadInput(hidden, weight, own_bias, scale, limit)
    teacher = HeadInput(draw(len(rows), 4), draw(of_teacher, 4), draw(of_teacher) if bias else None, 0.9, limit)
    factors = torch.where(mask, draw(17), 0.0)
    inputs = [hidden, weight, *([] if own_bias is None else [own_bias])]

    size = min(23, of_teacher)
    p = logits(hidden[rows], own, size).log_softmax(-1)
    q = logits(teacher.states, teacher, size).log_softmax(-1)
    wanted = hidden.new_zeros(17).index_copy(0, rows + 1, (p.exp() * (p - q)).sum(-1))
    of_wanted = torch.autograd.grad((wanted * factors).sum(), inputs)
    for tiles in ((3, 5), (64, 64)):
        kl = teacher_kl(hidden, own, teacher, mask, CU_SEQLENS, tiles=tiles)
        torch.testing.assert_close(kl, wanted, rtol=1e-12, atol=1e-12)
        for grad, other in zip(torch.autograd.grad((kl * factors).sum(), inputs), of_wanted, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-11, atol=1e-12)


def test_an_equal_teacher_has_no_kl_and_no_gradient_and_states_that_rows_share_get_the_sum() -> None:
    mask, rows = mask_and_rows()
    hidden, weight = torch.randn(9, 6, requires_grad=True), torch.randn(50, 6, requires_grad=True)
    expand = torch.arange(17) % 9  # tokens that share their beginnings
    own = HeadInput(hidden, weight, None, 1.0, None)
    same = HeadInput(hidden[expand[rows]].detach(), weight.detach(), None, 1.0, None)
    kl = teacher_kl(hidden, own, same, mask, CU_SEQLENS, expand=expand, tiles=(3, 16))
    assert kl.abs().max() < 1e-6
    grads = torch.autograd.grad(kl.sum(), [hidden, weight])
    assert all(grad.abs().max() < 1e-5 for grad in grads)

    other = HeadInput(torch.randn(len(rows), 6), weight.detach(), None, 1.0, None)
    (shared,) = torch.autograd.grad(teacher_kl(hidden, own, other, mask, CU_SEQLENS, expand=expand).sum(), [hidden])
    whole = hidden.detach()[expand].requires_grad_()
    (alone,) = torch.autograd.grad(teacher_kl(whole, own, other, mask, CU_SEQLENS).sum(), [whole])
    torch.testing.assert_close(shared, torch.zeros(9, 6).index_add(0, expand, alone), rtol=1e-5, atol=1e-6)


def test_bfloat16_weights_lose_no_more_than_their_own_rounding() -> None:
    mask, rows = mask_and_rows()
    hidden, weight = torch.randn(17, 64).bfloat16().requires_grad_(), (torch.randn(300, 64) / 8).bfloat16()
    weight.requires_grad_()
    teacher = HeadInput(torch.randn(len(rows), 64).bfloat16(), (torch.randn(300, 64) / 8).bfloat16(), None, 1.0, None)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wide_teacher = HeadInput(teacher.states.double(), teacher.weight.double(), None, 1.0, None)
    of_wide = teacher_kl(wide[0], HeadInput(wide[0], wide[1], None, 1.0, None), wide_teacher, mask, CU_SEQLENS)
    kl = teacher_kl(hidden, HeadInput(hidden, weight, None, 1.0, None), teacher, mask, CU_SEQLENS, tiles=(3, 128))
    torch.testing.assert_close(kl.double(), of_wide, rtol=0.02, atol=0.02)
    for grad, other in zip(
        torch.autograd.grad(kl.sum(), [hidden, weight]), torch.autograd.grad(of_wide.sum(), wide), strict=True
    ):
        assert (grad.double() - other).norm() < 0.01 * other.norm()
