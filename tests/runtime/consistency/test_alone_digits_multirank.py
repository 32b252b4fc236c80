"""Handwritten digits where ranks do not wait for each other: held-out accuracy and loss, which is harder to reach."""

import pytest

from harness import preload, run_ranks
from runtime.digits import Reached, reach

preload("sklearn.datasets")

MODES = ("synchronous", "stale:3", "asynchronous", "ad-psgd", "hogwild")
SEEDS = 4.5 / 360
"""Synchronous training with six seeds gets 351 to 354 of the 360 held-out samples right: so much says nothing of a
mode. The loss does: with the same seeds it is 5.0e-3 to 6.1e-3, and 4.1e-3 to 5.8e-3 under staleness 3;
on a machine whose cores had twice the work, where ranks are staler, Hogwild's was 1.2e-2."""


def reach_with(modes: tuple[str, ...]) -> dict[str, Reached]:
    """What is reached in every mode, by the model that is evaluated."""
    return {sync: reach(sync, TUTTI_SYNC=sync) for sync in modes}


@pytest.mark.timeout(600)
@pytest.mark.long
def test_every_mode_learns_digits() -> None:
    (found, *others) = run_ranks(reach_with, 4, MODES, timeout_s=590)
    for sync, one in found.items():  # the losses of steps are each rank's own where none waits
        same = {(other[sync].accuracy, other[sync].loss) for other in others}
        assert same == {(one.accuracy, one.loss)}, f"{sync}: {one}; other ranks evaluate {same}"
    exact = found["synchronous"]
    for sync, one in found.items():
        assert one.accuracy >= max(0.97, exact.accuracy - SEEDS), f"{sync}: {one}; synchronous {exact}"
        assert one.loss <= 5 * exact.loss, f"{sync}: {one}; synchronous {exact}"
