"""Rows of --plan on the weights that engines are sent after an update: bytes and seconds, all of them and changes."""

from __future__ import annotations

from rlhf.algo.sizes import BYTES_PER_CHANGE, MOST_CHANGED
from rlhf.check.memory import BYTES, GIB
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import counted
from rlhf.config.grpo import GRPOConfig

# Share of the bfloat16 elements that an update changes: 0.33% at lr 1e-6, 1.3% at 1e-5, measured on SmolLM2-135M. Steps
# of Adam have the size of lr, whatever the gradient.
CHANGED_AT_1E6, CHANGED_EXPONENT = 0.0033, 0.6


def transfer_rows(config: GRPOConfig, shape: ModelShape) -> list[tuple[str, str]]:
    """Empty where nothing is sent over a network: on shared GPUs, through memory of one machine, or an adapter."""
    local = config.cluster.placement == "colocated" or (config.cluster.device == "cpu" and not config.sends_changes)
    if local or config.model.lora is not None:
        return []
    gbit = config.plan.network_gbit_per_second
    size = shape.parameters * BYTES[config.model.dtype]
    product = f"{shape.parameters / 1e9:.3f} B x {BYTES[config.model.dtype]} bytes"
    rows = [("everything", f"{product} = {_sent(size, gbit)}")]
    if config.model.dtype == "bfloat16":
        lr, updates = config.learner.optimizer.lr, config.training.updates_per_step
        share = min(1.0, updates * CHANGED_AT_1E6 * (lr / 1e-6) ** CHANGED_EXPONENT)
        changes = f"{counted(updates, 'update')} at lr {lr:g}, about {share:.2%} of the elements"
        how = "over 40%: everything is sent"
        if share <= MOST_CHANGED:
            how = f"x {BYTES_PER_CHANGE} bytes = {_sent(shape.parameters * share * BYTES_PER_CHANGE, gbit)}"
        rows.append(("changes alone", f"{changes} {how}"))
    here = f"weights.transfer={config.weights.transfer}; gathering and loading into the engines not included"
    if config.sends_changes:
        held = f"{size / GIB:.2f} GiB per node with engines, {size / config.cluster.learners / GIB:.2f} per learner"
        here = f"{here}; host memory: {held}"
    return [*rows, ("this run", here)]


def _sent(size: float, gbit: float) -> str:
    return f"{size / GIB:,.2f} GiB, {8 * size / (gbit * 1e9):,.2f} s at {gbit:g} Gbit/s"
