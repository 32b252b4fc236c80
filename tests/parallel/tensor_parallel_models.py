"""Models that are divided over the split axis in tests, each with a batch and a loss. Built small, from seeds."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tutti.config.plan import LayoutRule


@dataclass(frozen=True, kw_only=True)
class Case:
    """`model`: built after seeding; `batch()`: keyword or positional arguments and a target; `loss(output, target)`;
    `divided`: (module, role) that must be among the decisions.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor]
    layout: tuple[LayoutRule, ...] = (LayoutRule(),)
    divided: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-11
    extra: dict[str, Any] = field(default_factory=dict)


def tokens(batch: int = 4, length: int = 6, vocabulary: int = 50, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def values(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(output: torch.Tensor, count: int = 5) -> torch.Tensor:
    return F.cross_entropy(output, torch.arange(len(output)) % count)


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), with a norm before and a residual around."""

    def __init__(self, width: int = 8, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Attention(nn.Module):
    """Grouped-query attention by hand: separate projections, keys repeated to the queries' heads."""

    def __init__(self, width: int = 24, heads: int = 12, key_heads: int = 12, how: str = "matmul") -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.how = heads, width // heads, how
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = q * self.scale
        if self.how == "gqa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            repeats = q.shape[1] // k.shape[1]
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
            if self.how == "einsum":
                scores = torch.einsum("bhid,bhjd->bhij", q, k) / self.head_dim**0.5
                out = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
            elif self.how == "merged":  # (batch x heads, ...), as some models do
                q, k, v = (t.reshape(-1, length, self.head_dim) for t in (q, k, v))
                scores = torch.bmm(q, k.transpose(1, 2)) / self.head_dim**0.5
                out = torch.bmm(scores.softmax(-1), v).view(batch, -1, length, self.head_dim)
            else:
                out = (q @ k.mT / self.head_dim**0.5).softmax(-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Vectors(nn.Module):
    """Token vectors through a body, then logits from the embedding's own matrix, read directly."""

    def __init__(self, body: nn.Module, width: int, vocabulary: int = 50, *, direct: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.direct = nn.Embedding(vocabulary, width, padding_idx=3), body, direct
        if not direct:
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.embed(x))
        return y @ self.embed.weight.T if self.direct else self.head(y)


class Odd(nn.Module):
    """What the table of functions does not know, or knows only in part: all of it must be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 9)
        self.c, self.d = nn.Linear(9, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x))
        y = self.b(y.flip(-1).relu_())
        z = self.c(y)
        z += 0.5
        z = torch.cat([z[:, ::2], z[:, 1::2].cumsum(-1)], -1) + z.mean(-1, keepdim=True) + z.sum(0)
        first, second = z.chunk(2, dim=-1)
        return self.d(torch.cat([second, first * z[:, 1].unsqueeze(-1)], dim=-1))


class Pictures(nn.Module):
    """Convolutions, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))  # type: ignore[no-any-return]


def plain(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def by_last(output: Any) -> torch.Tensor:
    """Cross-entropy of the next token, from logits (batch, length, vocabulary)."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    target = tokens(*logits.shape[:2], vocabulary=logits.shape[-1], seed=9)
    target[0, 0] = -100
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def squares(output: torch.Tensor) -> torch.Tensor:
    return ((output - values(*output.shape, seed=8)) ** 2).mean()


def split_rule(*globs: str) -> tuple[LayoutRule, ...]:
    return tuple(LayoutRule(modules=glob, placement="split") for glob in globs)


def recurrent(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = kind(8, 7, **options), nn.Linear(7 * (2 if options.get("bidirectional") else 1), 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, last = self.rnn(x)
            final = last if isinstance(last, torch.Tensor) else last[0] + last[1]
            return self.out(y) + final.mean()

    return Net


def attention(**options: Any) -> Case:
    return Case(
        model=lambda: nn.Sequential(Attention(**options), Gated(24, 20)),
        inputs=lambda: ((values(4, 5, 24),), {}),
        loss=squares,
        divided=(("0.q_proj", "column"), ("0.o_proj", "row"), ("1.gate", "column"), ("1.down", "row")),
    )


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with everything on: a mask a head, padding, weights returned."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 12, batch_first=True, **options)
        self.cross = nn.MultiheadAttention(24, 12, kdim=10, vdim=11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        mask = values(len(x) * 12, x.shape[1], x.shape[1])
        y, weights = self.attend(x, x, x, key_padding_mask=padding, attn_mask=mask)
        y, each = y + weights.sum(), self.attend(y, y, y, average_attn_weights=False)[1]
        y = y + each[:, 0].sum() + each.sum(1).mean()
        z, _ = self.cross(y.transpose(0, 1), values(3, len(x), 10), values(3, len(x), 11), need_weights=False)
        return z


HEADS = (("attend", "heads"), ("attend.out_proj", "row"))

CASES: dict[str, Case] = {
    "plain": Case(
        model=lambda: plain(8, 13, 7, 9, 5),
        inputs=lambda: ((values(6, 8),), {}),
        loss=classes,
        divided=(("0", "column"), ("2", "row"), ("4", "column"), ("6", "row")),
    ),
    "column output": Case(
        model=lambda: plain(8, 13, 7, 5),
        inputs=lambda: ((values(6, 8),), {}),
        loss=classes,
        layout=(*split_rule("4"), LayoutRule(modules="2", placement="replicate")),
        divided=(("4", "column"),),
    ),
    "row alone": Case(
        model=lambda: plain(8, 9, 5),
        inputs=lambda: ((values(6, 8),), {}),
        loss=classes,
        layout=(LayoutRule(modules="0", placement="row"), LayoutRule(modules="2", placement="column")),
        divided=(("0", "row"), ("2", "column")),
    ),
    "odd": Case(model=Odd, inputs=lambda: ((values(6, 8),), {}), loss=classes, divided=(("a", "column"),)),
    "heads": attention(),
    "heads merged": attention(how="merged"),
    "heads einsum": attention(how="einsum"),
    "few key heads": attention(key_heads=2),
    "few key heads gqa": attention(key_heads=2, how="gqa"),
    "key heads gqa": attention(key_heads=6, how="gqa"),
    "one key head": attention(key_heads=1, how="gqa"),
    "tied": Case(
        model=lambda: Vectors(Gated(8), 8), inputs=lambda: ((tokens(),), {}), loss=by_last,
        divided=(("embed", "vocabulary"), ("head", "column")),
    ),
    "embedding read directly": Case(
        model=lambda: Vectors(Gated(8), 8, direct=True), inputs=lambda: ((tokens(),), {}), loss=by_last,
        layout=split_rule("embed"), divided=(("embed", "vocabulary"),),
    ),
    "sequence parallel": Case(
        model=lambda: Vectors(nn.Sequential(Gated(8), Gated(8), nn.LayerNorm(8)), 8),
        inputs=lambda: ((tokens(length=7),), {}), loss=by_last,
        layout=(LayoutRule(modules="*norm", placement="row"), LayoutRule(modules="body.2", placement="row")),
        divided=(("body.0.norm", "tokens"), ("body.2", "tokens")),
    ),
    "multihead": Case(
        model=SelfAttention, inputs=lambda: ((values(4, 5, 24),), {}), loss=squares,
        divided=(*HEADS, ("cross", "heads")),
    ),
    "samples": Case(
        model=Pictures, inputs=lambda: ((values(5, 3, 6, 6),), {}), loss=classes,
        layout=(LayoutRule(modules="features", placement="row"),),
        divided=(("features", "samples"), ("classifier.0", "column"), ("classifier.2", "row")),
    ),
    "fewer samples than ranks": Case(
        model=Pictures, inputs=lambda: ((values(1, 3, 6, 6),), {}), loss=classes,
        layout=(LayoutRule(modules="features", placement="row"),), divided=(("features", "samples"),),
    ),
    "encoder": Case(
        model=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(24, 12, 20, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        inputs=lambda: ((values(4, 5, 24),), {}), loss=squares,
        divided=(("layers.0.self_attn", "heads"), ("layers.1.linear1", "column"), ("layers.1.linear2", "row")),
    ),
    "decoder": Case(
        model=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 12, 20, dropout=0.0), 1),
        inputs=lambda: ((values(5, 4, 24), values(3, 4, 24, seed=5)), {}), loss=squares,
        divided=(("layers.0.multihead_attn", "heads"),),
    ),
    "lstm": Case(
        model=recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        inputs=lambda: ((values(4, 3, 8),), {}), loss=squares, layout=split_rule("rnn"), divided=(("rnn", "units"),),
    ),
    "gru": Case(
        model=recurrent(nn.GRU, bias=False), inputs=lambda: ((values(4, 3, 8),), {}), loss=squares,
        layout=split_rule("rnn"), divided=(("rnn", "units"),),
    ),
    "rnn": Case(
        model=recurrent(nn.RNN, bidirectional=True), inputs=lambda: ((values(4, 3, 8),), {}), loss=squares,
        layout=split_rule("rnn"), divided=(("rnn", "units"),),
    ),
}  # fmt: skip
