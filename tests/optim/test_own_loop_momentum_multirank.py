"""The loop that docs/compression.md shows for momenta without a Job: its text, run on ranks."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import preload, run_ranks
from optim.test_own_loop_multirank import STEPS, batches, gradients, loops, start, vector_of
from tutti.comm.world import join_world
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.optim.frozen_second_moment import FrozenAdam, FrozenLAMB, FrozenSecondMoment
from tutti.optim.large_batch import LAMB

preload("sklearn.datasets")

FREEZE, RANKS = 5, 3

KINDS: dict[str, tuple[Any, type[FrozenSecondMoment]]] = {
    "adam": (torch.optim.Adam, FrozenAdam),
    "adamw": (torch.optim.AdamW, FrozenAdam),
    "lamb": (LAMB, FrozenLAMB),
}


def made(kind: str, parameters: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = KINDS[kind][0](parameters, lr=0.05, weight_decay=0.1)
    return optimizer


def text(kind: str, freeze_step: int, code: str = "OneBit()", dtype: str = "float64") -> tuple[str, str]:
    """What comes before the loop, and the loop."""
    found = loops()[0]
    for shown, here, times in (
        ("freeze_step=500", f"freeze_step={freeze_step}", 1),
        ("FrozenAdam", KINDS[kind][1].__name__, 2),
        ("TwoPhaseReducer(OneBit(), ", f"TwoPhaseReducer({code}, ", 1),
    ):
        assert found.count(shown) == times
        found = found.replace(shown, here)
    found = re.sub(r"(TwoPhaseReducer\(.*)\)\n", rf"\1, dtype=torch.{dtype})\n", found)
    before, loop = found.split("for x, y in batches", 1)
    return before, "for x, y in batches" + loop


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer, some: Any, loss_fn: Any) -> dict[str, Any]:
    more = {"Lossless": Cast, "ByteGrad": ByteGrad, "FrozenLAMB": FrozenLAMB}
    return {"model": model, "optimizer": optimizer, "batches": some, "loss_fn": loss_fn, **more}


def looped(kind: str, code: str, poisoned: tuple[int, ...] = (), stop: int | None = None) -> list[Tensor]:
    """Parameters after every batch. `poisoned`: before which batches rank 1 has one that is not a number, and the
    others one that is; `stop`: after how many batches all goes on from a checkpoint.
    """
    world = join_world()
    torch.set_default_dtype(torch.float64)
    some = [(i, x, y) for i, (x, y) in enumerate(batches(world.rank))]
    spoilt = torch.full((5, 4), torch.nan if world.rank == 1 else 1.0)
    given = [one for i, x, y in some for one in ([(spoilt, y)] if i in poisoned else []) + [(x, y)]]
    model = nn.Linear(4, 3)
    nn.utils.vector_to_parameters(start(), model.parameters())
    found: list[Tensor] = []
    parts = [given] if stop is None else [given[:stop], given[stop:]]
    kept: Any = None
    for part in parts:
        model = copy.deepcopy(model)
        optimizer = made(kind, model.parameters())
        if kept is not None:
            optimizer.load_state_dict(kept[0])
        names = names_of(model, optimizer, noted(part, model, found), nn.functional.mse_loss)
        before, loop = text(kind, FREEZE, code)
        with torch.enable_grad():
            exec(before, names)
            if kept is not None:
                names["exchange"].load(kept[1])
            exec(loop, names)
        kept = copy.deepcopy((optimizer.state_dict(), names["exchange"].tensors()))
    return found


def noted(some: Any, model: nn.Module, found: list[Tensor]) -> Iterator[Any]:
    """The batches, and what the model is after each."""
    for one in some:
        yield one
        found.append(vector_of(model))


def alone(kind: str) -> Tensor:
    """One device's run, on the mean of all ranks' gradients."""
    parameters = [nn.Parameter(part.view(s)) for part, s in zip(start().split([12, 3]), ((3, 4), (3,)), strict=True)]
    optimizer = made(kind, parameters)
    rule = KINDS[kind][1](optimizer, FREEZE)
    for step in range(STEPS):
        assert rule.frozen == (step >= FREEZE)
        own = nn.utils.parameters_to_vector(parameters).detach()
        mean = gradients(step, [own] * RANKS).mean(0)
        for p, part in zip(parameters, mean.split([12, 3]), strict=True):
            p.grad = part.view_as(p)
        optimizer.step()
    return nn.utils.parameters_to_vector(parameters).detach()


@pytest.mark.parametrize("kind", list(KINDS))
def test_where_nothing_is_lost_it_is_one_devices_run(kind: str) -> None:
    expected = alone(kind)
    for got in run_ranks(looped, RANKS, kind, 'Lossless("float64")'):
        torch.testing.assert_close(got[-1], expected, rtol=1e-12, atol=1e-13)


def many(calls: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    return [looped(*call) for call in calls]


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_with_one_bit_ranks_have_the_same_bits_and_only_steps_that_are_finite_count(kind: str) -> None:
    """A batch that is not a number on one rank, before v stands and after, leaves no trace; a checkpoint goes on."""
    poisoned = (2, 9, 10)
    calls = [
        (kind, "OneBit()"),
        (kind, "OneBit()", poisoned),
        (kind, "OneBit()", (), 12),
        (kind, 'Lossless("float64")'),
    ]
    ranks = run_ranks(many, RANKS, calls)
    whole, spoilt, resumed, exact = ranks[0]
    for rank in ranks:
        for mine, first in zip(rank, ranks[0], strict=True):
            assert all(torch.equal(one, another) for one, another in zip(mine, first, strict=True))
    assert all(value.isfinite().all() for value in spoilt)
    assert [step for step in range(STEPS) if torch.equal(whole[step], exact[step])] == list(range(FREEZE))
    assert torch.equal(spoilt[2], spoilt[1])
    assert torch.equal(spoilt[10], spoilt[9])
    left = [value for step, value in enumerate(spoilt) if step not in (2, 10, 12)]
    for several in (left, resumed):
        assert len(several) == STEPS
        assert all(torch.equal(one, another) for one, another in zip(several, whole, strict=True))


def digits(code: str) -> tuple[float, float]:
    """Loss and accuracy in training, on a rank's share of batches of 128."""
    from sklearn.datasets import load_digits

    world = join_world()
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images[:1437] / 16).float()
    labels = labels[:1437]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def some() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(440):
            optimizer.param_groups[0]["lr"] = 3e-3 * (0.1 if step > 352 else 1)
            batch = torch.randint(1437, (128,)).view(world.world_size, -1)[world.rank]
            yield images[batch], labels[batch]

    names = names_of(model, optimizer, some(), nn.functional.cross_entropy)
    with torch.enable_grad():
        for part in text("adam", 66, code, "float32"):
            exec(part, names)
    with torch.no_grad():
        output = model(images)
    return float(nn.functional.cross_entropy(output, labels)), float((output.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("code", ["OneBit()", pytest.param("ByteGrad(feedback=True)", marks=pytest.mark.long)])
def test_digits_train_although_some_pixels_are_always_zero(code: str) -> None:
    """Three pixels never have a gradient: there the published 1-bit Adam divides its scale by eps, and goes to NaN."""
    one, other = run_ranks(digits, 2, code)
    assert one == other
    assert one[0] < 2e-2
    assert one[1] > 0.99
