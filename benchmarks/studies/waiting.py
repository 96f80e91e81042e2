"""Study: what discarding slow groups does to the data and to what is learned, where the hard ones are slow.

    python -m benchmarks.studies.waiting [--workers 2] [--seeds 0,1,2,3,4] [--quick]

The quickstart's sums, a half or three quarters of them without any carry between columns, and the others with one or
two. These are the hard ones: the model that training begins with forgets carries. An easy group takes about as long as
a training step, a hard one 3 or 6 times as long. With `rollout.on_stale: drop`, a group that is older than the policy
lag when it ends is discarded; with `wait`, steps wait for it. Lags of 1, 2 and 4, and once none, where both are alike.

A run has two parts. First the trainer's own RolloutBuffer plays it on a clock that jumps from event to event, with
groups that only take time: this says which prompts each step trains, how old they are, and when it ends. It takes no
time, so the table of it has all runs, with or without the second part. Engines have room for all that the buffer gives
them. Then the trainer's own learner (`outcomes.py`) takes these steps: all tokens of a group are sampled by the weights
at which it began.

Each run ends as one file below `--output`; what is there is not run again.
"""

from __future__ import annotations

import asyncio
import re
import selectors
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.studies import in_process, outcomes, report, waiting_report
from rlhf.config.grpo import GRPOConfig
from rlhf.data.load import load_prompts
from rlhf.data.model_files import load_tokenizer
from rlhf.data.order import PromptStream
from rlhf.rollout.buffer import RolloutBuffer, Staleness, Ticket
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion
from rlhf.types import Prompt, RolloutGroup, ScoredRollout, VersionSpan, World

LAGS = (1, 2, 4)
SETTINGS = ((0.5, 3), (0.25, 6), (0.5, 6))  # share of hard prompts, and units of time that each group takes
TRAINING = 1.0  # units that a training step takes, and an easy group
JITTER = 0.2  # of the time of each group, both ways
HELD_OUT = 150  # problems of each kind


@dataclass(frozen=True)
class Run:
    """One run of a setting; with a lag of 0, `on_stale` changes nothing."""

    hard_share: float
    slowness: float
    on_stale: Literal["wait", "drop"]
    lag: int
    seed: int
    learners: int = 1

    @property
    def name(self) -> str:
        return f"hard{self.hard_share:g}-slow{self.slowness:g}-{self.on_stale}-lag{self.lag}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["rollout"] |= {"on_stale": self.on_stale, "max_policy_lag": self.lag}
        return GRPOConfig.model_validate(values)


def all_runs(seeds: Sequence[int], settings: Sequence[tuple[float, float]] = SETTINGS) -> list[Run]:
    """Setting after setting, and in each seed after seed, so that a scan that was stopped is a whole one of less."""
    kinds: list[tuple[Literal["wait", "drop"], int]] = [("wait", 0)]
    kinds += [(rule, lag) for lag in LAGS for rule in ("wait", "drop")]
    return [Run(*setting, *kind, seed) for setting in settings for seed in seeds for kind in kinds]


# Two updates per step at a rate at which runs with a lag learn: at 5e-4 with four, both rules fall to an accuracy of 0.
OVERRIDES = (
    "learner.schedule.name=constant", "learner.optimizer.lr=2e-4", "learner.minibatches_per_epoch=2",
    "algo.importance_correction=truncated",
)  # fmt: skip


# --- the task ---


def is_hard(prompt: Prompt) -> bool:
    return carries(prompt.messages[-1]["content"]) > 0


def carries(question: str) -> int:
    """How often a column of `What is 347 + 285?` passes a carry to another one."""
    left, right = (int(number) for number in re.findall(r"\d+", question))
    return sum(left % 10**place + right % 10**place >= 10**place for place in (1, 2))


def by_kind(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    both: dict[str, list[Prompt]] = {"easy": [], "hard": []}
    for prompt in prompts:
        both["hard" if is_hard(prompt) else "easy"].append(prompt)
    return both


def drawn(prompts: dict[str, list[Prompt]], run: Run) -> Callable[[], Prompt]:
    """Gives the prompts of a run in their order."""
    easy = min(map(len, prompts.values()))
    rows_per_epoch = {"easy": easy, "hard": round(easy * run.hard_share / (1 - run.hard_share))}
    stream = PromptStream(prompts, seed=run.seed, rows_per_epoch=rows_per_epoch)
    return lambda: stream.take(1)[0]


# --- who is trained, and when ---


class Clock(selectors.SelectSelector):
    """Does not wait: time goes on to the next timer at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is left that could end"
        self.now += max(0.0, timeout)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop with a Clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


@dataclass(frozen=True)
class PlannedStep:
    """What a training step takes: prompts and the version that each was sampled by; and units of time at its end."""

    groups: list[tuple[Prompt, int]]
    ended: float
    discarded: float  # share of all groups that have ended


def plan(config: GRPOConfig, draw: Callable[[], Prompt], slowness: float) -> list[PlannedStep]:
    """Every training step of a run, played by its RolloutBuffer."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(_play(config, draw, slowness))


async def _play(config: GRPOConfig, draw: Callable[[], Prompt], slowness: float) -> list[PlannedStep]:
    rng = np.random.default_rng(config.run.seed)
    version = drawn = 0

    async def sample(prompt: Prompt) -> RolloutGroup:
        began = version
        await asyncio.sleep((slowness if is_hard(prompt) else TRAINING) * rng.uniform(1 - JITTER, 1 + JITTER))
        token = Completion(np.zeros(1, np.int32), np.zeros(1), "stop", (VersionSpan(0, 1, began),))
        return RolloutGroup(prompt, (ScoredRollout(to_rollout(prompt, 0, token), "", "", 0.0, {}, "ok"),))

    def next_ticket() -> Ticket:
        nonlocal drawn
        drawn += 1
        return Ticket(drawn - 1, draw())

    buffer = RolloutBuffer(
        sample, next_ticket, groups_per_step=config.rollout.prompts_per_step, total_steps=config.run.steps,
        staleness=Staleness(config.rollout.max_policy_lag, config.rollout.on_stale),
    )  # fmt: skip
    steps = []
    for _ in range(config.run.steps):
        groups = [(group.prompt, group.oldest_version) for group in await buffer.take()]
        await asyncio.sleep(TRAINING)
        version += 1
        account = buffer.account
        steps.append(PlannedStep(groups, asyncio.get_running_loop().time(), account.stale / account.sampled))
        buffer.begin_next_step()
    await buffer.close()
    return steps


def played(base: GRPOConfig, all_runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The first part of every run: records without what is learned."""
    (prompts,) = load_prompts(base.data, "train", load_tokenizer(base.model)).prompts.values()
    records = []
    for run in all_runs:
        steps = plan(run.config(base), drawn(by_kind(prompts), run), run.slowness)
        records.append(asdict(run) | {"steps": [facts(planned, step) for step, planned in enumerate(steps)]})
    return records


# --- what is learned ---


class Trainer(outcomes.Trainer):
    """Steps as planned; each group is sampled by the weights of its version."""

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        super().__init__(config, world)
        (prompts,) = self.prompts.values()
        self.by_kind = by_kind(prompts)
        self.held_out_by_kind = {name: some[:HELD_OUT] for name, some in by_kind(self.held_out).items()}

    def run(self, run: Any) -> list[report.Row]:
        config = self.begin(run)
        published: dict[int, dict[str, torch.Tensor]] = {}
        rows = []
        self.publish_newest(run)
        for step, planned in enumerate(plan(config, drawn(self.by_kind, run), run.slowness)):
            published[step] = {name: tensor.clone() for name, tensor in self.engine.state_dict().items()}
            published.pop(step - config.rollout.max_policy_lag - 1, None)
            torch.manual_seed(config.run.seed * config.run.steps + step)
            groups = self.sample_planned(planned, published)
            rows.append({"step": step + 1, **self.train_step(groups, step), **facts(planned, step)})
            self.publish_newest(run)
            if (step + 1) % max(1, config.run.steps // (2 * outcomes.EVALUATIONS)) == 0:
                rows[-1] |= self.evaluate()
        return rows

    def sample_planned(self, planned: PlannedStep, published: dict[int, dict[str, torch.Tensor]]) -> list[RolloutGroup]:
        """The groups of a step, the oldest first."""
        of_version: dict[int, list[Prompt]] = defaultdict(list)
        for prompt, version in planned.groups:
            of_version[version].append(prompt)
        groups = []
        for version in sorted(of_version):
            self.engine.load_state_dict(published[version])
            groups += self.sample(of_version[version], self.config.rollout.samples_per_prompt)
        return groups

    def evaluate(self) -> report.Row:
        accuracies = {name: self.accuracy(some) for name, some in self.held_out_by_kind.items()}
        return {"held-out": report.mean(accuracies.values()), **accuracies}


def facts(planned: PlannedStep, step: int) -> report.Row:
    """Of what a step trains: the share of hard prompts, and the mean age in steps; and what there was until then."""
    return {
        "trained hard": report.mean(is_hard(prompt) for prompt, _ in planned.groups),
        "age": report.mean(step - version for _, version in planned.groups),
        "ended": planned.ended,
        "discarded": planned.discarded,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "waiting", "Slow groups: wait for them, or discard them.", trains=True, scans=True, seeds=range(5)
    )
    options = report.parse(parser, arguments)
    data = report.ensure_data(options.data)
    base = (outcomes.quick_config if options.quick else outcomes.study_config)(data, OVERRIDES)
    runs = all_runs(options.seeds)
    if options.quick:
        runs = [run for run in all_runs(options.seeds[:1], SETTINGS[:1]) if run.lag == 2]
    outcomes.scan(base, runs, options.output / "runs", workers=options.workers, kind=Trainer)
    records = list(in_process.read(base, runs, options.output / "runs"))
    waiting_report.write(played(base, runs), records, options.output)


if __name__ == "__main__":
    main()
