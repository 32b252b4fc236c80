"""Trace the memory of one training step under autocast on a GPU, without a GPU.

Forward and backward run on fake tensors, so that autocast's casts, in-place activations and shared storages count as
they do in a real step. Every storage is followed from its allocation to its release. The fake tensors are on the CPU,
because autograd refuses those of CUDA in a build without CUDA. What CUDA does otherwise is done here: the operators
that its autocast keeps in float32, fused attention, dropout that saves a mask of bytes, recurrent layers in one call.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutti.profile.operator_costs import Cost, fused_attention, names, recurrence_of, recurrent
from tutti.profile.step_trace import ScopeTimeline, is_causal_mask, patched_attribute

IN_FLOAT32 = names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm rms_norm "
    "group_norm norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy dist pdist cdist renorm "
    "logsumexp prod softmax log_softmax cumprod cumsum sum softmin"
)
"""Functions whose inputs autocast casts to float32 on CUDA, by torch's list. A CPU casts only some of them."""

_SDPA = F.scaled_dot_product_attention
_MASKED_ATTENTION = (
    ("tutti.nn.masked_attention", "attention"),
    ("tutti.nn.sparse_attention", "block_sparse_attention"),
)
_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


@dataclass(slots=True, kw_only=True)
class MemoryLedger:
    """The memory of one step of a batch.

    Attributes:
        saved: bytes saved for backward, by the module that saves them first. Parameters, buffers and copies of
            parameters in the lower precision are left out.
        outputs: bytes of the modules' outputs.
        moments: (module, live bytes) after each allocation. The module is the last that had begun in forward. Live
            bytes leave out the same tensors, and gradients of parameters.
        events: (storage, bytes) in the order of allocation and release, bytes negative for a release.
        order: position of each module in the order of first execution.
    """

    saved: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moments: list[tuple[str, float]] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)


def trace_memory(
    model: nn.Module, prepare: Callable[[Callable[[Any], Any]], Callable[[], Tensor]], dtype: torch.dtype | None
) -> MemoryLedger:
    """Trace a forward and a backward pass.

    Args:
        model: a model on the meta device (see `meta_copy`); its tensors are replaced.
        prepare: receives a function that puts a batch's tensors on the fake device, and returns the function that
            computes the loss.
        dtype: autocast's dtype; None without autocast.

    Raises:
        Exception: what the model's code raises, for instance where it branches on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = _Replacement()
        fake.replace_in(model)
        tracer = _MemoryTracer(model)
        forward = prepare(fake.tree)
        tracer.own(fake.made.values())
        with tracer.observed():
            autocast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
            with autocast, saved_tensors_hooks(tracer.save, lambda tensor: tensor):
                loss = forward()
            tracer.backward = True
            if loss.requires_grad:
                loss.sum().backward()  # type: ignore[no-untyped-call]
            del loss
    return tracer.ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySlopes:
    """Bytes that grow with each sample, from two traces.

    Attributes:
        saved, outputs: of one sample, by module.
        peaks: the most that is alive of one sample while a module runs, by module.
        events: (storage, bytes of one sample, further bytes) of each allocation and release; negative for a release.
    """

    saved: dict[str, float]
    outputs: dict[str, float]
    peaks: dict[str, float]
    events: tuple[tuple[int, float, float], ...]

    def sizes(self, samples: int) -> list[tuple[int, float]]:
        """Return (storage, bytes) of each allocation and release for so many samples."""
        return [(storage, slope * samples + fixed) for storage, slope, fixed in self.events]


def memory_slopes(whole: MemoryLedger, samples: int, half: MemoryLedger, half_samples: int) -> MemorySlopes:
    """Compare the traces of a batch and of a part of it.

    Raises:
        ValueError: the two traces allocate different tensors.
    """
    sizes = {storage: nbytes for storage, nbytes in half.events if nbytes >= 0}  # releases may come in another order
    if len(whole.moments) != len(half.moments) or [m for m, _ in whole.moments] != [m for m, _ in half.moments]:
        raise ValueError("the step allocates other tensors for half a batch")
    more = samples - half_samples

    def slopes(big: dict[str, float], small: dict[str, float]) -> dict[str, float]:
        return {name: max(0.0, (value - small.get(name, 0.0)) / more) for name, value in big.items()}

    peaks: dict[str, float] = defaultdict(float)
    for (name, big), (_, small) in zip(whole.moments, half.moments, strict=True):
        peaks[name] = max(peaks[name], (big - small) / more)
    events = []
    for storage, big_nbytes in whole.events:
        slope = (big_nbytes - math.copysign(sizes[storage], big_nbytes)) / more
        events.append((storage, slope, big_nbytes - slope * samples))
    return MemorySlopes(
        saved=slopes(whole.saved, half.saved),
        outputs=slopes(whole.outputs, half.outputs),
        peaks=dict(peaks),
        events=tuple(events),
    )


class _Replacement:
    """Puts fake tensors of the device in place of others; equal tensors stay equal."""

    def __init__(self) -> None:
        self.made: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []

    def replace_in(self, model: nn.Module) -> None:
        """Replace parameters, buffers and plain tensor attributes."""
        for module in model.modules():
            stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for own in stores:
                for name, value in list(own.items()):
                    if isinstance(value, Tensor):
                        own[name] = self.tensor(value)

    def tree(self, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, self.tensor, value)

    def tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self.made:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self.made[id(tensor)] = made
            self._alive.append(tensor)
        return self.made[id(tensor)]


class _MemoryTracer:
    """Follows every storage, and knows which module runs."""

    def __init__(self, model: nn.Module) -> None:
        self.ledger = MemoryLedger()
        self.paths = {module: name for name, module in model.named_modules()}
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.timeline, self.places = ScopeTimeline(), ScopeTimeline()
        self.backward = False
        self.live = 0
        self._known: dict[int, tuple[int, int, bool]] = {}
        self._references: dict[int, Any] = {}
        self._next = 0
        self._fixed = set(self.parameters)
        self._saved: set[int] = set()

    def own(self, tensors: Any) -> None:
        """Leave out these tensors: they are there before the step."""
        self._fixed |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves: each storage once, with its whole size."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and not known[2] and known[0] not in self._saved:
            self._saved.add(known[0])
            self.ledger.saved[self.timeline.now[0]] += known[1]
        return tensor

    def made(self, out: Any, sources: Any, name: str) -> None:
        """Record the storages that an operator has allocated."""
        for tensor in tree_leaves(out):
            if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._fixed or storage._cdata in self._known:
                continue
            self._allocate(storage, tensor, _is_cast(name, sources, self.parameters))

    def _allocate(self, storage: torch.UntypedStorage, tensor: Tensor, cast: bool) -> None:
        nbytes, number, key = storage.nbytes(), self._next, storage._cdata
        self._next += 1
        self._known[key] = (number, nbytes, cast)
        self._references[key] = weakref.finalize(storage, self._release, key)
        self.ledger.events.append((number, nbytes))
        self.live += 0 if cast else nbytes
        place = self.places.of_running_node() if self.backward else self.places.now
        self.ledger.moments.append((place[0], float(self.live)))

    def _release(self, key: int) -> None:
        number, nbytes, cast = self._known.pop(key)
        self._references.pop(key, None)
        self.ledger.events.append((number, -nbytes))
        self.live -= 0 if cast else nbytes

    def _called(self, module: nn.Module, inputs: Any) -> None:
        name = self.paths.get(module)
        if name is not None:
            self.ledger.order.setdefault(name, len(self.ledger.order))
            self.timeline.push((name, None))
            if not self.backward:
                self.places.push((name, None))

    def _returned(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self.paths.get(module)
        if name is None:
            return
        self.timeline.pop()
        if not self.backward:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.ledger.outputs[name] += sum(t.numel() * t.element_size() for t in tensors)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Install hooks and modes for the duration of the step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.callback(register_module_forward_hook(self._returned, always_call=True).remove)
            stack.enter_context(patched_attribute(F, "scaled_dot_product_attention", _attention))
            stack.enter_context(patched_attribute(nn.modules.transformer, "_detect_is_causal_mask", is_causal_mask))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_KernelCalls())
            stack.enter_context(_Allocations(self))
            yield


def _is_cast(name: str, sources: Any, parameters: set[int]) -> bool:
    """Return whether an operator copies a parameter to another precision."""
    if name != "aten::_to_copy":
        return False
    tensors = [tensor for tensor in tree_leaves(sources) if isinstance(tensor, Tensor)]
    return len(tensors) == 1 and tensors[0].untyped_storage()._cdata in parameters


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: _MemoryTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tracer.made(out, args, func._schema.name)
        return out


class _KernelCalls(TorchFunctionMode):
    """Replaces what a GPU does in one kernel, and a build without GPUs in many."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return _attention(*args, **kwargs)
        if func in _RECURRENT:
            return recurrent(recurrence_of(_lower(args)), enter=_ignore)
        name = getattr(func, "__name__", "")
        if (getattr(func, "__module__", ""), name) in _MASKED_ATTENTION:  # one kernel, FlexAttention
            query, key, value = _lower(args[:3])
            return fused_attention(query, key, value, None, enter=_ignore)
        if name in _SOFTMAX and _converts(args, kwargs):
            return _SOFTMAX[name](*args, **kwargs)
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = _in_float32((args, kwargs))
        if name == "dropout" and args and _drops(*args, **kwargs):
            return torch.native_dropout(args[0], _rate(*args, **kwargs), True)[0]
        return func(*args, **kwargs)


def _converts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a softmax reads 16 bits and writes float32, as autocast has it on CUDA."""
    given = kwargs.get("input", args[0] if args else None)
    return isinstance(given, Tensor) and given.dtype in _LOW and torch.is_autocast_enabled("cpu")


_LOW = (torch.bfloat16, torch.float16)


class _Softmax(torch.autograd.Function):
    """The memory of a softmax or its logarithm: a float32 result is saved, and the gradient has 16 bits.

    This is fitted to one measurement, the peak of GPT-2 with 16 x 1024 tokens on an H100 (14,864 MiB allocated). Read
    by its source, torch would convert the input to float32 first, which gives about 1.5 GiB more there. A record of
    that device's allocations (torch.cuda.memory) has yet to tell why it needs less.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        result = torch.empty_like(input, dtype=torch.float32)
        ctx.save_for_backward(result)
        ctx.dtype = input.dtype
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient, dtype=ctx.dtype)


def _softmax(input: Tensor, *others: Any, **options: Any) -> Tensor:
    return _Softmax.apply(input)  # type: ignore[no-any-return, no-untyped-call]


def _cross_entropy(input: Tensor, target: Tensor, *others: Any, **options: Any) -> Tensor:
    if target.is_floating_point() or options.get("label_smoothing") or len(others) > 5:
        return F.cross_entropy(input.float(), target, *others, **options)
    weight, ignored = options.get("weight"), options.get("ignore_index", -100)
    reduction = options.get("reduction", "mean")
    return F.nll_loss(_softmax(input), target, weight, ignore_index=ignored, reduction=reduction)


_SOFTMAX: dict[str, Callable[..., Tensor]] = {
    "log_softmax": _softmax,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
}


def _rate(input: Tensor, p: float = 0.5, *others: Any, **options: Any) -> float:
    return p


def _drops(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **options: Any) -> bool:
    """Return whether dropout runs as one kernel that saves its mask."""
    train = options.get("train", training)
    return train and not inplace and 0 < p < 1 and input.is_floating_point()


def _in_float32(values: Any) -> Any:
    """Cast tensors of 16 bits to float32."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, values
    )


def _ignore(cost: Cost, backward: bool, calls: int) -> None:
    """Do nothing with a cost: only memory counts here."""


def _lower(values: Any) -> Any:
    """Cast float32 tensors as autocast does for operators in its lower precision."""
    if not torch.is_autocast_enabled("cpu"):
        return values
    dtype = torch.get_autocast_dtype("cpu")
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor, values
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Replace scaled_dot_product_attention by one fused operator where a GPU has such kernels."""
    query, key, value, attn_mask = _lower((query, key, value, attn_mask))
    if query.dim() == 4 and not (attn_mask is not None and attn_mask.requires_grad):
        return fused_attention(query, key, value, attn_mask, enter=_ignore)
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal
    )[0]
    return result
