"""Worked examples of training: optimizers with their errata, a gradient check, number formats, batch arithmetic."""

import math

import pytest
import torch
from torch import Tensor, nn

from tutti.config.plan import BatchPlan, Plan
from tutti.data.batches import batch_bounds, epoch_order, share_of
from worked.examples import EXAMPLES


def path(make: object, gradients: list[float]) -> list[float]:
    """Where an optimizer takes a weight that starts at 0 and is given these gradients."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = make([weight])  # type: ignore[operator]
    places = []
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        places.append(weight.item())
    return places


def test_adam_corrects_its_bias_outside_the_recursion() -> None:
    """Erratum: with the correction inside, as printed, the second and third steps are far too short."""
    lr, (b1, b2), eps = 0.1, (0.9, 0.999), 1e-8
    m = v = m_folded = v_folded = w = w_folded = 0.0
    ours, literal = [], []
    for t in (1, 2, 3):
        m, v = b1 * m + (1 - b1), b2 * v + (1 - b2)
        w -= lr * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
        ours.append(w)
        m_folded = (b1 * m_folded + (1 - b1)) / (1 - b1**t)
        v_folded = (b2 * v_folded + (1 - b2)) / (1 - b2**t)
        w_folded -= lr * m_folded / (math.sqrt(v_folded) + eps)
        literal.append(w_folded)
    found = path(lambda p: torch.optim.Adam(p, lr=lr, betas=(b1, b2), eps=eps), [1.0, 1.0, 1.0])
    assert found == pytest.approx([-0.1, -0.2, -0.3], rel=1e-7)
    assert found == pytest.approx(ours, rel=1e-12)
    assert literal[1:] != pytest.approx(found[1:], rel=0.2)


def test_nesterov_looks_ahead_in_the_direction_of_travel() -> None:
    """Erratum: with w += v the look-ahead is w + mu v (printed w - mu v).

    torch keeps the look-ahead point itself; so its iterates are the classical ones moved ahead by mu v.
    """
    lr, mu, curvature = 0.1, 0.9, 3.0
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=mu, nesterov=True)
    w, v = 1.0, 0.0
    wrong_w, wrong_v = 1.0, 0.0
    for _ in range(5):
        weight.grad = curvature * weight.detach()
        optimizer.step()
        v = mu * v - lr * curvature * (w + mu * v)
        w += v
        assert weight.item() == pytest.approx(w + mu * v, rel=1e-12)
        wrong_v = mu * wrong_v - lr * curvature * (wrong_w - mu * wrong_v)
        wrong_w += wrong_v
    assert wrong_w != pytest.approx(w, rel=0.1)


def test_where_epsilon_stands() -> None:
    """Erratum: outside the root in all three of torch's; the published AdaGrad has it inside the root."""
    lr, eps, gradient = 0.1, 1e-2, 1e-3
    adagrad = path(lambda p: torch.optim.Adagrad(p, lr=lr, eps=eps), [gradient])
    assert adagrad == pytest.approx([-lr * gradient / (gradient + eps)])
    assert adagrad != pytest.approx([-lr * gradient / math.sqrt(gradient**2 + eps)])
    rmsprop = path(lambda p: torch.optim.RMSprop(p, lr=lr, alpha=0.9, eps=eps), [gradient])
    assert rmsprop == pytest.approx([-lr * gradient / (math.sqrt(0.1) * gradient + eps)])


def test_sgd_moves_against_the_gradient() -> None:
    assert path(lambda p: torch.optim.SGD(p, lr=0.1), [2.0, -1.0]) == pytest.approx([-0.2, -0.1])


def test_toy_gender_gradients_by_central_differences() -> None:
    """A 2-2-1 network of sigmoids, 9 parameters, mean squared error over the four people."""
    entry = EXAMPLES["toy_gender"]
    raw, shift = torch.tensor(entry["raw"]), torch.tensor(entry["shift"])
    assert (raw - shift).tolist() == entry["X"]
    assert raw.double().mean(0).tolist() == [141.25, 66.75] != entry["shift"]  # as noted: the shift is no mean
    x = torch.tensor(entry["X"], dtype=torch.float64)
    y = torch.tensor(entry["y"], dtype=torch.float64)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 1), nn.Sigmoid()).double()
    leaves = list(network.parameters())
    assert sum(p.numel() for p in leaves) == 9

    def loss() -> Tensor:
        return ((network(x)[:, 0] - y) ** 2).mean()

    gradients = torch.autograd.grad(loss(), leaves)
    h = 1e-6
    for leaf, gradient in zip(leaves, gradients, strict=True):
        flat, by_differences = leaf.detach().view(-1), torch.empty(leaf.numel(), dtype=torch.float64)
        for i in range(leaf.numel()):
            kept = flat[i].item()
            flat[i] = kept + h
            above = loss().item()
            flat[i] = kept - h
            by_differences[i] = (above - loss().item()) / (2 * h)
            flat[i] = kept
        torch.testing.assert_close(gradient.view(-1), by_differences, rtol=1e-6, atol=1e-10)


def test_float_formats() -> None:
    """Erratum: bfloat16's largest number is 3.39e38."""
    entry = EXAMPLES["float_formats"]
    formats = {
        "bfloat16": torch.bfloat16,
        "half": torch.float16,
        "single": torch.float32,
        "double": torch.float64,
    }
    for name, dtype in formats.items():
        info = torch.finfo(dtype)
        base, power = entry["eps"][name].split("^")
        assert info.eps == float(base) ** int(power)
        assert info.tiny == pytest.approx(entry["min_normal"][name], rel=5e-3)
        if name in entry["max"]:
            assert info.max == pytest.approx(entry["max"][name], rel=5e-3)
    assert torch.finfo(torch.float16).max == entry["max"]["half"]
    assert torch.finfo(torch.bfloat16).max == pytest.approx(3.39e38, rel=2e-4)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_epoch_iterations_and_local_batches(workers: int) -> None:
    """1000 samples in batches of 500 are 2 iterations; B_global = B_local * N, by tutti's own arithmetic."""
    entry = EXAMPLES["epoch_iteration"]
    batch = BatchPlan(global_batch_size=entry["batch"])
    bounds = batch_bounds(epoch_order(entry["samples"], 0, 0, shuffle=True), batch, None)
    assert len(bounds) - 1 == entry["iterations_per_epoch"]
    plan = Plan(batch=batch, mesh={"replicate": workers})
    local = [[part.count for part in share_of(entry["batch"], rank, plan).parts] for rank in range(workers)]
    assert local == [[entry["batch"] // workers]] * workers
