"""A rank's states of global generators, also in a file that outlives the rank: no other rank has them.

Each mark of a run writes them. torch's change in every step; those of Python and NumPy are compared by their memory,
which takes a microsecond, and are read only once they have changed.
"""

import ctypes
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.checkpoint.contribution import read_generators
from tutti.comm.value_codec import decode, encode
from tutti.surviving_rank import LastingFile, LeftBehind, read_lasting

_MT19937_NBYTES = 4 * 625


def _python_memory() -> Any:
    """The memory of Python's generator: a position and 624 words. None where the interpreter keeps it otherwise."""
    try:
        generator: Any = vars(random)["_inst"]
        memory = (ctypes.c_char * _MT19937_NBYTES).from_address(id(generator) + object.__basicsize__)
        *words, position = random.getstate()[1]
        return memory if struct.unpack("=i624I", memory.raw) == (position, *words) else None
    except (KeyError, TypeError, ValueError, struct.error):
        return None


def _numpy_memory() -> Any:
    """The memory of NumPy's generator; None where it is another than the usual one."""
    try:
        state: Any = np.random.get_state(legacy=True)
        generator: Any = vars(np.random.mtrand)["_rand"]
        memory = (ctypes.c_char * _MT19937_NBYTES).from_address(generator._bit_generator.ctypes.state_address)
        return memory if struct.unpack("=624Ii", memory.raw) == (*state[1].tolist(), state[2]) else None
    except (AttributeError, KeyError, TypeError, ValueError, struct.error):
        return None


class GeneratorFile:
    """Keeps the states of this process' global generators.

    Args:
        path: the file; None to keep them in this process only.
    """

    def __init__(self, path: Path | None) -> None:
        self._memories = [_python_memory(), _numpy_memory()]
        self._file = None if path is None else LastingFile(path)
        self._written: LeftBehind | None = None
        self._read()

    def write(self, step: int, torch_state: bytes, *, drawn: bool) -> bool:
        """Write the states after a step.

        Args:
            step: updates made so far.
            torch_state: the state of torch's generator on the CPU.
            drawn: whether torch's generator has been drawn from between steps, or Python's or NumPy's at all.

        Returns:
            The same, with the draws from Python's and NumPy's since the last call.
        """
        if self._careful or self._now() != self._seen:
            before = self._encoded
            self._read()
            drawn |= self._encoded != before
        if self._file is not None:
            self._written = LeftBehind(step=step, drawn=drawn, first=torch_state, second=self._encoded)
            self._file.write(self._written)
        return drawn

    def note_drawn(self) -> None:
        """Write that the script has drawn between steps, which the other ranks may not have seen."""
        if self._file is not None and self._written is not None and not self._written.drawn:
            self._written = replace(self._written, drawn=True)
            self._file.write(self._written)

    def has_changed(self) -> bool:
        """Return whether Python's or NumPy's generator has been drawn from since they were written last."""
        return self._now() != self._seen

    def states(self, torch_state: bytes) -> dict[str, Any]:
        """Return the states as checkpoints have them, with this one of torch."""
        return {**self._host, "torch": _as_tensor(torch_state)}

    def _read(self) -> None:
        self._seen = self._now()
        self._host = {name: state for name, state in read_generators().items() if name != "torch"}
        self._encoded = encode(self._host)
        # A number of a normal distribution that is kept for the next call is used up without a change of the memory.
        kept = self._host["python"][2] is not None or bool(self._host["numpy"][3])
        self._careful = kept or None in self._memories

    def _now(self) -> list[bytes]:
        return [b"" if memory is None else memory.raw for memory in self._memories]


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def lost_generators(path: Path, step: int, other: dict[str, Any]) -> dict[str, Any]:
    """Return the states of a rank that was lost, as far as it has written them.

    Args:
        path: its file.
        step: the step to go on from. Of another step, torch's state is `other`'s: each step seeds that generator.
        other: the states of another rank after `step`.
    """
    written = read_lasting(path)
    if written is None:
        return other
    torch_state = _as_tensor(written.first) if written.step == step else other["torch"]
    return {**decode(memoryview(written.second)), "torch": torch_state}
