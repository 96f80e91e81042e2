"""Any training run (`run`), the rollout side of a run with engines (`rollout_loop`), and the files of both.
`supervised_loop` is shared by the programs that learn from fixed examples.

After a fault: `restarts` for the whole run; `cluster/engine_recovery.py` for one engine.

Where to add a program: its config, a `TrainingProgramConfig`; a file at the top level, with its loop as in `grpo.py`; a
line in `config.cli.PROGRAMS`. One without engines uses `Run` alone. One that learns from fixed examples, as `sft.py`,
has a `SupervisedConfig`, a loss (`learner.supervised.SupervisedRank`) and an encoder of its rows
(`data/conversations.py`). It passes `progress`, which returns further fields for checkpoints, to
`Run.checkpoint_if_due` and `Run.finish`.
"""
