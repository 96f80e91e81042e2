"""rlhf: GRPO and PPO for language models, on Ray, vLLM and DeepSpeed.

    rlhf.train(...)            a whole run, with functions, data sets and models as arguments
    rlhf.Trainer(...)          a loop of one's own
    rlhf.evaluate_model(...)   metrics of a model
    rlhf.load_config(...)      a checked config

They are imported when they are first used; `import rlhf` alone imports neither torch nor Ray. docs/python.md has
examples. The programs of the command line are modules: `rlhf.grpo`, `rlhf.evaluate` and others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api.configs import load_config
    from rlhf.api.evaluation import evaluate_model
    from rlhf.api.train import train
    from rlhf.api.trainer import Trainer

_MODULES = {"train": "train", "Trainer": "trainer", "evaluate_model": "evaluation", "load_config": "configs"}

DISTRIBUTION = "rlhf-trainer"  # the name of the package where packages are installed and listed

__all__ = ["Trainer", "evaluate_model", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(DISTRIBUTION)
    if name not in _MODULES:
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"rlhf.api.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
