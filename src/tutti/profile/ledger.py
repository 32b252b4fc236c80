"""What a traced step cost: a ledger of operators, kept tensors and outputs, by module."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from tutti.config.model import OpKind

Way = tuple[str, tuple[str, ...], bool, tuple[str, ...]]
"""Of values: the module at whose work they are made, those that use them, whether their gradient comes back, and those
that keep them (see Passing)."""


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
    """The costs of one step, whole batch. Keys are module names; `order`: when each first did something. `passed`:
    bytes that later modules use, by their ways; `kept_after`: of the activations of the first of two modules, those
    that are kept at the second's work."""

    lines: dict[tuple[str, OpKind], Line] = field(default_factory=lambda: defaultdict(Line))
    activations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kept_after: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    passed: dict[Way, float] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    batch_statistics: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)  # an ordered set
    kept: dict[int, object] = field(default_factory=dict)  # storages counted so far, held so that no id returns

    def note(self, text: str) -> None:
        self.notes[text] = None

    def executed(self, module: str) -> None:
        """Say that a module did something, if it is the first time."""
        self.order.setdefault(module, len(self.order))

    def keep(self, module: str, tensor: Tensor, after: str | None = None) -> None:
        """Count a tensor that autograd keeps for backward: each storage once, whole. `after`: at whose work."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            return
        if storage._cdata not in self.kept:
            self.kept[storage._cdata] = storage
            self.activations[module] += storage.nbytes()
            if after is not None and after != module:
                self.kept_after[module, after] += storage.nbytes()
