"""Program: makes the tiny model, tokenizer and arithmetic data of the quickstart, without a network.

    python -m rlhf.quickstart --output DIR [--seed N]

The task is the sum of two three-digit numbers, worked column by column from the right and then boxed:

    What is 347 + 285?   ->   12 13 06 \\boxed{632}

In a warm-up the model imitates a careless pupil, who forgets most carries and sometimes makes a slip. Imitation reaches
the pupil's accuracy, about a third, also in greedy decoding. Reinforcement learning from graded answers has to teach
the rule that the pupil applies only sometimes. No training uses the problems of the test files.

Preference pairs for `rlhf.reward_model` are made from the same problems: right work is preferred to wrong work.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.cli import check_new_folder, run_program, started_as
from rlhf.config.printing import say

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

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

CONTEXT_TOKENS = 2048

INITIAL_WEIGHT_STD = 0.05  # measured: the warm-up converges sooner than from the 0.02 of full-size models

COLUMNS = 3
FORGOTTEN_CARRY_FRACTION = 0.75  # more than half, so that the most likely answer has no carry
SLIP_FRACTION = 0.12  # columns that are off by one

# Share of rejected responses that no pupil would write; without them a policy finds responses that the reward model
# has never seen.
FAR_MISS_FRACTION = 0.25

TRAIN_ROWS = 16_384
TEST_ROWS = 512
WARMUP_STEPS = 600
WARMUP_BATCH = 64
WARMUP_LR = 3e-3
WARMUP_RAMP_STEPS = 40
LOSS_IGNORE_ID = -100  # the label that torch's cross entropy skips


@dataclass(frozen=True)
class Problem:
    """One sum of two numbers of `COLUMNS` digits."""

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


def make_problems(count: int, seed: int) -> list[Problem]:
    """`count` problems in seeded order; no two have the same operands, in either order."""
    low, high = 10 ** (COLUMNS - 1), 10**COLUMNS
    rng = random.Random(f"problems {seed}")
    seen: set[tuple[int, int]] = set()
    problems: list[Problem] = []
    while len(problems) < count:
        left, right = rng.randrange(low, high), rng.randrange(low, high)
        pair = (min(left, right), max(left, right))
        if pair not in seen:
            seen.add(pair)
            problems.append(Problem(left, right))
    return problems


def make_tokenizer() -> Qwen2Tokenizer:
    """A byte-level tokenizer (256 bytes, a few markers) with a chat template; it encodes any text, after NFC."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    # AutoTokenizer loads a Qwen2Tokenizer for every model of this type, so the tokenizer is one from the start.
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # every byte is known; the default would add a token
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=list(ROLE_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(BOX_TOKEN, special=False, normalized=False)])
    return tokenizer


def make_model(
    *, hidden_size: int = 128, num_layers: int = 3, num_heads: int = 4, tie_embeddings: bool = True, seed: int = 0
) -> Qwen2ForCausalLM:
    """An untrained float32 Qwen2 for the vocabulary of `make_tokenizer`; vLLM on CPU needs heads of 32 or more."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
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
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


def demonstration_batches(
    tokenizer: Qwen2Tokenizer, problems: list[Problem], *, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless seeded batches of the careless pupil's work: token ids and labels, both [B, L].

    Labels are the token ids of the response and its end token; `LOSS_IGNORE_ID` at the prompt and at the padding.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rng = random.Random(f"demonstrations {seed}")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
        )
        for problem in problems
    ]
    while True:
        rows = [rng.randrange(len(problems)) for _ in range(batch_size)]
        token_ids, labels = [], []
        for row in rows:
            response = tokenizer.encode(problems[row].worked(rng) + END_TOKEN, add_special_tokens=False)
            token_ids.append(torch.tensor(prompts[row] + response))
            labels.append(torch.tensor([LOSS_IGNORE_ID] * len(prompts[row]) + response))
        yield (
            pad_sequence(token_ids, batch_first=True, padding_value=int(tokenizer.pad_token_id)),
            pad_sequence(labels, batch_first=True, padding_value=LOSS_IGNORE_ID),
        )


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], *, steps: int, seed: int
) -> Iterator[float]:
    """Supervised learning on the careless pupil's work; yields the loss of every step, in nats per response token."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LR, betas=(0.9, 0.98), weight_decay=0.0)
    batches = demonstration_batches(tokenizer, problems, batch_size=WARMUP_BATCH, seed=seed)
    model.train()
    for step in range(1, steps + 1):
        ramp = min(1.0, step / WARMUP_RAMP_STEPS)
        decay = min(1.0, 2 * (1 - (step - 1) / steps))  # flat for the first half, then linear to 0
        optimizer.param_groups[0]["lr"] = WARMUP_LR * ramp * decay
        token_ids, labels = next(batches)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=LOSS_IGNORE_ID
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
    model.eval()


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder; `save_pretrained` of the model would import DeepSpeed if it is installed."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_quickstart(
    output: Path | str,
    *,
    seed: int = 0,
    warmup_steps: int = WARMUP_STEPS,
    train_rows: int = TRAIN_ROWS,
    test_rows: int = TEST_ROWS,
    model_options: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Write `model`, `train.jsonl`, `test.jsonl` and preference pairs for both; `on_step` receives each warm-up loss.

    Raises:
        ValueError: `output` already holds files, or the number of steps is negative.
    """
    output = Path(output)
    check_new_folder(output, "--output=")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps}: must not be negative. Use 0 for an untrained model, or more.")
    problems = make_problems(train_rows + test_rows, seed)
    tokenizer = make_tokenizer()
    model = make_model(seed=seed, **(model_options or {}))
    losses = warm_up(model, tokenizer, problems[:train_rows], steps=warmup_steps, seed=seed)
    for step, loss in enumerate(losses, start=1):
        on_step(step, loss)
    output.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, output / "model")
    for name, rows in (("train", problems[:train_rows]), ("test", problems[train_rows:])):
        write_rows(output / f"{name}.jsonl", [{"question": row.question, "answer": row.answer} for row in rows])
        write_rows(output / f"pairs_{name}.jsonl", make_pairs(rows, seed))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=started_as("rlhf.quickstart"),
        description="Makes a tiny warmed-up model, its tokenizer and arithmetic data.",
    )
    parser.add_argument("--output", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, weights and warm-up (default 0)")
    parser.add_argument(
        "--warmup-steps",
        type=int,
        default=WARMUP_STEPS,
        help=f"supervised updates; 0 leaves the model untrained (default {WARMUP_STEPS})",
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    report_every = max(1, options.warmup_steps // 5)

    def on_step(step: int, loss: float) -> None:
        if step % report_every == 0 or step == 1:
            seconds = time.monotonic() - began
            say(f"warm-up step {step}/{options.warmup_steps}  loss {loss:.3f}  {seconds:.0f} s")

    try:
        write_quickstart(options.output, seed=options.seed, warmup_steps=options.warmup_steps, on_step=on_step)
    except OSError as error:
        raise ValueError(f"--output={options.output}: {error}. Name another folder.") from None
    seconds = time.monotonic() - began
    say(f"wrote model, train.jsonl, test.jsonl and preference pairs to {options.output} in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(run_program(main))
