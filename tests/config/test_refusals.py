"""Bad values and contradictions: each message begins with the keys and the values that it is about."""

from __future__ import annotations

import pytest
from refusals import refusal

# Overrides whose message begins with them, joined by "with".
NAMED = (
    "run.steps=1.5",
    "run.steps=true",
    "run.steps=0",
    "run.export=1",
    "algo.kl_estimator=k5",
    "run.dir=2024",
    "learner.optimizer=adam",
    "learner=3",
    "model=here",
    "reward=math",
    "learner.optimizer.lr=fast",
    "learner.optimizer.lr=-1",
    'run.steps="10"',
    "run.steps=null",
    "rollout.stop=1",
    "algo.policy_loss=pppo",
    "algo.advantage=gae",
    "cluster.device=gpu",
    "learner.zero_stage=4",
    "checkpoint.every=never",
    "checkpoint.every=0",
    "checkpoint.every=2.5",
    "data.max_prompt_tokens=0",
    "model.lora.targets=q_proj",
    "model.lora.rank=600",
    "algo.normalize_over=tokens",
    "rollout.dynamic_sampling_part=math",
    "reward=[]",
    "rollout.top_p=0.9; cluster.device=cpu",
    "rollout.top_k=1",
    "learner.router_replay=rollout; cluster.device=cpu",
    "learner.router_replay=rollout; rollout.on_weight_update=keep_kv",
    "learner.router_replay=rollout; run.deterministic=true",
    "rollout.truncate=graded_text",
    "algo.geometric_mask=[1.01, 1.1]",
    "rollout.missing_eos_penalty=0.5; algo.advantage=maxrl",
    "algo.kl_estimator=k4; algo.kl_place=reward",
    "learner.max_tokens_per_microbatch=127",
    "learner.minibatches_per_epoch=33",
    "learner.schedule.warmup_steps=2; learner.schedule.warmup_fraction=0.1",
    "learner.schedule.warmup_steps=10",
    "algo.constant_length=10",
    "algo.clip_high=1.0; algo.policy_loss=dppo_tv",
    "algo.sapo_tau_negative=2.0",
    "model.dtype=float32; cluster.device=cuda",
    "learner.zero_stage=0; model.dtype=bfloat16",
    "weights.transfer=delta; cluster.placement=colocated",
    "cluster.placement=colocated; cluster.device=cpu",
    "cluster.placement=colocated; rollout.on_weight_update=keep_kv",
    "run.deterministic=true; rollout.max_policy_lag=1",
    "run.deterministic=true; reward_model.endpoint=http://h/score",
    "data.eval=environment",
)
# Other overrides -> the beginning of each message about them, up to the colon.
REFUSED = {
    "run.steps": "'run.steps'",
    "=3": "'=3'",
    "run..steps=3": "'run..steps=3'",
    "reward=['/a/mine.py:f', '/b/mine.py:f']": "reward",
    "learner.optimizer.lr='1e-6'": 'learner.optimizer.lr="1e-6"',
    "run.export='true'": 'run.export="true"',
    "learner.optimizer.lr=.inf": "learner.optimizer.lr=Infinity",
    "run.dir=${nowhere}": "run.dir",
    "reward=[{name: maths}]": "reward.parts.0.name='maths'",
    "rollout.temperature=.inf": "rollout.temperature=Infinity",
    "learner.optimizer.betas=[0.9]": "learner.optimizer.betas",
    "data.eval=3": "data.eval",
    "algo.policy_loss='my loss:3'": "algo.policy_loss",
    "algo={policy_loss: 'm:f', clip_high: 0.3}": "algo.clip_high=0.3",
    "reward=[{name: math, mode: harsh}]": "reward.parts.0.mode=harsh",
    "data.train=[]": "data.train is empty",
    "data.curriculum={min_pass_rate: 1}": "data.curriculum.min_pass_rate=1 with max_pass_rate=1",
    "data.curriculum={}; reward=[]; reward_model={path: judge}": "data.curriculum with data.train train",
    "model.lora.rank=8; cluster.tensor_parallel=2": "cluster.tensor_parallel=2 with model.lora",
    "model.lora.rank=8; algo.log_kl=true; algo.ref_update=replace": "algo.ref_update=replace with model.lora",
    "rollout.samples_per_prompt=1": "rollout.samples_per_prompt=1 with algo.advantage=grpo",
    "rollout.dynamic_sampling=true; rollout.dynamic_sampling_part=maths": "rollout.dynamic_sampling_part=maths",
    "rollout.dynamic_sampling=true; rollout.dynamic_sampling_part=math; reward={by_source: {a: [gsm8k]}}": (
        "rollout.dynamic_sampling_part=math"
    ),
    "reward_model={path: judge, dtype: float32}": ("reward_model.dtype=float32 with cluster.device=cuda"),
    "algo.teacher={}": "algo.teacher | algo.teacher.reward=replace",
    "algo.teacher={path: t, own: average}": "algo.teacher | algo.teacher.own=average with algo.ref_update=fixed",
    "algo.teacher={own: policy}": "algo.teacher.own=policy without hint_column",
    "algo.teacher={own: average, hint_column: hint}": "algo.teacher.own=average with algo.ref_update=fixed",
    "algo.teacher={path: t}; rollout.temperature=0.7": "algo.teacher with rollout.temperature=0.7",
    "rollout.top_k=9; rollout.min_p=0.1; cluster.device=cpu": (
        "rollout.top_k=9 and rollout.min_p=0.1 with cluster.device=cpu"
    ),
    "rollout.top_p=0.9; algo.teacher={path: t}": "algo.teacher with rollout.top_p=0.9",
    "rollout.top_p=0.9; data.eval=[a.jsonl, {path: b.jsonl, top_k: 9}, {path: c.jsonl, temperature: 0}]": (
        "rollout.top_p=0.9, but the evaluation of a samples from all tokens"
    ),
    "algo.teacher={hint_column: h, by_source: {train: {path: t}}}": "algo.teacher.hint_column=h",
    "cluster.gpu=V100": "cluster.gpu=V100",
    "cluster.learners=3; cluster.sequence_parallel=2": "cluster.sequence_parallel=2",
    "algo.teacher={path: t, by_source: {other: {path: u}}}": "algo.teacher.by_source.other",
    "algo.teacher={endpoint: 'http://x', over: vocabulary}": (
        "algo.teacher.over=vocabulary with algo.teacher.endpoint=http://x"
    ),
    "algo.teacher={path: t, over: vocabulary, hint_column: h}": (
        "algo.teacher.over=vocabulary with algo.teacher.hint_column=h"
    ),
    "algo.teacher={path: t, over: vocabulary}; learner.zero_stage=3": (
        "algo.teacher.over=vocabulary with learner.zero_stage=3"
    ),
    "algo.teacher={over: vocabulary, reward: add, by_source: {train: {path: t}}}": (
        "algo.teacher.over=vocabulary with algo.teacher.by_source"
    ),
    "algo.teacher={path: t}; rollout.dynamic_sampling=true": (
        "algo.teacher.reward=replace with rollout.dynamic_sampling=true"
    ),
    "algo.teacher={path: t}; algo.kl_place=reward; algo.kl_coef=0.1; algo.kl_estimator=k1": (
        "algo.teacher.reward=replace with algo.kl_place=reward"
    ),
    "algo.teacher={endpoint: 'http://x'}; run.deterministic=true": "run.deterministic=true with algo.teacher.endpoint",
    "rollout.truncate_after=2; rollout.truncate_token=.": "rollout.truncate_after=2",
    "rollout.truncate_after=28; rollout.truncate_token=.; rollout.truncate=graded_text": (
        "rollout.truncate_after=28 with rollout.max_response_tokens=28"
    ),
    "rollout.truncate=graded_text; rollout.truncate_token=.; rollout.stop=[x]": (
        'rollout.truncate=graded_text with rollout.stop=["x"]'
    ),
    "reward_model={endpoint: 'http://h', template: raw}": (
        "reward_model.template=raw with reward_model.endpoint=http://h"
    ),
    "reward_model={path: judge, reference_samples: 256, std: 2}": (
        "reward_model.reference_samples=256 with reward_model.std=2.0"
    ),
    "rollout.max_policy_lag=1; algo.importance_correction=none": (
        "rollout.max_policy_lag=1 with algo.importance_correction=none with algo.old_policy=learner"
    ),
    "algo.old_policy=engine": "algo.importance_correction=truncated with algo.old_policy=engine",
    "algo.importance_floor=0.5; algo.importance_correction=none": "algo.importance_floor=0.5",
    "algo.advantage=maxrl; algo.kl_place=reward; algo.kl_estimator=k1; algo.kl_coef=0.1": (
        "algo.kl_place=reward with algo.advantage=maxrl"
    ),
    "algo.advantage=maxrl; reward=[{name: math, weight: -0.5}]": (
        "reward name=math with weight=-0.5 with algo.advantage=maxrl"
    ),
    "algo.advantage=maxrl; reward=[{name: math}, {name: length, max_tokens: 20, buffer_tokens: 4}]": (
        "reward name=length with algo.advantage=maxrl"
    ),
    "algo.kl_ratio_weighted=true; algo.kl_estimator=k2": "algo.kl_ratio_weighted=true",
    "evaluation.max_response_tokens=64": "evaluation.max_response_tokens=64 with rollout.max_response_tokens=28",
    "rollout.max_rollout_tokens=27": (
        "rollout.max_rollout_tokens=27 | rollout.max_rollout_tokens=27 with rollout.max_response_tokens=28"
    ),
    "rollout.max_rollout_tokens=60; learner.max_tokens_per_microbatch=159": (
        "rollout.max_rollout_tokens=60 | learner.max_tokens_per_microbatch=159"
    ),
    "data.template=raw; data.chat_template_kwargs={enable_thinking: false}": (
        "data.chat_template_kwargs with data.template=raw"
    ),
    "learner.schedule.min_lr=1e-3": "learner.schedule.min_lr=0.001",
    "learner.offload_optimizer=true; learner.zero_stage=0": (
        "learner.offload_optimizer=true with learner.zero_stage=0 | learner.zero_stage=0 with model.dtype=bfloat16"
    ),
    "algo.clip_low=1.0": "algo.clip_low=1.0 with algo.policy_loss=ppo",
    "algo.dual_clip=3.0; algo.policy_loss=cispo": "algo.dual_clip=3.0",
    "algo.clip_high=0.3; algo.policy_loss=sapo": "algo.clip_high=0.3",
    "checkpoint.best=eval/x/avg@1": "checkpoint.best=eval/x/avg@1 | checkpoint.best=eval/x/avg@1",
    "data.eval=a.jsonl; evaluation.samples_per_prompt=2; checkpoint.best=accuracy; evaluation.every=1": (
        "checkpoint.best=accuracy"
    ),
    "data.eval=a.jsonl; checkpoint.best=eval/a/avg@1; checkpoint.every=null": "checkpoint.best=eval/a/avg@1",
    "data.eval={path: a.jsonl, max_response_tokens: 99}": (
        "evaluation.max_response_tokens=99 with rollout.max_response_tokens=28"
    ),
    "logging.profile_steps=[2,99]": "logging.profile_steps=[99]",
    "weights.transfer=delta; model.lora={rank: 8}": "weights.transfer=delta with model.lora",
    "cluster.min_engines=2": "cluster.min_engines=2 with cluster.engines=1",
    "cluster.placement=colocated; cluster.learners=4": "cluster.placement=colocated",
    "environment=Game": "environment.name='Game'",
    "environment=calculater": "environment.name='calculater'",
    "environment=my:module:Game": "environment.name='my:module:Game'",
    "environment={options: {a: 1}}": "environment.options",
    "environment={name: a:B, by_name: {c: d:E}}": "environment.name=a:B with environment.by_name",
    "environment={by_name: {c: d:E}, gives_answer: true}": "environment.gives_answer=true with environment.by_name",
    "environment={name: service, url: 'http://h', gives_answer: true}": "environment.gives_answer=true",
    "environment={by_name: {c: bad}}": "environment.by_name.c.name='bad'",
    "environment=program": "environment.name=program",
    "environment={name: a:B, command: [x]}": 'environment.command=["x"]',
    "environment={command: [x]}": 'environment.command=["x"]',
    "environment={by_name: {c: {name: program}}}": "environment.by_name.c.name=program",
    "environment={name: program, command: [x], options: {a: 1}}": "environment.options",
    "environment={name: a:B, timeout_s: 5}": "environment.timeout_s=5.0",
    "environment={name: service, url: 'http://a:99999'}": "environment.url",
    "environment={name: service, url: 'http://['}": "environment.url",
    "environment={name: service, url: 'http://a', cpu_seconds: 5}": "environment.cpu_seconds=5.0",
    "environment={trained_sequences: [first]}": 'environment.trained_sequences=["first"]',
    "environment={name: a:B, returned_files: [x]}": 'environment.returned_files=["x"]',
    "environment={name: program, command: [x], returned_files: [../x]}": "environment.returned_files",
    "environment={name: program, command: [x], returned_files: [.]}": "environment.returned_files",
    'environment={name: program, command: [x], returned_files: ["a\\0"]}': "environment.returned_files",
    "environment={name: program, command: [x], returned_files: ['**x']}": "environment.returned_files",
    "environment=service": "environment.name=service",
    "environment={name: service, url: 'ftp://a'}": "environment.url=ftp://a",
    "environment={name: program, command: [x], url: 'http://a'}": "environment.url=http://a",
    "environment={name: program, command: [x], key_variable_name: K}": "environment.key_variable_name=K",
    "environment={name: service, url: 'http://a', command: [x]}": 'environment.command=["x"]',
    "environment={name: service, url: 'http://a', options: {a: 1}}": "environment.options",
    "environment={name: service, url: 'http://a:b@c', key_variable_name: K}": (
        "environment.key_variable_name with a password in environment.url"
    ),
    "environment={name: service, url: 'http://a', network: true}": "environment.network=true",
    "environment={name: service, url: 'http://a'}; tools=[calculator]": 'tools=["calculator"]',
    "environment={name: service, url: 'http://a', endpoint_host: 0.0.0.0}": "environment.endpoint_host='0.0.0.0'",
    "environment={name: a:B, endpoint_host: 10.0.0.1}": "environment.endpoint_host=10.0.0.1",
    "environment={name: program, command: [a], endpoint_host: 10.0.0.1}": "environment.endpoint_host=10.0.0.1",
    "environment={name: program, command: [x], timeout_s: 0}": "environment.timeout_s=0",
    "environment={name: a:b, trained_sequences: [fist]}": "environment.trained_sequences=['fist']",
    "environment={name: a:b, trained_sequences: []}": "environment.trained_sequences=[]",
    "tools=[program]": "tools.0='program'",
    "environment={name: a:B, memory_mb: 1}": "environment.memory_mb=1",
    "environment={name: a:B, max_failed_fraction: 2}": "environment.max_failed_fraction=2",
    "tools=[calculator, calculator]": "tools.1='calculator'",
    "tools={a: b}": "tools={'a'",
    "tools=[calculator]; rollout.stop=[x]": 'rollout.stop=["x"] with tools=["calculator"]',
    # data and rewards
    "data.chat_template_kwargs.tools=true": "data.chat_template_kwargs",
    "data.template=no-such": "data.template",
    "data.train=[[a.jsonl]]": "data.train",
    "data.train={path: a, weight: 2, rows: 10}": "data.train.0",
    "data.train=[a/t.jsonl, b/t.jsonl]": "data.train",
    "data.train=[{path: a, weight: 2}, b]": "data.train",
    "data.eval={path: b, weight: 2}": "data.eval",
    "data.train={path: a, source: x/y}": "data.train.0.source=x/y",
    "reward=[math, {name: a.b}]": "reward.parts.1.name='a.b'",
    "reward=[{name: 'a b:c'}]": "reward.parts.0.name='a b:c'",
    "reward=[{name: format, pattern: '('}]": "reward.parts.0.pattern",
    "reward=[{name: length, max_tokens: 5, min_tokens: 9}]": "reward.parts.0",
    "reward=[{name: math, weight: '1'}]": 'reward.parts.0.weight="1"',
    "reward=[{name: rubric, url: 'http://h/v1', model: m}]": "reward.parts.0",
    "reward={parts: [{name: code, cpu_seconds: 20}], wall_seconds: 30}": "reward code",
    "reward=[math, math]": "reward.parts.1.name='math'",
    "reward.by_source={x: [maht]}": "reward.by_source.x.0.name='maht'",
    "reward.by_source=[math]": "reward.by_source=['math']",
}
# An override with an unknown name -> the key that it may mean.
SUGGESTED = {
    "run.stepss=3": "run.steps",
    "rnu.steps=3": "run",
    "learner.lr=1": "learner.optimizer.lr",
    "learner.learning_rate=1": "learner.optimizer.lr",
    "learner.optimiser.lr=1": "learner.optimizer",
    "optimizer.lr=1": "learner.optimizer",
    "batch_size=8": "rollout.prompts_per_step",
    "epsilon=0.2": "algo.clip_low and algo.clip_high",
    "lora_r=8": "model.lora.rank",
    "algo.beta=0.1": "algo.kl_coef",
    "rollout.topp=0.9": "rollout.top_p",
    "data.train_files=x": "data.train",
    "data.trian=x": "data.train",
    "data.promt_column=x": "data.prompt_column",
    "data.train={pth: x.jsonl}": "data.train.0.path",
    "reward=[{name: math, wieght: 2}]": "reward.parts.0.weight",
    "reward=[{name: math, mod: strict}]": "reward.parts.0.mode",
    "reward=[{name: maths}]": "math",
    "reward={part: []}": "reward.parts",
    "environment={nam: my.module:G}": "environment.name",
    "environment=calculater": "calculator",
}


@pytest.mark.parametrize("overrides", [*NAMED, *REFUSED])
def test_each_message_begins_with_the_keys_and_their_values(base: str, overrides: str) -> None:
    lines = refusal(base, *overrides.split("; ")).splitlines()
    assert " | ".join(line.split(": ")[0] for line in lines) == REFUSED.get(
        overrides, overrides.replace("; ", " with ")
    )


@pytest.mark.parametrize("override", SUGGESTED)
def test_an_unknown_name_is_refused_with_the_one_that_it_may_mean(base: str, override: str) -> None:
    assert refusal(base, override).endswith(f" Did you mean {SUGGESTED[override]}?")
