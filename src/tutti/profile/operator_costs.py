"""The cost of one operator call, from the shapes of its arguments and results.

FLOPs: 2 per multiply-add of matrix products and convolutions (PyTorch's own formulas where it has one); 1 per element
of elementwise operators, reductions, normalisations and pooling; none for copies, gathers and views. Bytes: each tensor
argument is read once and each result is written once; views and allocations cost nothing.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from tutti.config.model import OpKind, VectorKind
from tutti.profile.meta_device import SMALL_NUMEL, flat_tensors, to_meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs and memory traffic of one operator call."""

    kind: OpKind
    flops: float
    nbytes: float


def names(text: str) -> frozenset[str]:
    """Split a text into a set of words."""
    return frozenset(text.split())


_FREE = names(
    "_unsafe_view empty empty_like empty_strided empty_permuted new_empty new_empty_strided lift_fresh lift detach "
    "alias set_ resize_ _reshape_alias is_same_size sym_size sym_numel sym_stride unsafe_split unsafe_split_with_sizes "
    "unsafe_chunk"
)
_GEMM = names("mm addmm bmm baddbmm _scaled_mm _grouped_mm mv addmv dot vdot")
_CONVOLUTION = names("convolution _convolution convolution_overrideable convolution_backward")
_ELEMENTWISE = names(
    "native_dropout_backward sum mean prod amax amin max min argmax argmin var std var_mean std_mean cumsum cumprod "
    "norm linalg_vector_norm all any"
)
_ELEMENTWISE_PARTS = ("_loss", "_foreach_")
_POOL_PARTS = ("pool", "upsample", "grid_sampl", "interpolate")
_RANDOM = names("native_dropout bernoulli uniform normal rand rand_like randn randn_like")
_EXPONENTIAL = names(
    "exp exp2 expm1 sigmoid sigmoid_backward silu silu_backward gelu gelu_backward logsumexp log_sigmoid_forward "
    "log_sigmoid_backward"
)
_FUNCTIONS = names(
    "tanh tanh_backward log log2 log10 log1p elu elu_backward softplus softplus_backward mish mish_backward sin cos "
    "tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma binary_cross_entropy "
    "binary_cross_entropy_backward binary_cross_entropy_with_logits"
)
_BY_ELEMENT: frozenset[OpKind] = frozenset({"elementwise", *get_args(VectorKind)})


def cost_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost | None:
    """Return the cost of `out = func(*args, **kwargs)`; None if nothing is computed or moved."""
    name = func._schema.name.partition("::")[2]
    if name in _FREE or func.is_view:
        return None
    inputs = list(flat_tensors((*args, *kwargs.values())))
    outputs = list(flat_tensors([out]))
    if not outputs:
        return None
    kind = _kind(func, name, args, kwargs)
    nbytes = _nbytes(inputs) + _nbytes(outputs)
    if kind == "embedding" and "backward" not in name:
        # A look-up reads only the selected rows, so as many bytes as it writes.
        nbytes = 2 * _nbytes(outputs) + _nbytes(inputs[1:])
    elif name in ("gather", "index_select", "index", "_unsafe_index", "take"):
        nbytes = 2 * _nbytes(outputs) + _nbytes(inputs[1:])
    elif name in ("nll_loss_forward", "nll_loss2d_forward"):  # one element of each target's row
        target = inputs[1]
        return Cost(kind=kind, flops=float(target.numel()), nbytes=2 * _nbytes([target]))
    elif name in ("fill_", "zero_", "zeros_like", "ones_like", "full_like"):
        nbytes = _nbytes(outputs)
    numel = max(tensor.numel() for tensor in (*inputs, *outputs))
    return Cost(kind=kind, flops=_flops(func, kind, (args, kwargs, out), numel), nbytes=nbytes)


def _kind(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpKind:
    if name in _GEMM:
        return "gemm"
    if name in _CONVOLUTION:
        return "conv"
    if "attention" in name:
        return "attention"
    if "embedding" in name:
        return "embedding"
    slow = _slow_on_vectors(name.removesuffix("_"), args, kwargs)
    if slow is not None:
        return slow
    if name in _ELEMENTWISE or any(part in name for part in _ELEMENTWISE_PARTS):
        return "elementwise"
    if Tag.pointwise in func.tags and name not in ("copy_", "clone", "_to_copy", "fill_", "zero_"):
        return "elementwise"
    return "other"


def _slow_on_vectors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VectorKind | None:
    """Return the kind of an operator that takes a CPU longer per element than a sum does; None for others.

    Args:
        name: without the underscore of in-place operators.
        args, kwargs: arguments of the call.
    """
    if "batch_norm" in name:  # of (samples, channels) alone, it runs like a norm of rows
        return "batch_norm" if args[0].dim() > 2 else "norm"
    if name.endswith(("_norm", "_norm_backward")) or "rms_norm" in name:
        return None if name in _ELEMENTWISE else "norm"
    if any(part in name for part in _POOL_PARTS):
        return "pool"
    if name in _RANDOM:
        return "random"
    if name in _FUNCTIONS or (name in ("gelu", "gelu_backward") and kwargs.get("approximate") == "tanh"):
        return "function"
    return "exponential" if name in _EXPONENTIAL or "softmax" in name else None


def _flops(func: OpOverload, kind: OpKind, call: tuple[tuple[Any, ...], dict[str, Any], Any], numel: int) -> float:
    """Return the FLOPs of a call (args, kwargs, out) whose largest tensor has `numel` elements."""
    args, kwargs, out = call
    if kind == "conv":
        return _convolution_flops(out, *args, **kwargs)
    if func.overloadpacket in flop_registry:
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    if func.overloadpacket is torch.ops.aten._grouped_mm:  # every row is in one group
        left, right = args[:2]
        by_columns = left.dim() > right.dim()
        return 2.0 * float(right.numel() * left.shape[-2] if by_columns else left.numel() * right.shape[-1])
    if kind == "gemm":  # products with a vector: every element of the largest operand is used once
        return 2.0 * numel
    return float(numel) if kind in _BY_ELEMENT else 0.0


def _convolution_flops(out: Any, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> float:
    """Return 2 x weight elements x batch x pixels, where pixels are those of the output (transposed: of the input).

    In backward, each requested gradient (of the input, of the weight) costs as much as the forward. The arguments
    differ: forward takes (input, weight, bias, ...), backward (grad_output, input, weight, bias_sizes, ...).
    """
    if isinstance(out, Tensor):
        given = list(args)
        output, input, weight, times = out, first, second, 1
    else:
        weight, *given = args
        output, input, times = first, second, sum(map(bool, kwargs.get("output_mask", given[-1])[:2]))
    transposed = kwargs.get("transposed", given[4] if len(given) > 4 else False)
    pixels = (input if transposed else output).shape[2:]
    return 2.0 * times * weight.numel() * input.shape[0] * math.prod(pixels)


def _nbytes(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of tensors; for an expanded tensor, only what its storage holds."""
    return float(sum(min(t.numel() * t.element_size(), _storage_nbytes(t)) for t in tensors))


def _storage_nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
        return int(tensor.numel() * tensor.element_size())


_FACTORIES = names(
    "empty empty_strided empty_permuted zeros ones full rand randn randint randperm arange linspace logspace eye "
    "scalar_tensor tril_indices triu_indices"
)
_INDEXING = names("index index_put index_put_ _unsafe_index _unsafe_index_put _index_put_impl_")
_SIZED = names("_pack_padded_sequence _pack_padded_sequence_backward _pad_packed_sequence")  # need lengths on the CPU
_VALUES = names("_local_scalar_dense equal is_nonzero")
_REAL_LIMIT = 2**24
"""Largest number of elements on which an operator without a shape rule is actually computed."""
_META, _CPU = torch.device("meta"), torch.device("cpu")


class ShapePropagation:
    """Runs operators for their shapes, and keeps the values that code may branch on.

    In a traced step, parameters and floating-point inputs are on meta, while small integers and masks are real. Where
    both meet, the result is on meta. A small meta tensor computed only from known values (a mask, positions) has a real
    *shadow*, so that `mask.any()` and `x[mask]` work. Results that depend on unknown values are bounded from above,
    with a note.

    Args:
        note: receives sentences about assumptions.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.shadows: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)`, as shapes."""
        name = func._schema.name.partition("::")[2] if isinstance(func, OpOverload) else ""
        if name in _FACTORIES or name.endswith("_like") or name.startswith("new_"):
            return self._make(func, args, kwargs)
        tensors = list(flat_tensors((*args, *kwargs.values())))
        if name in _SIZED:
            return func(*args, **kwargs)
        if all(self._known(tensor) for tensor in tensors) and not _spreads(func, tensors):
            if not any(tensor.is_meta for tensor in tensors) and not _to_meta_device(kwargs):
                return func(*args, **kwargs)
            return self._with_values(func, name, args, kwargs)
        if name.endswith("_") and args[0].is_meta:
            self.shadows.pop(args[0], None)
        if name in ("nonzero", "masked_select"):
            return self._assume_all(name, args)
        if name in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        return self._outline(func, name, args, kwargs)

    def _known(self, tensor: Tensor) -> bool:
        return tensor.numel() <= SMALL_NUMEL and (not tensor.is_meta or tensor in self.shadows)

    def _value(self, tensor: Tensor) -> Tensor:
        value: Tensor = self.shadows[tensor] if tensor.is_meta else tensor
        return value

    def _with_values(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute on real values, and give the meta tensors the results as their shadows."""
        real_args, real_kwargs = tree_map_only(Tensor, self._value, (args, _moved(kwargs, _CPU)))
        values = func(*real_args, **real_kwargs)
        device = kwargs.get("device")
        if name in _VALUES or (device is not None and torch.device(device).type == "cpu"):
            return values
        if name.endswith("_"):
            return args[0]
        try:  # the operator itself, so that views stay views
            out = func(*tree_map_only(Tensor, _meta, args), **tree_map_only(Tensor, _meta, _moved(kwargs, _META)))
        except (NotImplementedError, RuntimeError):  # its shape depends on values, which are known
            out = tree_map_only(Tensor, to_meta, values)
        for outline, value in zip(flat_tensors([out]), flat_tensors([values]), strict=True):
            self.shadows[outline] = value
        return out

    def _make(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create a new tensor. Small integers and masks for a real device are real; everything else is on meta."""
        sources = list(flat_tensors(args[:1]))
        options = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
        outline = func(*tree_map_only(Tensor, _meta, args), **{**options, "device": _META})
        if outline.numel() > SMALL_NUMEL:
            return outline
        real_args = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=_CPU), args)
        values = func(*real_args, **{**options, "device": _CPU})
        device = kwargs.get("device") or (sources[0].device if sources else _CPU)
        floating = outline.is_floating_point() or outline.is_complex()
        if not floating and torch.device(device).type != "meta":
            return values
        self.shadows[outline] = values
        return outline

    def _outline(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on meta, or on zeros where there is no shape rule."""
        on_meta, options = args, _moved(kwargs, _META)
        if not all(tensor.is_meta for tensor in flat_tensors((*args, *kwargs.values()))):
            on_meta, options = tree_map_only(Tensor, _meta, (on_meta, options))
        if name in _SHAPES:
            return _SHAPES[name](*on_meta, **options)
        try:
            out = func(*on_meta, **options)
        except NotImplementedError:
            if name in _VALUES or sum(t.numel() for t in flat_tensors((*on_meta, *options.values()))) > _REAL_LIMIT:
                raise
            self.note(f"operator {name} has no shape rule: the shape of its result was found by running it on zeros")
            out = _on_zeros(func, on_meta, options)
        changed_real = name.endswith("_") and isinstance(args[0], Tensor) and not args[0].is_meta
        return args[0] if changed_real else out

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replace masks among indices by the positions they select; all positions if a mask's values are unknown."""
        result: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                result.append(index)
            elif self._known(index):
                result.extend(to_meta(column) for column in self._value(index).nonzero().unbind(1))
            else:
                self._say_bounded()
                result.extend(_empty((index.numel(),), torch.long) for _ in index.shape)
        return result

    def _assume_all(self, name: str, args: tuple[Any, ...]) -> Tensor:
        """Return the result of nonzero or masked_select as if all elements were selected; known masks are counted."""
        source: Tensor = args[0]
        if name == "nonzero":
            self._say_bounded()
            return _empty((source.numel(), source.dim()), torch.long)
        mask: Tensor = args[1]
        shape = _broadcast(source, mask)
        if self._known(mask):
            return _empty((int(self._value(mask).expand(shape).sum()),), source.dtype)
        self._say_bounded()
        return _empty((shape.numel(),), source.dtype)

    def _say_bounded(self) -> None:
        self.note("elements selected by computed values are counted as if all were selected: an upper bound")


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the shape of a product by groups. torch's own rule takes only bfloat16, with rows of 16 bytes."""
    groups = (offsets.numel(),) if left.dim() == right.dim() == 2 and offsets is not None else ()
    groups = (left.shape[0],) if left.dim() == right.dim() == 3 else groups
    return _empty((*groups, left.shape[-2], right.shape[-1]), kwargs.get("out_dtype") or left.dtype)


def _ctc(log_probs: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the shapes of losses and forward variables. torch's own rule reads the lengths' values.

    Args:
        log_probs: (time, samples, classes), or (time, classes).
        targets: (samples, length), or the targets of all samples in one dimension, whose length bounds each.
    """
    time, samples = log_probs.shape[0], log_probs.shape[1:-1]
    losses = _empty(tuple(samples), log_probs.dtype)
    return losses, _empty((*(samples or (1,)), time, 2 * targets.shape[-1] + 1), log_probs.dtype)


def _ctc_gradient(gradient: Tensor, log_probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(log_probs)


_SHAPES: dict[str, Callable[..., Any]] = {
    "_grouped_mm": _grouped_product,
    "_ctc_loss": _ctc,
    "_ctc_loss_backward": _ctc_gradient,
}
"""Operators whose shapes torch's own rules do not give on meta."""


def _meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else to_meta(tensor)


def _moved(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return an operator's options with another device, if they name one."""
    return {**kwargs, "device": device} if kwargs.get("device") is not None else kwargs


def _to_meta_device(kwargs: dict[str, Any]) -> bool:
    """Return whether an operator's options move its result to meta, as `mask.to(hidden.device)` does."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(*tensors: Tensor) -> torch.Size:
    shape: torch.Size = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    return shape


def _spreads(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether small tensors broadcast to a large one, such as (1, 4096) compared with (4096, 1)."""
    if Tag.pointwise not in getattr(func, "tags", ()):
        return False
    try:
        return _broadcast(*tensors).numel() > SMALL_NUMEL
    except RuntimeError:
        return False


def _on_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on zeros, and return its results on meta."""
    args, kwargs = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), (args, kwargs))
    return tree_map_only(Tensor, to_meta, func(*args, **kwargs))


Enter = Callable[[Cost, bool, int], None]
"""Receives a cost, whether it arises in backward, and the number of kernel launches."""


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, enter: Enter) -> Tensor:
    """Compute scaled dot product attention as one fused kernel does (Dao et al. 2022, FlashAttention), on meta tensors.

    Forward: Q K^T and P V, 2 s t (d + dv) FLOPs per head, at full cost also when causal. Backward: five such products
        for
    the forward's two, because scores are recomputed. Saved: query, key, value, the mask, the result, and one float32
    number per row of scores.

    Args:
        query: (batch, heads, s, d).
        key: (batch, key_heads, t, d).
        value: (batch, key_heads, t, dv).
        mask: of the scores, or None.
        enter: receives the costs.

    Returns:
        (batch, heads, s, dv).
    """
    return _Attention.apply(query, key, value, mask, enter)  # type: ignore[no-any-return, no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enter: Enter) -> Tensor:
        shape = (*query.shape[:-1], value.shape[-1])
        # Fused kernels keep the query's layout, so that merging the heads afterwards copies nothing.
        result = torch.empty_like(query) if query.shape == shape else query.new_empty(shape)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        head_dims = query.shape[-1] + value.shape[-1]
        flops = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * head_dims
        read = _tensor_nbytes(query, key, value, *(() if mask is None else (mask,)))
        enter(Cost(kind="attention", flops=flops, nbytes=read + _tensor_nbytes(result, rows)), False, 1)
        ctx.save_for_backward(query, key, value, result, rows, mask)
        ctx.enter, ctx.flops = enter, flops
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, result, rows, _ = ctx.saved_tensors
        nbytes = _tensor_nbytes(query, key, value, result, rows, *gradients) + _tensor_nbytes(query, key, value)
        ctx.enter(Cost(kind="attention", flops=2.5 * ctx.flops, nbytes=nbytes), True, 1)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """One call of torch.lstm, gru, rnn_tanh or rnn_relu.

    Attributes:
        input: (batch, seq, in), (seq, batch, in) or packed.
        states: (layers x directions, batch, hidden) each.
        parameters: weights and biases of all layers and directions.
        steps: length of the longest sequence.
    """

    input: Tensor
    states: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    layers: int
    directions: int
    steps: int

    @property
    def tokens(self) -> int:
        return math.prod(self.input.shape[:-1])

    @property
    def matrices(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters if parameter.dim() == 2]

    @property
    def kept_per_token(self) -> int:
        """Elements saved for backward: gates, cell and hidden state of every layer and direction."""
        hidden_weights = self.matrices[1 :: len(self.matrices) // (self.layers * self.directions)]
        return sum(weight.shape[0] + len(self.states) * weight.shape[1] for weight in hidden_weights)


def recurrence_of(args: Sequence[Any]) -> Recurrence:
    """Read the arguments of torch.lstm, gru, rnn_tanh or rnn_relu, for padded or packed sequences."""
    packed = isinstance(args[3], (list, tuple))  # (data, batch_sizes, state, weights, ...); padded has no batch_sizes
    hidden, parameters, _, layers, _, _, bidirectional = args[2:9] if packed else args[1:8]
    return Recurrence(
        input=args[0],
        states=(hidden,) if isinstance(hidden, Tensor) else tuple(hidden),
        parameters=tuple(parameters),
        layers=layers,
        directions=2 if bidirectional else 1,
        steps=len(args[1]) if packed else args[0].shape[1 if args[8] else 0],
    )


def recurrent(call: Recurrence, *, enter: Enter) -> tuple[Tensor, ...]:
    """Run a recurrent layer as one operator.

    Forward FLOPs: 2 x the elements of all weight matrices per token, so 2 x 4 (in + hidden) hidden per token of an LSTM
    layer. Backward: the same for the gradients of weights, and once more for those of inputs. Gate arithmetic is not
    counted. Launches: two per step, layer and direction.

    Args:
        call: the call to run.
        enter: receives the costs.

    Returns:
        (output, last state), or (output, last hidden, last cell) for an LSTM.
    """
    return _Recurrent.apply(call, enter, call.input, *call.states, *call.parameters)  # type: ignore[no-any-return, no-untyped-call]


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Recurrence, enter: Enter, input: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        width = tensors[0].shape[-1] * call.directions
        output = input.new_empty((*input.shape[:-1], width))
        reserve = input.new_empty((call.tokens, call.kept_per_token))
        last = tuple(torch.empty_like(state) for state in tensors[: len(call.states)])
        flops = 2.0 * call.tokens * sum(weight.numel() for weight in call.matrices)
        nbytes = _tensor_nbytes(input, output, reserve, *tensors)
        enter(Cost(kind="rnn", flops=flops, nbytes=nbytes), False, 2 * call.steps * call.layers * call.directions)
        ctx.save_for_backward(input, output, reserve, *tensors)
        ctx.call, ctx.enter = call, enter
        ctx.set_materialize_grads(False)
        return (output, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call: Recurrence = ctx.call
        input, output, reserve, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        first = 0 if needed[0] else sum(w.numel() for w in _input_weights(call))
        through = sum(weight.numel() for weight in call.matrices) - first
        trained = sum(t.numel() for t, need in zip(tensors, needed[1:], strict=True) if need and t.dim() == 2)
        results = [torch.empty_like(t) if need else None for t, need in zip((input, *tensors), needed, strict=True)]
        moved = _tensor_nbytes(input, output, reserve, *tensors, *(g for g in (*gradients, *results) if g is not None))
        ctx.enter(Cost(kind="rnn", flops=2.0 * call.tokens * (through + trained), nbytes=moved), True, 0)
        return None, None, *results


def _input_weights(call: Recurrence) -> list[Tensor]:
    """Return the first layer's input weights of each direction, through which the input's gradient flows."""
    per_direction = len(call.matrices) // (call.layers * call.directions)
    return [call.matrices[per_direction * direction] for direction in range(call.directions)]


def _tensor_nbytes(*tensors: Tensor) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
