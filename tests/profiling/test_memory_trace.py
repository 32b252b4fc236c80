"""Memory under autocast: traced on fake tensors, against real steps whose live storages are counted."""

import gc
import io
import weakref
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutti.cli.predict import show
from tutti.cli.prediction_view import page_of_plan
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model.cost_notes import nbytes
from tutti.cost_model.rank_tracks import timeline
from tutti.cost_model.step_time import predict
from tutti.profile.allocator import CachingAllocator, simulate_step
from tutti.profile.catalog import cluster_from_parts
from tutti.profile.meta_device import parameters_on_meta
from tutti.profile.model_profile import describe_model

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]


class Residual(nn.Module):
    """Two convolutions with BatchNorm, in-place activations and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.norms[0](self.first(x)))
        inner = self.norms[1](self.second(inner))
        inner += x
        return self.relu(inner)


def network(width: int = 16) -> nn.Module:
    start = (nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(*start, nn.MaxPool2d(2), Residual(width), Residual(width), *end)


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that real operators made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.seen:
                    self.seen[storage.data_ptr()] = weakref.finalize(
                        storage, self.gone, storage.data_ptr(), storage.nbytes()
                    )
                    self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    def gone(self, at: int, nbytes: int) -> None:
        self.seen.pop(at, None)
        self.now -= nbytes


def really(model: nn.Module, x: Tensor) -> int:
    """Return the most bytes that a real step on the CPU holds beside its parameters and its batch."""
    live = Live()
    gc.collect()
    with live:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    return live.most


def test_a_cnn_takes_what_a_real_step_takes():
    model, samples = network(), 4
    x = torch.randn(samples, 3, 32, 32)
    peaks = [really(network(), part) for part in (x, x[:2].clone())]
    spec = describe_model(
        model, (x,), {}, None, lambda out, _: out.float().square().mean(), samples=samples, autocast=torch.bfloat16
    )
    kept = sum(module.autocast.activation_nbytes for module in spec.modules)
    by_formula = 0.0
    saved = 0.0
    for module in spec.modules:
        saved += module.autocast.activation_nbytes
        by_formula = max(by_formula, saved + module.autocast.transient_nbytes)
    assert max(kept, by_formula) == pytest.approx((peaks[0] - peaks[1]) / 2, rel=0.05)
    in_full = sum(module.activation_nbytes for module in spec.modules)
    assert kept < 0.6 * in_full


@pytest.mark.long
@pytest.mark.parametrize(("name", "allocated_gib"), [("resnet", 5.7), ("gpt", 14_864 / 1024)])
def test_predicted_memory_is_near_what_an_h100_allocated(name, allocated_gib, monkeypatch):
    """What one H100 took for these models in bfloat16 (docs/gpu.md); at most 5 % off, and never 2 % too little."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    subject = import_module("gpu_subjects").subject_of(name, tiny=False)
    with parameters_on_meta():
        model = subject.model()
        optimizer = subject.optimizer(model.parameters())
    inputs, target = next(iter(torch.utils.data.DataLoader(subject.data(4), batch_size=4)))
    spec = describe_model(model, (inputs,), {}, target, subject.loss, optimizer, samples=4, autocast=torch.bfloat16)
    cluster = cluster_from_parts("one", "H100-SXM5-80GB", devices_per_node=1, nodes=1)
    plan = Plan(batch=BatchPlan(global_batch_size=subject.batch), precision="bfloat16")
    memory = predict(spec, cluster, plan).allocator
    assert memory is not None
    assert 0.98 < memory.allocated.value / 2**30 / allocated_gib < 1.05


def test_what_is_shared_counts_once():
    """A BatchNorm's input is the convolution's output; an in-place ReLU's output is the next convolution's input."""
    layers = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
    x = torch.randn(4, 8, 16, 16)
    spec = describe_model(layers, (x,), {}, None, lambda out, _: out.sum(), samples=4, autocast=torch.bfloat16)
    kept = sum(module.autocast.activation_nbytes for module in spec.modules)
    assert kept == pytest.approx(3 * 2 * 8 * 16 * 16)  # the input in 16 bits, the norm's input, the ReLU's output


def test_softmax_and_norms_are_kept_in_float32():
    head = nn.Sequential(nn.Linear(16, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 32, bias=False))
    x, y = torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    spec = describe_model(head, (x,), {}, y, F.cross_entropy, samples=4, autocast=torch.bfloat16)
    kept = {module.name: module.autocast.activation_nbytes for module in spec.modules}
    assert kept["0"] == 2 * 16
    assert kept["1"] == pytest.approx(4 * 64 + 8, abs=8)
    assert kept["2"] == 2 * 64
    assert kept[""] == pytest.approx(4 * 32, abs=8)


def test_prediction_states_allocated_and_reserved_memory():
    model = network()
    with_autocast = describe_model(
        model, (torch.randn(4, 3, 32, 32),), {}, torch.zeros(4, dtype=torch.long), F.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=0.1), samples=4, autocast=torch.bfloat16,
    )  # fmt: skip
    plan = Plan(batch=BatchPlan(global_batch_size=64), precision="bfloat16")
    cluster = cluster_from_parts("one", "H100-SXM5-80GB", devices_per_node=1, nodes=1)
    found = predict(with_autocast, cluster, plan)
    memory = found.allocator
    assert memory is not None
    assert memory.allocated.value < memory.reserved.value < found.memory.total
    assert memory.reserved.value + memory.context_nbytes == pytest.approx(found.memory.total)
    assert any("reserved" in note for note in found.notes)
    shown = f"torch reports {nbytes(memory.allocated.value)} allocated"
    console = Console(width=200, record=True, file=io.StringIO())
    show(plan, found, console)
    assert shown in console.export_text()
    page = page_of_plan("network", plan, found, timeline(with_autocast, cluster, plan))
    key = next(key for key in page.keys if key.name == "Reserved")
    assert (key.value, nbytes(memory.allocated.value) in key.also) == (nbytes(memory.reserved.value), True)


def test_allocator_reuses_splits_and_merges_blocks():
    allocator = CachingAllocator()
    small = allocator.allocate(1000)
    assert (allocator.allocated, allocator.reserved) == (1024, 2 * MIB)
    medium = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 22 * MIB  # four blocks of one segment
    large = allocator.allocate(11 * MIB + 1)
    assert allocator.reserved == 34 * MIB  # rounded to 2 MiB
    for block in (*medium, large, small):
        allocator.free(block)
    again = allocator.allocate(19 * MIB)  # the merged segment of four
    assert (again.nbytes, allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB, 34 * MIB)


def test_steps_reuse_what_the_first_one_allocated():
    events = [(0, 30.0 * MIB), (1, 40.0 * MIB), (0, -30.0 * MIB), (2, 30.0 * MIB), (1, -40.0 * MIB), (2, -30.0 * MIB)]
    assert simulate_step(events, [10.0 * MIB], []) == (80 * MIB, 80 * MIB)
