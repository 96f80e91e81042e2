"""Checks of a run's models from their config.json, for the start of a run, --plan and the doctor.

A hub model whose config.json is not in the cache is checked when it is loaded.
"""

from __future__ import annotations

import math
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
    lacks_chat_template,
    local_model_config,
    reward_template,
    text_config,
)


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
