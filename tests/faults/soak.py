"""Program: the quickstart for many steps, while engines and learners are killed; does it end as if nothing had been?

    python tests/faults/soak.py --data runs/quickstart-data --steps 500 [--engine-kills 5 --learner-kills 2]

It ends with 1 unless the accuracy is reached, every counter is right, no process is left, and the resident memory of
every process stays flat over its own life.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from processes import Process, below, outliving, running

ACCURACY = 0.85
GROWTH = 0.05  # of the resident memory of a process, after its first SETTLED steps
LITTLE_MIB = 8.0  # of a process of 34 MiB, some pages are 5%
SETTLED = 50
WINDOW = 10  # steps whose median is compared: memory goes up and down within a step
LOOK_EVERY_S = 0.2
ENGINE, LEARNER = "VLLM::EngineCore", "ray::HostedActor"


@dataclass
class Life:
    """A process: its command, and its resident memory in MiB at the end of each step."""

    command: str
    memory: list[float] = field(default_factory=list)

    def growth(self) -> float | None:
        """Of the last steps over those after the first SETTLED; None for a life that is too short."""
        settled = self.memory[SETTLED:]
        if len(settled) < 2 * WINDOW:
            return None
        return statistics.median(settled[-WINDOW:]) / statistics.median(settled[:WINDOW]) - 1


def resident_mib(process: Process) -> float:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def read_steps(run: Path) -> list[dict[str, Any]]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "time/step" in row]


def kills(engines: int, learners: int, steps: int) -> Iterator[tuple[int, str]]:
    """(step after which, what) in the first half, the learners' among the engines'; the second half is undisturbed."""
    many = engines + learners
    of_learners = {round((i + 1) * many / (learners + 1)) - 1 for i in range(learners)}
    for number in range(many):
        yield (number + 1) * steps // (2 * many), LEARNER if number in of_learners else ENGINE


def soak(program: subprocess.Popen[bytes], run: Path, planned: list[tuple[int, str]]) -> dict[Process, Life]:
    """Kill what is planned, and note the memory of every process after each step, until the program ends."""
    lives: dict[Process, Life] = defaultdict(lambda: Life(""))
    metrics, ended, size = run / "metrics.jsonl", 0.0, 0
    while program.poll() is None:
        time.sleep(LOOK_EVERY_S)
        if not metrics.exists() or metrics.stat().st_size == size:
            continue
        size, steps = metrics.stat().st_size, read_steps(run)
        if not steps or steps[-1]["time"] == ended:
            continue
        ended = steps[-1]["time"]
        now = running(below({os.getpid()}))
        for process, command in now.items():
            try:
                lives[process].memory.append(resident_mib(process))
                lives[process].command = command
            except OSError:  # it has ended meanwhile
                continue
        if planned and steps[-1]["step"] >= planned[0][0]:
            what = planned[0][1]
            alive = [process.pid for process, command in now.items() if what in command]
            if alive:  # else after the next step
                os.kill(alive[0], signal.SIGKILL)
                planned.pop(0)
                print(f"step {steps[-1]['step']}: killed {what}", flush=True)
    return lives


def problems(run: Path, steps: int, lives: dict[Process, Life], left: list[str]) -> Iterator[str]:
    """What is not as it should be at the end."""
    yield from (f"still running: {command}" for command in left)
    rows, summary = read_steps(run), json.loads((run / "summary.json").read_text())
    if [row["step"] for row in rows] != [*range(1, steps + 1)]:
        yield "metrics.jsonl has not every step once"
    for row in [*rows, summary]:
        parts = [row[f"account/{name}"] for name in ("trained", "filtered", "stale", "failed", "waiting")]
        if row["account/sampled"] != sum(parts) or min(parts) < 0:
            yield f"step {row.get('step', 'of the summary')}: sampled is not the sum of its parts"
    if summary["updates_planned"] != summary["updates_taken"] + summary["updates_skipped"]:
        yield "updates planned are not those taken and skipped"
    groups = [group for step in range(1, steps + 1) for group in groups_of_step(run, step)]
    if len(groups) != len(set(groups)):
        yield f"{len(groups) - len(set(groups))} prompts were trained twice in an epoch"
    if len(groups) * 8 != summary["account/trained"]:
        yield "the account and the rollouts differ in what was trained"
    reached = summary["evaluation_after"]["eval/test/avg@1"]
    if reached < ACCURACY:
        yield f"accuracy {reached:.3f}, and {ACCURACY} is the aim"
    for life in lives.values():
        growth = life.growth()
        if growth is not None and growth > GROWTH and growth * life.memory[SETTLED] > LITTLE_MIB:
            yield f"{life.command[:60]}: resident memory grew by {growth:.1%} in {len(life.memory)} steps"


def groups_of_step(run: Path, step: int) -> list[tuple[int, str]]:
    """(epoch, prompt) of each group."""
    rows = map(json.loads, (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines())
    return [key for key, _ in itertools.groupby((row["epoch"], row["prompt_id"]) for row in rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that rlhf.quickstart has written")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--engine-kills", type=int, default=5)
    parser.add_argument("--learner-kills", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    run = Path(tempfile.mkdtemp(prefix="soak-")) / "run"
    command = [
        sys.executable, "-m", "rlhf.grpo", "--config", "configs/quickstart.yaml", f"run.dir={run}",
        f"run.steps={options.steps}", f"model.path={options.data}/model", f"data.train={options.data}/train.jsonl",
        f"data.eval={options.data}/test.jsonl", "checkpoint.every=5", "evaluation.every=null",
        "logging.wandb.mode=offline", *options.overrides,
    ]  # fmt: skip
    planned = list(kills(options.engine_kills, options.learner_kills, options.steps))
    with subprocess.Popen(command) as program:
        lives = soak(program, run, planned)
    left = outliving(lives.keys())
    for life in sorted(lives.values(), key=lambda life: -max(life.memory, default=0)):
        if (growth := life.growth()) is not None:
            print(f"{growth:+7.1%} of {life.memory[SETTLED]:6.0f} MiB, {len(life.memory):4} steps  {life.command[:70]}")
    if program.returncode:
        print(f"the run ended with {program.returncode}")
        return 1
    found = list(problems(run, options.steps, lives, left))
    found += [f"not killed: {what}, which was planned after step {step}" for step, what in planned]
    print("\n".join(found) or f"{options.steps} steps, {options.engine_kills} engines and {options.learner_kills} "
          f"learners killed: all is as it should be; {run}")  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
