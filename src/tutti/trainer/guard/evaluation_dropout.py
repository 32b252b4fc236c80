"""Finds dropout that stays on in evaluation: F.dropout without `training=self.training`, attention with `dropout_p`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from tutti.trainer.guard.findings import warn
from tutti.trainer.run_state import Run

_DROPOUTS = frozenset([F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout])


class DropoutWatch(TorchFunctionMode):
    """Watches the first batch of a run's first evaluation.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run, self._due = run, not run.loop.guard.evaluated
        run.loop.guard.evaluated = True
        self._names = {module: name for name, module in run.parallel.model.named_modules()} if self._due else {}
        self._inside: list[nn.Module] = []
        self._batches = 0
        self.found: tuple[str, str] | None = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Watch within the context if this is the first batch."""
        self._batches += 1
        if not self._due or self._batches > 1:
            yield
            return
        hooks = [register_module_forward_pre_hook(self._entered), register_module_forward_hook(self._left)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def report(self) -> None:
        """Warn if dropout was on. Collective."""
        if not self._due:
            return
        found = next((where for where in self._run.loop.watch.gather("dropout", self.found) if where is not None), None)
        if found is not None:
            warn(
                self._run,
                f"{found[0]} calls {found[1]} with dropout on while the model is evaluated, so that results are "
                "random; pass training=self.training, or dropout_p=self.p if self.training else 0.0",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None and _drops(func, args, kwargs):
            module = next((module for module in reversed(self._inside) if module in self._names), None)
            name = "the loss or a metric"
            if module is not None:
                name = (
                    f"module {self._names[module]!r} ({type(module).__name__})"
                    if self._names[module]
                    else f"{type(module).__name__}.forward"
                )
            self.found = name, str(getattr(func, "__name__", func))
        return func(*args, **kwargs)

    def _entered(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._inside and self._inside.pop() is not module:
            pass


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _DROPOUTS:
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return bool(probability) and bool(args[2] if len(args) > 2 else kwargs.get("training", True))
    if func is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return False
