"""Constants of the cost model that were not measured on the machine at hand, each with its reason.

All are assumptions, and a prediction that uses one says so in its notes. Measured values in a ClusterSpec
replace the constants that have a field there.
"""

from typing import Final

from tutti.config.model import OpKind
from tutti.config.vocabulary import Evidence

EFFICIENCY: Final[dict[OpKind, float]] = {
    "gemm": 0.85,
    "conv": 1.1,
    "attention": 0.7,
    "rnn": 1.2,
    "embedding": 0.04,
    "norm": 0.02,
    "batch_norm": 0.02,
    "pool": 0.04,
    "exponential": 0.04,
    "function": 0.04,
    "random": 0.04,
    "elementwise": 0.04,
    "other": 0.04,
}
"""Rate of each operator kind, relative to a square matrix product of as many FLOPs.

The values are fitted to eight small models on one core, because matrix products in models are not square. The
kinds from `embedding` on run on vector units and count one FLOP for each element, whether it is an exponential
or a sum. Their memory traffic is counted separately.
"""

CPU_VECTORS: Final[dict[OpKind, tuple[float, float]]] = {
    "norm": (0.024, 0.027),
    "batch_norm": (0.005, 0.015),
    "pool": (0.0018, 0.032),
    "exponential": (0.011, 0.011),
    "function": (0.0032, 0.0054),
    "random": (0.0016, 0.0016),
}
"""The same rates on a CPU, (forward, backward), where they were not measured: what three probes found on one core
of an AMD EPYC with AVX2.
"""

ON_ONE_THREAD: Final[frozenset[OpKind]] = frozenset({"random"})
"""Operator kinds for which a CPU uses one thread, however many a rank has.

Torch draws the 17 million random numbers of an encoder's dropouts in 101 ms, on one thread of an AMD EPYC as
well as on two. Matrix products, norms and softmax take half as long on two.
"""

SHARED_NORM: Final = 1.9
"""On CPUs, time per element of a batch norm with statistics over several ranks, relative to a norm of rows.

On one core of an AMD EPYC it took 0.9 ns forward and 1.0 ns backward; the norm of rows took 0.5 ns each.
"""

MATRIX_KINDS: Final[frozenset[OpKind]] = frozenset({"gemm", "conv", "attention", "rnn"})
"""Operator kinds that autocast runs in the lower precision, and that TF32 speeds up."""

DATA_SHEET_EFFICIENCY: Final = 0.8
"""Fraction of a published dense peak that a large square matrix product reaches in a framework.

It was chosen with 214 published measurements of data-parallel GPT on A100 in view; predictions meet these with a
mean error of 18 %.
"""

DATA_SHEET_BANDWIDTH_EFFICIENCY: Final = 0.8
"""Fraction of a published memory bandwidth that a large copy reaches."""

MATRIX_RAMP_S: Final[dict[str, float]] = {"cuda": 8e-6, "cpu": 2e-6}
"""For devices known from data sheets only: seconds that a matrix product takes beyond its FLOPs, because small
products do not fill the device.
"""

KERNEL_OVERHEAD_S: Final[dict[str, float]] = {"cuda": 6e-6, "cpu": 1e-6}
"""Seconds of one bare operator call on a tensor of a few elements, where the device's description has none."""

CALL_FACTOR: Final = 5.0
"""Overhead of one operator call in a model, in bare operator calls (`kernel_overhead_s`).

It covers the module call around the operator, autograd's record of it, and its small views and copies. A GPU
computes in the meantime, so a module takes the longer of the two times. Most of vTrain's 1260 steps of small
GPTs on A100 are limited by calls; fits to them give 8 to 10.
"""

KERNEL_GAP_S: Final = 1.5e-6
"""Seconds between two kernels on a CUDA device whose host is ahead of it: about what back-to-back launches of empty
kernels take.
"""

BACKWARD_CALLS: Final = 2.0
"""Kernel calls in backward for each call in forward: one for the gradient of the input and one for that of the
weight.
"""

OPTIMIZER_CALLS: Final[dict[str, int]] = {"SGD": 12, "Adam": 26, "AdamW": 28}
OPTIMIZER_CALLS_OTHER: Final = 28
"""Overhead of an optimizer's update of one parameter tensor besides its memory traffic, in bare operator calls."""

FOLLOWED_UNIT: Final = 70.0
FOLLOWED_CALL: Final = 1000.0
"""What a CPU spends on tracing the model on shapes for each microbatch of a pipeline, in bare operator calls.

`FOLLOWED_UNIT` is for each unit; `FOLLOWED_CALL` is for each operator call of the code between units, with its
views. Both are fitted to a GPT of 8 blocks on two cores: 2.3 ms with whole blocks, 36 ms with every block
divided. On GPUs this time is assumed to be hidden behind the device's work.
"""

OPTIMIZER_PASSES: Final[dict[str, float]] = {"SGD": 2.0, "Adam": 6.0, "AdamW": 6.5}
OPTIMIZER_PASSES_OTHER: Final = 6.0
"""How often an optimizer reads or writes each byte of its state; more than once, because its arithmetic takes
several operators. Reading parameters and gradients and writing parameters comes on top.
"""

TENSORS_PER_MODULE: Final = 2
"""Parameter tensors of a module that has any (weight and bias)."""

FUSED: Final = ("SGD", "Adam", "AdamW")
FUSED_DTYPES: Final = ("float32", "float64")
FUSED_PASSES: Final = 2.0
FUSED_RATE: Final = 1.6
FUSED_CALLS: Final = 6
"""The optimizers that use fused kernels on a CPU (trainer/update.py), and the cost of these kernels.

They read and write each byte of state once (`FUSED_PASSES`), and pass over memory `FUSED_RATE` times as fast as
the vector operations of the probe. AdamW's update of 8 M values took 5.5 ms on one of two cores that the probe
measured at 27 GB/s, and 8.2 ms on each of two ranks; the formula gives 5.1 and 9.5 ms. SGD with momentum took
4.4 ms for 10 M values. An update of 64 values took 3.5 us, and checking whether the fused kernels apply took as
long again.
"""

FUSED_TENSORS: Final = 40
"""Number of tensors that one multi-tensor optimizer kernel updates on CUDA."""

CPU_COMMUNICATION_SHARE: Final[dict[str, float]] = {"device": 1.0, "node": 1.0, "network": 0.3}
"""Fraction of the communication hidden behind backward that still takes time from computation on a CPU, by link
tier, where it was not measured.

Copies between ranks of a host are done by the same cores; a network card does most of its own work.
"""

WEIGHT_PASSES: Final[dict[str, float]] = {"cpu": 3.0, "cuda": 0.0}
"""How often each matrix product passes over its weights besides its FLOPs, at memory bandwidth, where it was not
measured.

The weights are read, and written in the order that the processor wants. Square float32 weights of 1024 to 4096
on one core took 2 to 5 passes in forward, and 1 to 3 in each product of backward. GPUs load tiles while they
compute.
"""

STEP_CALLS: Final = 850.0
"""Python's part of a step outside of operators on a CPU, in bare operator calls: the loop, collating the batch, the
loss value, the metrics row.

It was read from eleven small models of 1 to 300 ms a step, on two ranks on two cores of an AMD EPYC whose bare
call takes 1.1 us: 0.5 to 1.2 ms, with a median of 0.95 ms.
"""

STEP_OVERHEAD_S: Final = 0.0003
"""The same in seconds where a GPU computes, which it does in the meantime."""

LOSS_NBYTES: Final = 16
"""Bytes of the small all-reduce in each step that gives every rank the global mean loss (a sum and a count,
float64).
"""

OPTIMIZER_TEMPORARIES: Final[dict[str, float]] = {"SGD": 0.0, "Adam": 2.0, "AdamW": 2.0}
OPTIMIZER_TEMPORARIES_OTHER: Final = 1.0
"""Number of temporary tensors, of the largest parameter's size, that exist while an optimizer updates it.

This holds where the optimizer updates parameters one by one, as on a CPU. For Adam they are the root of the
second moment, and that root divided by its bias correction.
"""

CONVOLUTION_PASSES: Final = 2.0
"""Bytes that the backward of a convolution holds on a host while it runs, over the bytes of its input and output.

It holds the gradients of both, and copies of the input and of the output's gradient in oneDNN's memory order.
This was measured on single convolutions in processes of their own (float32, 2 and 3 dims, 16 to 64 channels);
tests/cost_model/test_convolution_memory.py measures it again. One channel or a 1 x 1 kernel takes less, and
without AVX-512 so do 16 channels (1.58).
"""

RECURRENT_PASSES: Final = 10.0
"""Bytes that the backward of a recurrent layer holds on a host while it runs, over the bytes of its output.

It holds the gradients of what oneDNN's LSTM saved (four gates, two states), those of its input and output, and
copies of both. This was measured on LSTMs of one to three layers in processes of their own (float32, 128 and 256
units): tests/cost_model/test_convolution_memory.py.
"""

CUT_CONVOLUTION_PASSES: Final = 3.0
"""`CONVOLUTION_PASSES` where the input is divided in space.

Rows whose interior is computed separately lie in views, which are copied once more. The gradient of the rows
with their halos is held as well.
"""

PIECEWISE_PASSES: Final[dict[str, tuple[float, float]]] = {"forward": (4.0, 2.0), "backward": (8.0, 2.0)}
"""How often a convolution whose interior is computed separately reads and writes (its input, its output), beyond
one that is computed at once.

These are copies of views, the concatenation of rows with halos, and the concatenation of outputs and of
gradients. Counted in parallel/spatial/spatial_convolution.py.
"""

HALO_PASSES: Final[dict[str, float]] = {"forward": 2.0, "backward": 2.0}
"""How often a convolution that waits for its halos reads and writes its input to concatenate rows with halos.
Counted in parallel/spatial/spatial_convolution.py.
"""

LEAST_INTERIOR: Final = 0.75
"""Fraction of an output that must need no halo for its interior to be computed separately, as in
parallel/spatial/spatial_convolution.py.
"""

HALO_CALLS: Final[dict[str, float]] = {"forward": 6.0, "backward": 8.0}

PIECEWISE_CALLS: Final[dict[str, float]] = {"forward": 15.0, "backward": 25.0}
"""Further operator calls of a convolution, counted in parallel/spatial/spatial_convolution.py: `PIECEWISE_CALLS`
where its interior is computed separately, `HALO_CALLS` where it is not.
"""

SLAB_EFFICIENCY: Final[dict[str, float]] = {"forward": 0.8, "backward": 0.6}
"""Speed at which a CPU convolves the rows of a slab, relative to as many rows of a larger part.

Timed with 3 x 3 convolutions of 64 to 512 channels on 32 to 8 rows in two or four parts, on one thread of an AMD
EPYC: typically forward 0.78 to 1.0, backward 0.45 to 0.8.
"""

RESERVE_NBYTES: Final[dict[str, float]] = {"cpu": 335e6, "cuda": 1.0e9}
"""Memory of a rank before its model: the interpreter and torch's libraries; on CUDA, the context and workspaces.

On a CPU it was 323 MB beside a tiny model in a Job of two ranks, and 352 MB where a GPT computes.
"""

FRAGMENTATION: Final[dict[str, float]] = {"cpu": 0.0, "cuda": 0.05}
"""Memory that a device's caching allocator holds beyond its tensors, as a fraction of them."""

ALLOCATED_MARGIN: Final = 0.05
RESERVED_MARGIN: Final = 0.25
"""Relative half-widths of the intervals of tensors' memory and of the allocator's on a GPU.

Measured on one H100 in bfloat16, allocated and reserved: ResNet-50 with 128 images 5.7 and 6.3 GiB, GPT-2 with
16 x 1024 tokens 14.5 and 18.3 GiB. Predicted are 5.7 and 14.9 GiB allocated, 6.3 and 15.6 reserved. The second
interval is as wide as GPT-2's miss, from these two models alone: it is no bound.
"""

WORKSPACE_NBYTES: Final = 64 * 2**20
"""Workspaces of cuBLAS and cuBLASLt on a GPU, which count as tensors: 32 MiB each on an H100."""

OVERSUBSCRIBED: Final = 1.15
"""Factor of slow-down by switching and polling where a node runs more ranks than it has cores.

It multiplies the slow-down by sharing the cores, which follows from the cluster (`HostGroup.slowdown`).
"""

STEP_MARGIN: Final[dict[Evidence, float]] = {
    "measured": 0.4,
    "predicted": 0.6,
    "published": 0.6,
    "assumed": 1.0,
}
"""Relative half-width of the interval of a time, by the weakest evidence behind it."""

MEMORY_MARGIN: Final = 0.15
"""Relative half-width of the interval of a rank's memory."""

STATE_BUCKET_NBYTES: Final = 25 * 2**20
"""With sharded optimizer state, updated parameters are gathered in buckets of this size, two at a time."""

PENDING_SUMS: Final = 2
"""With sharded gradients, the number of units whose whole gradients may wait for their reduction."""

HOST_LINK_BYTES_PER_S: Final = 20e9
"""Bandwidth between a CUDA device and its host's memory, in one direction: what PCIe 4 x16 gives in practice."""

HOST_MEMORY_BYTES_PER_S: Final = 110e9
"""Memory traffic per second of an optimizer on all cores of a host with GPUs.

Assumed: 28 bytes for each of 10 billion parameters in 2.6 s, as remembered of ZeRO-Offload's Adam (Ren et al. 2021,
arXiv 2101.06840) on the two sockets of a DGX-2; the figure was not checked with the paper's table.
"""

NVME_BYTES_PER_S: Final = (3.0e9, 1.5e9)
"""Rates of reading and writing of a disk for offloaded state, where the cluster file has none."""

STATE_GROUP_NBYTES: Final = 64 * 2**20
"""Optimizer state on a disk is read and written in groups of this size (parallel/offload/state_on_disk.py)."""

STATE_BUFFERS: Final = 3
"""Groups of such state that are in the host's memory at once."""

SAVED_CALLS: Final = 2
"""Modules whose offloaded activations are on the device at once: one computes, another's are moving."""

SAVED_NBYTES: Final = 2**20
"""Smaller activations stay on the device (parallel/offload/saved_activations.py)."""

HOST_FILL: Final = 0.9
"""Fraction of a host's memory that state may fill; the rest is the system's and the script's."""

FILES_IN_MEMORY: Final = 0.5
"""Fraction of a host's memory in which the system keeps files that were read. Data that fits into it is read from
storage only once.
"""
