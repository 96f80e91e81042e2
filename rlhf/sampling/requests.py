"""Arguments of an engine and of its requests, and the completions that it returns. Imports no vLLM."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlhf.answers.thoughts import Marks
from rlhf.config.grpo import GRPOConfig
from rlhf.types import Prompt, Support, VersionSpan


@dataclass(frozen=True)
class Completion:
    """One sampled response: ids [R], their log-probabilities [R], and version spans over 0..R."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    version_spans: tuple[VersionSpan, ...]
    engine: int = 0  # it sampled the response; its cache holds the prefix of a later turn
    # The response as an assistant message with `content` and, if present, `reasoning_content` (empty for an empty
    # thought) and `tool_calls` (`arguments` is text as the model wrote it); None without `SamplingSettings.parsing`.
    message: dict[str, Any] | None = None
    support: Support | None = None  # of the R tokens; None if each was sampled from the whole vocabulary
    # As in `TokenSequence`, from token `SamplingSettings.experts_from` of the context to the last but one of the R
    # tokens; None if they were not requested, or nothing was sampled.
    experts: np.ndarray | None = None
    asleep_s: float = 0.0  # seconds that the engine slept while it had the request; only on shared GPUs


@dataclass(frozen=True)
class Parsing:
    """How responses become assistant messages."""

    tool_parser: str | None  # the name of vLLM's parser of calls (`config.parsers.tool_parser_of`); None: no calls
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of the tools, as the prompt's template got them
    # data.chat_template_kwargs; some parsers read there whether the model thinks
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    marks: Marks = ()  # of the model's thoughts (`answers.thoughts`)


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()  # strings that end a response, in addition to the eos ids of the generation config
    truncate_token: int | None = None  # id of a token that ends a response too; None: there is none
    truncate_after: int = 0
    # Nothing ends a response before max_tokens; the part that is graded ends after the first `truncate_token` at
    # position `truncate_after` or later (as in the code of arXiv:1909.08593).
    whole: bool = False
    top_p: float = 1.0  # total probability of the tokens that are sampled from
    top_k: int | None = None  # their number; None: all
    min_p: float = 0.0  # minimum share of the highest probability
    parsing: Parsing | None = None  # how to make `Completion.message`; None: no message
    experts_from: int | None = None  # the first context token whose experts are returned; None: no experts

    def stopped_at_token(self, completion: Completion) -> Completion:
        """The completion; its finish reason becomes `stop` where it has `truncate_token`."""
        if self._graded_length(completion.token_ids) is None:
            return completion
        return replace(completion, finish_reason="stop")

    def request_arguments(self, supported: int | None) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams for the distribution of tokens.

        Args:
            supported: size of the vocabulary for an engine that returns supports, else None. Such an engine needs a
                temperature and a top_k, so greedy sampling becomes top_k=1.
        """
        temperature, top_k = self.temperature, self.top_k or supported or 0
        if supported and not temperature:
            temperature, top_k = 1.0, 1
        return {"temperature": temperature, "top_p": self.top_p, "top_k": top_k, "min_p": self.min_p}

    def graded(self, token_ids: np.ndarray) -> np.ndarray:
        """The part of a trained response [R] that is graded."""
        return token_ids[: self._graded_length(token_ids)]

    def _graded_length(self, token_ids: np.ndarray) -> int | None:
        """The number of tokens up to and with the first `truncate_token` at `truncate_after` or later; None without."""
        positions = np.flatnonzero(token_ids[self.truncate_after :] == self.truncate_token)
        return self.truncate_after + int(positions[0]) + 1 if len(positions) else None


class Generate(Protocol):
    """One request on an engine: `samples` continuations of token ids [P]. See `cluster.engine_choice.EngineChoice`."""

    def __call__(
        self, token_ids: np.ndarray, settings: SamplingSettings, *, samples: int, seed: int | None, what: str,
        prefer: int | None = None,
    ) -> Awaitable[list[Completion]]: ...  # fmt: skip


def support_of(token_ids: np.ndarray, kept_ids: Sequence[Sequence[int]] | None, vocabulary: int) -> Support | None:
    """The support of sampled tokens [R], from the ids that an engine kept for each; None if each kept all ids.

    Raises RuntimeError if the support of a token is missing, or does not contain the token.
    """
    kept_ids = kept_ids or ()
    sizes = np.array([len(ids) for ids in kept_ids], np.int64)
    ids = np.fromiter(itertools.chain.from_iterable(kept_ids), np.int32, int(sizes.sum()))
    tokens = np.repeat(np.arange(len(sizes)), sizes)
    if len(sizes) != len(token_ids) or len(np.unique(tokens[ids == token_ids[tokens]])) < len(token_ids):
        raise RuntimeError(
            f"the engine returned {len(token_ids)} tokens and the supports of {len(sizes)}, or of other tokens: a "
            "token would be trained with its probability in another set of tokens"
        )
    part = sizes < vocabulary
    return Support.from_sizes(ids[part[tokens]], np.where(part, sizes, 0)) if part.any() else None


def check_experts(experts: np.ndarray | None, tokens: int) -> np.ndarray:
    """The experts [tokens, layers, k] that an engine returned. Raises RuntimeError if they have another shape."""
    if experts is None or experts.ndim != 3 or len(experts) != tokens:
        returned = "no experts" if experts is None else f"experts of shape {experts.shape}"
        raise RuntimeError(
            f"the engine returned {returned} for {tokens} tokens: a token would be trained with another token's experts"
        )
    return experts


def request_seed(noise_seed: int | None, prompt: Prompt, *, sample: int = 0, turn: int = 0) -> int | None:
    """The seed of a request, which alone determines its noise; sample i of a request has the seed plus i.

    Epoch and id identify the position of the prompt in the stream, since an epoch holds no prompt twice. The first turn
    of sample i gets the same seed as sample i of one request for the whole group.

    Args:
        noise_seed: of the run; None: the noise comes from the engine's generator, in the order of requests.
        turn: number of this request in its rollout.
    """
    if noise_seed is None:
        return None
    key = f"{noise_seed}/{prompt.epoch}/{prompt.id}" + (f"/{sample}/{turn}" if turn else "")
    # 7 bytes: vLLM takes an int64, and adds the number of the sample
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) + (0 if turn else sample)


def engine_arguments(config: GRPOConfig, seed: int, adapted_layers: Sequence[str] = ()) -> dict[str, Any]:
    """vLLM's arguments for an engine of this run, except those of the weight transfer."""
    rollout, cluster, lora = config.rollout, config.cluster, config.model.lora
    on_cpu = cluster.device == "cpu"
    # A prompt that two runs compute in different pieces is rounded differently. On CPU a piece would even end the
    # engine: vLLM takes back a request's random number, which torch's CPU generators cannot do.
    optional: dict[str, Any] = {"enable_chunked_prefill": False} if config.run.deterministic else {}
    if rollout.restriction:
        optional["return_sampling_mask"] = True
    if config.learner.replays_experts:
        optional["enable_return_routed_experts"] = True
    if lora is not None:
        from rlhf.weights.adapter import slot_arguments  # imports torch

        optional |= slot_arguments(lora, adapted_layers)
    ours = optional | {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": seed,
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": rollout.max_concurrent_sequences,
        "tensor_parallel_size": cluster.tensor_parallel,
        # Inside a placement group vLLM would choose Ray, which needs a bundle for every GPU.
        "distributed_executor_backend": "mp" if cluster.tensor_parallel > 1 else None,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30) if on_cpu else None,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        # Log-probs of the distribution that is sampled from, after the temperature; the default is before it.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": rollout.on_weight_update != "keep_kv" and not config.run.deterministic,
        "enable_sleep_mode": cluster.placement == "colocated" and not on_cpu,  # both in tests of this project alone
        "disable_log_stats": True,
        "language_model_only": True,  # no encoders of images, in memory or in start-up; no effect on other models
        "scheduling_policy": "priority",  # so that the canary does not wait behind a backlog of rollouts
    }
    return ours | rollout.engine


def engine_seed(seed: int, engine: int, version: int) -> int:
    """The seed of an engine: different for each engine, and for a resumed run."""
    return int(np.random.SeedSequence([seed, engine, version]).generate_state(1)[0]) & 0x7FFFFFFF
