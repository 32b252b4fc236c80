"""A tape: what a constructor does to tensors without memory, operation by operation, in order.

torch's dispatcher shows every operation, whatever Python called it, so the constructor may be anything: own
initialisation, `apply`, tied weights, buffers. Tensors are known by their storage, and views by their place in it.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.data.seeds import preserved_generators
from tutti.errors import RankMismatchError, ScriptError
from tutti.parallel.sharding.sharded_gradients import Shards

_FILL_OPERATIONS = frozenset(
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
class TensorRef:
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
    outputs: tuple[TensorRef | None, ...]
    reads: tuple[TensorRef, ...]
    writes: tuple[TensorRef, ...]
    fills: tuple[TensorRef, ...]
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
        shown = pytree.tree_map(_to_meta, (tuple(args), kwargs)) if known else (args, kwargs)
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

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """A tensor without memory, as the tape knows it."""
        number = self._number(tensor)
        return TensorRef(number, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], known: set[int], random: bool
    ) -> None:
        changed = [
            tensor
            for argument, value in _arguments_with_schema(func, args, kwargs)
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
        fills = tuple(ref for ref in written if name in _FILL_OPERATIONS and ref.dense)
        frozen = pytree.tree_map(self._freeze, (args, dict(kwargs)))
        touched = [leaf for leaf in pytree.tree_leaves(frozen) if isinstance(leaf, TensorRef)]
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


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf


def _arguments_with_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Every argument with its declaration."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((one, kwargs[one.name]) for one in declared[len(args) :] if one.name in kwargs)


_FACTORIES = {
    *(torch.empty, torch.empty_permuted, torch.empty_strided, torch.zeros, torch.ones, torch.full),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
_INITIALISERS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class MetaTensorMode(TorchFunctionMode):
    """While entered, makes new tensors without memory, and puts those initialisers on `tape`, whoever calls them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        known = [getattr(nn.init, name) for name in _INITIALISERS if hasattr(nn.init, name)]
        self._functions: dict[CodeType, Any] = {function.__code__: function for function in known}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sampled = func is torch.normal and not any(isinstance(one, torch.Tensor) for one in args)
        if (func in _FACTORIES or sampled) and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": "meta"})
        result = func(*args, **kwargs)
        if func == _IS_META and result:
            caller = sys._getframe(1)
            function = self._functions.get(caller.f_code)
            if function is not None:
                names = list(inspect.signature(function).parameters)
                self._tape.record_whole(function, args[0], tuple(caller.f_locals[name] for name in names[1:]))
        return result


def replay(tape: Tape, wanted: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages on the CPU, by their number on the tape, of the `wanted` tensors without memory.

    torch's generator is left as it was.
    """
    targets = {tape.ref(tensor).storage for tensor in wanted}
    before = torch.get_rng_state()
    torch.set_rng_state(tape.generator)
    try:
        with torch.no_grad():
            return _Replay(tape, targets).run()
    finally:
        torch.set_rng_state(before)


def tensor_in_storage(ref: TensorRef, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor at a place in a storage with memory."""
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


class _Replay:
    def __init__(self, tape: Tape, targets: set[int]) -> None:
        self.tape, self.targets = tape, targets
        self.needed = _needed(tape.operations, tape.sizes, targets)
        self.before, last = _dependencies(tape.operations, self.needed)
        self.after: dict[int, list[int]] = {}
        for index in self.needed:
            self.after.setdefault(last[index], []).append(index)
        self.uses: dict[int, int] = {}
        for index in self.needed:
            for storage in _storages(tape.operations[index]):
                self.uses[storage] = self.uses.get(storage, 0) + 1
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.written = {ref.storage for one in tape.operations for ref in (*one.writes, *one.outputs) if ref}
        self.done: set[int] = set()

    def run(self) -> dict[int, torch.UntypedStorage]:
        for index, operation in enumerate(self.tape.operations):
            if not operation.random:
                continue
            if index in self.needed:
                self._demand(index)
            else:
                _run_operation(operation, self._scratch)
            for follower in self.after.get(index, ()):
                self._demand(follower)
        for follower in self.after.get(-1, ()):
            self._demand(follower)
        for storage in self.targets:
            self._bind(storage)
        return {storage: self.memory[storage] for storage in self.targets}

    def _demand(self, index: int) -> None:
        """Run an operation after all it depends on."""
        stack = [index]
        while stack:
            top = stack[-1]
            missing = [one for one in self.before[top] if one not in self.done]
            if top in self.done or not missing:
                stack.pop()
                if top not in self.done:
                    self._execute(top)
            else:
                stack += missing[::-1]

    def _execute(self, index: int) -> None:
        operation = self.tape.operations[index]
        results = pytree.tree_leaves(_run_operation(operation, self._tensor))
        for ref, result in zip(operation.outputs, results, strict=True):
            if ref is not None:
                self._keep(ref, result)
        self.done.add(index)
        for storage in _storages(operation):
            self.uses[storage] -= 1
            if not self.uses[storage] and storage not in self.targets:
                self.memory.pop(storage, None)

    def _keep(self, ref: TensorRef, result: torch.Tensor) -> None:
        storage = result.untyped_storage()
        same = result.stride() == ref.stride and result.storage_offset() == ref.offset
        if same and storage.nbytes() == self.tape.sizes[ref.storage]:
            self.memory[ref.storage] = storage
        else:
            self._tensor(ref).copy_(result)

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        self._bind(ref.storage)
        return tensor_in_storage(ref, self.memory[ref.storage])

    def _bind(self, storage: int) -> None:
        if storage not in self.memory:
            if storage not in self.written:
                raise ScriptError(
                    "job.build: the constructor makes a tensor in a way that cannot be repeated later, such as an "
                    "extension of its own; build the model without job.build"
                )
            self.memory[storage] = _allocate(self.tape.sizes[storage])

    def _scratch(self, ref: TensorRef) -> torch.Tensor:
        """Somewhere to draw numbers to that nobody wants."""
        known = self.memory.get(ref.storage)
        return (
            tensor_in_storage(ref, _allocate(self.tape.sizes[ref.storage]))
            if known is None
            else tensor_in_storage(ref, known).clone()
        )


def _allocate(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _run_operation(operation: Operation, tensor: Any) -> Any:
    args, kwargs = pytree.tree_map(
        lambda leaf: tensor(leaf) if isinstance(leaf, TensorRef) else leaf, operation.arguments
    )
    return operation.function(*args, **kwargs)


def _storages(operation: Operation) -> set[int]:
    made = {ref.storage for ref in operation.outputs if ref is not None}
    return made | {ref.storage for ref in (*operation.reads, *operation.writes)}


def _needed(operations: list[Operation], sizes: list[int], targets: set[int]) -> list[int]:
    """Indices of the operations on which the content of the target storages depends, in order."""
    live, needed = set(targets), []
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        made = {ref.storage for ref in operation.outputs if ref is not None}
        written = {ref.storage for ref in operation.writes}
        draws_by_content = operation.random and any(ref not in operation.writes for ref in operation.reads)
        if not (live & (made | written)) and not draws_by_content:
            continue
        needed.append(index)
        live -= made
        live -= {ref.storage for ref in operation.fills if ref.extent == (0, sizes[ref.storage])}
        live |= {ref.storage for ref in operation.reads}
    return needed[::-1]


def _dependencies(operations: list[Operation], needed: list[int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Of every needed operation: those that must run before it, and the last random one among all of them (or -1)."""
    touched: dict[int, list[tuple[tuple[int, int], bool, int]]] = {}
    before: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for index in needed:
        operation = operations[index]
        made = [(ref, True) for ref in operation.outputs if ref is not None]
        uses = [*made, *((ref, True) for ref in operation.writes), *((ref, False) for ref in operation.reads)]
        found: dict[int, None] = {}
        for ref, writes in uses:
            start, stop = ref.extent
            for (low, high), wrote, other in touched.get(ref.storage, ()):
                if (writes or wrote) and low < stop and start < high:
                    found[other] = None
        for ref, writes in uses:
            touched.setdefault(ref.storage, []).append((ref.extent, writes, index))
        before[index] = list(found)
        own = index if operation.random else -1
        last[index] = max([own, *(last[other] for other in found)])
    return before, last


BUILD_REMEDY = "build the model without job.build, or leave that out of its constructor"


def build_with_memory(function: Callable[[], nn.Module]) -> nn.Module:
    """The model with memory. torch's generators are left as they were, as they are without memory."""
    with preserved_generators():
        return function()


def build_on_meta(function: Callable[[], nn.Module]) -> tuple[nn.Module, Tape]:
    """The model without memory, and the tape of how it was made.

    Raises ScriptError for a constructor that looks at values or seeds generators, which needs memory.
    """
    tape = Tape()
    try:
        with preserved_generators(), tape, MetaTensorMode(tape):
            model = function()
            seeded = not torch.equal(torch.get_rng_state(), tape.generator)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        reason = str(error).splitlines()[0]
        raise ScriptError(
            f"job.build: the constructor looks at values, which are not there yet ({reason}); {BUILD_REMEDY}"
        ) from error
    if seeded:
        raise ScriptError(
            f"job.build: the constructor seeds torch's generator, so its values are not the Job's; {BUILD_REMEDY}"
        )
    return model, tape


def materialize(model: nn.Module, tape: Tape, device: torch.device, shards: Shards) -> None:
    """Give all that this rank holds of the model memory on `device`, with the values one device would have."""
    wanted = [tensor for tensor in _module_tensors(model).values() if tensor.is_meta]
    storages = replay(tape, [*wanted, *shards.memory()])

    def real(tensor: torch.Tensor) -> torch.Tensor:
        ref = tape.ref(tensor)
        return tensor_in_storage(ref, storages[ref.storage])

    shards.materialise(real, device)
    made: dict[int, torch.Tensor] = {}
    for (module, kind, key), tensor in _module_tensors(model).items():
        new = made.get(id(tensor))
        if new is None:
            new = tensor if not tensor.is_meta else real(tensor)
            new = made[id(tensor)] = _like(tensor, new.to(device))
        _assign_tensor(module, kind, key, new)


def _module_tensors(model: nn.Module) -> "dict[tuple[nn.Module, str, str], torch.Tensor]":
    """Parameters, buffers and plain attributes that are tensors, by (module, kind, name)."""
    found: dict[tuple[nn.Module, str, str], torch.Tensor] = {}
    for module in model.modules():
        for kind in ("_parameters", "_buffers", "__dict__"):
            for key, value in vars(module).get(kind, {}).items() if kind != "__dict__" else vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[module, kind, key] = value
    return found


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if not isinstance(old, nn.Parameter) or new is old:
        return new
    parameter = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _assign_tensor(module: nn.Module, kind: str, key: str, tensor: Any) -> None:
    if kind == "_parameters" and type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, key, tensor)  # an RNN keeps a list of its weights
    elif kind == "__dict__":
        vars(module)[key] = tensor
    else:
        vars(module)[kind][key] = tensor
