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
from tutti.nn.masked_attention import attention
from tutti.nn.visibility import SequenceParts, over_parts
from tutti.parallel.context.context_attention import Attention
from tutti.parallel.context.ring_attention import gather_tokens
from tutti.parallel.context.sequence_order import gather_whole
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
        documents: (batch or 1, tokens of this rank), the document of each token, if the caller's positions say that
            sequences are packed.
        has_all_keys: whether the attention that is running was given the keys of all ranks.
    """

    attention: Attention
    positions: torch.Tensor
    sites: frozenset[Site] = frozenset()
    averages: bool = False
    own_mask: bool = False
    documents: torch.Tensor | None = None
    has_all_keys: bool = False

    def take_documents(self, positions: torch.Tensor) -> None:
        """Number documents by the positions of this rank's tokens, as Hugging Face models do. Collective.

        A new document begins where a token's position does not follow that of the token before it.
        """
        if isinstance(positions, FakeTensor) or positions.dim() != 2 or positions.shape[1] != self.attention.part:
            return
        whole = self.attention.gathered(positions)
        numbers = (whole.diff(prepend=whole[:, :1] - 1) != 1).cumsum(-1)
        packed = numbers.device.type != "cpu" or bool(numbers[:, -1].any())  # elsewhere the host would have to wait
        self.documents = self.attention.order.take(numbers, 1) if packed else None

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
        over = state.attention
        parts = SequenceParts(attend=over.masked, part=over.part, length=over.length)
        stack.enter_context(over_parts(parts))
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
    if state.has_all_keys:
        return function(*args, **kwargs)
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


def takes_packed(model: nn.Module, passed: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments tells packed documents by their positions: without a mask and a cache."""
    if passed.get("attention_mask") is not None or passed.get("past_key_values") is not None:
        return False
    stated = passed.get("use_cache")
    caches = getattr(model.config, "use_cache", False) if stated is None else stated
    return not caches or (model.training and getattr(model, "is_gradient_checkpointing", False))


def adapt(model: nn.Module, active: Active) -> None:
    """Register an attention function that a Hugging Face model calls; on whole sequences it is the library's own.

    Raises:
        ScriptError: if the model computes its attention itself.
    """
    name = f"tutti_context_{id(model):x}"
    used = getattr(model.config, "_attn_implementation", None)
    registers = getattr(model, "_can_set_attn_implementation", bool)()
    if used != "sdpa" and not (used == "eager" and registers):
        raise ScriptError(
            f'{type(model).__name__} uses attn_implementation = "{used}", which computes attention over the tokens of '
            'one rank only; for mesh.context create the model with attn_implementation="sdpa" where it has that, or '
            "drop the context axis"
        )
    if not registers:
        return  # the model calls scaled_dot_product_attention itself
    from transformers import masking_utils, modeling_utils

    plain_mask: Callable[..., Any] = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[used]
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)

    def mask(*args: Any, **kwargs: Any) -> Any:
        state = active()
        if state is None:
            return plain_mask(*args, **kwargs)
        if used == "sdpa" and kwargs.get("mask_function", plain[0]) in plain:
            return _key_mask(state, plain, **kwargs)
        return _rows_of_mask(type(model).__name__, state, plain_mask, **kwargs)

    def attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        state = active()
        own_function = _library_attention(module, used)
        if state is None:
            return own_function(module, q, k, v, mask, **kwargs)
        if used == "sdpa" and not hasattr(mask, "rows"):
            return _huggingface_attention(module, q, k, v, mask, documents=state.documents, **kwargs)
        return _over_gathered_keys(own_function, state, module, q, k, v, mask, **kwargs)

    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, attend)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    model.set_attn_implementation(name)  # type: ignore[operator]


def _library_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention that a module of the library would call: its own file's if that is eager."""
    from transformers import modeling_utils

    if implementation == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]
    return modeling_utils.ALL_ATTENTION_FUNCTIONS[implementation]  # type: ignore[no-any-return]


def _rows_of_mask(model: str, state: MicrobatchState, plain_mask: Callable[..., Any], **kwargs: Any) -> Any:
    """The library's mask of the whole sequence for this rank's queries, (batch, 1, part, tokens).

    It serves masks that are no matter of causality and padding alone (sliding windows, chunks), and attention that the
    model's own code computes.
    """
    part, order = state.attention.part, state.attention.order
    if kwargs["q_length"] != part or kwargs["kv_length"] != part:
        raise ScriptError(
            f"{model} makes an attention mask of {kwargs['q_length']} queries and {kwargs['kv_length']} keys for a "
            f"part of {part} tokens (mesh.context = {order.degree}), which is not supported; drop the context axis"
        )
    padding = None if state.own_mask else kwargs.get("attention_mask")
    if padding is not None:
        padding = gather_whole(padding, 1, order, state.attention.ring.group)
    skipped = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    lengths = {"q_length": state.attention.length, "kv_length": state.attention.length}
    mask = plain_mask(**{**kwargs, **skipped, **lengths, "attention_mask": padding})
    if state.documents is not None:
        numbers = state.attention.gathered(state.documents)
        same = (numbers[:, :, None] == numbers[:, None, :])[:, None]
        hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
        mask = mask.masked_fill(~same, hidden)
    rows = order.take(mask, -2)
    rows.rows = part  # type: ignore[attr-defined]
    return rows


def _over_gathered_keys(
    function: Callable[..., Any],
    state: MicrobatchState,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """The model's own attention of this rank's queries to the keys and values of all ranks, which are gathered.

    So that attention with sinks, caps or windows is what it is on one device; a rank has (part x tokens) scores.
    """
    if kwargs.get("position_bias") is not None:
        raise ScriptError(
            f"{type(module).__name__} adds a position bias to its attention scores, which it computes for the tokens "
            "of one rank only; drop the context axis for this model"
        )
    if any(isinstance(tensor, SplitTensor) for tensor in (query, key, value)):
        raise ScriptError(
            f"{type(module).__name__} computes attention with sinks, caps or windows, for which the context and split "
            "axes cannot be combined; drop one of them"
        )
    if isinstance(key, FakeTensor) or key.shape[2] != state.attention.part:
        return function(module, query, key, value, None, **kwargs)
    if not hasattr(mask, "rows"):
        raise ScriptError(
            f"{type(module).__name__} attends without a mask, or changes it before attention, which is not supported "
            "on parts of sequences; drop the context axis for this model"
        )
    ring = state.attention.ring
    key, value = gather_tokens(key, ring), gather_tokens(value, ring)
    state.has_all_keys = True
    try:
        return function(module, query, key, value, mask, **{**kwargs, "is_causal": False})
    finally:
        state.has_all_keys = False


def _key_mask(state: MicrobatchState, plain: tuple[Any, ...], **kwargs: Any) -> torch.Tensor | None:
    """The padding of this rank's keys, (batch, 1, 1, keys), with an attribute `causal`.

    None if nothing is padded; the attention's own flag then says whether it is causal.
    """
    function = kwargs.get("mask_function", plain[0])
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
    documents: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The library's sdpa attention, with padding, causality and packed documents as separate arguments."""
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
    if documents is not None:
        if dropout:
            raise ScriptError(
                f"{type(module).__name__} drops attention probabilities ({dropout}) of packed sequences, which is not "
                "supported on parts of sequences; set attention_dropout to 0, or drop the context axis"
            )
        documents = documents.expand(query.shape[0], -1)
        out = attention(query, key, value, causal=bool(causal), documents=documents, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
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
    # The library chooses this loss also for models whose class names none, such as GPT2LMHeadModel.
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss" or "shift_labels" in batch:
        return batch
    return {**batch, "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()}
