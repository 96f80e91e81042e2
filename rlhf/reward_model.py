"""Program: trains a reward model from preference pairs.

    python -m rlhf.reward_model --config configs/reward_model_quickstart.yaml [section.key=value ...]

A row has `chosen` and `rejected`: whole conversations as lists of role/content messages, or answers to a `prompt`. A
training step is one optimizer step on a minibatch of pairs: Bradley-Terry, through the same learner as the policy's.
run.dir/model holds, for the runs that use it, its template and the mean and std of its scores on training pairs.
arXiv:1909.08593, sec. 2.1, normalizes on responses of the start policy instead: that is
`reward_model.reference_samples` of a run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from rlhf.check.report import print_plan
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.printing import say, waiting
from rlhf.config.reward_model import RewardTrainingConfig

DESCRIPTION = "Train a reward model from preference pairs (Bradley-Terry)."


def start(config: RewardTrainingConfig, flags: argparse.Namespace) -> None:
    """Run the training of a checked config; `flags` as for `train_with_restarts`."""
    with waiting("starting: importing torch and Ray"):
        from rlhf.data.conversations import pair_encoder, read_examples
        from rlhf.data.model_files import embedding_rows, load_tokenizer
        from rlhf.run.folder import with_date
        from rlhf.run.restarts import train_with_restarts
        from rlhf.run.supervised_loop import train_on_examples

    config = with_date(config)
    notes = Counter[str]()
    with waiting("starting: reading the data"):
        encoder = pair_encoder(load_tokenizer(config.model), config.data.template, config.data.clock, notes=notes)
        data = read_examples(config.data, encoder, vocab_size=embedding_rows(config.model.path))
    for note, sides in notes.items():
        say(f"warning: data: in {sides} sides of pairs {note}.", file=sys.stderr)
    train_with_restarts(config.with_steps(data.train.rows), flags, partial(train_on_examples, data=data))


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.reward_model", DESCRIPTION, RewardTrainingConfig, argv, check=start_problems)
    if not print_plan(config, arguments):
        start(config, arguments)


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
