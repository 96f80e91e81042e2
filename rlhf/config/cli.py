"""Arguments, --help, error messages and exit statuses of all programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import gc
import io
import itertools
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlhf.config.base import Section
from rlhf.config.describe import Key, describe_keys
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys, load_config, nearest_key, read_values, wrong_keys
from rlhf.config.ppo import PPOConfig
from rlhf.config.printing import say, waiting
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.reward import OPTIONS_OF_REWARD
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.secrets import hide_in_output
from rlhf.config.supervised import SFTConfig

C = TypeVar("C", bound=TrainingProgramConfig)
R = TypeVar("R")

USER_ERROR = 2  # the config, the data or the machine is not what the run needs
RUN_ERROR = 1  # the run began and could not go on
RESUMABLE = 75  # the Ray cluster that the run had joined is gone; EX_TEMPFAIL of sysexits.h
INTERRUPTED = 128 + 2  # as a shell reports SIGINT
TERMINATED = 128 + 15  # and SIGTERM
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Several signals within this time are one request: `timeout` sends it to the process and to its group, `pkill -f` and
# some schedulers to the command and to its driver.
SAME_SIGNAL_S = 0.5
END_AT_ONCE_S = 10.0  # after a second signal
NEW_OBJECTS = 20_000  # before a collection of garbage; with Python's 700 it takes a fifth of the imports' time

INSTALLED = Path(sys.prefix, "share", "rlhf")  # folders of the package next to its code, as setup.py says

HELP_COLUMNS = 100
KEYS_HEADER = """\
Keys of the YAML: key = default, type, meaning.

--config may be repeated; later files win key by key, and a list is replaced as a whole. Overrides
win over all files, in any position on the command line. Their values are read as YAML:

  run.steps=10   learner.optimizer.lr=1e-6   data.eval=null   'rollout.stop=["</answer>"]'

A number names one entry of a list: reward.0.weight=2. A key joins a section in its short form:
with `reward: [math]` in a file, reward.workers=4 keeps the list."""
REWARD_HEADER = "reward options, next to name and weight of a part: reward=[{name: math, mode: lenient}]"


class Program(NamedTuple):
    """A program: one line about it, and the schema of its config if it trains."""

    text: str
    config: type[TrainingProgramConfig] | None = None


PROGRAMS = {
    "grpo": Program("train with GRPO and its relatives", GRPOConfig),
    "ppo": Program("train with PPO and a critic", PPOConfig),
    "sft": Program("supervised fine-tuning on conversations or completions", SFTConfig),
    "reward-model": Program("train a reward model from preference pairs", RewardTrainingConfig),
    "evaluate": Program("avg@k, pass@k and maj@k of a model"),
    "score": Program("grade a file of responses"),
    "export": Program("a checkpoint as a model folder"),
    "report": Program("a page about runs"),
    "watch": Program("a page that follows a run"),
    "show": Program("the rollouts of a run"),
    "dashboard": Program("lay out a wandb dashboard"),
    "doctor": Program("check whether a run will work on this machine"),
    "quickstart": Program("make a tiny model and its data"),
    "recipe": Program("run a recipe: a ladder of small runs to learn from"),
}
WITH_ENGINES = {name: p.config for name, p in PROGRAMS.items() if p.config and issubclass(p.config, GRPOConfig)}


class ResumableError(RuntimeError):
    """The run ended through no fault of its own. The launchers start it again with --resume."""


def training_flags(parser: argparse.ArgumentParser) -> None:
    plan = "print the run's arithmetic, memory and hours, and stop; status 2 if it would not start or does not fit"
    parser.add_argument("--plan", action="store_true", help=plan)
    parser.add_argument("--print-config", action="store_true", help="print every key with its value as YAML, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
    resume_from = "continue from `best` or from step-000020, and remove newer checkpoints"
    parser.add_argument("--resume-from", metavar="NAME", help=resume_from)


def program_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", choices=WITH_ENGINES, default="grpo", help="of the config (default: grpo)")


def program_schema(argv: Sequence[str] | None) -> type[GRPOConfig]:
    """The schema that --program names; the other arguments are parsed later, with this schema."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    program_flag(chooser)
    return WITH_ENGINES[chooser.parse_known_args(argv)[0].program]


def started_as(module: str) -> str:
    """The command with which the user started a program: `rlhf grpo`, or `python -m rlhf.grpo`."""
    if Path(*sys.orig_argv[1:2]).name == "rlhf":
        return module.replace(".", " ").replace("_", "-")
    return f"python -m {module}"


def parser_of(program: str, description: str | None, **settings: Any) -> argparse.ArgumentParser:
    """A parser whose usage names the program as the user typed it; the description keeps its lines."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=started_as(program), description=description, formatter_class=form, **settings)


def parse(
    program: str,
    description: str,
    schema: type[C],
    argv: Sequence[str] | None,
    *,
    add_flags: Callable[[argparse.ArgumentParser], None] = training_flags,
    contradictions: Callable[[C], Iterable[str]] = lambda config: config.contradictions(),
    check: Callable[[C], Iterable[str]] = lambda config: (),
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
    values_of: Callable[[argparse.Namespace], dict[str, Any]] = lambda flags: {},
) -> tuple[C, argparse.Namespace]:
    """Arguments -> the config and the flags of `add_flags`; --help lists every key. The others as for `load_config`.

    `check` is not called with --plan and --print-config. `values_of`: keys that the flags stand for; they win over the
    files, and no file is needed then.
    """
    parser = parser_of(
        program,
        description,
        usage=f"{started_as(program)} --config FILE ... [flags] [section.key=value ...]",
        epilog=_list_keys(schema, unread=flat_keys(complete({}))).replace("%", "%%"),
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", metavar="FILE", help="YAML file; repeat it, later ones win")
    add_flags(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key of the YAML")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    for argument in unknown:
        key = argument.lstrip("-").partition("=")[0].replace("-", "_")
        flags = difflib.get_close_matches(argument.partition("=")[0], parser._option_string_actions, n=1, cutoff=0.8)
        nearest = f"Did you mean {flags[0]}?" if flags else ""
        nearest = nearest or nearest_key(key, [known.name for known in describe_keys(schema)])
        reason = "there is no such flag, and keys are written without dashes, as section.key=value"
        raise ValueError(f"{argument}: {reason}. {nearest} --help lists all.")
    files, values = arguments.config or [], values_of(arguments)
    if not files and not values:
        named = [text for text in arguments.overrides if text.endswith((".yaml", ".yml"))]
        example = (named or ["configs/math.yaml"])[0]
        raise ValueError(f"--config: no file given. Name a YAML file: {started_as(program)} --config {example}")
    arguments.config = files = [config_file(name) for name in files]
    starts_nothing = any(vars(arguments).get(flag) for flag in ("plan", "print_config"))
    try:
        with waiting("starting: checking the config, and the data, models and functions that it names"):
            config = load_config(
                schema, [*files, values] if values else files, arguments.overrides, contradictions=contradictions,
                check=(lambda config: ()) if starts_nothing else check, complete=complete,
            )  # fmt: skip
    except ValueError:
        _check_program(program, schema, files)
        raise
    return config, arguments


def _check_program(program: str, schema: type[Section], files: Sequence[str]) -> None:
    """Raise a ValueError if a file has fewer wrong keys as the config of another program."""
    configs = {name: known.config for name, known in PROGRAMS.items() if known.config is not None}
    here = next(name for name, config in configs.items() if config is schema)
    for file in files:
        wrong = {name: len(wrong_keys(config, read_values([file], []))) for name, config in configs.items()}
        other = min(wrong, key=lambda name: (wrong[name], name != here))
        if other != here:
            own = program == f"rlhf.{here.replace('-', '_')}"  # otherwise the program takes configs of several
            remedy = f"Start rlhf {other} with it, or leave it out."
            remedy = f"Add --program {other}." if other in WITH_ENGINES and not own else remedy
            raise ValueError(f"--config {file}: a config of rlhf {other}, not of rlhf {here}. {remedy}")


def _list_keys(schema: type[Section], *, unread: Collection[str] = ()) -> str:
    lines = [KEYS_HEADER]
    keys = [key for key in describe_keys(schema) if not key.name.startswith("data.eval[]")]  # as those of data.train
    keys = [replace(key, default="unread") if key.name in unread else key for key in keys]
    for section, members in itertools.groupby(keys, lambda key: key.name.split(".")[0]):
        lines += [f"\n{section}", *(line for key in members for line in _key_lines(key))]
    if "reward" in schema.model_fields:
        lines.append(f"\n{REWARD_HEADER}")
        for name, options in OPTIONS_OF_REWARD.items():
            lines += [line for key in describe_keys(options, f"{name}: ") for line in _key_lines(key)]
    return "\n".join(lines)


def _key_lines(key: Key) -> Iterable[str]:
    """`key = default    [type]`, then the description, indented and wrapped."""
    name = f"  {key.name} (required)" if key.default is None else f"  {key.name} = {key.default}"
    line = f"{name:<48} [{key.kind}]"
    yield from [line] if len(line) <= HELP_COLUMNS else [name, f"      [{key.kind}]"]
    yield from textwrap.wrap(key.description, HELP_COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6)


def shipped_folder(name: str) -> Path:
    """The folder `configs` or `recipes` of the checkout, or the one that was installed with the package."""
    checkout = Path(__file__).parents[2]  # of an installed package: site-packages, where others may have such a folder
    return (checkout if (checkout / "pyproject.toml").is_file() else INSTALLED) / name


def config_file(name: str) -> str:
    """The file of --config; configs/NAME.yaml, where there is none, is the one of this package, and a line says so."""
    path = Path(name)
    own = shipped_folder("configs") / path.name
    if path.exists() or path.parent != Path("configs") or not own.is_file():
        return name
    say(f"--config {name}: not in this folder; taking {own}", file=sys.stderr)
    return str(own)


def check_new_folder(folder: Path, key: str = "") -> None:
    """Raise a ValueError unless an output folder does not exist yet, or is empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{key}{folder}: it exists and is not an empty folder. Name a new folder.")


def check_main_thread() -> None:
    """Raise a ValueError outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a program of rlhf runs in the main thread, which gets Ctrl-C and SIGTERM. Call it there.")


def run_async(
    main: Coroutine[Any, Any, R], *, on_signal: Callable[[str, Callable[[], object]], None] | None = None
) -> R:
    """Run a coroutine as asyncio.run does. SIGTERM, SIGINT and SIGHUP cancel it, so that its `finally` clauses run.

    At the first signal `on_signal` is called instead, with its name and a function that cancels the task. Inside a
    running event loop, as in a notebook, that loop waits. ValueError outside of the main thread, which gets signals.
    """
    try:
        check_main_thread()
    except ValueError:
        main.close()
        raise
    received: list[signal.Signals] = []
    # if something hangs while the task is cancelled; child processes end with this one
    exit_soon = threading.Timer(END_AT_ONCE_S, lambda: os._exit(128 + received[0]))
    exit_soon.daemon = True

    async def cancellable() -> R:
        task = asyncio.current_task()
        assert task is not None

        newest = -SAME_SIGNAL_S

        def receive(number: signal.Signals) -> None:
            nonlocal newest
            if number in received and time.monotonic() - newest < SAME_SIGNAL_S:
                return
            newest = time.monotonic()
            received.append(number)
            if len(received) == 1 and on_signal is not None:
                on_signal(number.name, task.cancel)
                return
            task.cancel()
            if len(received) == 2:
                exit_soon.start()

        for number in end_signals():
            asyncio.get_running_loop().add_signal_handler(number, receive, number)
        return await main

    try:
        with _outside_of_any_event_loop():
            return asyncio.run(cancellable())
    except asyncio.CancelledError:
        if received[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt from None
        raise asyncio.CancelledError(*received[:1]) from None
    finally:
        exit_soon.cancel()


class NothingToDoError(Exception):
    """There is nothing left to do: the program prints the message and ends with status 0."""


class StoppedError(NothingToDoError):
    """The run has ended before its last step, as the user's own code asked."""


@contextlib.contextmanager
def _outside_of_any_event_loop() -> Iterator[None]:
    """A context in which asyncio.run works. On exit the thread has its event loop and signal handlers back."""
    outer, handlers = None, {number: signal.getsignal(number) for number in END_SIGNALS}
    with contextlib.suppress(RuntimeError):
        outer = asyncio.get_running_loop()
    woken = signal.set_wakeup_fd(-1)  # where Python tells the outer loop of a signal
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None:
            asyncio.set_event_loop(outer)
        for number, handler in handlers.items():
            if handler is not None:  # one that Python did not install
                signal.signal(number, handler)
        signal.set_wakeup_fd(woken)


def end_signals() -> list[signal.Signals]:
    """The signals that end a program, without the ones that it was started to ignore."""
    return [number for number in END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def exit_status(returncode: int) -> int:
    """The exit status as a shell reports it: 137 for a process that SIGKILL ended, where subprocess has -9."""
    return 128 - returncode if returncode < 0 else returncode


def run_program(main: Callable[[], None]) -> int:
    """Call `main`; print an expected error as one message and return the exit status. No secret is printed."""
    gc.set_threshold(NEW_OBJECTS)
    logging.raiseExceptions = False  # a library's log that cannot be written is no traceback on the terminal
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):  # an ASCII terminal gets what it cannot show as \uXXXX
            stream.reconfigure(errors="backslashreplace")
    with hide_in_output():
        try:
            main()
        except NothingToDoError as done:
            say(str(done))
        except ValueError as error:
            say(f"error: {error}", file=sys.stderr)
            return USER_ERROR
        except (RuntimeError, OSError) as error:  # OSError: a disk that is full, say
            say(f"error: {error}", *getattr(error, "__notes__", ()), file=sys.stderr)
            return RESUMABLE if isinstance(error, ResumableError) else RUN_ERROR
        except KeyboardInterrupt:
            say("interrupted", file=sys.stderr)
            return INTERRUPTED
        except asyncio.CancelledError as error:  # `run_async` names the signal
            say("terminated", file=sys.stderr)
            return 128 + error.args[0] if error.args else TERMINATED
        except Exception:  # a defect of the program: its traceback may hold secrets too
            say(traceback.format_exc(), file=sys.stderr)
            return RUN_ERROR
    return 0
