"""The policy module that DeepSpeed wraps: a transformer whose forward ends in token log-probabilities.

Everything that touches a parameter happens inside this forward, the head too. A head applied outside it would get
silently wrong gradients under ZeRO-1/2 and a weight of size 0 under ZeRO-3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.algo.distillation import HeadInput, teacher_kl
from rlhf.algo.logprobs import TokenSupport, response_states, token_logprobs
from rlhf.algo.lora import adapt, linear_names
from rlhf.algo.packing import pack, shared_beginnings
from rlhf.config.sections import Checkpointing, ModelConfig
from rlhf.learner.fused import use_kernels
from rlhf.learner.hub_format import check_written_again, frozen_tensors, model_tensors
from rlhf.learner.loading import check_report
from rlhf.learner.packed_attention import UnpackableError, load_packed
from rlhf.learner.packed_mixers import run_by_segments, whole_layers
from rlhf.learner.routing import Routing, choices_of_row, has_balancing_loss, routing_of
from rlhf.learner.segments import MIXES, Segments, UnsharedRowError, checkpoint_contexts, row_of, segments_of
from rlhf.learner.selective import selective_contexts
from rlhf.learner.text_model import decoder_of, language_model
from rlhf.learner.tiles import compute_in_tiles
from rlhf.types import PackedTokens, PromptRow

if TYPE_CHECKING:
    from rlhf.learner.sequence_parallel import SequenceGroup


@dataclass(frozen=True)
class DeviceTokens:
    """A microbatch on the device: columns [T], with positions in each sequence, `rollout_tokens` [S], its segments.

    `support`: None where every token was sampled from the whole vocabulary. `prompt_rows`: as in `PackedTokens`.
    `own_mask`: the response tokens that a state of this rank predicts; if no other rank holds the row, all of them.
    """

    token_ids: Tensor
    position_ids: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    cu_seqlens: Tensor
    rollout_tokens: Tensor
    segments: Segments
    own_mask: Tensor
    support: TokenSupport | None = None
    prompt_rows: tuple[PromptRow, ...] | None = None

    @classmethod
    def of(cls, tokens: PackedTokens, device: torch.device, group: SequenceGroup | None = None) -> DeviceTokens:
        """The tokens on the device; `group`: the ranks that compute the row together, None if this one does alone."""

        def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(array).to(device=device, dtype=dtype)

        segments = segments_of(tokens.cu_seqlens, shared_beginnings(tokens), device, group)
        position_ids = put(np.arange(len(tokens.token_ids)) - np.repeat(tokens.cu_seqlens[:-1], tokens.lengths))
        mask, logprobs = put(tokens.response_mask, torch.bool), put(tokens.rollout_logprobs, torch.float32)
        ids, rollout_tokens = put(tokens.token_ids), put(tokens.rollout_tokens)
        own_mask = mask
        if segments.holds is not None:  # the state before a token predicts it
            own_mask = mask & put(np.concatenate([[False], segments.holds[:-1]]), torch.bool)
        support = None
        if tokens.support is not None:
            support = TokenSupport(put(tokens.support.ids, torch.int32), put(tokens.support.offsets))
        if (experts := tokens.experts) is not None:
            segments.experts = put(experts[segments.held.cpu().numpy()], torch.int16)
        bounds, rows = segments.cu_seqlens, tokens.prompt_rows
        return cls(ids, position_ids, mask, logprobs, bounds, rollout_tokens, segments, own_mask, support, rows)

    def whole(self, column: Tensor) -> Tensor:
        """A column of the row from what this rank computed of it, 0 elsewhere; every rank gets its gradient whole."""
        group = self.segments.group
        return column if group is None else group.sum(column)


def transformer_outputs(transformer: PreTrainedModel, tokens: DeviceTokens, **options: Any) -> Any:
    """The output of the transformer without its head for the held tokens of a row: states after the last norm."""
    held = tokens.segments.held
    ids, positions = (x[held].unsqueeze(0) for x in (tokens.token_ids, tokens.position_ids))
    with row_of(tokens.segments):
        return decoder_of(transformer)(
            input_ids=ids, position_ids=positions, use_cache=False, segments=tokens.segments, **options
        )


class PolicyOutput(NamedTuple):
    """`logprobs` and `entropy` as in `TokenLogprobs`; the entropy and the routing of experts only for an update.

    `teacher_kl`: [T], as the function of this name; None without a teacher.
    """

    logprobs: Tensor
    entropy: Tensor | None
    routing: Routing | None
    teacher_kl: Tensor | None = None


class PolicyModel(nn.Module):
    """A causal language model as a policy: packed tokens -> log-probability of each response token.

    `temperature` divides the logits, as in the engine that sampled; the log-probability of a token is that among the
    tokens of its support. `in_float32` computes in float32 from the same weights, module by module, to measure the
    error that the model's own type causes.
    """

    def __init__(self, transformer: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.transformer = transformer
        self.temperature = temperature
        self.logit_scale, self.logit_cap = logit_transform(transformer.config)
        self.has_balancing_loss = has_balancing_loss(transformer)

    def forward(
        self, tokens: DeviceTokens, for_update: bool = False, temperature: float | None = None,
        in_float32: bool = False, teacher: HeadInput | None = None,
    ) -> PolicyOutput:  # fmt: skip
        head = self.transformer.get_output_embeddings()
        options = {"output_router_logits": True} if for_update and self.has_balancing_loss else {}
        with (
            computing_in_float32(self.transformer) if in_float32 else contextlib.nullcontext(),
            choices_of_row(self.transformer) as choices,
        ):
            outputs = transformer_outputs(self.transformer, tokens, **options)
        router_logits = outputs.router_logits if options else None
        routing = routing_of(choices, router_logits, tokens.segments) if for_update else None
        weight, bias = (x.float() if in_float32 and x is not None else x for x in (head.weight, head.bias))
        logprobs, entropy = token_logprobs(
            outputs.last_hidden_state[0], weight, tokens.token_ids, tokens.own_mask, tokens.cu_seqlens,
            expand=tokens.segments.state_of, head_bias=bias, logit_scale=self.logit_scale, logit_cap=self.logit_cap,
            temperature=self.temperature if temperature is None else temperature, with_entropy=for_update,
            support=tokens.support,
        )  # fmt: skip
        kl = None
        if teacher is not None:
            hidden = outputs.last_hidden_state[0]
            kl = tokens.whole(teacher_kl(
                hidden, self._head_input(hidden[:0]), teacher, tokens.own_mask, tokens.cu_seqlens,
                expand=tokens.segments.state_of,
            ))  # fmt: skip
        return PolicyOutput(tokens.whole(logprobs), None if entropy is None else tokens.whole(entropy), routing, kl)

    @torch.no_grad()
    def as_teacher(self, tokens: DeviceTokens) -> HeadInput:
        """The states of this rank's response tokens and the head: from them come its logits at temperature 1."""
        hidden = transformer_outputs(self.transformer, tokens).last_hidden_state[0]
        _, rows = response_states(tokens.own_mask, tokens.cu_seqlens)
        state_of = tokens.segments.state_of
        return self._head_input(hidden[rows if state_of is None else state_of[rows]])

    def _head_input(self, states: Tensor) -> HeadInput:
        head = self.transformer.get_output_embeddings()
        return HeadInput(states, head.weight, head.bias, self.logit_scale, self.logit_cap)


@contextlib.contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Give each module its own parameters in float32 while it computes, and its true ones back right after.

    The extra memory is that of the largest module. At ZeRO-3 the hooks are set inside the wrapped forward, so that a
    module is gathered before `widen` and released after `narrow`; layers that are gathered whole are one module here.
    """
    kept: dict[nn.Module, list[Tensor]] = {}
    parameters = {module: list(module.parameters(recurse=False)) for module in model.modules()}
    for layer in whole_layers(model):
        parameters |= {module: [] for module in layer.modules()} | {layer: list(layer.parameters())}

    def widen(module: nn.Module, _: Any) -> None:
        kept[module] = [param.data for param in parameters[module]]
        for param in parameters[module]:
            param.data = param.data.float()

    def narrow(module: nn.Module, _: Any, __: Any) -> None:
        for param, true in zip(parameters[module], kept.pop(module), strict=True):
            param.data = true

    with contextlib.ExitStack() as hooks:
        for module, params in parameters.items():
            if params:
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(narrow, prepend=True, always_call=True).remove)
        yield


def load_policy(
    model: ModelConfig, *, temperature: float, key: str = "model.path", seed: int = 0, exported: bool = True
) -> PolicyModel:
    """Load a model from a folder or the hub for training; ValueError if it does not take packed rows, or adapters.

    `seed`: of new adapters. `exported`: whether it will be, with what is frozen; then the files must have that.
    """
    transformer = load_language_model(model, key=key, exported=exported)
    if (lora := model.lora) is not None:
        names = linear_names(transformer, targets=lora.targets, exclude=lora.exclude)
        adapt(transformer, names, rank=lora.rank, scale=lora.scale, seed=seed)
    prepare_transformer(transformer, gradient_checkpointing=model.gradient_checkpointing)
    return PolicyModel(transformer, temperature=temperature)


def load_language_model(
    model: ModelConfig, *, key: str, exported: bool = True, without_data: bool = False
) -> PreTrainedModel:
    """The transformer of `load_policy`; `without_data`: on the meta device, to get its errors alone."""
    _, kind = language_model(model.path, trust_remote_code=model.trust_remote_code)
    transformer, report = load_packed(kind, model.path, model, key=key, without_data=without_data)
    check_report(transformer, report, model.path, key=key)
    if exported:
        # Only for their errors, which would come too late at the export.
        frozen_tensors(transformer, model_tensors(transformer), model.path)
        check_written_again(transformer, model.path, key=key)
    return transformer


@torch.no_grad()
def check_packed(
    model: Callable[[DeviceTokens], Any], device: torch.device, *, dtype: str, key: str, path: str,
    group: SequenceGroup | None = None,
) -> None:  # fmt: skip
    """Check that sequences in one row do not affect each other: change the first, the outputs of the second must stay.

    Some models mix tokens outside of attention (convolutions, state spaces) and would train on log-probabilities that
    the engine never sampled from. With a group, also check that its ranks together compute what one rank does. At
    ZeRO-3 every rank calls this. ValueError if the outputs change, or if the model refuses the row; it names `path`,
    the value of the config's `key`.

    Args:
        model: a row's tokens -> one number per token [T] or per sequence [S], maybe the first of several results.
        dtype: of the model; differences within its rounding are allowed.
    """
    second = [0, 1, 2, 3]

    def numbers_of(row: PackedTokens, group: SequenceGroup | None) -> Tensor:
        result = model(DeviceTokens.of(row, device, group))
        return (result if isinstance(result, Tensor) else result[0]).float()

    def differ(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() > 16 * torch.finfo(getattr(torch, dtype)).eps * a.norm())

    try:
        # In one pair the sequences begin alike. The rows of a pair have blocks of the same sizes and equal roundings.
        for pair in (([0, 3, 1, 2], [0, 2, 3, 1]), ([3, 2, 1, 2], [1, 3, 2, 3])):
            rows = [pack([np.array(first, np.int32), np.array(second, np.int32)]) for first in pair]
            alone = [numbers_of(row, None) for row in rows]
            # Both rows at once, since roundings are not equal here: two scores of a row may be near 0 by chance.
            if group is not None and differ(torch.cat(alone), torch.cat([numbers_of(row, group) for row in rows])):
                raise UnsharedRowError(f"it {MIXES}")
            if differ(*(numbers[-4:] if len(numbers) > 2 else numbers[-1:] for numbers in alone)):
                raise UnpackableError("a sequence is affected by the sequences before it in the row")
    except UnpackableError as error:
        raise ValueError(error.of(key, path)) from None
    except UnsharedRowError as error:
        assert group is not None
        raise ValueError(error.of(group.size, key, path)) from None


def prepare_transformer(transformer: PreTrainedModel, *, gradient_checkpointing: Checkpointing) -> None:
    """Use kernels where they fit, run mixers on packed rows; gradient checkpointing on if asked, randomness off.

    With dropout or sampled experts, old and current log-probabilities would differ before the first update. ValueError
    if MLPs are to be tiled and the model has no dense one.
    """
    use_kernels(transformer)
    run_by_segments(transformer)
    if gradient_checkpointing == "tiled":
        compute_in_tiles(transformer)
    if gradient_checkpointing:
        contexts = selective_contexts if gradient_checkpointing == "selective" else checkpoint_contexts
        options = {"use_reentrant": False, "context_fn": contexts}
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for module in transformer.modules():
        module.training = bool(gradient_checkpointing) and hasattr(module, "gradient_checkpointing")
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)


def logit_transform(config: PretrainedConfig) -> tuple[float, float | None]:
    """-> scale and cap of a model's logits: with z = head(state), they are cap tanh(scale z / cap), or scale z.

    Each family has its own name for them; `logits_scaling` divides, but in HyperCLOVA X it multiplies.
    """
    text = config.get_text_config()
    keys = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
    *factors, scaling = (getattr(text, key, None) or 1.0 for key in keys)
    multiplies = config.model_type.startswith("hyperclovax")
    return math.prod(factors) * (scaling if multiplies else 1 / scaling), getattr(text, "final_logit_softcapping", None)
