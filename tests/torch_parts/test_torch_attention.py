"""FlexAttention and symmetric memory: what the decision records say they cannot do."""

import torch
import torch.distributed._symmetric_memory
from torch.nn.attention.flex_attention import flex_attention

from torch_parts.limits import attempt, still_limited


def test_flex_attention_has_no_backward_on_cpus() -> None:
    q = torch.randn(1, 1, 16, 16, requires_grad=True)
    result = attempt(lambda: flex_attention(q, q, q))
    still_limited("does not support backward on CPU" in str(result), "context-parallel", "differentiates it on CPUs")


def test_fused_products_of_symmetric_memory_are_for_cuda() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    gathered = attempt(lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, "group"))
    scattered = attempt(lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, "group"))
    for result in (gathered, scattered):
        still_limited("NotImplementedError" in str(result), "async-tensor-parallel", "has these operators on CPUs")
