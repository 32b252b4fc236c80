"""Linear layers, convolutions and attention beside products of as many FLOPs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tutti.describe.probe import kinds
from tutti.describe.probe.effort import QUICK

KINDS = ("gemm", "conv", "attention")
CPU = torch.device("cpu")
SUBJECTS = [*kinds.layers(), *kinds.convolutions(), kinds.attention()]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_subjects_have_the_flops_that_are_said_of_them(subject: kinds.Subject) -> None:
    """Attention's are those of its two products, which torch counts where it makes them one by one."""
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        subject.forward()
    assert counted.get_total_flops() == subject.flops


def test_what_is_measured_is_relative_to_products_timed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 4 ms in each pass, forward and backward together 24 ms: 12 of 24."""
    monkeypatch.setattr(kinds, "_product_s", lambda *_: 4e-3)
    monkeypatch.setattr(kinds, "_there_and_back_s", lambda *_: 24e-3)
    assert kinds.measure(CPU, QUICK) == dict.fromkeys(KINDS, pytest.approx(0.5))


def test_all_kinds_are_measured_on_a_cpu_where_there_is_time_for_them() -> None:
    threads = torch.get_num_threads()
    found = kinds.measure(CPU, replace(QUICK, repeats=1))
    assert set(found) == set(KINDS)
    assert all(0 < value < 20 for value in found.values())
    assert torch.get_num_threads() == threads
    assert kinds.measure(CPU, replace(QUICK, kinds=0)) == kinds.measure(torch.device("cuda"), QUICK) == {}
