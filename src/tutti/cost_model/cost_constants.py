"""Every constant of the cost model that nobody measured on the machine at hand, in one place, with its reason.

All are assumptions: a prediction that uses one says so in its notes. Measured values in a ClusterSpec replace
those that have a field there.
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
"""Rate of an operator kind relative to a square matrix product of as many FLOPs; fitted to eight small models on one
core. Products in models are not square. From `embedding` on they do their few FLOPs (one for each element, an
exponential as much as a sum) on vector units; their memory traffic is counted besides."""

CPU_VECTORS: Final[dict[OpKind, tuple[float, float]]] = {
    "norm": (0.024, 0.027),
    "batch_norm": (0.005, 0.015),
    "pool": (0.0018, 0.032),
    "exponential": (0.011, 0.011),
    "function": (0.0032, 0.0054),
    "random": (0.0016, 0.0016),
}
"""The same of a CPU, forward and backward, where nobody measured it: as three probes found them on one core of an AMD
EPYC with AVX2."""

ON_ONE_THREAD: Final[frozenset[OpKind]] = frozenset({"random"})
"""Kinds that a CPU does on one thread of several: torch draws the 17 million numbers of an encoder's dropouts in 101 ms
on one thread of an AMD EPYC and on two, where products, norms and softmax take half as long on two."""

SHARED_NORM: Final = 1.9
"""On CPUs, how many times as long a batch norm with the statistics of several ranks takes for an element as a norm
of rows: on one core of an AMD EPYC 0.9 ns forward and 1.0 backward, where the latter took 0.5 and 0.5."""

MATRIX_KINDS: Final[frozenset[OpKind]] = frozenset({"gemm", "conv", "attention", "rnn"})
"""Kinds that autocast runs in the lower precision, and that TF32 speeds up."""

DATA_SHEET_EFFICIENCY: Final = 0.8
"""Share of a published dense peak that a large square matrix product reaches in a framework: set with 214 published
measurements of data-parallel GPT on A100 in view, which it meets with a mean error of 18 %."""

DATA_SHEET_BANDWIDTH_EFFICIENCY: Final = 0.8
"""Share of a published memory bandwidth that a large copy reaches."""

MATRIX_RAMP_S: Final[dict[str, float]] = {"cuda": 8e-6, "cpu": 2e-6}
"""Data sheets only: time a matrix product takes beyond its FLOPs, because small ones do not fill the device."""

KERNEL_OVERHEAD_S: Final[dict[str, float]] = {"cuda": 6e-6, "cpu": 1e-6}
"""Time of one bare operator call on a tensor of a few elements, where the device spec has none."""

CALL_FACTOR: Final = 5.0
"""What one operator call of a model costs besides its work, in bare operator calls (`kernel_overhead_s`): the module
call around it, autograd's record of it, its small views and copies. A GPU computes meanwhile, and a module takes the
longer of both: of vTrain's 1260 steps of small GPTs on A100 most are limited so, and fits give 8 to 10 there."""

KERNEL_GAP_S: Final = 1.5e-6
"""Between two kernels on a CUDA device whose host is ahead: about what back-to-back launches of empty kernels take."""

BACKWARD_CALLS: Final = 2.0
"""Kernel calls in backward for each call in forward: a gradient for the input and one for the weight."""

OPTIMIZER_CALLS: Final[dict[str, int]] = {"SGD": 12, "Adam": 26, "AdamW": 28}
OPTIMIZER_CALLS_OTHER: Final = 28
"""What an optimizer's update of one parameter tensor costs besides its memory traffic, in bare operator calls."""

FOLLOWED_UNIT: Final = 70.0
FOLLOWED_CALL: Final = 1000.0
"""With stages, what following the model on shapes costs a CPU for each microbatch, in bare operator calls: of a unit,
and of an operator call of the code between units (with its views). Fitted to a GPT of 8 blocks on two cores, 2.3 ms
with whole blocks and 36 ms with all of them taken apart. On GPUs it is taken to be hidden behind the device's work."""

OPTIMIZER_PASSES: Final[dict[str, float]] = {"SGD": 2.0, "Adam": 6.0, "AdamW": 6.5}
OPTIMIZER_PASSES_OTHER: Final = 6.0
"""How often an optimizer reads or writes each byte of its state: its arithmetic is several operators, not one.
Besides, it reads parameters and gradients and writes parameters."""

TENSORS_PER_MODULE: Final = 2
"""Parameter tensors of a module that has any (weight and bias)."""

FUSED: Final = ("SGD", "Adam", "AdamW")
FUSED_DTYPES: Final = ("float32", "float64")
FUSED_PASSES: Final = 2.0
FUSED_RATE: Final = 1.6
FUSED_CALLS: Final = 6
"""Of optimizers whose kernels runtime.fused takes on a CPU. They read and write each byte of state once, and go over
memory `FUSED_RATE` times as quickly as the probe's vector operations: AdamW's update of 8 M values took 5.5 ms on one
of two cores that the probe gave 27 GB/s, and 8.2 ms on each of two ranks (this makes 5.1 and 9.5 of them); SGD's with
momentum of 10 M 4.4 ms. One of 64 values took 3.5 us, and as much to see whether the kernels go with it."""

FUSED_TENSORS: Final = 40
"""On CUDA, how many tensors one multi-tensor optimizer kernel takes."""

CPU_COMMUNICATION_SHARE: Final[dict[str, float]] = {"device": 1.0, "node": 1.0, "network": 0.3}
"""Part of the communication hidden behind backward that costs compute all the same where ranks compute on CPU
cores and nobody measured it: copies between ranks of a host are the cores' own work; a network card does most of its
own."""

WEIGHT_PASSES: Final[dict[str, float]] = {"cpu": 3.0, "cuda": 0.0}
"""How often each product goes over its weights besides its FLOPs, at the bandwidth of memory, where nobody measured it:
to read them and to write them in the order the processor wants. Seen of 1024 to 4096 square float32 weights on one
core: 2 to 5 in forward, 1 to 3 in each product of backward. GPUs load tiles while they compute."""

STEP_CALLS: Final = 850.0
"""Python's part of a step outside of operators on a CPU, in bare operator calls: the loop, the batch put together, the
loss value, the metrics row. Read of eleven small models of 1 to 300 ms a step, two ranks on two cores of an AMD EPYC
whose bare call takes 1.1 us: 0.5 to 1.2 ms, in the median 0.95."""

STEP_OVERHEAD_S: Final = 0.0003
"""The same in seconds beside a GPU, which computes meanwhile."""

LOSS_NBYTES: Final = 16
"""The small all-reduce of each step that gives every rank the global mean loss (a sum and a count, float64)."""

OPTIMIZER_TEMPORARIES: Final[dict[str, float]] = {"SGD": 0.0, "Adam": 2.0, "AdamW": 2.0}
OPTIMIZER_TEMPORARIES_OTHER: Final = 1.0
"""Tensors of the largest parameter's size that exist for a moment while an optimizer updates it, where it goes through
parameters one by one, as on CPU: Adam's root of the second moment, and that divided by its bias correction."""

CONVOLUTION_PASSES: Final = 2.0
"""What the backward of a convolution holds on a host while it runs, in bytes of its input and output: the gradients of
both, and a copy of the input and of the output's gradient in the order that oneDNN computes in. So it was seen in
single convolutions in processes of their own (float32, 2 and 3 dims, 16 to 64 channels): tests/cost_model/
test_convolution_memory.py sees it again. One channel or a 1 x 1 kernel takes less, and without AVX-512 so do 16
channels (1.58)."""

RECURRENT_PASSES: Final = 10.0
"""What the backward of a recurrent layer holds on a host while it runs, in bytes of its output: the gradients of what
oneDNN's LSTM kept (four gates, two states), of its input and output, and copies of both. Seen in LSTMs of one to three
layers in processes of their own (float32, 128 and 256 units): tests/cost_model/test_convolution_memory.py."""

CUT_CONVOLUTION_PASSES: Final = 3.0
"""The same where the input is cut in space: rows whose interior is computed apart lie in views, which are copied once
more. The gradient of the rows with their halos is held besides."""

PIECEWISE_PASSES: Final[dict[str, tuple[float, float]]] = {"forward": (4.0, 2.0), "backward": (8.0, 2.0)}
"""How often a convolution whose interior is computed apart reads and writes (its input, its output) more than one that
is not: copies of views, rows put together with halos, outputs and gradients put together. Counted in
parallel/spatial/overlapped.py."""

HALO_PASSES: Final[dict[str, float]] = {"forward": 2.0, "backward": 2.0}
"""How often one that waits for its halos does so with its input: rows put together with halos. Counted there."""

LEAST_INTERIOR: Final = 0.75
"""The part of an output that must need no halo for its interior to be computed apart: as overlapped.py has it."""

HALO_CALLS: Final[dict[str, float]] = {"forward": 6.0, "backward": 8.0}

PIECEWISE_CALLS: Final[dict[str, float]] = {"forward": 15.0, "backward": 25.0}
"""Operator calls besides, counted there; HALO_CALLS: where nothing is apart."""

SLAB_EFFICIENCY: Final[dict[str, float]] = {"forward": 0.8, "backward": 0.6}
"""How quickly a CPU convolves the rows of a slab, relative to as many rows of a larger part. Timed by hand, 3 x 3
convolutions of 64 to 512 channels on 32 to 8 rows in two or four parts, one thread of an AMD EPYC: forward 0.78 to 1.0
in the middle, backward 0.45 to 0.8."""

RESERVE_NBYTES: Final[dict[str, float]] = {"cpu": 305e6, "cuda": 1.0e9}
"""Memory of a rank before its model: interpreter, torch's libraries; on CUDA the context and work spaces.
On CPU: 291 MB beside a tiny model in a Job of one rank or two, 310 to 320 MB where a GPT computes."""

FRAGMENTATION: Final[dict[str, float]] = {"cpu": 0.0, "cuda": 0.05}
"""Part of a device's tensors that its caching allocator holds beyond them."""

OVERSUBSCRIBED: Final = 1.15
"""Slow-down where a node runs more ranks than it has cores (switching, polling), beyond that of sharing them, which
follows from the cluster (`Seat.slowdown`)."""

STEP_MARGIN: Final[dict[Evidence, float]] = {
    "measured": 0.4,
    "predicted": 0.6,
    "published": 0.6,
    "assumed": 1.0,
}
"""Half-width of the interval of a time, relative, by the weakest evidence behind it."""

MEMORY_MARGIN: Final = 0.15
"""Half-width of the interval of a rank's memory, relative."""

STATE_BUCKET_NBYTES: Final = 25 * 2**20
"""With divided optimizer state, updated parameters are gathered in buckets of this size, two at a time."""

PENDING_SUMS: Final = 2
"""With divided gradients, how many units' whole gradients may wait for their sums."""

HOST_LINK_BYTES_PER_S: Final = 20e9
"""Between a CUDA device and its host's memory, one way: what PCIe 4 x16 gives in practice."""

HOST_UPDATE_BYTES_PER_S: Final = 20e9
"""Memory traffic of an optimizer that runs on the host's cores for one of several devices."""

FILES_IN_MEMORY: Final = 0.5
"""Part of a host's memory in which files that were read stay: data that fits in it comes from storage only once."""
