"""One kernel each for RMSNorm, rotary positions and the gated product of an MLP, where a model has the usual ones.

A module is replaced only if its code is that of Llama's, instruction for instruction: most families copy it. A module
that differs, such as Gemma's norms, stays as transformers computes it. So does everything on CPU, bit for bit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from rlhf.algo.numerics import has_kernels

ROTARY = "apply_rotary_pos_emb"
SILU = (type(ACT2FN["silu"]), nn.SiLU)


def use_kernels(model: nn.Module) -> None:
    """Let the modules of the model that have the usual form compute with `algo.kernels`, where these run."""
    for module in model.modules():
        if _same_code(type(module).forward, modeling_llama.LlamaRMSNorm.forward):
            module.forward = functools.partial(_normalize, module, module.forward)
        elif _same_code(type(module).forward, modeling_llama.LlamaMLP.forward) and isinstance(module.act_fn, SILU):
            module.forward = functools.partial(_gated_mlp, module)
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        rotate: Any = vars(file).get(ROTARY)
        halves = _same_code(vars(file).get("rotate_half"), modeling_llama.rotate_half)
        if halves and _same_code(rotate, _LLAMA_ROTARY):
            setattr(file, ROTARY, functools.partial(_rotate, rotate))


_LLAMA_ROTARY = modeling_llama.apply_rotary_pos_emb  # before it is replaced


def _same_code(function: Any, other: Any) -> bool:
    """Whether two functions have the same instructions, names and constants; their docstrings may differ."""

    def code(f: FunctionType) -> tuple[Any, ...]:
        c = f.__code__
        return c.co_code, c.co_names, c.co_varnames, [x for x in c.co_consts if x != f.__doc__]

    return isinstance(function, FunctionType) and isinstance(other, FunctionType) and code(function) == code(other)


def _normalize(module: Any, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not has_kernels(x) or module.weight.dtype != x.dtype:
        return plain(x)
    return _kernels().rms_norm(x, module.weight, module.variance_epsilon)


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(_kernels().gated_silu(gate, up) if has_kernels(gate) else module.act_fn(gate) * up)


def _rotate(
    plain: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
) -> Any:
    """q and k [1, heads, U, d], cos and sin [1, U, d]; inputs of another form go to the model's own function."""
    usual = has_kernels(q) and not (args or options) and q.dtype == cos.dtype and cos.shape == (1, *q.shape[2:])
    if not usual:
        return plain(q, k, cos, sin, *args, **options)
    return _kernels().rotary(q, cos, sin), _kernels().rotary(k, cos, sin)


def _kernels() -> Any:
    from rlhf.algo import kernels  # imports triton, which only machines with a GPU have

    return kernels
