"""Hugging Face models on parts of sequences: through the library's own seam for attention and masks.

Their masks are made from the length of the input and would be (part x part). Models that follow the library's
attention interface let the mask be replaced by the padding of this rank's keys, and causality stays a flag. Labels of
a causal language model are shifted inside the model, so the whole sequence's shifted labels are given along.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tutti.errors import ScriptError
from tutti.parallel.context.calls import Pass

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
        return _attention(module, q, k, v, mask, **kwargs)

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


def _attention(
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
