"""ModelSpec: what a model costs, module by module, per sample; independent of machines and of plans."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator

from tutti.config import option_syntax
from tutti.config.vocabulary import Evidence
from tutti.errors import SpecError

VectorKind = Literal["norm", "batch_norm", "pool", "exponential", "function", "random"]
"""Operators that take a CPU far longer per element than an addition.

- norm: statistics over an element's neighbours in memory.
- batch_norm: statistics over the elements of a channel.
- pool: pooling windows, and interpolation.
- exponential: softmax, sigmoid, GELU.
- function: tanh, logarithm and other functions that are computed as series.
- random: random numbers (dropout).
"""

OpKind = Literal["gemm", "conv", "attention", "rnn", "embedding", "elementwise", "other", VectorKind]

SplitKind = Literal["", "column", "row", "heads", "vocabulary", "rnn"]
"""How the `split` axis divides a module; "" where it does not.

- column, row: a linear layer by its outputs, or by its inputs.
- heads: attention by its heads.
- vocabulary: an embedding by its rows.
- rnn: a recurrent layer by its hidden units.

Operators between two such modules (an activation, the product of queries and keys) are divided in the same manner.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """All operators of one kind in a module's own forward and backward, for one sample.

    Attributes:
        flops_forward, flops_backward: FLOPs; proportional to the number of samples.
        nbytes_forward, nbytes_backward: memory traffic of inputs and outputs; proportional to the number of samples.
        weight_nbytes: weights that are read once per pass, whatever the number of samples.
        calls: kernel launches of a forward pass.
    """

    kind: OpKind
    flops_forward: float
    flops_backward: float
    nbytes_forward: float
    nbytes_backward: float
    weight_nbytes: float = 0.0
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedValues:
    """Values computed at one module that later modules use.

    A pipeline stage that ends between the two sends them once to each later stage that uses them.

    Attributes:
        nbytes: bytes per sample.
        fixed_nbytes: bytes per microbatch, whatever the number of samples (rotary tables).
        to: names of the modules that use the values, in order of execution; a last "" stands for the model's output or
            the loss.
        trained: whether their gradient is sent back.
        kept: names of the modules that save the values for backward, where there are several. The first is charged for
            them; those on other stages hold copies.
    """

    nbytes: float
    fixed_nbytes: float = 0.0
    to: tuple[str, ...]
    trained: bool = True
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastMemory:
    """Bytes of one sample in one module under 16-bit autocast, as traced.

    Attributes:
        activation_nbytes: activations saved for backward, without parameters and their copies in 16 bits.
        output_nbytes: output of forward.
        transient_nbytes: the most that is alive while the module runs, forward or backward, beyond the activations
            that it and earlier modules save.
    """

    activation_nbytes: float = 0.0
    output_nbytes: float = 0.0
    transient_nbytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedMemory:
    """Memory of one device that holds the whole model, by the number of samples of a microbatch, as simulated.

    Attributes:
        allocated_nbytes: the peak of tensors.
        reserved_nbytes: what torch's caching allocator then holds.
    """

    samples: int
    allocated_nbytes: float
    reserved_nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """The cost of one module, without its children.

    The fields from `split` on say how the mechanisms of parallelism may divide it. All bytes are those of one device;
    activation, output and exchanged bytes are per sample.

    Attributes:
        name: dotted path; "" is the model itself.
        kind: class name.
        activation_nbytes: activations saved for backward.
        output_nbytes: output of forward. It is reduced over the split axis in forward for "row", "vocabulary", and
            "heads" with parameters; it is gathered for "rnn".
        ops: costs of its own operators.
        batch_statistics: it normalises over the batch (BatchNorm in training).
        tied_to: the earlier module that it shares parameters with. They are counted there only.
        split: how the split axis divides its work, parameters, activations and output.
        split_limit: into how many parts at most: a divisor of this number of heads, key-value heads or units (0: any).
        split_groups: number of groups of heads that share a key head and stay together where parts are unequal and no
            part is empty; 0: `split_limit`.
        input_nbytes: input whose gradient is reduced over the split axis in backward: the whole input that is copied to
            a divided module. 0 where the input is already divided, or where the reduction of another module serves (of
            query, key and value, only the first has it).
        sequence: its parameters are whole, and each split rank computes its part of the tokens.
        block: number of the repeated block it is in, -1 outside. A pipeline stage may begin at each block.
        expert: its parameters belong to experts, which the expert axis divides.
        routed_nbytes: tokens that one all-to-all carries (top-k times capacity), in each direction, in forward and in
            backward.
        table: an embedding table, which the table axis divides; its output goes through an all-to-all in each
            direction.
        linear_input_nbytes: input of a linear layer that the table axis divides where a layout rule says so. Input and
            output then go through an exchange in each direction. 0 for other modules.
        key_value_nbytes: keys and values of attention, which the context axis exchanges; 0 where no tokens are mixed.
        spatial: the space axis divides its work.
        halo_nbytes_per_cut: bytes that cross one cut through the first spatial dim in forward, in both directions
            together, and again in backward.
        halo_nbytes_by_dim: the same for each spatial dim, where they differ.
        passes_on: values computed in it that later modules use; empty where the model was not traced.
        autocast: its memory under autocast; None where it was not traced. Then the inputs of matrix products are
            assumed to have half their size.
        kept_after: (name, bytes): how much of `activation_nbytes` a container saves after the work of another module.
    """

    name: str
    kind: str
    parameters: int = 0
    trainable_parameters: int = 0
    parameter_nbytes: int = 0
    gradient_nbytes: int = 0
    optimizer_nbytes: int = 0
    buffer_nbytes: int = 0
    activation_nbytes: float = 0.0
    output_nbytes: float = 0.0
    ops: tuple[OpCost, ...] = ()
    batch_statistics: bool = False
    tied_to: str | None = None
    split: SplitKind = ""
    split_limit: int = 0
    split_groups: int = 0
    input_nbytes: float = 0.0
    sequence: bool = False
    block: int = -1
    expert: bool = False
    routed_nbytes: float = 0.0
    table: bool = False
    linear_input_nbytes: float = 0.0
    key_value_nbytes: float = 0.0
    spatial: bool = False
    halo_nbytes_per_cut: float = 0.0
    halo_nbytes_by_dim: tuple[float, ...] = ()
    passes_on: tuple[ForwardedValues, ...] = ()
    kept_after: tuple[tuple[str, float], ...] = ()
    autocast: AutocastMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One input of one sample; its shape has no batch dim."""

    name: str
    shape: tuple[int, ...]
    dtype: str


# In a file, these may be written with units: "4 ms", "110 kB".
_Seconds = Annotated[float, BeforeValidator(option_syntax.quantity_validator(option_syntax.SECONDS, "4 ms"))]


_Bytes = Annotated[float, BeforeValidator(option_syntax.quantity_validator(option_syntax.BYTES, "110 kB"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What one sample costs to load, and how ranks load it.

    Attributes:
        core_s: seconds of one core for reading, decoding and collating from fast storage.
        wait_s: further seconds in which the loading process waits for something else (a server, a sleep).
        stored_nbytes: bytes read from storage.
        workers: processes per rank that load ahead; 0: the rank loads between steps.
        stream: every rank reads all samples of a batch and keeps its share.
        parts: along the space axis, a rank reads only its part of a sample.

    Raises:
        SpecError: a number is negative.
    """

    core_s: _Seconds = 0.0
    wait_s: _Seconds = 0.0
    stored_nbytes: _Bytes = 0.0
    workers: int = 0
    stream: bool = False
    parts: bool = False
    evidence: Evidence = "assumed"

    def __post_init__(self) -> None:
        for name in ("core_s", "wait_s", "stored_nbytes", "workers"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"loading.{name} = {getattr(self, name):g}; give 0 or a number above it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        modules: in order of first execution; modules that never ran come last.
        tokens_per_sample: 0 for a model without tokens.
        loading: cost of loading one sample; None where it is unknown.
        script_nbytes: host memory that each rank's script takes for its libraries and data; 0 where it is unknown.
        evidence: "predicted" where costs come from tracing shapes without running.
        notes: what could not be counted.
        own_losses: losses that the script computes itself in a step (`Job.forward_backward`). With one or more, no
            pipeline stages are planned.
        cached: memory that a GPU's allocator holds under autocast; empty where it was not traced.
        channels_last: whether its convolutions have their weights in that memory format.
        untraced: why only parameters could be counted; empty where the passes were traced. No step of an untraced model
            can be predicted.
    """

    name: str
    modules: tuple[ModuleSpec, ...]
    inputs: tuple[TensorShape, ...] = ()
    dtype: str = "float32"
    optimizer: str = ""
    tokens_per_sample: int = 0
    dataset_samples: int | None = None
    loading: Loading | None = None
    script_nbytes: float = 0.0
    evidence: Evidence = "predicted"
    notes: tuple[str, ...] = ()
    own_losses: int = 0
    untraced: str = ""
    cached: tuple[CachedMemory, ...] = ()
    channels_last: bool = False
    version: int = 1

    @property
    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    @property
    def flops_forward(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(op.flops_forward for module in self.modules for op in module.ops)

    @property
    def flops_backward(self) -> float:
        """FLOPs of the backward pass of one sample."""
        return sum(op.flops_backward for module in self.modules for op in module.ops)

    @property
    def batch_statistics(self) -> bool:
        return any(module.batch_statistics for module in self.modules)


def block_of_name(name: str) -> str:
    """Return the repeated block that contains a module: its dotted name up to the first number; "" for none."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])
