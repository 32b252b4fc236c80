"""Convolutions, copies and launches of accelerators, rehearsed on the CPU and on the tests' own device."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakegpu import needs_fakegpu
from tutti.profile.probe import accelerator_rates
from tutti.profile.probe.accelerator_rates import ConvolutionShape, launch_s, measure_convolutions, measure_copies
from tutti.profile.probe.probe_timing import QUICK

CPU = torch.device("cpu")
SMALL = (ConvolutionShape(samples=1, channels=4, side=6), ConvolutionShape(samples=1, channels=8, side=4))
BRIEF = replace(QUICK, repeats=1)


def test_a_cpu_has_no_copies_and_no_launches_and_says_so() -> None:
    found = measure_copies(CPU, BRIEF)
    assert found.rates == ()
    assert "copies to the device" in found.skipped[0]
    assert launch_s(CPU) is None


def test_convolutions_are_measured_in_each_dtype_and_format() -> None:
    found = measure_convolutions(CPU, BRIEF, dtypes=("float32", "bfloat16", "tf32", "float8"), shapes=SMALL)
    assert [text.split(":")[0] for text in found.skipped] == ["convolutions in tf32", "convolutions in float8"]
    wanted = {(d, last, n.weight_nbytes) for d in ("float32", "bfloat16") for last in (False, True) for n in SMALL}
    assert {(r.dtype, r.channels_last, r.weight_nbytes) for r in found.rates} == wanted
    assert found.efficiency is not None
    assert found.efficiency > 0


def test_rates_are_relative_to_products_of_the_same_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 4 ms, three of which stand for both passes; float32 takes 24 ms and 48 ms, bfloat16 half that."""

    def convolution_s(shape: ConvolutionShape, dtype: torch.dtype, *_: object, channels_last: bool) -> float:
        slow = 24e-3 if shape is SMALL[0] else 48e-3
        return slow * (0.5 if dtype == torch.bfloat16 else 1.0) * (0.25 if channels_last else 1.0)

    monkeypatch.setattr(accelerator_rates, "_product_s", lambda *_: 4e-3)
    monkeypatch.setattr(accelerator_rates, "_convolution_s", convolution_s)
    found = measure_convolutions(CPU, BRIEF, dtypes=("bfloat16", "float32"), shapes=SMALL)
    assert found.efficiency == pytest.approx(1 / 3)  # 24 and 48 ms of convolutions, 12 of products each
    whole = {(r.dtype, r.channels_last, r.weight_nbytes): found.efficiency * r.relative for r in found.rates}
    first, second = (shape.weight_nbytes for shape in SMALL)
    assert whole["float32", False, first] == pytest.approx(0.5)
    assert whole["float32", False, second] == pytest.approx(0.25)
    assert whole["bfloat16", False, second] == pytest.approx(0.5)
    assert whole["bfloat16", True, second] == pytest.approx(2.0)


def test_shapes_are_those_of_a_resnet() -> None:
    for shape in accelerator_rates.SHAPES:
        layer = torch.nn.Conv2d(shape.channels, shape.channels, 3, padding=1, bias=False, device="meta")
        assert shape.weight_nbytes == layer.weight.nbytes
        assert shape.flops == pytest.approx(2 * 64 * 56 * 56 * 9 * 64 * 64)  # equal work at every stage


ON_DEVICE = """
import os, sys
import fakegpu, torch
from dataclasses import replace
from tutti.profile.probe.accelerator_rates import *
from tutti.profile.probe.probe_timing import QUICK
device, effort = fakegpu.load(), replace(QUICK, repeats=1)
copies = measure_copies(device, effort, nbytes=2**16)
print([(rate.direction, rate.pinned) for rate in copies.rates], copies.skipped)
assert all(rate.bytes_per_s > 0 for rate in copies.rates)
assert 0 < launch_s(device) < 1
shape = ConvolutionShape(samples=1, channels=4, side=4)
found = measure_convolutions(device, effort, dtypes=("float32",), shapes=(shape,))
print(len(found.rates), found.skipped)
assert len(found.rates) == 2, found.skipped
sys.stdout.flush()
os._exit(0)  # autograd's thread of the device may ask for the interpreter while it ends, which aborts
"""


@needs_fakegpu
def test_tensors_are_placed_on_the_device() -> None:
    """In a process of its own, which the device belongs to. What mixes devices fails."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", ON_DEVICE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "('to_device', False), ('to_host', False)" in done.stdout
