"""One rank of a trained module in DeepSpeed: joining the world, optimizer steps, weights to and from disk.

All ranks must get the same calls in the same order: a forward, a backward or a gathered parameter may be a collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.algo.adam import set_step
from rlhf.algo.lora import has_adapters
from rlhf.algo.packing import filler
from rlhf.algo.schedules import learning_rate
from rlhf.config.base import error_text
from rlhf.config.model_folder import full_name
from rlhf.config.roles import Training
from rlhf.config.sections import ModelConfig
from rlhf.learner import rank_checkpoint
from rlhf.learner.deepspeed_settings import any_settings, deepspeed_engine, join_world, training_settings
from rlhf.learner.hub_format import (
    frozen_tensors,
    model_tensors,
    start_generation_config,
    write_model,
    write_model_config,
)
from rlhf.learner.offload import Offload, gradient_buffers, optimizer_tensors
from rlhf.learner.partition import Partition, generators, whole_shape
from rlhf.learner.policy_model import DeviceTokens, check_packed
from rlhf.learner.rank_checkpoint import MOMENTS, RNG, WEIGHTS, LearnerIndex, Slice, SliceReader
from rlhf.learner.sequence_parallel import SequenceGroup
from rlhf.learner.update import on_host
from rlhf.log.reductions import Histogram, Last, Mean, StepMetrics, UpdateOutcome, merge_metrics
from rlhf.types import GPUMemory, PackedTokens, SaveReport, World
from rlhf.weights.adapter import write_adapter

M = TypeVar("M")
T = TypeVar("T")


class TrainedRank:
    """A module wrapped by DeepSpeed: the base of policy, critic and reward model. Metric names begin with `name`.

    `trained` and `published` use the names of the model in the module's `transformer`.
    """

    def __init__(self, world: World, *, name: str, training: Training, model: ModelConfig, device: str) -> None:
        self.name = name
        self.training = training
        self.world = world
        self.device = join_world(device, world)
        self._group = SequenceGroup.of(world)
        if training.section.offload_optimizer:
            # Ray tells OpenMP to use one thread where an actor reserves less than two cores, and Adam would take one.
            torch.set_num_threads(world.threads)
        self._model = model
        self._settings = training_settings(training.section, world, dtype=model.dtype, device=self.device.type)
        self.updates_done = 0  # u of the schedule: taken and skipped
        self.adam_steps = 0  # t of Adam: taken
        self.deepspeed: Any = None  # DeepSpeed's wrapper of the module: forward, backward, step, optimizer
        self.trained: dict[str, nn.Parameter] = {}  # of the optimizer: updated, offloaded, saved with their moments
        # What engines, canary and exports get: the trained tensors and the stored buffers; or the adapters alone.
        self.published: dict[str, Tensor] = {}
        self._generation_config: bytes | None = None
        self._offload = Offload()
        self._writer = ThreadPoolExecutor(1)  # writes a checkpoint while the run goes on
        self._saving: Future[SaveReport] | None = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context for loading a model: at ZeRO-3 a rank keeps only its share, since 70 B would not fit on one GPU."""
        if self.training.section.zero_stage < 3:
            yield
            return
        from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

        sharding = HfDeepSpeedConfig(self._settings)  # from_pretrained asks for it
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del sharding

    def wrap(self, module: nn.Module) -> None:
        """Hand a module around a `transformer` to DeepSpeed, and set `trained` and `published`."""
        named = module.get_submodule("transformer").named_parameters()
        self.trained = {name: param for name, param in named if param.requires_grad}
        options = self.training.section.optimizer.model_dump(exclude={"variant"})
        # The fused kernel, on CPU too, reads parameter, gradient and both moments once.
        adam = torch.optim.AdamW(self.trained.values(), fused=True, **options)
        self.deepspeed = deepspeed_engine(module, self._settings, adam)
        self.published = {**self.trained} if has_adapters(module) else model_tensors(self.transformer)
        self._generation_config = start_generation_config(self._model.path)

    def place_frozen(self, module: nn.Module) -> Any:
        """Move a frozen module to the device; at ZeRO-3 it is partitioned like the trained one."""
        if self.training.section.zero_stage < 3:
            return module.to(self.device)
        settings = any_settings(self.world, dtype=self._model.dtype, zero={"stage": 3})
        return deepspeed_engine(module, settings)

    def put(self, tokens: PackedTokens) -> DeviceTokens:
        """A microbatch on this rank's device; the other ranks of its data shard must compute the same one."""
        return DeviceTokens.of(tokens, self.device, self._group)

    def check_packed(self, model: Callable[[DeviceTokens], Any], *, key: str, path: str) -> None:
        """`policy_model.check_packed` of a model on this rank."""
        check_packed(model, self.device, dtype=self._model.dtype, key=key, path=path, group=self._group)

    @property
    def transformer(self) -> PreTrainedModel:
        """The Hugging Face model in the wrapped module."""
        return self.deepspeed.module.transformer

    def apply(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(self, *arguments)` in this process: the doctor's measurements need no methods here."""
        return function(self, *arguments)

    def device_name(self) -> str:
        """The device's name from its driver, such as `NVIDIA H100 80GB HBM3`."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def whole(self, param: Tensor, *, modify: bool = False) -> contextlib.AbstractContextManager[None]:
        """A context in which the tensor is whole: gathered where ZeRO-3 partitions it, unchanged elsewhere."""
        from deepspeed import zero

        writer = 0 if modify else None
        return zero.GatheredParameters([param], modifier_rank=writer, enabled=hasattr(param, "ds_id"))

    def each_whole(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """These tensors by name, each whole until the next one is asked for."""
        for name, tensor in tensors:
            with self.whole(tensor):
                yield name, tensor

    # --- sharing a GPU with engines ---

    def leave_gpu(self, offload: bool) -> None:
        """Release the memory that torch caches on the GPU and, with `offload`, move all but the weights off it."""
        if offload and not self._offload.away:
            self._offload.leave(self._movable(), gradient_buffers(self.deepspeed), self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _movable(self) -> list[Tensor]:
        """The tensors that are not needed while the engines sample."""
        return optimizer_tensors(self.deepspeed, self.trained.values())

    def gpu_memory(self) -> GPUMemory:
        """Total and free bytes of this rank's GPU, and the bytes that this rank will move back to it."""
        free, total = torch.cuda.mem_get_info(self.device)
        return GPUMemory(total, free, self._offload.bytes_away)

    # --- update ---

    def take_step(self, microbatches: Sequence[M], forward: Callable[[M], tuple[Tensor, StepMetrics]]) -> UpdateOutcome:
        """One optimizer step; `forward` gives a microbatch's share of the minibatch's loss, and its metrics."""
        started = time.monotonic()
        self._offload.come_back()
        began, parts = _now(self.device), []
        for number, microbatch in enumerate(microbatches, start=1):
            self.deepspeed.set_gradient_accumulation_boundary(number == len(microbatches))
            loss, metrics = forward(microbatch)
            # The loss is a share under the global denominators, so the ranks' gradients must be summed: over shards
            # and, since each rank derives the loss by its part of a row, within them. DeepSpeed averages them instead
            # (it divides by nothing else: accumulation steps are 1); this undoes it. Its own sum is not for ZeRO-3.
            self.deepspeed.backward(loss * self.world.size)
            parts.append(metrics)
        computed = _now(self.device)
        lr = self.next_lr()
        options = self.training.section.optimizer.model_dump(include={"variant", "eps", "betas"})
        set_step(self.deepspeed.optimizer, lr=lr, adam_step=self.adam_steps + 1, **options)
        grad_norm, taken = self._apply()
        self.adam_steps += taken
        metrics = on_host(merge_metrics(parts)) | {f"{self.name}/grad_norm": Mean(grad_norm, 1.0)}
        metrics[f"{self.name}/rank_seconds"] = Histogram((_seconds(began, computed),))
        metrics[f"{self.name}/update_seconds"] = Mean(time.monotonic() - started, 1.0)
        return UpdateOutcome(self.name, taken, metrics | self._schedule_metrics(lr))

    def skip_updates(self, count: int) -> list[UpdateOutcome]:
        """Count optimizer steps as skipped: they take their place in the schedule."""
        return [UpdateOutcome(self.name, False, self._schedule_metrics(self.next_lr())) for _ in range(count)]

    def next_lr(self) -> float:
        """The learning rate of the next optimizer step, which is counted."""
        self.updates_done += 1
        return learning_rate(self.updates_done, **self.training.schedule_arguments)

    def _schedule_metrics(self, lr: float) -> StepMetrics:
        taken, skipped = self.update_counts()
        return {
            f"{self.name}/lr": Last(lr),
            f"{self.name}/updates_taken": Last(float(taken)),
            f"{self.name}/updates_skipped": Last(float(skipped)),
        }

    def update_counts(self) -> tuple[int, int]:
        """Optimizer steps taken, and those skipped because a number was not finite."""
        return self.adam_steps, self.updates_done - self.adam_steps

    def _apply(self) -> tuple[float, bool]:
        """Take the optimizer step unless a gradient is not finite. Returns the gradient norm, and whether it did."""
        if self.deepspeed.zero_optimization_stage() == 0:
            # DeepSpeed skips a non-finite gradient at stages 1 to 3 only; at stage 0 it would poison every weight.
            grads = [p.grad for p in self.trained.values() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads])).item()
            if not np.isfinite(norm):
                self.deepspeed.zero_grad()
                return norm, False
            self.deepspeed.step()
            return norm, True
        self.deepspeed.step()
        if self.deepspeed.optimizer.overflow:
            return float("inf"), False
        return float(self.deepspeed.get_global_grad_norm()), True

    # --- to disk ---

    def state(self) -> dict[str, list[Slice]]:
        """Kind -> this rank's part of a checkpoint; needs no collective for trained tensors, and no copy on a GPU."""
        partition = Partition(self.deepspeed, self.world)
        kinds = (WEIGHTS, *MOMENTS) if self.adam_steps else (WEIGHTS,)
        slices = {kind: partition.slices(self.trained, kind) for kind in kinds}
        if self.world.rank == 0:
            slices[WEIGHTS] += [Slice(name, 0, tensor.detach().reshape(-1)) for name, tensor in self._untrained()]
        slices[RNG] = [Slice(name, 0, generator.get_state()) for name, generator in generators(self.device).items()]
        return slices

    def _untrained(self) -> list[tuple[str, Tensor]]:
        """The published tensors that are not trained, such as a router's balancing bias."""
        return [(name, tensor) for name, tensor in self.published.items() if name not in self.trained]

    def checkpoint_bytes(self) -> int:
        """Bytes that `save` will write."""
        return rank_checkpoint.state_bytes(self.state())

    def save(self, folder: str) -> None:
        """Begin to write this rank's part of a checkpoint; `save_report` says when it is on disk.

        If a copy of the state fits in the node's memory, the call returns as soon as the copy is made, and the files
        are written while the run goes on. Otherwise it returns after the files have been written.
        """
        assert self._saving is None or self._saving.done(), "the save before this one is under way"
        ranks, shapes = self.world.size, {name: whole_shape(tensor) for name, tensor in self.published.items()}
        index = LearnerIndex(ranks=ranks, adam_steps=self.adam_steps, updates_done=self.updates_done, shapes=shapes)
        try:
            state = self.state()
            copy = rank_checkpoint.host_copy(state, ranks_on_node=self.world.ranks_on_node)
        except Exception as error:  # raised here, it would count as the death of this rank
            self._saving = self._writer.submit(SaveReport, {}, f"{folder}: {error_text(error)}")
            return
        self._saving = self._writer.submit(self._write, Path(folder), copy or state, index)
        if copy is None:
            self._saving.exception()  # waits

    def _write(self, folder: Path, state: dict[str, list[Slice]], index: LearnerIndex) -> SaveReport:
        """Write this rank's files; rank 0 also writes the files that all ranks have in common."""
        if self.world.rank != 0:
            return rank_checkpoint.write_rank(folder, self.world.rank, state, None)
        try:
            write_model_config(folder / rank_checkpoint.MODEL_FOLDER, self.transformer, self._generation_config)
        except Exception as error:
            return SaveReport({}, f"{folder}: {error_text(error)}")
        return rank_checkpoint.write_rank(folder, 0, state, index)

    def save_report(self) -> SaveReport | None:
        """The files that this rank has written since `save`; None while it is still writing."""
        assert self._saving is not None, "save comes first"
        return self._saving.result() if self._saving.done() else None

    def load(self, folder: str) -> None:
        """Load a checkpoint of `save`: weights, moments, both counters; for an equal number of ranks, generators.

        Each rank reads its own part, whatever number of ranks wrote it. ValueError if it belongs to another model.
        """
        self._offload.come_back()
        path = Path(folder)
        index = LearnerIndex.read(path)
        rank_checkpoint.check_shapes(
            path, index, {name: whole_shape(tensor) for name, tensor in self.published.items()}
        )
        partition, reader = Partition(self.deepspeed, self.world), SliceReader(path, WEIGHTS, ranks=range(index.ranks))
        partition.fill(self.trained, WEIGHTS, reader)
        for name, buffer in self._untrained():
            buffer.copy_(reader.read(name, 0, buffer.numel()).view(buffer.shape))
        self._create_optimizer_state()
        for kind in MOMENTS:
            moments = SliceReader(path, kind, ranks=range(index.ranks)) if index.adam_steps else None
            partition.fill(self.trained, kind, moments)
        self.adam_steps, self.updates_done = index.adam_steps, index.updates_done
        adam = getattr(self.deepspeed.optimizer, "optimizer", self.deepspeed.optimizer)
        for state in adam.state.values():
            state["step"].fill_(float(self.adam_steps))
        if index.ranks == self.world.size:
            reader = SliceReader(path, RNG, ranks=[self.world.rank])
            for name, generator in generators(self.device).items():
                if name in reader.parts:
                    generator.set_state(reader.read(name, 0, len(generator.get_state())))

    def _create_optimizer_state(self) -> None:
        """Create Adam's moments by a first step with zero gradient and zero learning rate.

        The step also copies DeepSpeed's fp32 weights into the weights that it keeps in the model's own type.
        """
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = 0.0
        self.deepspeed.set_gradient_accumulation_boundary(True)
        output = self.deepspeed(self.put(filler()))
        self.deepspeed.backward((output if isinstance(output, Tensor) else output[0]).sum() * 0.0)
        self.deepspeed.step()
        assert not getattr(self.deepspeed.optimizer, "overflow", False), "the first step had a non-finite gradient"

    def export(self, folder: str, tokenizer_path: str) -> str:
        """Write the model in Hugging Face format (an adapter in peft's) with the tokenizer, in the trained dtype.

        Returns a warning about what was written, or "".
        """
        tensors = self.each_whole(self.published.items())
        if self.world.rank != 0:
            for _ in tensors:  # takes part in gathering
                pass
            return ""
        from transformers import AutoTokenizer

        try:
            if has_adapters(self.transformer):
                assert self._model.lora is not None
                whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors}
                warning = write_adapter(Path(folder), whole, self._model.lora, base=full_name(self._model.path))
            else:
                frozen = frozen_tensors(self.transformer, self.published, self._model.path)
                warning = write_model(Path(folder), self.transformer, self.published, tensors, frozen=frozen)
                write_model_config(Path(folder), self.transformer, self._generation_config)
        finally:
            for _ in tensors:  # after an error too: the other ranks are gathering
                pass
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=self._model.trust_remote_code)
        tokenizer.save_pretrained(folder)
        return warning

    def try_export(self, folder: str, tokenizer_path: str) -> tuple[str, str]:
        """`export`; returns why it failed, or "", and its warning: raised, that would count as this rank's death."""
        try:
            return "", self.export(folder, tokenizer_path)
        except Exception as error:
            return error_text(error), ""

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _now(device: torch.device) -> Any:
    """A time stamp in the device's queue of work: an event on a GPU, the clock on CPU."""
    if device.type == "cpu":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(began: Any, ended: Any) -> float:
    """Seconds between two time stamps; waits until the device has reached the second one."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
