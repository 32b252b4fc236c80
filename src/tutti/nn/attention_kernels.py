"""Torch's fused attention kernels that return the log-sum-exp, as one table with one calling convention.

Attention of some queries to some keys can be merged with their attention to other keys if each comes with the
log-sum-exp of its scores. Backward of one block takes the output and the log-sum-exp over all keys (ring attention, Liu
et al. 2023, arXiv 2310.01889). The kernels differ in layouts: each entry of `KERNELS` adapts one of them.

| kernel | devices | dtypes | head sizes | query heads that share keys |
|---|---|---|---|---|
| cpu flash | CPU | float64 to float16 | any, equal for keys and values | one call for each head of a group |
| flash | CUDA, ROCm | bfloat16, float16 | up to 256, equal for keys and values | yes |
| efficient | CUDA, ROCm | float32, bfloat16, float16 | any | one call for each head of a group |
| cudnn | CUDA | bfloat16, float16 | those of cuDNN | one call for each head of a group |
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

Tensors = tuple[torch.Tensor, ...]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A fused kernel. Tensors are (batch, heads, tokens, head size); the log-sum-exp is (batch, heads, tokens).

    Attributes:
        name: its name, for messages and reports.
        forward: (q, k, v, causal, scale) -> (output, log-sum-exp).
        backward: (gradient of the output, q, k, v, output, log-sum-exp, causal, scale) -> gradients of q, k, v.
        takes_groups: whether several query heads may share a key head.
        alignment: head sizes are padded with zeros to a multiple of this.
    """

    name: str
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Tensors] = field(repr=False)
    backward: Callable[..., Tensors] = field(repr=False)
    takes_groups: bool = False
    alignment: int = 1

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of (batch, key heads, group, rows, d) to (batch, key heads, columns, d).

        Returns:
            The output and its log-sum-exp, with the queries' leading dims.
        """
        d_v = v.shape[-1]
        q, k, v = (self._aligned(x) for x in (q, k, v))
        if self.takes_groups:
            out, lse = self.forward(q.flatten(1, 2), k, v, causal, scale)
            return _cut(out, d_v).unflatten(1, q.shape[1:3]), lse.unflatten(1, q.shape[1:3])  # type: ignore[no-untyped-call]
        parts = [self.forward(q.select(2, head), k, v, causal, scale) for head in range(q.shape[2])]
        outs, lses = zip(*parts, strict=True)
        return _cut(_stack(outs), d_v), _stack(lses)

    def run_backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of one block, given the output and the log-sum-exp over all keys; layouts as in `run`."""
        d, d_v = k.shape[-1], v.shape[-1]
        grad_out, q, k, v, out = (self._aligned(x) for x in (grad_out, q, k, v, out))
        if self.takes_groups:
            flat = (x.flatten(1, 2) for x in (grad_out, q))
            grad_q, grad_k, grad_v = self.backward(*flat, k, v, out.flatten(1, 2), lse.flatten(1, 2), causal, scale)
            grad_q = grad_q.unflatten(1, q.shape[1:3])  # type: ignore[no-untyped-call]
        else:
            of_queries = [tuple(x.select(2, n) for x in (grad_out, q, out, lse)) for n in range(q.shape[2])]
            parts = [self.backward(g, query, k, v, o, stat, causal, scale) for g, query, o, stat in of_queries]
            grad_q = _stack([part[0] for part in parts])
            grad_k, grad_v = (_sum([part[number] for part in parts]) for number in (1, 2))
        return _cut(grad_q, d), _cut(grad_k, d), _cut(grad_v, d_v)

    def _aligned(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor with a contiguous last dim, padded as the kernel needs it."""
        padding = -x.shape[-1] % self.alignment
        if padding:
            return F.pad(x, (0, padding))
        return x if x.stride(-1) == 1 else x.contiguous()  # kernels give wrong results otherwise


def _cut(x: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` values along the last dim."""
    return x if x.shape[-1] == size else x.narrow(-1, 0, size)


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _stack(parts: list[torch.Tensor] | Tensors) -> torch.Tensor:
    return parts[0].unsqueeze(2) if len(parts) == 1 else torch.stack(tuple(parts), 2)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum, in float32 if the parts are in half precision."""
    if len(parts) == 1:
        return parts[0]
    low = parts[0].dtype in (torch.bfloat16, torch.float16)
    return torch.stack(parts).sum(0, dtype=torch.float32 if low else None)


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Tensors:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # it is read with rows before heads in memory
    return tuple(
        _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    )


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Tensors:
    # The state of the random generator is read for dropout only; torch.nn.attention.varlen passes the same zeros.
    seed, offset = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return tuple(
        _aten._scaled_dot_product_flash_attention_backward(
            _contiguous(grad_out),
            q,
            k,
            v,
            _contiguous(out),
            _contiguous(lse),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
    )


LSE_ROWS = 32
"""The efficient kernel's log-sum-exp has a multiple of this many rows on CUDA; the surplus rows are infinite."""


def _efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, _cut(lse, q.shape[2])


def _efficient_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Tensors:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for dropout only
    if torch.version.hip is None:
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf)
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        _contiguous(grad_out),
        q,
        k,
        v,
        None,
        _contiguous(out),
        _contiguous(lse),
        seed,
        seed,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return tuple(grads[:3])


def _cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Tensors:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def _cudnn_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> Tensors:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # for dropout only
    return tuple(
        _aten._scaled_dot_product_cudnn_attention_backward(
            _contiguous(grad_out),
            q,
            k,
            v,
            _contiguous(out),
            _contiguous(lse).unsqueeze(-1),
            seed,
            seed,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )
    )


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="cpu flash", forward=_cpu_forward, backward=_cpu_backward),
        Kernel(name="flash", forward=_flash_forward, backward=_flash_backward, takes_groups=True, alignment=8),
        Kernel(name="efficient", forward=_efficient_forward, backward=_efficient_backward, alignment=8),
        Kernel(name="cudnn", forward=_cudnn_forward, backward=_cudnn_backward, alignment=8),
    )
}

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}

CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the CPU's fused kernel."""


def choose_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel | None:
    """The fused kernel for unmasked and causal blocks of these tensors; None if there is none.

    On CUDA and ROCm it is torch's own choice by device, dtype, head size and `torch.nn.attention.sdpa_kernel`, so it
    must be asked for where gradients are enabled as in the model. Other devices have no kernel with a log-sum-exp.

    Args:
        q: (batch, key heads, group, rows, d).
        k: (batch, key heads, columns, d).
        v: (batch, key heads, columns, d_v).
    """
    if not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu":
        return KERNELS["cpu flash"] if k.shape[-1] == v.shape[-1] and q.dtype in CPU_DTYPES else None
    if q.device.type != "cuda":
        return None
    padded = [F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v)]
    name = _torch_choice(padded[0].flatten(1, 2), padded[1], padded[2])
    if name != "flash" and q.shape[2] > 1:  # other kernels are called for each head of a group
        name = _torch_choice(padded[0].select(2, 0), padded[1], padded[2])
        return replace(KERNELS[name], takes_groups=False) if name else None
    return KERNELS[name] if name else None


def _torch_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The kernel that scaled_dot_product_attention would use, if it returns a log-sum-exp."""
    grouped = q.shape[1] != k.shape[1]
    return _BACKENDS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, False, scale=None, enable_gqa=grouped))
