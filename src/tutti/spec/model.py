"""ModelSpec: what a model costs, module by module, per sample; independent of machines and of plans."""

from dataclasses import dataclass
from typing import Literal

from tutti.spec.words import Evidence

OpKind = Literal["gemm", "conv", "attention", "rnn", "embedding", "norm", "elementwise", "other"]


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
class ModuleSpec:
    """One module's own cost (its children's excluded). Bytes of activations: kept for backward, per sample."""

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
    come from tracing shapes without running. `notes`: what could not be counted, in words.
    """

    name: str
    modules: tuple[ModuleSpec, ...]
    inputs: tuple[TensorShape, ...] = ()
    dtype: str = "float32"
    optimizer: str = ""
    tokens_per_sample: int = 0  # 0: not a model of tokens
    dataset_samples: int | None = None
    evidence: Evidence = "predicted"
    notes: tuple[str, ...] = ()
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
