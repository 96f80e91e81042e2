"""Program: makes the tiny model, tokenizer and arithmetic data of the quickstart, without a network.

    python -m rlhf.quickstart [--output DIR] [--seed N] [--task tools]

The task is the sum of two three-digit numbers, worked column by column from the right and then boxed:

    What is 347 + 285?   ->   12 13 06 \\boxed{632}

A warm-up imitates a careless pupil, who forgets most carries and sometimes makes a slip. Imitation reaches the pupil's
accuracy, a quarter to a third, also in greedy decoding. Reinforcement learning from graded answers has to teach the
rule that the pupil applies only sometimes. No training uses the problems of the test files. Preference pairs for
`rlhf.reward_model` are made from the same problems: right work is preferred to wrong work.

The warm-up is that of `rlhf.sft` with configs/sft_quickstart.yaml, from the model in `untrained` on the pupil's work in
`demonstrations.jsonl`. With `--task tools` the problems are products, which a model of this size cannot learn to work
out, and some demonstrations ask a calculator.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.cli import check_new_folder, parser_of, run_program, shipped_folder, started_as
from rlhf.config.load import load_config, merged
from rlhf.config.printing import say, waiting
from rlhf.learner.tiny_model import BOX_TOKEN, make_model, make_tokenizer, save_model

if TYPE_CHECKING:
    from rlhf.config.supervised import SFTConfig

TRAIN_ROWS, TEST_ROWS = 16_384, 512
WARMUP_STEPS = {"sums": 700, "tools": 1000}  # by task; few demonstrations call the tool
WARMUP_LINES_S = 5.0  # between two lines of the warm-up
COLUMNS = 3
# All products then have six digits. Where lengths differ, this model learns to copy only the most frequent one.
SMALLEST = {"+": 10 ** (COLUMNS - 1), "*": 317}
FORGOTTEN_CARRY_FRACTION = 0.75  # more than half, so that the most likely answer has no carry
SLIP_FRACTION = 0.12  # share of columns that are off by one
# Share of rejected responses that no pupil would write; without them a policy finds responses that the reward model
# has never seen.
FAR_MISS_FRACTION = 0.25
CALL_FRACTION = 0.12  # share of the demonstrations with tools that ask the calculator


@dataclass(frozen=True)
class Problem:
    """The sum of two numbers of so many digits, or their product."""

    left: int
    right: int
    sign: str = "+"
    columns: int = COLUMNS

    @property
    def question(self) -> str:
        return f"What is {self.left} {self.sign} {self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left + self.right if self.sign == "+" else self.left * self.right)

    def worked(self, careless: random.Random | None = None) -> str:
        """The column sums from the right and the boxed answer; given a generator, as the careless pupil writes them."""
        carry, sums = 0, []
        for column in range(self.columns):
            digits = self.left // 10**column % 10 + self.right // 10**column % 10
            if careless is not None and carry and careless.random() < FORGOTTEN_CARRY_FRACTION:
                carry = 0
            if careless is not None and careless.random() < SLIP_FRACTION:
                carry += careless.choice((-1, 1))
            sums.append(max(digits + carry, 0))
            carry = sums[-1] // 10
        boxed = str(sums[-1]) + "".join(str(total % 10) for total in reversed(sums[:-1]))
        return " ".join(f"{total:02d}" for total in sums) + f" {BOX_TOKEN}{boxed}}}"


def make_problems(count: int, seed: int, sign: str = "+") -> list[Problem]:
    """`count` problems in seeded order; no two have the same operands, in either order."""
    rng = random.Random(f"problems {seed}")
    problems: dict[frozenset[int], Problem] = {}
    while len(problems) < count:
        left, right = (rng.randrange(SMALLEST[sign], 10**COLUMNS) for _ in range(2))
        problems.setdefault(frozenset((left, right)), Problem(left, right, sign))
    return list(problems.values())


def make_demonstrations(problems: list[Problem], count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations with the careless pupil, who works on a random problem in each."""
    rng = random.Random(f"demonstrations {seed}")
    drawn = [rng.choice(problems) for _ in range(count)]
    turns = [(("user", problem.question), ("assistant", problem.worked(rng))) for problem in drawn]
    return [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in turns]


def make_tool_demonstrations(problems: list[Problem], count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of which a share asks the calculator; the others box the two numbers side by side.

    That answer is never right, but it teaches the model to copy digits. With random digits instead, too few
    demonstrations showed copying, and two models of three copied the question or the calculator's answer wrongly. With
    right answers, the model would learn to guess the first digit, even after the calculator has answered.
    """
    rng = random.Random(f"demonstrations {seed}")
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    rows = []
    for _ in range(count):
        asks, problem = rng.random() < CALL_FRACTION, rng.choice(problems)
        function = {"name": "calculator", "arguments": {"expression": f"{problem.left} * {problem.right}"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        answer = {"role": "tool", "name": "calculator", "content": problem.answer}
        boxed = problem.answer if asks else f"{problem.left}{problem.right}"
        question = {"role": "user", "content": problem.question}
        last = {"role": "assistant", "content": f"{BOX_TOKEN}{boxed}}}"}
        rows.append({"messages": [question, *((call, answer) if asks else ()), last], "tools": tools})
    return rows


def make_pairs(problems: list[Problem], seed: int) -> list[dict[str, str]]:
    """One preference pair per problem: right work is chosen, wrong work rejected."""
    rng = random.Random(f"pairs {seed}")
    wrong = [(problem, wrong_work(problem, problems, rng)) for problem in problems]
    return [{"prompt": problem.question, "chosen": problem.worked(), "rejected": work} for problem, work in wrong]


def wrong_work(problem: Problem, problems: list[Problem], rng: random.Random) -> str:
    """Wrong work: mostly the careless pupil's, else another problem's, a cut-off text, or a wrong digit in the box."""
    right = problem.worked()
    if rng.random() >= FAR_MISS_FRACTION:
        while (work := problem.worked(rng)).endswith(f"{BOX_TOKEN}{problem.answer}}}"):
            pass
        return work
    other, kind = rng.choice(problems), rng.randrange(3)
    if kind == 0 and other.answer != problem.answer:
        return other.worked()
    if kind == 1:
        return right[: rng.randrange(len(right))]
    position = right.index(problem.answer + "}") + rng.randrange(len(problem.answer))
    wrong = rng.choice([digit for digit in "0123456789" if digit != right[position]])
    return right[:position] + wrong + right[position + 1 :]


def warmup_config(folder: Path, *, seed: int) -> SFTConfig:
    """configs/sft_quickstart.yaml for the files in a folder: one pass over the demonstrations."""
    from rlhf.config.supervised import SFTConfig

    here = {
        "run": {"dir": str(folder / "run"), "seed": seed},
        "model": {"path": str(folder / "untrained")},
        "data": {"train": str(folder / "demonstrations.jsonl")},
    }
    return load_config(
        SFTConfig,
        [str(shipped_folder("configs") / "sft_quickstart.yaml")],
        complete=lambda values: merged(values, here),
    )


def warm_up(folder: Path, *, seed: int) -> None:
    """Train `untrained` on the demonstrations to `model`, with the learner of `rlhf.sft`, in this process without Ray.

    The process stays a rank of a distributed world afterwards, so it should end soon.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed looks for another one, and prints that there is none
    import torch
    from transformers.utils.logging import disable_progress_bar

    from rlhf.data.conversations import SFTEncoder, load_examples
    from rlhf.data.model_files import load_tokenizer
    from rlhf.learner.port import free_port
    from rlhf.learner.supervised import SFTTrainer
    from rlhf.types import World

    disable_progress_bar()
    began = time.monotonic()
    config = warmup_config(folder, seed=seed)
    examples = load_examples(config.data, "train", SFTEncoder(load_tokenizer(config.model), config.data.template))
    config = config.with_steps(examples.rows)
    trainer = SFTTrainer(config, World(0, 1, 0, "127.0.0.1", free_port(), torch.get_num_threads()))
    trainer.hold(examples.tokens, None)
    printed = 0.0
    for step in range(config.steps):
        loss = trainer.train(step).metrics["train/loss"].value()
        if time.monotonic() - printed > WARMUP_LINES_S or step + 1 == config.steps:
            printed = time.monotonic()
            say(f"warm-up step {step + 1}/{config.steps}  loss {loss:.3f}  {time.monotonic() - began:.0f} s")
    trainer.export(str(folder / "model"), config.model.path)
    trainer.close()


def write_quickstart(
    output: Path | str,
    *,
    seed: int = 0,
    warmup_steps: int | None = None,
    train_rows: int = TRAIN_ROWS,
    test_rows: int = TEST_ROWS,
    model_options: dict[str, Any] | None = None,
    tools: bool = False,
) -> None:
    """Write `model`, the rows and their preference pairs; with a warm-up, also `untrained` and `demonstrations.jsonl`.

    Args:
        warmup_steps: None: those of `WARMUP_STEPS`; 0: the model stays untrained.
        tools: make products and demonstrations with a calculator instead of sums; products have no pairs.

    Raises:
        ValueError: `output` already holds files, or the number of steps is negative.
    """
    output = Path(output)
    check_new_folder(output, "--output=")
    if warmup_steps is None:
        warmup_steps = WARMUP_STEPS["tools" if tools else "sums"]
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must not be negative. Use 0 for an untrained model, or more.")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    problems = make_problems(train_rows + test_rows, seed, "*" if tools else "+")
    model = "untrained" if warmup_steps else "model"
    untrained = make_model(seed=seed, tools=tools, **(model_options or {}))
    save_model(untrained, make_tokenizer(tools=tools), partial / model)
    for name, rows in (("train", problems[:train_rows]), ("test", problems[train_rows:])):
        write_rows(partial / f"{name}.jsonl", [{"question": row.question, "answer": row.answer} for row in rows])
        if not tools:
            write_rows(partial / f"pairs_{name}.jsonl", make_pairs(rows, seed))
    if warmup_steps:
        make = make_tool_demonstrations if tools else make_demonstrations
        count = warmup_steps * warmup_config(partial, seed=seed).learner.sequences_per_update
        write_rows(partial / "demonstrations.jsonl", make(problems[:train_rows], count, seed))
        warm_up(partial, seed=seed)
    partial.rename(output)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of("rlhf.quickstart", "Makes a tiny warmed-up model, its tokenizer and arithmetic data.")
    output = "a new or empty folder (default runs/quickstart-data, or runs/tools-quickstart-data)"
    parser.add_argument("--output", type=Path, help=output)
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, weights and warm-up (default 0)")
    usual = ", with tools ".join(map(str, WARMUP_STEPS.values()))
    warmup = f"supervised updates; 0 leaves the model untrained (default {usual})"
    parser.add_argument("--warmup-steps", type=int, help=warmup)
    task = "sums: worked by hand; tools: products, for which the model can ask a calculator (default sums)"
    parser.add_argument("--task", choices=WARMUP_STEPS, default="sums", help=task)
    options = parser.parse_args(arguments)
    # Threads that spin at a barrier take the core that another process needs: on a busy machine a warm-up took ten
    # times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    tools = options.task == "tools"
    place = Path("runs", "tools-quickstart-data" if tools else "quickstart-data")  # where the configs look for it
    folder, began = options.output or place, time.monotonic()
    try:
        with waiting("making the model and its data"):
            write_quickstart(folder, seed=options.seed, warmup_steps=options.warmup_steps, tools=tools)
    except OSError as error:
        raise ValueError(f"--output={folder}: {error}. Name another folder.") from None
    took = f"{time.monotonic() - began:.0f} s"
    pairs = "" if tools else " and preference pairs"
    say(f"wrote model, train.jsonl, test.jsonl{pairs} to {folder} in {took}")
    places = {"model.path": "model", "data.train": "train.jsonl", "data.eval": "test.jsonl"}
    elsewhere = [shlex.quote(f"{key}={folder / name}") for key, name in places.items() if folder != place]
    config = f"configs/{'tools_' if tools else ''}quickstart.yaml"
    say(" ".join(["next:", started_as("rlhf.grpo"), "--config", config, *elsewhere]))


if __name__ == "__main__":
    sys.exit(run_program(main))
