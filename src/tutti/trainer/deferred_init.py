"""Deferred initialisation (`job.build`): a model is built without memory; its values are computed once it is divided.

A tape records, in order, every operation that the constructor runs on tensors without memory. torch's dispatcher sees
all of them, whatever Python code called them, so the constructor may do anything: custom initialisation, `apply`, tied
weights, buffers. A tensor is identified by its storage, and a view by its position in that storage. `replay` runs the
operations that the tensors of this rank depend on; random numbers are drawn in the recorded order.
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
"""Operations that overwrite a whole tensor without reading it."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor on the tape: its position in storage number `storage`.

    `offset` and `stride` count elements, as in torch.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the storage from the tensor's first to its last, as (start, stop)."""
        start = self.offset * self.dtype.itemsize
        if 0 in self.size:
            return start, start
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return start, start + span * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the tensor occupies every byte of its extent."""
        start, stop = self.extent
        return torch.Size(self.size).numel() * self.dtype.itemsize == stop - start


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One recorded operation.

    Attributes:
        function: what was called.
        arguments: (args, kwargs) with a TensorRef in place of each tensor without memory.
        outputs: one entry for each result: its TensorRef if the operation made its storage, else None.
        reads: tensors whose previous content the result may depend on.
        writes: existing tensors that are changed in place.
        fills: the writes that overwrite the whole tensor.
        random: whether it draws random numbers.
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: tuple[TensorRef | None, ...]
    reads: tuple[TensorRef, ...]
    writes: tuple[TensorRef, ...]
    fills: tuple[TensorRef, ...]
    random: bool


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations on tensors without memory while it is entered. It may be entered several times.

    Attributes:
        operations: what was recorded, in order.
        sizes: bytes of each storage, by its number.
        values: storages that had memory before, by their number; see `set_values_aside`.
        generator: state of torch's CPU generator when the tape was made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self.values: dict[int, torch.UntypedStorage] = {}
        self.generator = torch.get_rng_state()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {self._number(tensor) for tensor in before if tensor.is_meta}
        called_with = pytree.tree_map(_to_meta, (tuple(args), kwargs)) if known else (args, kwargs)
        result = func(*called_with[0], **called_with[1])
        random = torch.Tag.nondeterministic_seeded in func.tags
        leaves = pytree.tree_leaves(result)
        if random and any(isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in [*leaves, *before]):
            raise ScriptError(
                f"job.build: the constructor draws random numbers on an explicit device ({func}); leave out device=, "
                "or build the model without job.build"
            )
        if known or any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
            self._record(func, tuple(args), kwargs, leaves, known, random)
        return result

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory in place of one with memory, whose values the tape knows."""
        storage = tensor.untyped_storage()
        known = next((n for n, value in self.values.items() if value._cdata == storage._cdata), None)
        if known is None:
            alive = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        else:
            alive = self._alive[known]
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        twin = empty.set_(alive, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.values[self._number(twin)] = storage
        return twin

    def record_whole(self, function: Any, tensor: torch.Tensor, rest: tuple[Any, ...]) -> None:
        """Record `function(tensor, *rest)`, which fills the tensor with random numbers, as one operation."""
        ref = self.ref(tensor)
        reads, fills = ((), (ref,)) if ref.dense else ((ref,), ())
        self.operations.append(Operation(function, ((ref, *rest), {}), (None,), reads, (ref,), fills, True))

    @property
    def digest(self) -> str:
        """SHA-256 of the generator's initial state. Ranks with equal digests compute equal initial values."""
        return hashlib.sha256(self.generator.numpy().tobytes()).hexdigest()

    def check_same(self, digests: Sequence[str]) -> None:
        """Raise RankMismatchError if ranks' generators differed when their tapes were made.

        Args:
            digests: the `digest` of every rank's tape, by rank.
        """
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RankMismatchError(
                    f"before job.build, the state of torch's generator on rank {rank} differed from rank 0's, so "
                    "initial values would differ; seed all ranks alike (Job(seed=...) does) and draw the same numbers "
                    "on each"
                )

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """Return the reference to a tensor without memory; a storage that is new to the tape gets a number."""
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
                f"job.build: the constructor writes values that are not computed yet into a tensor with memory "
                f"({func}); create that tensor with torch.empty, or build the model without job.build"
            )
        written = [self.ref(tensor) for tensor in changed]
        outputs = tuple(
            self.ref(leaf)
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and self._number(leaf) not in known
            else None
            for leaf in leaves
        )
        if not written and not any(outputs):
            return  # a view, or a query that changes no values
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
            self._alive.append(storage)  # keeps the address, which identifies the storage, from being reused
        return number


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf


def _arguments_with_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (declaration, value) for every argument of a call."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in declared[len(args) :] if argument.name in kwargs)


_FACTORIES = {
    *(torch.empty, torch.empty_permuted, torch.empty_strided, torch.zeros, torch.ones, torch.full),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
_INITIALISERS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class MetaTensorMode(TorchFunctionMode):
    """While entered, creates new tensors without memory, whoever calls the factory.

    Initialisers that compute with values (`_INITIALISERS`) are recorded on `tape` as one operation each.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        known = [getattr(nn.init, name) for name in _INITIALISERS if hasattr(nn.init, name)]
        self._functions: dict[CodeType, Any] = {function.__code__: function for function in known}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sampled = func is torch.normal and not any(isinstance(argument, torch.Tensor) for argument in args)
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
    """Compute the storages of `wanted`, on the CPU, as the constructor would have filled them.

    torch's generator is left as it was.

    Args:
        tape: the tape that recorded the constructor.
        wanted: tensors without memory that the tape knows.

    Returns:
        Storages by their number on the tape.

    Raises:
        ScriptError: nothing on the tape computes the content of a wanted tensor.
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
    """Return the tensor that `ref` describes as a view of `storage`, which has memory."""
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


class _Replay:
    """Runs the operations that the target storages depend on, and frees each other storage after its last use.

    Random operations run in the recorded order, also those that no target needs, so that each draws the same numbers as
    in the constructor. Every other operation runs once the last random operation that it depends on has run.

    Attributes:
        needed: indices of the operations that the targets depend on.
        before: for each of these, the operations that must run first.
        after: for each random operation (-1: none), the needed operations that may run once it has run.
        uses: for each storage, the needed operations that are still to use it.
        memory: the storages that have memory now.
        written: storages whose content the tape computes.
        done: operations that have run.
    """

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
        self.memory: dict[int, torch.UntypedStorage] = dict(tape.values)
        self.written = {
            ref.storage for operation in tape.operations for ref in (*operation.writes, *operation.outputs) if ref
        }
        self.done: set[int] = set()

    def run(self) -> dict[int, torch.UntypedStorage]:
        """Run the operations and return the target storages by number."""
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
        """Run an operation after all that it depends on."""
        stack = [index]
        while stack:
            top = stack[-1]
            missing = [dependency for dependency in self.before[top] if dependency not in self.done]
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
        """Keep the storage of a new result if it has the recorded layout, else copy the result into that layout."""
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
                    "job.build: the constructor creates a tensor by an operation that cannot be repeated later, such "
                    "as a custom extension; build the model without job.build"
                )
            self.memory[storage] = _allocate(self.tape.sizes[storage])

    def _scratch(self, ref: TensorRef) -> torch.Tensor:
        """Return a throw-away copy, for random operations whose numbers nobody needs."""
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
    """Return the indices of the operations that the content of the target storages depends on, in order."""
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
    """Find the order in which needed operations must run.

    Returns:
        For each needed operation, the operations that must run before it; and the last random operation among itself
        and all that it depends on (-1: none).
    """
    touched: dict[int, list[tuple[tuple[int, int], bool, int]]] = {}
    before: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for index in needed:
        operation = operations[index]
        made = [(ref, True) for ref in operation.outputs if ref is not None]
        uses = [*made, *((ref, True) for ref in operation.writes), *((ref, False) for ref in operation.reads)]
        earlier: dict[int, None] = {}
        for ref, writes in uses:
            start, stop = ref.extent
            for (low, high), wrote, other in touched.get(ref.storage, ()):
                if (writes or wrote) and low < stop and start < high:
                    earlier[other] = None
        for ref, writes in uses:
            touched.setdefault(ref.storage, []).append((ref.extent, writes, index))
        before[index] = list(earlier)
        random_index = index if operation.random else -1
        last[index] = max([random_index, *(last[other] for other in earlier)])
    return before, last


BUILD_REMEDY = "build the model without job.build, or leave that out of its constructor"


def build_with_memory(function: Callable[[], nn.Module]) -> nn.Module:
    """Build the model with memory. torch's generators are left as they were, as `build_on_meta` leaves them."""
    with preserved_generators():
        return function()


def build_on_meta(function: Callable[[], nn.Module]) -> tuple[nn.Module, Tape]:
    """Build the model without memory, and record how it was made.

    Args:
        function: builds the model.

    Returns:
        The model, whose tensors have no memory, and the tape.

    Raises:
        ScriptError: the constructor reads values or seeds generators, for which it would need memory.
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
            f"job.build: the constructor reads values, which are not computed yet ({reason}); {BUILD_REMEDY}"
        ) from error
    if seeded:
        raise ScriptError(
            "job.build: the constructor seeds torch's generator, so its initial values would not follow the Job's "
            f"seed; {BUILD_REMEDY}"
        )
    return model, tape


Originals = dict[int, torch.Tensor]
"""id of a tensor without memory -> the tensor of the script that it stands for."""


def set_values_aside(model: nn.Module) -> tuple[Tape, Originals]:
    """Replace the parameters and buffers of a model by tensors without memory, so that dividing it moves no values.

    `materialize` then gives a device this rank's part only, never the whole model.

    Returns:
        A tape that knows the values, and the tensors that were replaced, which `materialize` needs.
    """
    tape = Tape()
    twins: dict[int, torch.Tensor] = {}
    originals: Originals = {}
    for (module, kind, key), tensor in _module_tensors(model).items():
        if kind == "__dict__":
            continue
        twin = twins.get(id(tensor))
        if twin is None:
            twin = twins[id(tensor)] = _like(tensor, tape.twin(tensor.detach()))
            originals[id(twin)] = tensor
        _assign_tensor(module, kind, key, twin)
    return tape, originals


def materialize(
    model: nn.Module, tape: Tape, device: torch.device, shards: Shards, originals: Originals | None = None
) -> None:
    """Give this rank's part of the model memory on `device`, with the values that one device would have computed.

    Args:
        model: a model from `build_on_meta` or after `set_values_aside`, divided among ranks.
        tape: the tape of its constructor, or the one that knows its values.
        device: the rank's device.
        shards: the parameters that are sharded over ranks.
        originals: from `set_values_aside`. Parameters that are whole here are the script's own again.
    """
    wanted = [tensor for tensor in _module_tensors(model).values() if tensor.is_meta]
    storages = replay(tape, [*wanted, *shards.memory()])

    def real(tensor: torch.Tensor) -> torch.Tensor:
        ref = tape.ref(tensor)
        return tensor_in_storage(ref, storages[ref.storage])

    shards.materialise(real, device)
    made: dict[int, torch.Tensor] = {}
    for (module, kind, key), tensor in _module_tensors(model).items():
        if originals is not None and not tensor.is_meta:
            continue
        new = made.get(id(tensor))
        if new is None:
            new = (real(tensor) if tensor.is_meta else tensor).to(device)
            original = None if originals is None else originals.get(id(tensor))
            if isinstance(original, nn.Parameter):
                original.data, new = new, original
            else:
                new = _like(tensor, new)
            made[id(tensor)] = new
        _assign_tensor(module, kind, key, new)


def _module_tensors(model: nn.Module) -> "dict[tuple[nn.Module, str, str], torch.Tensor]":
    """Return the tensors among parameters, buffers and plain attributes, by (module, kind, name)."""
    tensors: dict[tuple[nn.Module, str, str], torch.Tensor] = {}
    for module in model.modules():
        for kind in ("_parameters", "_buffers", "__dict__"):
            for key, value in vars(module).get(kind, {}).items() if kind != "__dict__" else vars(module).items():
                if isinstance(value, torch.Tensor):
                    tensors[module, kind, key] = value
    return tensors


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` as a parameter with the attributes of `old`, if `old` is a parameter."""
    if not isinstance(old, nn.Parameter) or new is old:
        return new
    parameter = nn.Parameter(new.detach(), requires_grad=old.requires_grad)
    parameter.__dict__.update(old.__dict__)
    return parameter


def _assign_tensor(module: nn.Module, kind: str, key: str, tensor: Any) -> None:
    if kind == "_parameters" and type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, key, tensor)  # the module keeps its own list of weights, as nn.RNN does
    elif kind == "__dict__":
        vars(module)[key] = tensor
    else:
        vars(module)[kind][key] = tensor
