"""How a model's calls are found while it runs on parts of sequences: attention, positions, and means over tokens.

The torch functions are replaced where the model looks them up, for the microbatch's duration. A TorchFunctionMode
would not do: torch takes it away inside composite functions (nn.MultiheadAttention's) and inside backward, where
layers are computed again.
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
from tutti.parallel.tensor.tensor_activation import HANDLERS, Parted, local, on_whole

FOLLOWING = str(Path(__file__).parents[1] / "stage" / "trace.py")

Site = tuple[str, int]
"""File and line of a call."""


@dataclass(slots=True)
class Pass:
    """What is known while one microbatch runs.

    `positions`: of this rank's tokens; `sites`: where the model makes the positions of a sequence with torch.arange;
    `averages`: whether a mean over tokens is taken over all ranks' tokens (in the model, and in a loss that is a
    mean); `own_mask`: whether the attention mask that the model got is tutti's, all ones.
    """

    attention: Attention
    positions: torch.Tensor
    sites: frozenset[Site] = frozenset()
    averages: bool = False
    own_mask: bool = False

    @contextmanager
    def averaging(self) -> Iterator[None]:
        before, self.averages = self.averages, True
        try:
            yield
        finally:
            self.averages = before


@contextmanager
def found_calls(known: Pass, model: nn.Module) -> Iterator[None]:
    """While open, the model's attention over the sequence is that of all ranks, torch.arange gives the positions of
    this rank's tokens, and means leave out ignored tokens as on one device.
    """
    replaced = {
        F.scaled_dot_product_attention: partial(_attention, known, F.scaled_dot_product_attention),
        F.multi_head_attention_forward: partial(_multi_head, known, F.multi_head_attention_forward),
        torch.arange: partial(_arange, known, torch.arange),
        F.cross_entropy: partial(_mean, known, F.cross_entropy),
        F.nll_loss: partial(_mean, known, F.nll_loss),
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it has no attention call of its own
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for module in (torch, F, *_modules_of(model)):
            names = {name: replaced[value] for name, value in vars(module).items() if _is_one(value, replaced)}
            stack.enter_context(_changed(module, names))
        yield


@contextmanager
def _changed(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(module)[name] for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def _modules_of(model: nn.Module) -> list[ModuleType]:
    """Where the model's classes are defined: they may have imported a function by its own name."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    own = sorted(name for name in names if name.partition(".")[0] not in ("torch", "builtins", "tutti"))
    return [sys.modules[name] for name in own if name in sys.modules]


def _is_one(value: Any, of: Mapping[Any, Any]) -> bool:
    return any(value is one for one in of)


def _attention(known: Pass, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Attention over the sequence; of this rank's heads where the split axis divides them. Where a model is followed on
    shapes, the call is left to whoever writes it down.
    """
    values = (*args, *kwargs.values())
    if any(isinstance(value, FakeTensor) for value in values) and has_torch_function(values):
        return handle_torch_function(partial(_attention, known, function), values, *args, **kwargs)
    if not any(isinstance(value, Parted) for value in (*args, *kwargs.values())):
        return known.attention(*args, **kwargs)

    def of_own_heads(**given: Any) -> torch.Tensor:
        plain: dict[str, Any] = {name: local(one) if isinstance(one, Parted) else one for name, one in given.items()}
        return known.attention(**plain)

    with torch._C.DisableTorchFunctionSubclass():
        result = HANDLERS[function](of_own_heads, args, kwargs)
        return on_whole(known.attention, args, kwargs) if result is NotImplemented else result


def _multi_head(known: Pass, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention, which only calls the attention function where it need not return weights."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    if call.arguments["need_weights"] and known.attention.part in call.arguments["key"].shape[:1]:
        raise ScriptError(
            "nn.MultiheadAttention called with need_weights=True computes attention over the tokens of one rank only "
            f"(mesh.context = {known.attention.order.degree}); call it with need_weights=False"
        )
    return function(*args, **kwargs)


def _arange(known: Pass, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    made = function(*args, **kwargs)
    if counted(args, kwargs) == known.attention.part and caller(1) in known.sites:
        return known.positions.to(device=made.device, dtype=made.dtype)
    return made


def _mean(known: Pass, function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over tokens that leaves out ignored ones, as if all ranks' tokens were here: the sum over this part
    divided by the mean number of tokens a rank counts.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    said = call.arguments
    target, weight = said["target"], said["weight"]
    legacy = said["size_average"] is not None or said["reduce"] is not None
    if said["reduction"] != "mean" or legacy or target.is_floating_point():
        return function(*args, **kwargs)
    counts = target != said["ignore_index"]
    if not known.averages:
        if not bool(counts.all()):
            raise ScriptError(
                "the loss is a mean over the tokens that are not ignored, and ranks along the context axis have "
                "different numbers of them; return tutti.Weighted(sum, count) with reduction='sum', or give prepare "
                "the loss_fn"
            )
        return function(*args, **kwargs)
    said["reduction"] = "sum"
    total = function(*call.args, **call.kwargs)
    weights: torch.Tensor = counts if weight is None else weight[target.where(counts, 0)] * counts
    number = weights.sum().to(total.dtype)
    dist.all_reduce(number, group=known.attention.ring.group)
    return total * (known.attention.order.degree / number)


class Watch(TorchFunctionMode):
    """Notes where torch.arange counts to `length` (`sites`), and softmaxes over (length x length) (`softmaxes`)."""

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
        made = func(*args, **(kwargs or {}))
        if func in (F.softmax, torch.softmax, torch.Tensor.softmax):
            self.softmaxes += made.dim() > 2 and made.shape[-1] == made.shape[-2] == self.length
        return made


def counted(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """n where torch.arange is called for 0, 1, .., n - 1; None otherwise."""
    said = dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False))
    said.update({name: kwargs[name] for name in ("start", "end", "step") if name in kwargs})
    if said.get("start", 0) != 0 or said.get("step", 1) != 1:
        return None
    end = said.get("end")
    return int(end) if end is not None and float(end).is_integer() else None


def caller(depth: int) -> Site:
    """The line that called the function that asks, `depth` calls up; what follows a model on shapes does not count."""
    frame = sys._getframe(depth + 1)
    while frame.f_code.co_filename == FOLLOWING and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


Active = Callable[[], Pass | None]
"""What is known while the model runs on parts of sequences; None while it runs on whole ones."""


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model is of `transformers` (which is not imported for it)."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def adapt(model: nn.Module, active: Active) -> None:
    """Let the attention of a Hugging Face model be seen; plain attention where the model runs on whole sequences.

    Raises ScriptError for an attention implementation other than sdpa.
    """
    name = f"tutti_context_{id(model):x}"
    used = getattr(model.config, "_attn_implementation", None)
    if used != "sdpa":
        raise ScriptError(
            f'{type(model).__name__} uses attn_implementation = "{used}", whose attention is over the tokens of one '
            'rank only; make it with attn_implementation="sdpa" for mesh.context'
        )
    if not getattr(model, "_can_set_attn_implementation", bool)():
        return  # calls scaled_dot_product_attention by itself
    from transformers import masking_utils, modeling_utils

    plain_mask = masking_utils.sdpa_mask
    plain_attention = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        known = active()
        if known is None:
            return plain_mask(*args, **kwargs)
        return _key_mask(type(model).__name__, known, plain, **kwargs)

    def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        if active() is None:
            return plain_attention(module, q, k, v, mask, **kwargs)
        return _huggingface_attention(module, q, k, v, mask, **kwargs)

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


def _key_mask(model: str, known: Pass, plain: tuple[Any, ...], **kwargs: Any) -> torch.Tensor | None:
    """The padding of this rank's keys, (batch, 1, 1, keys), which also carries whether it is `causal`; None where
    nothing is padded, and causality is the attention's own flag.
    """
    function = kwargs.get("mask_function", plain[0])
    if function not in plain:
        raise ScriptError(
            f"{model} makes an attention mask that is neither causal nor full (a sliding window, chunks, or packed "
            "sequences), which is not known for parts of sequences; drop the context axis for this model"
        )
    padding = kwargs.get("attention_mask")
    if padding is None or known.own_mask:
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
    """What the library's own sdpa function does, with padding and causality kept apart."""
    unknown = [name for name in ("position_bias", "softcap") if kwargs.get(name) is not None]
    if unknown:
        raise ScriptError(
            f"{type(module).__name__} adds {unknown[0]} to its attention scores, which is not known for parts of "
            "sequences; drop the context axis for this model"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        causal = getattr(attention_mask, "causal", None)
        if causal is None:
            raise ScriptError(
                f"{type(module).__name__} changes its attention mask on the way, which is not known for parts of "
                "sequences; drop the context axis for this model"
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
    """The batch with the next token's label at every token, where the model would shift labels itself."""
    if not is_hugging_face(model) or not isinstance(batch, Mapping) or "labels" not in batch:
        return batch
    if getattr(model, "loss_type", None) != "ForCausalLM" or "shift_labels" in batch:
        return batch
    return {**batch, "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()}
