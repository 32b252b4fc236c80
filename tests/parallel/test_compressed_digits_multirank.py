"""Handwritten digits with every method: held-out accuracy, and the loss in training, which is harder to reach."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import preload, run_ranks
from trainer.digits import Reached, reach
from tutti.compression.codec_state import CodecState
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


LOSSES: dict[str, float] = {"top-k": 0.02, "top16-q4": 0.012, "powersgd": 0.012, "one-bit-lamb,freeze_step=66": 0.005}
"""By method: the largest mean loss of the last steps, where it is not that of its kind. top-k and top16-q4 get to 97 %
without error feedback, too: accuracy tells nothing of it. Losses with it and without, measured on 4 ranks
with seed 1: top-k 0.015, 0.027; top16-q4 0.0078, 0.019; powersgd 0.0065, 0.29; dgc 0.033, 0.43; one-bit 0.16, 0.42
(exact 0.099); one-bit-adam 0.015, 0.071; one-bit-lamb 0.0008, 0.025. With seed 2, top-k 0.0086, 0.023; top16-q4 0.0059,
0.018; powersgd 0.0064, 0.24; dgc 0.032, 0.37; one-bit 0.14, 0.44. float16 and byte-adam lose too little to show here:
0.0057 and 0.011 either way.
"""

TOLD_BY_LOSS = ["top-k", "top16-q4", "powersgd", "dgc,density=0.01", "one-bit"]
"""Methods whose loss tells whether errors are fed back."""


def reach_with(methods: list[str], *, feedback: bool = True) -> dict[str, Reached]:
    """What is reached with every method; without `feedback`, with nothing kept of what a step did not send."""
    if not feedback:
        CodecState.commit = forgetting(CodecState.commit)  # type: ignore[method-assign]
    return {words: reach(words, optimizer=optimizer_of(words), TUTTI_COMPRESS=words) for words in methods}


def forgetting(commit: Callable[[CodecState], None]) -> Callable[[CodecState], None]:
    def forget(state: CodecState) -> None:
        commit(state)
        if "residual" in state.old:
            state.old["residual"].zero_()

    return forget


def reach_forgetting(methods: list[str]) -> dict[str, Reached]:
    return reach_with(methods, feedback=False)


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
            assert one.last <= LOSSES.get(words, 0.05), f"{words}: {one}"
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
            assert one.last <= LOSSES.get(words, 0.02), f"{words}: {one}"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_digits_are_learnt_with_every_method() -> None:
    for found in run_ranks(reach_with, 4, list(RATES), timeout_s=590):
        judge(found)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_without_error_feedback_every_loss_is_too_large() -> None:
    """That the losses above can be missed."""
    found = run_ranks(reach_forgetting, 4, [*TOLD_BY_LOSS, "float32"], timeout_s=590)[0]
    exact = found.pop("float32")
    for words, one in found.items():
        assert one.last > (2 * exact.last if words == "one-bit" else LOSSES.get(words, 0.05)), f"{words}: {one}"
    momenta = ["one-bit-adam,freeze_step=66", "one-bit-lamb,freeze_step=66"]
    for words, one in run_ranks(reach_forgetting, 4, momenta, timeout_s=590)[0].items():
        assert one.last > LOSSES.get(words, 0.02), f"{words}: {one}"


@pytest.mark.long
def test_digits_are_learnt_with_the_largest_values() -> None:
    for found in run_ranks(reach_with, 2, ["top-k"]):
        judge(found)
