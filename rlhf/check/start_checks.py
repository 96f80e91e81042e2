"""All reasons why a run cannot start on this machine, in one list, before anything is created."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf.algo.schedules import learning_rate
from rlhf.check.callbacks import callback_problems
from rlhf.check.examination import collect_problems, examine_models, model_problems, run_models
from rlhf.check.memory import BYTES, GIB, checkpoint_bytes, trained_parameters
from rlhf.check.model_shape import ModelShape, shape_at
from rlhf.check.resources import check_resources, is_for_this_machine, joins_a_cluster, local_resources, quantity
from rlhf.config.contradictions import metric_problems
from rlhf.config.environment import TOOLS
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import to_stderr
from rlhf.config.program import TrainingProgramConfig, with_values
from rlhf.config.roles import LEARNER
from rlhf.data.model_files import local_model_config
from rlhf.data.read import Source, check_source, config_sources, local_path
from rlhf.processes.code import load_function

if TYPE_CHECKING:
    from rlhf.types import PromptRow

SOCKET_PATH_BYTES = 107  # of a Unix socket, as the kernel limits it
# Below TMPDIR, with the longest of the names; NUMBER is the process, which is this one or one of the same length.
RAY_SOCKET = "/rlhf-12345678/ray/session_2026-01-02_03-04-05_123456_NUMBER/sockets/plasma_store"
SHARED_MEMORY = Path("/dev/shm")
CPU_FLAGS = Path("/proc/cpuinfo")
# flags of CPUs that multiply in bfloat16 about as fast as in float32
FAST_BFLOAT16 = {"avx512f", "amx_bf16", "avx_ne_convert", "bf16"}
PRETRAINED = 100e6  # parameters; smaller models are made for tests
# vLLM's engine refuses to start without 160 MiB for its queue to the workers, and each worker without 240 for its own.
SHARED_MEMORY_MIB = 256


def start_problems(config: TrainingProgramConfig, *, trains: bool = True) -> list[str]:
    """Reasons to refuse a run: data, models, run folder and its disk, CPUs and GPUs, the user's functions.

    If the user's functions fail, the classes of the models are not tried, which takes seconds.

    Args:
        trains: False for an evaluation, which starts only engines.
    """
    own = callback_problems(config.run.callbacks) if trains else []
    if isinstance(config, GRPOConfig):
        own += own_function_problems(config) if trains else []
        own += reward_problems(config, trains=trains) + environment_problems(config)
        own = list(dict.fromkeys(own))  # the last two checks both start the environment
    inputs = input_problems(config, trains=trains, with_classes=not own)
    folder = run_folder_problems(config) if trains else ()
    return [*inputs, *folder, *_machine_problems(config, trains=trains), *own]


def plan_problems(config: TrainingProgramConfig) -> list[str]:
    """Reasons to refuse a run, without asking the models' classes, the hub or the GPUs.

    If the run is meant for GPUs of other machines, disk and cores are not checked.
    """
    own = callback_problems(config.run.callbacks)
    if isinstance(config, GRPOConfig):
        own += own_function_problems(_without_hub_data(config)) + reward_problems(_without_hub_data(config))
        if config.environment.parts or not set(config.tools) <= set(TOOLS):
            own += environment_problems(config)
        own = list(dict.fromkeys(own))
    here = is_for_this_machine(config)
    machine = _machine_problems(config) if here else []
    inputs = list(dict.fromkeys([*input_problems(config, with_classes=False), *row_problems(config)]))
    return [*inputs, *run_folder_problems(config, with_disk=here), *machine, *own]


def row_problems(config: TrainingProgramConfig) -> list[str]:
    """Problems of the columns and the first rows of data files, without the tokenizer."""
    files = [
        partial(_check_first_rows, config, key, source, which)
        for which in ("train", "eval")
        for key, source in config_sources(cast(Any, config.data), which).items()
        if (path := local_path(source)) is not None and path.is_file()
    ]
    return collect_problems(*files)


def _check_first_rows(config: TrainingProgramConfig, key: str, settings: Any, which: str) -> None:
    # imported here, so that --plan of data of the hub needs no numpy
    from rlhf.data.conversations import pair_conversations, trained_conversation
    from rlhf.data.load import FIRST_ROWS, usable_rows

    data: Any = config.data
    source = Source(key, settings, which, skip=data.on_bad_row == "skip")
    rows = list(islice(source.stream(), FIRST_ROWS))
    if isinstance(config, GRPOConfig) and rows:
        usable_rows(config.data, source, rows, has_environment=config.uses_environment_or_tools)
        return
    for row in rows:
        with source.leave_out(row):
            (trained_conversation if config.program == "sft" else pair_conversations)(row.columns)


def class_problems(config: TrainingProgramConfig) -> list[str]:
    """Check the models' files by their classes if all of them are on this machine; takes seconds."""
    missing = any(local_model_config(model.path) is None for model in run_models(config))
    return [] if missing else examine_models(config)


def _without_hub_data(config: GRPOConfig) -> GRPOConfig:
    """The config without the data sets of the hub."""
    files = {
        which: tuple(source for source in getattr(config.data, which) if source.is_environment or local_path(source))
        for which in ("train", "eval")
    }
    return with_values(config, data=files)


def input_problems(
    config: TrainingProgramConfig, *, trains: bool = True, with_data: bool = True, with_classes: bool = True
) -> list[str]:
    """Data and models that are missing or do not suit the config; `with_classes`: also try the models' classes."""
    kinds = (("eval", "train") if trains else ("eval",)) if with_data else ()
    sources = {key: source for which in kinds for key, source in config_sources(config.data, which).items()}
    problems = collect_problems(*(partial(check_source, source, key) for key, source in sources.items()))
    check = examine_models if with_classes else model_problems
    return problems + check(config, trains=trains)


# --- learning rates, and the type of the weights ---


def dtype_warnings(config: TrainingProgramConfig) -> Iterator[str]:
    """Warn of bfloat16 on a CPU with AVX2 only: SmolLM2-135M takes 40 s for 922 tokens, 6.5 s in float32."""
    if config.cluster.device != "cpu" or config.model.dtype != "bfloat16" or joins_a_cluster(config):
        return
    flags = set(CPU_FLAGS.read_text().split()) if CPU_FLAGS.exists() else set[str]()
    if "avx2" in flags and not flags & FAST_BFLOAT16:
        yield (
            "model.dtype=bfloat16: this CPU has no instructions for it, so a forward pass of the learner takes about "
            "six times as long as in float32. Set model.dtype=float32 if the memory is enough."
        )


def learning_rate_warnings(config: TrainingProgramConfig) -> Iterator[str]:
    """Warnings for a learning rate that is 0, or so high that full fine-tuning usually breaks a pretrained model."""
    for role, training in config.trained_roles():
        key, schedule, lr = role.section, training.section.schedule, training.section.optimizer.lr
        updates, arguments = training.total_updates, training.schedule_arguments
        trained = "model" if role.name == LEARNER else role.name
        if lr == 0:
            yield f"{key}.optimizer.lr=0: no update changes the {trained}. Set a rate, such as 1e-6."
        elif not any(learning_rate(update, **arguments) for update in range(1, updates + 1)):
            yield (
                f"{key}.schedule.name={schedule.name} with {key}.schedule.min_lr=0: the run has "
                f"{quantity(updates, 'update')}, all with a learning rate of 0, so no update changes the {trained}. "
                "Set min_lr, or name=constant, or take more steps."
            )
        has_adapter = role.name == LEARNER and config.model.lora is not None
        shape = None if has_adapter else shape_at(role.model)
        if shape is None or shape.parameters <= PRETRAINED or lr <= (bound := _highest_rate(config, shape)):
            continue
        lowest = f" and {key}.schedule.min_lr={schedule.min_lr:g}" if schedule.min_lr > bound else ""
        samples = not role.scalar and isinstance(config, GRPOConfig)
        yield (
            f"{key}.optimizer.lr={lr:g}{lowest}: above {bound:g} the training of all {shape.parameters / 1e6:,.0f} M "
            f"weights of {role.model_key}={role.model} usually destroys what the model has learned. Lower it, to about "
            f"{'1e-6' if samples else '1e-5'}{'' if role.scalar else ', or train adapters (model.lora)'}."
        )


def _highest_rate(config: TrainingProgramConfig, shape: ModelShape) -> float:
    """The highest learning rate for all weights of such a model in public recipes."""
    if config.program == "sft":  # SmolLM2: 1e-3 for 360 M, 3e-4 for 1.7 B
        return 1e-3 if shape.parameters < 1e9 else 3e-4
    return 1e-4


# --- run folder ---


def existing_run_folder(config: TrainingProgramConfig) -> Path:
    """run.dir, or the nearest folder above it that exists."""
    return _nearest_existing(Path(config.run.dir).absolute())


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def run_bytes(config: TrainingProgramConfig, *, written: int = 0) -> int | None:
    """The most bytes that a run with `written` checkpoints will write; None if the size of a model is not known."""
    policy = shape_at(config.model.path)
    checkpoint = checkpoint_bytes(config, policy)
    if checkpoint is None or policy is None:
        return None
    exported = BYTES[config.model.dtype] * trained_parameters(policy, config.model.lora)
    checkpoints = 0 if config.checkpoint_every is None else max(1, config.checkpoint.most - written)
    return checkpoints * checkpoint + config.run.export * exported


def run_folder_problems(config: TrainingProgramConfig, *, with_disk: bool = True) -> Iterator[str]:
    """A problem if the run folder cannot be written, or its disk has no room for the checkpoints."""
    folder = existing_run_folder(config)
    if not folder.is_dir():
        yield f"run.dir={config.run.dir}: {folder} is a file. Name a folder."
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"run.dir={config.run.dir}: {folder} cannot be written. Name a folder that this user can write."
        return
    if not with_disk:
        return
    written = len(list(Path(config.run.dir).glob("checkpoints/step-" + 6 * "[0-9]")))  # if the run is resumed
    needed, free = run_bytes(config, written=written) or 0, shutil.disk_usage(folder).free
    if needed > free:
        yield (
            f"run.dir={config.run.dir}: checkpoints and export need {needed / GIB:.1f} GiB (checkpoint.keep="
            f"{config.checkpoint.keep}, and those being written and copied), but {folder} has {free / GIB:.1f} GiB "
            "free. Make room, keep fewer, or write to another disk."
        )


# --- this machine ---


def _machine_problems(config: TrainingProgramConfig, *, trains: bool = True) -> list[str]:
    if joins_a_cluster(config):
        return []
    return [*machine_problems(), *collect_problems(lambda: check_resources(config, local_resources(), trains=trains))]


def machine_problems() -> Iterator[str]:
    """Problems of this machine for Ray and vLLM: TMPDIR too long, home folder not writable, little shared memory."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield f"TMPDIR: {error.strerror or error}. Set it to a folder that can be written, such as TMPDIR=/tmp."
    else:
        longest = SOCKET_PATH_BYTES - len(RAY_SOCKET.replace("NUMBER", str(os.getpid())))
        if (length := len(os.fsencode(os.path.abspath(folder)))) > longest:
            yield (
                f"TMPDIR={folder}: {length} characters are too many. Ray can use at most {longest}, because the paths "
                f"of its sockets are limited to {SOCKET_PATH_BYTES}. Set it to a shorter folder, such as TMPDIR=/tmp."
            )
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        yield from _home_problems()
    yield from shared_memory_problems(SHARED_MEMORY)


def _home_problems() -> Iterator[str]:
    remedy = "Set HOME to a folder that can be written, such as HOME=/tmp/home: Ray makes the file of its token there."
    try:
        home = Path.home().absolute()
    except RuntimeError:
        yield f"HOME: it is not set, and user {os.getuid()} has no home folder. {remedy}"
        return
    existing = _nearest_existing(home)
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        yield f"HOME={home}: {existing} cannot be written ({error.strerror}). {remedy}"


def shared_memory_problems(folder: Path) -> Iterator[str]:
    """A problem if this folder has too little room for the memory that processes share."""
    if not folder.is_dir():
        return  # vLLM and Ray then use other means, or report it
    free = shutil.disk_usage(folder).free // 2**20
    if free < SHARED_MEMORY_MIB:
        yield (
            f"{folder}: {free} MiB are free, and vLLM needs {SHARED_MEMORY_MIB} MiB of shared memory. Start the "
            "container with --shm-size=8g or more (Docker's default is 64 MB); on a machine remove old files there."
        )


# --- the user's environments and rewards ---


def environment_problems(config: GRPOConfig) -> list[str]:
    """Problems of environments and tools: they cannot be loaded or offered, or a reward needs a named metric."""
    if not config.uses_environment_or_tools:
        return []
    # imported here: a run without environments needs none of it
    from rlhf.environments.hosts import Hosts

    try:
        with contextlib.closing(Hosts(config.environment, config.tools)) as hosts:
            judges = any(about["rewards"] for about in hosts.about.values())
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    return [*metric_problems(config, environment_judges=judges)]


def own_function_problems(config: GRPOConfig) -> list[str]:
    """Problems of the user's policy loss and advantage: each is tried on a small example.

    One that asks for rows gets the first ones of data.train, and is not tried if none can be read.
    """
    if not config.algo.own_functions:
        return []
    # imports torch
    from rlhf.algo.own_functions import NO_ROW, ObjectiveError, check_advantage, check_policy_loss, needs_rows

    checks = {"algo.policy_loss": check_policy_loss, "algo.advantage": check_advantage}
    problems = []
    for where, name in config.algo.own_functions.items():
        try:
            function = load_function(name)
        except ValueError as error:
            problems.append(f"{where}={error}.")
            continue
        rows = _example_rows(config) if needs_rows(function) else [NO_ROW]
        if not rows:
            continue
        try:
            checks[where](function, rows)
        except ObjectiveError as error:
            problems.append(f"{where}={name}: {error}. See docs/algorithms.md.")
        except Exception as error:  # from the user's code
            problems.append(
                f"{where}={name}: it raises {type(error).__name__} on an example: {error}. See docs/algorithms.md."
            )
    return problems


def _example_rows(config: GRPOConfig) -> list[PromptRow]:
    """The first readable row of each source of data.train, or the one that stands for a row of an environment."""
    from rlhf.data.load import first_usable
    from rlhf.types import PromptRow

    made = [
        PromptRow(source.label, {"number": 1, "split": "train"})
        for source in config.data.train
        if source.is_environment
    ]
    return made + [PromptRow(prompt.source, prompt.columns) for _, prompt in first_usable(config.data, "train")]


def reward_problems(config: GRPOConfig, *, trains: bool = True) -> list[str]:
    """Problems of the user's reward functions: each grades a response, or a group, for a row of each source.

    With an environment or tools, a session runs for one turn, and the function gets its rollout. If a coroutine or a
    program makes the turns, functions are not tried. A function that raises, exceeds a limit or returns no number is
    refused, unless `reward.failure_fraction` is 1. A function that returns None causes a warning if nothing else can
    grade the response. Built-in rewards are tried later, with every gold answer.
    """
    reward = config.reward.model_copy(update={"workers": 1})
    if not any(part.is_user_function for part in reward.all_parts) or reward.failure_fraction == 1:
        return []
    # imported here, so that --plan needs no numpy
    from rlhf.answers.extract import alternatives
    from rlhf.data.load import first_usable
    from rlhf.rewards.grade import FAILURES, NOT_JUDGED, error_text
    from rlhf.rewards.scorer import Scorer

    kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval") if trains else ("eval",)
    rows = [
        (config.rollout if which == "train" else config.evaluations[prompt.source], row, prompt)
        for which in kinds
        for row, prompt in first_usable(config.data, which)
        if any(part.is_judged_outside for part in reward.parts_of(prompt.source))
    ]
    problems: dict[tuple[str, str], str] = {}  # by function and error: it is the same for every source
    silent: dict[str, str] = {}  # function -> the first row for which it returned None
    try:
        with Scorer(reward) as scorer, contextlib.ExitStack() as opened:
            if config.uses_environment_or_tools:
                from rlhf.config.cli import run_async
                from rlhf.environments.hosts import Hosts
                from rlhf.environments.rollouts import rollout_with_answer

                hosts = opened.enter_context(Hosts(config.environment, config.tools))
            for sampling, row, prompt in rows:
                responses, rollout = _right_responses(alternatives(prompt.answer)[0], sampling.samples_per_prompt), None
                if config.uses_environment_or_tools:
                    played = run_async(rollout_with_answer(hosts, prompt, responses[0], config))
                    if played is None:
                        continue
                    prompt, rollout = played
                tried = scorer.try_functions(prompt, responses, rollout)
                graded = config.reward_model or any(part.name not in tried for part in reward.parts_of(prompt.source))
                for name, grade in tried.items():
                    error = error_text(grade.status, " ".join(grade.detail.split()))
                    if grade.status in FAILURES:
                        problem = f"reward name={name!r}: it fails for a response to {row}: {error}".removesuffix(".")
                        problems.setdefault((name, error), f"{problem}. Repair the function (docs/rewards.md).")
                    elif not (config.uses_environment_or_tools or (graded and grade.status == NOT_JUDGED)):
                        silent.setdefault(name, row)
    except (ValueError, RuntimeError) as error:
        return [*problems.values(), str(error)]
    for name, row in silent.items():
        said = f"reward name={name!r}: it returned None for a response to {row}, which then has no reward"
        to_stderr(f"warning: {said}. Repair the function, unless such rows are not to be graded (docs/rewards.md).")
    return list(problems.values())


def _right_responses(answer: str, count: int) -> list[str]:
    """`count` different responses with the right answer."""
    text = f"The answer is \\boxed{{{answer}}}." if answer else "This is the response."
    return [f"{text}{' It is.' * number}" for number in range(count)]
