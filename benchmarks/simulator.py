"""Engines and learners as discrete events, fed with recorded lengths: how close a run comes to its bound at any size.

    python -m benchmarks.simulator [--quick] [--replay runs/benchmarks/asynchronous.json]

An engine with n sequences makes one token of each in a + b n seconds (a: reading the weights, b: attention and the
sampler), and stands still for `request_s` when a request is prefilled. A training step takes `training_s` on all
learners together, then `transfer_s` in which engines pause, too, and prefill again what they had under way. On shared
GPUs engines pause from the moment when a step has its groups until the transfer ends. Dispatch and staleness are those
of rlhf.rollout.buffer. The bound of a step is max(sampling, training) + transfer, where sampling is a step's tokens on
engines that are always full; on shared GPUs it is the sum.

Without --replay: clusters of 8 to 1,000 GPUs, three of four for engines and one for learners, a step of 512 groups of 8
for every 8 GPUs, log-normal lengths (median 400, at most 4,096), so balanced that sampling and training take the same,
which is where any delay of one is felt by the other. The longest response takes about as long as a step; with steps
that are shorter than their longest responses no lag of 2 reaches the bound, since those responses come too late.
Then configs/math.yaml on 8 H100s by the account of --plan, on shared GPUs and on separate ones; and a setting for which
verl publishes the time of its synchronous and its colocated asynchronous mode (`VERL`).
With --replay: the numbers of a measured run, and how far the simulation is from it.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row
from rlhf.check import speed
from rlhf.check.hours import step_time
from rlhf.check.model_shape import read_shape
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.program import with_values
from rlhf.rollout.buffer import BATCHES_AT_ENGINE, Staleness

FLAGSHIP = str(Path(__file__).parents[1] / "configs/math.yaml")
STEPS, FIRST = 10, 4  # simulated steps, and the first ones that the mean excludes


@dataclass(frozen=True)
class System:
    """The simulated system: seconds, and counts of the whole cluster."""

    engines: int
    slots: int
    base_s: float
    sequence_s: float
    request_s: float
    training_s: float
    transfer_s: float
    prefill_token_s: float
    groups_per_step: int
    max_policy_lag: int
    prompt_tokens: int = 0
    on_stale: Literal["wait", "drop"] = "wait"
    shared: bool = False  # engines and learners have the same GPUs: engines stand still while learners train
    swap_s: float = 0.0  # on shared GPUs, per step: state to host memory and back
    batches_ahead: int | None = None  # dispatched before they can train; by default the largest lag

    def token_s(self, running: int) -> float:
        return self.base_s + self.sequence_s * running


@dataclass
class Engine:
    """Sequences under way, by the token at which they end on the engine's own clock, which counts tokens."""

    clock: float = 0.0
    at: float = 0.0  # seconds at which `clock` was true
    running: list[tuple[float, float, int]] = field(default_factory=list)  # heap of (end, start, group)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (group, length)
    stamp: int = 0  # events of an older stamp no longer hold


@dataclass
class Simulation:
    """One run of `steps` training steps over groups of lengths, taken in turn."""

    system: System
    lengths: Sequence[Sequence[int]]
    steps: int
    now: float = 0.0
    done_at: list[float] = field(default_factory=list)
    stale: int = 0
    trained: list[int] = field(default_factory=list)  # numbers of groups
    slow_wait_s: float = 0.0  # in which a step had enough groups and waited for older ones
    interrupted: int = 0  # sequences that were under way at a transfer
    recomputed_tokens: float = 0.0  # of these sequences, prompts included

    def run(self) -> float:
        """Mean seconds of a step, without the first ones and the last, for which nothing more is sampled."""
        system = self.system
        self._engines = [Engine() for _ in range(system.engines)]
        self._load = [(0, i) for i in range(system.engines)]
        self._in_flight = [0] * system.engines
        self._open: dict[int, int] = {}  # group -> samples under way
        self._dispatched_at: dict[int, int] = {}  # group -> version
        self._version_of: dict[int, int] = {}  # of its first token
        self._engine_of: dict[int, int] = {}
        self._ready: list[int] = []
        self._ready_at: Counter[int] = Counter()  # ready groups by version
        self._running: Counter[int] = Counter()  # groups under way by the version at which they were dispatched
        self._waits_since: float | None = None
        # time, kind (0: an engine's next sequence ends, 1: training ends, 2: transfer ends), engine, stamp
        self._events: list[tuple[float, int, int, int]] = []
        self._step = self._dispatched = self._drawn = 0
        self._learner_busy = False
        self._max_running = math.ceil(BATCHES_AT_ENGINE * system.engines * system.slots / len(self.lengths[0]))
        self._staleness = Staleness(system.max_policy_lag, system.on_stale)
        ahead = system.max_policy_lag if system.batches_ahead is None else system.batches_ahead
        self._ahead = Staleness(ahead)
        self._dispatch()
        while len(self.done_at) < self.steps:
            self.now, kind, which, stamp = heapq.heappop(self._events)
            if kind == 0:
                self._finish(which, stamp)
            elif kind == 1:
                self._transfer()
            else:
                self._step_done()
        counted = self.done_at[FIRST - 1 :]
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    # --- the buffer's rules ---

    def _dispatch(self) -> None:
        allowed = self._ahead.groups_ahead(step=self._step, groups_per_step=self.system.groups_per_step)
        touched = set()
        while self._dispatched < allowed and self._running.total() < self._max_running:
            self._dispatched += 1
            group, self._drawn = self._drawn, self._drawn + 1
            count, index = heapq.heappop(self._load)
            while count != self._in_flight[index]:  # an entry from before a group ended
                heapq.heappush(self._load, (self._in_flight[index], index))
                count, index = heapq.heappop(self._load)
            self._dispatched_at[group] = self._step
            self._running[self._step] += 1
            self._in_flight[index] += 1
            heapq.heappush(self._load, (count + 1, index))
            samples = self.lengths[group % len(self.lengths)]
            self._open[group], self._engine_of[group] = len(samples), index
            self._advance(index)
            self._engines[index].waiting.extend((group, length) for length in samples)
            touched.add(index)
        for index in touched:
            self._fill(index)

    def _take(self, unchecked: Sequence[int]) -> None:
        """Drop stale groups (all of them are checked when the step has changed); train when the rule allows it."""
        stale = {g for g in unchecked if not self._staleness.admits(self._version_of[g], step=self._step)}
        if stale:
            self._ready = [g for g in self._ready if g not in stale]
            self._ready_at -= Counter(self._version_of[g] for g in stale)
            self.stale += len(stale)
            self._dispatched -= len(stale)
            self._dispatch()
        if self._learner_busy or len(self._ready) < self.system.groups_per_step:
            return
        if self._staleness.must_wait(
            self._ready_at, self._running, step=self._step, groups_per_step=self.system.groups_per_step
        ):
            self._waits_since = self.now if self._waits_since is None else self._waits_since
            return
        self.slow_wait_s += 0.0 if self._waits_since is None else self.now - self._waits_since
        self._waits_since = None
        oldest_first = sorted(self._ready, key=lambda group: (self._version_of[group], group))
        self.trained += oldest_first[: self.system.groups_per_step]
        self._ready_at -= Counter(self._version_of[group] for group in oldest_first[: self.system.groups_per_step])
        self._ready = oldest_first[self.system.groups_per_step :]
        self._learner_busy = True
        seconds = self.system.training_s + self.system.swap_s
        if self.system.shared:
            for index in range(len(self._engines)):
                self._pause(index, seconds)
        heapq.heappush(self._events, (self.now + seconds, 1, 0, 0))

    def _step_done(self) -> None:
        self._learner_busy = False
        self._step += 1
        self.done_at.append(self.now)
        self._dispatch()
        self._take(self._ready)

    # --- engines ---

    def _advance(self, index: int) -> None:
        engine = self._engines[index]
        if engine.running and self.now > engine.at:
            engine.clock += (self.now - engine.at) / self.system.token_s(len(engine.running))
        engine.at = max(engine.at, self.now)  # a stalled engine's clock stands until then

    def _fill(self, index: int) -> None:
        """Start waiting requests in free slots, and say when the next sequence ends."""
        engine, started = self._engines[index], 0
        while engine.waiting and len(engine.running) < self.system.slots:
            group, length = engine.waiting.popleft()
            self._version_of.setdefault(group, self._step)
            heapq.heappush(engine.running, (engine.clock + length, engine.clock, group))
            started += 1
        engine.at += started * self.system.request_s
        engine.stamp += 1
        if engine.running:
            seconds = max(0.0, engine.running[0][0] - engine.clock) * self.system.token_s(len(engine.running))
            heapq.heappush(self._events, (engine.at + seconds, 0, index, engine.stamp))

    def _finish(self, index: int, stamp: int) -> None:
        engine = self._engines[index]
        if stamp != engine.stamp:
            return
        end, _, group = heapq.heappop(engine.running)
        engine.clock, engine.at = end, self.now
        self._open[group] -= 1
        if self._open[group] == 0:
            self._in_flight[index] -= 1
            heapq.heappush(self._load, (self._in_flight[index], index))
            self._running[self._dispatched_at[group]] -= 1
            self._ready.append(group)
            self._ready_at[self._version_of[group]] += 1
        self._fill(index)
        if self._open[group] == 0:
            self._dispatch()
            self._take([group])

    def _pause(self, index: int, seconds: float) -> None:
        """An engine stands still; it keeps what it has under way."""
        self._advance(index)
        self._engines[index].at += seconds
        self._fill(index)

    def _transfer(self) -> None:
        """New weights: every engine stands for the transfer and for the prefill of what it has under way."""
        for index, engine in enumerate(self._engines):
            self._advance(index)
            tokens = sum(engine.clock - start + self.system.prompt_tokens for _, start, _ in engine.running)
            self.interrupted += len(engine.running)
            self.recomputed_tokens += tokens
            self._pause(index, self.system.transfer_s + tokens * self.system.prefill_token_s)
        heapq.heappush(self._events, (self.now + self.system.transfer_s, 2, 0, 0))


def bound_s(system: System, lengths: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Seconds of a step's sampling on full engines, and of its training; the transfer is neither."""
    tokens = float(np.mean([sum(group) for group in lengths])) * system.groups_per_step
    requests = float(np.mean([len(group) for group in lengths])) * system.groups_per_step
    ahead = (1 + system.max_policy_lag) * requests / system.engines
    full = min(system.slots, max(1, int(ahead)))
    sampling = (tokens * system.token_s(full) / full + requests * system.request_s) / system.engines
    return sampling, system.training_s


def row_of(name: str, system: System, lengths: Sequence[Sequence[int]], steps: int) -> Row:
    simulation = Simulation(system, lengths, steps)
    step_s = simulation.run()
    sampling, training = bound_s(system, lengths)
    bound = system.transfer_s + (sampling + training + system.swap_s if system.shared else max(sampling, training))
    return {
        "run": name, "lag": system.max_policy_lag, "step s": step_s, "sampling s": sampling, "training s": training,
        "bound s": bound, "above the bound": step_s / bound - 1,
        "waiting for slow groups s": simulation.slow_wait_s / steps,
        "stale groups": simulation.stale / max(1, simulation._drawn),
    }  # fmt: skip


def large_cluster(gpus: int, lag: int) -> tuple[System, list[list[int]]]:
    """About a 7B model on H100: up to 128 sequences an engine, a token of each in 8 + 0.03 n ms."""
    rng = np.random.default_rng(0)
    engines, groups = 3 * gpus // 4, 512 * gpus // 8
    lengths = [np.clip(rng.lognormal(np.log(400), 0.7, 8), 16, 4096).astype(int).tolist() for _ in range(groups * 2)]
    system = System(
        engines=engines, slots=128, base_s=8e-3, sequence_s=3e-5, request_s=2e-4, training_s=1.0, transfer_s=0.5,
        prefill_token_s=2e-5, groups_per_step=groups, max_policy_lag=lag,
    )  # fmt: skip
    return replace(system, training_s=bound_s(system, lengths)[0]), lengths


def long_tailed(groups: int, samples: int, *, mean: float, sigma: float, most: int) -> list[list[int]]:
    """Log-normal lengths that are cut at `most`; the median is such that their mean is `mean`."""
    factors = np.exp(sigma * np.random.default_rng(0).normal(size=(groups, samples)))
    low, high = 0.0, float(most)
    while high - low > 1e-3:
        median = (low + high) / 2
        low, high = (median, high) if np.minimum(median * factors, most).mean() < mean else (low, median)
    return np.clip(low * factors, 1, most).astype(int).tolist()


def flagship(sigma: float, lag: int, **cluster: Any) -> tuple[System, list[list[int]]]:
    """configs/math.yaml by the account of --plan; assumed: log-normal lengths, 0.3 s to send weights and to wake."""
    config = load_config(GRPOConfig, [FLAGSHIP])
    config = with_values(config, cluster=cluster, rollout={"max_policy_lag": lag})
    shape, rollout, lengths = read_shape(config.model.path), config.rollout, speed.Lengths.of(config)
    time = step_time(config, shape)
    assert time is not None
    slots = rollout.max_concurrent_sequences
    alone, full = (speed.decode_step_s(shape, config, batch)[0] for batch in (1, slots))
    sequence_s = (full - alone) / (slots - 1)
    system = System(
        engines=config.cluster.engines, slots=slots, base_s=alone - sequence_s, sequence_s=sequence_s,
        request_s=speed.prefill_s(shape, config, lengths.prompt / rollout.samples_per_prompt),
        training_s=time.update + time.logprobs + time.sending + time.host, swap_s=time.turns, transfer_s=0.3,
        prefill_token_s=speed.prefill_s(shape, config, 1), groups_per_step=rollout.prompts_per_step,
        max_policy_lag=lag, prompt_tokens=lengths.prompt, shared=config.cluster.placement == "colocated",
    )  # fmt: skip
    pool = 4 * rollout.prompts_per_step
    return system, long_tailed(
        pool, rollout.samples_per_prompt, mean=lengths.response, sigma=sigma, most=rollout.longest
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "8 shared": {"placement": "colocated", "learners": 8, "engines": 8},
    "4 engines, 4 learners": {"placement": "separate", "learners": 4, "engines": 4},
    "3 engines, 5 learners": {"placement": "separate", "learners": 5, "engines": 3},
}


def flagship_rows(*, quick: bool) -> Iterator[Row]:
    """Seconds per step of each layout and lag."""
    for sigma in (0.5,) if quick else (0.5, 1.0):
        synchronous = 0.0
        for name, cluster in list(LAYOUTS.items())[: 1 if quick else None]:
            for lag in (0, 1, 2):
                system, lengths = flagship(sigma, lag, **cluster)
                steps = STEPS if quick else 2 * STEPS
                simulation = Simulation(system, lengths, steps)
                step_s = simulation.run()
                synchronous = synchronous or step_s
                yield {
                    "sigma": sigma, "GPUs": name, "lag": lag, "step s": step_s,
                    "of shared, lag 0": step_s / synchronous,
                    "training s": system.training_s + system.swap_s,
                    "waiting for slow groups s": simulation.slow_wait_s / steps,
                    "interrupted rollouts": simulation.interrupted / steps,
                    "tokens computed again": simulation.recomputed_tokens / steps,
                }  # fmt: skip


# Published (verl-project/verl 1b86216, page "V1 Async Trainer"): Qwen3.5-35B-A3B on four nodes of 8 GPUs, an
# engine on 4, 64 prompts per step, at most 32,768 tokens; hours of 150 steps. The mean length is that of `sync`, whose
# tokens per second are those of 512 sequences per step, so 8 samples per prompt. By the defaults of
# verl/trainer/config/ppo_trainer.yaml one batch is dispatched ahead, and a group may be 8 steps old.
VERL_HOURS = {"sync": 22.79, "colocate_async": 14.72, "separate_async": 14.10}  # the last one has 2 nodes of engines
VERL_STEP_S = {mode: hours * 3600 / 150 for mode, hours in VERL_HOURS.items()}
VERL_LENGTHS = {"mean": 12_720, "most": 32_768}
# Assumed: a token as the account of --plan has it for an H100 and 12 sequences or more, 10 microseconds of them for the
# states of linear attention; 100,000 tokens of prefill per second.
VERL = System(
    engines=8, slots=1024, base_s=11.4e-3, sequence_s=4.9e-5, request_s=0.0, training_s=0.0, transfer_s=0.0,
    prefill_token_s=1e-5, groups_per_step=64, max_policy_lag=0, shared=True,
)  # fmt: skip
STEEP = replace(VERL, base_s=6e-3, sequence_s=1e-4)  # the same account, from one sequence alone to 128


def verl_row(steps: int, *, system: System = VERL, sigma: float = 0.7, training_s: float | None = None) -> Row:
    """The simulated modes over the published synchronous one.

    Args:
        training_s: seconds of a step's training, swap and transfer; the speed of the engines is then scaled so that
            the synchronous step is as long as the published one. None: what the account's speed leaves of that step.
    """
    lengths = long_tailed(64 * steps, 8, sigma=sigma, **VERL_LENGTHS)
    published = VERL_STEP_S["sync"]
    sampling_s = Simulation(system, lengths, steps).run()
    training_s = published - sampling_s if training_s is None else training_s
    scale = (published - training_s) / sampling_s
    system = replace(system, base_s=scale * system.base_s, sequence_s=scale * system.sequence_s, training_s=training_s)
    one_ahead = replace(system, max_policy_lag=8, batches_ahead=1)
    modes = {
        "verl's colocated": one_ahead,
        "verl's separate": replace(one_ahead, shared=False, engines=4, training_s=2 * training_s),
        "ours, lag 1": replace(system, max_policy_lag=1),
        "ours, lag 2": replace(system, max_policy_lag=2),
    }
    row: Row = {"sigma": sigma, "training s": training_s, "ms of a token": 1e3 * system.base_s}
    row |= {"one more sequence": system.sequence_s / system.base_s}
    return row | {name: Simulation(mode, lengths, steps).run() / published for name, mode in modes.items()}


def verl_rows(*, quick: bool) -> Iterator[Row]:
    """The assumptions one at a time, and the three of them that are worst together."""
    most = VERL_STEP_S["separate_async"] / 2  # two nodes train within a step of that mode, so four in half of it
    cases: list[dict[str, Any]] = [
        {}, {"sigma": 0.5}, {"sigma": 1.0}, {"training_s": 80.0}, {"training_s": most},
        {"training_s": 80.0, "system": STEEP}, {"sigma": 1.0, "training_s": most, "system": STEEP},
    ]  # fmt: skip
    for case in cases[: 1 if quick else None]:
        yield verl_row(STEPS if quick else 4 * STEPS, **case)


def replayed(file: Path) -> list[Row]:
    """Simulated against measured step times of benchmarks.asynchronous; no rows where it had nothing to run on."""
    measured = json.loads(file.read_text()).get("calibration")
    if measured is None:
        return []
    rows = []
    for run in measured["runs"]:
        system = System(**{**measured["system"], **run["system"]})
        row = row_of(f"{file.stem}, {run['name']}", system, run["lengths"], len(run["step_seconds"]) + FIRST)
        measured_s = float(np.mean(run["step_seconds"]))
        rows.append(row | {"measured step s": measured_s, "simulated / measured": row["step s"] / measured_s})
    return rows


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--replay", type=Path, help="JSON of benchmarks.asynchronous")
    options = parser.parse_args()
    if options.replay is not None:
        name, title, rows = "simulator-replay", "simulated against measured", replayed(options.replay)
        if not rows:
            return harness.not_measured(name, title, f"{options.replay} holds no measured run", options)
        harness.report(name, title, rows, options)
        return 0
    rows = []
    for gpus in (8,) if options.quick else (8, 64, 256, 1000):
        for lag in (0, 1, 2, 4) if gpus < 256 else (2,):
            rows.append(row_of(f"{gpus} GPUs", *large_cluster(gpus, lag), STEPS))
    harness.report("simulator", "engines and learners simulated, log-normal lengths", rows, options)
    rows = list(flagship_rows(quick=options.quick))
    harness.report("simulator-flagship", "configs/math.yaml simulated by the account of --plan", rows, options)
    published = {name: round(each / VERL_STEP_S["sync"], 2) for name, each in VERL_STEP_S.items()}
    title = "a published setting of verl simulated, over its synchronous mode"
    rows = list(verl_rows(quick=options.quick))
    harness.report("simulator-verl", title, rows, options, [f"published: {published}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
