"""Trace one training step on the meta device, and attribute every operator to the module that caused it.

In forward, that is the innermost module being called. In backward, it is the module whose forward created the autograd
node that is running. Nodes carry a sequence number, and the trace records which module was active from which number on.
"""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import transformer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutti.config.model import OpKind
from tutti.profile.meta_device import flat_tensors, meta_autocasts_as_cpu
from tutti.profile.operator_costs import Cost, ShapePropagation, cost_of, fused_attention, recurrence_of, recurrent

ROOT = ""


_SDPA = F.scaled_dot_product_attention


_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


_BATCH_NORM = frozenset((F.batch_norm, torch.batch_norm))


Scope = tuple[str, OpKind | None]
"""A module's name, and the kind that matrix products in it count as (None: their own kind)."""


class ScopeTimeline:
    """Records which scope was active when: a stack of scopes, and the first autograd node of each."""

    def __init__(self) -> None:
        self.stack: list[Scope] = [(ROOT, None)]
        self._first_nodes: list[int] = [0]
        self._scopes: list[Scope] = [(ROOT, None)]

    @property
    def now(self) -> Scope:
        return self.stack[-1]

    def push(self, scope: Scope) -> None:
        self.stack.append(scope)
        self._mark()

    def pop(self) -> None:
        self.stack.pop()
        self._mark()

    @contextmanager
    def within(self, scope: Scope) -> Iterator[None]:
        self.push(scope)
        try:
            yield
        finally:
            self.pop()

    def of_running_node(self) -> Scope:
        """Return the scope that created the autograd node that is running."""
        node = torch._C._current_autograd_node()
        return self._scopes[bisect_right(self._first_nodes, node._sequence_nr()) - 1] if node else self.now

    def _mark(self) -> None:
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._scopes.append(self.now)


ValueRoute = tuple[str, tuple[str, ...], bool, tuple[str, ...]]
"""The module that makes values, the modules that use them, whether they have a gradient, and the modules that save them
for backward (see `ForwardedValues`).
"""


@dataclass(slots=True, kw_only=True)
class CostLine:
    """Total cost of all operators of one kind in one module.

    Attributes:
        weight_nbytes: the part of `nbytes_forward` that reads parameters.
        calls: number of operator calls in forward.
    """

    flops_forward: float = 0.0
    flops_backward: float = 0.0
    nbytes_forward: float = 0.0
    nbytes_backward: float = 0.0
    weight_nbytes: float = 0.0
    calls: int = 0


@dataclass(slots=True, kw_only=True)
class CostLedger:
    """The costs of one step of the whole batch, by module name.

    Attributes:
        lines: costs of operators by module and kind.
        activations: bytes saved for backward.
        outputs: bytes of the modules' outputs.
        kept_after: (module, other): activations of the first module that are saved while the second one runs.
        passed: bytes that later modules use, by their routes.
        order: position of each module in the order of first execution.
        batch_statistics: modules that normalise over the batch.
        notes: assumptions, as an ordered set.
        kept: storages counted so far, held so that no id is used again.
    """

    lines: dict[tuple[str, OpKind], CostLine] = field(default_factory=lambda: defaultdict(CostLine))
    activations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kept_after: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    passed: dict[ValueRoute, float] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    batch_statistics: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    kept: dict[int, object] = field(default_factory=dict)

    def note(self, text: str) -> None:
        self.notes[text] = None

    def executed(self, module: str) -> None:
        """Record that a module ran, if it is the first time."""
        self.order.setdefault(module, len(self.order))

    def keep(self, module: str, tensor: Tensor, after: str | None = None) -> None:
        """Count a tensor that autograd saves for backward: each storage once, with its whole size.

        Args:
            module: the module that saves it.
            tensor: the saved tensor.
            after: the module that is running, if known.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            return
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.activations[module] += storage.nbytes()
            if after is not None and after != module:
                self.kept_after[module, after] += storage.nbytes()


class StepTracer:
    """Collects the costs of one step of a model.

    Args:
        model: a model on the meta device (see `meta_copy`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.ledger = CostLedger()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = {
            parameter.untyped_storage()._cdata: name
            for name, module in reversed(list(model.named_modules()))
            for parameter in module._parameters.values()
            if parameter is not None
        }
        self.constants = self.owners.keys() | {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self.timeline = ScopeTimeline()
        self.flow = ValueFlow(model, self.names, self.ledger.order)
        self.backward = False

    def run(self, forward: Callable[[], Tensor], within: nn.Module | None = None) -> CostLedger:
        """Trace a forward pass and its backward pass.

        Args:
            forward: computes the loss. What it raises is passed on.
            within: the module that all of `forward` belongs to; None: only what it calls belongs to modules.
        """
        with self._observed():
            with saved_tensors_hooks(self._keep, lambda tensor: tensor):
                if within is not None:
                    self._called(within, ())
                loss = forward()
                if within is not None:
                    self._returned(within, (), loss)
            self.ledger.passed, self.flow.over = self.flow.routes(), True
            if loss.requires_grad:
                self.backward = True
                try:
                    loss.sum().backward()  # type: ignore[no-untyped-call]
                except (RuntimeError, NotImplementedError) as error:
                    self._assume_backward(error)
            else:
                self.ledger.note("the loss needs no gradient: there is no backward pass to count")
        return self.ledger

    def enter(self, scope: Scope, cost: Cost, backward: bool, calls: int = 1, weight_nbytes: float = 0.0) -> None:
        """Add a cost. Matrix products in a scope that has a kind count as that kind.

        Args:
            scope: where the cost arises.
            cost: FLOPs and bytes.
            backward: whether it arises in backward.
            calls: number of kernel launches.
            weight_nbytes: the part of the bytes that reads parameters.
        """
        kind = scope[1] if scope[1] is not None and cost.kind == "gemm" else cost.kind
        line = self.ledger.lines[scope[0], kind]
        if backward:
            line.flops_backward += cost.flops
            line.nbytes_backward += cost.nbytes
        else:
            line.flops_forward += cost.flops
            line.nbytes_forward += cost.nbytes
            line.weight_nbytes += weight_nbytes
            line.calls += calls

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one operator call, `out = func(*args, **kwargs)`."""
        weights = 0.0
        for tensor in flat_tensors((*args, *kwargs.values())):
            owner = self.owners.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
            if owner is not None:
                weights += tensor.numel() * tensor.element_size()
                if not self.backward:
                    self.ledger.executed(owner)
        cost = cost_of(func, args, kwargs, out)
        if cost is not None:
            self.enter(self.scope(), cost, self.backward, weight_nbytes=min(weights, cost.nbytes))

    def scope(self) -> Scope:
        """Return the scope of the operator that is running."""
        if not self.backward or len(self.timeline.stack) > 1:  # a module called within backward is recomputed
            return self.timeline.now
        return self.timeline.of_running_node()

    def enter_later(self) -> Callable[[Cost, bool, int], None]:
        """Return a function with which an opaque operator records its costs, now and in backward."""
        scope = self.scope()
        return lambda cost, backward, calls: self.enter(scope, cost, backward or self.backward, calls)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        if storage not in self.constants:
            after = self.flow.keeps(storage) if storage is not None else None
            self.ledger.keep(self.timeline.now[0], tensor, after)
        return tensor.detach()

    def _called(self, module: nn.Module, inputs: Any) -> None:
        name = self.names.get(module)
        if name is not None:
            self.ledger.executed(name)
            self.timeline.push((name, None))
            self.flow.begin(module, inputs)

    def _returned(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self.names.get(module)
        if name is None:
            return
        self.timeline.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.flow.end(tensors, whole=not name)
        if not self.backward:
            self.ledger.outputs[name] += sum(t.numel() * t.element_size() for t in tensors)

    def _assume_backward(self, error: Exception) -> None:
        for line in self.ledger.lines.values():
            line.flops_backward, line.nbytes_backward = 2 * line.flops_forward, 2 * line.nbytes_forward
        self.ledger.note(f"the backward pass could not be traced ({first_line(error)}): assumed twice the forward")

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Install hooks and modes for the duration of the step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.callback(register_module_forward_hook(self._returned, always_call=True).remove)
            stack.enter_context(patched_attribute(F, "scaled_dot_product_attention", self._attention))
            fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
            stack.enter_context(patched_attribute(transformer, "_detect_is_causal_mask", is_causal_mask))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(meta_autocasts_as_cpu())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(functions(self.flow))
            stack.enter_context(_Operators(self))
            stack.enter_context(_Calls(self))
            yield

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Replace scaled_dot_product_attention by one fused operator where such kernels exist, else by its products."""
        if is_causal:
            self.ledger.note("causal attention is counted at full cost, as if nothing were masked")
        learned_mask = attn_mask is not None and attn_mask.requires_grad
        if query.dim() == 4 and not dropout_p and not learned_mask:
            return fused_attention(query, key, value, attn_mask, enter=self.enter_later())
        if dropout_p:
            self.ledger.note(
                "attention with dropout is counted as not fused: all scores are kept for backward, as on a CPU"
            )
        with self.timeline.within((self.timeline.now[0], "attention")):
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes every operator below autograd, in forward and backward."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.shapes = ShapePropagation(tracer.ledger.note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.shapes.run(func, args, kwargs)
        if isinstance(func, OpOverload):
            self.tracer.operator(func, args, kwargs, out)
        return out


class _Calls(TorchFunctionMode):
    """Observes calls above autograd that must be treated as one operator."""

    def __init__(self, tracer: StepTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.tracer.flow.call(lambda: self._run(func, args, kwargs), args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _SDPA:
            return self.tracer._attention(*args, **kwargs)
        if func in _RECURRENT:
            return recurrent(recurrence_of(args), enter=self.tracer.enter_later())
        if func in _BATCH_NORM and _uses_batch(func, args, kwargs):
            self.tracer.ledger.batch_statistics.add(self.tracer.timeline.now[0])
        return func(*args, **kwargs)


def _uses_batch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether F.batch_norm or torch.batch_norm normalises over samples: `training`, the sixth argument of both, is set.

    Weight standardisation calls them on a weight, as one sample.
    """
    values = kwargs.get("input", args[0] if args else None)
    several = isinstance(values, Tensor) and values.shape[0] > 1
    return several and bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Replace the check of nn.TransformerEncoder on its mask's values, which changes no cost counted here."""
    return bool(is_causal)


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute temporarily; `F.multi_head_attention_forward` finds attention through one."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


T = TypeVar("T")

END = 1 << 60
"""The place of everything after the model."""

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


_CODERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


@dataclass(slots=True, eq=False)
class _Value:
    """The contents of a tensor until something writes to it.

    Attributes:
        trained: whether it has a gradient.
        place: where it was made. None for a value that depends only on parameters, until its first use; its `sources`
            then get that place too.
        sources: values without a place that it was computed from.
        used: later places that use it.
    """

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


class ValueFlow:
    """Follows one forward of `model`: where values are made, and where they are used.

    A place is a module, by its number in the order of first execution. Inside a module that is never divided, an
    operation is at the current place of the forward. In code around modules it is at the latest place among its inputs,
    and in a repeated block not before the block. Values that depend only on the batch are known everywhere. Values that
    depend only on parameters are made where they are first needed, or at the module that owns the parameters. Whatever
    follows the model (the loss) is at the end.

    Args:
        model: the model on the meta device.
        names: the modules and their names.
        order: position of each module in the order of first execution; grows during the forward.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], order: Mapping[str, int]) -> None:
        self.here: int | None = None
        self.over = False
        self._order = order
        self._known: list[str] = []  # names of `order`
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
        self._alive: list[Tensor] = []  # keeps ids unique
        self._sharing: dict[int, list[Tensor]] = defaultdict(list)  # by storage
        self._kept: dict[int, dict[int, None]] = defaultdict(dict)  # storage -> places, an ordered set
        self._frames: list[tuple[bool, int | None]] = [(False, None)]  # whether closed, and the block's place
        self._inside: dict[int, Tensor] = {}  # results of the block's own code that depend only on the batch
        self._last = 0  # place of the forward before the module that is being called
        self._ended = self._busy = False

    def call(self, run: Callable[[], T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> T:
        """Run an operation on `args` and `kwargs`; operations inside it do not count separately."""
        if self._busy or self.over:
            return run()
        self._busy = True
        try:
            tensors = list(flat_tensors((*args, *kwargs.values())))
            values = [value for tensor in tensors if (value := self._value(tensor)) is not None]
            versions = [_version(tensor) for tensor in tensors]
            self.here = self._place(tensors, values)
            result = run()
            written = [leaf for leaf, version in zip(tensors, versions, strict=True) if _version(leaf) != version]
            self._note(tensors, values, written, result)
            return result
        finally:
            self.here, self._busy = None, False

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Record that `module` is called; it is already in the order."""
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
        """Record that the module called last returned `tensors`.

        Args:
            tensors: its output.
            whole: whether it is the model itself.
        """
        _, block = self._frames.pop()
        if self._inside and self._frames[-1][1] is None:  # modules after the block receive these from the block
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
        """Record that autograd saves something now.

        Returns:
            The module that is running; "" after the model, None if unknown.
        """
        if self.here is None or self.over:
            return None
        self._kept[storage].setdefault(self.here)
        return self._names([self.here])[0]

    def routes(self) -> dict[ValueRoute, float]:
        """Return the bytes of the values made and used so far, by their routes."""
        nbytes_by_route: dict[ValueRoute, float] = defaultdict(float)
        for value in self._made:
            if not value.used or value.place is None:
                continue
            made = self._names([value.place])[0]
            kept = list(self._kept.get(value.storage, ()))
            to = self._names(sorted(value.used))
            nbytes_by_route[made, to, value.trained, self._names(kept if len(kept) > 1 else [])] += value.nbytes
        return {direction: nbytes for direction, nbytes in nbytes_by_route.items() if direction[0]}

    @property
    def _now(self) -> int:
        """The current place of the forward."""
        return max(len(self._order) - 1, 0)

    def _names(self, places: Iterable[int]) -> tuple[str, ...]:
        if len(self._known) < len(self._order):
            self._known = list(self._order)
        return tuple(self._known[place] if place < END else "" for place in places)

    def _value(self, tensor: Tensor) -> _Value | None:
        """Return a tensor's value; None for parameters, buffers, and what depends only on the batch."""
        value = self._values.get(id(tensor))
        if value is None and tensor.requires_grad and id(tensor) not in self._own:
            return self._put(tensor, self._last)  # made by an operation that was not observed
        return value

    def _place(self, tensors: list[Tensor], values: list[_Value]) -> int | None:
        """Return the place of an operation on these values; None if nothing says where it is."""
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
        """Record which values an operation used, changed and made."""
        results = list(flat_tensors((result,)))
        if not results and not written:
            return  # it only asked for shapes
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
        """Record that a tensor, and whatever shares its memory, has new values."""
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
    """Return whether a module is never divided among stages: a leaf, torch's own, a parametrised one, or experts."""
    from_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(module, (*_LISTS, *_CODERS))
    experts = type(module).__name__ == "MixtureOfExperts"
    return from_torch or experts or parametrize.is_parametrized(module) or next(module.children(), None) is None


@contextmanager
def functions(flow: ValueFlow) -> Iterator[None]:
    """While open, calls of autograd functions count as operations for `flow`."""
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = plain.__get__(None, cls)
        return flow.call(lambda: bound(*args, **kwargs), args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]
