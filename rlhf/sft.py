"""Program: supervised fine-tuning on conversations, or on prompts and completions.

    python -m rlhf.sft --config configs/sft_quickstart.yaml [section.key=value ...]

A training step is one optimizer step on a minibatch of rows: the mean cross entropy of their trained tokens, in nats.
`data/conversations.py` says which tokens of a row are trained. rlhf.grpo can start from the model in run.dir/model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlhf.check.report import print_plan
from rlhf.check.start_checks import run_problems
from rlhf.config import cli
from rlhf.config.printing import say, waiting
from rlhf.config.supervised import SFTConfig

if TYPE_CHECKING:
    from rlhf.data.conversations import TrainEval
    from rlhf.run.run import Run

DESCRIPTION = "Supervised fine-tuning on conversations, or on prompts and completions."


async def train(run: Run[SFTConfig], data: TrainEval) -> None:
    """The run: evaluate, take the steps, evaluate, export.

    The learners hold all rows. Each step they draw its minibatch by seed and step, and take one optimizer step on it.
    """
    from rlhf.run.supervised_loop import supervised_loop

    async with supervised_loop(run, data) as loop:
        await loop.evaluate_if_due(run.first_step)
        for step in range(run.first_step, run.config.steps):
            await loop.train(step)
            await loop.evaluate_if_due(step + 1)
            await run.checkpoint_if_due(step + 1)  # SIGTERM ends the run here, saved
        await run.finish({})


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.sft", DESCRIPTION, SFTConfig, argv, check=run_problems)
    if print_plan(config, arguments):
        return
    with waiting("starting: importing torch and Ray"):
        from rlhf.data.conversations import SFTEncoder, read_examples
        from rlhf.data.model_files import embedding_rows, load_tokenizer
        from rlhf.data.turns import stop_token_ids
        from rlhf.run.folder import with_date
        from rlhf.run.restarts import train_with_restarts

    config = with_date(config)
    with waiting("starting: reading the data"):
        tokenizer = load_tokenizer(config.model)
        stop_ids = stop_token_ids(config.model.path, tokenizer)
        encoder = SFTEncoder(tokenizer, config.data.template, config.data.template_arguments, stop_ids)
        data = read_examples(config.data, encoder, vocab_size=embedding_rows(config.model.path))
    for warning in encoder.warnings(data.train.tokens):
        say(f"warning: {warning}", file=sys.stderr)
    say(f"first row, of which the model learns what is between >>> and <<<:\n{encoder.shown(data.train.tokens)}")
    train_with_restarts(config.with_steps(data.train.rows), arguments, partial(train, data=data))


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
