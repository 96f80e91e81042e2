"""Any training run (`run`), the rollout side of a run with engines (`rollout_loop`), and the files of both.
`supervised_loop` is shared by the programs that learn from fixed examples.

After a fault: `restarts` for the whole run; `cluster/engine_recovery.py` for one engine.

Where to add a program: its config, a `TrainingProgramConfig`; a file at the top level that holds its loop, as `grpo.py`
and `sft.py` do; a line in `config.cli.PROGRAMS`. A program without engines uses `Run` alone; one that
learns from fixed examples has a `SupervisedConfig`, a loss (`learner.supervised.SupervisedRank`) and an encoder of its
rows (`data/conversations.py`). `Run.progress` returns further fields for its checkpoints. `--plan` is for programs
with engines.
"""
