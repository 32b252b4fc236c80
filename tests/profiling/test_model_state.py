"""Optimizer state, as the optimizers themselves make it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.config.model import ModelSpec
from tutti.profile import describe_model


class Valued(Optimizer):
    """Keeps two float64 numbers an element and reads a value of its gradient, which meta tensors do not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.norm().item() >= 0:
                    self.state[parameter]["pair"] = [parameter.double(), parameter.double()]


def describe(model: nn.Module, optimizer: Any) -> ModelSpec:
    return describe_model(model, (torch.randn(4, 16),), {}, None, lambda output, _: output.sum(), optimizer, samples=4)


def state_of(step: Callable[[nn.Module], Any]) -> tuple[int, tuple[str, ...]]:
    torch.manual_seed(0)
    model = nn.Linear(16, 32)
    spec = describe(model, step(model))
    return sum(module.optimizer_nbytes for module in spec.modules), spec.notes


N = 16 * 32 + 32


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 4 * N),
        (lambda p: torch.optim.Adam(p), 8 * N),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12 * N),
        (lambda p: torch.optim.AdamW(p, fused=True), 8 * N),
        (lambda p: torch.optim.Adagrad(p), 4 * N),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 12 * N),
        (lambda p: torch.optim.Adafactor(p), 4 * (16 + 32 + 32)),
        (lambda p: Valued(p), 16 * N),
    ],
)
def test_state_bytes(make: Callable[[Any], Optimizer], nbytes: int) -> None:
    assert state_of(lambda model: make(model.parameters())) == (nbytes, ())


def test_it_is_what_a_real_step_leaves() -> None:
    model = nn.Linear(16, 32)
    optimizer = torch.optim.NAdam(model.parameters())
    described = sum(module.optimizer_nbytes for module in describe(model, optimizer).modules)
    assert not optimizer.state  # the user's optimizer has not stepped
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    tensors: list[Tensor] = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert described == sum(t.numel() * t.element_size() for t in tensors)


def test_groups_have_their_own_options() -> None:
    groups = [{"momentum": 0.9}, {"momentum": 0.0}]

    def make(model: nn.Module) -> Optimizer:
        params = [{"params": [p], **group} for p, group in zip(model.parameters(), groups, strict=True)]
        return torch.optim.SGD(params, lr=0.1)

    assert state_of(make)[0] == 4 * 16 * 32


def test_several_optimizers_and_a_scheduler() -> None:
    def make(model: nn.Module) -> list[Optimizer]:
        first = torch.optim.Adam([model.weight])
        torch.optim.lr_scheduler.StepLR(first, 1)
        return [first, torch.optim.SGD([model.bias], 0.1, momentum=0.5)]

    model = nn.Linear(16, 32)
    spec = describe(model, make(model))
    assert spec.optimizer == "Adam, SGD"
    assert spec.modules[0].optimizer_nbytes == 8 * 16 * 32 + 4 * 32


def test_an_optimizer_that_cannot_be_stepped_is_said() -> None:
    nbytes, notes = state_of(lambda model: torch.optim.LBFGS(model.parameters()))
    assert nbytes == 0
    assert any("LBFGS" in note for note in notes)
