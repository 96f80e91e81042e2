"""What --plan says first, and its status: whether a run would start and fits, and keys to paste that make it fit."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf import grpo, ppo
from rlhf.check.report import make_plan
from rlhf.config.cli import run_program
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig

ROOT = Path(__file__).parents[2]
TO_PASTE = re.compile(r"^ {2,4}([\w.]+=[^\s;]+(?: [\w.]+=[^\s;]+)*)$", re.MULTILINE)


def load(files: str, *overrides: str) -> GRPOConfig:
    paths = [str(ROOT / "configs" / f"{name}.yaml") for name in files.split("+")]
    return load_config(PPOConfig if files.startswith("ppo") else GRPOConfig, paths, overrides)


def first_of(text: str) -> str:
    return text.split("\n\n")[0]


def check_keys(files: str, *overrides: str) -> list[str]:
    """Paste each line of keys that the plan offers; each must give a plan that fits. Returns the lines."""
    lines = TO_PASTE.findall(make_plan(load(files, *overrides)).text)
    for line in lines:
        text, problems = make_plan(load(files, *overrides, *line.split(" ")))
        assert [problem for problem in problems if "does not fit" in problem] == [], (files, overrides, line)
        assert re.search(r"^fits", text, re.MULTILINE)
    return lines


def test_a_large_model_does_not_fit_and_the_first_paragraph_says_what_does() -> None:
    text, (problem,) = make_plan(load("math", "rollout.max_policy_lag=0", "model.path=Qwen/Qwen3-8B"))
    keys = "model.gradient_checkpointing=true rollout.gpu_memory_utilization=0.75 learner.zero_stage=2"
    assert " ".join(first_of(text).split()).startswith(
        "does not fit: a learner needs 212.1 of 79 GiB. The best that fits: 8 GPUs, 56.2 s per step, 140 steps = 2.2 "
        f"hours: {keys} not checked: data.train=openai/gsm8k, "
    )
    assert f"\n  {keys}\n" in text
    assert problem.startswith("does not fit: a learner needs 212.1 of 79 GiB. ")
    assert re.search(r"^Time, expected, in the layout that fits$", text, re.MULTILINE)
    assert re.search(r"^  one step +56\.2 s", text, re.MULTILINE)
    assert re.search(r"^  lengths +prompt 130 \(plan.prompt_tokens\) and response 250", text, re.MULTILINE)
    full = make_plan(load("math", "plan.response_tokens=null")).text
    assert re.search(r"response 1,024 \(the most,\s+rollout.max_response_tokens=1024\); set", full)
    assert "hours, every response at full length." in " ".join(first_of(full).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "overrides", "count"),
    [
        ("math", ["model.path=Qwen/Qwen2.5-32B"], 2),  # first, and among the layouts
        ("one_gpu_24gb", ["model.lora=null", "model.path=Qwen/Qwen2.5-7B"], 2),  # more GPUs, and adapters
        ("ppo_math", ["cluster.gpu_memory_gib=22"], 2),
    ],
)
def test_pasted_keys_give_a_plan_that_fits(files: str, overrides: list[str], count: int) -> None:
    assert len(check_keys(files, *overrides)) >= count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "model", "gib"),
    [
        ("math", "Qwen3-8B-Base", 22),
        ("tulu3_8b_math", "Qwen3-30B-A3B", 140),
        ("one_gpu_24gb", "Qwen3-8B-Base", 22),
        ("ppo_rlhf", "Qwen3-8B-Base", 79),
    ],
)
def test_pasted_keys_give_a_plan_that_fits_on_any_card(files: str, model: str, gib: int) -> None:
    assert check_keys(files, f"model.path=Qwen/{model}", f"cluster.gpu_memory_gib={gib}")


def test_what_fits_on_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**30, "SC_PHYS_PAGES": 24}.__getitem__)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**50))
    text = first_of(make_plan(load("math+cpu")).text)
    assert text.startswith("does not fit: 1 learner, 1 engine need 72.5 of 24.0 GiB. This fits:\n")
    assert len(check_keys("math+cpu")) == 1


def test_a_cache_that_is_too_small_on_cpu_is_enlarged() -> None:
    (keys,) = check_keys("quickstart", "model.path=Qwen/Qwen2.5-0.5B", "rollout.kv_cache_gib=0.001")
    assert "rollout.kv_cache_gib=1" in keys.split()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.eval=no.jsonl", "data.eval=no.jsonl: there is no such file under"),
        ("model.path=./no", "model.path=./no: there is no such folder."),
        (
            "data={train: file.jsonl, prompt_column: ask}",
            "prompt_column=ask: file.jsonl has no such column",
        ),
        pytest.param("environment=no.py:Game", "no.py cannot be imported: FileNotFoundError", marks=pytest.mark.slow),
        ("run.dir=file.jsonl/run", "run.dir=file.jsonl/run: "),
        ("cluster.tensor_parallel=5", "cluster.tensor_parallel=5 does not divide the model's 12 attention heads"),
    ],
)
def test_a_run_that_could_not_start_is_status_2_and_its_first_words(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 2000)
    arguments = ["--config", str(ROOT / "configs/math.yaml"), "--plan", "cluster.placement=separate", override]
    assert run_program(lambda: grpo.main(arguments)) == 2
    out, err = capsys.readouterr()
    assert out.startswith("would not start: ")
    assert message in " ".join(out.split("\n\n")[0].split())
    assert err.startswith("error: ")
    assert message in err


def test_what_the_tokenizer_and_the_classes_find_is_the_first_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlhf.check.report.class_problems", lambda config: ["model.lora.targets=no: no such layer."])
    arguments = ["--config", str(ROOT / "configs/ppo_math.yaml"), "--plan"]
    assert run_program(lambda: ppo.main(arguments)) == 2
    assert capsys.readouterr().out.startswith("would not start: model.lora.targets=no: no such layer.\nfits: ")


def test_a_plan_that_fits_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(lambda: ppo.main(["--config", str(ROOT / "configs/ppo_math.yaml"), "--plan"])) == 0
    out = capsys.readouterr().out
    assert out.startswith("fits: a learner ")
    assert " ".join(out.split("\n\n")[0].split()).endswith(  # the critic's model too, once
        "HuggingFaceH4/MATH-500, model.path=Qwen/Qwen2.5-7B: the hub is asked when the run starts."
    )
