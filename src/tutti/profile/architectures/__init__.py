"""Named architectures with sizes -> ModelSpec, without torch: gpt, llama, moe, bert, t5, lstm, resnet, vit, unet, dlrm.

`architecture("llama", {"layers": 80, "hidden": 8192})`, or a preset by name, `architecture("llama3-70b", {})`.
"""

import difflib
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tutti.config.model import ModelSpec
from tutti.errors import SpecError
from tutti.profile.architectures.language import GPT, LSTM, T5, Bert, Llama, MoE
from tutti.profile.architectures.recommenders import DLRM
from tutti.profile.architectures.vision import ResNet, UNet, ViT

Architecture = GPT | Llama | MoE | Bert | T5 | LSTM | ResNet | ViT | UNet | DLRM


ARCHITECTURES: dict[str, type[Architecture]] = {
    "gpt": GPT,
    "llama": Llama,
    "moe": MoE,
    "bert": Bert,
    "t5": T5,
    "lstm": LSTM,
    "resnet": ResNet,
    "vit": ViT,
    "unet": UNet,
    "dlrm": DLRM,
}


def architecture(name: str, options: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of an architecture or preset.

    Args:
        name: name of an architecture or preset.
        options: sizes by field, as values or as text.

    Raises:
        SpecError: a name or field is unknown (the message has the nearest ones), or sizes do not fit together.
    """
    key = name.lower()
    preset = presets().get(key)
    kind = preset.architecture if preset else key
    if kind not in ARCHITECTURES:
        near = difflib.get_close_matches(key, names(), n=4, cutoff=0.3) or list(ARCHITECTURES)
        raise SpecError(f"there is no architecture {name!r}; the nearest are {', '.join(near)}")
    given = {**(preset.options if preset else {}), **{key.replace("-", "_"): value for key, value in options.items()}}
    made = ARCHITECTURES[kind](**_typed(ARCHITECTURES[kind], given))
    spec = made.build()
    return replace(spec, name=key) if preset else spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model: an architecture, its sizes, and where they are published."""

    architecture: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    text = resources.files(__package__).joinpath("presets.json").read_text(encoding="utf-8")
    return {name: Preset(**given) for name, given in json.loads(text).items()}


def names() -> tuple[str, ...]:
    """Return all valid names: architectures, then presets."""
    return (*ARCHITECTURES, *presets())


SAME = (
    ("layers", "depth", "num_layers", "n_layer", "num_hidden_layers"),
    ("hidden", "width", "dim", "d_model", "n_embd", "hidden_size", "embed_dim"),
    ("heads", "num_heads", "n_head", "num_attention_heads"),
    ("ffn", "intermediate_size", "d_ff", "mlp_dim"),
    ("seq_len", "context", "sequence", "seq", "n_positions"),
    ("vocab", "vocab_size"),
    ("image", "image_size", "img_size", "size"),
)
"""Synonyms of a size; each architecture knows one of them."""


def _typed(kind: type[Architecture], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of the fields; raise SpecError for an unknown field or an impossible value."""
    hints = get_type_hints(kind)
    known = [known_name.name for known_name in fields(kind)]
    result = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
            same = [known_name for words in SAME if name in words for known_name in known if known_name in words]
            has = f"the nearest are {', '.join(near)}" if near else f"it has {', '.join(known)}"
            has = f"did you mean {same[0]!r}?" if same else has
            raise SpecError(f"{kind.__name__} has no size {name!r}; {has}")
        result[name] = _value(name, hints[name], value)
    return result


def _value(name: str, hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType):
        raise TypeError(f"{name}: an option has one type")
    if get_origin(hint) is tuple:
        parts = value.replace("x", ",").split(",") if isinstance(value, str) else value
        parts = (parts,) if isinstance(parts, int) else parts
        return tuple(_number(name, part) for part in parts)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise SpecError(f"{name} = {value!r}; give one of {', '.join(map(str, get_args(hint)))}")
        return value
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in words:
            raise SpecError(f"{name} = {value!r}; write true or false")
        return words[str(value).lower()]
    return _number(name, value)


def _number(name: str, value: Any) -> int:
    try:
        return int(str(value).replace("_", ""))
    except ValueError:
        raise SpecError(f"{name} = {value!r} is not a whole number") from None


__all__ = ["ARCHITECTURES", "Preset", "architecture", "names", "presets"]
