"""The doctor: each broken part is named and fails the whole, none hides another, and a healthy machine passes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_canary import PROMPTS, FakeEngines, all_but_the_head, everything
from installed import seems_installed
from waiting import STACK_WAIT_S
from worlds import make_groups

from rlhf import doctor as doctor_program
from rlhf.check.doctor import grading, machine, nodes, on_rank, training
from rlhf.check.doctor.runner import Check, Finding, Patient, examine_all, report_lines
from rlhf.check.memory import GIB
from rlhf.check.resources import visible_gpus
from rlhf.check.start_checks import run_bytes
from rlhf.cluster.actors import record_call
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.doctor import checks
from rlhf.log.reductions import Max, Mean
from rlhf.run.threads import in_thread
from rlhf.sampling.requests import Completion
from rlhf.types import RolloutGroup, ScoredRollout


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Any:
    base = {
        "run": {"dir": str(tmp_path / "run"), "steps": 1},
        "model": {"path": str(tiny_model_dir / "model"), "dtype": "float32"},
        "data": {"train": str(tiny_model_dir / "train.jsonl"), "max_prompt_tokens": 64},
        "reward": ["math"],
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 64},
        "learner": {"max_tokens_per_microbatch": 1024},
        "cluster": {"device": "cpu"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(base))

    def build(*overrides: str) -> Patient:
        return Patient(load_config(GRPOConfig, [str(file)], overrides))

    return build


def finding(check: Any, patient: Patient) -> Finding:
    result: Finding = asyncio.run(check(patient))
    return result


# --- the list of checks ---


def test_one_broken_check_or_one_that_hangs_does_not_hide_the_others(make: Any) -> None:
    async def breaks(_: Patient) -> Finding:
        raise KeyError("part")

    async def hangs(_: Patient) -> Finding:
        await in_thread(time.sleep, 3)
        return Finding("ok", "late")

    async def succeeds(_: Patient) -> Finding:
        return Finding("ok", "fine")

    reported: list[str] = []
    three = [Check(check.__name__, check, 0.2, "do this") for check in (breaks, hangs, succeeds)]
    results = asyncio.run(examine_all(three, make(), lambda result: reported.append(result.name)))
    assert [(r.status, r.text, r.remedy) for r in results] == [
        ("fail", "KeyError: 'part'", "do this"),
        ("fail", "no answer within 0 s", "do this"),
        ("ok", "fine", ""),
    ]
    assert reported == ["breaks", "hangs", "succeeds"]
    assert "\n".join(report_lines(results[0])).startswith("FAIL  breaks")


def test_a_check_that_needs_a_broken_part_is_not_run_and_says_why(make: Any) -> None:
    patient = make("model.path=/nowhere")
    later = [check for check in checks(patient.config) if check.name in ("config", "rewards", "start-up", "agreement")]
    results = asyncio.run(examine_all(later, patient, lambda _: None))
    assert [result.status for result in results] == ["fail", "warn", "warn", "warn"]
    assert "model.path=/nowhere: there is no such folder" in results[0].text
    assert "not checked: model or data could not be loaded" in results[1].text


@pytest.mark.parametrize(("fails", "status"), [(False, "warn"), (True, "fail")])
def test_as_json_the_results_are_one_object_and_every_other_line_goes_to_standard_error(
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fails: bool,
    status: str,
) -> None:
    async def prints(_: Patient) -> Finding:
        print("of a library")
        subprocess.run(["echo", "of a process"], check=True)
        return Finding("warn", "slow", "name a faster one")

    async def breaks(_: Patient) -> Finding:
        raise KeyError("part")

    def chosen(_: GRPOConfig) -> tuple[Check, ...]:
        broken = (Check("part", breaks, 9.0, "do this"),) * fails
        return (Check("disk", prints, 9.0, ""), *broken)

    make()
    monkeypatch.setattr(doctor_program, "checks", chosen)
    arguments = ["--json", "--config", str(tmp_path / "config.yaml")]
    assert cli.run_program(lambda: doctor_program.main(arguments)) == int(fails)
    printed, lines = capfd.readouterr()
    found = json.loads(printed)
    assert found["status"] == status
    assert all(check.pop("seconds") >= 0 for check in found["checks"])
    first = {"name": "disk", "status": "warn", "message": "slow", "remedy": "name a faster one"}
    second = {"name": "part", "status": "fail", "message": "KeyError: 'part'", "remedy": "do this"}
    assert found["checks"] == [first, second][: 1 + fails]
    assert found["environment"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert {"platform", "cpus", "memory_gib", "gpus"} <= found["environment"].keys()
    assert all(line in lines for line in ("of a library", "of a process", "warn  disk        slow"))
    assert cli.run_program(lambda: doctor_program.main([*arguments, "rollout.nothing=1"])) == cli.USER_ERROR
    assert capfd.readouterr().out == ""


# --- this machine ---


def test_versions_that_fit_pass(make: Any) -> None:
    result = finding(machine.check_versions, make())
    assert result.status == "ok", result.text


COPIED = "Requires-Dist: rich>=14\nRequires-Dist: not-there>=1\n"
COPIED += 'Requires-Dist: no-such-vllm>=1; extra == "cpu"\nProvides-Extra: cpu\n'
ON_GPUS = 'Requires-Dist: vllm>=0.32; extra == "gpu"\nProvides-Extra: gpu\n'
ON_GPUS += 'Requires-Dist: no-such-cuda>=13; extra == "gpu"\n'
NO_PLUGIN = "plug-in of the package for vLLM is not installed"


@pytest.mark.parametrize(
    ("packages", "told", "not_told"),
    [
        ([("datasets", "0.1", {})], ["datasets 0.1 is not in <6,>=5.2"], "not installed"),
        (
            [("rlhf-trainer", "0.0.1", {"more": COPIED})],
            ["not-there is not installed (>=1)", "neither no-such-vllm is installed", NO_PLUGIN],
            "rich",
        ),
        ([("rlhf-trainer", "0.0.1", {"plugin": "rlhf = rlhf.moved:register"})], [NO_PLUGIN], "neither no-"),
        (
            [("rlhf-trainer", "0.0.1", {"more": ON_GPUS}), ("vllm", "0.32.0", {})],
            ["no-such-cuda is not installed (>=13)"],
            "neither",
        ),
    ],
    ids=["out of its range", "a copy of the code", "an older plug-in", "the other packages of an extra"],
)
def test_packages_that_do_not_fit_are_named(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    packages: list[tuple[str, str, dict[str, str]]], told: list[str], not_told: str,
) -> None:  # fmt: skip
    for name, version, keys in packages:
        seems_installed(tmp_path / "site", name, version, **keys)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    result = finding(machine.check_versions, make())
    assert result.status == "fail"
    assert "make setup" in result.remedy
    assert [text for text in told if text not in result.text] == []
    assert not_told not in result.text


@pytest.mark.slow
def test_all_that_a_run_would_refuse_is_named_at_once_and_later_checks_have_prompts(make: Any) -> None:
    patient = make("checkpoint.every=1", "checkpoint.keep=1000000000", f'reward.parts=["{grading.HANGING}"]')
    patient.config = patient.config.model_copy(
        update={"reward": patient.config.reward.model_copy(update={"wall_seconds": 0.5})}
    )
    result = finding(machine.check_config, patient)
    assert result.status == "fail"
    disk, reward = result.text.splitlines()
    assert disk.startswith(f"run.dir={patient.config.run.dir}: checkpoints and export need ")
    assert "over 0.5 seconds by the clock" in reward
    assert patient.prompts
    assert finding(machine.check_config, make()).status == "ok"


def test_what_a_run_writes_by_hand(make: Any) -> None:
    # 3 checkpoints (2 kept and the one being written) of 12 bytes a parameter, and an export of 4
    from transformers import AutoModelForCausalLM

    patient = make("checkpoint.every=5", "checkpoint.keep=2")
    parameters = AutoModelForCausalLM.from_pretrained(patient.config.model.path).num_parameters()
    assert run_bytes(patient.config) == (3 * 12 + 4) * parameters
    assert run_bytes(make("run.export=false", "checkpoint.every=null").config) == 0


def test_a_full_temporary_folder_warns_unless_ray_runs_already(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10_000 * GIB, 9_900 * GIB, 100 * GIB))
    result = finding(machine.check_config, make())
    assert result.status == "warn"
    assert "where Ray writes, is 99% full" in result.text
    assert finding(machine.check_config, make("cluster.ray_address=auto")).status == "ok"


# --- rewards ---


@pytest.mark.slow
def test_a_gold_answer_that_cannot_be_graded_is_named_with_its_row(make: Any) -> None:
    prompts = [PROMPTS[0].__class__(f"p/{i}", 0, PROMPTS[0].token_ids, (), gold, "p") for i, gold in enumerate("5 ")]
    for skip, status in (("fail", "fail"), ("skip", "warn")):
        patient = make("reward.parts=[math]", "reward.workers=1", f"reward.bad_gold={skip}")
        patient.prompts = prompts
        result = finding(grading.check_rewards, patient)
        assert result.status == status
        assert result.text.startswith("1 of 2 gold answers cannot be graded:\np/1: ' ' (math: it is empty")


# --- what the model answers ---


def sampled(text: str, *, reward: float, extracted: str, status: str = "ok") -> list[RolloutGroup]:
    groups = make_groups(groups=8, samples=2, vocabulary=9, longest=20, seed=0)
    prompts = [replace(g.prompt, messages=({"role": "user", "content": "What is 1 + 1?"},), answer="2") for g in groups]

    def graded(sample: ScoredRollout, value: float) -> ScoredRollout:
        sample = replace(sample, rollout=replace(sample.rollout, finish_reason="stop"), text=text, status=status)
        return replace(sample, reward=value, reward_parts={"math": value}, extracted=extracted)

    return [
        replace(group, prompt=prompt, samples=tuple(map(graded, group.samples, (reward, 0.0))))
        for group, prompt in zip(groups, prompts, strict=True)
    ]


def test_responses_that_can_be_learned_from_are_ok_and_two_are_shown_on_lines_of_a_terminal(make: Any) -> None:
    groups = sampled("First I think. " * 30 + "\x1b[2J It is \\boxed{2}.", reward=1.0, extracted="2")
    result = grading.judge_responses(make().config, groups, {"reward/status/math/ok": 16.0})
    assert result.status == "ok"
    assert result.text.startswith("16 responses to 8 prompts: mean reward 0.5, with an answer 1, stopped 1, groups")
    prompt, response, graded = result.text.splitlines()[1:4]
    assert prompt == "prompt    What is 1 + 1?"
    assert response.startswith("response  First I think.")
    assert response.endswith(r" It is \boxed{2}.")
    assert graded == "graded    math 1; ok; extracted 2, gold 2; stop"
    shown = list(report_lines(replace(result, name="responses", seconds=1.0)))
    assert len(shown) == 7
    assert all(len(line) <= 80 and line.isprintable() for line in shown[1:])


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        ({"text": "two", "reward": 0.0, "extracted": "", "status": "no_answer"}, "data.prompt_suffix"),
        ({"text": "2", "reward": 0.0, "extracted": "3"}, "Does the reward read the answers"),
        ({"text": "2", "reward": 1.0, "extracted": "2", "status": "timeout"}, "reward.wall_seconds=10.0"),
    ],
    ids=["no answer", "all wrong", "time-outs"],
)
def test_responses_that_teach_nothing_are_a_warning_with_the_key_to_change(
    make: Any, made: dict[str, Any], advice: str
) -> None:
    groups = sampled(**made)
    statuses = {f"reward/status/math/{made.get('status', 'ok')}": 16.0}
    result = grading.judge_responses(make().config, groups, statuses)
    assert result.status == "warn"
    assert advice in result.remedy
    assert grading.judge_responses(make().config, groups, statuses, tiny=True).status == "ok"


# --- nodes and GPUs ---


def test_gpus_that_are_missing_are_counted_and_drivers_that_differ_named(make: Any) -> None:
    patient = make("cluster.device=cuda", "model.dtype=bfloat16", "cluster.learners=2")
    card, other = "NVIDIA H100, 580.1, 81559 MiB, 9.0", "NVIDIA H100, 590.2, 81559 MiB, 9.0"
    cards = {"mlx5_0": "4: ACTIVE"}
    patient.nodes = {"a": {"gpus": [card] * 2, "cards": cards}, "b": {"gpus": [], "cards": cards}}
    result = finding(nodes.check_gpus, patient)
    assert result.status == "fail"
    assert f"asks for 3 GPUs, there are 2 (a: 2 x {card}; b: none)" in result.text
    patient.nodes["b"]["gpus"] = [other]
    assert finding(nodes.check_gpus, patient).status == "warn"
    patient.nodes["b"]["gpus"] = [card]
    assert finding(nodes.check_gpus, patient).status == "ok"


@pytest.mark.parametrize(
    ("card", "remedy"),
    [
        ("NVIDIA H100, 570.1, 81559 MiB, 9.0", r"driver 570\.1 .*\b580\b"),
        ("Tesla V100, 580.1, 16384 MiB, 7.0", r"compute capability 7\.0 .*\b8\.0\b.*\bA100\b"),
    ],
)
def test_a_gpu_or_a_driver_that_is_too_old_fails(make: Any, card: str, remedy: str) -> None:
    patient = make("cluster.device=cuda", "model.dtype=bfloat16")
    patient.nodes = {"a": {"gpus": ["NVIDIA H100, 1000.1, 81559 MiB, 10.0", card]}}
    result = finding(nodes.check_gpus, patient)
    assert result.status == "fail"
    assert re.match(remedy, result.remedy)


def test_gpus_are_what_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf.cluster.node_report import gpus

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 580.1, 81559 MiB, 9.0'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus() == ["NVIDIA H100, 580.1, 81559 MiB, 9.0"]
    (tmp_path / "nvidia-smi").write_text("neither a script nor a program")
    assert gpus() == []


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        ({"silent": "no answer"}, "fail", "node b does not answer: no answer"),
        ({"died": "lost its power"}, "warn", "node b died: lost its power"),
    ],
)
def test_a_node_that_died_or_does_not_answer_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], status: str, says: str
) -> None:
    async def ask(_: str) -> dict[str, dict[str, Any]]:
        return {"a": nodes.describe(), "b": answer}

    monkeypatch.setattr(nodes, "_ask_nodes", ask)
    patient = make("cluster.ray_address=10.0.0.1:6379")
    result = finding(nodes.check_nodes, patient)
    assert result.status == status
    assert says in result.text
    assert list(patient.nodes) == ["a"]


def test_a_node_with_another_version_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(_: str) -> dict[str, dict[str, Any]]:
        there = nodes.describe()
        return {"b (10.0.0.2)": {**there, "installed": {**there["installed"], "ray": "2.59.0"}}}

    monkeypatch.setattr(nodes, "_ask_nodes", ask)
    result = finding(nodes.check_nodes, make("cluster.ray_address=10.0.0.1:6379"))
    assert result.status == "fail"
    assert "node b (10.0.0.2): ray is 2.59.0, but 2.60.0 on " in result.text


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named(make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Ray at 127\.0\.0\.1:1 .*Connection refused"):
        finding(nodes.check_nodes, make("cluster.ray_address=127.0.0.1:1"))


# --- engines and learners ---


def examined(patient: Patient, transfer: Any) -> Patient:
    """With engines and learners that hold two numbers; `transfer` says what a transfer carries over."""
    patient.engines, patient.prompts = cast(Any, FakeEngines(transfer)), PROMPTS
    return patient


def test_an_engine_that_keeps_old_weights_is_named(make: Any) -> None:
    check = next(check for check in checks(make().config) if check.name == "agreement")
    (result,) = asyncio.run(examine_all([check], examined(make(), all_but_the_head), lambda _: None))
    assert result.status == "fail"
    assert "engine 0 does not hold the perturbed weights" in result.text
    assert "do not train on this" in result.remedy
    agrees = finding(training.check_agreement, examined(make(), everything))
    assert agrees.status == "ok"
    assert "sampled" not in agrees.text


def test_what_engines_sample_after_a_sleep_is_compared_and_told(make: Any) -> None:
    patient: Any = examined(make(), everything)
    patient.engines.sleeps = True
    result = finding(training.check_agreement, patient)
    assert result.status == "ok"
    assert "; on tokens that they sampled after a sleep " in result.text


class FakeLearners:
    """Learners that answer a call by what is held for its method, or for the function that is applied."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    async def call(self, ask: Callable[[Any], Any]) -> list[Any]:
        method, *arguments = record_call(ask)
        return [self.answers[arguments[0].__name__ if method == "apply" else method]]

    async def compute(self, _: Callable[[Any], Any]) -> list[Any]:
        return [np.zeros(1, np.float32)]

    async def start_step(self, batch: Any, epochs: Any) -> None:
        pass


def updated(*, ratio: float = 1.0, moved: tuple[str, ...] = (), peak_gib: float = 0.1) -> on_rank.UpdateReport:
    metrics: Any = {"policy/ratio_max": Max(ratio), "policy/kl_old": Mean(0.0, 1.0), "policy/engine_kl": Mean(0.0, 1.0)}
    return on_rank.UpdateReport(metrics, moved, 3, int(peak_gib * GIB))


def with_learners(patient: Patient, **answers: Any) -> Patient:
    examined(patient, everything)
    engines: Any = patient.engines
    engines.learners, engines.transport = FakeLearners(answers), "rlhf_cpu"
    patient.prompts = [replace(prompt, token_ids=prompt.token_ids % 40) for prompt in PROMPTS[:4]]

    async def generate(token_ids: Any, _: Any, *, samples: int, what: str) -> list[Any]:
        assert not engines.asleep
        return [Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), "stop", ()) for _ in range(samples)]

    engines.choice, engines.generate = engines, generate
    return patient


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (updated(), "ok", "16 rollouts: largest ratio 1, "),
        (updated(ratio=1.0000001), "fail", "largest ratio 1.0000001"),
        (updated(moved=("norm",)), "fail", "a learning rate of 0 moves norm"),
    ],
)
def test_an_update_has_ratios_of_1_and_a_learning_rate_of_0_moves_nothing(
    make: Any, answer: Any, status: str, says: str
) -> None:
    patient: Any = with_learners(make(), update=answer)
    patient.engines.asleep = True  # the kernels were examined before
    result = finding(training.check_update, patient)
    assert result.status == status
    assert says in result.text


@pytest.mark.parametrize(("moved", "sleeps", "status"), [(("norm",), True, "ok"), ((), False, "fail")])
def test_an_update_that_moves_no_weight_fails(make: Any, moved: tuple[str, ...], sleeps: bool, status: str) -> None:
    patient: Any = with_learners(make(), update=updated(moved=moved), free_bytes=2 * GIB)
    patient.targets, patient.canary, patient.engines.sleeps = object(), FakeCanary(), sleeps
    result = finding(training.check_cycle, patient)
    assert result.status == status
    assert result.text.count("canary 0, on sampled tokens 0.0005") == (training.CYCLES if sleeps else 0)
    assert result.text.count("GiB free 2.0 before the update, 2.0 after it, 2.0 after the send") == training.CYCLES


class FakeCanary:
    tolerance = 0.001

    async def check(self, _: int) -> dict[str, float]:
        return {"sync/canary_difference": 0.0}

    async def check_sampled(self, _: int) -> float:
        return 5e-4


def test_a_microbatch_warns_if_the_plan_is_too_low(make: Any) -> None:
    def result(peak_gib: float) -> Finding:
        return finding(training.check_microbatch, with_learners(make(), update=updated(peak_gib=peak_gib)))

    assert result(0.1).status == "ok"
    planned = float(result(0.1).text.split()[-1])
    assert result(2 * planned).status == "warn"


def test_network_cards_of_which_some_are_down_are_named(make: Any, tmp_path: Path) -> None:
    from rlhf.cluster.node_report import cards

    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / card / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    found = cards(str(tmp_path))
    assert found == {"mlx5_0": "4: ACTIVE, 400 Gb/sec (4X NDR)", "mlx5_1": "1: DOWN, 400 Gb/sec (4X NDR)"}
    patient = make("cluster.device=cuda", "model.dtype=bfloat16")
    gpus, up = ["NVIDIA H100, 580.1, 81559 MiB, 9.0"], {"mlx5_0": found["mlx5_0"]}
    for others, status, says in (
        (up, "ok", ""),
        (found, "warn", "b: mlx5_1 (1: DOWN"),
        ({}, "warn", "b has no network"),
    ):
        patient.nodes = {"a": {"gpus": gpus, "cards": up}, "b": {"gpus": gpus, "cards": others}}
        result = finding(nodes.check_gpus, patient)
        assert (result.status, says in result.text) == (status, True)
    patient.nodes = {"a": {"gpus": 2 * gpus, "cards": found}}
    assert finding(nodes.check_gpus, patient).status == "ok"  # one node needs none


@pytest.mark.parametrize(("error", "status"), [(0.02, "ok"), (0.04, "fail"), (float("nan"), "fail")])
def test_a_kernel_that_computes_something_else_is_named(make: Any, error: float, status: str) -> None:
    answers = {"attention_error": error, "head_error": error, "model_error": error}
    patient = with_learners(make("model.dtype=bfloat16"), **answers)
    assert finding(training.check_kernels, patient).status == status


def test_little_free_memory_between_the_checks_warns(make: Any) -> None:
    patient = make()
    assert finding(training.check_memory, patient).status == "ok"
    patient.least_free = 1.0
    assert finding(training.check_memory, patient).status == "warn"


# --- the program ---


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf.doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=STACK_WAIT_S, env=os.environ | environment, check=False
    )


def test_a_config_that_is_not_valid_is_the_users_error(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
    status = cli.run_program(lambda: doctor_program.main(["--config", config, "run.stepz=3"]))
    assert status == cli.USER_ERROR
    assert "run.stepz" in capsys.readouterr().err


NAMES = [
    "versions", "config", "scorer", "rewards", "nodes", "gpu", "start-up", "agreement", "responses", "kernels",
    "update", "cycle", "microbatch", "checkpoint", "memory",
]  # fmt: skip


@pytest.mark.stack
def test_a_healthy_machine_passes_with_two_learners_and_an_engine() -> None:
    completed = doctor("--json")
    assert completed.returncode == 0, completed.stdout + completed.stderr[-3000:]
    results = {result["name"]: result for result in json.loads(completed.stdout)["checks"]}
    assert list(results) == NAMES
    assert "ok    memory" in completed.stderr
    assert results.pop("gpu")["status"] == "skip"
    assert {result["status"] for result in results.values()} <= {"ok", "warn"}
    assert "2 learners, 1 engine on cpu" in results["start-up"]["message"]
    for name in ("kernels", "update", "cycle", "microbatch", "checkpoint", "memory"):
        assert results[name]["status"] == "ok", results[name]
    assert "largest ratio 1, " in results["update"]["message"]
    assert "a learning rate of 0 moves no bit" in results["update"]["message"]
    assert results["kernels"]["message"].count(", ") > 6
    assert "engines followed weights that were all perturbed" in results["agreement"]["message"]
    first, *examples = results["responses"]["message"].splitlines()
    assert first.startswith("32 responses to 8 prompts: mean reward ")
    assert [line.split()[0] for line in examples] == ["prompt", "response", "graded"] * 2


# vLLM loads it in each of its processes: weights arrive, and the packed head of tied embeddings stays as it was.
STALE = """\
def install():
    from rlhf.weights.receivers import CPUWeightTransferEngine
    CPUWeightTransferEngine._repack_tied_heads = lambda self: None
"""


@pytest.mark.faults
@pytest.mark.stack
def test_everything_that_is_broken_at_once_is_named_and_the_rest_is_fine(tmp_path: Path) -> None:
    seems_installed(tmp_path, "stale", "1", plugin="stale = stale_receiver:install")
    seems_installed(tmp_path, "datasets", "0.1")
    (tmp_path / "stale_receiver.py").write_text(STALE)
    full = ["checkpoint.every=1", "checkpoint.keep=1000000000"]
    hangs = [f'reward.parts=["math", "{grading.HANGING}"]', "reward.wall_seconds=1", "reward.cpu_seconds=1"]
    completed = doctor("cluster.learners=1", *full, *hangs, PYTHONPATH=str(tmp_path))
    assert completed.returncode == 1, completed.stdout + completed.stderr[-3000:]
    failed = [line.split()[1] for line in completed.stdout.splitlines() if line.startswith("FAIL")]
    assert failed == ["versions", "config", "agreement"], completed.stdout
    assert "datasets 0.1 is not in" in completed.stdout
    assert "checkpoints and export need " in completed.stdout
    assert f"reward name='{grading.HANGING}': it fails for a response to " in completed.stdout
    assert "engine 0 does not hold the perturbed weights" in completed.stdout
    warned = [line.split()[1] for line in completed.stdout.splitlines() if line.startswith("warn")]
    assert warned == ["responses", "cycle", "checkpoint"]  # they need the canary, or room on the disk
    assert [line.split()[1] for line in completed.stdout.splitlines() if line.startswith("ok")] == [
        name for name in NAMES if name not in [*failed, *warned, "gpu"]
    ]
    assert completed.stderr.splitlines()[-1] == "error: 3 of 15 checks failed: versions, config, agreement"


@pytest.mark.gpu
@pytest.mark.stack
@pytest.mark.parametrize(("placement", "gpus"), [("colocated", 1), ("separate", 2)])
def test_every_check_is_ok_on_gpus(placement: str, gpus: int) -> None:
    if len(visible_gpus()) < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    completed = doctor("--json", f"cluster.placement={placement}", "cluster.learners=1")
    assert completed.returncode == 0, completed.stdout + completed.stderr[-3000:]
    results = {result["name"]: result for result in json.loads(completed.stdout)["checks"]}
    assert list(results) == NAMES
    assert {name: result for name, result in results.items() if result["status"] != "ok"} == {}
