"""Blocks of attention by each fused kernel and by FlexAttention, against the same tile by tile.

CUDA's kernels are called twice without a GPU: with fake CUDA tensors, which check the operators' signatures and shapes,
and with a double on the CPU that keeps each operator's calling convention and computes in float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nn.flex_on_cpu import differentiable_flex
from tutti.nn import attention_kernels
from tutti.nn.attention_blocks import AttentionBlock, Queries, attend, attend_backward, empty_state, with_engine
from tutti.nn.attention_kernels import KERNELS, LSE_ROWS, choose_kernel
from tutti.nn.visibility import SequenceMask

SHAPES = {
    "one head": (1, 1, 1, 5, 5, 4),
    "more keys": (2, 3, 1, 7, 33, 8),
    "heads that share keys": (2, 2, 3, 16, 16, 8),
    "one query": (1, 2, 2, 1, 9, 6),
}
"""(batch, key heads, group, rows, columns, d)"""


def made(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient; `strided`: in memory with another dim last."""
    batch, heads, group, rows, columns, d = shape
    draw = torch.Generator().manual_seed(0)
    of_queries = (batch, heads, group, rows, d)
    sizes = [of_queries, (batch, heads, columns, d), (batch, heads, columns, d), of_queries]
    tensors = [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]
    return [x.transpose(-1, -2).contiguous().transpose(-1, -2) if strided else x for x in tensors]


def merged(blocks: list[tuple[AttentionBlock, Any, Any]], q: Any, v: Any, grad: Any) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients of queries that attend to several blocks."""
    out, lse = empty_state(q, v.shape[-1])
    for block, keys, values in blocks:
        attend(block, q, keys, values, out, lse)
    delta = (grad.to(lse.dtype) * out).sum(-1)
    totals = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, v, v)]
    queries = Queries(q=q, out=out.to(q.dtype), lse=lse, grad_out=grad, delta=delta, grad_q=totals[0])
    for block, keys, values in blocks:
        attend_backward(block, queries, keys, values, *totals[1:])
    return [out, lse, *totals]


def compare(engine: Any, shape: str, dtype: torch.dtype, tolerance: float, strided: bool, **first: Any) -> None:
    q, k, v, grad = made(SHAPES[shape], dtype, strided)
    causal = q.shape[-2] == k.shape[-2]
    results = []
    for used in ("tiles", engine):
        blocks = [
            (AttentionBlock(scale=0.4, causal=causal, engine=used, **first), k, v),
            (AttentionBlock(scale=0.4, engine=used), 0.5 * v, k),
        ]
        results.append(merged(blocks, q, v, grad))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_kernel_computes_what_tiles_do(shape: str, dtype: torch.dtype, tolerance: float, strided: bool) -> None:
    compare(KERNELS["cpu flash"], shape, dtype, tolerance, strided)


def reference(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; key heads are repeated for the query heads that share them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def reference_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients from a given output and log-sum-exp, as the kernels compute them."""
    assert all(x.is_contiguous() for x in (grad_out, out, lse))
    ratio = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = q @ keys.mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -torch.inf)
    p = torch.exp(scores - lse[..., None])
    slope = p * (grad_out @ values.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
    shared = [x.unflatten(1, (-1, ratio)).sum(2) for x in (slope.mT @ q, p.mT @ grad_out)]
    return slope @ keys, *shared


class Doubles:
    """The CUDA operators on the CPU: each checks what the real one takes for granted."""

    @staticmethod
    def aligned(*tensors: torch.Tensor) -> None:
        assert all(x.dim() == 4 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in tensors)

    @classmethod
    def flash(cls, q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
        cls.aligned(q, k, v)
        assert k.shape == v.shape
        out, lse = reference(q, k, v, causal, scale)
        nothing = torch.empty(0)
        return out, lse, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing

    @classmethod
    def flash_backward(  # type: ignore[no-untyped-def]
        cls, grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None
    ):
        cls.aligned(grad, q, k, v, out)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert seed.dtype == torch.uint64
        return reference_backward(grad, q, k, v, out, lse, causal, scale)

    @classmethod
    def efficient(cls, q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):  # type: ignore[no-untyped-def]
        cls.aligned(q, k, v)
        assert with_lse
        assert q.shape[1] == k.shape[1]
        out, lse = reference(q, k, v, causal, scale)
        seed = torch.zeros((), dtype=torch.int64)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf), seed, seed

    @classmethod
    def efficient_backward(  # type: ignore[no-untyped-def]
        cls, grad, q, k, v, bias, out, lse, seed, offset, dropout, needs, causal=False, *, scale=None
    ):
        cls.aligned(grad, q, k, v, out)
        assert lse.shape[-1] % LSE_ROWS == 0
        assert bool((lse[..., q.shape[2] :] == torch.inf).all())
        grads = reference_backward(grad, q, k, v, out, lse[..., : q.shape[2]].contiguous(), causal, scale)
        return *grads, torch.empty(0)

    @classmethod
    def cudnn(cls, q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):  # type: ignore[no-untyped-def]
        out, lse, *others = cls.flash(q, k, v, dropout, causal, debug, scale=scale)
        assert q.shape[1] == k.shape[1]
        return out, lse[..., None], *others

    @classmethod
    def cudnn_backward(  # type: ignore[no-untyped-def]
        cls, grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale=None
    ):
        cls.aligned(grad, q, k, v, out)
        assert (lse.dim(), max_q, max_k) == (4, q.shape[2], k.shape[2])
        return reference_backward(grad, q, k, v, out, lse[..., 0].contiguous(), causal, scale)


@pytest.fixture(scope="module")
def doubles() -> Iterator[None]:
    """CUDA's operators have implementations for the CPU."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("flash", "efficient", "cudnn"):
        for ending in ("", "_backward"):
            library.impl(f"_scaled_dot_product_{name}_attention{ending}", getattr(Doubles, name + ending), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_each_cuda_kernel_is_called_as_it_must_be(doubles: None, name: str, shape: str, strided: bool) -> None:
    compare(KERNELS[name], shape, torch.float64, 1e-12, strided)
    compare(replace(KERNELS[name], takes_groups=False), shape, torch.float64, 1e-12, strided)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_cuda_operators_accept_the_calls(name: str) -> None:
    """On fake CUDA tensors: a wrong signature, or a shape that is not expected, fails."""
    kernel = KERNELS[name]
    with FakeTensorMode():
        q = torch.empty(2, 3, 2, 40, 20, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(2, 3, 56, 20, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out, lse = kernel.run(q, k, v, causal=False, scale=1.0)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
        assert (out.dtype, lse.dtype, out.device.type) == (torch.bfloat16, torch.float32, "cuda")
        grads = kernel.run_backward(out, q, k, v, out, lse, causal=False, scale=1.0)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
        assert {grad.device.type for grad in grads} == {"cuda"}


CHOICES = [
    ("flash", True, 2, "flash", True),
    ("efficient", False, 2, "efficient", False),
    ("flash", False, 2, "flash", False),
    ("cudnn", True, 1, "cudnn", False),
    (None, False, 2, None, False),
]
"""What torch chooses for equal numbers of heads, whether also for fewer key heads; the group; what is used then."""


@pytest.mark.parametrize(("choice", "grouped_too", "group", "name", "takes_groups"), CHOICES)
def test_on_cuda_the_kernel_is_torchs_own_choice(
    choice: str | None, grouped_too: bool, group: int, name: str | None, takes_groups: bool, monkeypatch: Any
) -> None:
    numbers = {kernel: number for number, kernel in attention_kernels._BACKENDS.items()} | {None: 0}

    def choose(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: Any, enable_gqa: bool) -> int:
        assert q.shape[-1] == 24  # padded
        return numbers[choice if grouped_too or not enable_gqa else None]

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    with FakeTensorMode():
        q = torch.empty(2, 3, group, 40, 20, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 3, 40, 20, dtype=torch.bfloat16, device="cuda")
        kernel = choose_kernel(q, k, k)
    assert (kernel and kernel.name) == name
    assert kernel is None or kernel.takes_groups == takes_groups


FLEX: dict[str, dict[str, Any]] = {
    "causal": {},
    "keys": {"mask": torch.tensor([[True] * 9 + [False] * 7, [False] * 16])[:, None, None, None, :]},
    "heads": {"mask": torch.rand(1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) > 0.4},
    "added": {"mask": torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)},
    "window": {"visible": SequenceMask(window=5).visibility(16, torch.device("cpu"))},
    "documents": {
        "visible": SequenceMask(documents=torch.tensor([[0] * 7 + [1] * 9, [2] * 5 + [0] * 8 + [-1] * 3])).visibility(
            16, torch.device("cpu")
        )
    },
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "name", [name if name in ("keys", "documents") else pytest.param(name, marks=pytest.mark.long) for name in FLEX]
)
def test_flex_attention_computes_what_tiles_do(name: str) -> None:
    """Merged with another block, so that its backward has to weigh its own log-sum-exp against the whole one."""
    with differentiable_flex():
        compare("flex", "heads that share keys", torch.float64, 1e-12, strided=False, **FLEX[name])


def test_what_no_kernel_computes_goes_by_tiles() -> None:
    q, k, v, _ = made((1, 2, 1, 4, 6, 8), torch.float32, strided=False)
    plain = AttentionBlock(scale=1.0)
    mask = torch.ones(4, 6, dtype=torch.bool)
    assert with_engine(plain, q, k, v).engine_name == "cpu flash"
    assert with_engine(replace(plain, mask=mask), q, k, v).engine_name == "tiles"
    assert with_engine(replace(plain, dropout=0.1), q, k, v).engine_name == "tiles"
    assert with_engine(plain, q, k, v[..., :4]).engine_name == "tiles"
    assert with_engine(plain, q[..., :0, :], k, v).engine_name == "tiles"
    with FakeTensorMode():
        q = torch.empty(1, 2, 1, 4, 16, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(1, 2, 6, 16, dtype=torch.bfloat16, device="cuda")
        fake = torch.empty(4, 6, dtype=torch.bool, device="cuda")
        assert with_engine(replace(plain, mask=fake), q, k, k).engine_name == "flex"
        assert with_engine(replace(plain, mask=fake), q.double(), k.double(), k.double()).engine_name == "tiles"
        assert with_engine(replace(plain, mask=fake, dropout=0.1), q, k, k).engine_name == "tiles"
