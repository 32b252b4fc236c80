"""A tape: what a constructor does to tensors without memory, operation by operation, in order.

torch's dispatcher shows every operation, whatever Python called it, so the constructor may be anything: own
initialisation, `apply`, tied weights, buffers. Tensors are known by their storage, and views by their place in it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.errors import RankMismatchError, ScriptError

_FILLS = frozenset(
    {
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "zero_",
        "fill_",
        "copy_",
    }
)
"""Operations that write all of a tensor without reading it."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor: its place in storage number `storage`."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def extent(self) -> tuple[int, int]:
        """Bytes from first to last, as (start, stop)."""
        start = self.offset * self.dtype.itemsize
        if 0 in self.size:
            return start, start
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return start, start + span * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether it has every byte of its extent."""
        start, stop = self.extent
        return torch.Size(self.size).numel() * self.dtype.itemsize == stop - start


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """`arguments`: (args, kwargs) with Refs for tensors; `outputs`: of new storages, None for other results; `writes`,
    `reads`: of storages that were there; `fills`: of the writes, those that leave nothing of what was there.
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: tuple[Ref | None, ...]
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    fills: tuple[Ref, ...]
    random: bool


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on tensors without memory while it is entered; it may be entered several times.

    `sizes[storage]`: bytes; `generator`: the state of torch's generator on the CPU when recording began.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.generator = torch.get_rng_state()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {self._number(tensor) for tensor in before if tensor.is_meta}
        shown = pytree.tree_map(_without_memory, (tuple(args), kwargs)) if known else (args, kwargs)
        result = func(*shown[0], **shown[1])
        random = torch.Tag.nondeterministic_seeded in func.tags
        leaves = pytree.tree_leaves(result)
        if random and any(isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in [*leaves, *before]):
            raise ScriptError(
                f"job.build: the constructor draws random numbers on a device of its own ({func}); leave out device=, "
                "or build the model without job.build"
            )
        if known or any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            self._record(func, tuple(args), kwargs, leaves, known, random)
        return result

    def record_whole(self, function: Any, tensor: torch.Tensor, rest: tuple[Any, ...]) -> None:
        """Record `function(tensor, *rest)`, which fills the tensor with random numbers, as one operation."""
        ref = self.ref(tensor)
        reads, fills = ((), (ref,)) if ref.dense else ((ref,), ())
        self.operations.append(Operation(function, ((ref, *rest), {}), (None,), reads, (ref,), fills, True))

    @property
    def digest(self) -> str:
        """Of the state that torch's generator had: equal where values will be."""
        return hashlib.sha256(self.generator.numpy().tobytes()).hexdigest()

    def check_same(self, digests: Sequence[str]) -> None:
        """Raises RankMismatchError where ranks' generators differed."""
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RankMismatchError(
                    f"before job.build, torch's generator on rank {rank} was not in rank 0's state, so that initial "
                    "values would differ; seed all ranks alike (Job(seed=...) does) and draw the same numbers on each"
                )

    def ref(self, tensor: torch.Tensor) -> Ref:
        """A tensor without memory, as the tape knows it."""
        number = self._number(tensor)
        return Ref(number, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], known: set[int], random: bool
    ) -> None:
        changed = [
            tensor
            for argument, value in _named(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value)
            if isinstance(tensor, torch.Tensor)
        ]
        if not all(tensor.is_meta for tensor in changed):
            raise ScriptError(
                f"job.build: the constructor writes values that are not there yet into a tensor of its own ({func}); "
                "make that tensor by torch.empty, or build the model without job.build"
            )
        written = [self.ref(tensor) for tensor in changed]
        outputs = tuple(
            self.ref(leaf)
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and self._number(leaf) not in known
            else None
            for leaf in leaves
        )
        if not written and not any(outputs):
            return  # a view, or a question
        name = func._schema.name.rpartition("::")[2]
        fills = tuple(ref for ref in written if name in _FILLS and ref.dense)
        frozen = pytree.tree_map(self._freeze, (args, dict(kwargs)))
        touched = [leaf for leaf in pytree.tree_leaves(frozen) if isinstance(leaf, Ref)]
        reads = tuple(ref for ref in touched if ref not in fills)
        self.operations.append(Operation(func, frozen, outputs, reads, tuple(written), fills, random))

    def _freeze(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.ref(leaf) if leaf.is_meta else leaf.detach().clone()
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(storage.nbytes())
            self._alive.append(storage)  # so that its address is not used again
        return number


def _without_memory(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Every argument with its declaration."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((one, kwargs[one.name]) for one in declared[len(args) :] if one.name in kwargs)
