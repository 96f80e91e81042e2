"""rlhf.export: any checkpoint becomes a model that transformers loads, without the stack and in little memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_model_checkpoint
from model_families import write_family
from safetensors.torch import load_file, save_file
from waiting import WAIT_S
from worlds import make_config

from rlhf import export
from rlhf.algo.lora import adapters_off
from rlhf.algo.packing import pack
from rlhf.config.model_folder import full_name
from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.data.model_files import model_fingerprint
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.learner.tiny_model import make_tokenizer
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "alpha": 12, "exclude": ["layers.1.mlp.up_proj"]}
STATE = {
    "updates_taken": 8,
    "evaluations": {0: {"eval/test/avg@1": 0.25}, 4: {"eval/test/avg@1": 0.5}},
    "stream": {"sources": {"train": {"rows": 256, "fingerprint": "0a1b"}}},
    "code": {"rlhf": "0.1.0", "commit": "abc123", "uncommitted changes": "yes"},
}


def write_run(
    path: Path, model: Path, *steps: int, dtype: str = "bfloat16", adapter: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A run with checkpoints of a model's weights, or of an adapter with LORA; the weights."""
    run = RunFolder(path, resume=False)
    sections: dict[str, Any] = {"path": str(model), "dtype": dtype, "lora": LORA if adapter else None}
    config = make_config(model, run={"dir": str(path)}, model=sections).model_dump(mode="json")
    for step in steps:
        state = RunState(step=step, config=config, models={"learner": model_fingerprint(str(model))}, **STATE)
        _, tensors = asyncio.run(write_model_checkpoint(run, state, model, adapter))
    run.metrics.write_text('{"step": 4, "time/step": 1.0, "reward/mean": 0.75, "learner/lr": 1e-6}\n')
    return tensors


@pytest.mark.parametrize("family", ["llama", "mixtral", "glm4_moe", "gemma4_text", "gemma3"])
def test_the_exported_model_has_the_files_and_numbers_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = write_family(family, tmp_path / "model")
    write_run(tmp_path / "run", model, 4, dtype="float32")
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(loaded(ids).logits, expected(ids).logits)


def test_a_generation_config_that_transformers_refuses_to_save_and_further_templates_are_exported_as_they_were(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model_dir / "model", tmp_path / "model")
    given = b'{"temperature": 0.6,  "top_p": 0.9, "eos_token_id": [256]}\n'
    (model / "generation_config.json").write_bytes(given)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    write_run(tmp_path / "run", model, 4)
    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == given
    assert (tmp_path / "out" / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"


def test_an_adapter_names_its_base_as_any_program_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    assert full_name("runs/base") == f"{tmp_path}/runs/base"
    assert full_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert full_name("/hub/models--Qwen--Qwen3-8B/snapshots/0a1b") == "Qwen/Qwen3-8B"


def test_a_run_gives_its_newest_checkpoint_and_a_folder_that_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_run(tmp_path / "run", tiny_model_dir / "model", 2, 4)
    export.main([str(tmp_path / "run"), str(tmp_path / "newest")])
    export.main([str(tmp_path / "run" / "checkpoints" / "step-000002"), str(tmp_path / "second")])
    card = (tmp_path / "newest" / "README.md").read_text()
    for part in (
        "library_name: transformers", "# run, step 4", "8 optimizer steps", "| 0 | 0.25 |", "| 4 | 0.5 |",
        "| train | 256 | 0a1b |", "abc123", "kl_estimator: k3",
    ):  # fmt: skip
        assert part in card
    assert "# run, step 2" in (tmp_path / "second" / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "newest")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(param, tensors[name]) for name, param in loaded.named_parameters())
    AutoTokenizer.from_pretrained(tmp_path / "newest")
    assert {path.suffix for path in (tmp_path / "newest").iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_exported_as_it_is_or_added_to_the_weights_with_the_learners_log_probs(
    tiny_model_dir: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, bound = tmp_path / "model", 1e-5 if dtype == "float32" else 0.1
    shutil.copytree(tiny_model_dir / "model", model)
    lora = LoraConfig.model_validate_json(json.dumps(LORA))
    policy = load_policy(ModelConfig(path=str(model), dtype=dtype, lora=lora), temperature=1.0)  # type: ignore[arg-type]
    adapter = {name: param for name, param in policy.transformer.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for param in adapter.values():
            param.normal_(std=0.1)
    write_run(tmp_path / "run", model, 2, dtype=dtype, adapter=adapter)
    tokens = DeviceTokens.of(pack([np.arange(5, 25, dtype=np.int32)]), torch.device("cpu"))

    def logprobs(of: PolicyModel) -> torch.Tensor:
        with torch.no_grad():
            return of(tokens).logprobs

    export.main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"adapter_config.json", "tokenizer.json"}
    assert not (tmp_path / "out" / "config.json").exists()
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert stored.keys() == {f"base_model.model.{name}.weight" for name in adapter}
    assert all(torch.equal(stored[f"base_model.model.{name}.weight"], param) for name, param in adapter.items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"vllm serve {model} --enable-lora --max-lora-rank 8 " in card
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)

    export.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"])
    said = re.search(r"rounding is ([\d.]+)% of the adapter's change", capsys.readouterr().out)
    assert said is not None
    assert (0.1 < float(said[1]) < 50) == (dtype == "bfloat16")
    merged = load_policy(ModelConfig(path=str(tmp_path / "merged"), dtype=dtype), temperature=1.0)  # type: ignore[arg-type]
    assert (logprobs(merged) - logprobs(policy)).abs().max() < bound
    with adapters_off(policy.transformer):
        assert (logprobs(merged) - logprobs(policy)).abs().max() > bound

    tensors = load_file(model / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is not the model that the run began with"):
        export.main([str(tmp_path / "run"), str(tmp_path / "other"), "--merge"])


@pytest.mark.parametrize("kind", ["whole", "adapter", "--merge"])
def test_weights_that_are_not_finite_are_exported_with_a_warning_that_names_them(
    kind: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, name = tmp_path / "model", "model.layers.0.mlp.up_proj"
    shutil.copytree(tiny_model_dir / "model", model)
    tensors = load_file(model / "model.safetensors")
    rows, columns = tensors[f"{name}.weight"].shape
    adapter = {f"{name}.lora_A": torch.zeros(4, columns), f"{name}.lora_B": torch.zeros(rows, 4)}
    tensors[f"{name}.weight"][0, :2] = torch.tensor([torch.nan, torch.inf])
    adapter[f"{name}.lora_A"][0, :2] = torch.tensor([-torch.inf, torch.nan])
    if kind == "whole":
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    write_run(tmp_path / "run", model, 2, dtype="float32", adapter=None if kind == "whole" else adapter)
    export.main([str(tmp_path / "run"), str(tmp_path / "out"), *([kind] if kind == "--merge" else [])])
    said = capsys.readouterr().err
    file, tensor = "model.safetensors", f"{name}.weight"
    if kind == "adapter":
        file, tensor = "adapter_model.safetensors", f"base_model.model.{name}.lora_A.weight"
    count = 2 * rows if kind == "--merge" else 2  # each row of B A has both
    assert f"warning: {tmp_path / 'out'}: {count} values in 1 tensors of the model" in said
    assert f"the first in {tensor} ({count} values)" in said
    assert (~load_file(tmp_path / "out" / file)[tensor].isfinite()).sum() == count


def test_what_cannot_be_exported_is_one_message(tiny_model_dir: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", tiny_model_dir / "model", 2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    for arguments, message in (
        ([tmp_path, tmp_path / "out"], "neither a run"),
        ([checkpoint, tmp_path / "run"], "is not an empty folder"),
        ([checkpoint, tmp_path / "out", "--merge"], "no adapter to add"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
            export.main([str(argument) for argument in arguments])
        assert message in str(caught.value)
    (checkpoint / "weights-00001.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000002: weights-00001\.safetensors\b.*\b0 bytes\b"):
        export.main([str(checkpoint), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_hub_that_does_not_answer_costs_nothing_but_a_message(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", tiny_model_dir / "model", 2)
    with pytest.raises(RuntimeError, match=r"--push-to-hub me/mine: .*complete in .*/out\b"):
        export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--push-to-hub", "me/mine"])
    assert (tmp_path / "out" / "model.safetensors").is_file()


MEASURED = """
import sys, threading, time
from rlhf import export
from rlhf.learner import hub_format

hub_format.FILE_BYTES = 10_000_000

def anonymous():
    return next(int(row.split()[1]) for row in open("/proc/self/status") if row.startswith("RssAnon")) * 1024

peak, done = 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

export.main([sys.argv[1], sys.argv[2] + "-before"])  # imports and tables that stay
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
export.main(sys.argv[1:])
done = True
thread.join()
print(peak - before, *(name for name in ("deepspeed", "ray", "vllm") if name in sys.modules))
"""


def test_an_export_takes_far_less_memory_than_the_model_and_no_part_of_the_stack(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=1000, hidden_size=512, intermediate_size=2048, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = tmp_path / "model"
    transformer = Qwen2ForCausalLM(config).bfloat16()
    transformer.save_pretrained(model)
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    del transformer
    make_tokenizer().save_pretrained(model)
    write_run(tmp_path / "run", model, 4)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "run"), str(tmp_path / "out")]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, *stack = done.stdout.splitlines()[-1].split()
    assert stack == []
    assert parameters > 30e6
    assert int(grown) < parameters  # bytes; a whole copy in bfloat16 is 2 per parameter
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * parameters
    for file in set(index["weight_map"].values()):
        held = {name for name, place in index["weight_map"].items() if place == file}
        assert load_file(tmp_path / "out" / file).keys() == held
