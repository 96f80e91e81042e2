"""Compare graders on a file of labelled cases, or fuzz ours with random LaTeX.

    python benchmarks/scorer.py CASES.jsonl
    python benchmarks/scorer.py --fuzz-seconds 300

A case has a response, a gold answer and whether the response is right (columns response, ground_truth, correct; a row
with a true `doubtful` is graded but not counted). Ours runs as in training, in one worker, so that the speeds compare;
Math-Verify runs in one process with its own time limits, the gold answer in a box, and is killed if those fail.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf.config.reward import RewardConfig
from rlhf.rewards.scorer import Scorer

FULL_S = 10.0  # after the last case, for killed processes to be replaced
KILL_AFTER_S = 20.0  # Math-Verify's own limits are 5 s for parsing and 5 s for comparing, twice


@dataclass(frozen=True)
class Outcome:
    right: bool
    seconds: float
    status: str


def ours(cases: list[dict[str, Any]], workers: int) -> tuple[list[Outcome], float]:
    """One response after the other for the latencies, then all at once for the speed."""
    config = RewardConfig.model_validate({"parts": [{"name": "math", "mode": "lenient"}], "workers": workers})
    with Scorer(config) as scorer:
        outcomes = []
        for case in cases:
            started = time.perf_counter()
            (graded,) = scorer.graded_batch(scorer.submit_batch([case["response"]], [case["ground_truth"]]))
            outcomes.append(Outcome(graded.value == 1.0, time.perf_counter() - started, graded.status))
    with Scorer(config) as scorer:  # a fresh one without caches
        started = time.perf_counter()
        scorer.graded_batch(
            scorer.submit_batch([case["response"] for case in cases], [case["ground_truth"] for case in cases])
        )
        return outcomes, time.perf_counter() - started


def math_verify(cases: list[dict[str, Any]], _workers: int) -> tuple[list[Outcome], float]:
    context = multiprocessing.get_context("spawn")
    outcomes: list[Outcome] = []
    process, connection = _start(context)
    for case in cases:
        started = time.perf_counter()
        connection.send((case["response"], case["ground_truth"]))
        if connection.poll(KILL_AFTER_S):
            right, status = connection.recv()
        else:
            right, status = False, "killed"
            process.kill()
            process.join()
            process, connection = _start(context)
        outcomes.append(Outcome(right, time.perf_counter() - started, status))
    process.kill()
    process.join()
    return outcomes, sum(outcome.seconds for outcome in outcomes)


def _start(context: Any) -> tuple[Any, Connection]:
    ours_end, theirs = context.Pipe()
    process = context.Process(target=_math_verify_loop, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours_end.recv() == "ready"
    return process, ours_end


def _math_verify_loop(connection: Connection) -> None:
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    verify(parse("$1$"), parse("$1$"))
    connection.send("ready")
    while True:
        response, gold = connection.recv()
        try:
            connection.send((bool(verify(parse(f"\\boxed{{{gold}}}"), parse(response))), "ok"))
        except Exception as error:
            connection.send((False, type(error).__name__))


GRADERS: dict[str, Callable[[list[dict[str, Any]], int], tuple[list[Outcome], float]]] = {
    "rlhf": ours,
    "Math-Verify": math_verify,
}


def compare(cases: list[dict[str, Any]], workers: int) -> Table:
    table = Table("", *GRADERS, title=f"{len(cases)} cases")
    columns = [measure(cases, *grade(cases, workers)) for grade in GRADERS.values()]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    return table


def measure(cases: list[dict[str, Any]], outcomes: list[Outcome], seconds: float) -> dict[str, str]:
    counted = [(c["correct"], o.right) for c, o in zip(cases, outcomes, strict=True) if not c.get("doubtful")]
    latencies = sorted(outcome.seconds for outcome in outcomes)
    return {
        "cases counted": str(len(counted)),
        "accuracy": f"{sum(label == right for label, right in counted) / len(counted):.4f}",
        "false positives": str(sum(right and not label for label, right in counted)),
        "false negatives": str(sum(label and not right for label, right in counted)),
        "answers/s": f"{len(cases) / seconds:.0f}",
        "p50 latency": f"{latencies[len(latencies) // 2] * 1e3:.2f} ms",
        "p99 latency": f"{latencies[int(len(latencies) * 0.99)] * 1e3:.1f} ms",
        "worst latency": f"{latencies[-1] * 1e3:.0f} ms",
        "statuses": ", ".join(f"{name} {n}" for name, n in Counter(o.status for o in outcomes).most_common()),
    }


# --- fuzzing ---

ATOMS_WRITTEN = r"""
    0 1 2 7 10 12 3.5 .5 1,000 1e9 x y n i e \pi \infty \theta a_1 x_{12} \alpha \text{cm} \text{and} \% \$ ^\circ ! '
    \emptyset \mathbb{R} \ldots \cdots \pm \mp ½ ² ∞ ≤ π ４ ٣ \\ & | \| \{ \} ( ) [ ] { } , ; : = < > \le \ge \ne \in
    \cup \cap \setminus + - * / ^ _ \cdot \times \div \bmod \to \sin \cos \log \ln \lim \det \max \int \sum \prod \frac
    \sqrt \binom \boxed \left \right \displaystyle \quad \, \! $ $$ \( \) \[ \] <answer> </answer> <think> </think> ####
    answer is or and None nan __import__ lambda eval( 9^9^9 \begin{pmatrix} \end{pmatrix} \begin{cases} \end{cases}
    \overline{3} \mathrm{d}x
"""
ATOMS = [*ATOMS_WRITTEN.split(), "\u200b", "\ud800", "\x00", "\n"]
SHAPES_WRITTEN = r"""
    \frac{#}{#} \sqrt{#} \sqrt[#]{#} (#) (#,#) [#,#) \{#,#\} #+# #-# #*# #/# #^{#} #_{#} #! |#| #=# #<# ## #:# -# #\%
    \sum_{k=1}^{#}# \prod_{k=#}^{#}# \int_{#}^{#}#dx \log_{#}# \lim_{x\to#}# \binom{#}{#} \left(#\right) \sin(#) \det#
    \begin{pmatrix}#&#\\#&#\end{pmatrix} #\text{cm} #\cup# #\pmod{#} \boxed{#} 0.\overline{#} \lfloor#\rfloor x\in#
    \frac{d}{dx}# #\text{or}#
"""
SHAPES = SHAPES_WRITTEN.split()
READABLE_GOLDS = ("1", "\\frac{1}{2}", "x^2+1", "(0,1)", "\\{1,2\\}", "x>1", "\\int_0^1 x dx", "y=2x", "\\text{east}")


def random_latex(rng: random.Random, depth: int = 4) -> str:
    """An expression of random shape, sometimes broken in a random place."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(ATOMS)
    text = "".join(random_latex(rng, depth - 1) if char == "#" else char for char in rng.choice(SHAPES))
    if rng.random() < 0.03:
        cut = rng.randrange(len(text) + 1)
        text = text[:cut] + rng.choice(ATOMS) + text[cut + rng.randrange(3) :]
    return text * rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 50)) if depth == 4 else text


def random_case(rng: random.Random) -> tuple[str, str]:
    answer = random_latex(rng)
    gold = rng.choice((answer, random_latex(rng), *READABLE_GOLDS))
    wrapped = rng.choice(("\\boxed{%s}", "The answer is %s.", "$%s$", "#### %s", "<answer>%s</answer>", "%s"))
    return wrapped.replace("%s", answer), gold


def fuzz(seconds: float, seed: int, console: Console) -> int:
    """Grade random cases until the time is over; -> 1 if a grader raised an exception or the pool is not full."""
    rng, counts, details = random.Random(seed), Counter[str](), Counter[str]()
    config = RewardConfig.model_validate({"parts": [{"name": "math", "mode": "lenient"}]})
    worst, deadline = 0.0, time.monotonic() + seconds
    with Scorer(config) as scorer:
        while time.monotonic() < deadline:
            cases = [random_case(rng) for _ in range(200)]
            started = time.monotonic()
            (batch,) = scorer.submit_batch(*zip(*cases, strict=True))
            for case, grade in zip(cases, [future.result() for future in batch], strict=True):
                counts[grade.status] += 1
                if grade.status == "failed":
                    details[f"{grade.detail}  e.g. {case}"] += 1
            worst = max(worst, time.monotonic() - started)
        end = time.monotonic() + FULL_S
        while not (full := len(scorer.pool.free()) >= scorer.pool.size) and time.monotonic() < end:
            time.sleep(0.1)
    for detail, count in details.most_common(20):
        console.print(f"{count} x {detail}", markup=False)
    console.print(
        f"{counts.total()} cases in {seconds:.0f} s, slowest 200 in {worst:.1f} s: {dict(counts)}; pool full: {full}"
    )
    return int(bool(details) or not full)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=Path, help="JSONL of labelled cases")
    parser.add_argument("--workers", type=int, default=1, help="workers of ours (default: 1, as Math-Verify has)")
    parser.add_argument("--fuzz-seconds", type=float, help="grade random LaTeX for this many seconds instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random LaTeX")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    if options.fuzz_seconds:
        return fuzz(options.fuzz_seconds, options.seed, console)
    if options.cases is None or not options.cases.is_file():
        parser.error(f"{options.cases}: no such file. Give a JSONL file with response, ground_truth and correct.")
    console.print(compare(list(rows(options.cases)), options.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
