"""Fingerprints of data sets, so that a report can say which data its numbers belong to."""

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.config.run_folder import DatasetInfo
from tutti.data.microbatches import leaves
from tutti.data.origin import arrays_of, look_at, origin_of
from tutti.data.samples import SeededSamples, tensors_of

_OVERLAP_LIMIT = 20_000
_FEWEST_VALUES, _PATTERN_VALUES, _MOST_CHANNELS = 32, 256, 4
_LEVELS, _OFFSET = 997, 0.318
"""Values of a pattern are rounded to these levels; images of few grey levels have no value near their bounds."""


def describe_data(dataset: Any, seed: int, name: str) -> DatasetInfo:
    """Return the name, size, hash and origin of a data set.

    Tensor data is hashed as a whole. Of other map-style data, evenly spread samples are hashed, 64 of large ones.
    """
    kind = type(dataset).__name__
    tensors = tensors_of(dataset)
    if not hasattr(dataset, "__len__"):
        return DatasetInfo(name=name, kind=kind, samples=None, sha256="", hash_covers="nothing: a stream is read once")
    count = len(dataset)
    look = look_at(dataset, seed)
    if isinstance(getattr(dataset, "sha256", None), str):
        sha, covers = dataset.sha256, "as the data set states it"
    elif tensors is not None:
        sha, covers = _hash(_bytes(tensor) for tensor in tensors), f"all {count} samples"
    else:
        sha = _hash(_sample_bytes(sample) for sample in look.samples)
        covers = f"{len(look.samples)} of {count} samples, evenly spread"
    return DatasetInfo(
        name=name,
        kind=kind,
        samples=count,
        sha256=sha,
        hash_covers=covers,
        input_shapes=_shapes(look.samples),
        origin=origin_of(dataset, look),
    )


@dataclass(frozen=True, slots=True)
class SampleDigests:
    """Digests of all samples of a data set, in its order.

    Attributes:
        exact: of their bytes.
        patterns: see `input_pattern`; empty if they do not tell the samples of this data set apart.
    """

    exact: tuple[bytes, ...]
    patterns: tuple[bytes, ...]


def digest_samples(dataset: Any, seed: int) -> SampleDigests | None:
    """Read all samples; None for streams, large data and samples that are augmented at random."""
    if not hasattr(dataset, "__len__") or len(dataset) > _OVERLAP_LIMIT or _is_augmented(dataset):
        return None
    samples = SeededSamples(dataset, seed, "fingerprint", gather=False)
    exact, patterns = [], []
    for index in range(len(dataset)):
        sample = samples[(0, index)]
        exact.append(hashlib.blake2b(_sample_bytes(sample), digest_size=16).digest())
        patterns.append(input_pattern(sample))
    known = [pattern for pattern in patterns if pattern is not None]
    telling = len(known) == len(exact) and len(set(known)) >= 0.95 * len(set(exact))
    return SampleDigests(tuple(exact), tuple(known) if telling else ())


def overlap(train: SampleDigests | None, test: SampleDigests | None) -> int | None:
    """Count the test samples that also occur among the training samples, as they are or scaled; None if unknown."""
    if train is None or test is None:
        return None
    exact, patterns = set(train.exact), set(train.patterns)
    scaled = test.patterns or (b"",) * len(test.exact)
    return sum(a in exact or b in patterns for a, b in zip(test.exact, scaled, strict=True))


def first_rows(batch: Any) -> list[Any]:
    """Return the first rows of a batch's tensors and arrays. Nested and sparse tensors are left out: they have none."""
    return [leaf[0] for leaf in leaves(batch) if _has_rows(leaf)]


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested and leaf.ndim > 0 and leaf.shape[0] > 0
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) > 0


def input_pattern(sample: Any) -> bytes | None:
    """Return a digest of a sample's input that scaling and shifting leave as it is; None for small inputs.

    It is made from up to 256 values of the first channel, so that channels may be scaled apart.
    """
    array = max(arrays_of(sample), key=np.size, default=None)
    if array is None or array.size < _FEWEST_VALUES:
        return None
    if array.ndim > 2 and min(array.shape[0], array.shape[-1]) <= _MOST_CHANNELS:
        array = array[0] if array.shape[0] <= array.shape[-1] else array[..., 0]
    values = array.reshape(-1)[:: array.size // _PATTERN_VALUES | 1]
    if values.dtype.kind == "f" or array.ndim > 1:
        values = values.astype(np.float64)
        low, high = values.min(), values.max()
        if not np.isfinite(high - low) or high == low:
            return None
        values = np.floor((values - low) / (high - low) * _LEVELS + _OFFSET).astype(np.int16)
    return hashlib.blake2b(values.tobytes(), digest_size=8).digest()


def _is_augmented(dataset: Any) -> bool:
    """Return whether samples depend on the seed under which they are read."""
    indices = range(0, len(dataset), max(1, len(dataset) // 4))
    first, second = (SeededSamples(dataset, seed, "fingerprint", gather=False) for seed in (1, 2))
    return any(_sample_bytes(first[(0, index)]) != _sample_bytes(second[(0, index)]) for index in indices)


def values_digest(values: Any) -> str:
    """Return the digest of all numbers and strings in nested containers."""
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            hashed.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            hashed.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, str | bytes | bool | int | float | complex | np.generic):
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()


def _hash(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _sample_bytes(sample: Any) -> bytes:
    return b"".join(_leaf_bytes(leaf) for leaf in pytree.tree_leaves(sample))


def _leaf_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return _bytes(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    try:
        return pickle.dumps(leaf)
    except Exception:
        return repr(leaf).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _shapes(samples: list[Any]) -> tuple[tuple[int, ...], ...]:
    leaves = pytree.tree_leaves(samples[0]) if samples else []
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray))
