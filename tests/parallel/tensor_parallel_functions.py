"""Functions of torch on parts and on whole tensors, side by side on the same ranks: values, shapes and gradients."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from against_one import close
from tutti.comm.world import join_world
from tutti.parallel.mesh import Mesh
from tutti.parallel.tensor.partition_ranges import RankRanges, even, shared_heads
from tutti.parallel.tensor.tensor_activation import PartPlacement, SplitTensor, parted, whole
from tutti.parallel.tensor.tensor_collectives import SplitGroup, take

Function = Callable[..., Any]
LABELS = torch.tensor([[0, 3, -100, 5, 6], [6, 1, 2, -100, 0], [4, 4, 4, 0, 1], [2, 5, 6, 3, 3]])


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.arange(x.shape[-1]) > 2, -1.0)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    y += 1.0
    y.mul_(x)
    return F.relu(y, inplace=True)


# x (4, 6, 5), y (4, 6, 5), w (6, 5), v (5): x is parted along each of its dims in turn, the others are whole or parted.
EVERYWHERE: dict[str, Function] = {
    "sum": lambda x, y, w, v: x + y * w - v,
    "broadcast": lambda x, y, w, v: x * v.view(1, 1, 5) + y[:, :1] * 2 + w.mean(),
    "scalar gate": lambda x, y, w, v: x * v[0].sigmoid(),
    "where": lambda x, y, w, v: torch.where(x > 0, x, y * w),
    "functions": lambda x, y, w, v: F.gelu(x).tanh() + x.abs().clamp(min=0.1).sqrt() + F.silu(x) + x.sigmoid().pow(2),
    "clamp by tensors": lambda x, y, w, v: torch.clamp(x, min=y * w - 1, max=y * w + 1),
    "in place": lambda x, y, w, v: in_place(x),
    "whole in place": lambda x, y, w, v: (y * 1.0).add_(x),
    "kinds": lambda x, y, w, v: x.float().double() + x.to(y) + y.to(x) + x.type_as(y),
    "masked": lambda x, y, w, v: masked(x),
    "permutations": lambda x, y, w, v: x.permute(2, 0, 1).transpose(0, 1).movedim(0, -1).unsqueeze(1).squeeze(1),
    "views": lambda x, y, w, v: x.reshape(2, 2, 6, 5).flatten(0, 1).view(4, 2, 3, 5).view(-1, 5).unflatten(0, (4, -1)),
    "more views": lambda x, y, w, v: (x.view(24, 5), x.reshape(4, 30), x.flatten(), x.view_as(y), x.contiguous().mT),
    "cuts": lambda x, y, w, v: (x[1:3, :, 2:], x[:, 1], x[..., None, :-1], x[0], x[:, 4:9], *x.split([1, 3, 2], 1)),
    "more cuts": lambda x, y, w, v: (*x.chunk(3, 1), *x.unbind(2), *x.split(2), x.narrow(1, 2, 3), x.select(0, -1)),
    "joins": lambda x, y, w, v: (torch.cat([x, y, x], 1), torch.stack([x, y], -1), torch.cat([x[:1], x], 0)),
    "expanded": lambda x, y, w, v: (x[:, None].expand(-1, 3, -1, -1), x.unsqueeze(0).expand(2, 4, 6, 5)),
    "repeated": lambda x, y, w, v: (x.repeat_interleave(2, 1), torch.repeat_interleave(x, 3, dim=0), x.repeat(1, 2, 1)),
    "softmaxes": lambda x, y, w, v: x.softmax(-1) + F.log_softmax(x, dim=1) + torch.softmax(x, 0),
    "norms": lambda x, y, w, v: F.layer_norm(x, (5,), v, v * 2) + F.rms_norm(x, (5,), v) + F.layer_norm(x, (6, 5), w),
    "sums": lambda x, y, w, v: (x.sum(), x.mean(1), x.sum((0, 2), keepdim=True), x.amax(-1), x.var(1), x.norm()),
    "unknown": lambda x, y, w, v: (x.flip(1), x.roll(1, 0), x.cumsum(2), x.sort(-1).values, x[:, [0, 2]], x[x > 0]),
    "rows": lambda x, y, w, v: F.linear(x, w, v[:1].expand(6)),
    "matmuls": lambda x, y, w, v: (x @ w.T, w.unsqueeze(0) @ x.mT, x @ y.mT, torch.bmm(y, x.mT), w.T @ x),
    "contracted": lambda x, y, w, v: (x * 2) @ (x * 3).mT,
    "einsum": lambda x, y, w, v: (torch.einsum("abc,abd->acd", x, y), torch.einsum("abc,bc->ab", x, w)),
    "cross-entropy": lambda x, y, w, v: F.cross_entropy(x, LABELS % 6),
    "sizes": lambda x, y, w, v: x * (x.shape[0] + x.size(1) + len(x) + x.numel() + x.dim() + x.ndim),
    "stored": lambda x, y, w, v: __import__("copy").deepcopy(x.detach()) * x,
    "data": lambda x, y, w, v: x * x.data + x.detach(),
    "listed": lambda x, y, w, v: x * sum(x.detach().flatten()[:2].tolist()),
}  # fmt: skip

ATTENTION: dict[str, Function] = {
    "plain": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "masked": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    "masked alike": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m[:, :1]),
    "by keyword": lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3),
}


def compare(words: str, function: Function, tensors: list[torch.Tensor], places: list[PartPlacement | None]) -> None:
    """`function` of whole tensors, and of the same with those that have a place parted."""
    wholes = [t.clone().requires_grad_() for t in tensors]
    leaves = [t.clone().requires_grad_() for t in tensors]
    parts = [
        leaf if place is None else parted(take(leaf, place.dim, place.spread, place.group), place)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    expected, got = function(*wholes), function(*parts)
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (expected, got)), strict=True)
    totals = []
    for index, (a, b) in enumerate(pairs):
        assert b.shape == a.shape, f"{words}[{index}]: shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        b = whole(b)
        assert not isinstance(b, SplitTensor)
        close(b.detach(), a.detach(), 1e-12, f"{words}[{index}]")
        weights = torch.linspace(-1, 2, a.numel()).view(a.shape)
        totals.append(((a * weights).sum(), (b * weights).sum()))
    sum(a for a, _ in totals).backward()  # type: ignore[union-attr]
    sum(b for _, b in totals).backward()  # type: ignore[union-attr]
    for number, (a, b) in enumerate(zip(wholes, leaves, strict=True)):
        assert (a.grad is None) == (b.grad is None), f"{words}: gradient of argument {number}"
        if a.grad is not None and b.grad is not None:
            close(b.grad, a.grad, 1e-11, f"{words}: gradient of argument {number}")


def check_all() -> list[str]:
    """Everything above, parted in every way that makes sense; returns what failed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    world = join_world()
    mesh = Mesh({"split": world.world_size}, world.rank)
    group = SplitGroup(handle=mesh.new_group("split"), rank=world.rank, size=world.world_size)
    failures: list[str] = []

    def attempt(
        words: str, function: Function, tensors: list[torch.Tensor], places: list[PartPlacement | None]
    ) -> None:
        try:
            compare(words, function, tensors, places)
        except Exception:
            failures.append(f"{words}: {traceback.format_exc(limit=-3)}")

    def place(dim: int, spread: RankRanges) -> PartPlacement:
        return PartPlacement(dim=dim, spread=spread, group=group)

    tensors = [torch.randn(4, 6, 5), torch.randn(4, 6, 5), torch.randn(6, 5), torch.randn(5)]
    for name, function in EVERYWHERE.items():
        for dim, size in enumerate((4, 6, 5)):
            own, other = even(size, group.size), even(size, group.size)
            if dim == 1:  # another cut of the same dim, in two ranges a rank
                other = even(3, group.size).repeated(2)
            ways: list[list[PartPlacement | None]] = [[place(dim, own), None], [place(dim, own), place(dim, other)]]
            ways.append([place(dim, own), place((dim + 1) % 3, even((4, 6, 5)[(dim + 1) % 3], group.size))])
            for number, way in enumerate(ways):
                attempt(f"{name}, dim {dim}, way {number}", function, tensors, [*way, None, None])
    queries = even(12, group.size)
    qkvm = [torch.randn(2, 12, 3, 4), torch.randn(2, 12, 5, 4), torch.randn(2, 12, 5, 4), torch.randn(2, 12, 3, 5)]
    for name, function in ATTENTION.items():
        for keys in (queries, None):
            heads = None if keys is None else place(1, keys)
            attempt(f"attention {name}", function, qkvm, [place(1, queries), heads, heads, None])
    for key_heads in (1, 2, 3, 6):
        shared = shared_heads(queries, key_heads)
        held = [torch.randn(2, key_heads, 5, 4)]
        attempt(f"{key_heads} heads held twice", lambda k: k.flip(0) * k + k.sum(1, True), held, [place(1, shared)])
        few = [qkvm[0], torch.randn(2, key_heads, 5, 4), torch.randn(2, key_heads, 5, 4)]
        for keys in (shared, None):
            heads = None if keys is None else place(1, keys)
            attempt(
                f"attention over {key_heads} key heads",
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                few,
                [place(1, queries), heads, heads],
            )
    _losses(attempt, place, group)
    return failures


def _losses(attempt: Any, place: Any, group: SplitGroup) -> None:
    """Cross-entropy with every option, over classes that are cut (7 of them)."""
    spread = even(7, group.size)
    weight = torch.rand(7) + 0.5
    target = LABELS[:, 0]
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            for weights in (None, weight):

                def loss(x: torch.Tensor, t: torch.Tensor = target, w: Any = weights, r: str = reduction,
                         s: float = smoothing) -> torch.Tensor:  # fmt: skip
                    return F.cross_entropy(x, t, weight=w, reduction=r, label_smoothing=s)

                attempt(f"loss {reduction} {smoothing}", loss, [torch.randn(4, 7)], [place(1, spread)])
    attempt("loss of images", lambda x: F.cross_entropy(x, LABELS), [torch.randn(4, 7, 5)], [place(1, spread)])
    attempt("loss of one", lambda x: F.cross_entropy(x, torch.tensor(3)), [torch.randn(7)], [place(0, spread)])
    soft = torch.rand(4, 7).softmax(-1)
    attempt("soft targets", lambda x: F.cross_entropy(x, soft), [torch.randn(4, 7)], [place(1, spread)])
    attempt("likelihood", lambda x: F.nll_loss(F.log_softmax(x, -1), target), [torch.randn(4, 7)], [place(1, spread)])
