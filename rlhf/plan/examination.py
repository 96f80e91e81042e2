"""The examination of every model of a run, before anything starts.

`model_problems` reads what needs no class of a model: it imports no torch, and --plan shows it too. `examine` adds what
needs one. A hub model whose files are not in the cache is examined when it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlhf.config.grpo import GRPOConfig
from rlhf.config.model_folder import looks_local
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.reward_model import RewardModelConfig, reward_model_record
from rlhf.config.roles import REWARD_MODEL, Role
from rlhf.data.model_files import (
    EXPERT_KEYS,
    check_weights,
    class_problem,
    hub_silence,
    lacks_chat_template,
    local_model_config,
    reward_template,
    text_config,
)


@dataclass(frozen=True)
class RunModel:
    """A model that a run loads: the key that names it, its value, and whether it gives one number, not logits."""

    key: str
    path: str
    scalar: bool


def run_models(config: TrainingProgramConfig, *, trains: bool = True) -> list[RunModel]:
    """Every model of the run, once for each way in which it is loaded."""
    models = [RunModel(role.model_key, role.model, role.scalar) for role in config.roles(trains=trains)]
    models += [RunModel(key, path, scalar=False) for key, path in (config.further_models if trains else {}).items()]
    return list(dict.fromkeys(models))


def examine(config: TrainingProgramConfig, *, trains: bool = True) -> list[str]:
    """All reasons in the files of its models to refuse the run."""
    models = run_models(config, trains=trains)
    problems = gather(*(partial(check_model_files, m.path, key=m.key, generates=not m.scalar) for m in models))
    problems += gather(lambda: problems.extend(model_problems(config, trains=trains)))
    if trains and config.model.lora is not None and local_model_config(config.model.path) is not None:
        from rlhf.data.adapted_layers import adapted_layers  # imports torch and transformers

        problems += gather(lambda: adapted_layers(config))
    absent = {m.key: m.path for m in models if not looks_local(m.path) and local_model_config(m.path) is None}
    if absent and (reason := hub_silence()):
        problems += [
            f"{key}={name}: there is no such folder, the cache of this machine does not have it, and the hub cannot be "
            f"asked ({reason}). Name a local folder, or fetch it where the hub answers: hf download {name}"
            for key, name in absent.items()
        ]
    return list(dict.fromkeys(problems))


def gather(*checks: Callable[[], object]) -> list[str]:
    """The messages of all checks that raise ValueError."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems += str(error).splitlines()
    return problems


def check_model_files(path: str, *, key: str = "model.path", generates: bool = True) -> None:
    """Raise a ValueError unless a local path, or what is in the hub's cache, is a whole model that can be loaded."""
    if looks_local(path):
        if not Path(path).is_dir():
            raise ValueError(
                f"{key}={path}: there is no such folder. Give a folder in Hugging Face format, or a hub name."
            )
        if not (Path(path) / "config.json").is_file():
            if (Path(path) / "adapter_config.json").is_file():
                raise ValueError(
                    f"{key}={path}: it is an adapter. Make a whole model of it: rlhf export RUN DIR --merge."
                )
            raise ValueError(f"{key}={path}: no config.json in it. Give a folder in Hugging Face format.")
    if problem := class_problem(path, key, generates=generates):
        raise ValueError(problem)
    try:
        check_weights(path)
    except ValueError as error:
        raise ValueError(f"{key}={path}: {error}") from None


def model_problems(
    config: TrainingProgramConfig, *, trains: bool = True, policy: dict[str, Any] | None = None
) -> list[str]:
    """All reasons in its models' files to refuse the run; `policy` is the config.json of model.path, if it is read."""
    policy = text_config(local_model_config(config.model.path) or {} if policy is None else policy)
    problems, context = [], policy.get("max_position_embeddings")
    if context is not None and config.max_sequence_tokens > context:
        problems.append(
            f"{config.sequence_keys}: {config.max_sequence_tokens} tokens exceed the context of model.path="
            f"{config.model.path}, which is {context}. Shorten the sequences."
        )
    replays = trains and isinstance(config, GRPOConfig) and config.learner.replays_experts
    if replays and policy and not any(policy.get(key) for key in EXPERT_KEYS):
        given = f"learner.router_replay=rollout with model.path={config.model.path}"
        problems.append(f"{given}: the model has no experts. Set it to none.")
    for key, path in config.further_models.items() if trains else ():
        if config.max_sequence_tokens > (
            context := text_config(local_model_config(path) or {}).get("max_position_embeddings", math.inf)
        ):
            problems.append(
                f"{key}={path}: its context is {context} tokens, and it reads sequences of "
                f"{config.max_sequence_tokens} ({config.sequence_keys}). Shorten them, or name another model."
            )
    for role in config.roles(trains=trains):
        if role.model_key != "model.path" and not role.reads:  # it gets the policy's token ids
            size = text_config(local_model_config(role.model) or {}).get("vocab_size") or math.inf
            if size < (policy.get("vocab_size") or 0):
                problems.append(
                    f"{role.model_key}={role.model}: its vocabulary of {size} tokens is smaller than the "
                    f"{policy['vocab_size']} of model.path={config.model.path}, whose token ids it reads. Start it "
                    "from a model with the same tokenizer."
                )
        if role.name == REWARD_MODEL:
            reward_model = cast(GRPOConfig, config).reward_model
            assert reward_model is not None
            problems.append(_template_problem(role, reward_model))
    return [problem for problem in problems if problem]


def _template_problem(role: Role, reward_model: RewardModelConfig) -> str:
    """Why conversations cannot be written in the template that the reward model needs; "" if no reason is known."""
    recorded = reward_model_record(role.model).get("template")
    if reward_model.template is not None and recorded not in (None, reward_model.template):
        return (
            f"reward_model.template={reward_model.template}: {role.model_key}={role.model} was trained with "
            f"{recorded}. Remove the key, or train the model with that template (data.template of rlhf.reward_model)."
        )
    if reward_template(reward_model) == "model" and lacks_chat_template(role.model):
        return (
            f"{role.model_key}={role.model}: its tokenizer has no chat template. Set reward_model.template to the one "
            "it was trained with: raw (the response right after the prompt), qa, chatml, qwen-math or tulu."
        )
    return ""
