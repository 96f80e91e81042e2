"""Program: the metric of any model or run on the data of a config.

    python -m rlhf.evaluate --config configs/math.yaml model.path=runs/math/model evaluation.samples_per_prompt=8
    python -m rlhf.evaluate --suite math model.path=runs/math/model
    python -m rlhf.evaluate --program ppo --config runs/mine/config.yaml model.path=runs/mine/model
    python -m rlhf.evaluate --config mine.yaml --responses before.jsonl
    python -m rlhf.evaluate --config mine.yaml model.path=runs/mine/model --compare-with before.jsonl
    python -m rlhf.evaluate --config mine.yaml model.path=runs/mine/model --also runs/other/model

Uses the sections model, data.eval, reward, rollout and evaluation of a training config, so that the numbers mean the
same as during training; keys of the training need not be set. Prints avg@k, pass@k and maj@k of evaluation.metric with
their intervals and the means of the other parts of the reward, a column per model; --output writes them to a file.
--suite takes data sets, prompt, reward and sampling from a suite of configs/suites, or from a file of one's own, and
prints a table per model with a row per data set; --suite-dir reads the data sets from a folder.
--compare-with takes the graded responses of an earlier evaluation of the same problems, and prints for each model how
many changed and a p-value. A data set of which no response is graded ends the program with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.check.start_checks import input_problems, start_problems
from rlhf.config import cli
from rlhf.config.base import with_home
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import merged
from rlhf.config.printing import say, to_stderr, waiting
from rlhf.config.program import with_values
from rlhf.config.reward import MODEL_PART
from rlhf.config.sections import UNRESTRICTED
from rlhf.config.suites import suite_values
from rlhf.data.read import config_sources

if TYPE_CHECKING:
    from rlhf.types import RolloutGroup

# Required keys that only training reads.
UNREAD = {
    "run": {"dir": "unread", "steps": 1},
    "data": {"train": "unread"},
}

DESCRIPTION = "Sample, grade and average: avg@k, pass@k and maj@k of a model on data.eval."


async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:
    """Start only engines, sample and grade every prompt of every data set, and stop the engines."""
    with waiting("starting: importing torch and Ray, and reading data.eval"):
        from rich.console import Console

        from rlhf.cluster.engines import started_engines
        from rlhf.cluster.rollout_workers import RolloutWorkers
        from rlhf.data.load import load_prompts
        from rlhf.data.model_files import embedding_rows, load_tokenizer, truncate_token_id
        from rlhf.data.templates import reads_date
        from rlhf.data.turns import rollout_warnings
        from rlhf.environments.rollouts import FailedEnvironments
        from rlhf.environments.start import StartedEnvironments
        from rlhf.log.terminal import Terminal
        from rlhf.rewards.scorer import Scorer
        from rlhf.rollout.purpose import evaluation_purpose
        from rlhf.run.evaluation import evaluate, rollouts_of, ungraded_warning
        from rlhf.run.prompts import source_lines
        from rlhf.run.reward_outcomes import RewardOutcomes

        tokenizer = load_tokenizer(config.model)
        if reads_date(config.data.template, tokenizer):
            say(f"data.date={config.data.date}: the chat template writes this date into the prompts")
        for warning in rollout_warnings(config, tokenizer):
            to_stderr(f"warning: {warning}")
        truncate_token = truncate_token_id(config.rollout, tokenizer)
        loaded = load_prompts(
            config.data,
            "eval",
            tokenizer,
            vocab_size=embedding_rows(config.model.path),
            has_environment=config.uses_environment_or_tools,
        )
    terminal = Terminal(Console(force_interactive=False), total_steps=1)  # without a live view
    with contextlib.ExitStack() as exit_stack:
        exit_stack.enter_context(terminal.live())
        exit_stack.enter_context(terminal.phase(f"evaluation of {config.model.path}"))
        scorer = exit_stack.enter_context(Scorer(config.reward))
        play = (
            exit_stack.enter_context(StartedEnvironments(config, tokenizer))
            if config.uses_environment_or_tools
            else None
        )
        if play is not None:
            loaded = play.with_rows("eval", loaded)
        for line in source_lines("data.eval", loaded, config.data.max_prompt_tokens):
            say(line)
        outcomes = RewardOutcomes(config.reward)
        async with (
            started_engines(config, trains=False, watch_stage=terminal.phase) as engines,
            RolloutWorkers(engines, config, tokenizer, scorer, play, say=to_stderr, check=outcomes.check) as workers,
        ):
            purposes = {source: evaluation_purpose(config, truncate_token, source) for source in loaded.prompts}
            at_once = config.evaluation_groups_at_once
            count = terminal.progress("problem", sum(map(len, loaded.prompts.values())))
            groups = await evaluate(
                loaded.prompts,
                lambda prompt: workers.rollout_group(prompt, purposes[prompt.source]),
                at_once=at_once,
                count=count,
            )
        failed, _ = FailedEnvironments(1.0).check(rollouts_of(groups))
        ungraded = [ungraded_warning(source, rows, config.metrics[source]) for source, rows in groups.items()]
        for warning in (*(play.warnings if play else ()), *failed, *outcomes.new_errors(), *filter(None, ungraded)):
            to_stderr(f"warning: {warning}")
        return groups


def problems(config: GRPOConfig) -> Iterator[str]:
    """Reasons to refuse the evaluation."""
    if not config.data.eval:
        yield "data.eval is empty: there is nothing to evaluate on. Name a file or a hub data set."
    if config.reward.leaves_something_ungraded and not config.environment.parts:
        yield "reward=[]: evaluation cannot use a reward model. Name a reward, such as reward=[{name: math}]."
    elif MODEL_PART in config.metrics.values():
        yield "evaluation.metric=reward_model: rlhf evaluate starts no reward model. Name a part of reward."
    yield from start_problems(config, trains=False)


def complete(values: dict[str, Any]) -> dict[str, Any]:
    """Values for keys that the schema requires and an evaluation does not read.

    The longest response of the engines is that of the evaluation, unless `rollout` names another one.
    """
    values = merged(UNREAD, values)
    sets = values["data"].get("eval") if isinstance(values["data"], dict) else None
    common = _longest_response(values.get("evaluation"))
    lengths = [_longest_response(each) or common for each in (sets if isinstance(sets, list) else [sets])]
    if not lengths or not all(isinstance(length, int) for length in lengths):
        return values
    return merged({"rollout": {"max_response_tokens": max(lengths)}}, values)  # type: ignore[type-var]


def _longest_response(section: Any) -> int | None:
    return section.get("max_response_tokens") if isinstance(section, dict) else None


def values_of_suite(suite: str | None, folder: str | None, only: str | None) -> dict[str, Any]:
    """The keys that --suite, --suite-dir and --only stand for; none without --suite."""
    if suite is not None:
        return suite_values(suite, cli.shipped_folder("configs") / "suites", folder, only)
    for flag, value in (("--suite-dir", folder), ("--only", only)):
        if value is not None:
            raise ValueError(f"{flag} {value}: it chooses from a suite. Add --suite math, or remove it.")
    return {}


def for_sampling(config: GRPOConfig, also: Sequence[str] = ()) -> GRPOConfig:
    """The config of engines that train nothing, with the date of the run that made the model, or one of `also`."""
    from rlhf.run.folder import with_date

    # they need not return experts, nor the tokens that each was sampled from
    config = with_values(config, learner={"router_replay": "none"}, rollout=UNRESTRICTED)
    return with_date(config, [config.model.path, *also])


def warn_of_trained_rows(config: GRPOConfig) -> None:
    """Warn of data sets on which the run that made model.path has trained."""
    from rlhf.run.folder import config_that_trained_on

    path = config.model.path
    for key, source in config_sources(config.data, "eval").items():
        if not source.is_environment and (run := config_that_trained_on(source, path)):
            to_stderr(
                f"warning: {key}={source.path}: training data of {path}, as {run} says. What is measured is what the "
                "model remembers, not what it can do. Evaluate on other rows."
            )


def _set_of(row: dict[str, Any]) -> str:
    return str(row["prompt_id"]).partition("/")[0]


def _metric_of(row: dict[str, Any]) -> str:
    return str(row["metric"])


def main(argv: Sequence[str] | None = None) -> None:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        cli.program_flag(parser)
        parser.add_argument("--suite", metavar="NAME", help="data sets of configs/suites (math), or of a YAML file")
        parser.add_argument("--suite-dir", metavar="FOLDER", help="read the data sets of the suite from this folder")
        parser.add_argument("--only", metavar="SETS", help="of the suite: gsm8k,math500 leaves out the others")
        parser.add_argument("--also", action="append", metavar="MODEL", help="a further model; may be repeated")
        parser.add_argument("--output", metavar="FILE", help="write the metrics as JSON; of several models, by model")
        parser.add_argument("--responses", metavar="FILE", help="write every response with its grade, as JSON lines")
        parser.add_argument("--compare-with", metavar="FILE", help="earlier --responses: print changes, and a p-value")

    config, arguments = cli.parse(
        "rlhf.evaluate", DESCRIPTION, cli.program_schema(argv), argv, add_flags=add_flags,
        contradictions=lambda config: config.sampling_contradictions(), check=problems, complete=complete,
        values_of=lambda flags: values_of_suite(flags.suite, flags.suite_dir, flags.only),
    )  # fmt: skip
    config = for_sampling(config, [with_home(path) for path in arguments.also or ()])
    with waiting("starting: importing torch and Ray"):
        from rich.console import Console

        from rlhf.log.panels import metric_title
        from rlhf.log.sinks import evaluation_table, suite_table
        from rlhf.run.evaluation import (
            compare,
            evaluation_metrics,
            graded_responses,
            mean_over_sets,
            read_responses,
            sizes_of_sets,
        )  # fmt: skip

    also = {path: with_values(config, model={"path": with_home(path)}) for path in arguments.also or ()}
    with waiting("starting: checking the models of --also"):
        unfit = [input_problems(each, trains=False, with_data=False) for each in also.values()]
    if any(unfit):
        raise ValueError("\n".join(itertools.chain(*unfit)))
    configs = {config.model.path: config} | also
    for each in configs.values():
        warn_of_trained_rows(each)
    earlier: list[dict[str, Any]] = []
    if arguments.compare_with is not None:
        samples = {each.samples_per_prompt for each in config.evaluations.values()}
        named = config.metrics.values()
        earlier = read_responses(Path(arguments.compare_with), samples_per_prompt=samples, metrics=named)
    metrics: dict[str, dict[str, float]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    responses: dict[str, list[dict[str, Any]]] = {}
    for path, each in configs.items():
        groups = cli.run_async(sample_and_grade(each))
        metrics[path] = evaluation_metrics(groups, config.metrics)
        if arguments.suite is not None:
            metrics[path] |= mean_over_sets(groups, config.metrics)
            sizes = sizes_of_sets(groups)
        responses[path] = graded_responses(groups, config.metrics)
        if arguments.output:  # after each model: if a later one fails, nothing is lost
            written = metrics if len(configs) > 1 else metrics[path]
            Path(arguments.output).write_text(json.dumps(written, indent=2) + "\n")
        if arguments.responses:
            rows = [row | {"model": path} for path, rows in responses.items() for row in rows]
            Path(arguments.responses).write_text("".join(json.dumps(row) + "\n" for row in rows))
    title = metric_title(config.metrics, metrics.values())
    if arguments.suite is None:
        Console(soft_wrap=True).print(evaluation_table(f"evaluation, {title}", metrics))
    else:
        for path, values in metrics.items():
            Console(soft_wrap=True).print(suite_table(f"{path}: {title}", values, sizes))
    by_set = arguments.suite is not None
    part_of, parts = (_set_of, config.metrics) if by_set else (_metric_of, dict.fromkeys(config.metrics.values()))
    for path, part in itertools.product(responses, parts if earlier else ()):
        before, after = ([row for row in rows if part_of(row) == part] for rows in (earlier, responses[path]))
        say(f"{path}{f', {part}' if by_set else ''}: {compare(before, after)}")
    for path, label in itertools.product(metrics, config.metrics):
        if metrics[path].get(f"eval/{label}/ungraded_fraction") == 1:
            raise ValueError(f"{label}: no response of {path} was graded by {config.metrics[label]} (see above).")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
