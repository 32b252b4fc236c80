"""Hooks on what autograd saves: whole parameters whose memory is freed between forward and backward."""

from collections.abc import Callable
from typing import Any

import torch


class WeightKeeper:
    """What owns such hooks. Those of a model whose step has raised may be left; another model's replace them."""


class SavedTensorHooks:
    """Hooks on what autograd saves; they are active from `push` to `pop`, where nobody else has such hooks."""

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack, self._unpack, self._active = pack, unpack, 0

    def innermost(self) -> bool:
        """Whether nobody else's hooks are active: activation checkpointing saves no weights, it computes anew."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is None or top[0] == self._pack

    def push_for_step(self) -> None:
        """Activate them for a whole step: with create_graph, a backward inside of the loss saves weights too.

        Those of another model may have been left by a step that raised.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or isinstance(getattr(top[0], "__self__", None), WeightKeeper):
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._active += 1

    def push(self) -> bool:
        """Activate them unless some are active; returns whether `pop` must be called."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        self._active += 1
        return True

    def pop(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._active -= 1

    def clear(self) -> None:
        """Deactivate them, however often they were pushed."""
        while self._active:
            self.pop()


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
