"""Models with one scalar output: the critic (a value per response token) and the reward model (a score per sequence).

Both are a Hugging Face sequence-classification model with one label: the same transformer, and `score` for a head. As
with the policy, the head is applied inside the forward that DeepSpeed wraps.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf.algo.logprobs import response_states
from rlhf.algo.numerics import full_precision
from rlhf.config.sections import ModelConfig
from rlhf.learner.hub_format import check_written_again
from rlhf.learner.loading import check_report
from rlhf.learner.packed_attention import load_packed
from rlhf.learner.policy_model import DeviceTokens, prepare_transformer, transformer_outputs
from rlhf.learner.segments import take_rows
from rlhf.learner.text_model import wraps_text_model

HEAD = "score.weight"


class ScalarModel(nn.Module):
    """A transformer whose head gives one number for each state."""

    def __init__(self, transformer: PreTrainedModel) -> None:
        super().__init__()
        self.transformer = transformer

    def scalars(self, tokens: DeviceTokens, positions: Tensor) -> Tensor:
        """The head applied to the states at these positions of the row [n], which this rank holds -> [n] float32."""
        states = transformer_outputs(self.transformer, tokens).last_hidden_state[0]
        state_of = tokens.segments.state_of
        states = take_rows(states, positions if state_of is None else state_of[positions])
        weight = self.transformer.get_parameter(HEAD)
        return F.linear(full_precision(states), full_precision(weight)).squeeze(-1)


class ValueModel(ScalarModel):
    """The critic: values[t] is the value of the state in which token t is chosen, as `algo.gae` takes it.

    The state after the last token has value 0 and no entry.
    """

    def forward(self, tokens: DeviceTokens) -> Tensor:
        """-> [T] float32, 0 outside of the response mask."""
        positions, states = response_states(tokens.own_mask, tokens.cu_seqlens)
        scalars = self.scalars(tokens, states)
        return tokens.whole(scalars.new_zeros(len(tokens.token_ids)).index_copy(0, positions, scalars))


class RewardModel(ScalarModel):
    """A reward model: the scalar at the last token of each sequence."""

    def forward(self, tokens: DeviceTokens) -> Tensor:
        """-> [S] float32, not normalized."""
        last, holds = tokens.cu_seqlens[1:].long() - 1, tokens.segments.holds
        if holds is None:
            return self.scalars(tokens, last)
        own = torch.from_numpy(np.flatnonzero(holds[tokens.segments.bounds[1:] - 1])).to(last.device)
        scalars = self.scalars(tokens, last[own])
        return tokens.whole(scalars.new_zeros(len(last)).index_copy(0, own, scalars))


def load_scalar_transformer(
    path: str, model: ModelConfig, *, key: str, new_head: Literal["random", "zeros"] | None
) -> PreTrainedModel:
    """Load a language model or a sequence-classification model with one number; errors of `read_scalar_transformer`.

    Args:
        model: type, gradient checkpointing and trust; its own path is not read.
        key: the key of `path`, for messages.
        new_head: start values of a missing head; None: the model must have one.
    """
    transformer, has_head = read_scalar_transformer(path, model, key=key, needs_head=new_head is None)
    if not has_head:
        from deepspeed import zero  # at ZeRO-3 each rank holds only its share of the head

        head = cast(nn.Linear, transformer.get_submodule("score"))
        with zero.GatheredParameters([head.weight], modifier_rank=0, enabled=hasattr(head.weight, "ds_id")):
            if new_head == "zeros":
                nn.init.zeros_(head.weight)
            else:  # as in the original RLHF code
                nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))
    prepare_transformer(transformer, gradient_checkpointing=model.gradient_checkpointing)
    return transformer


def read_scalar_transformer(
    path: str, model: ModelConfig, *, key: str, needs_head: bool, without_data: bool = False
) -> tuple[PreTrainedModel, bool]:
    """The transformer as its files have it, and whether they have a head for it.

    Args:
        without_data: on the meta device, for its errors.

    Raises:
        ValueError: files that do not hold the model, several labels, a head of another form, or none where one is
            needed; sequences cannot share a row.
    """
    transformer, report = load_packed(
        AutoModelForSequenceClassification, path, model, key=key, without_data=without_data, num_labels=1
    )
    if wraps_text_model(transformer.config):
        raise ValueError(
            f"{key}={path}: it wraps a text model ({transformer.config.model_type}); such a critic or reward model is "
            "not supported. Use a model such as Qwen2, Qwen3, Llama or Mistral."
        )
    head = dict(transformer.named_children()).get("score")
    if not isinstance(head, nn.Linear) or head.bias is not None:
        lacks = f"{type(transformer).__name__} has no linear head named score"
        raise ValueError(f"{key}={path}: {lacks}. Use a model such as Qwen2, Qwen3, Llama or Mistral.")
    if any(name == HEAD for name, *_ in report.mismatched_keys):
        raise ValueError(f"{key}={path}: its head gives several numbers. Use a model with one label.")
    of_language_model = _language_head(transformer, model) if report.unexpected_keys else ()
    check_report(transformer, report, path, key=key, lacks=[HEAD], exceeds=of_language_model)
    has_head = HEAD not in report.missing_keys
    if needs_head and not has_head:
        remedy = "Train one with `python -m rlhf.reward_model`, or name another."
        raise ValueError(f"{key}={path}: it has no head {HEAD}, so it is not a reward model. {remedy}")
    if not needs_head:
        check_written_again(transformer, path, key=key)
    return transformer, has_head


def _language_head(transformer: PreTrainedModel, model: ModelConfig) -> set[str]:
    """The tensors that the language model of this config has, and the scalar model has not."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(transformer.config, trust_remote_code=model.trust_remote_code)
    return whole.state_dict().keys() - transformer.state_dict().keys()
