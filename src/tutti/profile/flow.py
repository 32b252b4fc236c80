"""Where the values of a forward are made, and where used: what crosses the cuts of a pipeline, wherever they are.

A place is a module, by its number in the order of first execution. Inside a module that is never taken apart, an
operation is at the place that the forward has come to. In code around modules it is at the latest place among its
inputs; in a repeated block not before the block, which mostly stays whole. What the batch alone gives is known
everywhere. What parameters alone give is made where it is needed first, or at the module that they belong to. What
follows the model (the loss) is at the end.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrize

from tutti.profile.ledger import Way
from tutti.profile.meta import flat_tensors

T = TypeVar("T")

END = 1 << 60
"""The place of what follows the model."""

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CODERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass(slots=True, eq=False)
class _Value:
    """What is in a tensor until something writes to it. `place`: where it was made; None as long as nobody needs what
    comes of parameters alone, then of `sources` too; `used`: later places."""

    nbytes: int
    trained: bool
    storage: int
    place: int | None
    sources: tuple["_Value", ...] = ()
    used: set[int] = field(default_factory=set)

    def use(self, here: int) -> None:
        if self.place is None:
            self.place = here
            for source in self.sources:
                source.use(here)
        elif here > self.place:
            self.used.add(here)


class Flow:
    """Follows one forward of `model`, whose modules' names are `names`; `order`: of their first execution, so far.
    `here`: the place of the operation now running, None where it has none."""

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], order: Mapping[str, int]) -> None:
        self.here: int | None = None
        self.over = False
        self._order = order
        self._known: list[str] = []  # its names
        self._closed = {module for module in names if is_closed(module)}
        self._entries = {child for module in names if isinstance(module, _LISTS) for child in module.children()}
        self._entries -= {module for module in self._entries if isinstance(module, _LISTS)}
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._homes = {
            id(tensor): names[module]
            for module in reversed(list(names))
            for tensor in (module._parameters.values() if module in self._closed else ())
        }
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._values: dict[int, _Value] = {}
        self._made: list[_Value] = []
        self._alive: list[Tensor] = []  # so that no id returns
        self._sharing: dict[int, list[Tensor]] = defaultdict(list)  # by storage
        self._kept: dict[int, dict[int, None]] = defaultdict(dict)  # storage -> places, an ordered set
        self._frames: list[tuple[bool, int | None]] = [(False, None)]  # whether closed, and the block's place
        self._inside: dict[int, Tensor] = {}  # what the block's own code made of the batch alone
        self._last = 0  # the place that the forward had come to before the module that is being called
        self._ended = self._busy = False

    def call(self, run: Callable[[], T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> T:
        """`run()`, an operation on `args` and `kwargs`; those that it is made of are none of their own."""
        if self._busy or self.over:
            return run()
        self._busy = True
        try:
            tensors = list(flat_tensors((*args, *kwargs.values())))
            values = [value for tensor in tensors if (value := self._value(tensor)) is not None]
            versions = [_version(tensor) for tensor in tensors]
            self.here = self._place(tensors, values)
            result = run()
            written = [one for one, version in zip(tensors, versions, strict=True) if _version(one) != version]
            self._note(tensors, values, written, result)
            return result
        finally:
            self.here, self._busy = None, False

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """`module` is called; it is in the order by now."""
        above, block = self._frames[-1]
        closed = above or module in self._closed
        if block is None and module in self._entries and not closed:
            block = self._now
        self._frames.append((closed, block))
        self._ended = False
        if not self._busy and not self.over:
            with torch._C.DisableTorchFunction():
                values = [value for tensor in flat_tensors(inputs) if (value := self._value(tensor)) is not None]
            for value in values if closed and not above else ():
                value.use(self._now)
        self._last = self._now

    def end(self, tensors: list[Tensor], *, whole: bool) -> None:
        """The module called last returned `tensors`. `whole`: it is the model itself."""
        _, block = self._frames.pop()
        if self._inside and self._frames[-1][1] is None:  # for others it comes from the block
            for tensor in tensors:
                if id(tensor) in self._inside:
                    self._put(tensor, block)
            self._inside.clear()
        if whole and not self.over:
            self._ended = True
            with torch._C.DisableTorchFunction():
                for tensor in tensors:
                    if (value := self._value(tensor)) is not None:
                        value.use(END)

    def keeps(self, storage: int) -> str | None:
        """The name of the module at whose place autograd keeps something now, "" for the end; None where unknown."""
        if self.here is None or self.over:
            return None
        self._kept[storage].setdefault(self.here)
        return self._names([self.here])[0]

    def ways(self) -> dict[Way, float]:
        """Bytes of the values made and used so far, by their ways."""
        found: dict[Way, float] = defaultdict(float)
        for value in self._made:
            if not value.used or value.place is None:
                continue
            made = self._names([value.place])[0]
            kept = list(self._kept.get(value.storage, ()))
            to = self._names(sorted(value.used))
            found[made, to, value.trained, self._names(kept if len(kept) > 1 else [])] += value.nbytes
        return {way: nbytes for way, nbytes in found.items() if way[0]}

    @property
    def _now(self) -> int:
        """The place that the forward has come to."""
        return max(len(self._order) - 1, 0)

    def _names(self, places: Iterable[int]) -> tuple[str, ...]:
        if len(self._known) < len(self._order):
            self._known = list(self._order)
        return tuple(self._known[place] if place < END else "" for place in places)

    def _value(self, tensor: Tensor) -> _Value | None:
        """None for what has no place: parameters, buffers, and what only the batch gives."""
        value = self._values.get(id(tensor))
        if value is None and tensor.requires_grad and id(tensor) not in self._own:
            return self._put(tensor, self._last)  # something unseen made it
        return value

    def _place(self, tensors: list[Tensor], values: list[_Value]) -> int | None:
        """Where an operation on these is."""
        closed, block = self._frames[-1]
        if self._ended:
            return END if values or any(id(tensor) in self._parameters for tensor in tensors) else None
        if closed:
            return self._now
        known = [value.place for value in values if value.place is not None]
        if not known:
            homes = [self._order.get(self._homes[id(tensor)]) for tensor in tensors if id(tensor) in self._homes]
            known = [home for home in homes if home is not None]
        return max(*known, block or 0) if known else None

    def _note(self, tensors: list[Tensor], values: list[_Value], written: list[Tensor], result: Any) -> None:
        """Write down what an operation used, changed and made."""
        results = list(flat_tensors((result,)))
        if not results and not written:
            return  # it said something of shapes
        if self.here is None and not values and not any(id(tensor) in self._parameters for tensor in tensors):
            if self._frames[-1][1] is not None:
                self._inside |= {id(tensor): tensor for tensor in results}
            return
        sources = tuple(values) if self.here is None else ()
        if self.here is not None:
            for value in values:
                value.use(self.here)
        for tensor in written:
            if id(tensor) not in self._own:
                self._rewrite(tensor, sources)
        known = {id(tensor) for tensor in tensors}
        for tensor in results:
            if id(tensor) not in known:
                self._put(tensor, self.here, sources)

    def _rewrite(self, tensor: Tensor, sources: tuple[_Value, ...]) -> None:
        """A tensor, and whatever shares its memory, has new values."""
        if id(tensor) not in self._values:
            self._put(tensor, self.here, sources)
        for other in list(self._sharing[self._values[id(tensor)].storage]):
            self._put(other, self.here, sources)

    def _put(self, tensor: Tensor, place: int | None, sources: tuple[_Value, ...] = ()) -> _Value:
        new = id(tensor) not in self._values
        try:
            storage = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            storage = id(tensor)
        value = _Value(tensor.numel() * tensor.element_size(), tensor.requires_grad, storage, place, sources)
        self._values[id(tensor)] = value
        self._made.append(value)
        if new:
            self._alive.append(tensor)
            self._sharing[storage].append(tensor)
        return value


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_closed(module: nn.Module) -> bool:
    """Whether a module is never taken apart for stages: a leaf, one of torch's own, a parametrised one, experts."""
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_LISTS, *_CODERS))
    experts = type(module).__name__ == "MixtureOfExperts"
    return own or experts or parametrize.is_parametrized(module) or next(module.children(), None) is None


@contextmanager
def functions(flow: Flow) -> Iterator[None]:
    """While open, autograd functions are operations for `flow`."""
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = plain.__get__(None, cls)
        return flow.call(lambda: own(*args, **kwargs), args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]
