"""Cards by name: what the driver says, what a config may say, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from rlhf.config.cards import CardName, card_named, card_with_memory, peak_tflops
from rlhf.config.sections import LearnersConfig


def test_a_card_is_known_by_whole_words_of_the_drivers_name() -> None:
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA H100 NVL") == 835.0
    assert peak_tflops("NVIDIA L40") == 181.0
    assert peak_tflops("NVIDIA A10G") == 70.0
    assert peak_tflops("NVIDIA RTX A1000") is peak_tflops("NVIDIA RTX A4000") is None
    assert card_named("NVIDIA A100-PCIE-40GB") == "A100-40GB"
    assert card_named("NVIDIA RTX PRO 6000 Blackwell Server Edition") == "RTX PRO 6000"
    assert card_named("NVIDIA GeForce RTX 4090 Laptop GPU") is None


def test_memory_alone_selects_the_smallest_card_that_has_as_much() -> None:
    sizes = (22, 24, 32, 40, 45, 48, 79, 80, 141, 180, 1000)
    assert [card_with_memory(gib) for gib in sizes] == [
        "L4", "RTX 4090", "RTX 5090", "A100-40GB", "L40S", "RTX 6000 Ada", "H100", "H100", "H200", "B200", "GB300",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [("H10O", "Did you mean H100?"), ("RTX4090", "Did you mean RTX 4090?"), ("GTX 1080", ""), ("MI300X", "")],
)
def test_another_card_is_refused_with_the_list(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"cluster.gpu={given}: .*{words}.*RTX PRO 6000"):
        LearnersConfig(gpu=given)


def test_the_drivers_name_will_do_in_a_config() -> None:
    names = TypeAdapter(CardName)
    assert [names.validate_python(name) for name in ("NVIDIA H100 80GB HBM3", "L40s")] == ["H100", "L40S"]
