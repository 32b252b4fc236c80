"""Intercept the model's calls while it runs on parts of sequences: attention, positions, and means over tokens.

The torch functions are replaced where the model looks them up, for the duration of a microbatch. A TorchFunctionMode
would not suffice: torch disables it inside composite functions (that of nn.MultiheadAttention) and in backward, where
recompute runs layers again.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from tutti.errors import ScriptError
from tutti.parallel.context.context_attention import Attention
from tutti.parallel.divided_tensor import local
from tutti.parallel.loss_means import note_mean
from tutti.parallel.tensor.tensor_activation import SplitTensor, on_whole

TRACER = str(Path(__file__).parents[1] / "pipeline" / "stage_tracing.py")
"""File of the pipeline's tracer, whose frames do not count as callers."""

Site = tuple[str, int]
"""File and line of a call."""


@dataclass(slots=True)
class MicrobatchState:
    """What is known while one microbatch runs.

    Attributes:
        attention: attention over the whole sequences.
        positions: positions of this rank's tokens.
        sites: where the model makes the positions of a sequence with torch.arange.
        averages: whether a mean over tokens (in the model, or in a mean loss) is taken over all ranks' tokens.
        own_mask: whether the model's attention mask was added by tutti and is all ones.
    """

    attention: Attention
    positions: torch.Tensor
    sites: frozenset[Site] = frozenset()
    averages: bool = False
    own_mask: bool = False

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """While open, a mean over tokens is taken over all ranks' tokens."""
        before, self.averages = self.averages, True
        try:
            yield
        finally:
            self.averages = before


@contextmanager
def intercepted_calls(state: MicrobatchState, model: nn.Module) -> Iterator[None]:
    """While open, the model's calls are computed over the whole sequences.

    Attention sees the tokens of all ranks, torch.arange gives the positions of this rank's tokens, and means leave out
    ignored tokens as on one device.
    """
    replaced = {
        F.scaled_dot_product_attention: partial(_attention, state, F.scaled_dot_product_attention),
        F.multi_head_attention_forward: partial(_multi_head, state, F.multi_head_attention_forward),
        torch.arange: partial(_arange, state, torch.arange),
        F.cross_entropy: partial(_mean, state, F.cross_entropy),
        F.nll_loss: partial(_mean, state, F.nll_loss),
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused kernel does not call an attention function
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for module in (torch, F, *_modules_of(model)):
            names = {name: replaced[value] for name, value in vars(module).items() if _is_in(value, replaced)}
            stack.enter_context(_changed(module, names))
        yield


@contextmanager
def _changed(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    """While open, the module's attributes `names` have these values."""
    before = {name: vars(module)[name] for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """The modules that define the model's classes: they may have imported a function under its own name."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    own_names = sorted(name for name in names if name.partition(".")[0] not in ("torch", "builtins", "tutti"))
    return [sys.modules[name] for name in own_names if name in sys.modules]


def _is_in(value: Any, functions: Mapping[Any, Any]) -> bool:
    return any(value is function for function in functions)  # by identity: values may be unhashable


def _attention(state: MicrobatchState, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Attention over the sequence, on this rank's heads where the split axis divides them.

    If the model is traced for its shapes, the tracer records the call.
    """
    values = (*args, *kwargs.values())
    if any(isinstance(value, FakeTensor) for value in values) and has_torch_function(values):
        return handle_torch_function(partial(_attention, state, function), values, *args, **kwargs)
    if not any(isinstance(value, SplitTensor) for value in (*args, *kwargs.values())):
        return state.attention(*args, **kwargs)

    def on_local_heads(**arguments: Any) -> torch.Tensor:
        plain: dict[str, Any] = {
            name: local(value) if isinstance(value, SplitTensor) else value for name, value in arguments.items()
        }
        return state.attention(**plain)

    with torch._C.DisableTorchFunctionSubclass():
        result = SplitTensor.handlers[function](on_local_heads, args, kwargs)
        return on_whole(state.attention, args, kwargs) if result is NotImplemented else result


def _multi_head(state: MicrobatchState, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention, which calls the attention function only if it need not return the weights."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    if call.arguments["need_weights"] and state.attention.part in call.arguments["key"].shape[:1]:
        raise ScriptError(
            "nn.MultiheadAttention called with need_weights=True computes attention over the tokens of one rank only "
            f"(mesh.context = {state.attention.order.degree}); call it with need_weights=False"
        )
    return function(*args, **kwargs)


def _arange(state: MicrobatchState, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The positions of this rank's tokens, where the model counts over its part of a sequence."""
    values = function(*args, **kwargs)
    if counted(args, kwargs) == state.attention.part and caller(1) in state.sites:
        return state.positions.to(device=values.device, dtype=values.dtype)
    return values


def _mean(state: MicrobatchState, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over tokens that are not ignored, as if all ranks' tokens were here.

    It is the sum over this part, divided by the mean over the ranks of the number of tokens that count.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    target, weight = arguments["target"], arguments["weight"]
    legacy = arguments["size_average"] is not None or arguments["reduce"] is not None
    if arguments["reduction"] != "mean" or legacy or target.is_floating_point():
        return function(*args, **kwargs)
    is_counted = target != arguments["ignore_index"]
    key = (id(target), arguments["ignore_index"], id(weight))
    if not state.averages:
        if not bool(is_counted.all()):
            raise ScriptError(
                "the loss is a mean over the tokens that are not ignored, and ranks along the context axis have "
                "different numbers of them; return tutti.Weighted(sum, count) with reduction='sum', or pass loss_fn "
                "to prepare"
            )
        return function(*args, **kwargs)
    arguments["reduction"] = "sum"
    total = function(*call.args, **call.kwargs)
    weights: torch.Tensor = is_counted if weight is None else weight[target.where(is_counted, 0)] * is_counted
    number = weights.sum().to(total.dtype)
    dist.all_reduce(number, group=state.attention.ring.group)
    result = total * (state.attention.order.degree / number)
    note_mean(result, number / state.attention.order.degree, key, target)
    return result


class CallRecorder(TorchFunctionMode):
    """Records calls that depend on the sequence length.

    Attributes:
        length: number of tokens.
        sites: where torch.arange counts to `length`.
        softmaxes: number of softmaxes over (length x length).
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.sites: set[Site] = set()
        self.softmaxes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.arange and counted(args, kwargs or {}) == self.length:
            self.sites.add(caller(1))
        result = func(*args, **(kwargs or {}))
        if func in (F.softmax, torch.softmax, torch.Tensor.softmax):
            self.softmaxes += result.dim() > 2 and result.shape[-1] == result.shape[-2] == self.length
        return result


def counted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """n if torch.arange is called for 0, 1, ..., n - 1; else None."""
    arguments = dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False))
    arguments.update({name: kwargs[name] for name in ("start", "end", "step") if name in kwargs})
    if arguments.get("start", 0) != 0 or arguments.get("step", 1) != 1:
        return None
    end = arguments.get("end")
    return int(end) if end is not None and float(end).is_integer() else None


def caller(depth: int) -> Site:
    """File and line of the call `depth` frames above the caller of this function, without the frames of the tracer."""
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_filename == TRACER and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


Active = Callable[[], MicrobatchState | None]
"""Returns the state while the model runs on parts of sequences; None while it runs on whole ones."""


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model is from `transformers`, which is not imported for this."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def adapt(model: nn.Module, active: Active) -> None:
    """Register an attention function that a Hugging Face model calls; on whole sequences it is the library's own.

    Raises:
        ScriptError: if the model's attention implementation is not sdpa.
    """
    name = f"tutti_context_{id(model):x}"
    used = getattr(model.config, "_attn_implementation", None)
    if used != "sdpa":
        raise ScriptError(
            f'{type(model).__name__} uses attn_implementation = "{used}", which computes attention over the tokens of '
            'one rank only; for mesh.context create the model with attn_implementation="sdpa"'
        )
    if not getattr(model, "_can_set_attn_implementation", bool)():
        return  # the model calls scaled_dot_product_attention itself
    from transformers import masking_utils, modeling_utils

    plain_mask = masking_utils.sdpa_mask
    plain_attention = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        state = active()
        if state is None:
            return plain_mask(*args, **kwargs)
        return _key_mask(type(model).__name__, state, plain, **kwargs)

    def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        if active() is None:
            return plain_attention(module, q, k, v, mask, **kwargs)
        return _huggingface_attention(module, q, k, v, mask, **kwargs)

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


def _key_mask(model: str, state: MicrobatchState, plain: tuple[Any, ...], **kwargs: Any) -> torch.Tensor | None:
    """The padding of this rank's keys, (batch, 1, 1, keys), with an attribute `causal`.

    None if nothing is padded; the attention's own flag then says whether it is causal.
    """
    function = kwargs.get("mask_function", plain[0])
    if function not in plain:
        raise ScriptError(
            f"{model} makes an attention mask that is neither causal nor full (a sliding window, chunks, or packed "
            "sequences), which is not supported on parts of sequences; drop the context axis for this model"
        )
    padding = kwargs.get("attention_mask")
    if padding is None or state.own_mask:
        return None
    mask: torch.Tensor = padding.bool()[:, None, None, : kwargs["kv_length"]]
    mask.causal = function is plain[0]  # type: ignore[attr-defined]
    return mask


def _huggingface_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The library's sdpa attention, with padding and causality as separate arguments."""
    unsupported = [name for name in ("position_bias", "softcap") if kwargs.get(name) is not None]
    if unsupported:
        raise ScriptError(
            f"{type(module).__name__} applies {unsupported[0]} to its attention scores, which is not supported on "
            "parts of sequences; drop the context axis for this model"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        causal = getattr(attention_mask, "causal", None)
        if causal is None:
            raise ScriptError(
                f"{type(module).__name__} changes its attention mask before attention, which is not supported on "
                "parts of sequences; drop the context axis for this model"
            )
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=bool(causal),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def shifted_labels(model: nn.Module, batch: Any) -> Any:
    """The batch with the next token's label at every token, if the model would shift labels itself."""
    if not is_hugging_face(model) or not isinstance(batch, Mapping) or "labels" not in batch:
        return batch
    if getattr(model, "loss_type", None) != "ForCausalLM" or "shift_labels" in batch:
        return batch
    return {**batch, "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()}
