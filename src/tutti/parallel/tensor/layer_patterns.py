"""Patterns: groups of layers, in known and in plain models, that are divided together.

Names and shapes are enough to recognise a group: a wrong guess costs communication and gives the same results (see
tensor_activation.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.utils import parametrize

from tutti.config.refusals import format_degrees
from tutti.errors import PlanError
from tutti.parallel.tensor.partition_ranges import Among, RankRanges, shared_heads

# Names that models give to the projections of attention.
QUERY = "q query q_proj query_proj q_lin to_q wq w_q Wq q_linear linear_q q_attn W_q"
KEY = "k key k_proj key_proj k_lin to_k wk w_k Wk k_linear linear_k W_k"
VALUE = "v value v_proj value_proj v_lin to_v wv w_v Wv v_linear linear_v W_v"
FUSED = "qkv c_attn qkv_proj in_proj Wqkv query_key_value attn_qkv to_qkv wqkv W_qkv qkv_linear"
OUTPUT = """
    o o_proj out_proj output_proj out_lin to_out wo w_o Wo dense proj projection merge out c_proj output
    out_linear linear_o W_o to_out.0 output.dense
"""

# Names of the attributes, of a module or its config, that hold the number of heads and the size of a head.
HEADS = "num_heads num_attention_heads n_heads n_head heads nhead nheads"
HEAD_SIZE = "head_dim attention_head_size key_value_proj_dim head_size d_head dim_head d_kv"


Role = Literal["column", "shared", "row", "vocabulary", "heads", "units", "tokens", "samples"]
"""How a module is divided.

column: a linear layer, by its outputs.
shared: as column, but parameters are whole and the ranks use overlapping parts of them.
row: a linear layer, by its inputs.
vocabulary: an embedding, by its rows.
heads: nn.MultiheadAttention, by its heads.
units: LSTM, GRU or RNN, by its hidden units.
tokens: a norm with whole parameters; each rank computes its part of the sequence.
samples: any module, with whole parameters; each rank computes its part of the samples.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How one module is divided.

    Attributes:
        name: dotted name of the module.
        role: see `Role`.
        spread: ranges of the outputs, inputs, rows, heads or units that each rank holds.
        partner: the module whose inputs or outputs are these parts.
        entered: whether backward needs an all-reduce for this module's input, which is whole. Of several modules that
            share an input, only the first has it.
        groups: number of key heads, which stay together with the query heads that use them as long as every rank has at
            least one; 0 without grouped-query attention.
    """

    name: str
    role: Role
    spread: RankRanges
    partner: str = ""
    entered: bool = True
    groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are divided together.

    Attributes:
        members: names of the modules, producers first.
        decide: from the ranks, a decision for each member.
        consumer: the row layer that takes the others' parts as its input, if there is one.
    """

    members: tuple[str, ...]
    decide: Callable[[Among], list[Decision]]
    consumer: str | None = None


def groups(model: nn.Module) -> Iterator[LayerGroup]:
    """All groups that are recognised. No module is in two of them."""
    taken: set[str] = set()
    for find in (_torch_heads, _attention, _bert_mlp, _mlp):
        for name, module in model.named_modules():
            for group in find(name, module, taken):
                if not taken & set(group.members):
                    taken.update(group.members)
                    yield group
    for group in _vocabularies(model):
        if not taken & set(group.members):
            taken.update(group.members)
            yield group


def child(name: str, *path: str) -> str:
    """The dotted name of a module inside `name`; the empty string is the model itself."""
    return ".".join(part for part in (name, *path) if part)


def _linear_at(module: nn.Module, path: str) -> nn.Module | None:
    inner: Any = module
    for part in path.split("."):
        inner = inner._modules.get(part) if isinstance(inner, nn.Module) else None
    return inner if isinstance(inner, nn.Module) and is_linear(inner) else None


def _role(module: nn.Module, names: str) -> str | None:
    return next((name for name in names.split() if _linear_at(module, name) is not None), None)


def _torch_heads(name: str, module: nn.Module, taken: set[str]) -> Iterator[LayerGroup]:
    if not isinstance(module, nn.MultiheadAttention) or not is_heads(module):
        return

    def decide(among: Among) -> list[Decision]:
        heads = _heads_among(name, module.num_heads, among)
        out = Decision(
            name=child(name, "out_proj"), role="row", spread=heads.scaled(module.head_dim), partner=name, entered=False
        )
        return [Decision(name=name, role="heads", spread=heads, partner=child(name, "out_proj")), out]

    yield LayerGroup(members=(name, child(name, "out_proj")), decide=decide, consumer=child(name, "out_proj"))


def _heads_among(name: str, heads: int, among: Among) -> RankRanges:
    """The heads of each rank: equally many, or in proportion to the weights."""
    degree = among.degree
    if heads % degree and not among.weights:
        raise PlanError(
            f"module {name or 'the model'!r} has {heads} attention heads, which mesh.split = {degree} does not divide "
            f"({heads} % {degree} = {heads % degree}); use {format_degrees(heads)}, use unequal split_shares, or "
            f"keep the module whole: LayoutRule(modules='{name}*', placement='replicate')"
        )
    return among.units(name, heads, "attention heads")


def _attention(name: str, module: nn.Module, taken: set[str]) -> Iterator[LayerGroup]:
    """Attention with separate or fused projections. The output projection may be in a sibling (BERT's output.dense)."""
    for inner in ("", "self", "attention"):
        holder = module._modules.get(inner) if inner else module
        if holder is None:
            continue
        roles = [_role(holder, names) for names in (QUERY, KEY, VALUE)]
        fused, out = _role(holder, FUSED), _role(module, OUTPUT if not inner else "output.dense")
        if out is None:
            continue
        prefix = child(name, inner) if inner else name
        if all(roles):
            yield from _separate(prefix, holder, [role for role in roles if role], module, child(name, out), out)
            return
        if fused is not None:
            yield from _fused(prefix, holder, fused, roles[0], module, child(name, out), out)
            return


def _number(module: nn.Module, names: str) -> int | None:
    """The first of these attributes of the module or of its config that is a positive integer."""
    for source in (module, getattr(module, "config", None)):
        for name in names.split():
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _separate(
    prefix: str, holder: nn.Module, roles: list[str], module: nn.Module, out_name: str, out: str
) -> Iterator[LayerGroup]:
    (_, q), (_, k), (_, v) = (features(holder.get_submodule(role)) for role in roles)
    heads, size = _heads(holder, q)
    if heads is None or size is None or k % size:
        return
    key_heads = k // size
    inputs, _ = features(module.get_submodule(out))
    if heads % key_heads or v % key_heads or inputs != heads * (v // key_heads):
        return
    names = [child(prefix, role) for role in roles]

    def decide(among: Among) -> list[Decision]:
        spread, value_size, divide_keys = _heads_among(prefix, heads, among), v // key_heads, among.fills(key_heads)
        keys = among.parted(key_heads) if divide_keys else shared_heads(spread, key_heads)
        spread = keys.scaled(heads // key_heads) if divide_keys else spread
        role: Any = "column" if divide_keys else "shared"
        sizes, groups = (keys.scaled(size), keys.scaled(value_size)), key_heads if key_heads < heads else 0
        return [
            Decision(name=names[0], role="column", spread=spread.scaled(size), partner=out_name, groups=groups),
            *(Decision(name=n, role=role, spread=s, partner=out_name, entered=False, groups=groups)
              for n, s in zip(names[1:], sizes, strict=True)),
            Decision(name=out_name, role="row", spread=spread.scaled(value_size), partner=names[0], entered=False,
                     groups=groups),
        ]  # fmt: skip

    yield LayerGroup(members=(*names, out_name), decide=decide, consumer=out_name)


def _heads(holder: nn.Module, q: int) -> tuple[int | None, int | None]:
    """(number of heads, size of a head) of attention whose queries have `q` features; (None, None) if unknown."""
    heads, size = _number(holder, HEADS), _number(holder, HEAD_SIZE)
    if heads is not None and size is not None and heads * size == q:
        return heads, size
    if heads is not None and q % heads == 0:
        return heads, q // heads
    if size is not None and q % size == 0:
        return q // size, size
    return None, None


def _fused(
    prefix: str, holder: nn.Module, fused: str, query: str | None, module: nn.Module, out_name: str, out: str
) -> Iterator[LayerGroup]:
    """Attention with q, k and v concatenated in one layer, or k and v in one layer and q in another."""
    inputs, _ = features(module.get_submodule(out))
    _, outputs = features(holder.get_submodule(fused))
    heads, size = _heads(holder, inputs)
    repeats = 2 if query is not None else 3
    if heads is None or size is None or outputs != repeats * inputs:
        return
    names = [child(prefix, role) for role in (query, fused) if role is not None]

    def decide(among: Among) -> list[Decision]:
        spread = _heads_among(prefix, heads, among).scaled(size)
        spreads = [spread, spread.repeated(2)] if query is not None else [spread.repeated(3)]
        columns = [
            Decision(name=n, role="column", spread=s, partner=out_name) for n, s in zip(names, spreads, strict=True)
        ]
        return [*columns, Decision(name=out_name, role="row", spread=spread, partner=names[0], entered=False)]

    yield LayerGroup(members=(*names, out_name), decide=decide, consumer=out_name)


def _pair(ups: list[str], down: str, width: int) -> LayerGroup:
    """Layers that share an input, and whose outputs are combined elementwise into the input of `down`."""

    def decide(among: Among) -> list[Decision]:
        spread = among.units(ups[0], width, "outputs")
        columns = [
            Decision(name=name, role="column", spread=spread, partner=down, entered=index == 0)
            for index, name in enumerate(ups)
        ]
        return [*columns, Decision(name=down, role="row", spread=spread, partner=ups[0], entered=False)]

    return LayerGroup(members=(*ups, down), decide=decide, consumer=down)


def _bert_mlp(name: str, module: nn.Module, taken: set[str]) -> Iterator[LayerGroup]:
    first, second = _linear_at(module, "intermediate.dense"), _linear_at(module, "output.dense")
    if first is not None and second is not None and features(first)[1] == features(second)[0]:
        yield _pair([child(name, "intermediate.dense")], child(name, "output.dense"), features(first)[1])


def _mlp(name: str, module: nn.Module, taken: set[str]) -> Iterator[LayerGroup]:
    """Direct children: linear layers of one shape, and the first later one with as many inputs as they have outputs."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return
    linears = {
        key: inner for key, inner in module.named_children() if child(name, key) not in taken and is_linear(inner)
    }
    keys = list(linears)
    used: set[str] = set()
    for index, key in enumerate(keys):
        if key in used:
            continue
        inputs, width = features(linears[key])
        down = next((k for k in keys[index + 1 :] if k not in used and features(linears[k])[0] == width), None)
        if down is None or not _direct(module, key, down):
            continue
        same_shape = [
            k for k in keys[index:] if k not in used and k != down and features(linears[k]) == (inputs, width)
        ]
        ups = same_shape if inputs != width and not isinstance(module, nn.Sequential) else [key]
        used.update([*ups, down])
        yield _pair([child(name, k) for k in ups], child(name, down), width)


def _direct(module: nn.Module, first: str, second: str) -> bool:
    """Whether, in a Sequential, only elementwise modules are between the two; True in other modules."""
    if not isinstance(module, nn.Sequential):
        return True
    keys = list(module._modules)
    between = keys[keys.index(first) + 1 : keys.index(second)]
    return all(is_elementwise(module.get_submodule(key)) for key in between)


def _vocabularies(model: nn.Module) -> Iterator[LayerGroup]:
    """Output layers tied to embeddings, and the modules that transformers models return as their embeddings."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if is_embedding(module) or (isinstance(module, nn.Linear) and is_linear(module)):
            owners.setdefault(id(module._parameters["weight"]), []).append(name)
    special = {id(module) for module in _transformers_embeddings(model)}
    for names in owners.values():
        modules = [model.get_submodule(name) for name in names]
        tied = any(isinstance(m, nn.Linear) for m in modules) and any(isinstance(m, nn.Embedding) for m in modules)
        if tied or any(id(module) in special for module in modules):
            yield _vocabulary(names, modules)


def _transformers_embeddings(model: nn.Module) -> Iterator[Any]:
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if hasattr(model, getter) and type(model).__module__.startswith("transformers."):
            with contextlib.suppress(NotImplementedError):  # a model without text, or with several parts
                yield getattr(model, getter)()


def _vocabulary(names: list[str], modules: list[nn.Module]) -> LayerGroup:
    size = int(modules[0]._parameters["weight"].shape[0])  # type: ignore[union-attr]

    def decide(among: Among) -> list[Decision]:
        spread = among.units(names[0], size, "rows")
        return [
            Decision(name=n, role="vocabulary" if is_embedding(m) else "column", spread=spread, entered=is_linear(m))
            for n, m in zip(names, modules, strict=True)
        ]

    return LayerGroup(members=tuple(names), decide=decide)


def is_elementwise(module: nn.Module) -> bool:
    """Whether the module maps each value independently."""
    kind = type(module)
    dropout = isinstance(module, nn.Dropout | nn.Identity)
    softmaxes = nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.MultiheadAttention | nn.GLU | nn.PReLU
    return dropout or (kind.__module__ == "torch.nn.modules.activation" and not isinstance(module, softmaxes))


def computes_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call of the module computes just what one of torch's classes does, from parameters of its own.

    It does not if a subclass or the instance has another forward, or if parameters are parametrised.
    """
    torchs = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
    return torchs and "forward" not in vars(module) and not parametrize.is_parametrized(module)


def is_embedding(module: nn.Module) -> bool:
    """Whether the module is an embedding whose rows can be divided."""
    return (
        isinstance(module, nn.Embedding)
        and computes_as(module, nn.Embedding)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
        and module._parameters.get("weight") is not None
    )


def is_heads(module: nn.Module) -> bool:
    """Whether the module is attention whose heads can be divided."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and computes_as(module, nn.MultiheadAttention)
        and module.bias_k is None
        and not module.add_zero_attn
        and is_linear(module.out_proj)
        and not module.out_proj._forward_hooks  # torch does not call it, so its hooks do not run
    )


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module._parameters["weight"]
    a, b = weight.shape
    return (int(b), int(a)) if isinstance(module, nn.Linear) else (int(a), int(b))


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes x W' + b with plain weight and bias: nn.Linear, or transformers' Conv1D."""
    parameters = module._parameters
    plain = (
        set(parameters) <= {"weight", "bias"} and parameters.get("weight") is not None and not module._forward_pre_hooks
    )
    if isinstance(module, nn.Linear):
        return plain and computes_as(module, nn.Linear)
    named = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    named = named and "forward" not in vars(module) and not parametrize.is_parametrized(module)
    return plain and named and parameters["weight"].ndim == 2  # type: ignore[union-attr]


def is_recurrent(module: nn.Module) -> bool:
    """Whether the module is a recurrent layer whose units can be divided."""
    if not isinstance(module, nn.LSTM | nn.GRU | nn.RNN) or not computes_as(module, nn.LSTM, nn.GRU, nn.RNN):
        return False
    # a weight that is computed anew in every forward (weight_norm, weight drop) is no parameter
    return module.proj_size == 0 and set(module._parameters) == set(module._flat_weights_names)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm over features, which can be computed on any part of the tokens."""
    names = ("LayerNorm", "RMSNorm")
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(names)
