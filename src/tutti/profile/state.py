"""Bytes of optimizer state, found by letting the optimizer itself take one step on parameters without memory."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.profile.meta import flat_tensors, to_meta

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)


def optimizer_state(optimizers: Sequence[Optimizer], note: Callable[[str], None]) -> dict[int, int]:
    """State bytes of each parameter that an optimizer holds, by the parameter's id.

    The state is that after one step with the parameter's group options; counters (tensors without dimensions) are left
    out. An optimizer that reads values of its tensors is stepped on small real tensors of as many dimensions, of
    prime sizes, and the dimensions of its state are scaled. One that cannot be stepped at all counts as 0, with a note.
    """
    result: dict[int, int] = {}
    for optimizer in optimizers:
        known: dict[Any, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                key = (index, parameter.shape, parameter.dtype)
                if key not in known:
                    known[key] = _state_nbytes(optimizer, group, parameter, note)
                result[id(parameter)] = known[key]
    return result


def _state_nbytes(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, note: Callable[[str], None]) -> int:
    primes = dict(zip(_PRIMES, parameter.shape, strict=False))
    try:
        state = _after_a_step(optimizer, group, to_meta(parameter))
        return sum(tensor.numel() * tensor.element_size() for tensor in state)
    except Exception:  # its step is any code: whatever it raises on meta, real tensors are the next try
        small = torch.zeros([1 if size == 1 else p for p, size in primes.items()], dtype=parameter.dtype)
    try:
        state = _after_a_step(optimizer, group, small)
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        note(f"the state of {type(optimizer).__name__} could not be found ({what}): counted as 0 bytes")
        return 0
    return sum(tensor.element_size() * math.prod(_grown(dim, primes) for dim in tensor.shape) for tensor in state)


def _grown(size: int, primes: dict[int, int]) -> int:
    """A dimension of state as it is for the real parameter, from what it was for one with prime dimensions."""
    for prime, real in primes.items():
        if size % prime == 0:
            size = size // prime * real
    return size


def _after_a_step(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> list[Tensor]:
    """The state, without counters, after a twin of `optimizer` that holds a parameter like `like` has stepped."""
    parameter = nn.Parameter(like)
    parameter.grad = torch.zeros_like(like)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"},  # schedulers wrap step
        state=defaultdict(dict),
        param_groups=[{**group, "params": [parameter], "foreach": False, "fused": False}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    twin.step()
    values = [value for state in twin.state.values() for value in state.values()]
    return [tensor for tensor in flat_tensors(values) if tensor.dim()]
