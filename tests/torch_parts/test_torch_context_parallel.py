"""context_parallel: what docs/decisions/context-parallel.md says it cannot do."""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from harness import run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited


def causal_attention() -> Any:
    _, world_size = join_gloo()
    mesh = init_device_mesh("cpu", (world_size,))
    queries = torch.randn(1, 2, 8, 4)

    def attend() -> Any:
        with context_parallel(mesh, buffers=[queries], buffer_seq_dims=[2]):
            attention = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries, is_causal=True)
        return tuple(attention.shape)

    return attempt(attend)


def test_context_parallel_has_no_ring_attention_on_cpus() -> None:
    result = run_ranks(causal_attention, 2)[0]
    still_limited("NotImplementedError" in str(result), "context-parallel", "has ring attention on CPUs")
