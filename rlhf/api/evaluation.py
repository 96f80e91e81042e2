"""`rlhf.evaluate_model`: `rlhf evaluate` from Python, with objects in and numbers out."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import evaluate
from rlhf.api.configs import as_layers, check_alone, read_config
from rlhf.config import cli
from rlhf.config.printing import waiting
from rlhf.config.secrets import hide_in_output
from rlhf.processes import objects


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a model.

    Attributes:
        metrics: as `rlhf evaluate --output` writes them: `eval/<data set>/avg@k` and others.
        responses: as `rlhf evaluate --responses` writes them: one dict per response, with its text and grade.
    """

    metrics: dict[str, float]
    responses: list[dict[str, Any]]


def evaluate_model(
    config: Any = (),
    *,
    program: Any = "grpo",
    suite: str | None = None,
    suite_dir: str | None = None,
    only: str | None = None,
    **given: Any,
) -> Evaluation:
    """Sample and grade responses of a model to data.eval; nothing is trained.

        rlhf.evaluate_model(model="runs/a/model", data=rows, reward=score, **{"cluster.device": "cpu"})

    Args:
        config: as for `rlhf.train`; keys of the training need not be set.
        program: whose config it is, grpo or ppo.
        suite, suite_dir, only: as --suite, --suite-dir and --only of `rlhf evaluate`.
        given: objects and keys, as for `rlhf.train`; `data` is what is evaluated on, as `eval_data` is.

    Raises:
        ValueError: the config, the data or the machine is not what the evaluation needs.
        RuntimeError: an engine failed.
    """
    if "data" in given:
        if "eval_data" in given:
            raise ValueError("data and eval_data: an evaluation reads one of them. Give data alone.")
        given = {("eval_data" if name == "data" else name): value for name, value in given.items()}
    if program not in cli.WITH_ENGINES:
        raise ValueError(
            f"program={program!r}: it has no engines to evaluate with. Use {' or '.join(cli.WITH_ENGINES)}."
        )
    check_alone()
    config = [*as_layers(config), evaluate.values_of_suite(suite, suite_dir, only)]
    with hide_in_output(), tempfile.TemporaryDirectory(prefix="rlhf-objects-") as folder:
        with waiting("starting: checking the config, and the data, models and functions that it names"):
            checked = read_config(
                config, program=program, given=given, folder=lambda: Path(folder), check=evaluate.problems,
                contradictions=lambda config: config.sampling_contradictions(), complete=evaluate.complete,
            )  # fmt: skip
        evaluate.warn_of_trained_rows(checked)
        with objects.of_run(checked):
            groups = cli.run_async(evaluate.sample_and_grade(evaluate.for_sampling(checked)))
    from rlhf.run.evaluation import evaluation_metrics, graded_responses, mean_over_sets

    measured = evaluation_metrics(groups, checked.metrics)
    measured |= {} if suite is None else mean_over_sets(groups, checked.metrics)
    return Evaluation(measured, graded_responses(groups, checked.metrics))
