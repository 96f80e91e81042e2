"""Measures how full the KV cache of an engine is, and how often requests wait for it.

vLLM sends these numbers with the outputs of every forward pass, if its statistics are on.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class CacheMeter(StatLoggerBase):
    """Counts forward passes, and those after which a request waited for blocks of the KV cache.

    A request waits for blocks if a seat is free (`max_num_seqs`) and the free blocks may be too few for one sequence.
    The others wait for a seat, or for their turn to be prefilled; among these are running requests that a weight update
    has reset, since it empties the cache. A request that was preempted for lack of blocks waits for blocks.
    """

    def __init__(self) -> None:
        self._seats, self._ample = 0, 0.0
        self._usage, self._passes, self._waiting = 0.0, 0, 0

    def attach(self, vllm_config: Any, _engine: int = 0) -> CacheMeter:
        """Measure an engine with this config; vLLM calls it when the size of the cache is known."""
        self._seats = vllm_config.scheduler_config.max_num_seqs
        # up to this usage, the free blocks are enough for the longest sequence
        self._ample = 1 - 1 / max(1.0, vllm_config.cache_config.kv_cache_max_concurrency or 1.0)
        return self

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        usage = scheduler_stats.kv_cache_usage
        waits = scheduler_stats.num_waiting_reqs > 0 and scheduler_stats.num_running_reqs < self._seats
        self._usage = max(self._usage, usage)
        self._passes += 1
        self._waiting += waits and usage > self._ample

    def log_engine_initialized(self) -> None:
        """Where loggers of vLLM log the config."""

    def take(self) -> tuple[float, int, int]:
        """(largest fraction of the blocks in use, passes, passes with a waiting request) since the last call."""
        taken = self._usage, self._passes, self._waiting
        self._usage, self._passes, self._waiting = 0.0, 0, 0
        return taken
