"""The cost of one operator call, from the shapes of its arguments and results.

FLOPs: 2 for a multiply-add of matrix products and convolutions (PyTorch's own formulas where it has one); one for each
element of elementwise operators, reductions, normalisations and poolings; none for copies, gathers and views.
Bytes: each tensor argument read once and each result written once; views and allocations cost nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from tutti.describe.meta import flat_tensors
from tutti.spec.model import OpKind


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
    "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data native_dropout "
    "native_dropout_backward sum mean prod amax amin max min argmax argmin var std var_mean std_mean cumsum cumprod "
    "logsumexp norm linalg_vector_norm all any bernoulli_ bernoulli uniform_ normal_"
)
_ELEMENTWISE_PARTS = ("pool", "_loss", "upsample", "grid_sampl", "_foreach_", "softmax", "interpolate")


def cost_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost | None:
    """The cost of `out = func(*args, **kwargs)`; None where nothing is computed or moved."""
    name = func._schema.name.partition("::")[2]
    if name in _FREE or func.is_view:
        return None
    inputs = list(flat_tensors((*args, *kwargs.values())))
    outputs = list(flat_tensors([out]))
    if not outputs:
        return None
    kind = _kind(func, name)
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


def _kind(func: OpOverload, name: str) -> OpKind:
    if name in _GEMM:
        return "gemm"
    if name in _CONVOLUTION:
        return "conv"
    if "attention" in name:
        return "attention"
    if "embedding" in name:
        return "embedding"
    if name.endswith(("_norm", "_norm_backward")) or "batch_norm" in name or "rms_norm" in name:
        return "norm"
    if name in _ELEMENTWISE or any(part in name for part in _ELEMENTWISE_PARTS):
        return "elementwise"
    if Tag.pointwise in func.tags and name not in ("copy_", "clone", "_to_copy", "fill_", "zero_"):
        return "elementwise"
    return "other"


def _flops(func: OpOverload, kind: OpKind, call: tuple[tuple[Any, ...], dict[str, Any], Any], numel: int) -> float:
    """FLOPs of a call (args, kwargs, out) whose largest tensor has `numel` elements."""
    args, kwargs, out = call
    if kind == "conv":
        return _convolution_flops(out, *args, **kwargs)
    if func.overloadpacket in flop_registry:
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    if kind == "gemm":  # products with a vector: every element of the largest operand is used once
        return 2.0 * numel
    return float(numel) if kind in ("elementwise", "norm") else 0.0


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
