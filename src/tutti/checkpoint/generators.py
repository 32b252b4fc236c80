"""The states of the random generators that a script may use: Python's, NumPy's, torch's."""

import random
from typing import Any

import numpy as np
import torch


def read_generators() -> dict[str, Any]:
    """This rank's generator states, as plain numbers and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Put states that `read_generators` gave back."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
