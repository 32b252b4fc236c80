"""Runs a pipeline schedule: this rank's forward and backward actions, in order, with the messages between stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tutti.comm.clock import PhaseClock
from tutti.comm.rendezvous import make_local_group
from tutti.config.pipeline_schedule import Action, Orders, build_schedule, forward_orders
from tutti.config.plan import Plan
from tutti.data.batches import BatchShare
from tutti.data.device_copies import DeviceCopies, to_device
from tutti.data.seeds import host_state, seed_device, set_host_state
from tutti.errors import PlanError
from tutti.parallel.layout import Layout
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.parallel_model import ParallelModel
from tutti.parallel.pipeline.stage_building import Forwards, StagePartition
from tutti.parallel.pipeline.stage_links import Session, StageMessage, Ties, make_links, wanted
from tutti.parallel.pipeline.stage_placement import Placement
from tutti.parallel.pipeline.stage_program import Value
from tutti.parallel.pipeline.stage_tracing import Ending, note_means
from tutti.parallel.pipeline.stage_work import StageWork

ScaledLossOf = Callable[[int, Any], torch.Tensor]
"""(microbatch, return value of the user's function) -> the scalar to differentiate."""


AHEAD = 2
"""While a rank waits for its first message, it traces up to this many microbatches ahead per rank of the stage axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBatch:
    """One global batch for the pipeline.

    Attributes:
        parallel: the model that this rank holds a part of.
        function: (model, microbatch) -> loss.
        pieces: the microbatches of this rank.
        share: this rank's share of the global batch.
        step: updates made before this one.
        call: tells the random draws of this call from those of the step's first; empty for the first.
        clock: gets the phases of the step.
        copies: of the batch, on their way to the device.
    """

    parallel: ParallelModel
    function: Callable[[Any, Any], Any]
    pieces: Sequence[Any]
    share: BatchShare
    step: int
    call: tuple[int, ...]
    clock: PhaseClock
    copies: DeviceCopies | None = None


class Pipeline:
    """Runs forward and backward of the stages that this rank holds.

    Attributes:
        is_last: whether this rank holds the last stage, where outputs and losses appear.
        splits_backward: whether gradients of inputs and of weights are computed in separate actions (zero bubble).
        forwards: traces each forward and assigns its operations to stages.
    """

    def __init__(
        self, model: nn.Module, stages: StagePartition, plan: Plan, layout: Layout, device: torch.device
    ) -> None:
        mesh, channel = layout.mesh, layout.channel("messages", "stage")
        self.stages, self.plan, self.device = stages, plan, device
        self.is_last = stages.position == (stages.count - 1) % stages.ranks
        self.splits_backward = plan.pipeline.schedule == "zero-bubble" and not any(
            rule.recompute for rule in plan.layout
        )
        local_group = make_local_group(mesh.group("stage"))
        self._links = make_links(mesh, device, channel, local_group)
        self._ties = Ties(stages.shared, layout)
        self.forwards = Forwards(stages)
        self._until_model: dict[Any, Ending | None] = {}
        self._hooked = False
        self.refresh(model)
        self._orders: dict[int, Orders] = {}
        self._endings: dict[int, dict[int, list[nn.Parameter]]] = {}

    def forward_backward(
        self,
        batch: PipelineBatch,
        scaled_loss_of: ScaledLossOf,
        forwards_done: Callable[[], None],
    ) -> None:
        """Run forward and backward of all microbatches of a step.

        Gradients accumulate in the `grad` of this rank's parameters. Gradients of parameters that several stages share
        are reduced over those stages. The reduction over data-parallel ranks begins during a parameter's last backward.

        Args:
            batch: the global batch, with the user's function of (model, microbatch).
            scaled_loss_of: makes the scalar to differentiate from the function's return value.
            forwards_done: called after this rank's last forward.
        """
        step = _Step(self, batch, scaled_loss_of)
        orders = self._orders_for(len(batch.pieces))
        session = self._links.session(orders, step.placement)
        step.run(orders[self.stages.position], session, forwards_done)
        batch.clock.enter("exposed_communication")
        self._links.settle()
        self._ties.sum(batch.parallel.model)

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward without gradients. Returns the model's output on ranks where `is_last`, None elsewhere."""
        stages = self.stages
        placement = self.forwards.place(lambda: model(*args, **kwargs), Ending())
        orders = forward_orders(stages.ranks, stages.count // stages.ranks)
        session = self._links.session(orders, lambda _: placement)
        output = None
        for action in session.begin_each(orders[stages.position]):
            work = StageWork(placement, action.stage, model, self.device)
            values = work.forward(session.receive(action))
            session.send(action, partial(_tensor_of, work))
            if action.stage == stages.count - 1:
                output = work.output(values)
                note_means(output, placement.program.means)
                for (name, attribute), tensor in work.kept(values).items():
                    setattr(model.get_submodule(name), attribute, tensor)
        self._links.settle()
        return output

    def refresh(self, model: nn.Module) -> None:
        """Follow what the script has changed on modules since the last call.

        Raises:
            PlanError: it has registered a hook that cannot run under stages.
        """
        changed = self.stages.refresh(model)
        hooked = bool(self.stages.tracer.stand_ins.hooked())
        if changed or hooked != self._hooked:
            self.stages.tracer.shapes.forget(self.stages.tracer.units.owners(changed or ()))
            self.forwards.forget()
            if hooked != self._hooked or any(name in self.stages.tracer.units.glue for name in changed or ()):
                self._until_model.clear()
        self._hooked = hooked

    def until_model(self, function: Callable[[Any, Any], Any], call: Callable[[], Any]) -> Ending | None:
        """How tracing may stop at the model's return, or None if `function` must be traced to its end.

        `call()` calls the function on a batch.
        The answer is determined at the first use of each function and cached; see `Tracer.ends_with_model`.
        """
        if self._hooked:
            return None  # what hooks keep may be used anywhere in the function
        key = getattr(function, "__code__", function)
        if key not in self._until_model:
            self._until_model[key] = self.stages.tracer.ends_with_model(call)
        return self._until_model[key]

    def endings(self, order: Sequence[Action], model: nn.Module) -> dict[int, list[nn.Parameter]]:
        """Index in `order` -> the parameters whose gradient is complete after that action."""
        key = len(order)
        if key not in self._endings:
            named = dict(model.named_parameters())
            names_by_index = self.stages.endings(order, splits=self.splits_backward)
            self._endings[key] = {index: [named[name] for name in names] for index, names in names_by_index.items()}
        return self._endings[key]

    def _orders_for(self, microbatches: int) -> Orders:
        if microbatches not in self._orders:
            pipeline = self.plan.pipeline
            orders = build_schedule(pipeline.schedule, self.stages.ranks, pipeline.stages_per_rank, microbatches)
            self._orders[microbatches] = orders
        return self._orders[microbatches]


class _Step:
    """Runs one global batch through this rank's stages."""

    def __init__(self, pipeline: Pipeline, batch: PipelineBatch, scaled_loss_of: ScaledLossOf) -> None:
        self.pipeline, self.stages, self.plan, self.device = (
            pipeline,
            pipeline.stages,
            batch.parallel.plan,
            pipeline.device,
        )
        self._batch, self._parallel, self._function, self._scaled_loss_of = (
            batch,
            batch.parallel,
            batch.function,
            scaled_loss_of,
        )
        moved = (to_device(piece, self.device, batch.copies) for piece in batch.pieces)
        prepared = [self._parallel.sequences.prepare(piece) for piece in moved]
        self._pieces, self._around = [part for part, _ in prepared], [around for _, around in prepared]
        self._placements: list[Placement] = []
        self._draws: dict[int, tuple[Any, Any]] = {}
        self._works: dict[tuple[int, int], StageWork] = {}

    def placement(self, microbatch: int) -> Placement:
        """The program of a microbatch, assigned to stages.

        All ranks of the stage axis trace microbatches in the same order and get the same programs.
        """
        while len(self._placements) <= microbatch:
            self._placements.append(self._trace(len(self._placements)))
        return self._placements[microbatch]

    def run(self, actions: Sequence[Action], session: Session, forwards_done: Callable[[], None]) -> None:
        """Run this rank's actions; receives for the next action are posted before the current one computes."""
        clock, replica = self._batch.clock, self._parallel.replica
        endings = self.pipeline.endings(actions, self._parallel.model)
        last_forward = max(index for index, action in enumerate(actions) if action.kind == "F")
        waited = False
        for index, action in enumerate(session.begin_each(actions)):
            placement = self.placement(action.microbatch)
            if not waited and wanted(action, placement):  # other ranks compute meanwhile
                self.placement(min(action.microbatch + AHEAD * self.stages.ranks, len(self._pieces) - 1))
                waited = True
            replica.announce_last_backward(endings.get(index, ()))
            clock.enter("forward" if action.kind == "F" else "backward")
            work = self._do(action, placement, session.receive(action))
            session.send(action, partial(_tensor_of, work))
            if action.kind == "F":
                work.let_go()
            if index == last_forward:
                forwards_done()

    def _do(self, action: Action, placement: Placement, received: dict[int, torch.Tensor]) -> StageWork:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            work = StageWork(placement, stage, self._parallel.model, self.device)
            self._works[stage, microbatch] = work
            self._forward(work, stage, microbatch, received)
            return work
        work = self._works[stage, microbatch]
        self._enter(microbatch)
        splits = self.pipeline.splits_backward
        with self._around[microbatch](within=True):
            if action.kind == "B" or (action.kind == "I" and not splits):
                work.backward(received)
            elif action.kind == "I":
                work.backward_inputs(received)
            elif splits:
                work.backward_weights()
        if action.kind in ("B", "W"):
            del self._works[stage, microbatch]
        return work

    def _forward(self, work: StageWork, stage: int, microbatch: int, received: dict[int, torch.Tensor]) -> None:
        self._enter(microbatch)
        seed_device(self._seed(microbatch, "stage", stage), self.device)
        with autocast(self.plan.precision, self.device):
            with self._around[microbatch](within=True):
                values = work.forward(received)
            if stage == self.stages.count - 1:
                with self._around[microbatch]():
                    value = self._value(work, values, microbatch)
                work.loss = self._scaled_loss_of(microbatch, value)

    def _value(self, work: StageWork, values: dict[int, torch.Tensor], microbatch: int) -> Any:
        """The return value of the user's function, given the model's output."""
        output = work.output(values)
        if not self.pipeline.until_model(self._function, lambda: self._call(microbatch)):
            return output
        tracer, program = self.stages.tracer, self.placement(microbatch).program
        saved = work.kept(values)
        for slot, value in program.hidden.items():
            if not isinstance(value, Value):
                saved[slot] = value
                continue
            outline = program.outlines[value.key]
            stride = torch.empty(outline.shape, device="meta").stride()
            saved[slot] = tracer.stand_ins.empty(outline.shape, stride, outline.dtype, self.device)
        return tracer.finish(lambda: self._call(microbatch), output, saved, program.means)

    def _trace(self, microbatch: int) -> Placement:
        self._enter(microbatch)
        with self._around[microbatch](), autocast(self.plan.precision, self.device):
            ending = self.pipeline.until_model(self._function, lambda: self._call(microbatch))
            return self.pipeline.forwards.place(lambda: self._call(microbatch), ending)

    def _call(self, microbatch: int) -> Any:
        """Call the user's function. It is called several times for a microbatch, and draws the same numbers in each.

        For example, the last stage computes the loss with the noise that the traced forward has added to its input.
        """
        seed_device(self._seed(microbatch), self.device)
        now = host_state()
        first = self._draws.setdefault(microbatch, now)
        try:
            set_host_state(first)
            return self._function(self._parallel.model, self._pieces[microbatch])
        finally:
            if first is not now:
                set_host_state(now)

    def _enter(self, microbatch: int) -> None:
        """Tell batch statistics whether this microbatch has samples on this rank."""
        self._parallel.scope.counts = self._batch.share.parts[microbatch].count > 0

    def _seed(self, microbatch: int, *purpose: int | str) -> int:
        return self._parallel.draws_seed(self._batch.step, microbatch, self._batch.call, *purpose)


def _tensor_of(work: StageWork, message: StageMessage) -> torch.Tensor:
    return work.gradient(message.key) if message.gradient else work.outgoing(message.key)


def make_pipeline(
    model: nn.Module, stages: StagePartition | None, plan: Plan, layout: Layout, device: torch.device
) -> Pipeline | None:
    """The pipeline of a model that was cut into stages, or None without stages. Collective.

    Raises:
        PlanError: with float16, an optimizer has no trainable parameter on some rank of the stage axis.
    """
    if stages is None:
        return None
    stages.tracer.stand_ins.note(stages.tracer.model)
    if plan.precision == "float16":
        for groups in layout.states.groups:
            names = {name for group in groups for name in group}
            if any(not stages.trains(position, names) for position in range(stages.ranks)):
                raise PlanError(
                    "precision = float16: an optimizer has no trainable parameter on some ranks of the stage axis, so "
                    "their loss scales would differ; use bfloat16, or name other pipeline.cuts"
                )
    return Pipeline(model, stages, plan, layout, device)
