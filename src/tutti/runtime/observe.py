"""Where others may watch a run: verification records it, without the run knowing how."""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from tutti.data.share import Share
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.runtime.state import Run


class StopRun(SystemExit):
    """Raised by an observer that has seen enough: the script ends early, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Observer(Protocol):
    """What a watcher may implement; the calls come in this order at every step (counted from 0)."""

    def prepared(self, run: "Run") -> None:
        """Model, optimizers and loader stand; no step has run."""

    def microbatch(self, step: int, index: int, share: Share) -> AbstractContextManager[Any]:
        """Around forward, loss and backward of one microbatch."""

    def gradients(self, step: int) -> None:
        """Gradients are averaged over the global batch; not yet clipped."""

    def updated(self, step: int, loss: float) -> None:
        """The optimizer has stepped."""


class Nobody:
    """Nobody watches."""

    def prepared(self, run: "Run") -> None:
        pass

    def microbatch(self, step: int, index: int, share: Share) -> AbstractContextManager[Any]:
        return nullcontext()

    def gradients(self, step: int) -> None:
        pass

    def updated(self, step: int, loss: float) -> None:
        pass


def load_observer(name: str | None) -> Observer:
    """The observer made by "module:factory", or Nobody."""
    if not name:
        return Nobody()
    module, _, factory = name.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"TUTTI_OBSERVER={name!r} cannot be loaded ({error}); unset it") from None
