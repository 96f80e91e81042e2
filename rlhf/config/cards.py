"""The GPUs that --plan and learner/mfu know by name. The numbers are from the makers' data sheets, not measured."""

from __future__ import annotations

import difflib
from typing import Annotated, NamedTuple

from pydantic import AfterValidator


class Card(NamedTuple):
    """One GPU.

    Attributes:
        tflops: dense bfloat16 with float32 accumulation, TFLOP/s.
        memory_gib: memory that the driver shows, GiB; with error correction if that is on by default.
        bandwidth: memory bandwidth, GB/s.
        link: bandwidth between two GPUs of a node, both directions together, GB/s: of NVLink, else of PCIe.
    """

    tflops: float
    memory_gib: float
    bandwidth: float
    link: float


# Data sheets of NVIDIA (A100, A800, A40, A30, A10, RTX A6000, L4, L40, L40S, RTX 6000 Ada, H100, H800, H20, H200,
# GH200 and HGX B200, HGX B300, GB200 NVL72, GB300 NVL72, RTX PRO 6000; half of a value with sparsity); papers on the
# architectures Ampere, Ada and RTX Blackwell for the GeForce cards; AWS for the A10G. Those that NVIDIA's own planner
# knows were compared with it: aiconfigurator-core 0.12.0, systems/*.yaml. Memory is what nvidia-smi shows in public
# logs, such as 23028 MiB of an A10G. Where only the memory is known, the first card with that memory is assumed.
CARDS = {
    "H100": Card(989.0, 79.6, 3350, 900),
    "H200": Card(989.0, 140.4, 4800, 900),
    "B200": Card(2250.0, 179.1, 7700, 1800),
    "B300": Card(2250.0, 268.6, 7700, 1800),
    "GB200": Card(2500.0, 185.0, 8000, 1800),
    "GB300": Card(2500.0, 277.5, 8000, 1800),
    "GH200": Card(989.0, 95.6, 4000, 900),
    "H100 PCIe": Card(756.0, 79.6, 2000, 128),
    "H100 NVL": Card(835.0, 93.6, 3900, 600),
    "H200 NVL": Card(835.0, 140.4, 4800, 900),
    "H800": Card(989.0, 79.6, 3350, 400),
    "H20": Card(148.0, 95.6, 4000, 900),
    "A100": Card(312.0, 80.0, 2039, 600),
    "A100-40GB": Card(312.0, 40.0, 1555, 600),
    "A800": Card(312.0, 80.0, 2039, 400),
    "L40S": Card(362.0, 45.0, 864, 64),
    "L40": Card(181.0, 45.0, 864, 64),
    "A40": Card(149.7, 45.0, 696, 64),
    "L4": Card(121.0, 22.5, 300, 64),
    "A10G": Card(70.0, 22.5, 600, 64),
    "A10": Card(125.0, 22.5, 600, 64),
    "RTX 4090": Card(165.0, 24.0, 1008, 64),
    "RTX 3090": Card(71.0, 24.0, 936, 64),
    "RTX 5090": Card(209.5, 31.8, 1792, 128),
    "A30": Card(165.0, 24.0, 933, 64),
    "RTX 6000 Ada": Card(364.0, 48.0, 960, 64),
    "RTX A6000": Card(155.0, 48.0, 768, 64),
    "RTX PRO 6000": Card(468.0, 95.6, 1792, 128),
}
WITHOUT_BFLOAT16 = ("V100", "T4", "P100", "P40", "RTX 2080", "RTX 2080 Ti", "Quadro RTX 8000", "TITAN RTX")
EQUAL_MEMORY = 0.99  # a sheet's 141 GB is 140.4 GiB


def card_named(device_name: str) -> str | None:
    """The longest entry of CARDS whose words are all in a driver's name, such as `NVIDIA H100 80GB HBM3`, or None."""
    words = _words(device_name)
    matches = [name for name in CARDS if words >= _words(name)]
    return max(matches, key=len, default=None) if "laptop" not in words else None


def _words(name: str) -> set[str]:
    return set(name.casefold().replace("-", " ").split())


def card_with_memory(memory_gib: float) -> str:
    """The smallest card with this much memory, GiB. Ties go to the first card. GB300 if no card has that much."""
    enough = [name for name, card in CARDS.items() if card.memory_gib >= EQUAL_MEMORY * memory_gib]
    return min(enough, key=lambda name: CARDS[name].memory_gib, default="GB300")


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device by its driver's name, TFLOP/s, or None if the device is not in CARDS."""
    name = card_named(device_name)
    return None if name is None else CARDS[name].tflops


def _card_name(value: str) -> str:
    """The entry of CARDS for the value of cluster.gpu, which may be a driver's name. ValueError if there is none."""
    if name := card_named(value):
        return name
    if value.removeprefix("NVIDIA ").removeprefix("Tesla ").split("-")[0] in WITHOUT_BFLOAT16:
        raise ValueError(
            f"cluster.gpu={value}: it has no bfloat16, which every run on GPUs computes in. Use another card."
        )
    guess = difflib.get_close_matches(value.upper(), CARDS, n=1, cutoff=0.7)
    remedy = "For another NVIDIA card with bfloat16, name a similar one, and set cluster.gpu_memory_gib and "
    remedy += "cluster.peak_tflops."
    raise ValueError(
        f"cluster.gpu={value}: no such card is known. {f'Did you mean {guess[0]}? ' if guess else ''}"
        f"Known are {', '.join(CARDS)}. {remedy}"
    )


CardName = Annotated[str, AfterValidator(_card_name)]
