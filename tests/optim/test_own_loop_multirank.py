"""The loop that docs/compression.md shows for 0/1 Adam without a Job: its text, run on ranks."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import run_ranks
from optim.test_zero_one import FREEZE, RANKS, equations
from tutti.comm.world import join_world
from tutti.compression.cast import Cast

PAGE = (Path(__file__).parents[2] / "docs" / "compression.md").read_text(encoding="utf-8")
STEPS, SHAPES = 20, ((3, 4), (3,))


def loops() -> tuple[str, str]:
    """Of momenta (test_own_loop_momentum_multirank.py), and of 0/1 Adam."""
    momenta, zero_one = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return momenta, zero_one


def text() -> str:
    """The loop, with the settings of the equations."""
    found = loops()[1]
    for shown, here in (
        ("freeze_step=500, kappa=16", f"freeze_step={FREEZE}, kappa=2"),
        ("local_steps=16, longest=16", "local_steps=2, longest=4"),
    ):
        assert found.count(shown) == 1
        found = found.replace(shown, here)
    return found


def start() -> torch.Tensor:
    return torch.randn(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1 + rank)
    shapes = ((5, 4), (5, 3))
    return [tuple(torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes) for _ in range(STEPS)]  # type: ignore[misc]


def looped(lossless: bool) -> list[torch.Tensor]:
    """Parameters after every update, one tensor behind the other."""
    world = join_world()
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(4, 3)
    nn.utils.vector_to_parameters(start(), model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    optimizer.zero_grad = lambda: (seen.append(vector_of(model)), model.zero_grad())  # type: ignore[method-assign,assign]
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "batches": batches(world.rank),
        "loss_fn": nn.functional.mse_loss,
    }
    code = text()
    if lossless:
        names["Lossless"] = Cast
        code = code.replace("TwoPhaseReducer(OneBit(), ", 'TwoPhaseReducer(Lossless("float64"), ')
    code = re.sub(r"(TwoPhaseReducer\(.*)\)\n", r"\1, dtype=torch.float64)\n", code)
    with torch.enable_grad():
        exec(code, names)
    return [*seen[1:], vector_of(model)]


def vector_of(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradients(step: int, own: list[torch.Tensor]) -> torch.Tensor:
    found = []
    for rank, w in enumerate(own):
        flat = w.clone().requires_grad_()
        weight, bias = (part.view(shape) for part, shape in zip(flat.split([12, 3]), SHAPES, strict=True))
        x, y = batches(rank)[step]
        found.append(torch.autograd.grad(nn.functional.mse_loss(x @ weight.T + bias, y), flat)[0])
    return torch.stack(found)


def test_where_nothing_is_lost_it_is_the_equations() -> None:
    expected = equations(start(), gradients, STEPS, decay=0.01, decoupled=True, sizes=(12, 3))
    for got, one in zip(run_ranks(looped, RANKS, True), expected, strict=True):
        torch.testing.assert_close(got[-1], one, rtol=1e-12, atol=1e-13)


def test_with_one_bit_ranks_have_the_same_bits_whenever_they_agree() -> None:
    ranks = run_ranks(looped, RANKS, False)
    equal = [all(torch.equal(rank[step], ranks[0][step]) for rank in ranks) for step in range(STEPS)]
    assert equal[:FREEZE] == [True] * FREEZE
    assert [step - FREEZE for step in range(FREEZE, STEPS) if equal[step]] == [0, 1, 3, 5, 9]
    assert all(value.isfinite().all() for rank in ranks for value in rank)
