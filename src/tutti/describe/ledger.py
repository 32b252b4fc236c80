"""What a traced step cost: a ledger of operators, kept tensors and outputs, by module."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from tutti.spec.model import OpKind


@dataclass(slots=True, kw_only=True)
class Line:
    """Sums over all operators of one kind in one module."""

    flops_forward: float = 0.0
    flops_backward: float = 0.0
    nbytes_forward: float = 0.0
    nbytes_backward: float = 0.0
    weight_nbytes: float = 0.0  # of nbytes_forward, those of parameters
    calls: int = 0  # of the forward


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The costs of one step, whole batch. Keys are module names; `order`: when each first did something."""

    lines: dict[tuple[str, OpKind], Line] = field(default_factory=lambda: defaultdict(Line))
    activations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    order: dict[str, int] = field(default_factory=dict)
    batch_statistics: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    kept: dict[int, object] = field(default_factory=dict)  # storages counted so far, held so that no id returns

    def note(self, text: str) -> None:
        self.notes[text] = None

    def executed(self, module: str) -> None:
        """Say that a module did something, if it is the first time."""
        self.order.setdefault(module, len(self.order))

    def keep(self, module: str, tensor: Tensor) -> None:
        """Count a tensor that autograd keeps for backward: each storage once, whole."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            return
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.activations[module] += storage.nbytes()
