"""Options that are passed on to vLLM and DeepSpeed: which are taken, and how the others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config import library_options
from rlhf.config.base import Section
from rlhf.config.grpo import GRPOConfig
from rlhf.config.library_options import (
    ACCEPTED,
    DEEPSPEED_KEYS,
    OWN_KEYS,
    REFUSED,
    changes_numbers,
    check_engine_options,
    vllm_arguments,
)
from rlhf.config.load import validated
from rlhf.config.sections import LearnerConfig
from rlhf.rollout.requests import engine_arguments

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
    set_by_us = engine_arguments(parse({}), seed=0).keys()
    assert set_by_us <= OWN_KEYS.keys() | REFUSED.keys()
    for name in OWN_KEYS.keys() | REFUSED.keys():
        with pytest.raises(ValueError, match=rf"^rollout\.engine\.{name}: ") as refused:
            check_engine_options({name: 1})
        assert (OWN_KEYS.get(name) or REFUSED[name]) in str(refused.value)


def test_every_argument_of_the_installed_vllm_is_decided_once() -> None:
    decided = [*OWN_KEYS, *ACCEPTED, *REFUSED]
    assert sorted(decided) == sorted(vllm_arguments())
    assert check_engine_options(dict.fromkeys(ACCEPTED, 1)).keys() == ACCEPTED.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}, "old weights"),
        ({"kv_offloading_size": 8.0}, "old weights"),
        ({"kv_offloading_backend": "lmcache"}, "old weights"),
        ({"override_generation_config": {"temperature": 0.5}}, "what is sampled"),
        ({"override_generation_config": {"eos_token_id": [1]}}, "what is sampled"),
        ({"logits_processors": ["mine:Processor"]}, "what is sampled"),
        ({"max_num_batched_tokens": 8, "watermark_config": {}}, "what is sampled"),
        ({"enable_eplb": True}, "new weights of experts"),
        ({"kv_sharing_fast_prefill": True}, "the canary"),
        ({"tokenizer_mode": "slow"}, "one model"),
        ({"hf_token": "hf_x"}, "HF_TOKEN"),
        ({"load_format": "dummy"}, "random"),
    ],
)
def test_what_would_change_the_samples_without_the_learner_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.engine\.{list(options)[-1]}[:=].*{words}"):
        parse(options)


def test_an_argument_of_another_vllm_that_nobody_has_examined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_options, "vllm_arguments", lambda: ("keep_old_keys",))
    with pytest.raises(ValueError, match=r"^rollout\.engine\.keep_old_keys: .* not been examined"):
        parse({"keep_old_keys": True})


def test_only_options_that_change_log_probs_widen_the_bounds_of_the_canary() -> None:
    assert changes_numbers({"max_num_batched_tokens": 512, "kv_cache_dtype": "fp8"})
    assert not changes_numbers({"max_num_batched_tokens": 512, "block_size": 64})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("kv_cache_type", "kv_cache_dtype"), ("max-num-batched-tokens", "max_num_batched_tokens"),
     ("kv_transfer_confg", "kv_transfer_config")],
)  # fmt: skip
def test_an_unknown_argument_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout\.engine\.{name}: .*rollout\.engine\.{nearest}\?$"):
        parse({name: "fp8"})


def test_an_argument_that_vllm_had_once_is_refused_in_a_line_that_can_be_read() -> None:
    with pytest.raises(ValueError, match=r"^rollout\.engine\.swap_space: .*no such argument.*Remove it\.$") as refused:
        parse({"swap_space": 4})
    assert len(str(refused.value)) < 200


def test_a_deterministic_run_computes_whole_prompts() -> None:
    for deterministic in (False, True):
        config = parse({"enable_chunked_prefill": True}, run=CONFIG["run"] | {"deterministic": deterministic})
        problem = "rollout.engine.enable_chunked_prefill with run.deterministic=true"
        assert any(each.startswith(problem) for each in config.contradictions()) == deterministic


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clipping": 1.0}, ["gradient_clipping", "max_grad_norm"]),
        ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps", "leaves the result"]),
        ({"bf16": {"enabled": False}}, ["bf16", "leaves the result"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage", "zero_stage"]),
        ({"zero_optimization": {"overlap_com": True}}, ["Did you mean zero_optimization.overlap_comm?"]),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, ["zero_quantized_gradients", "leaves the result"]),
        ({"zero_optimization": True}, ["zero_optimization=True", "section"]),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ["offload_param", "leaves the result"]),
    ],
)
def test_what_changes_the_result_of_an_update_is_refused(options: dict[str, Any], words: list[str]) -> None:
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
