"""Fingerprints of data sets, so that a report can say which data its numbers belong to."""

import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.config.run_folder import DatasetInfo
from tutti.data.microbatches import leaves
from tutti.data.origin import look_at, origin_of
from tutti.data.samples import SeededSamples, tensors_of

_OVERLAP_LIMIT = 20_000


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


def overlap(train: Any, test: Any, seed: int) -> int | None:
    """Count the test samples that also occur, byte for byte, among the training samples; None if unknown.

    It is unknown for streams, large data and samples that are augmented at random.
    """
    sets = [train, test]
    if any(not hasattr(data, "__len__") or len(data) > _OVERLAP_LIMIT or _is_augmented(data) for data in sets):
        return None
    train_hashes, test_hashes = (_sample_hashes(data, seed) for data in sets)
    known = set(train_hashes)
    return sum(digest in known for digest in test_hashes)


def _is_augmented(dataset: Any) -> bool:
    """Return whether samples depend on the seed under which they are read."""
    indices = range(0, len(dataset), max(1, len(dataset) // 4))
    first, second = (SeededSamples(dataset, seed, "fingerprint", gather=False) for seed in (1, 2))
    return any(_sample_bytes(first[(0, index)]) != _sample_bytes(second[(0, index)]) for index in indices)


def _sample_hashes(dataset: Any, seed: int) -> list[bytes]:
    samples = SeededSamples(dataset, seed, "fingerprint", gather=False)
    return [
        hashlib.blake2b(_sample_bytes(samples[(0, index)]), digest_size=16).digest() for index in range(len(dataset))
    ]


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
