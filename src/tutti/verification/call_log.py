"""The log of a model's module calls: copies of their inputs and outputs, in the order in which they end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tutti.parallel.layout import TensorShard
from tutti.verification.alignment import local_activation, sample_columns
from tutti.verification.matched_randomness import in_backward
from tutti.verification.recording import ModuleCall

MAX_TENSORS = 4
"""Number of tensors recorded of each module's output, and of its input."""

TensorCopy = tuple[torch.Tensor, TensorShard | None]
"""A copy, and which part of the whole tensor it is; None for all of it."""


class CallLog:
    """Records calls of a model's modules while it is open, except forwards that are recomputed within backward.

    Attributes:
        open: whether calls are being recorded.
        calls: the recorded calls.
        left_out: number of calls that were not recorded.
        draw_at: number of calls that had ended before random numbers were drawn that cannot be compared; None if none
            were drawn until the last call ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self.open = False
        self.calls: list[ModuleCall] = []
        self.left_out = 0
        self.draw_at: int | None = None
        self._drew: Callable[[], bool] = bool
        self._wanted: frozenset[tuple[str, int]] | None = None
        self._budget = 0
        self._numbers: Counter[str] = Counter()
        self._entered: list[tuple[tuple[TensorCopy, ...], int]] = []
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, TensorCopy]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(_ModuleHook(self, name), always_call=True))

    def begin(
        self, wanted: frozenset[tuple[str, int]] | None, budget_nbytes: int, drew: Callable[[], bool] = bool
    ) -> None:
        """Start a new log.

        Args:
            wanted: (module, number) of the calls to record; None to record all until `budget_nbytes` are used up.
            budget_nbytes: memory for copies.
            drew: returns whether random numbers were drawn so far that cannot be compared.
        """
        self.open, self.calls, self.left_out, self.draw_at, self._drew = True, [], 0, None, drew
        self._wanted, self._budget = wanted, budget_nbytes
        self._numbers, self._entered, self._copies = Counter(), [], {}

    def end(self) -> None:
        """Stop recording and release the tensors."""
        self._note_draw()
        self.open, self._copies, self._entered = False, {}, []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.open and not in_backward():
            self._entered.append(self._copied((args, kwargs)))

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        """Record that the module called `name` has finished with `output`."""
        if not self.open or in_backward():
            return
        self._note_draw()
        inputs, input_count = self._entered.pop()
        number = self._numbers[name]
        self._numbers[name] += 1
        if (name, number) not in self._wanted if self._wanted is not None else self._budget <= 0:
            self.left_out += 1
            return
        outputs, output_count = self._copied(output)
        shards = {(kind, i): shard for kind, copies in (("inputs", inputs), ("outputs", outputs))
                 for i, (_, shard) in enumerate(copies) if shard is not None}  # fmt: skip
        self.calls.append(
            ModuleCall(
                module=name,
                number=number,
                kind=type(module).__name__,
                inputs=tuple(tensor for tensor, _ in inputs),
                outputs=tuple(tensor for tensor, _ in outputs),
                shards=shards,
                counts={"inputs": input_count, "outputs": output_count},
            )
        )

    def _note_draw(self) -> None:
        if self.draw_at is None and self._drew():
            self.draw_at = len(self.calls)

    def _copied(self, values: Any) -> tuple[tuple[TensorCopy, ...], int]:
        """Return copies of the first tensors in `values`, and the number of all."""
        leaves = pytree.tree_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | PackedSequence)]
        return tuple(self._copy(leaf) for leaf in tensors[:MAX_TENSORS]), len(tensors)

    def _copy(self, value: torch.Tensor | PackedSequence) -> TensorCopy:
        """Return a copy of a value.

        A tensor that has not changed since its last copy is not copied again. It is kept alive, so that its id stays
        unique.
        """
        if isinstance(value, PackedSequence):
            return sample_columns(pad_packed_sequence(value, batch_first=True)[0]), None
        plain, shard = (value.to_padded_tensor(0.0), None) if value.is_nested else local_activation(value)
        key = (id(value), -1 - len(self._copies) if value.is_inference() else value._version)
        if key not in self._copies:
            copy = sample_columns(plain, shard)
            self._copies[key] = (value, (copy, shard))
            self._budget -= copy.numel() * copy.element_size()
        return self._copies[key][1]


class _ModuleHook:
    """The forward hook of one module."""

    def __init__(self, log: CallLog, name: str) -> None:
        self.log = log
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.log.leave(self.name, module, output)
