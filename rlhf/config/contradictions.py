"""Keys of a GRPO config that contradict each other: each function names the keys, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config import sections
from rlhf.config.base import suggest
from rlhf.config.program import dtype_problems
from rlhf.config.reward import ENVIRONMENT_PART, may_be_accuracy

if TYPE_CHECKING:
    from rlhf.config.grpo import GRPOConfig

NEEDS_A_GROUP = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")


def sampling_problems(config: GRPOConfig) -> Iterator[str]:
    rollout, algo, reward_model = config.rollout, config.algo, config.reward_model
    if rollout.samples_per_prompt < 2 and algo.advantage in NEEDS_A_GROUP and config.learns_from_rewards:
        remedy = "Use at least 2, or algo.advantage=reinforce_pp."
        yield f"{rollout.samples_per_prompt=}: the advantages of {algo.advantage=!s} would all be zero. {remedy}"
    if algo.normalize_over == "tokens" and algo.advantage not in ("reinforce_pp", "reinforce_pp_baseline"):
        reason = "only reinforce_pp and reinforce_pp_baseline read it. Remove it, or set one of them."
        yield f"{algo.normalize_over=!s} with {algo.advantage=!s}: {reason}"
    if algo.advantage == "maxrl" and config.learns_from_rewards:
        for given in _rewards_below_zero(config):
            remedy = "Use rewards of 0 and 1, or algo.advantage=dr_grpo."
            yield f"{given} with {algo.advantage=!s}: it divides by the mean reward, and these may be below 0. {remedy}"
    if algo.ref_update != "fixed" and not config.needs_reference:
        remedy = "Set kl_coef or log_kl=true, or ref_update=fixed."
        yield f"{algo.ref_update=!s} with algo.kl_coef=0: there is no reference. {remedy}"
    if algo.ref_update != "fixed" and config.model.lora is not None:
        reason = "the reference is the model with its adapters off, which does not move. Set it to fixed."
        yield f"{algo.ref_update=!s} with model.lora: {reason}"
    if rollout.dynamic_sampling and rollout.samples_per_prompt < 2:
        reason = "rewards of a group of one are always equal. Use at least 2, or false."
        yield f"rollout.dynamic_sampling=true with {rollout.samples_per_prompt=}: {reason}"
    if rollout.dynamic_sampling_part is not None:
        common_parts = config.reward.parts_of_every_source + ("reward_model",) * (reward_model is not None)
        common_parts += ("environment",) * bool(config.environment.parts)
        given = f"{rollout.dynamic_sampling_part=!s}"
        if not rollout.dynamic_sampling:
            yield f"{given} without rollout.dynamic_sampling: nothing reads it. Set that too, or remove it."
        elif rollout.dynamic_sampling_part not in common_parts:
            lists = ["reward.parts", *(f"reward.by_source.{source}" for source in config.reward.by_source)]
            remedy = f"Name a part that each of them has ({', '.join(common_parts) or 'none'}), or null."
            yield f"{given}: not in all of {' and '.join(lists)}, and groups without it would all be replaced. {remedy}"
    ungraded = config.reward.leaves_something_ungraded and reward_model is None and not config.environment.parts
    if ungraded and config.learns_from_rewards:
        remedy = "Name a reward, such as [{name: math}], or a reward_model."
        yield f"reward=[] without a reward_model: nothing would grade the responses. {remedy}"
    uncorrected = algo.importance_correction == "none" and algo.old_policy == "learner"
    if rollout.max_policy_lag > 0 and uncorrected and not algo.has_own_loss:
        reason = "lagging rollouts need a correction. Use truncated or masked, or a lag of 0."
        yield f"{algo.importance_correction=!s} with {rollout.max_policy_lag=}: {reason}"
    if algo.old_policy == "engine" and algo.importance_correction != "none":
        reason = "the ratio to the engine is its own correction, which would be there twice. Set none."
        yield f"{algo.importance_correction=!s} with {algo.old_policy=!s}: {reason}"
    if algo.importance_floor is not None and algo.importance_correction == "none":
        reason = "there is no weight to bound. Set null, or importance_correction=masked or truncated."
        yield f"{algo.importance_floor=} with {algo.importance_correction=!s}: {reason}"
    if algo.geometric_mask is not None and not algo.geometric_mask[0] <= 1.0 <= algo.geometric_mask[1]:
        reason = (
            "sequences would be left out where learner and engine agree. Use bounds around 1, such as [0.99, 1.01]."
        )
        yield f"algo.geometric_mask={list(algo.geometric_mask)}: {reason}"
    if algo.kl_place == "reward" and algo.kl_estimator == "k4":
        yield f"{algo.kl_estimator=!s} with {algo.kl_place=!s}: k4 equals k1 there (the ratio is 1). Use k1."
    if algo.kl_ratio_weighted and (algo.kl_estimator != "k3" or algo.kl_place != "loss"):
        reason = "it is defined for k3 in the loss. Set kl_estimator=k3 and kl_place=loss, or false."
        yield f"algo.kl_ratio_weighted=true with {algo.kl_estimator=!s} and {algo.kl_place=!s}: {reason}"
    if config.run.deterministic and rollout.max_policy_lag > 0:
        yield (
            f"run.deterministic=true with {rollout.max_policy_lag=}: which tokens new weights sample depends on the "
            "speed of engines and learners. Use a lag of 0, or deterministic=false."
        )
    if config.run.deterministic and reward_model is not None and reward_model.endpoint is not None:
        yield (
            f"run.deterministic=true with {reward_model.endpoint=!s}: nothing here can make its scores the same in a "
            "second run. Set reward_model.path instead, or deterministic=false."
        )


def support_problems(config: GRPOConfig) -> Iterator[str]:
    """What cannot be where rollouts are sampled from a part of the vocabulary, and engines return which."""
    cluster, restriction = config.cluster, config.rollout.restriction
    if not restriction:
        return
    given = " and ".join(f"rollout.{name}={value:g}" for name, value in restriction.items())
    if cluster.device == "cpu":
        reason = "vLLM's engine for CPU cannot return the tokens that it sampled from, which the learner needs"
        yield f"{given} with {cluster.device=!s}: {reason}. Sample from all tokens, or use GPUs."
    for label, evaluation in config.evaluations.items():
        if evaluation.temperature > 0 and not evaluation.restriction:
            reason = "the engines would return the whole vocabulary for each sampled token"
            remedy = "Set evaluation.top_p, top_k or min_p too, or evaluation.temperature=0"
            yield f"{given}, and nothing restricts the evaluation of {label}: {reason}. {remedy}."


def replay_problems(config: GRPOConfig) -> Iterator[str]:
    """What cannot be where engines return the experts of each token."""
    learner, cluster, rollout = config.learner, config.cluster, config.rollout
    if not learner.replays_experts:
        return
    if cluster.device == "cpu":
        reason = "vLLM's engine for CPU cannot return the experts of a token. Set it to none, or use GPUs."
        yield f"{learner.router_replay=!s} with {cluster.device=!s}: {reason}"
    without_cache = {
        f"{rollout.on_weight_update=!s}": rollout.on_weight_update == "keep_kv",
        "run.deterministic=true": config.run.deterministic,
    }
    for given, is_set in without_cache.items():
        if is_set:
            reason = "vLLM returns experts only with its prefix cache, which is then off. Remove one of them."
            yield f"{learner.router_replay=!s} with {given}: {reason}"


def _rewards_below_zero(config: GRPOConfig) -> Iterator[str]:
    """What makes rewards negative, as far as the config says it."""
    rollout, algo = config.rollout, config.algo
    if config.kl_in_reward:
        yield f"{algo.kl_place=!s}"
    if rollout.missing_eos_penalty:
        yield f"{rollout.missing_eos_penalty=}"
    if rollout.non_stop_reward is not None and rollout.non_stop_reward < 0:
        yield f"{rollout.non_stop_reward=}"
    if config.reward_model is not None:
        yield "reward_model"
    for part in config.reward.all_parts:
        if part.name in ("length", "repetition"):
            yield f"reward name={part.name}"
        elif part.weight < 0:
            yield f"reward name={part.name} with weight={part.weight:g}"


def bound_problems(config: GRPOConfig) -> Iterator[str]:
    """Rewards that the config itself gives."""
    rollout, given = config.rollout, {"environment.failed_reward": config.environment.failed_reward}
    given |= {"rollout.non_stop_reward": rollout.non_stop_reward or 0.0}
    given |= {"rollout.missing_eos_penalty": rollout.missing_eos_penalty}
    for name, value in given.items():
        if abs(value) > config.reward.bound:
            yield f"{name}={value:g}: over reward.bound={config.reward.bound:g}. Scale it down, or raise the bound."


def environment_problems(config: GRPOConfig) -> Iterator[str]:
    rollout, environment = config.rollout, config.environment
    if not config.acts:
        if any(source.is_environment for source in (*config.data.train, *config.data.eval)):
            yield "data.train or data.eval is environment, without an environment: nothing makes prompts. Name one."
        for name in ("max_rollout_tokens", "max_turns", "max_rollout_s"):
            if (value := getattr(rollout, name)) is not None:
                reason = "a response is one turn. Name tools or an environment, or remove the key."
                yield f"rollout.{name}={value} without tools or an environment: {reason}"
        return
    if rollout.stop or rollout.truncate_token is not None:
        yield (
            f"rollout.stop={list(rollout.stop)} and {rollout.truncate_token=!s} with an environment or tools: what "
            "follows a turn is joined at the token with which the template ends it. Remove both keys."
        )
    if config.tools and environment.uses_endpoint:
        yield (
            f"tools={list(config.tools)} with a program or service as environment: an agent offers its own tools in "
            "its requests. Remove the key."
        )
    made = {source.label for source in (*config.data.train, *config.data.eval) if source.is_environment}
    compared = {part.name for label in made for part in config.reward.parts_of(label) if part.needs_answer}
    for name in sorted(compared):
        yield (
            f"reward name={name!r} with prompts that the environment makes: they have no answer to compare with. Set "
            "reward=[], so that the environment's own reward judges, or name a function."
        )
    for which, sources in (("train", config.data.train), ("eval", config.data.eval)):
        if not environment.by_name or not any(source.is_environment for source in sources):
            continue
        yield (
            f"environment.by_name with prompts that the environment makes in data.{which}: no row chooses an "
            "environment. Name data with a column `environment`, or one environment as environment.name."
        )


def metric_problems(config: GRPOConfig, *, environment_judges: bool | None = None) -> Iterator[str]:
    """Why a data source has no metric: several parts of its reward could be it, or none has the name that was given.

    Args:
        environment_judges: whether the environment gives a reward, next to those of `reward`; None: not known.
    """
    data, asked = config.data, dict[tuple[str, ...], list[str]]()
    for which, sources in (("eval", data.eval), ("train", data.train if data.curriculum else ())):
        for source in sources:
            names, metric = config.graders_of(source.label), config.metric_of(source.label, trains=which == "train")
            if environment_judges is False:
                names = tuple(name for name in names if name != ENVIRONMENT_PART)
            verifiers = [part.name for part in config.reward.parts_of(source.label) if part.is_verifier]
            named = source.metric or config.evaluation.metric
            further = tuple(f"{name}/" for name in names if ":" in name or name == ENVIRONMENT_PART)
            decided = metric in (*verifiers, ENVIRONMENT_PART) or (metric and not environment_judges)
            if named is None and names and not decided:
                asked.setdefault(names, []).append(f"data.{which} {source.label}")
            elif named is not None and named not in names and not named.startswith(further):
                given = f"data.{which} {source.label} has metric" if source.metric else "evaluation.metric"
                reason = f"no part of the reward of {source.label} has this name"
                remedy = "Each set may name its own: data.eval=[{path: FILE, metric: NAME}]"
                yield f"{given}={named}: {reason}. {suggest(named, names)} {remedy}."
    for names, labels in asked.items():
        yield (
            f"evaluation.metric is not set, and several parts of the reward of {' and '.join(labels)} could be it: "
            f"{', '.join(names)}. Say which one is, with evaluation.metric=NAME or as `metric` of a set."
        )


def curriculum_problems(config: GRPOConfig) -> Iterator[str]:
    if config.data.curriculum is None:
        return
    if any(source.is_environment for source in config.data.train):
        reason = "it makes other prompts in each epoch, so none has a pass rate. Name data, or remove the key."
        yield f"data.curriculum with prompts that the environment makes: {reason}"
    for label in (source.label for source in config.data.train):
        metric = config.metric_of(label, trains=True)
        if not (may_be_accuracy(metric) and config.graders_of(label)):
            reason = "which says nothing of right or wrong. Name another evaluation.metric, or remove the key."
            yield f"data.curriculum with data.train {label}: its metric is {metric or 'none'}, {reason}"


def best_problems(config: GRPOConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.best is None:
        return
    names = []
    for label, each in config.evaluations.items():
        k = each.samples_per_prompt
        measured = {
            "avg": True,
            "pass": k > 1 and may_be_accuracy(config.metric_of(label)),
            "maj": k > 1 and any(part.is_verifier for part in config.reward.parts_of(label)),  # they read answers
        }
        names += [f"eval/{label}/{name}@{k}" for name, is_measured in measured.items() if is_measured]
    given = f"{checkpoint.best=!s}"
    if checkpoint.best not in names:
        yield f"{given}: no evaluation measures it. Use {' or '.join(names) or 'it with data.eval'}."
    elif config.evaluation.every is None:
        yield f"{given} without evaluation.every: only the last step is measured. Set it, or null here."
    if checkpoint.every is None:
        yield f"{given} with checkpoint.every=null: no checkpoint is saved. Set every, or null here."


def learner_problems(config: GRPOConfig) -> Iterator[str]:
    algo = config.algo
    for role, training in config.trained_roles():
        if training.minibatches_per_epoch > config.rollouts_per_step:
            yield (
                f"{role.section}.minibatches_per_epoch={training.minibatches_per_epoch}: there are only "
                f"{config.rollouts_per_step} rollouts per step (rollout.prompts_per_step x samples_per_prompt). Take "
                "fewer minibatches, or more rollouts."
            )
    if algo.constant_length is not None and algo.loss_aggregation != "constant":
        reason = "only loss_aggregation=constant reads it. Remove it, or set loss_aggregation=constant."
        yield f"{algo.constant_length=} with {algo.loss_aggregation=!s}: {reason}"
    if algo.clip_low >= 1.0 and algo.policy_loss in ("ppo", "gspo"):
        yield f"{algo.clip_low=}: the lower bound 1 - clip_low must be above 0. Use 0.2."
    for name in ("clip_low", "clip_high"):
        if algo.policy_loss == "dppo_tv" and (value := getattr(algo, name)) >= 1.0:
            reason = "a probability cannot move that far, so no token would be left out. Use 0.2."
            yield f"algo.{name}={value} with {algo.policy_loss=!s}: {reason}"
    for name, readers in sections.READ_BY_LOSSES.items():
        value, default = getattr(algo, name), type(algo).model_fields[name].default
        if value != default and algo.policy_loss not in readers:
            reason = "your function does not get it" if algo.has_own_loss else f"{algo.policy_loss} does not read it"
            remedy = f"Set {'null' if default is None else default}, the default, or policy_loss={readers[0]}."
            yield f"algo.{name}={value} with {algo.policy_loss=!s}: {reason}. {remedy}"


def cluster_problems(config: GRPOConfig) -> Iterator[str]:
    cluster, reward_model, rollout = config.cluster, config.reward_model, config.rollout
    if config.model.lora is not None and cluster.tensor_parallel > 1:
        reason = "an engine on several GPUs would split the adapter, which is not supported. Set it to 1."
        yield f"{cluster.tensor_parallel=} with model.lora: {reason}"
    if reward_model is not None and reward_model.path is not None:
        yield from dtype_problems("reward_model.dtype", reward_model.dtype, cluster.device)
    if cluster.min_engines > cluster.engines:
        reason = "sampling would wait for engines that nobody starts. Use at most cluster.engines."
        yield f"{cluster.min_engines=} with {cluster.engines=}: {reason}"
    if config.weights.transfer == "delta" and config.model.lora is not None:
        reason = "engines get the adapter alone, which is small and sent whole. Set transfer=full."
        yield f"{config.weights.transfer=!s} with model.lora: {reason}"
    if cluster.placement != "colocated":
        return
    if config.weights.transfer == "delta":
        reason = "engines on the GPUs of the learners read the weights there, and nothing is sent. Set transfer=full."
        yield f"{config.weights.transfer=!s} with {cluster.placement=!s}: {reason}"
    if cluster.device == "cpu":
        yield f"{cluster.placement=!s} with {cluster.device=!s}: there are no GPUs to share. Use placement=separate."
    elif (engine_gpus := cluster.engines * cluster.tensor_parallel) != cluster.learners:
        yield (
            f"{cluster.placement=!s}: cluster.engines x cluster.tensor_parallel = {engine_gpus} GPUs, but "
            f"{cluster.learners=}. Both must be the same GPUs, so the numbers must be equal."
        )
    if rollout.max_policy_lag > 0:
        reason = "on shared GPUs sampling and training take turns. Use separate placement or a lag of 0."
        yield f"{cluster.placement=!s} with {rollout.max_policy_lag=}: {reason}"
