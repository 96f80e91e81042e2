"""One vLLM engine: it continues token ids, receives weights and scores the canary's sequences.

An asyncio actor of the cluster hosts it: hundreds of requests are in progress at once, and an update of the weights
need not wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm import AsyncEngineArgs, ModelRegistry, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from rlhf.config.base import error_text
from rlhf.config.grpo import GRPOConfig
from rlhf.config.model_folder import local_model_folder, read_json
from rlhf.log.clock import BusyMeter, EngineWork
from rlhf.sampling import vllm_process
from rlhf.sampling.cache_meter import CacheMeter
from rlhf.sampling.messages import MessageReader
from rlhf.sampling.requests import (
    Completion,
    SamplingSettings,
    check_experts,
    engine_arguments,
    engine_seed,
    support_of,
)
from rlhf.types import VersionSpan, World
from rlhf.weights.adapter import WEIGHTS, write_for_engine
from rlhf.weights.client import Loaded
from rlhf.weights.transfer import RECEIVERS, WORKER_EXTENSION, backend_of

# Samples share only full blocks of their prompt: with vLLM's default of 128 tokens per block, a shorter prompt would be
# computed once per sample. vLLM's CPU kernels take multiples of 32.
CPU_BLOCK_TOKENS = 32

INSPECTED = "failed to be inspected"  # in vLLM's message about a class that it cannot import
SLOT = 1  # the number of the one adapter that an engine serves
MAX_READERS = 16  # agents offer only a few sets of tools
CANARY_PRIORITY, ROLLOUT_PRIORITY = -1, 0  # lower goes first


class RolloutEngine:
    """One vLLM engine; every method is a coroutine. With `model.lora`, the adapter changes the `adapted_layers`."""

    def __init__(self, config: GRPOConfig, world: World, adapted_layers: Sequence[str] = ()) -> None:
        self._keep_kv = config.rollout.on_weight_update == "keep_kv"
        self._rank = world.rank
        self._readers: list[MessageReader] = []  # the most recent ones first
        self._request_ids = itertools.count()
        self._meter, self._cache_meter = BusyMeter(), CacheMeter()
        self._sleep_level = config.engine_sleep_level
        self._failed_update: Exception | None = None
        self._lora, self._adapted_layers = config.model.lora, adapted_layers
        self._adapters = tempfile.TemporaryDirectory(
            prefix="rlhf-adapters-", dir=os.environ.get("VLLM_RPC_BASE_PATH"), ignore_cleanup_errors=True
        )
        self._adapter_names = (f"adapter-{number}" for number in itertools.count())
        self._adapter: LoRARequest | None = None  # for every request; None: the base model, until the learner sends one
        try:
            self._engine = _start_engine(config, world, adapted_layers, self._cache_meter)
        except (ValueError, TypeError) as error:
            if INSPECTED in str(error):
                _load_class(config.model.path)
            if not config.rollout.engine:
                raise
            options = json.dumps(config.rollout.engine)
            reason = " ".join(str(error).split())
            raise ValueError(f"rollout.engine={options}: vLLM does not start with these arguments: {reason}") from error
        started = self._engine.vllm_config
        assert not (self._keep_kv and started.cache_config.enable_prefix_caching), "new requests would get old keys"
        assert started.model_config.logprobs_mode == "processed_logprobs", (
            "log-probs of another than the sampled distribution"
        )
        # size of the vocabulary, if the engine returns the support of each token
        self._supported = started.model_config.get_vocab_size() if config.rollout.restriction else None
        if config.run.deterministic:
            self._check_cache(config)

    def _check_cache(self, config: GRPOConfig) -> None:
        """Raise ValueError if the KV cache cannot hold all sequences: evicted ones are recomputed in other pieces."""
        held = self._engine.vllm_config.cache_config.kv_cache_max_concurrency
        asked = config.rollout.max_concurrent_sequences
        if held is not None and held < asked:
            self._engine.shutdown()
            larger = "kv_cache_gib" if config.cluster.device == "cpu" else "gpu_memory_utilization"
            raise ValueError(
                f"rollout.max_concurrent_sequences={asked} with run.deterministic=true: an engine's KV cache holds "
                f"{int(held)} sequences of {config.max_sequence_tokens} tokens ({config.sequence_keys}), and one "
                "that loses its place would be rounded differently. "
                f"Use at most {int(held)}, or raise rollout.{larger}."
            )

    # --- sampling ---

    async def generate(
        self, token_ids: np.ndarray, settings: SamplingSettings, samples: int, seed: int | None
    ) -> list[Completion]:
        """Sample continuations of these ids [P], with log-probs, finish reasons and the weight version of each token.

        With `rollout.on_weight_update: keep_kv` and in deterministic runs there is no prefix cache, so each turn of a
        rollout recomputes its whole context.
        """
        token = None if settings.whole else settings.truncate_token
        params = SamplingParams(
            n=samples,
            seed=seed,
            **settings.request_arguments(self._supported),
            max_tokens=settings.max_tokens,
            stop=list(settings.stop) or None,
            stop_token_ids=None if token is None else [token],
            ignore_eos=settings.whole,
            detokenize=bool(settings.stop),
            skip_special_tokens=False,  # a stop string may be one, such as <|im_end|>
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=len(token_ids) if settings.experts_from is None else settings.experts_from,
        )
        with self._meter.request() as slept_s:
            final = await self._run(token_ids, params, priority=ROLLOUT_PRIORITY)
            asleep_s = slept_s()
        self._meter.tokens += sum(len(output.token_ids) for output in final.outputs)
        asked = None if settings.experts_from is None else len(token_ids) - settings.experts_from
        completions = [
            settings.stopped_at_token(_completion(output, self._rank, self._supported, asked, asleep_s))
            for output in final.outputs
        ]
        assert len(completions) == samples, f"asked for {samples} samples, the engine returned {len(completions)}"
        if settings.parsing is None:
            return completions
        reader = next((reader for reader in self._readers if reader.parsing == settings.parsing), None)
        if reader is None:
            reader = MessageReader(settings.parsing, self._engine.get_tokenizer(), self._engine.model_config)
            self._readers = [reader, *self._readers][:MAX_READERS]
        return [
            # a stop string belongs to the text; an id that stopped the response does not
            replace(each, message=reader.message(each, token_ids, keep_last=isinstance(output.stop_reason, str)))
            for each, output in zip(completions, final.outputs, strict=True)
        ]

    async def _run(self, token_ids: np.ndarray, params: SamplingParams, *, priority: int) -> Any:
        prompt: Any = {"prompt_token_ids": token_ids.tolist()}
        request_id = str(next(self._request_ids))
        stream = self._engine.generate(
            prompt, params, request_id=request_id, priority=priority, lora_request=self._adapter
        )
        try:
            outputs = [output async for output in stream]  # exactly one, because of FINAL_ONLY
        except asyncio.CancelledError:
            await self._engine.abort(request_id)  # vLLM does so itself, unless it was still sending the request
            raise
        assert outputs, "the engine ended a request without an output"
        return outputs[-1]

    async def cached_sequences(self) -> float | None:
        """How many sequences of the greatest length its KV cache holds; None if vLLM does not say."""
        return self._engine.vllm_config.cache_config.kv_cache_max_concurrency

    async def take_work(self) -> EngineWork:
        """What the engine did since the last call. Tokens and seconds are those of `generate`."""
        tokens, seconds = self._meter.take()
        usage, passes, waiting_passes = self._cache_meter.take()
        return EngineWork(tokens, seconds, usage, passes, waiting_passes)

    async def canary(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs [L] of each sequence at temperature 1; entry 0 is 0, since the first token has none.

        They are over the whole vocabulary even if rollouts have a support: top_k only affects sampled tokens.
        """
        top_k = 1 if self._supported else 0
        params = SamplingParams(max_tokens=1, temperature=1.0, top_k=top_k, prompt_logprobs=0, detokenize=False)
        runs = (self._run(sequence, params, priority=CANARY_PRIORITY) for sequence in sequences)
        by_sequence = []
        for sequence, output in zip(sequences, await asyncio.gather(*runs), strict=True):
            logprobs = np.zeros(len(sequence), np.float32)
            for position in range(1, len(sequence)):
                logprobs[position] = output.prompt_logprobs[position][int(sequence[position])].logprob
            by_sequence.append(logprobs)
        return by_sequence

    # --- weights ---

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_weight_update(self) -> None:
        await self._engine.start_weight_update()

    async def update_weights(self, info: Any) -> None:
        try:
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        except Exception as error:  # after any error the weights are incomplete
            self._failed_update = error
            raise

    async def loaded_weights(self) -> list[Loaded]:
        """The weights that each worker has loaded since the update started."""
        return await self._engine.collective_rpc("loaded_weights")

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `LoadedWeights` on each worker."""
        try:
            return await self._engine.collective_rpc(method, args=arguments)
        except Exception as error:
            self._failed_update = error
            raise

    async def finish_weight_update(self, version: str) -> None:
        await self._engine.finish_weight_update(version)

    async def load_adapter(self, file: bytes, version: str) -> None:
        """Load an adapter into the slot while the engine is paused; its new name invalidates cached prefixes.

        Running requests have the former name, but the same number of the slot, so they get the new adapter.
        """
        assert self._lora is not None
        folder = Path(self._adapters.name, next(self._adapter_names))
        try:
            await asyncio.to_thread(write_for_engine, folder, file, self._adapted_layers, self._lora)
            await self._engine.add_lora(LoRARequest(folder.name, SLOT, str(folder), load_inplace=True))
            for problem in await self._engine.collective_rpc("adapter_problem", args=(str(folder / WEIGHTS),)):
                if problem:
                    raise ValueError(
                        f"model.lora: {problem}. The engine would sample from another policy than the learner trains. "
                        "If this happens at the start, vLLM has other names for the layers of this model: train all "
                        "weights (model.lora=null), or name other layers in model.lora.targets."
                    )
        except Exception as error:
            self._failed_update = error
            raise
        await self._engine.update_weight_version(version)
        former, self._adapter = self._adapter, LoRARequest(folder.name, SLOT, str(folder))
        if former is not None:
            await asyncio.to_thread(shutil.rmtree, former.lora_path)

    async def pause(self) -> None:
        """Pause running requests. Their KV cache is kept, or dropped and recomputed with the new weights."""
        await self._engine.pause_generation(mode="keep", clear_cache=not self._keep_kv)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    # --- sharing a GPU with a learner ---

    async def sleep(self) -> None:
        """Free the GPU memory. The KV cache is dropped, and so are weights that will be sent again, except buffers.

        Running requests keep their tokens: after the last wake they compute their keys again, and go on. New requests
        wait until then.
        """
        await self._engine.sleep(level=self._sleep_level, mode="keep")
        self._meter.sleep()

    async def wake_up(self, tags: list[str]) -> None:
        """Take memory back: first for `weights`, then for `kv_cache`, after which requests go on."""
        if await self._engine.wake_up(tags):
            self._meter.wake_up()

    async def check_health(self) -> None:
        """Raise if a process of the engine has died or failed to load weights; the actor itself stays alive.

        A sender that waits for this engine in a collective may not notice the failure.
        """
        await self._engine.check_health()
        if self._failed_update is not None:
            raise RuntimeError(f"an update of its weights failed: {self._failed_update}") from self._failed_update

    async def close(self) -> None:
        """End the engine's processes; its owner kills the actor itself."""
        self._engine.shutdown()
        self._adapters.cleanup()
        await asyncio.to_thread(vllm_process.remove_shared_memory)


def _start_engine(config: GRPOConfig, world: World, adapted_layers: Sequence[str], meter: CacheMeter) -> AsyncLLM:
    """Start vLLM with the arguments of this run; `meter` measures its KV cache."""
    backend = backend_of(config)
    arguments = AsyncEngineArgs(
        **engine_arguments(config, engine_seed(config.run.seed, world.rank, world.version), adapted_layers),
        weight_transfer_config=WeightTransferConfig(backend=RECEIVERS[backend]),
        worker_extension_cls=WORKER_EXTENSION,
    )
    if current_platform.is_cpu() and arguments.block_size is None:
        model = arguments.create_model_config()
        if not (model.is_hybrid or model.use_mla):  # these models have their own block sizes
            arguments.block_size = CPU_BLOCK_TOKENS
    vllm_process.run_in_children()
    # With LLM_CLASS, one forward pass has as many tokens as vLLM's offline class allows on this hardware: 16,384 on an
    # H100. AsyncLLM's default of 2,048 suits interactive use; here an update in flight prefills all running requests.
    engine: Any = AsyncLLM.from_engine_args(
        arguments, usage_context=UsageContext.LLM_CLASS, stat_loggers=[meter.attach]
    )
    # The meter alone needs statistics of each forward pass, 0.02 ms; those of each token would cost 0.008 ms per token.
    engine.log_stats, engine.logger_manager = False, meter
    return engine


def _load_class(path: str) -> None:
    """Raise the error for which vLLM could not inspect the class of a model, since it only writes it into its log."""
    for name in read_json(local_model_folder(path) / "config.json").get("architectures") or ():
        if name in ModelRegistry.models:
            try:
                ModelRegistry.models[name].load_model_cls()
            except Exception as error:
                raise ValueError(
                    f"model.path={path}: vLLM's class {name} cannot be imported here: {error_text(error)}. Install "
                    "what it asks for (docs/models.md), or use another model."
                ) from error


def _completion(
    output: CompletionOutput, engine: int, supported: int | None, routed: int | None, asleep_s: float
) -> Completion:
    """The completion of one sample. Raises RuntimeError if a token lacks its own log-prob, support or experts.

    Args:
        supported: as in `SamplingSettings.request_arguments`; if given, every token has a support.
        routed: number of context tokens whose experts were requested; None: no experts were requested.
    """
    logprobs: Any = output.logprobs
    kept_ids = None if output.sampling_mask is None else output.sampling_mask.token_ids
    token_ids, starts = np.asarray(output.token_ids, np.int32), np.asarray(logprobs.start_indices, np.int64)
    # flat_logprobs holds the sampled token first at every position
    firsts = starts[starts < np.asarray(logprobs.end_indices, np.int64)]
    if not np.array_equal(np.asarray(logprobs.token_ids, np.int32)[firsts], token_ids):
        raise RuntimeError(
            f"the engine returned {len(token_ids)} tokens and log-probs of {len(firsts)} tokens, or of other tokens: "
            "a token would be trained with the log-prob of another one"
        )
    experts = None
    if routed is not None and len(token_ids):  # the engine has not computed the last token
        experts = check_experts(output.routed_experts, routed + len(token_ids) - 1)
    # the label "default" means weights that no learner has sent
    versions = [(s, int(s.version) if s.version.lstrip("-").isdigit() else -1) for s in output.weight_versions or ()]
    return Completion(
        token_ids=token_ids,
        logprobs=np.asarray(logprobs.logprobs, np.float32)[firsts],
        finish_reason=output.finish_reason or "abort",
        version_spans=tuple(VersionSpan(span.start, span.end, version) for span, version in versions),
        engine=engine,
        support=None if supported is None else support_of(token_ids, kept_ids, supported),
        experts=experts,
        asleep_s=asleep_s,
    )
