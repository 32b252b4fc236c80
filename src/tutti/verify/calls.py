"""A log of every module's inputs and outputs in forward, in the order modules finish."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tutti.parallel.layout import Held
from tutti.verify.parts import activation, kept_columns
from tutti.verify.randomness import in_backward
from tutti.verify.recording import Call

MAX_TENSORS = 4
"""Tensors recorded of one module's output, and of its input."""

Copy = tuple[torch.Tensor, Held | None]
"""A copy, and which part of a whole tensor it is."""


class CallLog:
    """Records calls of a model's modules while `open`; recomputed forwards within backward are left out.

    `wanted`: the calls to record, None for all until `budget_nbytes` are used up; `left_out`: how many were not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.open = False
        self.calls: list[Call] = []
        self.left_out = 0
        self._wanted: frozenset[tuple[str, int]] | None = None
        self._budget = 0
        self._numbers: Counter[str] = Counter()
        self._entered: list[tuple[Copy, ...]] = []
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, Copy]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Leave(self, name)))

    def begin(self, wanted: frozenset[tuple[str, int]] | None, budget_nbytes: int) -> None:
        """Start a new log."""
        self.open, self.calls, self.left_out = True, [], 0
        self._wanted, self._budget = wanted, budget_nbytes
        self._numbers, self._entered, self._copies = Counter(), [], {}

    def end(self) -> None:
        """Stop recording and let go of the tensors."""
        self.open, self._copies, self._entered = False, {}, []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.open and not in_backward():
            self._entered.append(self._copied((args, kwargs)))

    def leave(self, name: str, module: nn.Module, output: Any) -> None:
        """A module has finished."""
        if not self.open or in_backward():
            return
        inputs = self._entered.pop()
        number = self._numbers[name]
        self._numbers[name] += 1
        if (name, number) not in self._wanted if self._wanted is not None else self._budget <= 0:
            self.left_out += 1
            return
        outputs = self._copied(output)
        parts = {(kind, i): held for kind, some in (("inputs", inputs), ("outputs", outputs))
                 for i, (_, held) in enumerate(some) if held is not None}  # fmt: skip
        self.calls.append(
            Call(
                module=name,
                number=number,
                kind=type(module).__name__,
                inputs=tuple(tensor for tensor, _ in inputs),
                outputs=tuple(tensor for tensor, _ in outputs),
                parts=parts,
            )
        )

    def _copied(self, values: Any) -> tuple[Copy, ...]:
        leaves = pytree.tree_leaves(values, is_leaf=lambda value: isinstance(value, PackedSequence))
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | PackedSequence)]
        return tuple(self._copy(leaf) for leaf in found[:MAX_TENSORS])

    def _copy(self, value: torch.Tensor | PackedSequence) -> Copy:
        """A copy; the same tensor, unchanged since, is copied once (and kept alive, so that its id stays its own)."""
        if isinstance(value, PackedSequence):
            return kept_columns(pad_packed_sequence(value, batch_first=True)[0]), None
        plain, held = activation(value)
        if plain.is_nested:
            plain = plain.to_padded_tensor(0.0)
        key = (id(value), plain._version)
        if key not in self._copies:
            copy = kept_columns(plain, held)
            self._copies[key] = (value, (copy, held))
            self._budget -= copy.numel() * copy.element_size()
        return self._copies[key][1]


class _Leave:
    """The forward hook of one module."""

    def __init__(self, log: CallLog, name: str) -> None:
        self.log = log
        self.name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.log.leave(self.name, module, output)
