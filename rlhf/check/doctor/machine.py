"""Checks of this machine that start nothing: package versions, and everything that a run refuses at its start."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from rlhf import DISTRIBUTION
from rlhf.check.doctor.runner import Finding, Patient
from rlhf.check.memory import GIB
from rlhf.check.resources import joins_a_cluster
from rlhf.check.start_checks import existing_run_folder, run_bytes, start_problems
from rlhf.cluster.node_report import plugin_is_installed
from rlhf.data.load import load_prompts
from rlhf.data.model_files import embedding_rows, load_tokenizer
from rlhf.environments.start import StartedEnvironments
from rlhf.run.threads import in_thread

if TYPE_CHECKING:
    from packaging.requirements import Requirement

BUILDS = ("cpu", "gpu")  # extras, one of which is installed: vLLM for this kind of machine

RAY_FULL_FRACTION = 0.95  # Ray refuses objects if the disk with its folder is fuller
PROMPTS_PER_SOURCE = 8
SET_UP = "make setup (make setup-gpu on GPUs), in a new environment if need be"


async def check_versions(_: Patient) -> Finding:
    """Compare installed versions with the ranges of pyproject.toml, as the metadata of the package holds them."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    extras = [[r for r in requirements if r.marker and r.marker.evaluate({"extra": build})] for build in BUILDS]
    builds = [extra for extra in extras if extra]  # vLLM is the first requirement of each
    engine = [r for build in builds if _version(build[0].name) for r in build]
    problems = [problem for requirement in needed + engine if (problem := _package_problem(requirement))]
    if not engine:
        problems.append(f"neither {' nor '.join(sorted(build[0].name for build in builds))} is installed")
    if not plugin_is_installed():
        problems.append(
            "the plug-in of the package for vLLM is not installed (a copy of the code is not enough, nor is an older "
            "installation)"
        )
    if problems:
        return Finding("fail", "\n".join(problems), SET_UP)
    return Finding("ok", f"{len(needed + engine)} packages fit pyproject.toml, plug-in installed")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_problem(requirement: Requirement) -> str:
    """A problem if a package is missing or out of its range; else an empty string."""
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is not installed ({requirement.specifier})"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} {version} is not in {requirement.specifier}"
    return ""


async def check_config(patient: Patient) -> Finding:
    """The checks of a run's start; sets the first prompts for later checks."""
    config = patient.config
    problems = await in_thread(start_problems, config)
    try:
        tokenizer = await in_thread(load_tokenizer, config.model)
        vocab_size = embedding_rows(config.model.path)
        load = partial(
            load_prompts,
            config.data,
            "train",
            tokenizer,
            vocab_size=vocab_size,
            has_environment=config.uses_environment_or_tools,
        )
        prompts = (await in_thread(load)).prompts
        patient.rows = [prompt for rows in prompts.values() for prompt in rows[:PROMPTS_PER_SOURCE]]
        patient.prompts = patient.rows
        if config.uses_environment_or_tools and not problems:
            with await in_thread(StartedEnvironments, config, tokenizer) as environments:
                patient.prompts = await asyncio.gather(*map(environments.first_prompt, patient.rows))
    except (OSError, ValueError) as error:
        problems = problems or [str(error)]
    if problems:
        return Finding("fail", "\n".join(problems), "as the message says; in a container see docker/README.md")
    existing, need = existing_run_folder(config), run_bytes(config)
    text = f"a tokenizer of {len(tokenizer):,}; prompts: "
    text += ", ".join(f"{source} {len(rows):,}" for source, rows in prompts.items())
    text += f"; {shutil.disk_usage(existing).free / GIB:.1f} GiB free on {existing}"
    text += "" if need is None else f", the run writes up to {need / GIB:.1f}"
    temp = shutil.disk_usage(tempfile.gettempdir())
    if not joins_a_cluster(config) and temp.free < (1 - RAY_FULL_FRACTION) * temp.total:
        text += f"; {tempfile.gettempdir()}, where Ray writes, is {1 - temp.free / temp.total:.0%} full"
        return Finding("warn", text, "free space there, or set TMPDIR to another short path")
    return Finding("ok", text)
