"""A chat template that never ends: each program ends in time, with one message that names the template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from byte_tokenizer import OWN_TEMPLATE, byte_tokenizer

pytestmark = pytest.mark.faults

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LATER = f"{{% if messages | length > 2 %}}{ENDLESS}{{% endif %}}{OWN_TEMPLATE}"
PROGRAM = """
import importlib, sys
from rlhf.config import cli, limit
limit.LIMIT_S = 1.0
main = importlib.import_module(sys.argv.pop(1)).main
sys.exit(cli.run_program(main))
"""
ROWS = {
    "prompts": {"question": "1 + 1 = ", "answer": "2"},
    "conversations": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2},
    "pairs": {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"},
}
LEARNER = {"max_tokens_per_microbatch": 4500, "optimizer": {"lr": 1e-5}}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_response_tokens": 16}
CASES = {  # module and flags, rows, sections of the config
    "grpo": (["rlhf.grpo"], "prompts", {"rollout": ROLLOUT, "reward": ["math"]}),
    "the plan": (["rlhf.grpo", "--plan"], "prompts", {"rollout": ROLLOUT, "reward": ["math"]}),
    "ppo": (["rlhf.ppo"], "prompts", {"rollout": ROLLOUT, "reward": ["math"]}),
    "evaluate": (["rlhf.evaluate"], "prompts", {"rollout": ROLLOUT, "reward": ["math"]}),
    "doctor": (["rlhf.doctor"], "prompts", {"rollout": ROLLOUT, "reward": ["math"]}),
    "sft": (["rlhf.sft"], "conversations", {}),
    "reward model": (["rlhf.reward_model"], "pairs", {}),
}


@pytest.mark.parametrize(
    ("case", "own"), [(c, own) for c in CASES for own in (False, True) if own or c != "reward model"]
)  # a reward model takes no template of a file
def test_a_template_that_loops_ends_every_program_with_its_name(case: str, own: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    (module, *flags), rows, sections = CASES[case]
    tokenizer, model = byte_tokenizer(ENDLESS if own else OWN_TEMPLATE), tmp_path / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (file := tmp_path / "endless.jinja").write_text(LATER if rows == "conversations" else ENDLESS)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROWS[rows])}\n" * 20)
    data = {key: str(tmp_path / "rows.jsonl") for key in ("train", "eval")}
    data["template"] = "model" if own else str(file)
    config = {
        "run": {"dir": str(tmp_path / "run"), "steps": 1}, "model": {"path": str(model), "dtype": "float32"},
        "data": data, "learner": LEARNER, "logging": {"wandb": {"mode": "disabled"}},
        "cluster": {"device": "cpu", "learners": 1}, **sections,
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", PROGRAM, module, *flags, "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    name = f"data.template=model: the chat template of {model}" if own else f"data.template={file}: the chat template"
    remedy = "Correct it, or choose another one with data.template."
    assert said == [f"error: {name} did not end within 1 s. {remedy}"], done.stdout + done.stderr
    assert done.returncode == 2
