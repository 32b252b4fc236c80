"""TF32 is what the plan says, whatever torch allows by default and whatever the script allows."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tutti.errors import PlanError
from tutti.float32_precision import allow_tf32, lowered
from tutti.parallel.mixed_precision import autocast, set_float32_precision
from tutti.profile.probe import compute_rates

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """As torch starts, before and after each test."""
    _as_torch_starts()
    yield
    _as_torch_starts()


def _as_torch_starts() -> None:
    allow_tf32(False)
    BACKENDS.cudnn.allow_tf32 = True
    for switch in (BACKENDS, BACKENDS.cudnn, BACKENDS.mkldnn):
        switch.fp32_precision = "none"


def _old(allowed: bool) -> None:
    BACKENDS.cuda.matmul.allow_tf32 = BACKENDS.cudnn.allow_tf32 = allowed


def _general(precision: str) -> None:
    BACKENDS.fp32_precision = precision


def _by_operation() -> None:
    for switch in (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
        switch.fp32_precision = "tf32"
    for switch in (BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn):
        switch.fp32_precision = "bf16"


SETTINGS: dict[str, Callable[[], None]] = {
    "torch's own": lambda: None,
    "allow_tf32": lambda: _old(True),
    "allow_tf32 = False": lambda: _old(False),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32_precision": lambda: _general("tf32"),
    "fp32_precision = ieee": lambda: _general("ieee"),
    "of cudnn": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "by operation": _by_operation,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("precision", ["full", "bfloat16", "float16"])
def test_no_other_precision_leaves_tf32_on(precision: Any, setting: str) -> None:
    SETTINGS[setting]()
    set_float32_precision(precision, CPU)
    assert _in_effect() == {"ieee"}
    assert not lowered(CPU)
    assert not lowered(CUDA)
    # The older switches raise an error when they are read while the newer ones say something else; compilers read them.
    assert not BACKENDS.cuda.matmul.allow_tf32
    assert not BACKENDS.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_on_for_all_operations_where_the_plan_says_so(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    SETTINGS[setting]()
    assert not set_float32_precision("tf32", CUDA)
    assert lowered(CUDA) == ["products", "convolutions", "recurrent layers"]
    assert BACKENDS.cuda.matmul.allow_tf32
    assert BACKENDS.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"


def _in_effect() -> set[str]:
    switches = [BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn]
    switches += [BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn]
    return {switch.fp32_precision for switch in switches}


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_script_that_allows_tf32_is_told(device: torch.device) -> None:
    assert not set_float32_precision("full", device), "torch's own setting is nobody's wish"
    torch.set_float32_matmul_precision("high")
    assert "precision = full, so they are computed exactly" in set_float32_precision("full", device)


def test_what_the_script_allows_later_holds_in_no_forward() -> None:
    set_float32_precision("full", CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast("full", CUDA)
    torch.set_float32_matmul_precision("high")
    with pytest.warns(UserWarning, match="after Job.prepare, the script has allowed products"):
        autocast("full", CUDA)
    assert not lowered(CUDA)
    with BACKENDS.cudnn.flags(enabled=True, allow_tf32=True), pytest.warns(UserWarning, match="convolutions and recur"):
        autocast("bfloat16", CUDA)
    with BACKENDS.cudnn.flags(enabled=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast("full", CUDA)


def test_a_cpu_has_none() -> None:
    with pytest.raises(PlanError, match="needs an NVIDIA GPU"):
        set_float32_precision("tf32", CPU)


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16"])
def test_the_probe_times_each_dtype_as_named(dtype: str) -> None:
    with compute_rates._product(CPU, dtype, 8):
        assert ("products" in lowered(CUDA)) == (dtype == "tf32")
    assert not lowered(CUDA)
