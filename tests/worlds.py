"""Worlds of learner ranks in fresh processes, without Ray, and the rollouts that they are fed."""

from __future__ import annotations

import atexit
import dataclasses
import json
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
from waiting import STACK_WAIT_S, WAIT_S, free_port

from rlhf.config.grpo import GRPOConfig
from rlhf.config.ppo import PPOConfig
from rlhf.run.checkpoint_files import checksum
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import (
    Minibatch,
    PackedTokens,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepBatch,
    TokenSequence,
    VersionSpan,
    World,
)

# Ranks are forks of a server that has only imported this: fresh processes, without 5 s of imports each.
PRELOADED = ["rlhf.learner.policy", "rlhf.learner.critic", "transformers.models.qwen2.modeling_qwen2"]
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(PRELOADED)
# Waits for the server's end, which takes seconds on a busy machine; otherwise it would outlive the tests.
atexit.register(forkserver._forkserver._stop)  # type: ignore[attr-defined]


ALONE = World(0, 1, 0, "127.0.0.1", 0, threads=1)  # of an actor that meets no other


def run_world(target: Callable[..., Any], world_size: int, *arguments: Any, sequence_parallel: int = 1) -> list[Any]:
    """Call target(place, *arguments) on every rank of a new world; the results by rank."""
    results: Any = FORKED.Queue()
    port = free_port()
    worlds = [
        World(rank, world_size, rank, "127.0.0.1", port, threads=1, sequence_parallel=sequence_parallel)
        for rank in range(world_size)
    ]
    ranks = [FORKED.Process(target=_rank, args=(results, target, world, arguments)) for world in worlds]
    for process in ranks:
        process.start()
    try:
        by_rank = _collect(results, ranks)
    finally:
        for process in ranks:
            process.join(timeout=WAIT_S)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [value for value in by_rank.values() if isinstance(value, RankFailure)]
    assert not failures, failures[0].text
    return [by_rank[rank] for rank in range(world_size)]


def _collect(results: Any, ranks: list[Any]) -> dict[int, Any]:
    """The result of every rank; the wait ends early when all ranks exit without one (a crash, a pickling error)."""
    by_rank: dict[int, Any] = {}
    end = time.monotonic() + STACK_WAIT_S
    while len(by_rank) < len(ranks):
        silent = not any(process.is_alive() for process in ranks)
        try:
            rank, value = results.get(timeout=2.0)
        except queue.Empty:
            assert not silent, f"ranks ended without a result, exit codes {[process.exitcode for process in ranks]}"
            assert time.monotonic() < end, f"no result within {STACK_WAIT_S:.0f} s"
            continue
        by_rank[rank] = value
    return by_rank


class RankFailure:
    def __init__(self, text: str) -> None:
        self.text = text


def _rank(results: Any, target: Callable[..., Any], world: World, arguments: tuple[Any, ...]) -> None:
    try:
        results.put((world.rank, target(world, *arguments)))
    except BaseException:
        results.put((world.rank, RankFailure(traceback.format_exc())))


def save(rank: Any, folder: Path) -> None:
    """Write the part of a rank of a checkpoint, and wait until it is on disk."""
    rank.save(str(folder))
    while (report := rank.save_report()) is None:
        time.sleep(0.01)
    assert report.error is None
    for name, file in report.files.items():
        assert (file.bytes, file.crc32) == ((folder / name).stat().st_size, checksum(folder / name))


def make_config(folder: Path, /, **sections: dict[str, Any]) -> GRPOConfig:
    """The config of a small fp32 CPU run; `sections` override keys, e.g. learner={"zero_stage": 3}."""
    return GRPOConfig.model_validate_json(json.dumps(_sections(folder, sections)))


def make_ppo_config(folder: Path, /, **sections: dict[str, Any]) -> PPOConfig:
    """The same for PPO."""
    return PPOConfig.model_validate_json(json.dumps(_sections(folder, sections)))


def _sections(folder: Path, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder.parent / "run"), "steps": 10},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": str(folder.parent / "train.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 64},
        "algo": {},
        "learner": {"max_tokens_per_microbatch": 512},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "disabled"}},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def make_groups(*, groups: int, samples: int, vocabulary: int, longest: int, seed: int) -> list[RolloutGroup]:
    """Groups of ragged random rollouts with random rewards; prompts of 3 to 12 tokens."""
    rng = np.random.default_rng(seed)
    groups_so_far = []
    for g in range(groups):
        ids = rng.integers(0, vocabulary, rng.integers(3, 12)).astype(np.int32)
        prompt = Prompt(f"p/{g}", 0, ids, (), "0", "p")
        scored = []
        for sample in range(samples):
            response = rng.integers(0, vocabulary, rng.integers(1, longest)).astype(np.int32)
            length = len(ids) + len(response)
            mask = np.arange(length) >= len(ids)
            rollout = rollout_of(
                np.concatenate([ids, response]),
                mask,
                np.where(mask, -rng.random(length) * 4, 0.0),
                (VersionSpan(len(ids), length, 0),),
                prompt_id=prompt.id,
                sample=sample,
            )
            scored.append(ScoredRollout(rollout, "", "", float(rng.random()), {"math": 0.0}, "ok"))
        groups_so_far.append(RolloutGroup(prompt, tuple(scored)))
    return groups_so_far


def rollout_of(
    token_ids: Sequence[int] | np.ndarray,
    response_mask: Sequence[int] | np.ndarray | None = None,
    rollout_logprobs: np.ndarray | None = None,
    version_spans: tuple[VersionSpan, ...] = (),
    *,
    prompt_id: str = "p/0",
    sample: int = 0,
    finish_reason: str = "stop",
) -> Rollout:
    """A rollout of one sequence; without a mask all tokens are sampled, without log-probs they are 0."""
    ids = np.asarray(token_ids, np.int32)
    mask = np.ones(len(ids), bool) if response_mask is None else np.asarray(response_mask, bool)
    logprobs = np.zeros(len(ids)) if rollout_logprobs is None else rollout_logprobs
    sequence = TokenSequence(ids, mask, logprobs.astype(np.float32), version_spans)
    return Rollout(prompt_id, 0, sample, (sequence,), finish_reason)


def joined(*rollouts: Rollout) -> Rollout:
    """One rollout with the sequences of all of these, otherwise like the first."""
    return dataclasses.replace(rollouts[0], sequences=tuple(s for rollout in rollouts for s in rollout.sequences))


def group_of(rollouts: Sequence[Rollout], rewards: Sequence[float | None] | None = None) -> RolloutGroup:
    """One group of these rollouts, graded; without rewards each gets 1."""
    prompt = Prompt("p/0", 0, np.zeros(1, np.int32), (), "0", "p")
    rewards = [1.0] * len(rollouts) if rewards is None else rewards
    return RolloutGroup(
        prompt, tuple(ScoredRollout(r, "", "", reward, {}, "ok") for r, reward in zip(rollouts, rewards, strict=True))
    )


def pack_rows(rollouts: Sequence[Rollout], rows: Sequence[int]) -> PackedTokens:
    """One microbatch of the sequences of these rollouts, in the order of `rows`."""
    return make_batch([group_of(rollouts)], mask_truncated=False).tokens.take(np.array(rows, np.int64))


def plan_first_epoch(config: GRPOConfig, groups: list[RolloutGroup]) -> tuple[StepBatch, list[Minibatch], np.ndarray]:
    """The batch of step 0, the minibatches of its first epoch, and the advantages [R]."""
    batch = make_batch(groups, mask_truncated=False)
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    return batch, plan_epochs(batch, config, step=0)[0], advantages


def random_column(batch: StepBatch, seed: int) -> np.ndarray:
    """[N] float32, as log-probs of some other policy."""
    return (-np.random.default_rng(seed).random(len(batch.tokens.token_ids)) * 6).astype(np.float32)


def relative_error(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Of all gradients together, each by name."""
    assert gradients.keys() == expected.keys()
    error = sum(float(((gradients[n] - expected[n]) ** 2).sum()) for n in expected) ** 0.5
    return error / sum(float((g**2).sum()) for g in expected.values()) ** 0.5


def record_gradients(rank: Any) -> list[dict[str, np.ndarray]]:
    """The gradients by name of each update that this rank takes from now on, through the real DeepSpeed engine."""
    from deepspeed.utils import safe_get_full_grad

    seen: list[dict[str, np.ndarray]] = []
    apply = rank._apply

    def see() -> Any:
        seen.append({name: safe_get_full_grad(p).float().numpy().copy() for name, p in rank.trained.items()})
        return apply()

    rank._apply = see
    return seen


def rows_of_minibatch(minibatch: Minibatch) -> list[int]:
    """The rows that are computed in it, over all ranks, sorted."""
    return sorted(int(row) for rank in minibatch.microbatches for rows in rank for row in rows)


def column_of_shard(batch: StepBatch, epoch: Sequence[Minibatch], shard: int, numbers: np.ndarray) -> np.ndarray:
    """[N] float32: what one data shard computed in its passes, where the tokens of its rows are; 0 elsewhere."""
    from rlhf.cluster.rank_group import rows_of_shard

    column = np.zeros(len(batch.tokens.token_ids), np.float32)
    column[batch.tokens.token_indices(rows_of_shard([epoch], shard))] = numbers
    return column


def share_of_loss(policy: Any, tokens: Any, rows: Sequence[int], *, old: bool = True) -> tuple[Any, dict[str, Any]]:
    """Loss and metrics of a microbatch of four rows in all; row i has the advantage i - 1.5, the reference is itself.

    Args:
        policy: a PolicyModel on CPU. tokens: of these rows, or a filler if there are none.
        old: whether old log-probs are given, rather than taken from the update's own pass.
    """
    import torch

    from rlhf.learner.policy_model import DeviceTokens
    from rlhf.learner.update import on_host, policy_microbatch
    from rlhf.types import Denominators, PolicyTargets

    algo = {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01}
    config = make_config(Path("nowhere"), algo=algo)
    on_device = DeviceTokens.of(tokens, torch.device("cpu"))
    with torch.no_grad():
        logprobs = policy(on_device).logprobs.numpy()
    advantages = np.repeat(np.array([i - 1.5 for i in rows] or [0.0], np.float32), tokens.lengths)
    targets = PolicyTargets(advantages, logprobs if old else None, logprobs)
    loss, metrics = policy_microbatch(policy, on_device, targets, Denominators(10, 4, 4), config)
    return loss, on_host(metrics)
