"""Sharding levels 2 and 3 by torch's fully_shard (FSDP2): docs/decisions/fsdp.md says when."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.config.plan import Plan
from tutti.errors import ScriptError
from tutti.optim.optimizer_traits import check_takes_parts
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.fsdp2_model import FsdpModel, FsdpParameter, FsdpUnit
from tutti.parallel.sharding.fsdp2_saved import FsdpSavedWeights
from tutti.parallel.sharding.sharded_gradients import Shards

_ABSENT, _PRESENT, _LATE = 0, 1, 2
"""What a rank says of a gradient: it has none, it has one, or one came after the reduction."""


class FullyShard(Shards):
    """Parameters sharded by fully_shard, which gathers them and reduces their gradients.

    Args:
        model: the model, changed in place.
        layout: gets the shard of every parameter.
        plan: the plan.
    """

    gathers_in_forward = True
    transports = ("torch's fully_shard",)

    def __init__(self, model: nn.Module, layout: Layout, plan: Plan) -> None:
        self._level = plan.sharding.level
        self._sharded = FsdpModel(model, layout, plan)
        self._arrived: set[FsdpParameter] = set()
        self._saved = FsdpSavedWeights(self._sharded)
        self._depth, self._in_step, self._saving, self._sent_nbytes = 0, False, False, 0
        for unit in self._sharded.units:
            unit.group.post_backward = partial(self._reduce, unit, unit.group.post_backward)
        self._sharded.watch(self._enter, self._leave)

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes

    def parts(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {p.name: (p.part, p.of_torch.sharded_param) for p in self._sharded.parameters}

    def whole_versions(self) -> dict[str, int]:
        return {unit.name: unit.version for unit in self._sharded.units}

    def memory(self) -> list[torch.Tensor]:
        flats = [parameter.of_torch._sharded_param_data for parameter in self._sharded.parameters]
        return [flat for flat in flats if flat.is_meta]

    def materialise(self, real: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        for parameter in self._sharded.parameters:
            parameter.materialise(real, device)
        self._sharded.show_parts()

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            check_takes_parts(optimizer)
        self._sharded.initialise()

    def rest(self) -> None:
        self._depth, self._sharded.in_pass = 0, False
        self._sharded.reset()

    def clear(self) -> None:
        for answers in self._sharded.agreement.deferred():
            self._refuse_late(answers)
        self.rest()
        self._in_step = self._sharded.in_pass = True
        self._saved.begin_step()
        self._arrived = set()
        self._sharded.agreement.begin()
        self._reduce_gradients(False)
        for parameter in self._sharded.parameters:
            parameter.of_torch.sharded_param.grad = None

    def begin(self) -> None:
        self._reduce_gradients(True)

    def finish(self) -> None:
        """Give the parts their gradients; a parameter without one on any rank keeps None. Collective."""
        agreement, parameters, device = self._sharded.agreement, self._sharded.parameters, self._sharded.device
        said = [self._said(parameter) for parameter in parameters]
        agreement.check(2 * len(self._sharded.units), device)
        maxima, answers = agreement.start_maximum(said, device), said
        if device.type == "cpu" or any(word != _PRESENT for word in said):
            answers = agreement.read(maxima)
        else:  # this rank has all gradients; what is wrong elsewhere is told a step later
            agreement.defer(maxima)
        for parameter, answer in zip(parameters, answers, strict=True):
            gradient = parameter.of_torch.sharded_param.grad
            parameter.of_torch.sharded_param.grad = None
            parameter.part.grad = gradient._local_tensor if gradient is not None and answer != _ABSENT else None
        self._sent_nbytes, self._in_step = agreement.sent_nbytes, False
        self._saved.end_step()
        self._refuse_late(answers)
        self.rest()

    def gather_for_loss(self, name: str) -> None:
        if name in self._sharded.unit_of:
            self._sharded.gather(self._sharded.unit_of[name])

    @contextmanager
    def loss_reads(self) -> Iterator[None]:
        if self._in_step:
            yield
            return
        self._in_step = self._sharded.in_pass = True  # an evaluation
        try:
            yield
        finally:
            self._in_step = False
            self.rest()

    def _reduce_gradients(self, reduces: bool) -> None:
        """Whether the next backward reduces gradients; before the last one of a step, they add up on this rank."""
        for unit in self._sharded.units:
            unit.group.reduce_grads = unit.group.all_reduce_grads = reduces
            unit.group.reshard_after_backward = reduces or self._level == 3

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._sharded.in_pass = True
            self._sharded.show_sharded()
            self._saving = not self._in_step and self._saved.push()
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and not self._in_step:
            if self._saving:
                self._saved.pop()
            self.rest()

    def _reduce(self, unit: FsdpUnit, reduce: Callable[[], None], *unused: Any) -> None:
        """Backward has passed a unit: note which gradients there are, and let FSDP2 reduce them."""
        if unit.group.reduce_grads:
            self._arrived.update(parameter for parameter in unit.parameters if parameter.has_gradient)
        reduce()

    def _said(self, parameter: FsdpParameter) -> int:
        if parameter.has_gradient:
            return _LATE
        return _PRESENT if parameter in self._arrived or not parameter.trained else _ABSENT

    def _refuse_late(self, answers: Iterable[int]) -> None:
        """Refuse gradients that came after FSDP2 had reduced those of their unit. The same on all ranks."""
        pairs = zip(self._sharded.parameters, answers, strict=True)
        late = [parameter for parameter, answer in pairs if answer == _LATE]
        for parameter in late:
            parameter.drop_gradient()
        if late:
            raise ScriptError(
                f"parameter {late[0].name!r} got another gradient after its block's backward had ended, and FSDP2 had "
                "reduced its gradients already; use the parameter inside of its block's forward only, or use "
                "sharding.engine = tutti"
            )
