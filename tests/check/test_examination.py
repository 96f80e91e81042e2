"""What the files of a model lack or hold too much, which ids have no row: found from headers, before any start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import MODEL_TYPES, write_family
from safetensors.torch import load_file, save_file
from worlds import make_config, make_ppo_config

from rlhf.check.examination import RunModel, check_class, check_files, model_problems
from rlhf.check.start_checks import input_problems, start_problems
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.sections import ModelConfig
from rlhf.config.supervised import SFTConfig
from rlhf.data.load import load_prompts
from rlhf.data.model_files import embedding_rows, load_tokenizer, local_model_config
from rlhf.learner.policy_model import load_policy
from rlhf.learner.value_model import load_scalar_transformer


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_model_dir / "train.jsonl", tmp_path)
    return Path(shutil.copytree(tiny_model_dir / "model", tmp_path / "model"))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def cut_in_the_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def damage_the_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:12] = b"oops"
    weights.write_bytes(bytes(content))


def put_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lose_a_shard(folder: Path) -> None:
    write_index(folder, {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"})


def name_what_is_not_there(folder: Path) -> None:
    write_index(folder, {"no.such.tensor": "model.safetensors", "nor.this": "model.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors: not a whole safetensors file"),
        (cut_in_the_header, "model.safetensors: not a whole safetensors file"),
        (damage_the_header, "model.safetensors: not a whole safetensors file"),
        (put_a_pointer, "Git LFS pointer"),
        (remove, "model.safetensors: no such file"),
        (lose_a_shard, "model-00002-of-00002.safetensors: no such file"),
        (name_what_is_not_there, "no.such.tensor in model.safetensors and 1 more"),
        (lambda folder: write_index(folder, []), "model.safetensors.index.json: not an index"),  # type: ignore[arg-type]
    ],
)
def test_weights_that_are_not_whole_are_refused(model: Path, damage: Callable[[Path], None], message: str) -> None:
    assert input_problems(make_config(model)) == []
    damage(model)
    (problem,) = input_problems(make_config(model))
    assert problem.startswith(f"model.path={model}: ")
    assert message in problem


# --- tensors, ids and tied matrices ---

Tensors = dict[str, torch.Tensor]
NORM, QUERY, HEAD = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    stored = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


def change_json(folder: Path, file: str, **keys: Any) -> None:
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(content | keys))


def with_prefix(prefix: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {prefix + n: tensor for n, tensor in stored.items()})


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {n.replace(old, new): t for n, t in stored.items()})


def lose(*names: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {n: t for n, t in stored.items() if n not in names})


def reshape(folder: Path) -> None:
    change_tensors(folder, lambda stored: stored | {NORM: torch.ones(65)})


def in_config(file: str = "config.json", **keys: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder, file, **keys)


def move_a_token(folder: Path) -> None:
    """Give a token that the template writes the first id that has no row."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    for token in tokenizer["added_tokens"]:
        token["id"] = rows if token["content"] == "<|assistant|>" else token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


# Refused by all programs: the damage, and what the one message names.
DAMAGED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "an unmerged adapter": (with_prefix("base_model.model."), ("base_model.model.", "merge_and_unload")),
    "an adapted layer": (rename("q_proj.", "q_proj.base_layer."), ("q_proj.base_layer.weight", "merge_and_unload")),
    "a compiled model": (with_prefix("_orig_mod."), ("_orig_mod.", "torch.compile")),
    "a wrapped model": (with_prefix("module."), ("module.", "DDP")),
    "a text model": (with_prefix("language_model."), ("language_model.", "inside of a larger model")),
    "a name of larger models": (rename(NORM, "model.text_model.scale"), ("model.text_model.scale", "Download or save")),
    "a layer more in the config": (in_config(num_hidden_layers=3, layer_types=None), ("model.layers.2.", "random")),
    "a layer fewer in the config": (in_config(num_hidden_layers=1, layer_types=None), ("model.layers.1.", "no place")),
    "a lost tensor": (lose(NORM), (f"random: {NORM}.",)),
    "a renamed tensor": (rename(NORM, "model.final_norm.weight"), (NORM, "model.final_norm.weight")),
    "a tensor of another shape": (reshape, (f"{NORM} has the shape [65], not [64]",)),
    "an end that has no row": (in_config(eos_token_id=[1, 9999]), ("eos_token_id=9999 (config.json)", "embeddings")),
    "a token of the template that has no row": (move_a_token, ("'<|assistant|>'=262", "embeddings")),
    "a head of another kind": (rename("model.norm", "v_head.summary"), ("v_head.summary.weight", NORM)),
    "a quantized model": (in_config(quantization_config={"quant_method": "awq", "bits": 4}), ("quantized (awq)",)),
}


def problems_of(program: str, folder: Path) -> list[str]:
    """What the checks of a program's start say of a model folder."""
    if program in ("sft", "reward-model"):
        schema = SFTConfig if program == "sft" else RewardTrainingConfig
        sections = {
            "run": {"dir": str(folder.parent / "run"), "epochs": 1},
            "model": {"path": str(folder)},
            "data": {"train": str(folder.parent / "train.jsonl")},
            "cluster": {"device": "cpu"},
        }
        return start_problems(schema.model_validate_json(json.dumps(sections)))
    if program == "evaluate":
        data = {"eval": str(folder.parent / "train.jsonl")}
        return start_problems(make_config(folder, data=data), trains=False)
    return start_problems((make_ppo_config if program == "ppo" else make_config)(folder))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["grpo", "ppo", "sft", "reward-model", "evaluate"])
def test_each_program_refuses_each_damaged_model_in_one_message(program: str, model: Path, tmp_path: Path) -> None:
    assert problems_of(program, model) == []
    for what, (damage, parts) in DAMAGED.items():
        damaged = Path(shutil.copytree(model, tmp_path / what))
        damage(damaged)
        (problem,) = problems_of(program, damaged)
        assert problem.startswith(f"model.path={damaged}: "), what
        assert [part for part in parts if part not in problem] == [], (what, problem)


def head(rows: int = 1, **more: torch.Tensor) -> Callable[[Path], None]:
    """A head of sequence classification, and further tensors."""
    tensors = {"score.weight": torch.ones(rows, 64)} | {name.replace("__", "."): t for name, t in more.items()}
    return lambda folder: change_tensors(folder, lambda stored: stored | tensors)


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (head(), ""),
        (lambda folder: None, "it has no head score.weight"),
        (head(2), "its head gives several numbers"),
        (head(score__bias=torch.ones(1)), "no place for: score.bias"),
        (head(v_head__summary__weight=torch.ones(1, 64)), "no place for: v_head.summary.weight"),
        (rename("model.layers.1.", "model.layers.7."), "lacks 12, which would be random: model.layers.1."),
    ],
)
@pytest.mark.parametrize("is_trained", [True, False])
def test_the_head_of_a_reward_model_is_its_own_and_that_of_a_critic_may_be_new(
    is_trained: bool, damage: Callable[[Path], None], part: str, model: Path
) -> None:
    damage(model)
    critic = RunModel("critic.path", str(model), scalar=True, is_trained=is_trained)
    if not part or (is_trained and "no head" in part):
        check_class(critic, ModelConfig(path=str(model)))
        return
    with pytest.raises(ValueError, match=re.escape(part)):
        check_class(critic, ModelConfig(path=str(model)))


def test_a_reward_model_needs_its_head_although_a_critic_of_the_same_path_does_not(model: Path) -> None:
    config = make_ppo_config(model, critic={"path": str(model)}, reward_model={"path": str(model)})
    (problem,) = input_problems(config, with_data=False)
    assert problem.startswith(f"reward_model.path={model}: it has no head score.weight")


BY_NUMBER = [{"5": token} for token in ("<a>", {"special": True}, None, {"content": []})]
LISTED = [[{"id": number, "content": "<s>"}] for number in ("x", {}, float("inf"))]


@pytest.mark.parametrize(
    ("file", "name", "tokens"),
    [("tokenizer_config.json", "added_tokens_decoder", tokens) for tokens in BY_NUMBER]
    + [("tokenizer.json", "added_tokens", tokens) for tokens in LISTED],
)
def test_added_tokens_that_cannot_be_read_are_refused(model: Path, file: str, name: str, tokens: Any) -> None:
    change_json(model, file, **{name: tokens})
    with pytest.raises(ValueError, match="added tokens of its tokenizer cannot be read"):
        check_files(RunModel("model.path", str(model), template="model"))


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda stored: {HEAD: stored[EMBEDDING].clone()}, ""),
        (
            lambda stored: {HEAD: stored[EMBEDDING].index_add(0, torch.tensor([261]), torch.ones(1, 64))},
            "two that differ",
        ),
        (lambda stored: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}, ""),  # of old files
    ],
)
def test_a_second_matrix_where_config_json_ties_one_must_be_the_same(
    damage: Callable[[Tensors], Tensors], part: str, model: Path
) -> None:
    change_tensors(model, lambda stored: stored | damage(stored))
    problems = problems_of("sft", model)
    assert len(problems) == bool(part)
    assert all(part in problem and EMBEDDING in problem for problem in problems)
    if part:  # as when the model comes from the hub, and is examined only then
        with pytest.raises(ValueError, match=part):
            load_policy(ModelConfig(path=str(model)), temperature=1.0)


def test_a_model_without_a_tied_head_needs_one_in_its_files(model: Path) -> None:
    change_json(model, "config.json", tie_word_embeddings=False)
    (problem,) = problems_of("grpo", model)
    assert "random: lm_head.weight." in problem
    assert problems_of("reward-model", model) == []  # it gets a head of its own


def test_what_is_not_examined_before_the_start_is_when_it_is_loaded(model: Path) -> None:
    change_tensors(model, lambda stored: {f"base_model.model.{name}": tensor for name, tensor in stored.items()})
    loaded = ModelConfig(path=str(model))
    with pytest.raises(ValueError, match=r"which would be random: .* no place for: .*merge_and_unload"):
        load_policy(loaded, temperature=1.0)
    with pytest.raises(ValueError, match=r"^critic\.path=.* which would be random: .* no place for: "):
        load_scalar_transformer(str(model), loaded, key="critic.path", new_head="zeros")


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4"])
def test_a_quantized_model_can_be_evaluated_and_not_trained(method: str, model: Path) -> None:
    change_json(model, "config.json", quantization_config={"quant_method": method})
    rename("up_proj.weight", "up_proj.weight_packed")(model)
    assert all(f"quantized ({method})" in problem for problem in problems_of("grpo", model)) is True
    assert len(problems_of("grpo", model)) == 1
    assert problems_of("evaluate", model) == []


@pytest.mark.parametrize("key", ["num_attention_heads", "max_position_embeddings", "hidden_size", "vocab_size"])
def test_a_size_that_is_no_number_is_one_message(key: str, model: Path) -> None:
    change_json(model, "config.json", **{key: "two"})
    for program in ("grpo", "ppo", "sft", "evaluate"):
        (problem,) = problems_of(program, model)
        assert f"{model / 'config.json'}: {key}='two' is not a whole number" in problem


def test_a_size_may_stand_once_for_each_layer_or_as_a_whole_float(model: Path) -> None:
    change_json(model, "config.json", intermediate_size=[64, 64], max_position_embeddings=1200.0)
    assert local_model_config(str(model)) is not None
    for size in ([64, "64"], 64.5, [-1]):
        change_json(model, "config.json", intermediate_size=size)
        with pytest.raises(ValueError, match="is not a whole number"):
            local_model_config(str(model))


def test_rows_that_need_a_token_without_a_row_are_named(model: Path) -> None:
    config, tokenizer = make_config(model), load_tokenizer(ModelConfig(path=str(model)))
    change_json(model, "config.json", vocab_size=200, eos_token_id=None, pad_token_id=None)
    rows = embedding_rows(str(model))
    with pytest.raises(ValueError, match=r"row 1 of .*: it has a token with the id 260, .* embeddings for 200 "):
        load_prompts(config.data, "train", tokenizer, vocab_size=rows)
    assert load_prompts(config.data, "train", tokenizer, vocab_size=262).prompts


def test_the_plan_says_what_needs_no_class_and_imports_no_torch(model: Path) -> None:
    code = (
        "import sys; from rlhf.grpo import main; from rlhf.config.cli import run_program;"
        "print(run_program(main), 'torch' in sys.modules)"
    )
    change_json(model, "config.json", quantization_config={"quant_method": "awq"})
    file = model.parent / "run.yaml"
    file.write_text(
        json.dumps(make_config(model).shown() | {"data": {"train": "/no/such.jsonl", "max_prompt_tokens": 64}})
    )
    command = [sys.executable, "-c", code, "--config", str(file), "--plan"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "2 False"
    for text in (done.stdout, done.stderr):
        assert "model.path=" in text
        assert "by config.json it is quantized (awq)" in " ".join(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "evaluate"])
def test_a_damaged_model_ends_the_program_before_it_starts_anything(program: str, model: Path, tmp_path: Path) -> None:
    lose(NORM)(model)
    data = "train" if program == "sft" else "eval"
    settings = {"run": {"dir": str(tmp_path / "run")}, "model": {"path": str(model)}, "cluster": {"device": "cpu"}}
    settings |= {"data": {data: str(tmp_path / "train.jsonl")}}
    settings |= {"evaluation": {"max_response_tokens": 64}} if program == "evaluate" else {}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", f"rlhf.{program}", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("model.path=") == 1
    assert "model.safetensors does not hold the tensors of Qwen2ForCausalLM" in done.stderr
    assert f"random: {NORM}." in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_family_is_whole_as_it_is_saved_and_each_damage_is_named(model_type: str, tmp_path: Path) -> None:
    path = write_family(model_type, tmp_path)
    family, loaded = RunModel("model.path", str(path), is_trained=True), ModelConfig(path=str(path))
    check_class(family, loaded)
    stored = load_file(path / "model.safetensors")
    lost, renamed, *_, reshaped = [
        n for n in stored if re.search(r"norm|ln_", n) and stored[n].dim() == 1 and "mtp" not in n
    ]
    tensors = {n: t for n, t in stored.items() if n not in (lost, renamed)}
    save_file(tensors | {f"{renamed}_2": stored[renamed], reshaped: torch.ones(7)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks [2-9]\d*, .* It has 1 .*_2\. .* has the shape \[7\], not ") as raised:
        check_class(family, loaded)
    assert "model.safetensors does not hold" in str(raised.value)


def test_weights_in_another_format_are_examined_too(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(stored, model / "pytorch_model.bin")
    assert input_problems(make_config(model)) == []
    stored.pop("model.norm.weight")
    torch.save(stored, model / "pytorch_model.bin")
    (problem,) = input_problems(make_config(model))
    assert "pytorch_model.bin does not hold" in problem
    assert "random: model.norm.weight." in problem
    (model / "pytorch_model.bin").write_bytes(b"")
    (problem,) = input_problems(make_config(model))
    assert "pytorch_model.bin cannot be read" in problem
    torch.save({"state_dict": stored, "epoch": 1}, model / "pytorch_model.bin")
    (problem,) = input_problems(make_config(model))
    assert "pytorch_model.bin holds other objects than named tensors" in problem


@pytest.mark.parametrize(
    ("names", "has_index", "part"),
    [
        (["pytorch_model-1.bin", "pytorch_model-2.bin"], True, ""),
        (["pytorch_model-1.bin"], True, "pytorch_model-2.bin: no such file"),
        (["pytorch_model-1.bin", "pytorch_model-2.bin"], False, "It has pytorch_model-1.bin, pytorch_model-2.bin, "),
        (["training_args.bin"], False, "It has training_args.bin, which transformers does not look for"),
        (["model-Q4_K_M.gguf"], False, "It has model-Q4_K_M.gguf, which transformers does not look for"),
        (["model-00001-of-00002.safetensors"], False, "no such file, and no model.safetensors.index.json"),
    ],
)
def test_files_of_weights_count_where_transformers_looks_for_them(
    model: Path, names: list[str], has_index: bool, part: str
) -> None:
    stored = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    halves = dict.fromkeys(stored, "pytorch_model-1.bin") | {NORM: "pytorch_model-2.bin"}
    for name in names:
        torch.save({tensor: stored[tensor] for tensor, file in halves.items() if file == name}, model / name)
    if has_index:
        change_json(model, "pytorch_model.bin.index.json", weight_map=halves)
    problems = problems_of("sft", model)
    assert len(problems) == bool(part)
    assert all(part in problem for problem in problems)


def test_a_model_without_the_files_of_its_tokenizer_is_refused_and_not_given_an_empty_one(model: Path) -> None:
    loaded = ModelConfig(path=str(model))
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"its tokenizer has no vocabulary.*tokenizer\.json"):
        load_tokenizer(loaded)
    for file in [*model.glob("tokenizer*"), *model.glob("chat_template*")]:
        file.unlink()
    for program in ("grpo", "sft", "reward-model", "evaluate"):
        (problem,) = problems_of(program, model)
        assert problem.startswith(f"model.path={model}: the model has no tokenizer")


def test_a_tokenizer_that_no_code_can_read_or_whose_end_has_no_row_is_refused(model: Path) -> None:
    loaded = ModelConfig(path=str(model))
    change_json(model, "tokenizer_config.json", eos_token="</nope>")  # transformers adds it
    with pytest.raises(ValueError, match=r"'</nope>' \(eos_token of the tokenizer\), has the id 262, "):
        load_tokenizer(loaded)
    (model / "chat_template.jinja").unlink()
    before = (model / "tokenizer_config.json").read_text()
    for wrong in ({"chat_template": [{"name": "a", "template": 5}]}, {"model_max_length": [1]}):
        change_json(model, "tokenizer_config.json", **wrong)
        with pytest.raises(ValueError, match=r"which are no text and number\. Download or save"):
            load_tokenizer(loaded)
        (model / "tokenizer_config.json").write_text(before)
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"its tokenizer cannot be loaded \("):
        load_tokenizer(loaded)


def test_padding_needs_a_row_by_config_json_alone(model: Path) -> None:
    """As WizardLM, whose tokenizer adds [PAD] behind the 32000 rows of the model: rows of a run are not padded."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 262, "content": "[PAD]"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    change_json(model, "tokenizer_config.json", pad_token="[PAD]")
    change_json(model, "generation_config.json", pad_token_id=262)
    assert problems_of("grpo", model) == []
    change_json(model, "config.json", pad_token_id=262)
    (problem,) = problems_of("grpo", model)
    assert "pad_token_id=262 (config.json)." in problem


def test_a_context_is_known_by_each_of_its_names(model: Path) -> None:
    """A model with learned positions has no row behind them."""
    write_family("gpt2", model)
    assert "which is 256. Shorten" in " ".join(problems_of("sft", model))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen99", "model_type='qwen99', which transformers "),
        (None, "model_type=None, which transformers "),
        ("t5", "model_type='t5', which is no language model"),
    ],
)
def test_a_model_that_no_class_can_load_is_refused_in_our_own_words(
    model: Path, kind: str | None, message: str
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": kind}
    (model / "config.json").write_text(json.dumps(config))
    (problem,) = input_problems(make_config(model))
    assert message in problem
    assert "pip install" not in problem
    assert "out of date" not in problem


def test_a_model_of_the_hub_that_no_class_can_load_is_refused_when_its_files_are_here(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen99"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^model\.path=.*qwen99.* newer transformers "):
        load_tokenizer(ModelConfig(path=str(model)))


def test_a_model_with_code_of_its_own_brings_its_class(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen99", "auto_map": {}}
    (model / "config.json").write_text(json.dumps(config))
    own_code = RunModel("model.path", str(model))
    check_files(own_code)
    check_class(own_code, ModelConfig(path=str(model), trust_remote_code=True))


@pytest.mark.private
def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = write_family("deepseek_v3", tmp_path, num_hidden_layers=2)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    change_tensors(folder, lambda stored: stored | {name: torch.zeros(64, 64)})
    with pytest.raises(ValueError, match=r"cannot be put together from their parts: model\.layers\.1\.mlp\.experts\."):
        check_class(RunModel("model.path", str(folder)), ModelConfig(path=str(folder)))


def test_a_model_without_a_dense_mlp_to_tile_is_refused_before_the_start(tmp_path: Path) -> None:
    path = str(write_family("mixtral", tmp_path, num_hidden_layers=1))
    tiled = ModelConfig(path=path, gradient_checkpointing="tiled")
    with pytest.raises(ValueError, match=r"^model\.path=.*: model\.gradient_checkpointing=tiled: Mixtral"):
        check_class(RunModel("model.path", path, is_trained=True), tiled)
    check_class(RunModel("teacher", path), tiled)  # frozen models other than the reference are not tiled


# --- what could not be written again ---


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_new_tokens": -1}, "`max_new_tokens` must be greater than 0"),
        ({"cache_implementation": "no such"}, "Invalid `cache_implementation`"),
        ({"compile_config": {"mode": "x"}}, "compile_config"),
        ({"do_sample": False, "num_return_sequences": 4}, "num_return_sequences"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>' in generation_config.json is no id of a token"),
    ],
)
def test_a_generation_config_that_no_learner_could_load_is_refused(
    model: Path, keys: dict[str, Any], message: str
) -> None:
    change_json(model, "generation_config.json", **keys)
    (problem,) = input_problems(make_config(model))
    assert problem.startswith(f"model.path={model}: ")
    assert message in problem
    assert "generation_config.json" in problem


@pytest.mark.parametrize("keys", [{"do_sample": False, "top_k": 20, "min_p": 0.1}, {"_from_model_config": True}])
def test_a_generation_config_that_transformers_only_loads_is_no_problem(model: Path, keys: dict[str, Any]) -> None:
    change_json(model, "generation_config.json", **keys)
    assert input_problems(make_config(model)) == []


@pytest.mark.parametrize("make", [make_config, make_ppo_config])
def test_a_config_that_cannot_be_written_again_is_refused_with_the_error(
    model: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As code that comes with a model may do; no config.json of transformers' own is known that does."""
    from transformers import Qwen2Config

    def refuse(self: Any, folder: Path) -> None:
        raise AssertionError("layer_types is wrong")

    monkeypatch.setattr(Qwen2Config, "save_pretrained", refuse)
    (problem,) = input_problems(make(model))
    assert problem.startswith(
        f"model.path={model}: its config.json can be loaded and not written again (AssertionError"
    )


def test_a_model_whose_class_in_vllm_imports_torchvision_is_refused_before_an_engine_starts(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model_dir / "model", tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "qwen3_5_text"}))
    config = make_config(folder)
    monkeypatch.setattr("rlhf.check.examination.find_spec", lambda name: None)
    (problem,) = model_problems(config)
    assert problem.startswith(
        f"model.path={folder}: vLLM's class for model_type='qwen3_5_text' imports torchvision, which"
    )
    on_gpus = config.cluster.model_copy(update={"device": "cuda"})  # vLLM for GPUs brings torchvision
    assert model_problems(config.model_copy(update={"cluster": on_gpus})) == []
    monkeypatch.setattr("rlhf.check.examination.find_spec", lambda name: "installed")
    assert model_problems(config) == []


def test_models_whose_sequences_learners_cannot_share_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    """Policy, critic and teachers: heads and layers by config.json, at the plan too; other mixers by the class."""
    shared = {"learners": 4, "sequence_parallel": 4}
    (problem,) = model_problems(make_config(model, cluster=shared))
    assert problem == (
        f"cluster.sequence_parallel=4 with model.path={model}: it does not divide the model's 2 attention heads, of "
        "which each learner computes a part. With cluster.learners=4 use 2."
    )
    assert model_problems(make_config(model, cluster=shared | {"sequence_parallel": 2})) == []
    odd = write_family("qwen3", tmp_path / "odd", num_attention_heads=3, num_key_value_heads=3)
    shared = {"learners": 2, "sequence_parallel": 2}
    by_teacher = make_config(model, cluster=shared, algo={"teacher": {"path": str(odd)}})
    by_critic = make_ppo_config(model, cluster=shared, critic={"path": str(odd)})
    for key, config in (("algo.teacher.path", by_teacher), ("critic.path", by_critic)):
        (problem,) = model_problems(config)
        assert problem.startswith(f"cluster.sequence_parallel=2 with {key}={odd}: it does not divide the model's 3 ")
        assert problem.endswith("With cluster.learners=2 use 1.")
    change_json(model, "config.json", num_attention_heads_per_layer=[2, 3])
    (problem,) = model_problems(make_config(model, cluster=shared))
    assert "2 and 3 attention heads" in problem
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 100}
    for kind, positions in {
        "longrope": {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": longrope}},
        "su": {"rope_scaling": {"type": "su"}, "rope_parameters": None, "original_max_position_embeddings": 100},
    }.items():
        change_json(odd, "config.json", num_attention_heads=2, **positions)
        (problem,) = model_problems(make_config(odd, cluster=shared))
        assert f"of sequences over 100 tokens its positions ({kind}) depend on the longest" in problem
    assert model_problems(make_config(odd, cluster={"learners": 2})) == []
    for family, reason in (
        ("lfm2", "2 of its 4 layers have no attention and may carry a state along the sequence"),
        ("falcon_h1", "its FalconH1Mixer mixes tokens outside of attention"),
    ):
        mixing = write_family(family, tmp_path / family)
        (problem,) = input_problems(make_config(mixing, cluster=shared))
        assert problem == (
            f"model.path={mixing}: 2 learners cannot share a sequence of this model, since {reason}. Set "
            "cluster.sequence_parallel to 1."
        )
