"""Which kind an operator is, seen in the trace of a model that has it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.config.model import OpKind
from tutti.profile import describe_model

IMAGE, ROWS = (2, 4, 6, 6), (5, 8)


class Does(nn.Module):
    """A parameter, so that there is a backward, and an operator."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.does = nn.Parameter(torch.ones(())), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x * self.scale)


CASES: dict[str, tuple[OpKind, tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "BatchNorm of images": ("batch_norm", IMAGE, lambda x: F.batch_norm(x, None, None, training=True)),
    "BatchNorm of rows": ("norm", ROWS, lambda x: F.batch_norm(x, None, None, training=True)),
    "InstanceNorm": ("batch_norm", IMAGE, F.instance_norm),
    "LayerNorm": ("norm", ROWS, lambda x: F.layer_norm(x, (8,))),
    "GroupNorm": ("norm", IMAGE, lambda x: F.group_norm(x, 2)),
    "max pooling": ("pool", IMAGE, lambda x: F.max_pool2d(x, 2)),
    "average pooling": ("pool", IMAGE, lambda x: F.avg_pool2d(x, 2)),
    "interpolation": ("pool", IMAGE, lambda x: F.interpolate(x, scale_factor=2)),
    "GELU": ("exponential", ROWS, F.gelu),
    "GELU by tanh": ("function", ROWS, lambda x: F.gelu(x, approximate="tanh")),
    "SiLU in place": ("exponential", ROWS, lambda x: F.silu(x * 1, inplace=True)),
    "softmax": ("exponential", ROWS, lambda x: F.softmax(x, -1)),
    "log-softmax": ("exponential", ROWS, lambda x: F.log_softmax(x, -1)),
    "sigmoid": ("exponential", ROWS, torch.sigmoid),
    "tanh": ("function", ROWS, torch.tanh),
    "tanh in place": ("function", ROWS, lambda x: (x * 1).tanh_()),
    "softplus": ("function", ROWS, F.softplus),
    "ReLU": ("elementwise", ROWS, F.relu),
    "length": ("elementwise", ROWS, lambda x: torch.linalg.vector_norm(x, dim=-1)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_and_its_backward_are_of_one_kind(name: str) -> None:
    kind, shape, does = CASES[name]
    found = {op.kind: op for op in traced(Does(does), shape)}
    largest = max(torch.Size(shape).numel(), does(torch.rand(shape)).numel())
    assert set(found) - {"elementwise", "other"} == {kind} - {"elementwise"}
    assert found[kind].flops_forward >= largest / shape[0]
    assert found[kind].flops_backward >= largest / shape[0]


def test_dropout_draws_a_number_for_each_element_forward_and_only_multiplies_backward() -> None:
    found = {op.kind: op for op in traced(Does(lambda x: F.dropout(x, 0.5)), ROWS)}
    assert (found["random"].flops_forward, found["random"].flops_backward) == (8, 0)
    assert found["elementwise"].flops_backward >= 8


def traced(model: nn.Module, shape: tuple[int, ...]) -> list:  # type: ignore[type-arg]
    """The operators of its own code, costs of one sample."""
    found = describe_model(
        model, (torch.rand(shape),), {}, None, lambda output, _: output.sum(), None, samples=shape[0]
    )
    return list(found.modules[0].ops)
