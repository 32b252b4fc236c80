"""Handwritten digits with every method: held-out accuracy, and the loss in training, which is harder to reach."""

from typing import Any

import pytest
import torch

from harness import preload, run_ranks
from runtime.digits import Reached, reach
from tutti.optim.large_batch import LAMB

preload("sklearn.datasets")

RATES: dict[str, tuple[float, float]] = {
    "bfloat16": (0.1, 0.9),
    "float16,feedback=true": (0.1, 0.9),
    "bytegrad": (0.1, 0.9),
    "qsgd": (0.1, 0.9),
    "terngrad": (0.1, 0.9),
    "top-k": (0.1, 0.9),
    "dgc,density=0.01": (0.1, 0.0),
    "top16-q4": (0.1, 0.9),
    "powersgd": (0.1, 0.9),
    "one-bit": (0.02, 0.9),
    "float32": (0.02, 0.9),
}
"""By method: rate and momentum of SGD. dgc has the momentum in itself; one-bit bears no large rate, so that it stands
beside exact sums at its own rate, which come less far in as many steps.
"""


def reach_with(methods: list[str]) -> dict[str, Reached]:
    """What is reached with every method."""
    return {words: reach(words, optimizer=optimizer_of(words), TUTTI_COMPRESS=words) for words in methods}


def optimizer_of(words: str) -> Any:
    if words in MOMENTA:
        kind, rate = MOMENTA[words]
        return lambda parameters: kind(parameters, lr=rate)
    rate, momentum = RATES[words]
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def judge(found: dict[str, Reached]) -> None:
    for words, one in found.items():
        if RATES[words][0] == 0.1:
            assert one.accuracy >= 0.97, f"{words}: {one}"
            assert one.last <= 0.05, f"{words}: {one}"
    if "one-bit" in found:
        one, exact = found["one-bit"], found["float32"]
        assert one.accuracy >= exact.accuracy - 0.02, f"one-bit: {one}, exact sums {exact}"
        assert one.last <= 2 * exact.last, f"one-bit: {one}, exact sums {exact}"


MOMENTA: dict[str, Any] = {
    "one-bit-adam,freeze_step=66": (torch.optim.Adam, 0.003),
    "byte-adam,freeze_step=66": (torch.optim.Adam, 0.003),
    "one-bit-lamb,freeze_step=66": (LAMB, 0.02),
}
"""By method: optimizer and rate; the second moment learns for 15 % of the steps. Three pixels are 0 in all of them."""


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_with_momenta_summed() -> None:
    for found in run_ranks(reach_with, 4, list(MOMENTA), timeout_s=590):
        for words, one in found.items():
            assert one.accuracy >= 0.97, f"{words}: {one}"
            assert one.last <= 0.02, f"{words}: {one}"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_with_every_method() -> None:
    for found in run_ranks(reach_with, 4, list(RATES), timeout_s=590):
        judge(found)


def test_digits_are_learnt_with_the_largest_values() -> None:
    for found in run_ranks(reach_with, 2, ["top-k"], timeout_s=110):
        judge(found)
