"""The benchmarks compare what is the same: each peer's result agrees with ours, at sizes that cost nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness, learner_step, logprobs, packer, time_to_accuracy, transfer

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS}


def test_every_way_to_log_probs_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    import torch

    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 16).requires_grad_(), torch.randn(50, 16).requires_grad_()
    targets, upstream = torch.randint(0, 50, (20,)), torch.randn(20)
    found = {}
    for name in (logprobs.OURS, logprobs.FULL, logprobs.SELECTIVE, logprobs.CHUNKED):
        hidden.grad = weight.grad = None
        values = logprobs.VARIANTS[name](hidden, weight, targets)
        values.backward(upstream)
        assert hidden.grad is not None
        assert weight.grad is not None
        found[name] = values.detach(), hidden.grad.clone(), weight.grad.clone()
    for name, values in found.items():
        for one, other in zip(values, found[logprobs.FULL], strict=True):
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
        assert row["real tokens"] == sum(len(r.token_ids) for r in learner_step.rollouts_of(9, 40))
        gradients[name] = np.load(file)
    ours = gradients[learner_step.OURS]
    assert np.linalg.norm(ours) > 0
    for name, other in gradients.items():
        assert np.linalg.norm(other - ours) < 0.03 * np.linalg.norm(ours), name  # bf16


def test_the_packers_place_every_length_once_and_karmarkar_karp_balances_best() -> None:
    rows = {
        name: packer.row(300, name, pack, 1)  # row itself checks that every length is placed once
        for name, pack in {
            "ours": lambda lengths: packer.ours(lengths, 1),
            "first fit": packer.first_fit,
            "kk": lambda lengths: packer.karmarkar_karp(lengths, 14),
        }.items()
    }
    assert rows["ours"]["over budget"] == rows["first fit"]["over budget"] == 0
    assert rows["ours"]["bins"] <= rows["first fit"]["bins"]
    lengths = packer.lengths_of(300)
    sums = [lengths[members].sum() for members in packer.karmarkar_karp(lengths, 14)]
    assert max(sums) - min(sums) < 16


def test_the_transfer_benchmark_sends_the_parameters_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transfer.models.SIZES, "tiny", {**SMALL, "vocab_size": 64})
    source = transfer.Weights("tiny")
    assert source.bytes == sum(2 * meta.numel for meta in source.metadata())
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= source.tensors.keys()


def test_time_to_a_target_counts_training_steps_and_not_evaluations() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/test/avg@1": 0.9}]
    for step in range(1, 7):
        lines.append({"step": step, "time/step": 2.0})
        if step % 2 == 0:
            lines.append({"step": step, "eval/test/avg@1": 0.3 * step / 2})
    found = time_to_accuracy.found_in(lines)
    assert found["evaluations"] == [[4.0, 0.3], [8.0, 0.6], [12.0, pytest.approx(0.9)]]
    assert found["target_s"] == 12.0
    assert time_to_accuracy.time_to_target([[1.0, 0.5]]) is None


def test_the_peak_is_that_of_the_context_alone() -> None:
    big = np.ones(64 * 2**20, np.uint8)
    del big
    with harness.Peak("cpu") as peak:
        kept = np.ones(32 * 2**20, np.uint8)
    assert kept.sum() == 32 * 2**20
    assert 28 < peak.mib < 48


def test_of_several_rounds_the_fastest_time_and_the_largest_peak_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter(
        [{"seconds": 2.0, "peak_mib": 5.0}, {"seconds": 9.0}, {"seconds": 1.0, "peak_mib": 7.0}, {"seconds": 8.0}]
    )
    asked = []

    def fresh(_module: str, case: dict[str, Any], **_: Any) -> dict[str, Any]:
        asked.append(case["name"])
        return next(results)

    monkeypatch.setattr(harness, "fresh", fresh)
    rows = harness.interleaved("m", [{"name": "a"}, {"name": "b"}], 2)
    assert asked == ["a", "b", "a", "b"]
    assert rows == [{"seconds": 1.0, "peak_mib": 7.0}, {"seconds": 8.0}]


def test_a_report_is_written_with_the_machine_it_was_measured_on(tmp_path: Path) -> None:
    options = harness.parser("").parse_args(["--output", str(tmp_path / "results")])
    harness.report("name", "title", [{"a": 1, "b": 0.5}], options, ["a note"])
    written = json.loads((tmp_path / "results" / "name.json").read_text())
    assert written["rows"] == [{"a": 1, "b": 0.5}]
    assert "cores" in written["machine"]["cpu"]
