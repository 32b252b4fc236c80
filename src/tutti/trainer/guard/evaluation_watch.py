"""Watches the first evaluated batch: dropout that stays on, and outputs that depend on the other samples.

Dropout is on in F.dropout without `training=self.training`, and in attention with `dropout_p`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from tutti.trainer.guard.evaluation_rows import coupled_module
from tutti.trainer.guard.findings import warn
from tutti.trainer.run_state import Run

_DROPOUTS = frozenset([F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout])


class EvaluationWatch(TorchFunctionMode):
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
        self.coupled: tuple[str, str] | None = None

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

    def compare(self, batch: Any, samples: int) -> None:
        """Look at this batch's samples by themselves, if it is the first batch."""
        if self._due and self._batches == 1 and self.found is None:
            self.coupled = coupled_module(self._run, batch, samples)

    def report(self) -> None:
        """Warn of what was found. Collective."""
        if not self._due:
            return
        everyone = self._run.loop.watch.gather("evaluation", (self.found, self.coupled))
        found, coupled = (next(filter(None, kind), None) for kind in zip(*everyone, strict=True))
        if found is not None:
            warn(
                self._run,
                f"{found[0]} calls {found[1]} with dropout on while the model is evaluated, so that results are "
                "random; pass training=self.training, or dropout_p=self.p if self.training else 0.0",
            )
        if coupled is not None:
            where = f"module {coupled[0]!r} ({coupled[1]})" if coupled[0] else f"{coupled[1]}.forward"
            warn(
                self._run,
                f"the output of {where} for a sample depends on the other samples of the batch while the model is "
                "evaluated, so that results change with the batch size and the number of ranks; let norms use running "
                "statistics in evaluation, and compute each sample by itself",
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
