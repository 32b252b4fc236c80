"""What a GPU computes, against the CPU: `pytest -m gpu` where there is one. Elsewhere the CPU runs it too."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shared_device
import tutti
from against_one import Trained
from harness import run_ranks
from tutti.comm import world
from tutti.config.plan import ShardingPlan
from tutti.nn import attention
from tutti.nn.sparse_attention import sliding_window

pytestmark = [pytest.mark.gpu, pytest.mark.long]
FAMILIES = ("MLP", "GPT, tied embeddings", "ResNet, 12 channels", "LSTM translator, attention", "DLRM")
TOLERANCE = 1e-9
"""In float64. A GPU adds in another order, and deep models grow what that changes."""


def trained(family: str, fields: dict[str, Any], on_cpu: bool) -> Trained:
    """Train on this rank's own device, or on its CPU."""
    if on_cpu:
        world.choose_device = lambda local_rank: torch.device("cpu")
    return shared_device._trained(family, {"mesh": {"replicate": 1}, "batch": {}, **fields}, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_the_device_is_training_on_the_cpu(family: str) -> None:
    one, other = (run_ranks(trained, 1, family, {}, on_cpu)[0] for on_cpu in (True, False))
    shared_device.assert_agree(one, other, family, TOLERANCE)


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_state_in_host_memory_changes_no_value(offload: Any) -> None:
    fields = {"sharding": ShardingPlan(level=3, offload=offload)}
    kept, offloaded = (run_ranks(trained, 1, "MLP", each, False)[0] for each in ({}, fields))
    shared_device.assert_agree(kept, offloaded, offload, TOLERANCE)


DOCUMENTS = torch.arange(256).div(100, rounding_mode="floor").expand(2, -1)
MASKS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "window": lambda device: {"window": 40},
    "causal window": lambda device: {"window": 40, "causal": True},
    "documents": lambda device: {"documents": DOCUMENTS.to(device), "causal": True},
    "pattern": lambda device: {"pattern": sliding_window(256, block_size=64)},
}


def visible(causal: bool = False, window: int = 256, documents: torch.Tensor | None = None, pattern: Any = None) -> Any:
    """The mask of (2, 1, 256, 256) pairs, written out."""
    rows, columns = torch.arange(256)[:, None], torch.arange(256)
    mask = ((rows - columns).abs() < window).expand(2, 256, 256).clone()
    if causal:
        mask &= columns <= rows
    if documents is not None:
        mask &= documents[:, :, None] == documents[:, None, :]
    if pattern is not None:
        blocks = torch.zeros(4, 4, dtype=torch.bool)
        for row, seen in enumerate(pattern.seen):
            blocks[row, list(seen)] = True
        mask &= blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
    return mask[:, None]


@pytest.mark.parametrize("mask", MASKS)
def test_masked_attention_is_softmax_over_the_visible_pairs(mask: str) -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    drawn = torch.randn(4, 2, 4, 256, 32, generator=torch.Generator().manual_seed(3))
    given = [each.to(device).requires_grad_() for each in drawn[:3]]
    out = attention(*given, **MASKS[mask](device))
    out.backward(drawn[3].to(device))
    exact = [each.double().requires_grad_() for each in drawn[:3]]
    whole = F.scaled_dot_product_attention(*exact, attn_mask=visible(**MASKS[mask](torch.device("cpu"))))
    whole.backward(drawn[3].double())
    pairs = [(out, whole), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))]
    for got, expected in pairs:
        assert got is not None
        assert expected is not None
        # float32 products; a GPU may round them to TF32 in FlexAttention, whose relative error is 2^-11
        torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=4e-3 if device.type == "cuda" else 1e-5)


def steps_without_waiting() -> list[float]:
    """Losses of 8 steps, of which the device may make the host wait in the first 3 only."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(80, 6), torch.randint(0, 3, (80,)))
    job = tutti.Job(global_batch_size=10, seed=1, clip_norm=1.0, progress=False)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
    losses: list[Any] = []
    for step, batch in enumerate(loader):
        with _waits_are_errors() if step >= 3 else contextlib.nullcontext():
            losses.append(job.step(batch))
    return [float(loss) for loss in losses]


@contextlib.contextmanager
def _waits_are_errors() -> Any:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_steady_step_does_not_wait_for_the_device() -> None:
    losses = run_ranks(steps_without_waiting, 1)[0]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
