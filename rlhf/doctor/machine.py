"""Checks of this machine that start nothing: versions, disk, wandb, model and data."""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.cluster.node_report import plugin_is_installed
from rlhf.config.grpo import GRPOConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.doctor.examination import Finding, Patient, in_process, in_thread
from rlhf.plan import joins_a_cluster, visible_gpus
from rlhf.plan.local_machine import machine_problems
from rlhf.plan.memory import GIB
from rlhf.plan.start_checks import existing_folder, input_problems, run_bytes

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "rlhf"
BUILDS = ("cpu", "gpu")  # extras, one of which is installed: vLLM for this kind of machine

ROLLOUTS_GIB = 1.0  # for rollouts, metrics and logs of any model
SHARED_MEMORY_GIB = 1.0  # of /dev/shm: Ray's objects and vLLM's messages
RAY_FULL_FRACTION = 0.95  # Ray refuses objects if the disk of its folder is fuller
PROMPTS_PER_SOURCE = 8  # for the checks that need prompts


# --- versions ---


async def check_versions(_: Patient) -> Finding:
    """Compare installed versions with the ranges of pyproject.toml, as the metadata of the package holds them."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    problems = []
    python = "{}.{}.{}".format(*sys.version_info)
    python_range = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if not SpecifierSet(python_range).contains(python):
        problems.append(f"Python {python} is not in {python_range}")
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    extras = [[r for r in requirements if r.marker and r.marker.evaluate({"extra": build})] for build in BUILDS]
    builds = [extra for extra in extras if extra]  # vLLM is the first requirement of each
    engine = [r for build in builds if _version(build[0].name) for r in build]
    problems += [problem for requirement in needed + engine if (problem := _misfit(requirement))]
    if not engine:
        problems.append(f"neither {' nor '.join(sorted(build[0].name for build in builds))} is installed")
    if not plugin_is_installed():
        problems.append(
            "the plug-in of the package for vLLM is not installed (a copy of the code is not enough, nor is an older "
            "installation)"
        )
    if problems:
        return Finding(
            "fail", "\n".join(problems), "make setup (make setup-gpu on GPUs), in a new environment if need be"
        )
    return Finding("ok", f"Python {python} and {len(needed + engine)} packages fit pyproject.toml, plug-in installed")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _misfit(requirement: Requirement) -> str:
    """A sentence about a package that is missing or out of its range; "" if it fits."""
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed ({requirement.specifier})"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not in {requirement.specifier}"
    return ""


async def check_imports(patient: Patient) -> Finding:
    """Import what engines and learners import, each in a separate process; with GPUs, torch must be able to use one."""
    cuda = patient.config.cluster.device == "cuda" and bool(visible_gpus())  # a head node may have none
    names = ("deepspeed", "vllm", *(("flashinfer", "cutlass") if cuda else ()))
    code = "import torch; torch.zeros(1, device='cuda')" if cuda else "import torch"
    for command in (code, *(f"import {name}" for name in names)):
        _, reason = await in_process("-c", command)
        if reason:
            remedy = "make setup (make setup-gpu on GPUs), in a new environment if need be"
            return Finding("fail", f"`{command}`: {reason}", remedy)
    return Finding("ok", ", ".join(("torch", *names)) + (" are imported, and torch computes on a GPU" if cuda else ""))


# --- disk ---


def needed_gib(config: GRPOConfig) -> float | None:
    """The most that a run writes with its rollouts, GiB; None without the model's config.json."""
    needed = run_bytes(config)
    return None if needed is None else needed / GIB + ROLLOUTS_GIB


async def check_disk(patient: Patient) -> Finding:
    """Free space for checkpoints and export at run.dir, in Ray's folder and in shared memory."""
    config = patient.config
    if problems := [] if joins_a_cluster(config) else list(machine_problems()):
        return Finding("fail", "\n".join(problems), "as said above; in a container see docker/README.md")
    existing = existing_folder(config)
    free = shutil.disk_usage(existing).free / GIB
    need = needed_gib(config)
    room = f"run.dir={config.run.dir}: {free:.1f} GiB free on {existing}"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Finding("fail", f"run.dir={config.run.dir}: {existing} cannot be written ({error.strerror})", _OTHER_DIR)
    if need is None:
        size = "how much the run needs is not known without the model's config.json"
        return Finding("warn" if free > ROLLOUTS_GIB else "fail", f"{room}; {size}", _OTHER_DIR)
    room += f", the run writes up to {need:.1f}"
    if free < need:
        return Finding("fail", room, _OTHER_DIR)
    temp = Path(tempfile.gettempdir())
    usage = shutil.disk_usage(temp)
    if not joins_a_cluster(config) and usage.free < (1 - RAY_FULL_FRACTION) * usage.total:
        remedy = "free space there, or set TMPDIR to another short path"
        return Finding("warn", f"{room}; {temp}, where Ray writes, is {1 - usage.free / usage.total:.0%} full", remedy)
    shared = shutil.disk_usage("/dev/shm").free / GIB
    if shared < SHARED_MEMORY_GIB:
        remedy = "start the container with --shm-size=8g or more; on a machine remove old files in /dev/shm"
        return Finding("warn", f"{room}; /dev/shm has {shared:.2f} GiB free", remedy)
    return Finding("ok", room)


_OTHER_DIR = "free space, name another run.dir, lower checkpoint.keep or raise checkpoint.every"


# --- wandb ---


async def check_wandb(patient: Patient) -> Finding:
    """Whether metrics will reach wandb, if the config asks for it."""
    mode = patient.config.logging.wandb.mode
    if mode == "disabled":
        return Finding("ok", "logging.wandb.mode=disabled: metrics go to metrics.jsonl alone")
    has_key, url, problem = (False, "", "") if mode == "offline" else await in_thread(_ask_wandb)
    if mode == "offline" or (mode == "auto" and not has_key):
        why = "" if mode == "offline" else " (no API key found)"
        return Finding("ok", f"offline{why}: metrics are kept in run.dir; `wandb sync` uploads them later")
    if not has_key:
        remedy = "`wandb login`, WANDB_API_KEY, or logging.wandb.mode=offline"
        return Finding("fail", f"logging.wandb.mode={mode}, but no API key was found", remedy)
    if problem:
        remedy = "open the network to it, or set logging.wandb.mode=offline"
        text = f"an API key was found, but {url} is not reached ({problem}): a run would keep its metrics offline"
        return Finding("warn", text, remedy)
    return Finding("ok", f"online: an API key was found and {url} is reached")


def _ask_wandb() -> tuple[bool, str, str]:
    """What a run asks at its start: whether there is an API key, and if so, the server and why it does not answer."""
    import wandb

    from rlhf.log.wandb_sink import has_wandb_key, server_problem

    try:
        return (True, *server_problem()) if has_wandb_key() else (False, "", "")
    finally:
        wandb.teardown()  # it has started a process


# --- model and data ---


async def check_data(patient: Patient) -> Finding:
    """Load model files, tokenizer and prompts as a run does; later checks use the first prompts."""
    return await in_thread(_load, patient)


def _load(patient: Patient) -> Finding:
    from rlhf.data.load import load_prompts
    from rlhf.rewards.answers.extract import gold_answer

    config = patient.config
    if problems := input_problems(config):
        raise ValueError("\n".join(problems))
    tokenizer = load_tokenizer(config.model)
    loaded = load_prompts(config.data, "train", tokenizer, gold_answer)
    patient.prompts = [prompt for rows in loaded.prompts.values() for prompt in rows[:PROMPTS_PER_SOURCE]]
    counts = ", ".join(f"{source} {len(rows):,}" for source, rows in loaded.prompts.items())
    return Finding("ok", f"model.path={config.model.path}, a tokenizer of {len(tokenizer):,}; prompts: {counts}")
