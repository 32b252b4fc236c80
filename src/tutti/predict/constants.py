"""Every constant of the cost model that nobody measured on the machine at hand, in one place, with its reason.

All are assumptions: a prediction that uses one says so in its notes. Measured values in a ClusterSpec replace
those that have a field there.
"""

from typing import Final

from tutti.spec.model import OpKind
from tutti.spec.words import Evidence

EFFICIENCY: Final[dict[OpKind, float]] = {
    "gemm": 1.0,
    "conv": 0.7,
    "attention": 0.7,
    "rnn": 0.7,
    "embedding": 0.1,
    "norm": 0.1,
    "elementwise": 0.1,
    "other": 0.1,
}
"""Rate of an operator kind relative to a square matrix product of as many FLOPs. The last four are limited by
memory traffic in practice; their FLOPs run on vector units, about a tenth of the matrix rate."""

MATRIX_KINDS: Final[frozenset[OpKind]] = frozenset({"gemm", "conv", "attention", "rnn"})
"""Kinds that autocast runs in the lower precision, and that TF32 speeds up."""

DATA_SHEET_EFFICIENCY: Final = 0.65
"""Share of a published dense peak that a large square matrix product reaches in a framework."""

DATA_SHEET_BANDWIDTH_EFFICIENCY: Final = 0.8
"""Share of a published memory bandwidth that a large copy reaches."""

MATRIX_RAMP_S: Final[dict[str, float]] = {"cuda": 8e-6, "cpu": 2e-6}
"""Data sheets only: time a matrix product takes beyond its FLOPs, because small ones do not fill the device."""

KERNEL_OVERHEAD_S: Final[dict[str, float]] = {"cuda": 6e-6, "cpu": 5e-6}
"""Time of one operator call beyond its work in eager PyTorch, where the device spec has none."""

BACKWARD_CALLS: Final = 2.0
"""Kernel calls in backward for each call in forward: a gradient for the input and one for the weight."""

OPTIMIZER_CALLS: Final[dict[str, int]] = {"SGD": 3, "Adam": 10, "AdamW": 11, "LAMB": 16, "LARS": 9}
OPTIMIZER_CALLS_OTHER: Final = 10
"""Operator calls an optimizer makes for each parameter tensor."""

TENSORS_PER_MODULE: Final = 2
"""Parameter tensors of a module that has any (weight and bias)."""

FUSED_TENSORS: Final = 40
"""On CUDA, how many tensors one multi-tensor optimizer kernel takes."""

CPU_COMMUNICATION_SHARE: Final[dict[str, float]] = {"device": 1.0, "node": 1.0, "network": 0.3}
"""Part of the communication hidden behind backward that costs compute all the same where ranks compute on CPU
cores: copies between ranks of a host are the cores' own work; a network card does most of its own."""

STEP_OVERHEAD_S: Final = 0.0003
"""Python's part of a step outside of operators: the loop, the loss value, the metrics row."""

LOSS_NBYTES: Final = 16
"""The small all-reduce of each step that gives every rank the global mean loss (a sum and a count, float64)."""

RESERVE_NBYTES: Final[dict[str, float]] = {"cpu": 350e6, "cuda": 1.0e9}
"""Memory of a rank before its model: interpreter, torch's libraries; on CUDA the context and work spaces."""

FRAGMENTATION: Final[dict[str, float]] = {"cpu": 0.0, "cuda": 0.05}
"""Part of a device's tensors that its caching allocator holds beyond them."""

OVERSUBSCRIBED: Final = 1.15
"""Slow-down beyond the lost cores where a node runs more ranks than it has cores (switching, polling)."""

STEP_MARGIN: Final[dict[Evidence, float]] = {
    "measured": 0.25,
    "predicted": 0.5,
    "published": 0.5,
    "assumed": 0.8,
}
"""Half-width of the interval of a time, relative, by the weakest evidence behind it."""

MEMORY_MARGIN: Final = 0.15
"""Half-width of the interval of a rank's memory, relative."""
