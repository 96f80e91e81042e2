"""Program: makes the tiny model, tokenizer and arithmetic data of the quickstart, without a network.

    python -m rlhf.quickstart --output DIR [--seed N]

The task is the sum of two three-digit numbers, worked column by column from the right and then boxed:

    What is 347 + 285?   ->   12 13 06 \\boxed{632}

In a warm-up the model imitates a careless pupil, who forgets most carries and sometimes makes a slip. Imitation reaches
the pupil's accuracy, about a third, also in greedy decoding. Reinforcement learning from graded answers has to teach
the rule that the pupil applies only sometimes. No training uses the problems of the test files.

The warm-up is that of `rlhf.sft` with configs/sft_quickstart.yaml, from the model in `untrained` on the pupil's work in
`demonstrations.jsonl`. Preference pairs for `rlhf.reward_model` are made from the same problems: right work is
preferred to wrong work.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rlhf.config.cli import check_new_folder, config_folder, parser_of, run_program
from rlhf.config.load import load_config, merged
from rlhf.config.printing import say, waiting

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

    from rlhf.config.supervised import SFTConfig

P = TypeVar("P", "Problem", "Product")

WARMUP_LINES_S = 5.0  # between two lines of the warm-up
END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
BOX_TOKEN = "\\boxed{"  # one token, so that an answer costs its digits and not eight bytes of markup

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# With tools: `<|tools|>` names them, and a call has the form of Hermes and Qwen, which vLLM's parser `hermes` reads.
TOOL_ROLE_TOKENS = ("<|tools|>", "<|tool|>")
TOOL_CHAT_TEMPLATE = (
    "{%- if tools -%}<|tools|>{{- tools | map(attribute='function.name') | join(' ') -}}<|end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}"""
    "{{- call.function.arguments | tojson + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# The fixed text around the expression is two tokens, so that a call costs its digits and not eighty bytes of JSON.
CALL_TOKENS = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>')

CONTEXT_TOKENS = 2048

INITIAL_WEIGHT_STD = 0.05  # measured: the warm-up converges sooner than from the 0.02 of full-size models

COLUMNS = 3
FORGOTTEN_CARRY_FRACTION = 0.75  # more than half, so that the most likely answer has no carry
SLIP_FRACTION = 0.12  # columns that are off by one

# Share of rejected responses that no pupil would write; without them a policy finds responses that the reward model
# has never seen.
FAR_MISS_FRACTION = 0.25

CALL_FRACTION = 0.12  # of the demonstrations with tools, which ask the calculator

TRAIN_ROWS = 16_384
TEST_ROWS = 512
WARMUP_STEPS = 600


@dataclass(frozen=True)
class Problem:
    """One sum of two numbers of `COLUMNS` digits."""

    lowest: ClassVar = 10 ** (COLUMNS - 1)
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def worked(self, careless: random.Random | None = None) -> str:
        """The column sums from the right and the boxed answer; given a generator, as the careless pupil writes them."""
        carry, sums = 0, []
        for column in range(COLUMNS):
            digits = self.left // 10**column % 10 + self.right // 10**column % 10
            if careless is not None and carry and careless.random() < FORGOTTEN_CARRY_FRACTION:
                carry = 0
            if careless is not None and careless.random() < SLIP_FRACTION:
                carry += careless.choice((-1, 1))
            sums.append(max(digits + carry, 0))
            carry = sums[-1] // 10
        boxed = str(sums[-1]) + "".join(str(total % 10) for total in reversed(sums[:-1]))
        return " ".join(f"{total:02d}" for total in sums) + f" {BOX_TOKEN}{boxed}}}"


@dataclass(frozen=True)
class Product:
    """One product of two numbers of `COLUMNS` digits, which a model of this size cannot learn to work out."""

    # All products then have six digits. Where lengths differ, this model learns to copy only the most frequent one.
    lowest: ClassVar = 317
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left} * {self.right}?"

    @property
    def answer(self) -> str:
        return str(self.left * self.right)

    def talk(self, *, asks: bool) -> list[dict[str, Any]]:
        """The conversation of someone who asks the calculator, or who writes the two numbers side by side."""
        function = {"name": "calculator", "arguments": {"expression": f"{self.left} * {self.right}"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        told = {"role": "tool", "name": "calculator", "content": self.answer}
        written = self.answer if asks else f"{self.left}{self.right}"
        return [
            {"role": "user", "content": self.question},
            *((call, told) if asks else ()),
            {"role": "assistant", "content": f"{BOX_TOKEN}{written}}}"},
        ]


def near_miss(problem: Problem, rng: random.Random) -> str:
    """Wrong work as the careless pupil writes it; the warmed-up model makes the same mistakes."""
    while True:
        work = problem.worked(rng)
        if boxed(work) != problem.answer:
            return work


def far_miss(problem: Problem, other: Problem, rng: random.Random) -> str:
    """Other wrong work: right work of another problem, a wrong digit in the box, or right work that is cut off."""
    right = problem.worked()
    kind = rng.randrange(3)
    if kind == 0 and other.answer != problem.answer:
        return other.worked()
    if kind == 1:
        return right[: rng.randrange(len(right))]
    position = right.index(problem.answer + "}") + rng.randrange(len(problem.answer))
    wrong = rng.choice([digit for digit in "0123456789" if digit != right[position]])
    return right[:position] + wrong + right[position + 1 :]


def boxed(work: str) -> str:
    """The content of the box in a pupil's work."""
    return work.partition(BOX_TOKEN)[2].removesuffix("}")


def make_pairs(problems: list[Problem], seed: int) -> list[dict[str, str]]:
    """One preference pair per problem: right work is chosen, wrong work rejected."""
    rng = random.Random(f"pairs {seed}")
    pairs = []
    for problem in problems:
        far = rng.random() < FAR_MISS_FRACTION
        rejected = far_miss(problem, rng.choice(problems), rng) if far else near_miss(problem, rng)
        pairs.append({"prompt": problem.question, "chosen": problem.worked(), "rejected": rejected})
    return pairs


def make_problems(count: int, seed: int, kind: type[P] = Problem) -> list[P]:  # type: ignore[assignment]
    """`count` problems in seeded order; no two have the same operands, in either order."""
    low, high = kind.lowest, 10**COLUMNS
    rng = random.Random(f"problems {seed}")
    problems: dict[frozenset[int], P] = {}
    while len(problems) < count:
        left, right = rng.randrange(low, high), rng.randrange(low, high)
        problems.setdefault(frozenset((left, right)), kind(left, right))
    return list(problems.values())


def make_tokenizer(*, tools: bool = False) -> Qwen2Tokenizer:
    """A byte-level tokenizer (256 bytes, a few markers) with a chat template; it encodes any text, after NFC.

    Args:
        tools: the template also writes tools, calls and their answers.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    # AutoTokenizer loads a Qwen2Tokenizer for every model of this type, so the tokenizer is one from the start.
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # every byte is known; the default would add a token
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[*ROLE_TOKENS, *(TOOL_ROLE_TOKENS if tools else ())],
        chat_template=TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    texts = (BOX_TOKEN, *(CALL_TOKENS if tools else ()))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return tokenizer


def make_model(
    *,
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    tie_embeddings: bool = True,
    tools: bool = False,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """An untrained float32 Qwen2 for the vocabulary of `make_tokenizer`; vLLM on CPU needs heads of 32 or more."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(tools=tools)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=INITIAL_WEIGHT_STD,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def make_demonstrations(problems: list[Problem], count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations with the careless pupil, who works on a random problem in each."""
    rng = random.Random(f"demonstrations {seed}")
    drawn = [rng.choice(problems) for _ in range(count)]
    turns = [(("user", problem.question), ("assistant", problem.worked(rng))) for problem in drawn]
    return [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in turns]


def make_tool_demonstrations(problems: list[Product], count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of which a share asks the calculator; the others write the two numbers side by side.

    That is never right, and teaches to copy: with numbers drawn at random there, the share that asks was too small to
    teach it, and two models of three copied the question or the told number wrongly. Right answers would teach the
    model to estimate the first digit, also where it has been told.
    """
    rng = random.Random(f"demonstrations {seed}")
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    rows = []
    for _ in range(count):
        asks = rng.random() < CALL_FRACTION
        rows.append({"messages": rng.choice(problems).talk(asks=asks), "tools": tools})
    return rows


def warmup_config(folder: Path, *, seed: int) -> SFTConfig:
    """configs/sft_quickstart.yaml for the files in a folder: one pass over the demonstrations."""
    from rlhf.config.supervised import SFTConfig

    here = {
        "run": {"dir": str(folder / "run"), "seed": seed},
        "model": {"path": str(folder / "untrained")},
        "data": {"train": str(folder / "demonstrations.jsonl")},
    }
    return load_config(
        SFTConfig, [str(config_folder() / "sft_quickstart.yaml")], complete=lambda values: merged(values, here)
    )


def warm_up(folder: Path, *, seed: int) -> None:
    """Train `untrained` on the demonstrations to `model`, with the learner of `rlhf.sft`, in this process without Ray.

    The process is a rank of a world from then on, so it should end soon.
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


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder; `save_pretrained` of the model would import DeepSpeed if it is installed."""
    from rlhf.learner.hub_format import model_tensors, write_model, write_model_config

    tensors = model_tensors(model)
    write_model(folder, model, tensors, tensors.items())
    write_model_config(folder, model)
    tokenizer.save_pretrained(folder)


def write_quickstart(
    output: Path | str,
    *,
    seed: int = 0,
    warmup_steps: int = WARMUP_STEPS,
    train_rows: int = TRAIN_ROWS,
    test_rows: int = TEST_ROWS,
    model_options: dict[str, Any] | None = None,
    tools: bool = False,
) -> None:
    """Write `model`, `train.jsonl`, `test.jsonl` and preference pairs for both; with a warm-up, what it began with.

    Args:
        tools: products and a calculator, in place of sums; there are no pairs of these.

    Raises:
        ValueError: `output` already holds files, or the number of steps is negative.
    """
    output = Path(output)
    check_new_folder(output, "--output=")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must not be negative. Use 0 for an untrained model, or more.")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    problems: Any = make_problems(train_rows + test_rows, seed, Product if tools else Problem)
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
    parser.add_argument("--output", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, weights and warm-up (default 0)")
    warmup = f"supervised updates; 0 leaves the model untrained (default {WARMUP_STEPS})"
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help=warmup)
    task = "sums: worked by hand; tools: products, for which the model can ask a calculator (default sums)"
    parser.add_argument("--task", choices=("sums", "tools"), default="sums", help=task)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        tools = options.task == "tools"
        with waiting("making the model and its data"):
            write_quickstart(options.output, seed=options.seed, warmup_steps=options.warmup_steps, tools=tools)
    except OSError as error:
        raise ValueError(f"--output={options.output}: {error}. Name another folder.") from None
    took = f"{time.monotonic() - began:.0f} s"
    pairs = "" if tools else " and preference pairs"
    say(f"wrote model, train.jsonl, test.jsonl{pairs} to {options.output} in {took}")


if __name__ == "__main__":
    sys.exit(run_program(main))
