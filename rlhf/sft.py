"""Program: supervised fine-tuning on conversations, or on prompts and completions.

    python -m rlhf.sft --config configs/sft_quickstart.yaml [section.key=value ...]

A training step is one optimizer step on a minibatch of rows: the mean cross entropy of their trained tokens, in nats.
`data/conversations.py` says which tokens of a row are trained. rlhf.grpo can start from the model in run.dir/model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from rlhf.check.report import print_plan
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.printing import say, waiting
from rlhf.config.supervised import SFTConfig

DESCRIPTION = "Supervised fine-tuning on conversations, or on prompts and completions."


def start(config: SFTConfig, flags: argparse.Namespace) -> None:
    """Run the training of a checked config; `flags` as for `train_with_restarts`."""
    with waiting("starting: importing torch and Ray"):
        from rlhf.data.conversations import SFTEncoder, read_examples
        from rlhf.data.model_files import embedding_rows, load_tokenizer
        from rlhf.data.turns import stop_token_ids
        from rlhf.run.folder import with_date
        from rlhf.run.restarts import train_with_restarts
        from rlhf.run.supervised_loop import train_on_examples

    config = with_date(config)
    with waiting("starting: reading the data"):
        tokenizer = load_tokenizer(config.model)
        stop_ids = stop_token_ids(config.model.path, tokenizer)
        encoder = SFTEncoder(tokenizer, config.data.template, config.data.template_arguments, stop_ids)
        data = read_examples(config.data, encoder, vocab_size=embedding_rows(config.model.path))
    for warning in encoder.warnings(data.train.tokens):
        say(f"warning: {warning}", file=sys.stderr)
    say(f"first row, of which the model learns what is between >>> and <<<:\n{encoder.shown(data.train.tokens)}")
    train_with_restarts(config.with_steps(data.train.rows), flags, partial(train_on_examples, data=data))


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.sft", DESCRIPTION, SFTConfig, argv, check=start_problems)
    if not print_plan(config, arguments):
        start(config, arguments)


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
