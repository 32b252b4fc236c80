"""Random draws on parts: every split rank has a stream of its own there, and all go on with one common stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _python_dispatch

from tutti.parallel.tensor.exchange import SplitGroup


def draws_whole() -> bool:
    """Whether a mode is on (verification) that makes random draws agree with one device's: then a part is gathered,
    and every rank draws for the whole tensor."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(getattr(mode, "draws_whole", False) for mode in modes)


@contextmanager
def own_stream(device: torch.device, group: SplitGroup) -> Iterator[None]:
    """Draw from a stream derived from (the common stream, this rank's place among the split ranks).

    The common stream goes on by one draw whatever is drawn inside, so it stays equal on all split ranks; recompute,
    which restores it, finds the same values again.
    """
    generator = _generator(device)
    if device.type == "cuda":  # no draw: it would wait for the device
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
        seed = hash((seed, offset))
    else:
        seed = int(torch.randint(2**62, (), generator=generator))
    state = generator.get_state()
    generator.manual_seed((seed * 1_000_003 + group.rank + 1) % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
