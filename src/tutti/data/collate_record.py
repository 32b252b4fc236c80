"""What a batch was collated from: a digest of every sample, and the generators that collate_fn drew from.

Only verification asks for it. Batches that concatenate their samples cannot always be compared; the samples can.
"""

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tutti.data.contents import contents, is_plain
from tutti.data.seeds import generator_states, held_generators


@dataclass(slots=True, kw_only=True)
class CollateRecord:
    """What a share's batch was collated from.

    Attributes:
        digests: digest of each sample before collate_fn; None for one with contents that have no bytes.
        draws: generators that collate_fn drew from.
        collate: name of collate_fn.
    """

    digests: tuple[bytes | None, ...] = ()
    draws: tuple[str, ...] = ()
    collate: str = "collate_fn"


@contextmanager
def recorded_collation(collate: Callable[[Any], Any], samples: Sequence[Any]) -> Iterator[CollateRecord]:
    """Record the samples, which `collate` may change, and what it draws within the context."""
    name = getattr(collate, "__name__", type(collate).__name__)
    record = record_samples(samples)
    record.collate = name
    before = generator_states(held_generators(collate))
    yield record
    after = generator_states(held_generators(collate))
    record.draws = tuple(source for source, state in after.items() if state != before[source])


def record_samples(samples: Iterable[Any]) -> CollateRecord:
    """Return the record of samples that torch's own function collates."""
    return CollateRecord(digests=tuple(sample_digest(sample) for sample in samples))


def sample_digest(sample: Any) -> bytes | None:
    """Return a digest of a sample's values that is equal in every process, or None if some have no bytes."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for piece in _pieces(sample, set()):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    except Exception:  # objects of other libraries raise what they like where they cannot be pickled
        return None
    return digest.digest()


def _pieces(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield the bytes of the values in a sample, in order, with their types and shapes."""
    if id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        yield from _tensor_pieces(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        yield _pickled(value.tolist()) if value.dtype.hasobject else value.tobytes()
    elif is_plain(value):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        yield from _children_pieces(value, seen | {id(value)})


def _tensor_pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from _tensor_pieces(part)
        return
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _children_pieces(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield the bytes of a container's entries, or of an object's attributes."""
    if callable(getattr(value, "tobytes", None)):  # an image
        yield f"{type(value).__name__} {getattr(value, 'size', None)}".encode()
        yield value.tobytes()
        return
    entries = contents(value)
    if entries is None:
        yield _pickled(value)
        return
    yield f"{type(value).__name__} {len(entries)}".encode()
    for name, entry in entries:
        yield name.encode()
        yield from _pieces(entry, seen)


class _ValuePickler(pickle.Pickler):
    """Pickles values whose bytes are equal in every process: torch writes addresses for tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            raise pickle.PicklingError("a tensor's bytes are not its values")
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _ValuePickler(file).dump(value)
    return file.getvalue()
