"""Decision: what is done with one module on the split axis; and what modules are, as far as dividing them goes."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tutti.parallel.tensor.spread import Spread

Role = Literal["column", "shared", "row", "vocabulary", "heads", "units", "tokens", "samples"]
"""column: a linear layer by its outputs; shared: the same, but parameters are whole and ranks use overlapping parts;
row: by its inputs; vocabulary: an embedding by its rows; heads: nn.MultiheadAttention; units: LSTM, GRU, RNN by hidden
units; tokens: a norm, each rank on its part of the sequence; samples: any module, each rank on its part of the samples
(parameters of both are whole)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The module `name` is divided as `role` says, along `spread` (of outputs, inputs, rows, heads or units).

    `partner`: the module whose inputs or outputs meet these parts; `entered`: its input is whole and is copied for
    it alone, so backward needs an exchange (the first of several that share a copy has it). `groups`: of key heads,
    which stay whole with the heads that use them as long as every rank has one; 0: no such groups.
    """

    name: str
    role: Role
    spread: Spread
    partner: str = ""
    entered: bool = True
    groups: int = 0


def is_linear(module: nn.Module) -> bool:
    """A layer x W' + b with weight and bias as plain parameters: nn.Linear, or transformers' Conv1D."""
    own = module._parameters
    plain = set(own) <= {"weight", "bias"} and own.get("weight") is not None and not module._forward_pre_hooks
    if isinstance(module, nn.Linear):
        return plain and type(module).forward is nn.Linear.forward
    named = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return plain and named and own["weight"].ndim == 2  # type: ignore[union-attr]


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module._parameters["weight"]
    a, b = weight.shape
    return (int(b), int(a)) if isinstance(module, nn.Linear) else (int(a), int(b))


def is_embedding(module: nn.Module) -> bool:
    """An embedding whose rows can be divided."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and module._parameters.get("weight") is not None
    )


def is_heads(module: nn.Module) -> bool:
    """Attention whose heads can be divided."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.bias_k is None
        and not module.add_zero_attn
    )


def is_recurrent(module: nn.Module) -> bool:
    """A recurrent layer whose units can be divided."""
    return isinstance(module, nn.LSTM | nn.GRU | nn.RNN) and module.proj_size == 0


def is_norm(module: nn.Module) -> bool:
    """A norm over features, which any part of the tokens can be put through."""
    names = ("LayerNorm", "RMSNorm")
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(names)


def is_elementwise(module: nn.Module) -> bool:
    """A module that maps every value by itself."""
    kind = type(module)
    dropout = isinstance(module, nn.Dropout | nn.Identity)
    softmaxes = nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.MultiheadAttention | nn.GLU | nn.PReLU
    return dropout or (kind.__module__ == "torch.nn.modules.activation" and not isinstance(module, softmaxes))
