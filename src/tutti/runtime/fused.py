"""torch's fused kernels for Adam and AdamW on the CPU, where the script left open which kernels it wants.

They go over memory once, not once for every operator: on one core 5 ms instead of 27 for 8 M values in float32. But
they take a parameter, its gradient and its moments for vectors in the order of memory: where a gradient lies otherwise
than its parameter (channels last beside contiguous), torch 2.13 adds it to other values and says nothing. So a step is
fused only where all lie alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

_KINDS = (Adam, AdamW)

_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}

_PLAIN = (Tensor, nn.Parameter)
"""Tensors that are no more than their values."""


@contextmanager
def fused(optimizer: Optimizer) -> Iterator[None]:
    """A step of `optimizer` inside takes fused kernels if they compute the same, but for rounding. The optimizer is as
    it was afterwards."""
    groups = optimizer.param_groups if may_fuse(optimizer) else []
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def may_fuse(optimizer: Optimizer) -> bool:
    """Whether the script left the choice open and fused kernels compute what others do."""
    if type(optimizer) not in _KINDS or not all(map(_left_open, optimizer.param_groups)):
        return False
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(_alike(p, p.grad, optimizer.state.get(p, {})) for p in trained)


def _left_open(group: dict[str, Any]) -> bool:
    """No kernels were asked for, and rates are plain numbers."""
    if any(group.get(name) for name in ("fused", "foreach", "capturable", "differentiable")):
        return False
    asked = group.get("fused") is False or group.get("foreach") is False
    return not asked and not any(isinstance(one, Tensor) for one in (group["lr"], *group["betas"]))


def _alike(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether all of these are plain values on the host, in one dtype and one order of memory without gaps, and the
    state is no more than torch's own."""
    if type(parameter) not in _PLAIN or parameter.device.type != "cpu" or not _dense(parameter):
        return False
    if parameter.dtype not in (torch.float32, torch.float64) or not state.keys() <= _STATE:
        return False
    if state and not (isinstance(state["step"], Tensor) and state["step"].dtype is torch.float32):
        return False
    values = [gradient, *(one for name, one in state.items() if name != "step")]
    return gradient.layout is torch.strided and all(
        one.dtype is parameter.dtype and one.device.type == "cpu" and one.stride() == parameter.stride()
        for one in values
    )


def _dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))
