"""The contradictions between the keys of a GRPO config: tables for `conditions.py`, functions where those do not do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf.config.base import GIVEN, suggest
from rlhf.config.conditions import conflicts, unread_keys, value_at
from rlhf.config.program import dtype_problems
from rlhf.config.reward import ENVIRONMENT_PART, may_be_accuracy
from rlhf.config.sections import CLIPPING_LOSSES

if TYPE_CHECKING:
    from rlhf.config.grpo import GRPOConfig

ACTS = "tools or environment.name or environment.by_name"
SAMPLING_READS_IF = {  # for an evaluation too, which trains nothing
    "rollout.truncate_after": "rollout.truncate=graded_text",
    "rollout.truncate": "rollout.truncate_token",
    "rollout.max_rollout_tokens": ACTS,
    "rollout.max_turns": ACTS,
    "rollout.max_rollout_s": ACTS,
}
TRAINING_READS_IF = {
    "rollout.dynamic_sampling_part": "rollout.dynamic_sampling",
    "algo.normalize_over": "algo.advantage=reinforce_pp|reinforce_pp_baseline",
    "algo.clip_low": f"algo.policy_loss={'|'.join(CLIPPING_LOSSES)}",
    "algo.clip_high": f"algo.policy_loss={'|'.join(CLIPPING_LOSSES)}",
    "algo.dual_clip": "algo.policy_loss=ppo|gspo",
    "algo.sapo_tau_positive": "algo.policy_loss=sapo",
    "algo.sapo_tau_negative": "algo.policy_loss=sapo",
    "algo.constant_length": "algo.loss_aggregation=constant",
    "algo.importance_floor": "algo.importance_correction=truncated|masked",
    "algo.kl_ratio_weighted": "algo.kl_estimator=k3 and algo.kl_place=loss",
    "algo.ref_update": "algo.kl_coef or algo.log_kl",
    "checkpoint.best": "evaluation.every and checkpoint.every",
}
TURN_ENDS = "a turn with an environment or tools ends where the template ends it. Remove the key."
SAMPLING_CONFLICTS = {
    "rollout.truncate=graded_text and rollout.stop": "stop would end the response earlier. Remove one of them.",
    "rollout.engine.enable_chunked_prefill!=null and run.deterministic": (
        "the rounding of a prompt depends on how it is cut into chunks. Remove one of them."
    ),
    **{
        f"rollout.{end} and {turns}": TURN_ENDS
        for end in ("stop", "truncate_token")
        for turns in ("tools", "environment.name", "environment.by_name")
    },
    "tools and environment.uses_endpoint": "a program or service offers its own tools in its requests. Remove the key.",
    "tools and environment.of_package": "the environment brings its own tools. Remove the key.",
    **{
        f"data.{name} and environment.of_package": "the environment writes its prompts itself, see environment.args. "
        "Remove the key."
        for name in ("system_prompt", "prompt_suffix")
    },
}
PREFIX_CACHE = "vLLM returns experts only with its prefix cache, which is off then. Remove one of them."
VOCABULARY, REPLACES = "algo.teacher.over=vocabulary", "algo.teacher.reward=replace"
TRAINING_CONFLICTS = {
    "rollout.samples_per_prompt<2 and algo.advantage=grpo|dr_grpo|rloo|maxrl|reinforce_pp_baseline"
    " and learns_from_rewards": (
        "the advantages of a group of one are zero. Use at least 2, or algo.advantage=reinforce_pp."
    ),
    "rollout.samples_per_prompt<2 and rollout.dynamic_sampling": (
        "rewards of a group of one are always equal. Use at least 2, or dynamic_sampling=false."
    ),
    "rollout.max_policy_lag>0 and algo.importance_correction=none and algo.old_policy=learner"
    " and algo.has_own_loss=false": (
        "lagging rollouts need a correction. Set importance_correction=truncated or masked, or a lag of 0."
    ),
    "algo.importance_correction!=none and algo.old_policy=engine": (
        "the ratio would be corrected twice. Set importance_correction=none."
    ),
    "algo.kl_estimator=k4 and algo.kl_place=reward": "k4 equals k1 there, since the ratio is 1. Use k1.",
    "algo.ref_update!=fixed and model.lora": (
        "the reference is the model without its adapters, which never changes. Set ref_update=fixed."
    ),
    "algo.clip_low>=1 and algo.policy_loss=ppo|gspo": "the lower bound 1 - clip_low must be above 0. Use 0.2.",
    "algo.clip_low>=1 and algo.policy_loss=dppo_tv": "no probability can move that far. Use 0.2.",
    "algo.clip_high>=1 and algo.policy_loss=dppo_tv": "no probability can move that far. Use 0.2.",
    "run.deterministic and rollout.max_policy_lag>0": (
        "when new weights arrive depends on the speed of the machine. Use a lag of 0, or deterministic=false."
    ),
    "run.deterministic and reward_model.endpoint": (
        "an endpoint may give other scores in a second run. Set reward_model.path, or deterministic=false."
    ),
    "algo.teacher and rollout.temperature!=1.0": "a teacher judges at temperature 1. Set temperature=1.",
    "algo.teacher and rollout.top_p<1": "a teacher judges among all tokens. Remove one of them.",
    "algo.teacher and rollout.top_k": "a teacher judges among all tokens. Remove one of them.",
    "algo.teacher and rollout.min_p": "a teacher judges among all tokens. Remove one of them.",
    f"{VOCABULARY} and algo.teacher.by_source": "all rows have one teacher there. Remove it, or set over=sampled.",
    f"{VOCABULARY} and algo.teacher.endpoint": (
        "a server does not give the log-probs of all tokens. Set algo.teacher.path, or over=sampled."
    ),
    f"{VOCABULARY} and algo.teacher.hint_column": (
        "the teacher would read longer rows than the policy. Remove hint_column, or set over=sampled."
    ),
    f"{VOCABULARY} and learner.zero_stage=3": (
        "a learner has only a share of the teacher's head. Use a lower stage, or over=sampled."
    ),
    f"{REPLACES} and algo.kl_place=reward and kl_in_reward": "no reward is used. Set kl_place=loss, or reward=add.",
    f"{REPLACES} and rollout.dynamic_sampling": "no reward is used. Set dynamic_sampling=false, or reward=add.",
    "learner.router_replay=rollout and cluster.device=cpu": (
        "vLLM's engine for CPU does not return the experts of a token. Set router_replay=none."
    ),
    "learner.router_replay=rollout and rollout.on_weight_update=keep_kv": PREFIX_CACHE,
    "learner.router_replay=rollout and run.deterministic": PREFIX_CACHE,
    "weights.transfer=delta and model.lora": "engines get the whole adapter, which is small. Set transfer=full.",
    "weights.transfer=delta and cluster.placement=colocated": "on shared GPUs nothing is sent. Set transfer=full.",
    "cluster.tensor_parallel>1 and model.lora": "an engine on several GPUs cannot split the adapter. Set it to 1.",
    "cluster.placement=colocated and cluster.device=cpu": "there are no GPUs to share. Use placement=separate.",
    "cluster.placement=colocated and rollout.on_weight_update=keep_kv": (
        "engines on shared GPUs sleep while learners train, and keep no keys. Set on_weight_update=recompute."
    ),
}
WARNINGS = {
    "algo.kl_estimator=k2|k3 and algo.kl_place=reward and kl_in_reward": (
        "biased, with almost no gradient near the reference; k3 can blow up too. Only k1 is exact there."
    ),
    "algo.kl_estimator=k1 and algo.loss_aggregation=token_mean|sequence_mean and kl_in_loss": (
        "its expected gradient does not contain the reference: on-policy it pulls towards longer responses. Use k3, or "
        "k1 in the reward."
    ),
    "algo.kl_estimator=k1 and algo.loss_aggregation=constant and kl_in_loss": (
        "its expected gradient is zero on-policy, and off-policy points away from the policy that sampled. Use k3, or "
        "k1 in the reward."
    ),
    "algo.kl_estimator=k4 and algo.kl_coef>=0.3 and rollout.max_policy_lag>0 and algo.old_policy=learner"
    " and kl_in_loss": (
        "with a lag its gradient also points away from the policy that sampled. In a scan with a lag of 1 and beta 1 "
        "the KL was 3 to 7 times that without a penalty (docs/records/kl.md). Use k3."
    ),
    "algo.policy_loss=gspo|sapo and algo.loss_aggregation=token_mean|constant": (
        "its paper takes the mean of the token means of the responses. Set loss_aggregation=sequence_mean."
    ),
    "rollout.on_stale=drop and rollout.max_policy_lag": (
        "slow prompts, often the long and hard ones, are trained less often than they are drawn. wait trains them all."
    ),
}


def sampling_problems(config: GRPOConfig) -> Iterator[str]:
    """Contradictions that an evaluation meets too."""
    yield from unread_keys(config, SAMPLING_READS_IF)
    yield from conflicts(config, SAMPLING_CONFLICTS)
    rollout, limit = config.rollout, config.rollout.max_response_tokens
    if rollout.truncate_after >= limit:
        yield f"{rollout.truncate_after=} with {rollout.max_response_tokens=}: no response is that long. Lower it."
    if rollout.longest < limit:
        reason = "one turn may be longer than the whole rollout. Raise the former, or set it to null."
        yield f"{rollout.max_rollout_tokens=} with {rollout.max_response_tokens=}: {reason}"
    for evaluation in config.evaluations.values() or [config.evaluation]:
        if (evaluation.max_response_tokens or 0) > limit:
            reason = "the engines would cut evaluation responses off. Raise the latter."
            yield f"{evaluation.max_response_tokens=} with {rollout.max_response_tokens=}: {reason}"
        if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
            reason = "greedy samples of a prompt are all the same. Take one sample, or a temperature."
            yield f"{evaluation.samples_per_prompt=} with evaluation.temperature=0: {reason}"


def training_problems(config: GRPOConfig) -> Iterator[str]:
    yield from unread_keys(config, TRAINING_READS_IF)
    yield from conflicts(config, TRAINING_CONFLICTS)
    rollout, algo, cluster, reward_model = config.rollout, config.algo, config.cluster, config.reward_model
    if algo.advantage == "maxrl" and config.learns_from_rewards:
        for given in _rewards_below_zero(config):
            remedy = "Use rewards of 0 and 1, or algo.advantage=dr_grpo."
            reason = "maxrl divides by the mean reward, but rewards may be below 0"
            yield f"{given} with {algo.advantage=!s}: {reason}. {remedy}"
    if rollout.dynamic_sampling and (part := rollout.dynamic_sampling_part) is not None:
        common_parts = config.reward.parts_of_every_source + ("reward_model",) * (reward_model is not None)
        common_parts += ("environment",) * bool(config.environment.parts)
        if part not in common_parts:
            lists = ["reward.parts", *(f"reward.by_source.{source}" for source in config.reward.by_source)]
            reason = f"not in all of {' and '.join(lists)}. Name one of: {', '.join(common_parts) or 'none'}; or null."
            yield f"{rollout.dynamic_sampling_part=!s}: {reason}"
    ungraded = config.reward.leaves_something_ungraded and reward_model is None and not config.environment.parts
    if ungraded and config.learns_from_rewards:
        yield "reward=[]: nothing would grade the responses. Name a reward, such as [{name: math}], or a reward_model."
    if algo.geometric_mask is not None and not algo.geometric_mask[0] <= 1.0 <= algo.geometric_mask[1]:
        reason = "it would leave out sequences where learner and engine agree. Use bounds around 1, such as 0.99, 1.01."
        yield f"algo.geometric_mask={list(algo.geometric_mask)}: {reason}"
    for role, training in config.trained_roles():
        if training.minibatches_per_epoch > config.rollouts_per_step:
            reason = f"a step has only {config.rollouts_per_step} rollouts (prompts_per_step x samples_per_prompt)"
            given = f"{role.section}.minibatches_per_epoch={training.minibatches_per_epoch}"
            yield f"{given}: {reason}. Take fewer minibatches, or more rollouts."
    if reward_model is not None and reward_model.path is not None:
        yield from dtype_problems(config, "reward_model.dtype")
    if cluster.min_engines > cluster.engines:
        yield f"{cluster.min_engines=} with {cluster.engines=}: sampling would wait forever. Use at most the latter."
    engine_gpus = cluster.engines * cluster.tensor_parallel
    if cluster.placement == "colocated" and cluster.device != "cpu" and engine_gpus != cluster.learners:
        reason = "Both must be the same GPUs. Make the numbers equal."
        given = f"cluster.engines x cluster.tensor_parallel = {engine_gpus} GPUs, and {cluster.learners=}"
        yield f"{cluster.placement=!s}: {given}. {reason}"
    for name in ("environment.failed_reward", "rollout.non_stop_reward", "rollout.missing_eos_penalty"):
        if abs(value := value_at(config, name) or 0.0) > config.reward.bound:
            yield f"{name}={value:g}: over reward.bound={config.reward.bound:g}. Scale it down, or raise the bound."


def support_problems(config: GRPOConfig) -> Iterator[str]:
    """Problems of sampling from a part of the vocabulary, which engines then return for each token."""
    restriction = config.rollout.restriction
    if not restriction:
        return
    given = " and ".join(f"rollout.{name}={value:g}" for name, value in restriction.items())
    if config.cluster.device == "cpu":
        reason = "vLLM's engine for CPU cannot return the tokens that it sampled from. Sample from all, or use GPUs."
        yield f"{given} with cluster.device=cpu: {reason}"
    for label, evaluation in config.evaluations.items():
        if evaluation.temperature > 0 and not evaluation.restriction:
            reason = "for each sampled token the engines would return the whole vocabulary"
            remedy = "Set evaluation.top_p, top_k or min_p too, or evaluation.temperature=0"
            yield f"{given}, but the evaluation of {label} samples from all tokens: {reason}. {remedy}."


def _rewards_below_zero(config: GRPOConfig) -> Iterator[str]:
    """Settings with which a reward may be negative."""
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


def package_problems(config: GRPOConfig, which: str) -> Iterator[str]:
    """Problems of data.train or data.eval (`which`) with an environment of a package, which makes the prompts."""
    files = [each.path for each in getattr(config.data, which) if not each.is_environment]
    if files and config.environment.of_package:
        key, reason = f"data.{which}", f"the prompts come from environment.name={config.environment.name}"
        yield f"{key}={files[0]}: {reason}. Remove the key, or write {key}={{path: environment, rows: N}}."


def environment_problems(config: GRPOConfig) -> Iterator[str]:
    """Problems of prompts that the environment makes."""
    sources = {"data.train": config.data.train, "data.eval": config.data.eval}
    made = {key: [each.label for each in sets if each.is_environment] for key, sets in sources.items()}
    if not config.uses_environment_or_tools:
        yield from (f"{key}=environment: nothing makes prompts. Set environment too." for key in made if made[key])
        return
    given = {f"environment.name={part.name}": part.name for part in config.environment.parts.values()}
    given |= {f"tools={name}": name for name in config.tools}
    for key in (key for key, name in given.items() if config.environment.python and name.startswith(GIVEN)):
        yield (
            f"environment.python={config.environment.python}: {key} is an object of this Python program, which another "
            "interpreter cannot read. Put it into a module, and give its name."
        )
    for key, labels in made.items():
        if labels and config.environment.by_name:
            yield (
                f"environment.by_name with prompts that the environment makes in {key}: no row chooses an environment. "
                "Name data with a column `environment`, or one environment as environment.name."
            )
    parts = (part for labels in made.values() for label in labels for part in config.reward.parts_of(label))
    for name in sorted({part.name for part in parts if part.needs_answer}):
        yield (
            f"reward name={name!r}: prompts that the environment makes have no answer to compare with. Set reward=[], "
            "so that the environment's own reward judges, or name a function."
        )


def metric_problems(config: GRPOConfig, *, environment_judges: bool | None = None) -> Iterator[str]:
    """Problems of data sources without a metric, or with one that no part of their reward has.

    `environment_judges`: whether the environment gives a reward, next to those of `reward`; None: not known.
    """
    data, undecided = config.data, dict[tuple[str, ...], list[str]]()
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
                undecided.setdefault(names, []).append(f"data.{which} {source.label}")
            elif named is not None and named not in names and not named.startswith(further):
                given = f"data.{which} {source.label} has metric" if source.metric else "evaluation.metric"
                reason = f"no part of the reward of {source.label} has this name. {suggest(named, names)}"
                yield f"{given}={named}: {reason} Each set may name its own: data.eval=[{{path: FILE, metric: NAME}}]."
    for names, labels in undecided.items():
        yield (
            f"evaluation.metric is not set, and several parts of the reward of {' and '.join(labels)} could be it: "
            f"{', '.join(names)}. Set evaluation.metric=NAME, or `metric` of a set."
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
    best, names = config.checkpoint.best, []
    for label, each in config.evaluations.items():
        k = each.samples_per_prompt
        measured = {
            "avg": True,
            "pass": k > 1 and may_be_accuracy(config.metric_of(label)),
            "maj": k > 1 and any(part.is_verifier for part in config.reward.parts_of(label)),  # they read answers
        }
        names += [f"eval/{label}/{name}@{k}" for name, is_measured in measured.items() if is_measured]
    if best is not None and best not in names:
        yield f"checkpoint.best={best}: no evaluation measures it. Use {' or '.join(names) or 'it with data.eval'}."
