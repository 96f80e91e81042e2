"""The two published forms of Adam (Kingma & Ba, arXiv:1412.6980), both on torch's own AdamW.

    torch       theta -= lr  m_hat / (sqrt(v_hat) + eps)                                            their Algorithm 1
    tensorflow  theta -= lr sqrt(1 - beta2^t) / (1 - beta1^t)  m / (sqrt(v) + eps_hat)      just before Section 2.1

with m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t).
The original RLHF work was trained with the second. Dividing numerator and denominator by sqrt(1 - beta2^t) makes it
the first with eps_t = eps_hat / sqrt(1 - beta2^t), which is large at first and decays to eps_hat. Setting
`group["eps"]` before each step therefore turns any Adam that reads it, also fused or in ZeRO, into the TensorFlow one.
"""

from __future__ import annotations

import math
from typing import Any


def set_step(
    optimizer: Any, *, lr: float, adam_step: int, variant: str, eps: float, betas: tuple[float, float]
) -> None:
    """Write the learning rate and the effective epsilon of the step about to be taken into every parameter group.

    Args:
        optimizer: torch's, or DeepSpeed's wrapper around one.
        adam_step: t, 1-based: the steps that Adam itself has taken plus one. A skipped update does not advance it.
        eps, betas: as the config names them.
    """
    assert adam_step >= 1, f"Adam counts its steps from 1, got {adam_step}"
    assert variant in ("torch", "tensorflow"), variant
    effective = eps / math.sqrt(1 - betas[1] ** adam_step) if variant == "tensorflow" else eps
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["eps"] = effective
