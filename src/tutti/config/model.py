"""ModelSpec: what a model costs, module by module, per sample; independent of machines and of plans."""

from dataclasses import dataclass
from typing import Literal

from tutti.config.loading import Loading
from tutti.config.words import Evidence

VectorKind = Literal["norm", "batch_norm", "pool", "exponential", "function", "random"]
"""What a CPU's vector units take far longer for than for a sum: "norm" over an element's neighbours in memory,
"batch_norm" over those of its channel, "pool" of windows (and interpolation), "exponential" (softmax, sigmoid, GELU),
"function" (tanh, logarithm and other series), "random" numbers (dropout)."""

OpKind = Literal["gemm", "conv", "attention", "rnn", "embedding", "elementwise", "other", VectorKind]

SplitKind = Literal["", "column", "row", "heads", "vocabulary", "rnn"]
"""How the `split` axis divides a module: "column" by its outputs, "row" by its inputs, "heads" attention by its heads,
"vocabulary" an embedding by its rows, "rnn" a recurrent layer by its hidden units; "" not at all. What works on divided
values between two such modules (an activation, the product of queries and keys) is divided too: "column" or "heads"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """All operators of one kind in one module's own forward and backward, for one sample.

    `flops_*` and `nbytes_*` (memory traffic of inputs and outputs) grow with the samples; `weight_nbytes` is read
    once a pass whatever the number of samples. `calls`: kernel launches of a forward pass.
    """

    kind: OpKind
    flops_forward: float
    flops_backward: float
    nbytes_forward: float
    nbytes_backward: float
    weight_nbytes: float = 0.0
    calls: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """Values that later modules use, made while a module was the last whose work they needed: a stage of a pipeline
    that ends between the two sends them, once to each later stage that uses them.

    `nbytes`: of one sample; `fixed_nbytes`: of a microbatch whatever its samples (rotations); `to`: names of the
    modules at whose work they are used, in order of execution; "" last where what the model returns, or the loss, needs
    them. `trained`: their gradient comes back. `kept`: names of the modules at whose work they are kept for backward,
    if that is more than one: the first counts them, those on other stages keep copies.
    """

    nbytes: float
    fixed_nbytes: float = 0.0
    to: tuple[str, ...]
    trained: bool = True
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One module's own cost (its children's excluded). Bytes of activations: kept for backward, per sample.

    `passes_on`: what modules after it use of what was made at its work, by its own code or by code around it; no module
    says it where nobody followed the model. `kept_after`: how much of `activation_nbytes` a container's own code keeps
    after the work of which other module: (name, bytes).

    The last group says how mechanisms may divide it; all bytes are those of one sample on one device.

    `split`: its work, parameters, activations and output are divided so over the split axis, `split_limit`: by no
    more ranks than this, and by a divisor of it (heads, kv heads, units; 0: any). `split_groups`: of heads that share
    a key head and stay together where parts are unequal and every rank has one; 0: `split_limit` says it. Exchanges
    follow: in forward the `output_nbytes` of "row", "vocabulary" and of "heads" with parameters are summed
    (all-reduce), those of "rnn" gathered; in backward `input_nbytes` are summed: the whole input that is copied to a
    divided module (0 where the input is divided already, or another module's sum serves: of query, key and value only
    the first says it).
    `sequence`: its parameters are whole, and each split rank does it for its part of the tokens.
    `block`: the repeated block of the model it is in, -1 outside; a new pipeline stage may begin with each block.
    `expert`: its parameters belong to experts, divided over the expert axis; `routed_nbytes`: of the tokens that one
    all-to-all carries (top-k times with capacity), there and back, in forward and in backward.
    `table`: an embedding table divided over the table axis; its output travels in an all-to-all each way.
    `linear_input_nbytes`: of the input of a linear layer that the table axis can divide where a layout rule says so;
    input and output travel then, each way. 0: no such layer.
    `key_value_nbytes`: keys and values of attention, which the context axis exchanges; 0: it looks across no tokens.
    `spatial`: its work divides over the space axis; `halo_nbytes_per_cut`: what crosses one cut through the first
    spatial dim in forward, both ways together (in backward as much); `halo_nbytes_by_dim`: of each spatial dim,
    where they differ.
    """

    name: str  # dotted path, "" is the model itself
    kind: str  # class name
    parameters: int = 0
    trainable_parameters: int = 0
    parameter_nbytes: int = 0
    gradient_nbytes: int = 0
    optimizer_nbytes: int = 0
    buffer_nbytes: int = 0
    activation_nbytes: float = 0.0
    output_nbytes: float = 0.0
    ops: tuple[OpCost, ...] = ()
    batch_statistics: bool = False  # normalises over the batch (BatchNorm in training)
    tied_to: str | None = None  # parameters shared with this earlier module; counted there only
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
    passes_on: tuple[Passing, ...] = ()
    kept_after: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One input of one sample: shape without the batch dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the planner sees it.

    `modules` are in order of first execution (never executed ones last). `evidence`: "predicted" when the costs
    come from tracing shapes without running. `loading`: what a sample of its data costs to load, None where nobody
    knows. `script_nbytes`: memory of a host that each rank's script takes for its own libraries and the data that it
    keeps there, 0 where nobody looked. `notes`: what could not be counted, in words. `untraced`: why nothing but
    parameters could be, empty where passes were: no step of such a model can be predicted.
    """

    name: str
    modules: tuple[ModuleSpec, ...]
    inputs: tuple[TensorShape, ...] = ()
    dtype: str = "float32"
    optimizer: str = ""
    tokens_per_sample: int = 0  # 0: not a model of tokens
    dataset_samples: int | None = None
    loading: Loading | None = None
    script_nbytes: float = 0.0
    evidence: Evidence = "predicted"
    notes: tuple[str, ...] = ()
    untraced: str = ""
    version: int = 1

    @property
    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    @property
    def flops_forward(self) -> float:
        """FLOPs of one sample's forward pass."""
        return sum(op.flops_forward for module in self.modules for op in module.ops)

    @property
    def flops_backward(self) -> float:
        """FLOPs of one sample's backward pass."""
        return sum(op.flops_backward for module in self.modules for op in module.ops)

    @property
    def batch_statistics(self) -> bool:
        return any(module.batch_statistics for module in self.modules)


def block_of_name(name: str) -> str:
    """The repeated block that a module is in by its dotted name, up to the first number; "" for none."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])
