"""Prints what the runs of this recipe cost and trained: seconds, who waited, and the share of slow prompts.

python compare.py RUN ...
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def main(*runs: str) -> None:
    print(f"{'':<8}{'s per step':>12}{'learner idle':>14}{'engine idle':>13}{'slow, trained':>15}{'accuracy':>10}")
    for folder in map(Path, runs):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "time/step" in row]
        seconds, learner, engine = (
            statistics.mean(row.get(f"time/{name}", 0.0) for row in steps)
            for name in ("step", "learner_idle", "engine_idle")
        )
        files = folder.glob("rollouts/step-*.jsonl")
        prompts = [json.loads(line)["prompt_id"] for file in files for line in file.read_text().splitlines()]
        slow = sum(prompt.startswith("slow/") for prompt in prompts) / len(prompts)
        accuracy = [row["eval/test/avg@1"] for row in rows if "eval/test/avg@1" in row][-1]
        print(f"{folder.name:<8}{seconds:>12.1f}{learner:>14.1f}{engine:>13.1f}{slow:>15.2f}{accuracy:>10.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
