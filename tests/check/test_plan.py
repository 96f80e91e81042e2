"""--plan: the run's arithmetic, where everything goes, and what is likely wrong; in a second, without heavy imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from byte_tokenizer import byte_tokenizer

from rlhf import evaluate, grpo
from rlhf.check import resources
from rlhf.check.memory import trained_parameters
from rlhf.check.model_shape import model_shape
from rlhf.check.report import first_prompt_text, make_plan
from rlhf.check.resources import check_resources, count_nodes, local_gpus
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.config.program import with_values
from rlhf.config.sections import LoraConfig

ROOT = Path(__file__).parents[2]
LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
BASE: dict[str, Any] = {
    "run": {"dir": "x", "steps": 100},
    "model": {"path": "no/model"},
    "data": {"train": "x.jsonl", "max_prompt_tokens": 1000},
    "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "max_response_tokens": 1000},
    "learner": {
        "minibatches_per_epoch": 2,
        "epochs_per_step": 2,
        "max_tokens_per_microbatch": 4500,
        "optimizer": {"lr": 1e-5},
        "schedule": {"name": "cosine", "warmup_steps": 100},
    },
    "cluster": {"learners": 4, "engines": 2, "tensor_parallel": 2},
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(BASE))

    def build(*overrides: str) -> GRPOConfig:
        return load_config(GRPOConfig, [str(file)], overrides)

    return build


def plan_with(config: GRPOConfig, model: dict[str, Any]) -> str:
    """The plan with this config.json at model.path."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        model_section = config.model.model_copy(update={"path": folder})
        return make_plan(config.model_copy(update={"model": model_section})).text


def line_of(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return line.strip().removeprefix(label).strip()


# --- arithmetic ---


def test_batches_are_spelled_out(make: Any) -> None:
    text = make_plan(make()).text
    assert line_of(text, "rollouts per step") == "32 prompts x 8 = 256"
    assert line_of(text, "rollouts in total") == "100 steps x 256 = 25,600"
    assert line_of(text, "minibatch ").startswith("256 / 2 = 128 rollouts")
    assert line_of(text, "optimizer steps, learner") == "100 steps x 2 epochs x 2 minibatches = 400"
    assert line_of(text, "longest sequence") == "1,000 prompt + 1,000 response = 2,000 tokens"
    assert line_of(text, "tokens per step, at most") == "256 x 2,000 = 512,000, of which sampled 256,000"
    # 4,500 tokens hold two sequences of 2,000: 128 sequences are 64 microbatches, 16 for each of 4 learners
    assert line_of(text, "microbatches, at most") == "64 of 4,500 tokens per minibatch, 16 per learner"


def test_learning_rates_are_those_of_the_first_the_middle_and_the_last_optimizer_step(make: Any) -> None:
    text = make_plan(make()).text
    assert line_of(text, "first optimizer step") == "1e-07  (step 1)"  # 1e-5 / 100
    # step 200 is a third of the way from 100 to 400: (1 + cos(pi / 3)) / 2 = 0.75
    assert line_of(text, "middle optimizer step") == "7.5e-06  (step 200)"
    assert line_of(text, "last optimizer step") == "0  (step 400)"


def test_bytes_and_seconds_of_a_transfer_of_everything_and_of_changes_alone(make: Any) -> None:
    llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    once = ["learner.minibatches_per_epoch=1", "learner.epochs_per_step=1", "learner.schedule.warmup_steps=0"]
    given = [*once, "model.dtype=bfloat16", "plan.network_gbit_per_second=10", "weights.transfer=delta"]
    text = " ".join(plan_with(make(*given, "learner.optimizer.lr=1e-6"), llama).split())
    # 8.03 B x 2 bytes x 8 bits / 10 Gbit/s = 12.85 s; 0.33% of them x 4 bytes = 0.099 GiB
    assert "everything 8.030 B x 2 bytes = 14.96 GiB, 12.85 s at 10 Gbit/s" in text
    assert "1 update at lr 1e-06, about 0.33% of the elements x 4 bytes = 0.10 GiB, 0.08 s at 10 Gbit/s" in text
    assert "host memory 14.96 GiB per node with engines, 3.74 per learner" in text
    assert "over 40%: everything is sent" in " ".join(plan_with(make(*given, "learner.optimizer.lr=1"), llama).split())
    assert "changes alone" not in plan_with(make(*given, "model.dtype=float32", "cluster.device=cpu"), llama)
    assert "everything  " not in plan_with(make("cluster.placement=colocated", "cluster.engines=2"), llama)


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(count)) + "\n")
    return path


def test_steps_and_epochs_follow_from_the_rows_of_the_data(make: Any, tmp_path: Path) -> None:
    many = write_rows(tmp_path / "many.jsonl", 1000)
    hub = make_plan(make("data.train=openai/gsm8k")).text
    assert line_of(hub, "data  ") == "not counted: openai/gsm8k is no local file"
    assert line_of(make_plan(make(f"data.train={many}")).text, "data  ") == (
        "1,000 rows / 32 = 31.2 steps per epoch; 100 steps = 3.20 epochs"
    )
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x"] * 600}), tmp_path / "some.parquet")
    (tmp_path / "list.json").write_text(json.dumps([{"question": "x"}] * 40))
    mixed = f"[{{path: {many}, rows: 50}}, {tmp_path}/some.parquet, {tmp_path}/list.json]"
    assert line_of(make_plan(make(f"data.train={mixed}")).text, "data  ").startswith("690 rows / 32 = 21.6 steps")


def test_fewer_rows_than_a_step_takes_are_refused_with_both_numbers(make: Any, tmp_path: Path) -> None:
    (problem,) = make_plan(make(f"data.train={write_rows(tmp_path / 'few.jsonl', 31)}")).problems
    assert re.match(r"rollout\.prompts_per_step=32: .*\b31 prompts\b.*Use at most 31\b", problem)


# --- the GPUs of this machine ---


class Nvml:
    """Stands in for NVML, with two GPUs of 24 GB; a test that needs a GPU compares it with the real one."""

    NVMLError = OSError
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: [0, 1][index])  # noqa: N815
    nvmlDeviceGetHandleByUUID = staticmethod({"GPU-one": 1}.__getitem__)  # noqa: N815
    nvmlDeviceGetName = staticmethod(lambda handle: "NVIDIA GeForce RTX 4090")  # noqa: N815
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=(24 - handle) * 2**30))  # noqa: N815


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-one")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_the_plan_takes_number_and_memory_of_the_gpus_that_are_there(make: Any) -> None:
    text = plan_with(make(), LLAMA31_8B)
    (memory,) = re.findall(r"memory of a GPU +(.*\n.*)\n", text)
    assert " ".join(memory.split()) == (
        "23.0 GiB, read here; this machine: 1 x NVIDIA GeForce RTX 4090, 24.0 GiB, 1 x NVIDIA GeForce RTX 4090, "
        "23.0 GiB"
    )
    assert line_of(text, "GPUs") == "8 on 4 nodes of 2"


@pytest.mark.usefixtures("two_gpus")
def test_what_the_config_says_of_gpus_wins_over_what_is_there(make: Any) -> None:
    text = plan_with(make("cluster.gpu_memory_gib=60", "cluster.gpus_per_node=4"), LLAMA31_8B)
    assert line_of(text, "memory of a GPU").startswith("60 GiB, from cluster.gpu_memory_gib; this machine: 1 x NVIDIA")
    assert line_of(text, "GPUs") == "8 on 2 nodes of 4"
    named = plan_with(make("cluster.gpu=H200"), LLAMA31_8B)
    assert line_of(named, "memory of a GPU") == "140.4 GiB, of cluster.gpu=H200"
    assert line_of(named, "GPUs") == "8 on 1 node of 8"
    assert "one RTX 4090 by" in plan_with(make("cluster.gpu_memory_gib=60"), LLAMA31_8B)
    elsewhere = make_plan(make("cluster.ray_address=10.0.0.1:6379")).text
    assert line_of(elsewhere, "memory of a GPU").startswith("79 GiB, assumed: no GPU is read here")


def test_without_a_gpu_its_memory_is_assumed_and_the_plan_says_so(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert line_of(make_plan(make()).text, "memory of a GPU").startswith("79 GiB, assumed: no GPU is read here")


def test_a_driver_that_fails_offers_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Nvml.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", type("Broken", (Nvml,), {"nvmlInit": staticmethod(fail)}))  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resources.local_resources()["GPU"] == 0


@pytest.mark.gpu
def test_nvml_names_the_gpus_that_torch_sees() -> None:
    import torch

    seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in local_gpus()] == [device.name for device in seen]
    # the driver keeps a part of the memory to itself, which torch does not see
    assert all(0.9 < d.total_memory / 2**30 / g.memory_gib <= 1 for g, d in zip(local_gpus(), seen, strict=True))


QWEN25 = {
    "model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "num_key_value_heads": 2,
}  # fmt: skip
QWEN25_3B = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "intermediate_size": 11008}
QWEN25_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "memory"), [("one_gpu_24gb", QWEN25_3B, 22), ("one_gpu_80gb", QWEN25_7B, 79)]
)
def test_the_configs_for_one_gpu_fit_it_without_a_warning(name: str, shape: dict[str, Any], memory: float) -> None:
    file = ROOT / "configs" / f"{name}.yaml"
    config = load_config(GRPOConfig, [str(file)])
    text = plan_with(config, QWEN25 | shape)
    assert "Warnings" not in text
    assert line_of(text, "memory of a GPU").startswith(f"{memory} GiB, from cluster.gpu_memory_gib")
    assert line_of(text, "GPUs") == "1 on 1 node of 1"
    assert "\nfits: " in text
    assert "\ndoes not fit: " in plan_with(config, QWEN25 | shape | {"num_hidden_layers": 100})
    whole = plan_with(with_values(config, model={"lora": None}), QWEN25 | shape)
    assert "\ndoes not fit: a learner needs " in whole  # all weights of these models cannot be trained there


@pytest.mark.parametrize("shape", [QWEN25_3B, QWEN25_7B])
def test_trained_and_frozen_parameters_are_those_of_the_model_on_the_meta_device(shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf.algo.lora import adapt, linear_names

    lora = LoraConfig(rank=32, exclude=("layers.3.mlp.up_proj",))
    values = QWEN25 | shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    parameters = sum(param.numel() for param in model.parameters())
    adapt(model, linear_names(model, targets=lora.targets, exclude=lora.exclude), rank=lora.rank, scale=lora.scale)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    planned = model_shape(values)
    assert (planned.parameters, trained_parameters(planned, lora)) == (parameters, trained)


# --- placement ---


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        ([], 1),  # 4 learners, 2 engines of 2 GPUs
        (["cluster.learners=6", "cluster.engines=1", "cluster.tensor_parallel=4"], 2),  # two GPUs stay free
        (["cluster.learners=64", "cluster.engines=8", "cluster.tensor_parallel=8"], 16),
        (["cluster.placement=colocated"], 1),
        (["cluster.gpus_per_node=4"], 2),
    ],
)
def test_an_engine_never_lies_across_two_nodes(make: Any, overrides: list[str], nodes: int) -> None:
    config = make(*overrides)
    assert count_nodes(config.roles(), config.cluster.gpus_per_node) == nodes


# --- memory, and what is wrong ---


def test_a_model_whose_size_is_not_known_is_told_with_the_reason(make: Any) -> None:
    text = " ".join(make_plan(make()).text.split())
    assert "memory is not known: config.json of model.path=no/model" in text
    text = " ".join(plan_with(make(), {"model_type": "mamba"}).split())
    assert "memory is not known: model_type='mamba'" in text


# safetensors' own totals, as the hub shows them on the page of each model
PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "allenai/Llama-3.1-Tulu-3-8B-DPO": 8_030_326_784,  # Llama's, and 8 further tokens in and out of 4,096 numbers each
}
OF_THE_HUB = re.compile(r"^model:\n  path: (?!runs/)", re.MULTILINE)
GPU_CONFIGS = [file for file in sorted((ROOT / "configs").glob("*.yaml")) if OF_THE_HUB.search(file.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("file", GPU_CONFIGS, ids=lambda file: file.name)
def test_on_a_fresh_machine_every_config_for_gpus_has_its_memory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    schema = PPOConfig if file.name.startswith("ppo") else GRPOConfig
    if file.name.startswith("eval"):
        sampled = GRPOConfig.sampling_contradictions
        config = load_config(GRPOConfig, [str(file)], contradictions=sampled, complete=evaluate.complete)
    else:
        config = load_config(schema, [str(file)])
    text = make_plan(config).text
    memory = text[text.index("\nMemory, estimated\n") :]
    assert line_of(memory, "model ").endswith(f", {PUBLISHED_PARAMETERS[config.model.path]:,} parameters")
    assert line_of(memory, "sizes from") == "rlhf's own table, as config.json is not on this machine"
    assert f"({config.model.path})" in memory
    assert "no estimate" not in memory


def test_config_json_is_read_in_a_folder_and_in_the_hubs_cache_and_comes_before_the_table(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    name = "Qwen/Qwen2.5-7B"
    snapshot = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA31_8B))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for path, source in ((str(snapshot), "config.json"), (name, f"config.json ({name})")):
        text = make_plan(make(f"model.path={path}")).text
        assert line_of(text, "model ") == "llama, 8,030,261,248 parameters"
        assert line_of(text, "sizes from") == source


def told_of(config: GRPOConfig, **values: Any) -> str:
    """The first paragraph and the warnings of a plan."""
    text = plan_with(config, {**LLAMA31_8B, **values})
    return " ".join(f"{text.partition('Batches')[0]} {text.partition('Warnings')[2]}".split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["rollout.prompts_per_step=1", "learner.minibatches_per_epoch=4"],
            ["learner.minibatches_per_epoch=4: a minibatch has 2 rollouts", "2 of 4 learners are idle"],
        ),
        (
            ["rollout.prompts_per_step=1", "learner.minibatches_per_epoch=8", "cluster.sequence_parallel=2"],
            ["a minibatch has 1 rollouts", "1 of 2 groups of learners that share sequences"],
        ),
        (
            ["cluster.engines=40", "cluster.tensor_parallel=1"],
            ["cluster.engines=40: ", "rollout.prompts_per_step=32", "8 engines are idle"],
        ),
        (["cluster.tensor_parallel=16"], ["cluster.tensor_parallel=16: an engine does not fit", "gpus_per_node=8"]),
        (
            ["cluster.gpu_memory_gib=24"],
            ["does not fit: a learner needs 86.3 of 24 GiB. The best that fits: 8 GPUs", "learner.zero_stage=3"],
        ),
        (
            # 0.14 x 79 GiB - 7.5 GiB of weights - 3 GiB = 0.58 GiB = 9,509 tokens of 64 KiB
            ["model.gradient_checkpointing=true", "rollout.gpu_memory_utilization=0.14"],
            ["rollout.samples_per_prompt=8 x 2,000 = 16,000", "preempted", "Raise rollout.gpu_memory_utilization"],
        ),
        (
            ["cluster.gpu_memory_gib=12"],
            ["not even one sequence of 2,000", "No layout of 8 GPUs does. What would fit: 16 GPUs"],
        ),
        (
            ["cluster.placement=colocated", "model.gradient_checkpointing=true"],
            # 15.0 GiB of weights in bfloat16, and 1 GiB for the canary
            ["rollout.gpu_memory_utilization=0.85 x 79 GiB plus 16.0 GiB", "The best that fits: 4 GPUs"],
        ),
        (
            [
                "cluster.placement=colocated",
                "model.gradient_checkpointing=true",
                "cluster.offload_while_sampling=false",
            ],
            ["does not fit: on a shared GPU the engine's", "plus 38.4 GiB"],
        ),
        (
            ["cluster.placement=colocated", "learner.max_tokens_per_microbatch=60000"],
            ["does not fit: a learner needs 441.6 of 79 GiB", "learner.max_tokens_per_microbatch=4096"],
        ),
    ],
)
def test_a_likely_mistake_is_told_with_its_keys(make: Any, overrides: list[str], parts: list[str]) -> None:
    warnings = told_of(make(*overrides))
    for part in parts:
        assert part in warnings


def test_a_context_that_is_too_short_is_told(make: Any) -> None:
    warnings = told_of(make("model.gradient_checkpointing=true"), max_position_embeddings=1024)
    assert "data.max_prompt_tokens=1000 + rollout.max_response_tokens=1000: 2000 tokens exceed the context" in warnings


def test_a_run_that_fits_has_no_warnings(make: Any) -> None:
    assert "Warnings" not in plan_with(make("model.gradient_checkpointing=true"), LLAMA31_8B)


# --- PPO and reward models ---


@pytest.fixture
def make_ppo(tmp_path: Path) -> Any:
    file = tmp_path / "ppo.yaml"
    file.write_text(yaml.safe_dump(BASE))

    def build(*overrides: str) -> PPOConfig:
        return load_config(PPOConfig, [str(file)], overrides)

    return build


def test_critics_and_reward_models_have_gpus_of_their_own(make_ppo: Any) -> None:
    config = make_ppo("cluster.learners=2", "cluster.engines=1", "reward_model={path: no/reward, replicas: 2}")
    text = make_plan(config).text
    assert line_of(text, "GPUs") == "8 on 1 node of 8"
    assert line_of(text, "critics") == "2, 1 GPU each, ZeRO stage 2"
    assert line_of(text, "reward models") == "2, 1 GPU each"


def test_colocated_critics_share_the_gpus_of_learners_and_engines(make_ppo: Any) -> None:
    text = make_plan(make_ppo("cluster.placement=colocated")).text
    assert line_of(text, "GPUs") == "4 on 1 node of 8"
    assert line_of(text, "critics") == "4, on the GPUs of the learners, ZeRO stage 2"


def test_an_endpoint_takes_no_gpu(make_ppo: Any) -> None:
    config = make_ppo("reward_model={endpoint: 'http://x', replicas: 4}")
    assert [role.name for role in config.roles()] == ["learner", "critic", "engine"]


def test_warm_up_steps_of_the_critic_count_for_the_critic_and_not_for_the_policy(make_ppo: Any) -> None:
    config = make_ppo("critic.warmup_steps=10")
    drawn = make_plan(config).text
    assert line_of(drawn, "optimizer steps, learner") == (
        "90 steps x 2 epochs x 2 minibatches = 360; none in the first 10 steps"
    )
    assert line_of(drawn, "optimizer steps, critic") == "100 steps x 2 epochs x 2 minibatches = 400"
    assert (config.training.updates_before(10), config.training.updates_before(11)) == (0, 4)


def test_a_critic_may_take_more_optimizer_steps_on_the_same_rollouts(make_ppo: Any) -> None:
    config = make_ppo("critic.epochs_per_step=1", "critic.minibatches_per_epoch=12")
    assert line_of(make_plan(config).text, "optimizer steps, critic") == "100 steps x 1 epoch x 12 minibatches = 1,200"
    assert (config.training.total_updates, config.critic_training.updates_per_step) == (400, 12)
    with pytest.raises(ValueError, match=r"critic\.minibatches_per_epoch=257: .*\b256 rollouts\b"):
        make_ppo("critic.minibatches_per_epoch=257")


def test_critics_and_reward_models_count_among_what_a_run_asks_for(make_ppo: Any) -> None:
    config = make_ppo("reward_model.path=no/reward")
    message = r"4 learners, 4 critics, 1 reward model, 2 engines .*\b13 GPUs\b.*\b12\b"
    with pytest.raises(ValueError, match=message):
        check_resources(config, {"CPU": 64.0, "GPU": 12.0})
    check_resources(config, {"CPU": 64.0, "GPU": 13.0})
    check_resources(config, {"CPU": 1.0, "GPU": 4.0}, trains=False)


# --- resources ---


def test_fewer_gpus_or_cores_than_asked_for_are_refused_with_both_numbers(make: Any) -> None:
    with pytest.raises(ValueError, match=r"4 learners, 2 engines \(.*=2\) .*\b8 GPUs\b.*\b6\b"):
        check_resources(make(), {"CPU": 64.0, "GPU": 6.0})
    with pytest.raises(ValueError, match=r"\b3 CPUs\b.*\bthere are 2\b"):
        check_resources(make(), {"CPU": 2.0, "GPU": 8.0})


def test_enough_cpus_and_gpus_pass(make: Any) -> None:
    check_resources(make(), {"CPU": 3.0, "GPU": 8.0})
    check_resources(make("cluster.placement=colocated"), {"CPU": 3.0, "GPU": 4.0})
    check_resources(make("cluster.device=cpu"), {"CPU": 3.0})


# --- the program ---

OWN_CONFIGS = [
    ["math.yaml"],
    ["tulu3_8b_math.yaml"],
    ["math.yaml", "cpu.yaml"],
    ["tulu3_8b_math.yaml", "cpu.yaml"],
    ["quickstart.yaml"],
    ["quickstart.yaml", "cpu.yaml"],
    ["real_model_cpu.yaml"],
    ["tools_quickstart.yaml"],
    ["python_tool_math.yaml"],
]
HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "datasets", "numpy")


def flags_of(files: list[str]) -> list[str]:
    return [part for file in files for part in ("--config", str(ROOT / "configs" / file))]


def test_the_plan_ends_with_the_first_prompt_where_model_and_data_are_on_this_machine(
    make: Any, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA31_8B))
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    here = [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'x.jsonl'}"]
    text = first_prompt_text(make(*here))
    assert text == "\nFirst prompt\nprompt x/1 (22 tokens):\n<s>[user]1+1?[assistant]\nanswer: 2\n"
    with pytest.raises(ValueError, match=r"data\.template=none\.jinja: the file cannot be read"):
        first_prompt_text(make(*here, "data.template=none.jinja"))
    assert first_prompt_text(make(here[0])) == first_prompt_text(make(here[1])) == ""


@pytest.mark.slow
@pytest.mark.parametrize("files", OWN_CONFIGS, ids=" ".join)
def test_every_config_of_the_repository_is_planned_without_heavy_imports(files: list[str], tmp_path: Path) -> None:
    """In a folder without the model and the data: the first prompt needs the tokenizer."""
    code = (
        "import sys; from rlhf.grpo import main; from rlhf.config.cli import run_program; run_program(main);"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, *flags_of(files), "--plan", "run.dir=x"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout
    assert output.splitlines()[-1] == "heavy: []"
    assert re.match(r"fits: |does not fit: |would not start: (?:data|model|run.dir)", output)
    assert re.search(r"^  optimizer steps, learner +[\d,]+ steps", output, re.MULTILINE)
    plan = output[output.index("\nBatches\n") :]
    to_paste = re.compile(r" +[\w.]+=\S+( [\w.]+=\S+)*$")  # keys are one line
    assert max(len(line) for line in plan.splitlines() if not to_paste.match(line)) <= 100


@pytest.mark.slow
def test_the_whole_config_is_printed_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = flags_of(["math.yaml"])
    grpo.main([*flags, "--print-config", "run.steps=7"])
    (tmp_path / "whole.yaml").write_text(capsys.readouterr().out)
    assert load_config(GRPOConfig, [str(tmp_path / "whole.yaml")]) == load_config(
        GRPOConfig, flags[1:], ["run.steps=7"]
    )
    grpo.main([*flags, "--plan"])
    plan = capsys.readouterr().out
    grpo.main([*flags, "--print-config", "--plan", "run.steps=7"])
    both = capsys.readouterr().out
    assert "\nrun:\n" not in plan
    assert both.index("\nBatches\n") < both.index("\nrun:\n")


@pytest.mark.slow
def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    command = f"{sys.executable} -m rlhf.grpo --config configs/math.yaml --plan | head -1; exit ${{PIPESTATUS[0]}}"
    completed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (completed.returncode, completed.stderr) == (0, "")
