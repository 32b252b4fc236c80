"""Dropout off, on one device and on ranks: for layouts whose ranks draw masks that no other layout can draw."""

from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_POSITIONS = {F.scaled_dot_product_attention: ("dropout_p", 4), F.multi_head_attention_forward: ("dropout_p", 10)}
"""Functions with dropout among other things: the argument's name and position."""
_DROPOUT = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)  # fmt: skip


class Still(TorchFunctionMode):
    """While open, dropout gives its input back."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func in _POSITIONS:
            name, position = _POSITIONS[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)


def silence(model: nn.Module) -> None:
    """Set the dropout of layers that draw inside their kernels to 0."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
