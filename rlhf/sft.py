"""Program: supervised fine-tuning on conversations, or on prompts and completions.

    python -m rlhf.sft --config configs/sft_quickstart.yaml [section.key=value ...]

A training step is one optimizer step on a minibatch of rows: the mean cross entropy of their trained tokens, in nats.
`data/conversations.py` says which tokens of a row are trained; the loop is `run/supervised_loop.py`. The model in
run.dir/model is one to start rlhf.grpo from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from rlhf.config import cli
from rlhf.config.printing import say
from rlhf.config.supervised import SFTConfig
from rlhf.plan.report import printed
from rlhf.plan.start_checks import run_problems

DESCRIPTION = "Supervised fine-tuning on conversations, or on prompts and completions."


def main(argv: Sequence[str] | None = None) -> None:
    config, arguments = cli.parse("rlhf.sft", DESCRIPTION, SFTConfig, argv, add_flags=cli.run_flags, check=run_problems)
    if printed(config, arguments):
        return
    from rlhf.data.conversations import SFTEncoder, read_examples
    from rlhf.data.model_files import load_tokenizer
    from rlhf.run.restarts import train_with_restarts
    from rlhf.run.supervised_loop import train

    encoder = SFTEncoder(load_tokenizer(config.model), config.data.template)
    data = read_examples(config.data, encoder)
    for warning in encoder.warnings(data.train.tokens):
        say(f"warning: {warning}", file=sys.stderr)
    say(f"first row, of which the model learns what is between >>> and <<<:\n{encoder.shown(data.train.tokens)}")
    train_with_restarts(config.with_steps(data.train.rows), arguments, partial(train, data=data))


if __name__ == "__main__":
    from rlhf.run.supervisor import supervise

    sys.exit(supervise(main))
