"""Replay: the operations of a tape that wanted tensors depend on, with memory; the others only if they are random.

Random operations run in the order of the tape, on the state that torch's generator had, so every tensor gets the
values that an ordinary constructor would have given it. All others run as soon as the last random number they depend
on is drawn, and a tensor's memory is freed after its last use: what is held beside the wanted tensors is about one
parameter, however large the model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tutti.errors import ScriptError
from tutti.trainer.deferred.tape import Operation, Ref, Tape


def replay(tape: Tape, wanted: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages on the CPU, by their number on the tape, of the `wanted` tensors without memory.

    torch's generator is left as it was.
    """
    targets = {tape.ref(tensor).storage for tensor in wanted}
    before = torch.get_rng_state()
    torch.set_rng_state(tape.generator)
    try:
        with torch.no_grad():
            return _Run(tape, targets).run()
    finally:
        torch.set_rng_state(before)


def bound(ref: Ref, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor at a place in a storage with memory."""
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


class _Run:
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
                _call(operation, self._scratch)
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
        results = pytree.tree_leaves(_call(operation, self._tensor))
        for ref, result in zip(operation.outputs, results, strict=True):
            if ref is not None:
                self._keep(ref, result)
        self.done.add(index)
        for storage in _storages(operation):
            self.uses[storage] -= 1
            if not self.uses[storage] and storage not in self.targets:
                self.memory.pop(storage, None)

    def _keep(self, ref: Ref, result: torch.Tensor) -> None:
        storage = result.untyped_storage()
        same = result.stride() == ref.stride and result.storage_offset() == ref.offset
        if same and storage.nbytes() == self.tape.sizes[ref.storage]:
            self.memory[ref.storage] = storage
        else:
            self._tensor(ref).copy_(result)

    def _tensor(self, ref: Ref) -> torch.Tensor:
        self._bind(ref.storage)
        return bound(ref, self.memory[ref.storage])

    def _bind(self, storage: int) -> None:
        if storage not in self.memory:
            if storage not in self.written:
                raise ScriptError(
                    "job.build: the constructor makes a tensor in a way that cannot be repeated later, such as an "
                    "extension of its own; build the model without job.build"
                )
            self.memory[storage] = _memory(self.tape.sizes[storage])

    def _scratch(self, ref: Ref) -> torch.Tensor:
        """Somewhere to draw numbers to that nobody wants."""
        known = self.memory.get(ref.storage)
        return bound(ref, _memory(self.tape.sizes[ref.storage])) if known is None else bound(ref, known).clone()


def _memory(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def _call(operation: Operation, tensor: Any) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: tensor(leaf) if isinstance(leaf, Ref) else leaf, operation.arguments)
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
