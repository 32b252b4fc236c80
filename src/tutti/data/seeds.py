"""Seeds of independent streams, derived from one seed and what the stream is for."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on every part of `purpose`; equal on every rank and every machine."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators a sample may draw from: Python's, NumPy's, torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's generator of one device and of the CPU. Quicker than torch.manual_seed, which also
    visits every kind of device that is not in use: 1 against 75 microseconds on a CPU build of torch 2.13."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's CPU generators as they were found."""
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
