"""The study of served and merged adapters computes what its table says."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.studies import lora
from rlhf.algo.lora import adapt


def test_a_merged_weight_is_the_sum_rounded_once_which_loses_what_is_small() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)).to(torch.bfloat16)
    adapt(model, ["0"], rank=2, scale=2.0)
    layer, weight = model.get_submodule("0"), torch.full((3, 4), 1.0, dtype=torch.bfloat16)
    layer.lora_A.data.fill_(1.0)
    layer.lora_B.data.fill_(2**-11)  # a change of 2 x 2 x 2**-11 = 2**-9: half of the distance to the next number
    assert torch.equal(lora.merged(layer, weight), weight)
    layer.lora_B.data.fill_(2**-9)
    assert torch.equal(lora.merged(layer, weight), weight + 2**-7)


def test_the_runs_train_adapters_in_bfloat16_without_a_kl_and_differ_in_rate_alone(tiny_model_dir: Path) -> None:
    low, high = (lora.study_config(tiny_model_dir, lr, steps=2, prompts=2) for lr in (1e-4, 1e-3))
    assert low.model.lora is not None
    assert (low.model.dtype, low.model.lora.rank, low.algo.kl_coef) == ("bfloat16", 16, 0.0)
    assert low.algo.importance_correction == "none"
    values = high.model_dump()
    values["learner"]["optimizer"]["lr"] = 1e-4
    assert values == low.model_dump()
