"""Bytes of optimizer state, found by letting the optimizer itself take one step on parameters without memory."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.describe.meta import to_meta


def optimizer_state(optimizers: Sequence[Optimizer], note: Callable[[str], None]) -> dict[int, int]:
    """State bytes of each parameter that an optimizer holds, by the parameter's id.

    The state is that after one step with the parameter's group options; counters (tensors without dimensions) are left
    out. An optimizer that reads values of its tensors is stepped on small real tensors of as many dimensions, and its
    bytes for each element are scaled. One that cannot be stepped at all counts as 0, with a note.
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
    try:
        return _after_a_step(optimizer, group, to_meta(parameter))
    except Exception:  # its step is any code: whatever it raises on meta, real tensors are the next try
        small = torch.zeros([min(size, 4) for size in parameter.shape], dtype=parameter.dtype)
    try:
        nbytes = _after_a_step(optimizer, group, small)
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        note(f"the state of {type(optimizer).__name__} could not be found ({what}): counted as 0 bytes")
        return 0
    return round(nbytes * parameter.numel() / max(small.numel(), 1))


def _after_a_step(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> int:
    """Bytes of state after a twin of `optimizer` that holds only a parameter like `like` has stepped."""
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
    return sum(_nbytes(value) for state in twin.state.values() for value in state.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() if value.dim() else 0
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0
