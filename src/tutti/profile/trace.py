"""One training step on the meta device, every operator entered in a ledger under the module that caused it.

In the forward that is the innermost module being called. In the backward it is the module whose forward made the
autograd node now running: nodes carry the sequence number of their making, and the trace keeps which module was active
from which number on.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import transformer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutti.config.model import OpKind
from tutti.profile.cost import Cost, cost_of
from tutti.profile.flow import Flow, functions
from tutti.profile.ledger import Ledger
from tutti.profile.meta import flat_tensors
from tutti.profile.opaque import fused_attention, recurrence_of, recurrent
from tutti.profile.shapes import Shapes

ROOT = ""
_SDPA = F.scaled_dot_product_attention
_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))
_BATCH_NORM = frozenset((F.batch_norm, torch.batch_norm))
Scope = tuple[str, OpKind | None]
"""A module's name, and the kind that matrix products in it count as (None: their own)."""


class Timeline:
    """Which scope was active when: a stack of them, and from which autograd node on each was on top."""

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
        """The scope that made the autograd node now running."""
        node = torch._C._current_autograd_node()
        return self._scopes[bisect_right(self._first_nodes, node._sequence_nr()) - 1] if node else self.now

    def _mark(self) -> None:
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._scopes.append(self.now)


class Tracer:
    """Collects the ledger of one step of `model`, which must be on meta (see `meta_copy`)."""

    def __init__(self, model: nn.Module) -> None:
        self.ledger = Ledger()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners = {
            parameter.untyped_storage()._cdata: name
            for name, module in reversed(list(model.named_modules()))
            for parameter in module._parameters.values()
            if parameter is not None
        }
        self.constants = self.owners.keys() | {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self.timeline = Timeline()
        self.flow = Flow(model, self.names, self.ledger.order)
        self.backward = False

    def run(self, forward: Callable[[], Tensor]) -> Ledger:
        """Trace `forward()`, which gives the loss, and its backward. Raises what the model's code raises."""
        with self._observed():
            with saved_tensors_hooks(self._keep, lambda tensor: tensor):
                loss = forward()
            self.ledger.passed, self.flow.over = self.flow.ways(), True
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
        """Add a cost to the ledger. Products made within a scope of one kind are of that kind; the rest is not."""
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
        """Enter one operator call."""
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
        """The module to which the operator now running belongs."""
        if not self.backward or len(self.timeline.stack) > 1:  # called in the backward: it is computed again
            return self.timeline.now
        return self.timeline.of_running_node()

    def enter_later(self) -> Callable[[Cost, bool, int], None]:
        """How an opaque operator made now enters its costs, then and in the backward."""
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
        """Install hooks and modes for the time of the step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.callback(register_module_forward_hook(self._returned, always_call=True).remove)
            stack.enter_context(_patched(F, "scaled_dot_product_attention", self._attention))
            fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
            stack.enter_context(_patched(transformer, "_detect_is_causal_mask", _is_causal))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
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
        """Stands in for scaled_dot_product_attention: fused where kernels are, else as its matrix products."""
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
    """Sees every operator below autograd, forward and backward."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self.shapes = Shapes(tracer.ledger.note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self.shapes.run(func, args, kwargs)
        if isinstance(func, OpOverload):
            self.tracer.operator(func, args, kwargs, out)
        return out


class _Calls(TorchFunctionMode):
    """Sees calls above autograd: those that must be taken whole."""

    def __init__(self, tracer: Tracer) -> None:
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
    """The `training` argument of F.batch_norm (input, mean, var, weight, bias, training) or torch.batch_norm."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Stands in for nn.TransformerEncoder's look at the values of its mask, which changes no cost counted here."""
    return bool(is_causal)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for a while: `F.multi_head_attention_forward` looks attention up there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def first_line(error: BaseException) -> str:
    """An error's first line, without a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
