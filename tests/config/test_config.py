"""The whole config: strict types, files and overrides, contradictions, and a resolved form that reads back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from refusals import refusal

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config, resolved_yaml
from rlhf.config.ppo import PPOConfig
from rlhf.config.reward import logged_name
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.sections import ScheduleConfig
from rlhf.config.supervised import SFTConfig

ROOT = Path(__file__).parents[2]


# --- files and overrides ---


def test_later_files_win_key_by_key_and_overrides_win_over_all_files(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("run: {steps: 20}\nlearner: {optimizer: {lr: 1e-5}}\n")
    config = load_config(GRPOConfig, [base, str(overlay)], ["learner.optimizer.lr=1e-6", "run.seed=7"])
    assert (config.run.dir, config.run.steps, config.run.seed) == ("runs/test", 20, 7)
    assert config.learner.optimizer.lr == 1e-6
    assert config.learner.max_tokens_per_microbatch == 256


def test_a_path_replaces_a_mapping_of_the_data_section_as_a_whole(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("data: {train: {path: openai/gsm8k, name: main}}\n")
    config = load_config(GRPOConfig, [base, str(overlay)], ["data.train=other.jsonl"])
    (source,) = config.data.train
    assert (source.path, source.name) == ("other.jsonl", None)


@pytest.mark.parametrize("value", ['"a\\ud800"', '["x", "\\udcff"]'])
def test_a_value_that_no_file_can_hold_is_named(base: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.stop=.*\ud800|^rollout\.stop=.*\udcff"):
        load_config(GRPOConfig, [base], [f"rollout.stop={value}"])


KEPT = "reward: [{name: exact, weight: 2}, format]"
TWO = "data: {train: [a.jsonl, {path: b.jsonl, rows: 3}]}"


@pytest.mark.parametrize(
    ("file", "then", "long"),
    [
        (KEPT, "reward.failure_fraction=1", {"reward": {"parts": [{"name": "exact", "weight": 2}, "format"]}}),
        (KEPT, "reward: {failure_fraction: 1}", {"reward": {"parts": [{"name": "exact", "weight": 2}, "format"]}}),
        ("reward: {parts: [math], failure_fraction: 1}", "reward=[exact]", {"reward": {"parts": ["exact"]}}),
        ("reward: {parts: [math], failure_fraction: 1}", "reward: [exact]", {"reward": {"parts": ["exact"]}}),
        (KEPT, "reward.by_source={a: [f1]}", {"reward": {"parts": [{"name": "exact", "weight": 2}, "format"],
                                                         "by_source": {"a": ["f1"]}}}),
        ("reward: {by_source: {a: [f1]}}", "reward=[exact]",
         {"reward": {"parts": ["exact"], "by_source": {"a": ["f1"]}}}),
        ("reward: {by_source: {a: [f1]}}", "reward.by_source.a.0.threshold=0.5",
         {"reward": {"by_source": {"a": [{"name": "f1", "threshold": 0.5}]}}}),
        (KEPT, "reward.1.style=boxed",
         {"reward": {"parts": [{"name": "exact", "weight": 2}, {"name": "format", "style": "boxed"}]}}),
        (KEPT, "reward.parts.0.weight=3", {"reward": {"parts": [{"name": "exact", "weight": 3}, "format"]}}),
        (KEPT, "reward.0=f1", {"reward": {"parts": ["f1", "format"]}}),
        ("environment: a.b:C", "environment.weight=3", {"environment": {"name": "a.b:C", "weight": 3}}),
        ("environment: {name: a.b:C, weight: 3}", "environment=a.b:D",
         {"environment": {"name": "a.b:D", "weight": 3}}),
        ("environment: {name: a.b:C, weight: 3}", "environment=null", {}),
        ("environment: {by_name: {x: a.b:C}}", "environment.by_name.x.options.k=1",
         {"environment": {"by_name": {"x": {"name": "a.b:C", "options": {"k": 1}}}}}),
        ("data: {eval: a.jsonl}", "data.eval.rows=5", {"data": {"eval": [{"path": "a.jsonl", "rows": 5}]}}),
        ("data: {eval: [a.jsonl]}", "data: {eval: {rows: 5}}", {"data": {"eval": [{"path": "a.jsonl", "rows": 5}]}}),
        (TWO, "data.train.0.rows=5",
         {"data": {"train": [{"path": "a.jsonl", "rows": 5}, {"path": "b.jsonl", "rows": 3}]}}),
        (TWO, "data.train={path: c.jsonl}", {"data": {"train": "c.jsonl"}}),
        (TWO, "data.train.1=c.jsonl", {"data": {"train": ["a.jsonl", "c.jsonl"]}}),
    ],
)  # fmt: skip
def test_a_later_file_or_override_keeps_the_keys_that_it_does_not_name(
    base: str, tmp_path: Path, file: str, then: str, long: dict[str, Any]
) -> None:
    files, overrides, whole = [base, str(tmp_path / "file.yaml")], [], str(tmp_path / "whole.yaml")
    Path(files[1]).write_text(file)
    if "=" in then:
        overrides = [then]
    else:
        files.append(str(tmp_path / "then.yaml"))
        Path(files[2]).write_text(then)
    if "failure_fraction" in file + then:
        long = {"reward": {**long["reward"], "failure_fraction": 1}}
    Path(whole).write_text(yaml.safe_dump(long))
    assert load_config(GRPOConfig, files, overrides) == load_config(GRPOConfig, [base, whole])


def test_an_entry_that_does_not_exist_and_an_ambiguous_data_set_are_named(base: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"{KEPT}\n{TWO}")
    for override, message in (
        ("reward.2.weight=3", "reward.parts.2: no such entry (2 in all, counted from 0)."),
        ("data.train.rows=5", "data.train.rows: there are 2 data sets. Name one by its number: data.train.0.rows."),
        ("data.train.b.rows=5", "Name one by its number: data.train.0.rows."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            load_config(GRPOConfig, [base, str(overlay)], [override])


def test_a_number_may_be_written_as_people_write_it(base: str) -> None:
    for text, value in {"1e-6": 1e-6, "1.0e-6": 1e-6, "1": 1.0, "0": 0.0}.items():
        assert load_config(GRPOConfig, [base], [f"learner.optimizer.lr={text}"]).learner.optimizer.lr == value


def test_an_override_may_contain_equals_signs_and_be_empty(base: str) -> None:
    config = load_config(GRPOConfig, [base], ["data.prompt_suffix=a=b", "logging.wandb.name="])
    assert config.data.prompt_suffix == "a=b"
    assert config.logging.wandb.name is None


def test_a_tilde_is_the_home_folder_in_every_key_that_names_a_file(
    base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    given = [
        "run.dir=~/run", "model.path=~/model", "data.train=~/train.jsonl", "data.eval=[~/a.jsonl, {path: ~/b}]",
        "evaluation.metric=reward_model",
        "critic.path=~/critic", "checkpoint.mirror=~/mirror", "reward_model.path=~/rm",
        "reward={parts: [{name: '~/mine.py:score', files: [~/tables]}], by_source: {a: [{name: '~/a.py:score'}]}}",
    ]  # fmt: skip
    text = resolved_yaml(load_config(PPOConfig, [base], given))
    assert text.count("/srv/me") == 11
    assert "~" not in text
    pairs = {"run": {"dir": "~/rm"}, "model": {"path": "~/m"}, "data": {"train": "~/t.jsonl", "eval": "~/e.jsonl"}}
    file = tmp_path / "reward_model.yaml"
    file.write_text(yaml.safe_dump(pairs))
    assert resolved_yaml(load_config(RewardTrainingConfig, [str(file)])).count("/srv/me/") == 4
    untouched = load_config(GRPOConfig, [base], ["checkpoint.mirror=s3://bucket/~me", "run.dir=runs/a~"])
    assert (untouched.checkpoint.mirror, untouched.run.dir) == ("s3://bucket/~me", "runs/a~")
    assert refusal(base, "run.dir=~nobody-at-all/run").startswith("run.dir: ~nobody-at-all/run: the home folder")


def test_a_value_may_refer_to_another_key(base: str) -> None:
    config = load_config(GRPOConfig, [base], ["logging.wandb.name=${model.path}"])
    assert config.logging.wandb.name == "some/model"


# --- what is refused ---


def test_every_unknown_key_is_named_on_a_line_of_its_own(base: str) -> None:
    lines = refusal(base, "run.stepss=3", "algo.betta=0.1").splitlines()
    assert [line.split("=")[0] for line in lines] == ["run.stepss", "algo.betta"]


def test_every_required_key_of_a_missing_section_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    keys = ["run.dir", "run.steps", "model.path", "data.train"]
    lines = refusal(str(empty)).splitlines()
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [(f"{key}:", f"{key}=VALUE.") for key in keys]
    assert all("required" in line for line in lines)
    assert "data.train.0.path: required" in refusal(str(empty), "data.train=[{rows: 3}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "holds a list"), ("run: [", "not readable as YAML"), ("run: {steps: 1}\nrun: {}", "not readable")],
)
def test_a_file_that_holds_no_sections_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    refused = refusal(str(file))
    assert str(file) in refused
    assert message in refused


# --- contradictions ---


def test_a_warm_up_of_the_policy_is_compared_with_the_steps_that_are_left_after_the_critics() -> None:
    overrides = ["run.steps=10", "critic.warmup_steps=8", "learner.minibatches_per_epoch=1"]
    overrides += ["learner.epochs_per_step=1", "learner.schedule.warmup_steps=2"]
    with pytest.raises(ValueError, match=r"\b2 optimizer steps\b.*critic\.warmup_steps"):
        load_config(PPOConfig, [str(ROOT / "configs/ppo_quickstart.yaml")], overrides)


def test_an_evaluation_takes_a_config_that_restricts_the_sampling_of_training() -> None:
    files, restricted = [str(ROOT / "configs/quickstart.yaml")], ["rollout.top_p=0.9"]
    load_config(GRPOConfig, files, restricted, contradictions=lambda config: config.sampling_contradictions())
    with pytest.raises(ValueError, match=r"rollout\.top_p=0\.9 with cluster\.device=cpu"):
        load_config(GRPOConfig, files, restricted)


def test_a_teacher_is_for_grpo() -> None:
    with pytest.raises(ValueError, match=r"algo\.teacher: .*Use rlhf\.grpo"):
        load_config(PPOConfig, [str(ROOT / "configs/ppo_quickstart.yaml")], ["algo.teacher={path: t}"])


def test_a_warm_up_as_a_fraction_suits_even_a_run_of_one_update(base: str) -> None:
    config = load_config(GRPOConfig, [base], ["run.steps=1", "learner.schedule.warmup_fraction=0.02"])
    assert (config.training.total_updates, config.training.warmup_updates) == (1, 1)


@pytest.mark.parametrize(
    ("total", "settings", "expected"),
    [
        (200, {"warmup_fraction": 0.1}, 20),
        (30, {"warmup_fraction": 0.01}, 1),
        (30, {"warmup_steps": 10}, 10),
        (30, {}, 0),
    ],
)
def test_a_warm_up_is_a_number_of_optimizer_steps_or_a_fraction_of_all_rounded_up(
    total: int, settings: dict[str, Any], expected: int
) -> None:
    assert ScheduleConfig(**settings).warmup_updates(total) == expected


def test_each_evaluation_set_has_the_sampling_of_the_section_or_its_own(base: str) -> None:
    sets = "data.eval=[a.jsonl, {path: b.jsonl, samples_per_prompt: 8, temperature: 0.6, max_response_tokens: 7}]"
    config = load_config(GRPOConfig, [base], [sets, "evaluation.temperature=0"])
    drawn = {
        label: (each.samples_per_prompt, each.temperature, each.max_response_tokens)
        for label, each in config.evaluations.items()
    }
    assert drawn == {"a": (1, 0.0, None), "b": (8, 0.6, 7)}
    assert config.evaluation_groups_at_once == 2 * config.rollout.max_concurrent_sequences // 8
    assert list(config.warnings()) == []
    assert config.evaluations["a"].restriction == {}
    refused = refusal(base, "data.train={path: a.jsonl, top_p: 0.5}")
    assert "a.jsonl has top_p=0.5" in refused
    assert "rollout.top_p" in refused
    refused = refusal(base, "data.eval={path: a.jsonl, temperature: 0}", "evaluation.samples_per_prompt=4")
    assert "evaluation.samples_per_prompt=4 with evaluation.temperature=0" in refused
    refused = refusal(base, "data.train={path: a.jsonl, temperature: 0.5}")
    assert "a.jsonl has temperature=0.5" in refused
    assert "rollout.temperature" in refused


# --- warnings ---

KL_REWARD = ("algo.kl_place=reward", "algo.kl_coef=0.1")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([*KL_REWARD, "algo.kl_estimator=k3"], "algo.kl_estimator=k3 with algo.kl_place=reward"),
        (
            ["algo.kl_coef=0.1", "algo.kl_estimator=k1", "algo.loss_aggregation=constant"],
            "algo.kl_estimator=k1 with algo.loss_aggregation=constant",
        ),
        (["algo.kl_coef=0.1", "algo.kl_estimator=k1"], "algo.kl_estimator=k1 with algo.loss_aggregation=token_mean"),
        (
            ["algo.kl_coef=1", "algo.kl_estimator=k4", "rollout.max_policy_lag=1"],
            "algo.kl_estimator=k4 with algo.kl_coef=1.0 with rollout.max_policy_lag=1 with algo.old_policy=learner",
        ),
        (["algo.policy_loss=gspo"], "algo.policy_loss=gspo with algo.loss_aggregation=token_mean"),
        (
            ["algo.policy_loss=sapo", "algo.loss_aggregation=constant"],
            "algo.policy_loss=sapo with algo.loss_aggregation=constant",
        ),
        (
            ["learner.optimizer.variant=tensorflow"],
            "learner.optimizer.variant=tensorflow with learner.optimizer.betas=[0.9, 0.95]",
        ),
        (["learner.minibatches_per_epoch=3"], "learner.minibatches_per_epoch=3"),
        (["evaluation.every=2"], "evaluation.every=2 without data.eval"),
        (
            ["cluster.device=cuda", "model.dtype=bfloat16", "cluster.learners=12", "cluster.sequence_parallel=3"],
            "cluster.sequence_parallel=3",
        ),
    ],
)
def test_a_likely_mistake_is_a_warning_and_no_error(base: str, overrides: list[str], named: str) -> None:
    (warning,) = load_config(GRPOConfig, [base], overrides).warnings()
    assert warning.split(": ")[0] == named


def test_a_sound_config_has_no_warnings(base: str) -> None:
    assert list(load_config(GRPOConfig, [base]).warnings()) == []
    for advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        kl = [*KL_REWARD, "algo.kl_estimator=k1", f"algo.advantage={advantage}"]
        assert list(load_config(GRPOConfig, [base], kl).warnings()) == []
    k4, lag = ("algo.kl_estimator=k4", "algo.kl_coef=1"), "rollout.max_policy_lag=1"
    engine = ("algo.old_policy=engine", "algo.importance_correction=none")
    for overrides in (k4, (*k4, lag, "algo.kl_coef=0.1"), (*k4, lag, *engine)):
        assert list(load_config(GRPOConfig, [base], overrides).warnings()) == []
    tensorflow = ["learner.optimizer.variant=tensorflow", "learner.optimizer.betas=[0.9, 0.999]"]
    assert list(load_config(GRPOConfig, [base], tensorflow).warnings()) == []


# --- frozen, and the resolved form ---


def test_nothing_changes_after_validation(base: str) -> None:
    config = load_config(GRPOConfig, [base])
    with pytest.raises(ValidationError, match="frozen"):
        config.learner.optimizer.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["learner.optimizer.lr=1e-12", "learner.optimizer.eps=1e-05", "rollout.stop=['</a>', '#']"],
        ["data.prompt_suffix='price: \\${x} and 100% \\boxed{} # no comment'"],
        ["run.dir='2024'", "logging.wandb.name='null'", "logging.wandb.tags=['yes', '1e-6']"],
        ["reward=[{name: math, mode: lenient}, {name: length, weight: 0.5, max_tokens: 20}]"],
        ["reward=[]", "reward_model.path=some/reward", "rollout.truncate_token='.'", "rollout.truncate=graded_text"],
        ["data.train=[a.jsonl, {path: b.jsonl, rows: 3}]", "data.eval=c.jsonl"],
    ],
)
def test_the_resolved_config_reads_back_as_the_same_config(base: str, tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(GRPOConfig, [base], overrides)
    saved = tmp_path / "config.yaml"
    saved.write_text(resolved_yaml(config))
    assert load_config(GRPOConfig, [str(saved)]) == config


# --- derived sizes, by hand ---


def test_optimizer_steps_follow_from_steps_epochs_and_minibatches(base: str) -> None:
    config = load_config(GRPOConfig, [base], ["learner.epochs_per_step=3", "learner.minibatches_per_epoch=4"])
    assert config.rollouts_per_step == 8 * 4
    assert config.training.updates_per_step == 3 * 4
    assert config.training.total_updates == 10 * 12
    assert config.max_sequence_tokens == 100 + 28


def test_a_rollout_of_several_turns_may_be_longer_than_one_turn(base: str) -> None:
    config = load_config(
        GRPOConfig, [base], ["rollout.max_rollout_tokens=60", "rollout.max_turns=3", "tools=[calculator]"]
    )
    assert (config.rollout.max_response_tokens, config.rollout.longest, config.max_sequence_tokens) == (28, 60, 160)
    assert config.sequence_keys == "data.max_prompt_tokens=100 + rollout.max_rollout_tokens=60"


ENGINE_IS_OLD = ("algo.old_policy=engine", "algo.importance_correction=none")


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["rollout.max_policy_lag=1"], False),
        (["algo.kl_coef=0.1"], False),
        (["learner.minibatches_per_epoch=2", "algo.importance_correction=none"], True),
        (["learner.epochs_per_step=2", "algo.importance_correction=none"], True),
        (["algo.kl_coef=0.1", "algo.kl_estimator=k1", "algo.kl_place=reward"], True),
        ([*ENGINE_IS_OLD, "learner.minibatches_per_epoch=2", "rollout.max_policy_lag=1"], False),
        ([*ENGINE_IS_OLD, "algo.kl_coef=0.1", "algo.kl_estimator=k1", "algo.kl_place=reward"], True),
    ],
)
def test_old_log_probs_are_computed_where_they_differ_from_the_current_ones_or_the_reward_holds_a_kl(
    base: str, overrides: list[str], needed: bool
) -> None:
    assert load_config(GRPOConfig, [base], overrides).needs_old_logprobs_pass == needed


@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        ([], 20),
        (["run.steps=201"], 21),
        (["run.steps=3"], 1),
        (["checkpoint.every=auto"], 20),
        (["checkpoint.every=7"], 7),
        (["checkpoint.every=null"], None),
    ],
)
def test_checkpoints_are_a_tenth_of_the_run_apart_unless_told_otherwise(
    base: str, overrides: list[str], every: int | None
) -> None:
    assert load_config(GRPOConfig, [base], ["run.steps=200", *overrides]).checkpoint_every == every


# --- the config of a reward model ---

REWARD_MODEL_FILE = ROOT / "configs" / "reward_model_quickstart.yaml"


def test_a_reward_model_is_trained_from_the_same_sections_as_a_policy() -> None:
    config = load_config(RewardTrainingConfig, [str(REWARD_MODEL_FILE)], ["cluster.learners=2"])
    assert (config.cluster.device, config.cluster.learners, config.cluster.threads_per_learner) == ("cpu", 2, None)
    with pytest.raises(ValueError, match=r"model\.lora: a reward model is trained whole"):
        load_config(RewardTrainingConfig, [str(REWARD_MODEL_FILE)], ["model.lora.rank=8"])
    assert set(RewardTrainingConfig.model_fields) == set(SFTConfig.model_fields) < set(GRPOConfig.model_fields)


def test_metrics_name_a_reward_alike_on_every_machine() -> None:
    assert logged_name("/srv/me/rewards.py:score") == "rewards.py:score"
    assert logged_name("/srv/me/rewards.py:score/length") == "rewards.py:score/length"
    assert [logged_name(part) for part in ("mine/rewards.py:score", "math/ok")] == ["mine/rewards.py:score", "math/ok"]
