"""Recorded experts in place of a router's choice (R3, arXiv:2510.11370, sec. 4).

With I the mask of the recorded experts and s the router's own logits, the weight of expert i is

    g_i = I_i exp(s_i) / sum_j I_j exp(s_j)

in the paper's router. Families differ in what follows the choice (sigmoid, no normalization, a scale): that is left to
their own code, which gets the recorded experts as the answer of its `topk`. So the gradient flows to the router's
logits as it would from its own choice. Biases and limits to groups of experts concern the choice alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlhf.algo.packing import pack
from rlhf.learner.policy_model import DeviceTokens
from rlhf.learner.routing import Choices, choices_of_row, experts_of
from rlhf.learner.segments import segments_of_row
from rlhf.types import PackedTokens

PROBE_TOKENS = 16


class _Chosen(TorchFunctionMode):
    """Answers the first choice among all experts with `chosen` [U, k], and leaves the scores before it unmasked."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen, self.scores_shape, self.answered = chosen, (len(chosen), experts), False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = args[0] if args else None
        if not self.answered and isinstance(scores, Tensor) and scores.shape == self.scores_shape:
            if func is Tensor.masked_fill:  # DeepSeek-V2 takes the weights from the scores inside its groups
                return scores
            if func in (torch.topk, Tensor.topk):
                self.answered = True
                return torch.return_types.topk((scores.gather(1, self.chosen), self.chosen))
        return func(*args, **(kwargs or {}))


def replay_recorded(transformer: nn.Module) -> None:
    """Make the layers with experts use the recorded ones (`Segments.experts`); without a record their routers choose.

    The recomputation of gradient checkpointing uses them too, since it knows the row.
    """
    for name, experts in experts_of(transformer).items():
        block = transformer.get_submodule(name.rpartition(".")[0])
        block.forward = functools.partial(_replay, block.forward, _layer(name), experts.num_experts)


def _replay(live: Callable[..., Any], layer: int, experts: int, /, *args: Any, **kwargs: Any) -> Any:
    recorded = segments_of_row().experts
    if recorded is None:
        return live(*args, **kwargs)
    with _Chosen(recorded[:, layer].long(), experts):
        return live(*args, **kwargs)


def _layer(name: str) -> int:
    """The number of the decoder layer that a module is in, by which vLLM numbers layers too."""
    number = re.search(r"\.(\d+)\.", name)
    assert number is not None, f"{name} is in no layer"
    return int(number[1])


@dataclass(frozen=True)
class RecordShape:
    """The shape of a record of this model: [T, layers, chosen], with ids below `experts` in the `sparse` layers."""

    layers: int
    sparse: tuple[int, ...]
    chosen: int
    experts: int

    def check(self, tokens: PackedTokens) -> None:
        """Raise ValueError if the engine has recorded another model's experts; the first tokens stand for all."""
        recorded = tokens.experts
        if recorded is None:
            return
        expected = f"{self.layers} layers and {self.chosen} experts per token out of {self.experts}"
        problem = ""
        if recorded.shape[1:] != (self.layers, self.chosen):
            problem = f"{recorded.shape[1]} layers and {recorded.shape[2]} experts per token"
        elif (highest := int(recorded.max())) >= self.experts:
            problem = f"expert {highest}"
        elif (np.diff(np.sort(recorded[tokens.cu_seqlens[:-1]][:, self.sparse])) == 0).any():
            problem = "one expert twice for a token"
        if problem:
            raise ValueError(
                f"learner.router_replay=rollout: the engine has recorded {problem}, and the learner's model has "
                f"{expected}. They do not compute the same model. Set it to none."
            )


@torch.no_grad()
def check_replay(
    model: Callable[[DeviceTokens], Any], transformer: PreTrainedModel, device: torch.device, *, path: str
) -> RecordShape:
    """Check in every layer that the recorded experts compute. At ZeRO-3 every rank calls this.

    ValueError if the model at `path` has no experts, or chooses them in a way that cannot be replaced.
    """
    ids = np.arange(PROBE_TOKENS, dtype=np.int32) % 4

    def choices(recorded: np.ndarray | None) -> list[Choices]:
        with choices_of_row(transformer) as computed:
            model(DeviceTokens.of(pack([ids], experts=[recorded]), device))
        return computed

    sparse = tuple(map(_layer, experts_of(transformer)))
    live = choices(None)
    why = "" if sparse else "the model has no experts"
    if not why and len({(layer.chosen.shape[1], layer.experts) for layer in live}) == 1 and len(live) == len(sparse):
        k, experts = live[0].chosen.shape[1], live[0].experts
        shape = RecordShape(transformer.config.get_text_config().num_hidden_layers, sparse, k, experts)
        # each token has other experts than the one before, in ascending layers from another first one
        first = np.arange(PROBE_TOKENS)[:, None] + np.arange(shape.layers)
        recorded = ((first[..., None] + np.arange(k)) % experts).astype(np.uint16)
        on_device = torch.from_numpy(recorded.astype(np.int64)).to(device)
        replayed = zip(choices(recorded), sparse, strict=True)
        if all(torch.equal(layer.chosen.long(), on_device[:, number]) for layer, number in replayed):
            return shape
    why = why or "its routers choose experts in a way that recorded ones cannot replace"
    raise ValueError(f"learner.router_replay=rollout with model.path={path}: {why}. Set it to none.")
