"""Patterns: groups of layers in known models and in plain ones that are divided together.

A group that is taken for what it is not costs exchanges and gives the same results (see parted.py), so names and
shapes are enough to go by.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tutti.errors import PlanError
from tutti.parallel.tensor.partition_ranges import Among, RankRanges, shared_heads

QUERY = "q query q_proj query_proj q_lin to_q wq w_q Wq q_linear linear_q q_attn W_q"


KEY = "k key k_proj key_proj k_lin to_k wk w_k Wk k_linear linear_k W_k"


VALUE = "v value v_proj value_proj v_lin to_v wv w_v Wv v_linear linear_v W_v"


FUSED = "qkv c_attn qkv_proj in_proj Wqkv query_key_value attn_qkv to_qkv wqkv W_qkv qkv_linear"


OUTPUT = """
    o o_proj out_proj output_proj out_lin to_out wo w_o Wo dense proj projection merge out c_proj output
    out_linear linear_o W_o to_out.0 output.dense
"""


HEADS = "num_heads num_attention_heads n_heads n_head heads nhead nheads"


HEAD_SIZE = "head_dim attention_head_size key_value_proj_dim head_size d_head dim_head d_kv"


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
    spread: RankRanges
    partner: str = ""
    entered: bool = True
    groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are divided together: `decide(among)` says how; `members`: their names, producers first.

    `consumer`: the one that takes the others' parts (a row layer), where there is one.
    """

    members: tuple[str, ...]
    decide: Callable[[Among], list[Decision]]
    consumer: str | None = None


def groups(model: nn.Module) -> Iterator[LayerGroup]:
    """All groups that are recognised; no module is in two of them."""
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
    """The dotted name of a module inside `name` (the empty string is the model)."""
    return ".".join(part for part in (name, *path) if part)


def _linear_at(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split("."):
        found = found._modules.get(part) if isinstance(found, nn.Module) else None
    return found if isinstance(found, nn.Module) and is_linear(found) else None


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
    """The heads of each rank: as many as all others', or in proportion to the weights."""
    degree = among.degree
    if heads % degree and not among.weights:
        raise PlanError(
            f"module {name or 'the model'!r} has {heads} attention heads, which mesh.split = {degree} does not divide "
            f"({heads} % {degree} = {heads % degree}); use a degree that divides {heads}, unequal split_shares, or "
            f"keep it whole: LayoutRule(modules='{name}*', placement='replicate')"
        )
    return among.units(name, heads, "attention heads")


def _attention(name: str, module: nn.Module, taken: set[str]) -> Iterator[LayerGroup]:
    """Attention with separate or fused projections; the output's may lie in a sibling (BERT's output.dense)."""
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
    """The first of these attributes, of the module or of its config, that is a number."""
    for place in (module, getattr(module, "config", None)):
        for name in names.split():
            value = getattr(place, name, None)
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
        spread, value_size, own_keys = _heads_among(prefix, heads, among), v // key_heads, among.fills(key_heads)
        keys = among.parted(key_heads) if own_keys else shared_heads(spread, key_heads)
        spread = keys.scaled(heads // key_heads) if own_keys else spread
        role: Any = "column" if own_keys else "shared"
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
    """(heads, size of a head) of attention whose queries have `q` values."""
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
    """q, k and v (or, beside a query layer of its own, k and v) one behind another in one layer."""
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
    """Layers of one input whose outputs, combined value by value, are the input of `down`."""

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
    """Direct children: linear layers of one shape, then the first later one that takes as many inputs."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return
    own = {key: one for key, one in module.named_children() if child(name, key) not in taken and is_linear(one)}
    keys = list(own)
    used: set[str] = set()
    for index, key in enumerate(keys):
        if key in used:
            continue
        inputs, width = features(own[key])
        down = next((k for k in keys[index + 1 :] if k not in used and features(own[k])[0] == width), None)
        if down is None or not _direct(module, key, down):
            continue
        alike = [k for k in keys[index:] if k not in used and k != down and features(own[k]) == (inputs, width)]
        ups = alike if inputs != width and not isinstance(module, nn.Sequential) else [key]
        used.update([*ups, down])
        yield _pair([child(name, k) for k in ups], child(name, down), width)


def _direct(module: nn.Module, first: str, second: str) -> bool:
    """In a Sequential: nothing but elementwise modules lies between the two."""
    if not isinstance(module, nn.Sequential):
        return True
    keys = list(module._modules)
    between = keys[keys.index(first) + 1 : keys.index(second)]
    return all(is_elementwise(module.get_submodule(key)) for key in between)


def _vocabularies(model: nn.Module) -> Iterator[LayerGroup]:
    """Output layers tied to embeddings, and what transformers models call their input and output embeddings."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if is_embedding(module) or (isinstance(module, nn.Linear) and is_linear(module)):
            owners.setdefault(id(module._parameters["weight"]), []).append(name)
    special = {id(one) for one in _transformers_embeddings(model)}
    for names in owners.values():
        modules = [model.get_submodule(name) for name in names]
        tied = any(isinstance(m, nn.Linear) for m in modules) and any(isinstance(m, nn.Embedding) for m in modules)
        if tied or any(id(module) in special for module in modules):
            yield _vocabulary(names, modules)


def _transformers_embeddings(model: nn.Module) -> Iterator[Any]:
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        if hasattr(model, getter) and type(model).__module__.startswith("transformers."):
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
    """A module that maps every value by itself."""
    kind = type(module)
    dropout = isinstance(module, nn.Dropout | nn.Identity)
    softmaxes = nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.MultiheadAttention | nn.GLU | nn.PReLU
    return dropout or (kind.__module__ == "torch.nn.modules.activation" and not isinstance(module, softmaxes))


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


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    weight: Any = module._parameters["weight"]
    a, b = weight.shape
    return (int(b), int(a)) if isinstance(module, nn.Linear) else (int(a), int(b))


def is_linear(module: nn.Module) -> bool:
    """A layer x W' + b with weight and bias as plain parameters: nn.Linear, or transformers' Conv1D."""
    own = module._parameters
    plain = set(own) <= {"weight", "bias"} and own.get("weight") is not None and not module._forward_pre_hooks
    if isinstance(module, nn.Linear):
        return plain and type(module).forward is nn.Linear.forward
    named = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return plain and named and own["weight"].ndim == 2  # type: ignore[union-attr]


def is_recurrent(module: nn.Module) -> bool:
    """A recurrent layer whose units can be divided."""
    return isinstance(module, nn.LSTM | nn.GRU | nn.RNN) and module.proj_size == 0


def is_norm(module: nn.Module) -> bool:
    """A norm over features, which any part of the tokens can be put through."""
    names = ("LayerNorm", "RMSNorm")
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(names)
