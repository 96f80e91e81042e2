"""Program: prints rollouts of a run, group by group, or the keys of its config that differ from the defaults.

    python -m rlhf.show runs/mine                              the newest step first
    python -m rlhf.show runs/mine --step 20 --status no_answer
    python -m rlhf.show runs/mine --contains 362 --max-reward 0
    python -m rlhf.show runs/mine --config                     the keys that differ from the defaults, as YAML

A whole group is printed if one of its responses passes all filters.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from rlhf.config.cli import parser_of, run_program
from rlhf.config.load import as_yaml, flat_keys
from rlhf.config.printing import printable, say
from rlhf.log.sinks import Row, shown_reward
from rlhf.report.run_files import RunFiles, conversation, read_groups, read_run, response_blocks, states_no_answer


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("rlhf.show", __doc__)
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, help="training step (default: all, the newest first)")
    parser.add_argument("--status", help="status of the grading, such as no_answer or timeout")
    parser.add_argument("--finish", help="how a response ended: stop, length or abort")
    parser.add_argument("--min-reward", type=float)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--contains", help="text in the prompt or the response")
    parser.add_argument("-n", "--groups", type=int, default=3, help="groups to show at most (default: 3)")
    parser.add_argument("--config", action="store_true", help="print the keys that differ from the defaults, and stop")
    options = parser.parse_args(argv)
    run = read_run(options.run)
    if options.config:
        say(as_yaml(run.changed).rstrip())
        config, others = run.program_config, len(run.config) - len(flat_keys(run.changed))
        left_out = "of another version are null" if config is None else f"of rlhf.{config.program} have defaults"
        say(f"# {others} further keys {left_out}; all are in {run.config_file}")
        return
    groups = list(itertools.islice(_selected_groups(run, options), options.groups))
    if not groups:
        raise ValueError(f"{run.path}: no group passes the filters. It has rollouts of steps {_steps(run)}.")
    Console().print(*map(_panel, groups), sep="\n")


def _steps(run: RunFiles) -> str:
    steps = list(run.rollout_files())
    return f"{steps[0]} to {steps[-1]}" if steps else "none: logging.rollouts was false, or no step was finished"


def _selected_groups(run: RunFiles, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The groups that pass the filters: of --step, or of all steps, newest first."""
    files = run.rollout_files()
    steps = [options.step] if options.step is not None else sorted(files, reverse=True)
    for step in steps:
        if step not in files:
            raise ValueError(f"--step {step}: {run.path} has rollouts of steps {_steps(run)}.")
        yield from (group for group in read_groups(files[step]) if any(_passes(row, options) for row in group))


def _passes(row: Row, options: argparse.Namespace) -> bool:
    reward, wanted = row["reward"], options.contains
    return (
        options.status in (None, row["status"])
        and options.finish in (None, row["finish_reason"])
        and (options.min_reward is None or (reward is not None and reward >= options.min_reward))
        and (options.max_reward is None or (reward is not None and reward <= options.max_reward))
        and (wanted is None or wanted in conversation(row) or any(wanted in text for _, text in response_blocks(row)))
    )


def _panel(group: Sequence[Row]) -> Panel:
    first = group[0]
    blocks = [_text(conversation(first))]
    if first["answer"]:
        blocks.append(_text(f"gold answer: {first['answer']}", "bold"))
    for row in group:
        _, color = shown_reward(row["reward"])
        blocks += [_text(f"\n{_in_one_line(_head(row))}", color), *map(_block, response_blocks(row))]
    title = _in_one_line(f"step {first['step']}, {first['prompt_id']}")
    return Panel(Group(*blocks), title=_text(title), title_align="left")


def _text(text: str, style: str = "") -> Text:
    """A field of a rollout, without control characters. Every field goes through here."""
    return Text(printable(text), style=style)


def _in_one_line(text: str) -> str:
    return text.replace("\n", r"\n").replace("\t", r"\t")


def _block(block: tuple[str, str]) -> Text:
    """Text of the model as it is, calls after an arrow, text of the environment in gray after its role."""
    kind, text = block
    model_kinds = {"text": ("", ""), "thought": ("", "italic"), "call": ("-> ", "cyan")}
    prefix, style = model_kinds.get(kind, (f"{kind} ", "dim"))
    return _text(f"{prefix}{text}", style)


def _head(row: Row) -> str:
    """The facts about a response in one line."""
    reward, _ = shown_reward(row["reward"])
    parts = row["reward_parts"]
    if parts and list(parts.values()) != [row["reward"]]:  # else the only part is the reward
        reward += f" ({', '.join(f'{name} {shown_reward(value)[0]}' for name, value in parts.items())})"
    cells = [f"sample {row['sample']}: reward {reward}", f"advantage {row['advantage']:.3g}", str(row["status"])]
    cells += [str(row["finish_reason"]), f"{row['response_tokens']} tokens"]
    if calls := row.get("facts", {}).get("calls"):
        cells.append(f"requests: {', '.join(f'{count} {kind}' for kind, count in calls.items())}")
    if row["extracted"] or states_no_answer(row):
        cells.append(f"extracted {row['extracted'] or 'nothing'}")
    return ", ".join(cells)


if __name__ == "__main__":
    sys.exit(run_program(main))
