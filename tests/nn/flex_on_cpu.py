"""FlexAttention with gradients on the CPU: torch refuses them there, although its plain operations have them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import flex_attention as torch_flex

from tutti.nn import flex_blocks


@contextmanager
def differentiable_flex(block: int = 8) -> Iterator[None]:
    """While open, FlexAttention takes float64 tensors of every size on the CPU, in blocks of `block` tokens."""
    values = {"DEVICES": ("cpu",), "DTYPES": (torch.float64,), "SMALLEST_HEAD": 1, "BLOCK": block}
    before = {name: getattr(flex_blocks, name) for name in values}
    check, torch_flex._validate_device = torch_flex._validate_device, lambda *tensors: None
    vars(flex_blocks).update(values)
    try:
        yield
    finally:
        torch_flex._validate_device = check
        vars(flex_blocks).update(before)
