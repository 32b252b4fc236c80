"""The cost of one operator call, from the shapes of its arguments and results.

FLOPs: 2 for a multiply-add of matrix products and convolutions (PyTorch's own formulas where it has one); one for each
element of elementwise operators, reductions, normalisations and poolings; none for copies, gathers and views.
Bytes: each tensor argument read once and each result written once; views and allocations cost nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from tutti.config.model import OpKind, VectorKind
from tutti.profile.meta import flat_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs and memory traffic of one operator call."""

    kind: OpKind
    flops: float
    nbytes: float


def names(text: str) -> frozenset[str]:
    """The words of a text."""
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
    """The cost of `out = func(*args, **kwargs)`; None where nothing is computed or moved."""
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
        # A look-up reads the rows it takes, not the table: as many bytes as it writes.
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
    """The kind of an operator (`name`: without the mark of one in place) that takes a CPU longer than a sum does."""
    if "batch_norm" in name:  # of samples by channels alone, a channel's values lie side by side as a row's do
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
    """FLOPs of a call (args, kwargs, out) whose largest tensor has `numel` elements."""
    args, kwargs, out = call
    if kind == "conv":
        return _convolution_flops(out, *args, **kwargs)
    if func.overloadpacket in flop_registry:
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    if kind == "gemm":  # products with a vector: every element of the largest operand is used once
        return 2.0 * numel
    return float(numel) if kind in _BY_ELEMENT else 0.0


def _convolution_flops(out: Any, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> float:
    """2 x weight elements x batch x pixels, where pixels are those of the output (transposed: of the input).

    Backward, each gradient that is asked for (of the input, of the weight) costs as much as the forward.
    `args` differ by one: forward (input, weight, bias, ...), backward (grad_output, input, weight, bias_sizes, ...).
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
    """Bytes of tensors; of an expanded tensor only what it really holds."""
    return float(sum(min(t.numel() * t.element_size(), _storage_nbytes(t)) for t in tensors))


def _storage_nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
        return int(tensor.numel() * tensor.element_size())
