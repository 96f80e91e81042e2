"""From Python: `import rlhf` gives `train`, `Trainer`, `evaluate_model` and `load_config`, which are here.

    layers (files, mappings, keys) and objects ── configs.py, objects.py ──> a config, checked like a command line's
    train.py        a whole run of a program
    trainer.py      a loop of one's own: sample, update, publish
    evaluation.py   rlhf evaluate

Everything that a run reads is named in its config: an object gets a name (`processes/objects.py`), rows and models that
exist in memory alone become files of the run folder.
"""
