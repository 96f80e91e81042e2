"""Checks of this machine: versions, disk, wandb, model and data. They start nothing."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf.config.run import GRPOConfig
from rlhf.data.model_checks import check_models
from rlhf.data.model_files import load_tokenizer
from rlhf.doctor.examination import Finding, Patient, in_thread
from rlhf.plan.memory import BYTES, GIB, checkpoint_bytes, shape_at

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "rlhf"
BUILDS = ("cpu", "gpu")  # extras of which one is installed: vLLM for this kind of machine

ROLLOUTS_GIB = 1.0  # room for rollouts, metrics and logs, whatever the model
SHARED_MEMORY_GIB = 1.0  # of /dev/shm: Ray's objects and vLLM's messages
RAY_FULL_FRACTION = 0.95  # Ray refuses objects where the disk of its folder is fuller
WANDB_HOST = "https://api.wandb.ai"
CONNECT_S = 10.0
PROMPTS_EACH = 8  # of each source, for the checks that need text


# --- versions ---


async def check_versions(_: Patient) -> Finding:
    """What is installed against the ranges of pyproject.toml, as the installed package carries them."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    problems, fitting = [], 0
    python = "{}.{}.{}".format(*sys.version_info)
    wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"]
    if not SpecifierSet(wanted).contains(python):
        problems.append(f"Python {python} is not in {wanted}")
    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            problem = _misfit(requirement)
            problems += [problem] if problem else []
            fitting += not problem
    extras = [[r for r in requirements if r.marker and r.marker.evaluate({"extra": build})] for build in BUILDS]
    builds = [extra for extra in extras if extra]  # of each, vLLM comes first
    engine = [_misfit(r) for build in builds if _version(build[0].name) for r in build]
    if not engine:
        problems.append(f"neither {' nor '.join(sorted(build[0].name for build in builds))} is installed")
    problems += [problem for problem in engine if problem]
    if "rlhf" not in metadata.entry_points(group="vllm.general_plugins").names:
        problems.append("the plug-in of the package for vLLM is not installed (code that is only copied has none)")
    if problems:
        return Finding(
            "fail", "\n".join(problems), "make setup (make setup-gpu on GPUs), in a new environment if need be"
        )
    return Finding("ok", f"Python {python} and {fitting + len(engine)} packages fit pyproject.toml, plug-in installed")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _misfit(requirement: Requirement) -> str:
    """One sentence about a package that is missing or out of its range; "" for one that fits."""
    found = _version(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed ({requirement.specifier})"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{requirement.name} {found} is not in {requirement.specifier}"
    return ""


# --- disk ---


def needed_gib(config: GRPOConfig) -> float | None:
    """What a run writes at most: checkpoints, with the one that is being written, and the exported model, GiB.

    None where the model's config.json is not at hand or not known.
    """
    policy = shape_at(config.model.path)
    checkpoint = checkpoint_bytes(config, policy)
    if checkpoint is None or policy is None:
        return None
    checkpoints = config.checkpoint.keep + 1 if config.checkpoint_every is not None else 0
    written = checkpoints * checkpoint + config.run.export * BYTES[config.model.dtype] * policy.parameters
    return written / GIB + ROLLOUTS_GIB


async def check_disk(patient: Patient) -> Finding:
    """Room for checkpoints and export where run.dir is, for Ray's folder and in shared memory."""
    config = patient.config
    folder = Path(config.run.dir).absolute()
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free / GIB
    need = needed_gib(config)
    room = f"run.dir={config.run.dir}: {free:.1f} GiB free on {place}"
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        return Finding("fail", f"run.dir={config.run.dir}: {place} cannot be written ({error.strerror})", _OTHER_DIR)
    if need is None:
        size = "how much the run needs is not known without the model's config.json"
        return Finding("warn" if free > ROLLOUTS_GIB else "fail", f"{room}; {size}", _OTHER_DIR)
    room += f", the run writes up to {need:.1f}"
    if free < need:
        return Finding("fail", room, _OTHER_DIR)
    temp = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
    usage = shutil.disk_usage(temp)
    if usage.free < (1 - RAY_FULL_FRACTION) * usage.total:
        remedy = "make room there, or set RAY_TMPDIR to another short path"
        return Finding("warn", f"{room}; {temp}, where Ray writes, is {1 - usage.free / usage.total:.0%} full", remedy)
    shared = shutil.disk_usage("/dev/shm").free / GIB
    if shared < SHARED_MEMORY_GIB:
        remedy = "give a container --shm-size=8g or more; on a machine remove leftovers in /dev/shm"
        return Finding("warn", f"{room}; /dev/shm has {shared:.2f} GiB free", remedy)
    return Finding("ok", room)


_OTHER_DIR = "make room, name another run.dir, lower checkpoint.keep or raise checkpoint.every"


# --- wandb ---


async def check_wandb(patient: Patient) -> Finding:
    """Whether metrics would reach wandb, as the config wants it."""
    from rlhf.log.sinks import has_wandb_key

    mode = patient.config.logging.wandb.mode
    if mode == "disabled":
        return Finding("ok", "logging.wandb.mode=disabled: metrics go to metrics.jsonl alone")
    if mode == "offline" or (mode == "auto" and not has_wandb_key()):
        why = "" if mode == "offline" else ", for there is no key"
        return Finding("ok", f"offline{why}: metrics are kept in run.dir, `wandb sync` uploads them later")
    if not has_wandb_key():
        remedy = "`wandb login`, WANDB_API_KEY, or logging.wandb.mode=offline"
        return Finding("fail", f"logging.wandb.mode={mode}, but there is no key", remedy)
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_HOST))
    address = (host.hostname or "", host.port or (443 if host.scheme == "https" else 80))
    try:
        (await in_thread(socket.create_connection, address, CONNECT_S)).close()
    except OSError as error:
        remedy = "open the network to it, or set logging.wandb.mode=offline"
        text = f"a key is there, but {host.hostname} is not reached ({error}): a run would keep its metrics offline"
        return Finding("warn", text, remedy)
    return Finding("ok", f"online: a key is there and {host.hostname} is reached")


# --- model and data ---


async def check_data(patient: Patient) -> Finding:
    """Model files, tokenizer and prompts, as a run loads them; leaves the first prompts for later checks."""
    return await in_thread(_load, patient)


def _load(patient: Patient) -> Finding:
    from rlhf.data.load import load_prompts
    from rlhf.data.read import check_sources
    from rlhf.rewards.answers.extract import gold_answer

    config = patient.config
    check_sources(config.data)
    check_models(config)
    tokenizer = load_tokenizer(config.model)
    longest = config.data.max_prompt_tokens
    loaded = load_prompts(config.data, "train", tokenizer, gold_answer, max_prompt_tokens=longest)
    patient.prompts = [prompt for rows in loaded.prompts.values() for prompt in rows[:PROMPTS_EACH]]
    counts = ", ".join(f"{source} {len(rows):,}" for source, rows in loaded.prompts.items())
    return Finding("ok", f"model.path={config.model.path}, a tokenizer of {len(tokenizer):,}; prompts: {counts}")
