"""Fused kernels of Adam, AdamW and SGD: taken where they compute the same, left where torch's would go wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import tutti
from tutti.trainer.update import can_fuse, fused_kernels

SHAPES = ((7, 5), (3,), (), (0, 4), (2, 3, 4, 5))
LAST = torch.channels_last


def made(kind: type[Optimizer], settings: dict[str, Any], dtype: torch.dtype) -> tuple[list[nn.Parameter], Optimizer]:
    draw = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)) for shape in SHAPES]
    return parameters, kind(parameters, **{"lr": 0.01, **settings})


def gradients(parameters: list[nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=draw).to(memory_format=_order(p))


def _order(tensor: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format if tensor.is_contiguous() else LAST


def test_strides_along_dims_of_size_one_do_not_matter() -> None:
    """A state that was loaded has other ones than the part of a parameter that it belongs to."""
    whole = nn.Parameter(torch.ones(1, 6, dtype=torch.float64))
    part = nn.Parameter(whole.detach()[:, :3])
    optimizer = AdamW([part], lr=0.1)
    part.grad = torch.ones_like(part)
    optimizer.step()
    optimizer.state[part]["exp_avg"] = torch.zeros(1, 3, dtype=torch.float64)
    assert part.stride() != optimizer.state[part]["exp_avg"].stride()
    optimizer.state[part]["step"] = torch.tensor(1.0)
    assert can_fuse(optimizer)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(
            (kind, settings)
            for kind in (Adam, AdamW)
            for settings in (
                {}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3}, {"betas": (0.5, 0.7), "eps": 1e-3},
            )
        ),
        (SGD, {}),
        (SGD, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "maximize": True}),
        (SGD, {"momentum": 0.9, "dampening": 0.4}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_a_fused_step_computes_the_same(
    kind: type[Optimizer], settings: dict[str, Any], dtype: torch.dtype, rtol: float, last: bool
) -> None:
    (ours, one), (theirs, other) = made(kind, settings, dtype), made(kind, settings, dtype)
    for parameters in (ours, theirs):
        parameters[-1].data = parameters[-1].data.to(memory_format=LAST if last else torch.contiguous_format)
    for seed in range(4):
        gradients(ours, seed)
        gradients(theirs, seed)
        assert can_fuse(one)
        with fused_kernels(one):
            one.step()
            assert one.param_groups[0]["fused"]
        other.step()
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=rtol, atol=rtol)
    assert one.param_groups[0] | {"params": 0} == other.param_groups[0] | {"params": 0}  # it asks for nothing


def test_gradients_in_another_order_of_memory_are_not_fused() -> None:
    """torch 2.13 adds them to other values: if it no longer does, this says so."""
    (ours, one), (theirs, other), (wrong, third) = (made(AdamW, {}, torch.float64) for _ in range(3))
    for parameters in (ours, theirs, wrong):
        gradients(parameters, 0)
        parameters[-1].grad = parameters[-1].grad.to(memory_format=LAST)  # type: ignore[union-attr]
    assert not can_fuse(one)
    with fused_kernels(one):
        one.step()
    other.step()
    third.param_groups[0]["fused"] = True
    third.step()
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-14, atol=0)
    assert (wrong[-1] - theirs[-1]).abs().max() > 0.001


def test_what_hooks_give_before_the_step_counts() -> None:
    """As parts of gradients are given where state is divided."""
    (ours, one), (theirs, other) = (made(AdamW, {}, torch.float64) for _ in range(2))
    gradients(ours, 0)
    gradients(theirs, 0)
    mine, theirs[-1].grad = ours[-1].grad, theirs[-1].grad.to(memory_format=LAST)  # type: ignore[union-attr]
    ours[-1].grad = None

    def give(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ours[-1].grad = mine.to(memory_format=LAST)  # type: ignore[union-attr]

    one.register_step_pre_hook(give)
    with fused_kernels(one):
        one.step()
    other.step()
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-14, atol=0)


def _gaps(parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    both = torch.zeros(3, 2)
    parameters[1].data, parameters[1].grad = both[:, 0], both[:, 1]


def _half(parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    for p in parameters:
        p.grad, p.data = None, p.data.bfloat16()
        p.grad = torch.zeros_like(p)


def _count_in_float64(parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.state[parameters[0]]["step"] = torch.tensor(1.0, dtype=torch.float64)


def _sparse(parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    parameters[0].grad = torch.zeros(7, 5).to_sparse()


@pytest.mark.parametrize("change", [_gaps, _half, _count_in_float64, _sparse])
def test_what_fused_kernels_do_not_know_is_left(change: Callable[[list[nn.Parameter], Optimizer], None]) -> None:
    parameters, optimizer = made(AdamW, {}, torch.float32)
    gradients(parameters, 0)
    assert can_fuse(optimizer)
    change(parameters, optimizer)
    assert not can_fuse(optimizer)


def test_a_parameter_that_comes_later_has_no_momentum_yet() -> None:
    """torch's fused SGD wants all momenta or none."""
    (ours, one), (theirs, other) = (made(SGD, {"momentum": 0.9}, torch.float64) for _ in range(2))
    for seed, may in enumerate((True, False, True)):
        for parameters, optimizer in ((ours, one), (theirs, other)):
            gradients(parameters, seed)
            parameters[0].grad = None if seed == 0 else parameters[0].grad
            assert can_fuse(optimizer) == may
            with fused_kernels(one):
                optimizer.step()
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-14, atol=1e-14)


class Own(AdamW):
    """What it does in a step is not known."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {"foreach": True}),
        (AdamW, {"foreach": False}),
        (AdamW, {"fused": False}),
        (AdamW, {"fused": True}),
        (AdamW, {"differentiable": True}),
        (AdamW, {"lr": torch.tensor(0.01)}),
        (SGD, {"foreach": False}),
        (SGD, {"fused": False}),
        (Adagrad, {}),
        (Own, {}),
    ],
)
def test_a_script_that_has_chosen_keeps_its_kernels(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    _, optimizer = made(kind, settings, torch.float32)
    before = dict(optimizer.param_groups[0])
    assert not can_fuse(optimizer)
    with fused_kernels(optimizer):
        optimizer.step()
        assert optimizer.param_groups[0] == before
    assert optimizer.param_groups[0] == before


def test_a_job_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []
    own = torch._fused_adamw_

    def counted(*args: Any, **settings: Any) -> None:
        calls.append(1)
        own(*args, **settings)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    job = tutti.Job(global_batch_size=4)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    model = nn.Linear(3, 2)
    _, _, loader = job.prepare(model, AdamW(model.parameters()), data, nn.MSELoss())
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
    assert len(calls) == 2
