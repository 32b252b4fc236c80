"""Memory that the backward of a convolution or a recurrent layer takes on a host.

It is measured in a process of its own and compared with the prediction.
"""

import ctypes
import platform
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cost_model.examples import cluster, gpu, plan
from cost_model.examples_mesh import meshed
from harness import run_ranks
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.cost_model import cost_constants, predict
from tutti.host_memory import map_large_blocks


def most_nbytes() -> int:
    """Return the most bytes that this process has held since its peak was last reset."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def peak_in_backward(inside: int, out: int, samples: int, shape: tuple[int, ...]) -> float:
    """Return the additional memory of one convolution's backward, as a multiple of its input and output bytes."""
    assert map_large_blocks()
    torch.set_num_threads(1)
    conv = (nn.Conv2d if len(shape) == 2 else nn.Conv3d)(inside, out, 3, padding=1, bias=False)
    conv(
        torch.randn(1, inside, *(8 for _ in shape), requires_grad=True)
    ).sum().backward()  # loads what the first call loads
    x = torch.randn(samples, inside, *shape, requires_grad=True)
    y = conv(x)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = most_nbytes()
    y.backward(torch.ones_like(y))
    return (most_nbytes() - before) / ((x.numel() + y.numel()) * 4)


def peak_of_lstm(units: int, layers: int, samples: int, steps: int) -> float:
    """Return the additional memory of an LSTM's backward, as a multiple of its output bytes."""
    assert map_large_blocks()
    torch.set_num_threads(1)
    lstm = nn.LSTM(units, units, layers, batch_first=True)
    lstm(torch.randn(1, 4, units, requires_grad=True))[0].sum().backward()
    x = torch.randn(samples, steps, units, requires_grad=True)
    y = lstm(x)[0]
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = most_nbytes()
    y.backward(torch.ones_like(y))
    return (most_nbytes() - before) / (y.numel() * 4)


seen = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),
    reason="reads /proc, and what oneDNN holds was looked at on x86 alone",
)


@seen
@pytest.mark.parametrize(
    ("units", "layers", "samples", "steps"), [(256, 1, 64, 128), (256, 2, 64, 128), (128, 3, 128, 128)]
)
def test_an_lstm_holds_ten_times_its_output(units: int, layers: int, samples: int, steps: int) -> None:
    held = run_ranks(peak_of_lstm, 1, units, layers, samples, steps)[0]
    assert held == pytest.approx(cost_constants.RECURRENT_PASSES, rel=0.15)


@seen
@pytest.mark.parametrize(
    ("inside", "out", "samples", "shape"),
    [(48, 16, 4, (24, 24, 24)), (16, 16, 8, (24, 24, 24)), (64, 64, 16, (48, 48))],
)
def test_two_passes_over_input_and_output_are_held(inside: int, out: int, samples: int, shape: tuple[int, ...]) -> None:
    held = run_ranks(peak_in_backward, 1, inside, out, samples, shape)[0]
    assert held <= 1.12 * cost_constants.CONVOLUTION_PASSES
    if torch.backends.cpu.get_cpu_capability() == "AVX512" or inside != 16:
        assert held == pytest.approx(cost_constants.CONVOLUTION_PASSES, rel=0.12)
    else:  # with blocks of 8 channels oneDNN holds less, and the prediction is a fifth too high
        assert held == pytest.approx(1.58, rel=0.05)


def convolution(name: str, inside: float, out: float, kept: float, halo: float = 0.0) -> ModuleSpec:
    cost = OpCost(
        kind="conv", flops_forward=1.0, flops_backward=2.0, nbytes_forward=inside + out, nbytes_backward=inside + out
    )
    return ModuleSpec(
        name=name,
        kind="Conv3d",
        activation_nbytes=kept,
        output_nbytes=out,
        ops=(cost,),
        spatial=True,
        halo_nbytes_per_cut=halo,
    )


def test_the_backward_of_a_recurrent_layer_counts_on_a_host() -> None:
    cost = OpCost(kind="rnn", flops_forward=1.0, flops_backward=2.0, nbytes_forward=1.0, nbytes_backward=1.0)
    lstm = ModuleSpec(name="l", kind="LSTM", activation_nbytes=8e6, output_nbytes=1e6, ops=(cost,))
    assert activations(layers(lstm)) == 4 * (8e6 + 10e6)


def layers(*modules: ModuleSpec) -> ModelSpec:
    return ModelSpec(name="convolutions", modules=modules, optimizer="SGD")


def activations(model: ModelSpec, **mesh: int) -> float:
    return predict(model, cluster(), meshed(4, 1, mesh)).memory.activations


def test_the_last_convolution_counts_whole_and_earlier_ones_less_what_is_gone_by_then() -> None:
    big, small = convolution("big", 1e6, 3e6, 1e6), convolution("small", 3e6, 1e6, 3e6)
    late = activations(layers(small, big))
    assert late == 4 * (1e6 + 3e6 + 2 * 4e6)
    widest = convolution("widest", 5e6, 3e6, 5e6)
    early = activations(layers(widest, convolution("last", 3e6, 1e6, 3e6)))
    assert early == 4 * (5e6 + 3e6 + max(2 * 8e6 - 3e6, 2 * 4e6))


def test_cut_in_space_the_views_of_the_interior_are_copied() -> None:
    uncontended = convolution("c", 4e6, 2e6, 4e6, halo=1e4)
    assert activations(layers(uncontended)) == 4 * (4e6 + 2 * 6e6)
    assert activations(layers(uncontended), space=2) == 4 * (2e6 + 3 * 3e6 + 2e6)
    without = convolution("c", 4e6, 2e6, 4e6)
    assert activations(layers(without), space=2) == 4 * (2e6 + 2 * 3e6)


def test_on_a_gpu_only_the_gradient_of_the_output_is_counted() -> None:
    model = layers(convolution("c", 4e6, 2e6, 4e6))
    assert predict(model, cluster(gpu()), plan(batch=4)).memory.activations == 4 * (4e6 + 2e6)
