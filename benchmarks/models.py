"""Random-weight models and data for the benchmarks, made when they are asked for, under runs/benchmarks/models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlhf.check.resources import GPU, local_resources
from rlhf.config.grpo import GRPOConfig

FOLDER = Path("runs/benchmarks/models")

# From 0.5b on the sizes of Qwen2.5. Weights are random, since speed does not depend on their values.
SIZES: dict[str, dict[str, int]] = {
    "10m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6,
            "intermediate_size": 1152},
    "0.1b": {"hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
             "intermediate_size": 2048},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151_936},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151_936},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "vocab_size": 151_936},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152_064},
}  # fmt: skip


def random_model(size: str, *, dtype: str = "bfloat16", mean_length: float | None = None) -> Path:
    """Folder of a Qwen2 model of this size with random weights and the quickstart's tokenizer.

    Args:
        mean_length: tokens; the model ends a response with probability 1 / mean_length at every token, so that lengths
            are geometric: a mean of 80 has 1% of its responses above 368 tokens. Infinity: no response ends by itself.
    """
    folder = FOLDER / f"{size}-{dtype}{f'-length{mean_length:.0f}' if mean_length else ''}"
    if (folder / "config.json").is_file():
        return folder.resolve()
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from rlhf.learner.tiny_model import make_tokenizer, save_model

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        **{"vocab_size": len(tokenizer), **SIZES[size]},
        max_position_embeddings=4096, tie_word_embeddings=mean_length is None, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype=dtype,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    if mean_length == math.inf:
        _never_end(model, tokenizer.eos_token_id)
    elif mean_length is not None:
        _end_with_probability(model, 1 / mean_length, tokenizer.eos_token_id)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    save_model(model, tokenizer, folder)
    return folder.resolve()


def _never_end(model: Any, eos_id: int) -> None:
    """One coordinate is 1 in every embedding and no layer writes to it: the end token's row of the head reads it."""
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0] = head[eos_id] = 0.0
        head[eos_id, 0] = -1000.0


def _end_with_probability(model: Any, probability: float, eos_id: int) -> None:
    """Give the end token a bias: one coordinate of every embedding is large, and its row of the head reads that one."""
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[eos_id] = 0.0
        ids = torch.randint(0, model.config.vocab_size, (8, 256), device=head.device)
        hidden = model.model(input_ids=ids).last_hidden_state.float()
        end = torch.tensor([eos_id], device=head.device)
        others = (hidden @ head.float().t()).index_fill(-1, end, float("-inf")).logsumexp(-1)
        low, high = -20.0, 20.0
        for _ in range(40):
            bias = (low + high) / 2
            logits = hidden[..., 0] * bias
            mean = torch.sigmoid(logits - others).mean().item()
            low, high = (bias, high) if mean < probability else (low, bias)
        head[eos_id, 0] = bias


def write_prompts(folder: Path, rows: int, *, seed: int = 0) -> tuple[Path, Path]:
    """train.jsonl and test.jsonl of additions, as of the quickstart."""
    from rlhf.quickstart import make_problems

    folder.mkdir(parents=True, exist_ok=True)
    problems = make_problems(rows + 16, seed)
    for name, part in (("train", problems[:rows]), ("test", problems[rows:])):
        lines = [json.dumps({"question": p.question, "answer": p.answer}) for p in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "train.jsonl", folder / "test.jsonl"


def run_config(model: Path | str, /, **sections: Any) -> GRPOConfig:
    """A config around a model; `sections` are laid over small defaults, key by key."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/benchmarks/run", "steps": 2, "export": False},
        "model": {"path": str(model)},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 64},
        "learner": {"max_tokens_per_microbatch": 4096},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "disabled"}, "rollouts": False},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}
    return GRPOConfig.model_validate_json(json.dumps(merged))


def steps_of_run(config: GRPOConfig, folder: str) -> list[dict[str, Any]]:
    """Run rlhf.grpo with this config, whose run.dir is `run` in the folder -> what it has logged of its steps."""
    file = Path(folder) / "config.yaml"
    file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "rlhf.grpo", "--config", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step" in line]


def gpus() -> int:
    """GPUs of this machine."""
    return int(local_resources()[GPU])


def placement(device: str) -> str:
    """Where one engine and one learner go: a GPU each where there are two, else both on one, in turn."""
    return "colocated" if device == "cuda" and gpus() < 2 else "separate"


def bare_engine(config: GRPOConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """What vLLM alone is given to be the peer of a run's engine: its arguments, and the environment of its processes.

    Both are those of the run's own engine, without what only a trainer needs: weight transfer, sleep, priorities.
    """
    from rlhf.cluster.actor_start import environment_of
    from rlhf.config.roles import ENGINE
    from rlhf.sampling.requests import engine_arguments

    arguments = engine_arguments(config, config.run.seed)
    for serves_a_trainer in ("enable_sleep_mode", "scheduling_policy"):
        del arguments[serves_a_trainer]
    return arguments, environment_of(ENGINE, config, sockets=None)
