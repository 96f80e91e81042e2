"""Which experts a mixture of experts chose for the tokens of a row, and the loss that balances them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.algo.numerics import full_precision, segment_sums
from rlhf.learner.segments import Segments, take_rows

SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")  # balance the load by themselves, without a loss


class Choices(NamedTuple):
    """The experts of each held token in one layer, [n, k] int, out of `experts`."""

    chosen: Tensor
    experts: int


class Routing(NamedTuple):
    """The routing of a row."""

    load: Tensor  # [layers, experts] int64, the computed tokens that each expert got
    balance: Tensor | None  # [S], the balancing loss of each sequence, 1 if balanced; None for routers without one


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Name -> module with all experts of a layer; it is called with states, indices and weights."""
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Experts")}


def has_balancing_loss(transformer: PreTrainedModel) -> bool:
    """Whether the model's routers are made for a balancing loss; others have a bias that balances them."""
    biased = any(name.endswith(SELECTION_BIASES) for name in transformer.state_dict())
    return bool(experts_of(transformer)) and hasattr(transformer, "router_aux_loss_coef") and not biased


@contextlib.contextmanager
def choices_of_row(model: nn.Module) -> Iterator[list[Choices]]:
    """A context that collects the choices of the row, layer after layer; a recomputed layer adds none."""
    choices: list[Choices] = []

    def record_choices(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 1:
            choices.append(Choices(args[1].detach(), module.num_experts))

    with contextlib.ExitStack() as hooks:
        for experts in experts_of(model).values():
            hooks.callback(experts.register_forward_pre_hook(record_choices).remove)
        yield choices


def routing_of(choices: Sequence[Choices], logits: Sequence[Tensor] | None, segments: Segments) -> Routing | None:
    """The routing of a row, None if no expert was called; `logits` as below, None for routers without that loss."""
    if not choices:
        return None
    count, group = segments.held_count, segments.group
    load = torch.stack([torch.bincount(layer.chosen[:count].flatten(), minlength=layer.experts) for layer in choices])
    load = load if group is None else group.sum(load)
    return Routing(load, None if logits is None else balancing_loss(choices, logits, segments))


def balancing_loss(choices: Sequence[Choices], logits: Sequence[Tensor], segments: Segments) -> Tensor:
    """The balancing loss of each sequence, mean over the layers (Switch Transformer, arXiv:2101.03961, eq. 4 to 6).

    E sum_e f_e P_e: of E experts, f_e is the share of the choices that fell on expert e, P_e its mean probability. Here
    both are taken over a sequence and not over a batch (as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), so that
    the loss does not depend on how sequences are packed.

    Args:
        logits: [n, E] of each layer's router.

    Returns:
        [S], 1 if all experts are used equally; its gradient flows through P.
    """
    group, lengths = segments.group, segments.cu_seqlens.diff()[:, None]
    rows, offsets = segments.held_rows()

    def mean_of_sequences(x: Tensor) -> Tensor:
        total = segment_sums(x if rows is None else take_rows(x, rows), offsets)
        return (total if group is None else group.sum(total)) / lengths

    losses = []
    for (chosen, experts), router in zip(choices, logits, strict=True):
        probabilities = full_precision(router).softmax(-1)
        uses = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        share = mean_of_sequences(uses) / chosen.shape[1]
        losses.append(experts * (share * mean_of_sequences(probabilities)).sum(-1))
    return torch.stack(losses).mean(0)
