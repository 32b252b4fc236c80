"""Building blocks of named architectures: each returns the ModuleSpec that tracing such a module returns.

FLOPs: 2 per multiply-add; 1 per element of norms and elementwise work. Bytes: arguments and results of each operator
once. Sizes are those of one sample; `tokens` is the number of vectors of a sample.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from tutti.config.model import ModuleSpec, OpCost, OpKind, SplitKind

Optimizer = Literal["AdamW", "Adam", "SGD"]
"""The optimizer, which determines the bytes of its state. SGD has momentum."""

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_STATES: dict[str, int] = {"AdamW": 2, "Adam": 2, "SGD": 1}
_STATE_NBYTES = 4  # states and master weights of 2-byte parameters are float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Bytes of parameters and values.

    2-byte parameters have a float32 master copy beside the optimizer state (Micikevicius et al. 2018).

    Attributes:
        dtype: dtype of parameters and values.
        wide_gradients: keep the gradients of 2-byte parameters in float32.
    """

    dtype: str = "float32"
    optimizer: Optimizer = "AdamW"
    wide_gradients: bool = False

    @property
    def width(self) -> int:
        """Bytes of a parameter and of a value."""
        return WIDTH[self.dtype]

    def held(self, parameters: int) -> dict[str, Any]:
        """Return the fields of a ModuleSpec with this many trainable parameters."""
        states = _STATES[self.optimizer]
        narrow = self.width < _STATE_NBYTES
        state_nbytes = _STATE_NBYTES * (states + 1) if narrow else self.width * states
        return {
            "parameters": parameters,
            "trainable_parameters": parameters,
            "parameter_nbytes": parameters * self.width,
            "gradient_nbytes": parameters * (_STATE_NBYTES if narrow and self.wide_gradients else self.width),
            "optimizer_nbytes": parameters * state_nbytes,
        }


def work(
    kind: OpKind,
    flops: float,
    nbytes: float,
    *,
    back: float = 2.0,
    back_nbytes: float | None = None,
    weight_nbytes: float = 0.0,
    calls: int = 1,
) -> OpCost:
    """Return one line of costs.

    Args:
        kind: kind of the operators.
        flops, nbytes: FLOPs and bytes of forward.
        back: FLOPs of backward relative to forward's.
        back_nbytes: bytes of backward; `back` times forward's by default.
        weight_nbytes: bytes of weights that are read once per pass.
        calls: kernel launches of forward.
    """
    return OpCost(
        kind=kind,
        flops_forward=flops,
        flops_backward=back * flops,
        nbytes_forward=nbytes,
        nbytes_backward=back * nbytes if back_nbytes is None else back_nbytes,
        weight_nbytes=weight_nbytes,
        calls=calls,
    )


def linear(
    name: str,
    numbers: Numbers,
    tokens: float,
    inputs: int,
    outputs: int,
    *,
    bias: bool = True,
    keeps: bool = True,
    split: SplitKind = "",
    limit: int = 0,
    copied: bool = True,
    tied_to: str | None = None,
) -> ModuleSpec:
    """Return the costs of `nn.Linear` on `tokens` vectors.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        tokens: number of vectors.
        inputs, outputs: widths.
        bias: whether it has a bias.
        keeps: whether it saves its input; False if an earlier module already saves it.
        split: how the split axis divides it.
        limit: into how many parts at most; its width by default.
        copied: whether the input gradient of a layer that is split by columns is reduced here; False if an earlier
            layer with the same input accounts for that.
        tied_to: the module that owns its weight.
    """
    size = inputs * outputs
    moved = tokens * (inputs + outputs) * numbers.width
    column = split in ("column", "heads")
    return ModuleSpec(
        name=name,
        kind="Linear",
        **numbers.held((0 if tied_to else size) + (outputs if bias else 0)),
        activation_nbytes=float(tokens * inputs * numbers.width if keeps else 0),
        output_nbytes=float(tokens * outputs * numbers.width),
        ops=(
            work(
                "gemm",
                2.0 * tokens * size,
                moved,
                weight_nbytes=float(numbers.width * (size + (outputs if bias else 0))),
            ),
        ),
        split=split,
        split_limit=limit or (outputs if column else inputs if split == "row" else 0),
        input_nbytes=float(tokens * inputs * numbers.width) if column and copied else 0.0,
        linear_input_nbytes=0.0 if tied_to else float(tokens * inputs * numbers.width),
        tied_to=tied_to,
    )


def norm(
    name: str,
    numbers: Numbers,
    tokens: float,
    width: int,
    *,
    rms: bool = False,
    bias: bool = True,
    fused: bool = True,
    sequence: bool = True,
) -> ModuleSpec:
    """Return the costs of LayerNorm, or of RMSNorm.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        tokens: number of vectors.
        width: width of each vector.
        rms: RMSNorm instead of LayerNorm.
        bias: whether a LayerNorm has a bias.
        fused: whether RMSNorm is one kernel; otherwise six operators, as in transformers.
        sequence: whether each rank of the split axis computes its part of the tokens.
    """
    values = tokens * width
    rows = 2 * tokens * 4  # mean and deviation, float32
    if rms and not fused:
        return ModuleSpec(
            name=name,
            kind="RMSNorm",
            **numbers.held(width),
            activation_nbytes=float(2 * values * numbers.width + rows / 2),
            output_nbytes=float(values * numbers.width),
            ops=(work("elementwise", 4.0 * values, 7.0 * values * numbers.width, back=3.0, calls=6),),
            sequence=sequence,
        )
    return ModuleSpec(
        name=name,
        kind="RMSNorm" if rms else "LayerNorm",
        **numbers.held(width * (2 if bias and not rms else 1)),
        activation_nbytes=float(values * numbers.width + (rows / 2 if rms else rows)),
        output_nbytes=float(values * numbers.width),
        ops=(
            work(
                "norm", float(values), 2.0 * values * numbers.width, back=1.0, back_nbytes=3.0 * values * numbers.width
            ),
        ),
        sequence=sequence,
    )


OPERATORS: dict[str, OpKind] = {
    "GELU": "exponential",
    "SiLU": "exponential",
    "MaxPool": "pool",
    "Dropout": "random",
    "BinaryCrossEntropy": "function",
}
"""Operator kind of an activation or a pooling; the kind of all others is "elementwise"."""


def elementwise(
    name: str,
    kind: str,
    numbers: Numbers,
    values: float,
    *,
    reads: float = 1.0,
    keeps: float = 1.0,
    calls: int = 1,
    split: SplitKind = "",
    limit: int = 0,
) -> ModuleSpec:
    """Return the costs of an activation, a sum or a pooling.

    Args:
        name: name of the module.
        kind: class of the module.
        numbers: bytes of parameters and values.
        values: elements of the output.
        reads: elements read per element of the output.
        keeps: elements saved per element of the output.
        calls: kernel launches of forward.
        split: how the split axis divides it.
        limit: into how many parts at most.
    """
    nbytes = values * numbers.width
    operator = OPERATORS.get(kind, "elementwise")
    visited = values * max(1.0, reads) if operator == "pool" else values
    return ModuleSpec(
        name=name,
        kind=kind,
        activation_nbytes=float(keeps * nbytes),
        output_nbytes=float(nbytes),
        ops=(
            work(operator, float(visited), (reads + 1) * nbytes, back=1.0, back_nbytes=(2 * reads + 1) * nbytes,
                 calls=calls),
        ),
        split=split,
        split_limit=limit,
    )  # fmt: skip


def embedding(
    name: str,
    numbers: Numbers,
    tokens: float,
    rows: int,
    width: int,
    *,
    split: SplitKind = "",
    indices: bool = True,
    table: bool = False,
) -> ModuleSpec:
    """Return the costs of looking up `tokens` vectors in a table. The table's gradient is dense.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        tokens: number of vectors that are looked up.
        rows: rows of the table.
        width: width of each vector.
        split: how the split axis divides it.
        indices: whether the indices are saved.
        table: whether the table axis divides it.
    """
    moved = tokens * width * numbers.width
    return ModuleSpec(
        name=name,
        kind="Embedding",
        **numbers.held(rows * width),
        activation_nbytes=8.0 * tokens if indices else 0.0,
        output_nbytes=float(moved),
        ops=(work("embedding", 0.0, 2.0 * moved + 8.0 * tokens, back_nbytes=moved + 8.0 * tokens),),
        split=split,
        split_limit=rows if split else 0,
        table=table,
    )


def cross_entropy(name: str, numbers: Numbers, tokens: float, classes: int, *, split: SplitKind = "") -> ModuleSpec:
    """Return the costs of the loss over logits: log-softmax, which is saved, and the mean of the targets' entries."""
    values = tokens * classes
    return ModuleSpec(
        name=name,
        kind="CrossEntropy",
        activation_nbytes=float(values * numbers.width + 8 * tokens),
        output_nbytes=float(values * numbers.width),
        ops=(
            work("exponential", float(values), 2.0 * values * numbers.width, back_nbytes=5.0 * values * numbers.width,
                 calls=2),
        ),
        split=split,
        split_limit=classes if split else 0,
    )  # fmt: skip


def at(module: ModuleSpec, block: int) -> ModuleSpec:
    """Return the module as part of the repeated block with this number."""
    return replace(module, block=block)


def changed(module: ModuleSpec, **fields: Any) -> ModuleSpec:
    """Return the module with other values in some fields."""
    return replace(module, **fields)


def with_containers(modules: list[ModuleSpec]) -> tuple[ModuleSpec, ...]:
    """Return the modules with their containers, each before the first module it holds: names form a tree."""
    seen = {module.name for module in modules}
    result: list[ModuleSpec] = []
    for module in modules:
        parents = module.name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            name = ".".join(parents[:depth])
            if name not in seen:
                seen.add(name)
                # A container of blocks is outside of them; a container inside a block belongs to it.
                block = module.block if depth > 1 else -1
                result.append(ModuleSpec(name=name, kind="Container", block=block))
        result.append(module)
    return tuple(result)


AttentionKind = Literal["fused", "plain"]
"""How attention is computed.

- fused: FlashAttention (Dao et al. 2022), where scores never reach memory.
- plain: scores are written, normalised and read.
"""

MaskedWork = Literal["counted", "skipped"]
"""How causal attention counts the half of the scores that it masks: as work, or skipped as in fused kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shapes of attention.

    Attributes:
        dim: width of each head's queries and keys.
        value_dim: width of each head's values.
        query, key: query and key tokens of a sample.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    query: int
    key: int


def attention(
    name: str,
    numbers: Numbers,
    shape: Heads,
    *,
    kind: AttentionKind = "fused",
    causal: bool = False,
    masked: MaskedWork = "counted",
    dropout: bool = False,
) -> ModuleSpec:
    """Return the costs of softmax(Q K^T) V over all heads, without parameters: 2 s t (d + dv) FLOPs per head in
    forward.

    Fused: backward takes 2.5 times as much, because scores are recomputed. Query, key, value, result and one float32
        number
    per row are saved. Plain: backward takes twice as much. Query, key, value and the scores after softmax are saved;
    with dropout, also its mask and result (Korthikanti et al. 2022, eq. 2).

    Args:
        name: name of the module.
        numbers: bytes of values.
        shape: heads, widths and tokens.
        kind: fused or plain.
        causal: whether each token attends only to earlier ones.
        masked: whether masked scores count as work.
        dropout: whether the scores have dropout.
    """
    part = 0.5 if causal and masked == "skipped" and kind == "fused" else 1.0
    flops = 2.0 * part * shape.heads * shape.query * shape.key * (shape.dim + shape.value_dim)
    query = shape.heads * shape.query * shape.dim
    keys = shape.kv_heads * shape.key * (shape.dim + shape.value_dim)
    result = shape.heads * shape.query * shape.value_dim
    width = numbers.width
    common: dict[str, Any] = {
        "name": name,
        "kind": "Attention",
        "output_nbytes": float(result * width),
        "split": "heads",
        "split_limit": shape.kv_heads,
        "key_value_nbytes": float(keys * width),
    }
    if kind == "fused":
        rows = 4 * shape.heads * shape.query
        moved = (query + keys + result) * width + rows
        op = work("attention", flops, moved, back=2.5, back_nbytes=moved + (query + keys + result) * width)
        return ModuleSpec(activation_nbytes=float(moved), ops=(op,), **common)
    scores = shape.heads * shape.query * shape.key
    # Written by the product; scaled, masked and normalised by one kernel; with dropout read and written once more.
    kept = (query + keys) * width + scores * (width + (width + 1 if dropout else 0)) + result * width
    ops = [
        work("attention", flops, float((query + keys + result) * width), calls=2),
        work("exponential", float(scores), float(4 * width * scores)),
    ]
    if dropout:
        ops.append(work("random", float(scores), float((2 * width + 1) * scores)))
    return ModuleSpec(activation_nbytes=float(kept), ops=tuple(ops), **common)
