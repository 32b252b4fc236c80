"""Gradients of several microbatches are added up in the buckets that are summed: held once, with one device's sums."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from harness import run_ranks

WIDTH, LAYERS = 256, 6
LAYER_NBYTES = 8 * WIDTH * WIDTH


class Net(nn.Module):
    """Wide layers, one used twice, one tied to another, one that only some microbatches use, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.layers[1].weight = self.layers[4].weight
        self.sometimes, self.never = nn.Linear(WIDTH, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        wants = x.detach()[:, :1] > 0
        if bool(wants.any()):
            x = x + wants * self.sometimes(x)
        return x[:, :2]


def peak_nbytes(function: Callable[[], object]) -> int:
    """The most bytes of torch's own allocations that are alive at once while `function` runs, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    now = top = 0
    for _, nbytes in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        now += nbytes
        top = max(top, now)
    return top


def train(microbatches: int, settings: dict[str, str]) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """State after some steps, parameters that are left without a gradient, and the peak of a step."""
    import tutti

    os.environ.update(settings)
    torch.manual_seed(0)
    model = Net().double()
    draw = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(40, WIDTH, generator=draw).double(), torch.arange(40) % 2)
    job = tutti.Job(global_batch_size=8, num_microbatches=microbatches, seed=0, clip_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy, shuffle=False)
    peak = 0
    for epoch in job.epochs(2):
        for number, batch in enumerate(loader):
            if (epoch, number) == (1, 0):
                peak = peak_nbytes(lambda batch=batch: job.forward_backward(_loss, batch))  # type: ignore[misc]
                job.update()
            else:
                job.step(batch)
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    return {name: value.clone() for name, value in model.state_dict().items()}, without, peak


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(("ranks", "settings"), [(2, {}), (3, {"TUTTI_SHARED_MEMORY": "off"})])
def test_gradients_are_held_once_and_are_those_of_one_device(ranks: int, settings: dict[str, str]) -> None:
    (expected, without, _), *_ = run_ranks(train, 1, 4, {})
    once = run_ranks(train, ranks, 1, settings)
    for (found, left, peak), (_, _, plain) in zip(run_ranks(train, ranks, 4, settings), once, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)
        assert left == without
        assert left == ["never.weight", "never.bias"]
        assert peak < plain + LAYER_NBYTES / 4  # a second copy would be five layers' gradients
