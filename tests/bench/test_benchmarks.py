"""The benchmarks compare what is the same: each peer's result agrees with ours, at sizes that cost nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import eventually

from benchmarks import (
    asynchronous,
    harness,
    learner_step,
    logprobs,
    models,
    packer,
    roofline,
    sft,
    time_to_accuracy,
    transfer,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS}


def test_every_way_to_log_probs_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    import torch

    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 16).requires_grad_(), torch.randn(50, 16).requires_grad_()
    targets, upstream = torch.randint(0, 50, (20,)), torch.randn(20)
    results = {}
    for name in (logprobs.OURS, logprobs.FULL, logprobs.SELECTIVE, logprobs.CHUNKED):
        hidden.grad = weight.grad = None
        values = logprobs.VARIANTS[name](hidden, weight, targets)
        values.backward(upstream)
        assert hidden.grad is not None
        assert weight.grad is not None
        results[name] = values.detach(), hidden.grad.clone(), weight.grad.clone()
    for name, values in results.items():
        for one, other in zip(values, results[logprobs.FULL], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_packed_and_padded_learner_steps_have_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(learner_step, "VOCABULARY", 97)
    gradients = {}
    for name in (learner_step.OURS, learner_step.TRL, learner_step.SELECTIVE):
        file = tmp_path / "gradients.npy"
        case = {"variant": name, "size": SMALL, "count": 9, "longest": 40, "budget": 200, "device": "cpu"}
        row = learner_step.measure(case | {"gradients": str(file)})
        assert row["real tokens"] == sum(len(r.sequences[0].token_ids) for r in learner_step.rollouts_of(9, 40))
        gradients[name] = np.load(file)
    ours = gradients[learner_step.OURS]
    assert np.linalg.norm(ours) > 0
    for name, other in gradients.items():
        assert np.linalg.norm(other - ours) < 0.03 * np.linalg.norm(ours), name  # bf16


@pytest.mark.faults
def test_ours_and_trls_supervised_training_have_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)  # where the random model is made
    losses = {}
    for variant in (sft.OURS, sft.TRL):
        case = {"function": "measure", "variant": variant, "size": "10m", "steps": 3, "per_update": 4, "device": "cpu"}
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        losses[variant] = harness.fresh("benchmarks.sft", case, environment=environment)["losses"]
    assert len(losses[sft.OURS]) == 3
    assert losses[sft.OURS][2] < losses[sft.OURS][0] - 1
    assert losses[sft.TRL] == pytest.approx(losses[sft.OURS], abs=1e-4)


def test_the_packers_place_every_length_once_and_karmarkar_karp_balances_best() -> None:
    packers: dict[str, packer.Packer] = {
        "ours": lambda lengths: packer.ours(lengths, 1),
        "first fit": packer.first_fit,
        "kk": lambda lengths: packer.karmarkar_karp(lengths, 14),
    }
    lengths = packer.lengths_of(300)
    found = packer.measured(lengths, packers, 1)  # which checks that every length is placed once
    rows = {row["packer"]: row for row in found}
    assert rows["ours"]["over budget"] == rows["first fit"]["over budget"] == 0
    assert rows["ours"]["bins"] <= rows["first fit"]["bins"]
    sums = [lengths[members].sum() for members in packer.karmarkar_karp(lengths, 14)]
    assert max(sums) - min(sums) < 16


def test_the_transfer_benchmark_sends_the_parameters_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfer.models.SIZES, "tiny", {**SMALL, "vocab_size": 64})
    source = transfer.Weights("tiny")
    assert source.bytes == sum(2 * meta.numel for meta in source.metadata())
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= source.tensors.keys()


def test_with_one_gpu_only_the_transfer_within_it_is_measured_against_a_copy_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = {"whole": {"seconds": 0.5, "bytes": 10**9}, "link": {"seconds": 0.25}}
    asked = []

    def fresh(_module: str, case: dict[str, Any]) -> dict[str, Any]:
        asked.append(case)
        return results[case["function"]]

    monkeypatch.setattr(harness, "fresh", fresh)
    rows = transfer.gpu_rows("0.5b", 3, gpus=1)
    assert rows[0] == {"way": "whole, separate, nccl", "not measured": "needs 2 GPUs, here are 1"}
    assert [(row["GB/s"], row["of the link"]) for row in rows[1:]] == [(4.0, 1.0), (2.0, 0.5)]
    assert asked[0]["placement"] == "colocated"
    assert asked[1]["target"] == "cuda:0"


def test_engine_and_learner_share_the_gpu_of_a_machine_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for gpus in (1, 2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        found[gpus] = models.placement("cuda")
    assert found == {1: "colocated", 2: "separate"}
    assert models.placement("cpu") == "separate"


def test_bare_engines_get_the_arguments_and_the_environment_of_the_trainers() -> None:
    pytest.importorskip("ray")
    config = models.run_config("model", data={"max_prompt_tokens": 24}, rollout={"max_response_tokens": 40})
    arguments, environment = models.bare_engine(config)
    assert (arguments["max_model_len"], arguments["max_num_seqs"]) == (64, config.rollout.max_concurrent_sequences)
    assert arguments["enforce_eager"]  # on CPU; on GPU both capture graphs
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert arguments["kv_cache_memory_bytes"] == config.rollout.kv_cache_gib * 2**30
    on_gpu = models.run_config("model", cluster={"device": "cuda"}, rollout={"gpu_memory_utilization": 0.4})
    arguments, environment = models.bare_engine(on_gpu)
    assert (arguments["enforce_eager"], arguments["gpu_memory_utilization"]) == (False, 0.4)
    assert "OMP_WAIT_POLICY" not in environment


@pytest.mark.parametrize("module", [asynchronous, time_to_accuracy])
def test_what_does_not_fit_one_gpu_is_reported_and_ends_without_an_error(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("sys.argv", ["benchmark", "--device", "cuda", "--output", str(tmp_path)])
    assert module.main() == 0
    (file,) = tmp_path.glob("*.json")
    assert [set(row) for row in json.loads(file.read_text())["rows"]] == [{"not measured"}]


def test_time_to_a_target_counts_training_steps_and_not_evaluations() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/test/avg@1": 0.9}]
    for step in range(1, 7):
        lines.append({"step": step, "time/step": 2.0})
        if step % 3 == 0:
            lines.append({"step": step, "eval/test/avg@1": 0.15 * step})
    found = time_to_accuracy.found_in(lines, 0)
    assert found["evaluations"] == [[6.0, pytest.approx(0.45)], [12.0, pytest.approx(0.9)]]
    assert found["target_s"] == 12.0
    assert time_to_accuracy.time_to_target([[1.0, 0.5]]) is None


def test_a_step_whose_rollouts_were_sampled_during_an_evaluation_counts_as_the_median_of_the_others() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/test/avg@1": 0.1}]
    for step, seconds in enumerate([5.0, 2.0, 0.5, 3.0, 0.25], start=1):
        lines.append({"step": step, "time/step": seconds})
        if step in (2, 4):
            lines.append({"step": step, "eval/test/avg@1": 0.1 * step})
    found = time_to_accuracy.found_in(lines, 0)
    assert found["step_seconds"] == [5.0, 2.0, 3.0, 3.0, 3.0]  # the first one waits for its own
    assert found["evaluations"] == [[7.0, pytest.approx(0.2)], [13.0, pytest.approx(0.4)]]
    later = time_to_accuracy.found_in(lines[:6], 1)  # a lag of 1: the evaluation after step 2 samples for 3 and 4
    assert later["step_seconds"] == [5.0, 2.0, 3.5, 3.5]


def test_the_peak_is_that_of_the_context_alone() -> None:
    big = np.ones(64 * 2**20, np.uint8)
    held = [bytearray(2**16) for _ in range(1024)]  # freed, but for the last, it stays in the allocator's hands
    del big, held[:-1]
    with harness.Peak("cpu") as peak:
        kept = np.ones(32 * 2**20, np.uint8)
    assert kept.sum() == 32 * 2**20
    assert 28 < peak.mib < 48


def test_of_several_rounds_the_fastest_ones_row_and_the_largest_peak_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter(
        [
            {"seconds": 1.0, "forward": 0.5, "peak_mib": 5.0},
            {"seconds": 9.0},
            {"seconds": 2.0, "forward": 1.5, "peak_mib": 7.0},
            {"seconds": 8.0},
        ]
    )
    asked = []

    def fresh(_module: str, case: dict[str, Any], **_: Any) -> dict[str, Any]:
        asked.append(case["name"])
        return next(results)

    monkeypatch.setattr(harness, "fresh", fresh)
    rows = harness.interleaved("m", [{"name": "a"}, {"name": "b"}], 2)
    assert asked == ["a", "b", "a", "b"]
    assert rows == [{"seconds": 1.0, "forward": 0.5, "peak_mib": 7.0}, {"seconds": 8.0}]


def test_the_processes_below_one_are_found_with_their_command_lines() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()  # the grandchild'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        found: dict[int, str] = {}

        def sees_both() -> bool:
            found.update(harness.tree(child.pid))
            return any("the grandchild" in line for pid, line in found.items() if pid != child.pid)

        assert eventually(sees_both), found
        assert len(found) == 2
        assert harness.cpu_seconds([*found, 2**22 + 1]) > 0  # one that is gone counts nothing
        assert child.stdin is not None
        child.stdin.close()


def test_a_model_of_infinite_responses_never_ends_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(models, "FOLDER", tmp_path)
    monkeypatch.setitem(models.SIZES, "small", SMALL)
    model = AutoModelForCausalLM.from_pretrained(models.random_model("small", dtype="float32", mean_length=math.inf))
    ids = torch.randint(0, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    assert model(input_ids=ids).logits.softmax(-1)[..., model.config.eos_token_id].max() == 0


def test_the_account_of_kernels_is_that_of_products_bytes_and_attention_by_hand() -> None:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    account = roofline.Account(sequence=4096)
    square = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    with account:
        (square @ square).add_(square)[:2].view(-1).sum()
    account.launch(None, (1,), square, square[:4096], None, 3)
    assert account.seconds["products"] == pytest.approx(2 * 8192**3 / 680e12)
    # add_ reads two tensors and writes one, the launch takes one and a half; a sum of 32 KiB is the smallest kernel.
    moved = (3 + 1.5) * 2 * 8192**2
    assert account.seconds["other"] == pytest.approx(moved / 2.8e12 + 4e-6)
    assert account.bytes["other"] == pytest.approx(moved, rel=1e-3)
    heads = torch.empty(16384, 28, 128, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(5, dtype=torch.int32, device="meta")
    with account:
        varlen_attn(heads, heads, heads, bounds, bounds, 4096, 4096, window_size=(-1, 0))
    assert account.seconds["attention"] == pytest.approx(2 * 16384 * 4096 * 28 * 128 / 380e12)


@pytest.mark.parametrize(
    ("size", "checkpointing", "plain", "target"),
    [("1.5B", False, 0.33, 0.36), ("7B", "selective", 0.45, 0.54), ("7B", True, 0.39, 0.40)],
)
def test_by_the_account_an_update_with_kernels_reaches_its_share_of_the_peak(
    size: str, checkpointing: Any, plain: float, target: float
) -> None:
    pytest.importorskip("triton")
    rows = [roofline.update(size, with_kernels=on, checkpointing=checkpointing) for on in (False, True)]
    assert rows[0]["of peak"] < plain
    assert rows[1]["of peak"] >= target
    products = [row["products, ms"] + row["head, products, ms"] for row in rows]
    assert products[1] == pytest.approx(products[0], rel=1e-3)  # only what is around them became less
    assert rows[0]["attention, ms"] == rows[1]["attention, ms"]
