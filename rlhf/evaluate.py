"""Program: the metric of any model or run on the data of a config.

    python -m rlhf.evaluate --config configs/math.yaml model.path=runs/math/model evaluation.samples_per_prompt=8
    python -m rlhf.evaluate --program ppo --config runs/mine/config.yaml model.path=runs/mine/model
    python -m rlhf.evaluate --config mine.yaml --responses before.jsonl
    python -m rlhf.evaluate --config mine.yaml model.path=runs/mine/model --compare-with before.jsonl
    python -m rlhf.evaluate --config mine.yaml model.path=runs/mine/model --also runs/other/model

Uses the sections model, data.eval, reward, rollout and evaluation of a training config, so that the numbers mean the
same as during training; keys of the training need not be set. Prints avg@k, pass@k and maj@k of evaluation.metric with
their intervals and the means of the other parts of the reward, a column per model; --output writes them to a file.
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
from rlhf.data.read import config_sources

if TYPE_CHECKING:
    from rlhf.types import RolloutGroup

# Required keys that only training reads.
UNREAD = {
    "run": {"dir": "unread", "steps": 1},
    "data": {"train": "unread"},
    "rollout": {"prompts_per_step": 1, "samples_per_prompt": 1},
}

DESCRIPTION = "Sample, grade and average: avg@k, pass@k and maj@k of a model on data.eval."


async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:
    """Start only engines, sample and grade every prompt of every data set, and stop the engines."""
    with waiting("starting: importing torch and Ray, and reading data.eval"):
        from rich.console import Console

        from rlhf.cluster.engines import started_engines
        from rlhf.data.load import load_prompts
        from rlhf.data.model_files import embedding_rows, load_tokenizer, truncate_token_id
        from rlhf.data.templates import reads_date
        from rlhf.data.turns import rollout_warnings
        from rlhf.environments.rollouts import FailedEnvironments
        from rlhf.environments.start import StartedEnvironments
        from rlhf.log.terminal import Terminal
        from rlhf.rewards.scorer import Scorer
        from rlhf.rollout.sampler import Sampler
        from rlhf.run.evaluation import evaluate, rollouts_of, ungraded_warning
        from rlhf.run.grading import Grading
        from rlhf.run.prompts import source_lines

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
        for line in source_lines("data.eval", loaded, config.data.max_prompt_tokens):
            say(line)
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
        async with started_engines(config, trains=False, watch_stage=terminal.phase) as engines:
            if play is not None:
                await engines.cluster.host_environments(play.spread)
            sampler = Sampler(config, truncate_token, engines.generate, Grading(config, scorer, tokenizer), play)
            at_once = config.evaluation_groups_at_once
            count = terminal.progress("problem", sum(map(len, loaded.prompts.values())))
            groups = await evaluate(loaded.prompts, sampler.for_evaluation, at_once=at_once, count=count)
        failed, _ = FailedEnvironments(1.0).check(rollouts_of(groups))
        ungraded = [ungraded_warning(source, rows, config.metrics[source]) for source, rows in groups.items()]
        for warning in (*(play.warnings if play else ()), *failed, *scorer.new_errors(), *filter(None, ungraded)):
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


def main(argv: Sequence[str] | None = None) -> None:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        cli.program_flag(parser)
        parser.add_argument("--also", action="append", metavar="MODEL", help="a further model; may be repeated")
        parser.add_argument("--output", metavar="FILE", help="write the metrics as JSON; of several models, by model")
        parser.add_argument("--responses", metavar="FILE", help="write every response with its grade, as JSON lines")
        parser.add_argument("--compare-with", metavar="FILE", help="earlier --responses: print changes, and a p-value")

    config, arguments = cli.parse(
        "rlhf.evaluate", DESCRIPTION, cli.program_schema(argv), argv, add_flags=add_flags,
        contradictions=lambda config: config.sampling_contradictions(), check=problems, complete=complete,
    )  # fmt: skip
    # engines that train nothing need not return experts, nor the tokens that each was sampled from
    config = with_values(config, learner={"router_replay": "none"}, rollout=UNRESTRICTED)
    with waiting("starting: importing torch and Ray"):
        from rich.console import Console

        from rlhf.log.panels import metric_title
        from rlhf.log.sinks import evaluation_table
        from rlhf.run.evaluation import compare, evaluation_metrics, graded_responses, read_responses
        from rlhf.run.folder import config_that_trained_on, with_date

    config = with_date(config, [config.model.path, *map(with_home, arguments.also or ())])
    also = {path: with_values(config, model={"path": with_home(path)}) for path in arguments.also or ()}
    with waiting("starting: checking the models of --also"):
        unfit = [input_problems(each, trains=False, with_data=False) for each in also.values()]
    if any(unfit):
        raise ValueError("\n".join(itertools.chain(*unfit)))
    configs = {config.model.path: config} | also
    for each, (key, source) in itertools.product(configs.values(), config_sources(config.data, "eval").items()):
        if not source.is_environment and (run := config_that_trained_on(source, each.model.path)):
            to_stderr(
                f"warning: {key}={source.path}: training data of {each.model.path}, as {run} says. What is measured is "
                "what the model remembers, not what it can do. Evaluate on other rows."
            )
    earlier: list[dict[str, Any]] = []
    if arguments.compare_with is not None:
        samples = {each.samples_per_prompt for each in config.evaluations.values()}
        named = config.metrics.values()
        earlier = read_responses(Path(arguments.compare_with), samples_per_prompt=samples, metrics=named)
    metrics: dict[str, dict[str, float]] = {}
    responses: dict[str, list[dict[str, Any]]] = {}
    for path, each in configs.items():
        groups = cli.run_async(sample_and_grade(each))
        metrics[path] = evaluation_metrics(groups, config.metrics)
        responses[path] = graded_responses(groups, config.metrics)
        if arguments.output:  # after each model: if a later one fails, nothing is lost
            written = metrics if len(configs) > 1 else metrics[path]
            Path(arguments.output).write_text(json.dumps(written, indent=2) + "\n")
        if arguments.responses:
            rows = [row | {"model": path} for path, rows in responses.items() for row in rows]
            Path(arguments.responses).write_text("".join(json.dumps(row) + "\n" for row in rows))
    title = f"evaluation, {metric_title(config.metrics, metrics.values())}"
    Console(soft_wrap=True).print(evaluation_table(title, metrics))
    for path, metric in itertools.product(responses, dict.fromkeys(config.metrics.values()) if earlier else ()):
        before, after = ([row for row in rows if row["metric"] == metric] for rows in (earlier, responses[path]))
        say(f"{path}: {compare(before, after)}")
    for path, label in itertools.product(metrics, config.metrics):
        if metrics[path].get(f"eval/{label}/ungraded_fraction") == 1:
            raise ValueError(f"{label}: no response of {path} was graded by {config.metrics[label]} (see above).")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
