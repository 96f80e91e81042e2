"""Which experts a mixture of experts chose for the tokens of a row, and the loss that balances them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.algo.numerics import full_precision
from rlhf.learner.segments import Segments, take_rows

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")  # balance the load by themselves, without a loss

_CHOSEN: ContextVar[list[Tensor] | None] = ContextVar("experts chosen in each layer", default=None)


class Routing(NamedTuple):
    """The routing of a row.

    Attributes:
        load: [layers, experts] int64, the computed tokens that each expert got.
        balance: [S], the balancing loss of each sequence, 1 if balanced; None for routers without one.
    """

    load: Tensor
    balance: Tensor | None


def experts_of(model: nn.Module) -> list[Any]:
    """The experts of each layer, one module for all of them; they are called with states, indices and weights."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def has_balancing_loss(transformer: PreTrainedModel) -> bool:
    """Whether its routers are made for a balancing loss; others have a bias that is moved instead."""
    biased = any(name.endswith(SELECTION_BIASES) for name in transformer.state_dict())
    return bool(experts_of(transformer)) and hasattr(transformer, "router_aux_loss_coef") and not biased


def record_choices(model: nn.Module) -> None:
    """Let the experts of every layer note for which tokens they are called, within `chosen_experts`."""

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = _CHOSEN.get()  # None when a checkpointed layer is recomputed
        if chosen is not None and len(args) > 1:
            chosen.append(args[1].detach())

    for experts in experts_of(model):
        experts.register_forward_pre_hook(note)


@contextlib.contextmanager
def chosen_experts() -> Iterator[list[Tensor]]:
    """Collects the experts of each token [U, k] int, layer after layer."""
    chosen: list[Tensor] = []
    token = _CHOSEN.set(chosen)
    try:
        yield chosen
    finally:
        _CHOSEN.reset(token)


def expert_load(chosen: Sequence[Tensor], experts: int) -> Tensor:
    """[layers, experts] int64: the computed tokens of each expert."""
    return torch.stack([torch.bincount(layer.flatten(), minlength=experts)[:experts] for layer in chosen])


def balancing_loss(logits: Sequence[Tensor], chosen: Sequence[Tensor], segments: Segments) -> Tensor:
    """The balancing loss of each sequence, mean over the layers (Switch Transformer, arXiv:2101.03961, eq. 4 to 6).

    E sum_e f_e P_e: of E experts, f_e is the share of the choices that fell on expert e, P_e its mean probability. Here
    both are taken over a sequence and not over a batch (as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), so that
    the loss does not depend on how sequences are packed.

    Args:
        logits: [U, E] of each layer's router.
        chosen: [U, k] int of each layer.

    Returns:
        [S], 1 if all experts are used alike; its gradient flows through P.
    """
    offsets = segments.cu_seqlens.long()

    def mean_of_sequences(x: Tensor) -> Tensor:
        row = x if segments.expand is None else take_rows(x, segments.expand)
        return torch.segment_reduce(row, "mean", offsets=offsets, axis=0)

    losses = []
    for router, experts in zip(logits, chosen, strict=True):
        probabilities = full_precision(router).softmax(-1)
        uses = torch.zeros_like(probabilities).scatter_add(
            1, experts, torch.ones_like(probabilities[:, : experts.shape[1]])
        )
        share = mean_of_sequences(uses) / experts.shape[1]
        losses.append(router.shape[-1] * (share * mean_of_sequences(probabilities)).sum(-1))
    return torch.stack(losses).mean(0)
