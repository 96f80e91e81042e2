"""Options that are passed on to vLLM and DeepSpeed: which are taken, and how the others are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf.config.base import Section
from rlhf.config.grpo import GRPOConfig
from rlhf.config.library_options import (
    CHANGE_NO_NUMBERS,
    CHANGE_NUMBERS,
    DEEPSPEED_KEYS,
    OWN_KEYS,
    changes_numbers,
    check_engine_options,
)
from rlhf.config.load import validated
from rlhf.config.sections import LearnerConfig
from rlhf.sampling.requests import engine_arguments

CONFIG: dict[str, Any] = {
    "run": {"dir": "run", "steps": 10},
    "model": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_response_tokens": 28},
    "reward": ["math"],
}


def parse(options: dict[str, Any], **sections: Any) -> GRPOConfig:
    return validated(GRPOConfig, CONFIG | sections | {"rollout": CONFIG["rollout"] | {"engine": options}})


def test_an_option_of_vllm_is_the_last_of_the_engines_arguments() -> None:
    options = {"max_num_batched_tokens": 512, "kv_cache_dtype": "fp8", "compilation_config": {"level": 0}}
    arguments = engine_arguments(parse(options), seed=0)
    assert {name: arguments[name] for name in options} == options
    assert list(arguments)[-3:] == list(options)


def test_every_argument_that_the_run_sets_is_refused_with_the_key_that_sets_it() -> None:
    known = {*CHANGE_NUMBERS.split(), *CHANGE_NO_NUMBERS.split()}
    assert engine_arguments(parse({}), seed=0).keys() & known == set()
    for name, key in OWN_KEYS.items():
        with pytest.raises(ValueError, match=rf"^rollout\.engine\.{name}: .*{re.escape(key)}"):
            check_engine_options({name: 1})
    assert check_engine_options(dict.fromkeys(known, 1)).keys() == known


@pytest.mark.parametrize(
    "name",
    ["kv_transfer_config", "kv_offloading_size", "override_generation_config", "logits_processors", "watermark_config",
     "speculative_config", "enable_eplb", "kv_sharing_fast_prefill", "tokenizer_mode", "hf_token", "hf_overrides",
     "logprobs_mode", "worker_cls", "of_a_later_vllm"],
)  # fmt: skip
def test_any_other_argument_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.engine\.{name}: "):
        parse({"max_num_batched_tokens": 8, name: 1})


def test_weights_that_the_engine_makes_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^rollout\.engine\.load_format=dummy: "):
        parse({"load_format": "dummy"})


def test_only_options_that_change_log_probs_widen_the_bounds_of_the_canary() -> None:
    assert changes_numbers({"max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"})
    assert not changes_numbers({"max_num_batched_tokens": 512, "block_size": 64})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("kv_cache_type", "kv_cache_dtype"), ("max-num-batched-tokens", "max_num_batched_tokens")],
)
def test_an_unknown_argument_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.engine\.{name}: .*rollout\.engine\.{nearest}\?$"):
        parse({name: "fp8"})


def test_a_deterministic_run_computes_whole_prompts() -> None:
    for deterministic in (False, True):
        config = parse({"enable_chunked_prefill": True}, run=CONFIG["run"] | {"deterministic": deterministic})
        problem = "rollout.engine.enable_chunked_prefill=true with run.deterministic=true"
        assert any(each.startswith(problem) for each in config.contradictions()) == deterministic


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clipping": 1.0}, ["gradient_clipping", "max_grad_norm"]),
        ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps"]),
        ({"bf16": {"enabled": False}}, ["bf16"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage", "zero_stage"]),
        ({"zero_optimization": {"overlap_com": True}}, ["Did you mean zero_optimization.overlap_comm?"]),
        ({"zero_optimization": True}, ["zero_optimization=True"]),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ["offload_param"]),
    ],
)
def test_an_option_that_changes_the_result_of_an_update_is_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^learner\.deepspeed: ") as refused:
        validated(GRPOConfig, CONFIG | {"learner": {"deepspeed": options}})
    for word in words:
        assert word in str(refused.value)


def test_keys_of_ours_that_the_messages_name_exist() -> None:
    assert set(DEEPSPEED_KEYS.values()) <= LearnerConfig.model_fields.keys()
    for names in OWN_KEYS.values():
        for name in names.split(" and "):
            section, key = name.split(".")
            model = GRPOConfig.model_fields[section].annotation
            assert isinstance(model, type)
            assert issubclass(model, Section)
            assert key in model.model_fields
