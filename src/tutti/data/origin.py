"""Where training data comes from and how large it really is, found by looking at samples: files, memory or a generator.

A report needs both, and neither is visible from a class name. What cannot be told is None, and the report says so.
"""

import math
import resource
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from tutti.config.run_folder import FRAMED, LIKE_RANDOM, DataOrigin
from tutti.config.vocabulary import StartState
from tutti.data.contents import contents
from tutti.data.microbatches import leaves
from tutti.data.samples import SeededSamples, draws_nothing, tensors_of
from tutti.data.seeds import preserved_generators, seed_everything

SAMPLES = 64
"""Number of samples, spread evenly over the data, that are looked at; four times as many of small ones."""
_FEWEST_VALUES = 1000
_MOST_VALUES = 200_000
_NORMAL, _UNIFORM = 1.25, 1.6
"""Bounds of the Kolmogorov-Smirnov distance times the square root of the number of values, where mean and deviation, or
the ends, are fitted. Of 14,000 simulated sets of 1,000 and 4,000 numbers, 0.09 % of the normal and 1.1 % of the uniform
ones exceed them, and so pass for data."""
_FEWEST_BLOCKS = 4
_GAP = 30.0
"""Ratio of consecutive eigenvalues that only interpolation leaves. Those of photographs fall smoothly."""
_STEEP = 6.0
"""How many times the ratios beside it that ratio is at least. Those of smooth fields are all large."""


def look_at(dataset: Any, seed: int) -> "Look":
    """Read samples spread evenly over a map-style data set, each under a seed of its own."""
    count = len(dataset)
    source = SeededSamples(dataset, seed, "fingerprint", gather=False)
    first = source[(0, 0)] if count else None
    shown = None if first is None else input_of(first)
    many = SAMPLES if shown is None or shown.size * SAMPLES >= 4 * _FEWEST_VALUES else 4 * SAMPLES
    indices = [int(index) for index in np.unique(np.linspace(0, max(count - 1, 0), min(count, many)).astype(int))]
    before, used = _file_traffic(), resource.getrusage(resource.RUSAGE_SELF)
    samples = [source[(0, index)] for index in indices]
    after, usage = _file_traffic(), resource.getrusage(resource.RUSAGE_SELF)
    return Look(
        samples=samples,
        from_files=after[0] - before[0],
        from_device=after[1] - before[1],
        faults=usage.ru_majflt - used.ru_majflt,
        waits=usage.ru_nvcsw - used.ru_nvcsw,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Some samples, and what reading them took, besides the first, which may import or open something.

    Attributes:
        from_files: bytes read from files.
        from_device: bytes of them that were not in memory.
        faults: pages of mapped files that were not in memory.
        waits: how often this process gave up its core to wait, as for a network.
    """

    samples: list[Any]
    from_files: int
    from_device: int
    faults: int
    waits: int

    def inputs(self) -> list[np.ndarray[Any, Any]]:
        return [array for sample in self.samples if (array := input_of(sample)) is not None]


def origin_of(dataset: Any, look: Look) -> DataOrigin:
    """Find out where the samples of a map-style data set come from, and the native size of its inputs."""
    inputs = look.inputs()
    if not inputs:
        return DataOrigin()
    state, reason = _start_state(dataset, inputs, look)
    native, how = native_shape(inputs)
    return DataOrigin(
        start_state=state,
        state_reason=reason,
        native_shape=native,
        native_reason=how,
        majority=_majority(dataset, look),
        distinct=len({array.tobytes() for array in inputs}) / len(inputs) if inputs[0].size >= 16 else None,
        ragged=len({array.shape for array in inputs}) > 1,
        chosen_from=len(dataset.dataset) if type(dataset) is Subset else None,  # type: ignore[arg-type]
    )


def _majority(dataset: Any, look: Look) -> float | None:
    """Return the share of the most frequent label: of all samples of tensor data, else of those looked at."""
    tensors = tensors_of(dataset)
    if tensors is not None:
        values = tensors[-1].detach().cpu().numpy() if tensors[-1].ndim == 1 else np.empty(0)
    else:
        labels = [_array_of(list(leaves(sample))[-1]) for sample in look.samples]
        whole = all(label is not None and label.ndim == 0 and label.dtype.kind in "iub" for label in labels)
        values = np.asarray([label for label in labels if label is not None]) if whole else np.empty(0)
    if values.size == 0 or values.dtype.kind not in "iub":
        return None
    _, counts = np.unique(values, return_counts=True)
    return float(counts.max() / values.size) if 1 < len(counts) <= values.size / 4 else None


def input_of(sample: Any) -> np.ndarray[Any, Any] | None:
    """Return the largest array of a sample, of equals that with most values; None if it holds none."""
    arrays = arrays_of(sample)
    largest = [array for array in arrays if array.ndim and array.size == max(other.size for other in arrays)]
    return max(largest, key=lambda array: len(np.unique(array)) if len(largest) > 1 else 0) if largest else None


def arrays_of(sample: Any) -> list[np.ndarray[Any, Any]]:
    """Return the values of all tensors, arrays and numbers of a sample."""
    return [array for leaf in leaves(sample) if (array := _array_of(leaf)) is not None]


def _array_of(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Return the values of a tensor, an array or a number; None for anything else."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_complex() or leaf.is_quantized:
            return None
        plain = leaf.detach().cpu()
        try:
            return (plain.float() if plain.dtype.itemsize <= 2 and plain.is_floating_point() else plain).numpy()
        except (RuntimeError, TypeError):  # a subclass whose values are elsewhere
            return None
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float):
        array = np.asarray(leaf)
        return array if array.dtype.kind in "biuf" else None
    return None


def _file_traffic() -> tuple[int, int]:
    """Return the bytes that this process has read by calls, and from devices; zeros where Linux does not tell."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
        totals = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    except (OSError, ValueError):
        return 0, 0
    return totals.get("rchar", 0), totals.get("read_bytes", 0)


def _start_state(dataset: Any, inputs: Sequence[np.ndarray[Any, Any]], reading: Look) -> tuple[StartState | None, str]:
    distribution = random_distribution(inputs)
    if distribution:
        return "generated", f"{len(inputs)} inputs {LIKE_RANDOM} {distribution}"
    if _same_for_every_index(dataset):
        return "generated", "with equal seeds, samples of different indices are equal: they are drawn, not read"
    sample_nbytes = float(np.mean([array.nbytes for array in inputs]))
    mapped = _MappedFiles()
    held, in_files = _held_nbytes(dataset, mapped)
    if held >= 0.9 * len(dataset) * sample_nbytes:
        return "ram", "the data set holds its samples in memory"
    read = reading.from_files / len(inputs)
    if in_files >= sample_nbytes or read >= max(16.0, sample_nbytes / 50):
        cold = 2 * reading.from_device >= reading.from_files > 0 or reading.faults >= len(inputs) / 4
        how = "a file that is mapped into memory" if in_files >= sample_nbytes else "files"
        return ("disk-cold" if cold else "disk-warm"), f"reading {len(inputs)} samples read {how}"
    if held >= min(len(dataset), 200) * sample_nbytes / 30:
        return "ram", "the data set holds its samples in memory, and reading them reads no file"
    if reading.waits < len(inputs) / 4 and not mapped.large:
        return "ram", "reading samples reads no file: they are computed, or held where this cannot be seen"
    return None, ""


def _same_for_every_index(dataset: Any) -> bool:
    """Return whether samples of different indices are equal under equal seeds, and differ under others."""
    count = len(dataset)
    if count < 3 or draws_nothing(dataset):
        return False

    def drawn(index: int, seed: int) -> np.ndarray[Any, Any] | None:
        seed_everything(seed)
        return input_of(dataset[index])

    with preserved_generators():
        first, second, third = drawn(0, 1), drawn(count // 2, 1), drawn(0, 2)
    if first is None or second is None or third is None:
        return False
    return np.array_equal(first, second) and not np.array_equal(first, third)


class _MappedFiles:
    """Address ranges of this process that are files of data, not of programs."""

    _PROGRAMS = (".so", ".py", "locale", "gconv", "/dev/", "memfd:", "[", "(deleted)", "/lib/", "/bin/")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or any(part in fields[5] for part in self._PROGRAMS):
                continue
            start, _, end = fields[0].partition("-")
            self._starts.append(int(start, 16))
            self._ends.append(int(end, 16))

    @property
    def large(self) -> bool:
        """Whether files of a megabyte or more are mapped."""
        return sum(end - start for start, end in zip(self._starts, self._ends, strict=True)) >= 1 << 20

    def holds(self, address: int) -> bool:
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]


def _held_nbytes(value: Any, mapped: _MappedFiles, *, depth: int = 6) -> tuple[float, float]:
    """Return the bytes of arrays, texts and bytes that an object holds: in memory, and in mapped files."""
    seen: set[int] = set()

    def walk(item: Any, depth: int) -> tuple[float, float]:
        if id(item) in seen or depth < 0 or isinstance(item, torch.nn.Module):
            return 0.0, 0.0
        seen.add(id(item))
        address, nbytes = _memory_of(item)
        if nbytes is not None:
            return (0.0, float(nbytes)) if address is not None and mapped.holds(address) else (float(nbytes), 0.0)
        parts = contents(item) or []
        looked = parts[:1000]
        pairs = [walk(part, depth - 1) for _, part in looked]
        scale = len(parts) / len(looked) if looked else 0.0
        return scale * sum(pair[0] for pair in pairs), scale * sum(pair[1] for pair in pairs)

    return walk(value, depth)


def _memory_of(item: Any) -> tuple[int | None, int | None]:
    """Return the address and bytes of what holds values itself; (None, None) for containers."""
    if isinstance(item, torch.Tensor):
        return (item.data_ptr(), item.nbytes) if item.layout is torch.strided else (None, 0)
    if isinstance(item, np.ndarray):
        return item.ctypes.data, item.nbytes
    if isinstance(item, str | bytes | bytearray):
        return None, len(item)
    if isinstance(item, int | float | np.generic):
        return None, 8
    size = getattr(item, "nbytes", None)  # tables of Arrow
    if isinstance(size, int):
        return None, size
    usage = getattr(item, "memory_usage", None)  # data frames of pandas
    if callable(usage) and hasattr(item, "columns"):
        return None, int(usage(deep=False).sum())
    tobytes, shape = getattr(item, "tobytes", None), getattr(item, "size", None)  # images of Pillow
    if callable(tobytes) and isinstance(shape, tuple):
        return None, math.prod(shape) * len(getattr(item, "getbands", lambda: "L")())
    return None, None


# Random numbers


def random_distribution(inputs: Sequence[np.ndarray[Any, Any]]) -> str:
    """Return the name of the distribution that the values cannot be told from; empty for other values.

    Compares the values with normal and uniform numbers by the Kolmogorov-Smirnov distance, and neighbours with each
    other. Measured data of a thousand values and more is neither.
    """
    pooled = np.concatenate([array.reshape(-1) for array in inputs])[:_MOST_VALUES]
    count = pooled.size
    if count < _FEWEST_VALUES or not np.all(np.isfinite(pooled)):
        return ""
    values = pooled.astype(np.float64)
    centred = values - values.mean()
    spread = values.std()
    if spread == 0 or abs(float(np.mean(centred[1:] * centred[:-1])) / spread**2) > 5 / math.sqrt(count):
        return ""
    ordered = np.sort(values)
    low, high = ordered[0], ordered[-1]
    if pooled.dtype.kind in "iub":
        steps = high - low + 1
        even = (ordered - low + 0.5) / steps
        return "uniform random integers" if steps >= 16 and _distance(even, 0.5 / steps) < _UNIFORM else ""
    if _distance((ordered - low) / (high - low)) < _UNIFORM:
        return "uniform random numbers"
    normal = 0.5 * (1 + torch.erf(torch.from_numpy((ordered - values.mean()) / (spread * math.sqrt(2))))).numpy()
    return "normal random numbers" if _distance(normal) < _NORMAL else ""


def _distance(distribution: np.ndarray[Any, Any], slack: float = 0.0) -> float:
    """Return the largest distance between sorted values' distribution and their ranks, times the root of their count.

    `slack` is half of the probability of one value, for discrete distributions.
    """
    count = distribution.size
    ranks = (np.arange(count) + 0.5) / count
    if slack:  # equal values share the mean of their ranks
        _, places, repeats = np.unique(distribution, return_inverse=True, return_counts=True)
        ends = np.cumsum(repeats)
        ranks = ((ends - repeats / 2) / count)[places]
    return float(np.max(np.abs(distribution - ranks))) * math.sqrt(count)


# Native size


def native_shape(inputs: Sequence[np.ndarray[Any, Any]]) -> tuple[tuple[int, ...] | None, str]:
    """Return the shape that inputs had before they were enlarged or padded, and how that was seen.

    Rows of an enlarged image are combinations of fewer source pixels, so the covariance of their columns has that rank:
    its eigenvalues break off. Any linear interpolation by any factor shows this, and no photograph does. Padding is
    what every sample ends with, or a border that is equal in all samples.

    Returns:
        (shape, reason): the first input's own shape and an empty reason where nothing was enlarged, as where shapes
        differ; (None, "") if the inputs are too few to tell.
    """
    shapes = {array.shape for array in inputs}
    if len(inputs) < 8:
        return None, ""
    if len(shapes) > 1:
        return inputs[0].shape, ""
    shape = next(iter(shapes))
    stack = np.stack([np.asarray(array) for array in inputs])
    if stack.dtype.kind in "iub" and len(shape) == 1:
        return _without_padding(stack)
    if len(shape) < 2 or max(shape[-2:]) < 8 or stack.dtype.kind == "b" or not np.all(np.isfinite(stack)):
        return shape, ""
    native, reasons = list(shape), []
    for axis in range(-2 if len(shape) < 4 else -3, 0):
        moved = np.moveaxis(stack, axis, -1).reshape(-1, shape[axis]).astype(np.float64)
        used = np.flatnonzero(moved.std(axis=0) > 0)
        if used.size == 0:
            return None, ""
        span = int(used[-1] - used[0] + 1)
        rank = _rank_before_gap(moved[:, used]) if used.size == span else None
        native[axis] = span if rank is None else rank
        if span < shape[axis]:
            reasons.append(FRAMED)
        if rank is not None:
            reasons.append("they were interpolated from fewer pixels")
    if math.prod(native) * 2 > math.prod(shape):
        return shape, ""
    return tuple(native), " and ".join(dict.fromkeys(reasons))


def _rank_before_gap(rows: np.ndarray[Any, Any]) -> int | None:
    """Return the number of source columns that all columns are combinations of; None if there are no fewer.

    Args:
        rows: (observations, columns).
    """
    columns = rows.shape[1]
    if rows.shape[0] < 4 * columns or columns < 2 * _FEWEST_BLOCKS:
        return None
    rows = rows[:: max(1, rows.shape[0] // (16 * columns))]
    eigenvalues = np.linalg.eigvalsh(np.cov(rows, rowvar=False))[::-1]
    floor = max(float(eigenvalues[0]), 1e-300) * 1e-12
    eigenvalues = np.maximum(eigenvalues, floor)
    ratios = eigenvalues[:-1] / eigenvalues[1:]
    candidates = np.arange(1, columns)  # rank if the gap lies after so many eigenvalues
    allowed = (candidates >= _FEWEST_BLOCKS) & (candidates <= 0.75 * columns)
    if not allowed.any():
        return None
    place = int(candidates[allowed][np.argmax(ratios[allowed])])
    beside = [*ratios[max(1, place - 4) : place - 1], *ratios[place : place + 3]]
    steep = all(ratios[place - 1] >= _STEEP * ratio for ratio in beside)
    return place if ratios[place - 1] >= _GAP and steep else None


def _without_padding(tokens: np.ndarray[Any, Any]) -> tuple[tuple[int, ...], str]:
    """Return the mean length of sequences without the value that they end with, and whether most of them is that.

    Args:
        tokens: (samples, length).
    """
    length = tokens.shape[1]
    differs = tokens != tokens[:, -1:]
    lengths = np.where(differs.any(axis=1), length - np.argmax(differs[:, ::-1], axis=1), 1)
    padded = np.count_nonzero(lengths < length - 1)
    mean = max(1, round(float(lengths.mean())))
    if length < 16 or padded < 0.8 * len(tokens) or 2 * mean > length or len(np.unique(tokens[:, -1])) > 1:
        return (length,), ""
    return (mean,), f"the last {length - mean} of {length} tokens are padding, on average"
