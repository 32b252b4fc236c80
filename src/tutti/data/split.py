"""Cut a collated batch into microbatches: every tensor along its first dimension."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tutti.errors import DataError


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut `batch` (tensors in any nesting of tuples, lists, dicts, named tuples) into parts of `sizes` samples.

    A batch of one part passes through untouched, whatever it is. Non-tensor leaves (a number, a string, None) are
    repeated in every part. Raises DataError when a tensor's first dimension is not the number of samples.
    """
    if len(sizes) == 1:
        return [batch]
    if hasattr(batch, "split") and not isinstance(batch, torch.Tensor):
        return list(batch.split(list(sizes)))
    leaves, structure = pytree.tree_flatten(batch)
    columns = [_split_leaf(leaf, sizes) for leaf in leaves]
    return [pytree.tree_unflatten([column[part] for column in columns], structure) for part in range(len(sizes))]


def _split_leaf(leaf: Any, sizes: Sequence[int]) -> list[Any]:
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return [leaf] * len(sizes)
    if leaf.shape[0] != sum(sizes):
        raise DataError(
            f"a batch tensor of shape {tuple(leaf.shape)} cannot be cut into microbatches of {list(sizes)} samples: "
            f"its first dimension must be {sum(sizes)}; collate batches with samples first, or set num_microbatches=1"
        )
    return list(torch.split(leaf, list(sizes)))


def check_batch_size(batch: Any, expected: int) -> None:
    """Raise DataError unless the first tensor of a batch has `expected` samples, as the loader gave it."""
    first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if first is not None and first.shape[0] % expected:
        raise DataError(
            f"step got a batch whose first tensor has shape {tuple(first.shape)}, but this rank's share is {expected} "
            "samples; pass step the batch as the loader gave it, and change samples in the dataset or collate_fn"
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to a device."""
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, batch)
