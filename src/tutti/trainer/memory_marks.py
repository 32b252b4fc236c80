"""Marks in a run to which its state in memory can go back: where a batch is done, as where a checkpoint is begun.

Parameters and optimizers change only in updates, so a mark costs a few microseconds: it notes the counters, and copies
what a step in flight has changed when it fails, which are buffers and the states of generators. A state that may have
changed since the mark in any other way is refused, and the run goes on from a checkpoint.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.checkpoint.contribution import extra_states, named_tensors
from tutti.checkpoint.memory_state import MemoryState, collect_in_memory
from tutti.errors import TuttiError
from tutti.surviving_rank import KeptState
from tutti.trainer.generator_file import GeneratorFile
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run

_LARGE_NUMEL = 1 << 18
"""Buffers with more elements are copied only where a step has changed them, which torch's norms do unseen."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The values of a run at one place, apart from parameters, optimizer state and buffers."""

    values: dict[str, Any]
    clocks: list[tuple[int, float]]
    place: tuple[int, int, int]
    settings: list[list[dict[str, Any]]]
    states: dict[str, Any]
    generators: bytes


class MemoryMarks:
    """The newest mark of a run.

    Args:
        run: the run.
        generators: where this rank's states of generators outlive it.
    """

    def __init__(self, run: Run, generators: GeneratorFile) -> None:
        self._run, self._file = run, generators
        self.refusal = refusal_of(run)
        self.drawn = False
        self._mark: _Mark | None = None
        self._after_step, self._done = b"", False
        model = run.parallel.model
        self._parameters = [*model.parameters()]
        named = () if self.refusal else named_tensors(model, run.parallel.layout)
        buffers = list({id(tensor): tensor for _, _, tensor in named if not isinstance(tensor, nn.Parameter)}.values())
        unseen = {id(buffer) for m in model.modules() if isinstance(m, _NormBase) for buffer in m._buffers.values()}
        self._small = [buffer for buffer in buffers if buffer.numel() <= _LARGE_NUMEL or id(buffer) in unseen]
        self._large = [buffer for buffer in buffers if buffer.numel() > _LARGE_NUMEL and id(buffer) not in unseen]
        self._small_copies = [buffer.clone() for buffer in self._small]
        self._large_copies = [buffer.clone() for buffer in self._large]
        self._large_versions = [buffer._version for buffer in self._large]
        self._versions: list[int] = []
        self._sampler = _Samples(self._parameters)
        self._samples: tuple[list[int], list[int]] = ([], [])
        self._has_extra = any(True for _ in extra_states(model))

    def mark(self) -> None:
        """A batch is done: the run can go back to here."""
        run, state = self._run, self._run.state
        if self.refusal:
            return
        with torch.no_grad():
            if self._small:
                torch._foreach_copy_(self._small_copies, self._small)
            for number, buffer in enumerate(self._large):
                if self._large_versions[number] != buffer._version:
                    self._large_copies[number].copy_(buffer)
                    self._large_versions[number] = buffer._version
        generators = torch.default_generator.get_state().numpy().tobytes()
        self.drawn = self.drawn or (bool(self._after_step) and generators != self._after_step)
        self._after_step = b""
        progress, loader = state.progress, state.loader
        self._mark = _Mark(
            values={name: getattr(progress, name) for name in ("step", "epoch", "samples_seen", "tokens_seen")},
            clocks=[(clock.updates, clock.base_steps) for clock in progress.clocks],
            place=(loader.epoch, loader.position, loader.before),
            settings=[[_settings(group) for group in optimizer.param_groups] for optimizer in run.parallel.optimizers],
            states=self._states(),
            generators=generators,
        )
        self._versions = [parameter._version for parameter in self._parameters]
        self._samples = self._sampler.now()
        self.drawn = self._file.write(progress.step, generators, drawn=self.drawn)

    def computing(self) -> None:
        """A step begins to compute: note whether the script has drawn since the mark."""
        if self._mark is None and self._done:
            self.mark()
        if self._mark is not None and not self.drawn:
            generators = torch.default_generator.get_state().numpy().tobytes()
            self.drawn = generators != self._mark.generators or self._file.has_changed()
            if self.drawn:
                self._file.note_drawn()

    def updating(self) -> None:
        """An update begins: until it is done there is no state to go back to."""
        self._mark, self._done = None, False

    def updated(self, *, done: bool) -> None:
        """An update is made. A mark follows where the script asks for the next batch, or when it is needed before.

        Args:
            done: whether nothing follows it that belongs to its batch, as far as the script is known.
        """
        self._done = done
        self._after_step = torch.default_generator.get_state().numpy().tobytes()

    def _states(self) -> dict[str, Any]:
        """The states of objects that change between steps, too, such as schedulers at the end of an epoch."""
        run, state = self._run, self._run.state
        states: dict[str, Any] = {}
        if state.schedules.bound:
            states["schedules"] = copy.deepcopy(state.schedules.state_dict())
        if state.scaler.is_enabled():
            states["scaler"] = copy.deepcopy(state.scaler.state_dict())
        if state.callbacks:
            states["callbacks"] = copy.deepcopy(state.callbacks.state_dict())
        if self._has_extra:
            states["extra_state"] = {
                name: copy.deepcopy(module.get_extra_state()) for name, module in extra_states(run.parallel.model)
            }
        return states

    def keep(self) -> KeptState:
        """Return the state at the newest mark, of a run whose step has failed."""
        if self._mark is None and self._done:
            self.mark()
        refusal = self.refusal or self._changed()
        mark = self._mark
        if refusal or mark is None:
            return KeptState(refusal=refusal or "a rank was lost during an update")
        run_log = self._run.output.log
        try:
            memory = self._collected(mark)
        except TuttiError as error:
            return KeptState(refusal=str(error))
        return KeptState(step=mark.values["step"], state=memory, drawn=self.drawn, rows=run_log.unwritten())

    def _changed(self) -> str:
        """Say what has changed since the mark that does not change in a step's forward and backward."""
        if self._mark is None:
            return ""
        versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions or self._sampler.now() != self._samples:
            return "the script has changed parameters since the last update"
        if self._run.state.averages:
            return "the script averages weights"
        if self._mark.states.get("callbacks") and not self._run.parallel.world.is_main:
            return "rank 0, which had the state of the callbacks, is lost"
        return ""

    @torch.no_grad()
    def _collected(self, mark: _Mark) -> MemoryState:
        """Put the run back to the mark, and collect its state."""
        run, state = self._run, self._run.state
        for buffer, saved in zip(self._small, self._small_copies, strict=True):
            buffer.copy_(saved)
        for buffer, saved in zip(self._large, self._large_copies, strict=True):
            buffer.copy_(saved)
        for name, value in mark.values.items():
            setattr(state.progress, name, value)
        for clock, (updates, base_steps) in zip(state.progress.clocks, mark.clocks, strict=True):
            clock.updates, clock.base_steps = updates, base_steps
        state.loader.epoch, state.loader.position, state.loader.before = mark.place
        memory = collect_in_memory(state)
        run_state = {**memory.run_state, **mark.states}
        for saved_optimizer, groups in zip(run_state["optimizers"], mark.settings, strict=True):
            names = [members for _, members in saved_optimizer["groups"]]
            saved_optimizer["groups"] = [[group, members] for group, members in zip(groups, names, strict=True)]
        run_state["generators"] = [self._file.states(mark.generators)]
        run.loop.accumulation.clear()
        return replace(memory, run_state=run_state)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in group.items() if name not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    if type(value) in (float, int, bool, str, tuple, type(None)):
        return value
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Samples:
    """One element of each parameter. Changes through `.data` are in no version counter, but in nearly every element."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        plain = (p for p in parameters if p.layout is torch.strided and p.is_cpu and p.numel() and p.itemsize in _WORDS)
        self._parameters = [*plain]
        self._addresses: list[int] = []
        self._arrays: list[tuple[Any, int]] = []

    def now(self) -> tuple[list[int], list[int]]:
        """Return where the parameters are in memory, and an element of each."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._addresses = addresses
            self._arrays = [(p.detach().view(_WORDS[p.itemsize]).numpy(), p.numel() // 2) for p in self._parameters]
        return addresses, [array.item(place) for array, place in self._arrays]


def refusal_of(run: Run) -> str:
    """Return why no rank of a run has its whole state in memory, as a clause; empty where each has."""
    parallel, state, plan = run.parallel, run.state, run.parallel.plan
    if parallel.world.device.type != "cpu":
        return "ranks compute on accelerators"
    if plan.sync.mode != "synchronous":
        return "replicas differ"
    if plan.sync.gradient_code is not None or parallel.replica.compressor is not None:
        return "each rank has residuals of compression of its own"
    if plan.sharding.offload != "none" or plan.degree("shard", "split", "stage", "expert", "table") > 1:
        return "the plan divides the training state among the ranks"
    if state.noise.every is not None:
        return "the gradient noise scale is measured"
    if not isinstance(run.loop.observer, NullObserver):
        return "the run is observed"
    return ""
