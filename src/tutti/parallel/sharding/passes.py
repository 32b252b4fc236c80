"""Passes: when units are gathered and freed, in one order on all ranks.

A forward pass begins where a module is called from outside. It gathers the units under that module in a fixed order,
each before its block runs and the next one ahead of time; a unit that this rank's computation skips is gathered too,
in its turn, because other ranks may need it. Backward goes through the same units in reverse. So ranks that take
different branches (layer drop) stay in step, and gathers never mix.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from tutti.comm.traffic import untracked_channel
from tutti.errors import ScriptError
from tutti.parallel.sharding.exchange import Party
from tutti.parallel.sharding.unit import Unit


@dataclass(slots=True, eq=False)
class Call:
    """One way through `units`, in the order of gathering, of which `next` have had their turn. `hold`: of a forward
    with gradients; `done`: units gathered in this pass, which may be on several ways.
    """

    units: list[Unit]
    hold: bool
    done: set[Unit] = field(default_factory=set)
    next: int = 0
    depth: int = 0


class Passes:
    """Hooks on a model's modules that gather units while they compute.

    `units[0]` is what lies outside of blocks; it stays from forward to backward. `keep`: so do all others (level 2);
    else each is freed after its block's forward and gathered again for backward (level 3). `complete` is called with
    every unit whose gradients one backward has computed. `sent_nbytes` grows by what this rank sends.
    """

    def __init__(self, model: nn.Module, units: list[Unit], blocks: Mapping[nn.Module, Unit], *, keep: bool):
        self.units, self.keep, self.party = units, keep, Party(None, untracked_channel())
        self.sent_nbytes = 0
        self.complete: Callable[[Unit], None] | None = None
        self._seen: dict[Unit, None] = {}
        self._call: Call | None = None
        self._backward: dict[Call, Call] | None = None
        self._under = _under(model, units, blocks)
        self._blocks = blocks
        for module in self._under:
            module.register_forward_pre_hook(self._enter, prepend=True)
            module.register_forward_hook(self._leave, always_call=True)
        for block, unit in blocks.items():
            for name, inner in block.named_modules():
                if name and any(True for _ in inner.parameters(recurse=False)):
                    inner.register_forward_pre_hook(_Guard(f"{unit.name}.{name}", unit), prepend=True)

    def release(self) -> None:
        """Free all that is gathered: the parameters are about to change."""
        for unit in self.units:
            if unit.whole or unit.launched:
                unit.drop("shard")

    def seen(self) -> list[int]:
        """Positions of the units in the order in which this rank has run them; those it has not run come last."""
        run = [self.units.index(unit) for unit in self._seen]
        return list(dict.fromkeys([0, *run, *range(len(self.units))]))

    def reorder(self, order: list[int], repeats: list[bool]) -> None:
        """From the next pass on gather in this order; `repeats`: units that run several times in one pass."""
        for unit, repeated in zip(self.units, repeats, strict=True):
            unit.repeats = repeated
        place = {self.units[position]: rank for rank, position in reversed(list(enumerate(order)))}
        self.units.sort(key=place.__getitem__)
        for under in self._under.values():
            under.sort(key=place.__getitem__)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._call is None:
            self._call = Call(self._under[module], hold=torch.is_grad_enabled())
            for unit in self._call.units:
                if not unit.whole:
                    unit.show("absent")
        self._call.depth += 1
        for unit in _direct(self._under[module], self._blocks.get(module), self.units[0]):
            unit.entered += 1
            self._seen.setdefault(unit)
            self._need(self._call, unit)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._call
        assert call is not None
        call.depth -= 1
        for unit in _direct(self._under[module], self._blocks.get(module), self.units[0]):
            unit.entered -= 1
            if torch.is_grad_enabled() and (module in self._blocks or not call.depth):
                self._watch(call, unit, output)
            stays = unit.held or unit.repeats or (call.hold and (self.keep or unit is self.units[0]))
            if not unit.entered and not stays:
                unit.drop("absent")
                torch.clear_autocast_cache()  # it would keep the whole weights in lower precision
        if not call.depth:
            self._call = None
            self._close(call, failed=output is None)

    def _need(self, call: Call, unit: Unit) -> None:
        """Let every unit of the call have its turn up to this one, have this one whole, and start the next."""
        again = unit in call.done and not unit.whole and not unit.launched
        self._advance(call, call.units.index(unit) + 1)
        if again:
            unit.repeats = unit.repeats or call is self._call
            self._launch(unit)
        unit.fill(partial(self._arrived, unit))
        self._advance(call, call.next + 1)

    def _advance(self, call: Call, stop: int) -> None:
        """Gather the units whose turn it is, each once a pass: whether it is there already is alike on all ranks."""
        for unit in call.units[call.next : stop]:
            if unit not in call.done:
                call.done.add(unit)
                self._launch(unit)
        call.next = max(call.next, min(stop, len(call.units)))

    def _launch(self, unit: Unit) -> None:
        self.sent_nbytes += unit.launch(self.party)

    def _close(self, call: Call, *, failed: bool) -> None:
        """The outermost module has returned: take part in what is left of the pass, free, remember what stays."""
        if not failed:
            self._advance(call, len(call.units))
        for unit in call.units:
            if unit.held:
                continue
            if call.hold and not failed and (self.keep or unit is self.units[0]):
                unit.fill(partial(self._arrived, unit))
                unit.held = True
            else:
                unit.drop("shard")
        if not call.hold:
            self.party.settle()  # parameters may change before the next pass: at a load, say

    def _watch(self, call: Call, unit: Unit, output: Any) -> None:
        """Have backward gather the unit before it enters the module through `output`."""
        found = list(_tensors(output, 0))
        if output is not None and not found:
            raise ScriptError(
                f"{unit.name or 'the model'!r} returns {type(output).__name__}, in which no tensor is found; return "
                "tensors, or tuples, lists, dicts or dataclasses of them, or use sharding level 1"
            )
        for tensor in found:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before, call, unit))  # type: ignore[no-untyped-call]

    def _before(self, call: Call, unit: Unit, gradient: torch.Tensor) -> None:
        """Backward has reached a module's output."""
        self._open_backward()
        assert self._backward is not None
        if call not in self._backward:
            first = [one for one in call.units if one is self.units[0]]
            rest = [one for one in call.units[::-1] if one is not self.units[0]]
            done = next((way.done for way in self._backward.values()), set())
            self._backward[call] = Call([*first, *rest], hold=True, done=done)
        self._need(self._backward[call], unit)
        unit.held = True

    def _open_backward(self) -> None:
        if self._backward is None:
            self._backward = {}
            Variable._execution_engine.queue_callback(self._end_backward)
            for unit in self.units:
                unit.missing = sum(one.shard.requires_grad for one in unit.parameters)

    def _arrived(self, unit: Unit, whole: torch.Tensor) -> None:
        """One parameter's gradient is there, so all of this backward that uses the parameter has run."""
        self._open_backward()
        unit.missing -= 1
        if unit.missing == 0:
            if not self.keep or self.complete is not None:
                unit.drop("shard")
            if self.complete is not None:
                self.complete(unit)

    def _end_backward(self) -> None:
        """Backward is through: take part in what is left of it, and free."""
        assert self._backward is not None
        for call in self._backward.values():
            self._advance(call, len(call.units))
        for unit in self.units:
            if self.keep and self.complete is None:
                if unit.launched:
                    unit.fill(partial(self._arrived, unit))
                unit.held = unit.whole
            elif unit.whole or unit.launched:
                unit.drop("shard")
        self._backward = None


@dataclass(frozen=True, slots=True)
class _Guard:
    """Refuses a call of a module inside a block whose parameters are not gathered."""

    name: str
    unit: Unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not self.unit.whole:
            raise ScriptError(
                f"module {self.name!r} was called from outside of its block {self.unit.name!r}, whose parameters are "
                "divided among ranks; call the block or the model, or use sharding level 1"
            )


def _direct(under: list[Unit], own: Unit | None, outside: Unit) -> list[Unit]:
    """Of the units under a module those whose parameters it may use itself: its block's, and those of no block."""
    return [unit for unit in under if unit is own or unit is outside]


def _under(model: nn.Module, units: list[Unit], blocks: Mapping[nn.Module, Unit]) -> dict[nn.Module, list[Unit]]:
    """Blocks and modules outside of blocks, each with the units whose parameters lie under it."""
    inside = {inner for block in blocks for inner in block.modules() if inner is not block}
    owners = {unit: {module for one in unit.parameters for module, _ in one.places} for unit in units}
    under = {}
    for module in model.modules():
        if module not in inside:
            below = set(module.modules())
            under[module] = [unit for unit in units if owners[unit] & below]
    return under


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """All tensors in what a module returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 8 or value is None or isinstance(value, str | int | float | bool):
        return
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, depth + 1)
    elif isinstance(value, list | tuple | set):
        for one in value:
            yield from _tensors(one, depth + 1)
    elif is_dataclass(value):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name), depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth + 1)
