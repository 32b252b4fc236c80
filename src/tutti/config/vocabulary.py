"""The closed vocabularies of the configuration: each word is listed once, here."""

from typing import Literal

Evidence = Literal["measured", "predicted", "published", "assumed"]
"""Where a number comes from. Every number that is shown carries one of these."""

Unit = Literal["samples", "tokens"]
"""What `global_batch_size` counts."""

AxisName = Literal["replicate", "shard", "expert", "table", "split", "stage", "context", "space"]
"""The axes of a mesh. Ranks along `DATA_AXES` compute different samples. Ranks along `split`, `stage` and `space`
compute the same samples. Ranks along `context` compute different parts of the same sequences.
"""

DATA_AXES: tuple[AxisName, ...] = ("replicate", "shard", "expert", "table")
"""The axes whose ranks share every microbatch."""

Placement = Literal["auto", "replicate", "split", "column", "row"]
"""What a layout rule does with a module on the `split`, `expert` or `table` axis.

- auto: the default for its kind of module.
- replicate: every rank holds the whole module.
- split: the module is divided in the way that suits it.
- column, row: a linear layer is divided by its outputs, or by its inputs.

On the `table` axis, linear layers are divided only where a rule says so and the mesh has no `split` axis.
"""

OnNonfinite = Literal["stop", "skip", "rollback"]
"""What happens at a loss or gradient that is NaN or infinite."""

OnSlowRank = Literal["warn", "rebalance"]
"""What happens where a rank is slower than the others: it is named, or its share of the batch is lowered, too."""

Recompute = Literal["selective"]
"""Selective recompute: outputs of matrix products, convolutions and attention are saved, all others are computed again.
"""

ShardLevel = Literal[1, 2, 3]
"""What the `shard` axis divides: 1 optimizer state; 2 gradients too; 3 parameters too (ZeRO)."""

Offload = Literal["none", "optimizer", "parameters"]
"""What is kept in host memory between uses. Ranks that compute on the CPU have everything there anyway."""

OffloadDevice = Literal["cpu", "nvme"]
"""Where the optimizer's state lies that is kept off the device.

- cpu: in the memory of the host.
- nvme: in files on a disk of the host; gradients and parameters stay in its memory.
"""

ShardEngine = Literal["auto", "tutti", "fsdp2"]
"""What runs sharding levels 2 and 3.

- auto: fsdp2 where ranks have GPUs with NCCL and it can run the plan and the model, else tutti.
- tutti: the sharding of this project, for every plan and model.
- fsdp2: torch's fully_shard.
"""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""The order in which the stages of a pipeline run their microbatches."""

ContextKind = Literal["ring", "all-to-all"]
"""How attention sees a whole sequence: keys and values pass around a ring, or heads are exchanged for tokens (Ulysses).
"""

TrafficKind = Literal[
    "gradients",
    "parameters",
    "activations",
    "halos",
    "tokens",
    "vectors",
    "keys",
    "heads",
    "messages",
    "statistics",
    "routing",
    "indices",
    "scalars",
]
"""What ranks exchange.

- gradients: gradients of parameters.
- parameters: parameters that are divided.
- activations: activations of split layers, forward; their gradients, backward.
- halos: halos of samples that are cut in space.
- tokens: tokens on their way to and from experts.
- vectors: rows of embedding tables.
- keys: keys and values that pass around a ring.
- heads: heads exchanged for tokens (Ulysses).
- messages: activations and gradients between pipeline stages.
- statistics: batch statistics.
- routing: how many tokens chose each expert.
- indices: which rows of tables are requested.
- scalars: losses, norms and other single numbers.
"""

Precision = Literal["full", "tf32", "bfloat16", "float16"]
"""Number format of the computation.

- full: the dtype of the parameters throughout; float32 is exact, also where torch or the script allows TF32.
- tf32: float32 with products, convolutions and recurrent layers in TF32.
- bfloat16, float16: autocast over parameters in their own dtype (the master weights); float16 with loss scaling.
"""

BucketSizes = Literal["stated", "measured"]
"""Whether buckets have the size that the plan states, or the fastest of several that the first steps measure."""

Relaxation = Literal["exact", "reduced", "relaxed"]
"""How far the planner may depart from what one device computes, in order to send less.

- exact: not at all.
- reduced: gradients may be compressed.
- relaxed: replicas may also diverge between exchanges.
"""

LastBatch = Literal["keep", "drop"]
"""What happens to the short last batch of an epoch."""

StartState = Literal["disk-cold", "disk-warm", "ram", "generated"]
"""Where training data is when the clock starts.

- disk-cold: in files of which no page is in memory.
- disk-warm: in files whose pages the operating system holds in memory.
- ram: in the memory of the process.
- generated: nowhere; samples are computed.
"""

StopRule = Literal["target", "epochs", "steps", "time", "plateau"]
"""What ends a training.

- target: a quality that is reached.
- epochs, steps: a number of them.
- time: the clock.
- plateau: a quality that no longer improves (early stopping).
"""

RENDEZVOUS_PORTS = range(20000, 32768)
"""Ports where ranks meet: below those that Linux gives to outgoing connections, any of which may be taken."""
