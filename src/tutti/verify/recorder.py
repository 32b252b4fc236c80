"""The observer that records a run being verified: everything that is compared, and what hints at causes.

On one device it also saves the state every step starts from and the shapes of random draws; ranks start each step from
that state and draw the same values. So every step is a comparison of its own, and differences do not add up over steps.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from tutti.comm.world import World
from tutti.data.seeds import derive_seed
from tutti.data.share import Part, Share
from tutti.environment import Recording, read_wishes
from tutti.errors import LaunchError
from tutti.parallel.layout import local
from tutti.trainer.observe import StopRun
from tutti.trainer.state import Run
from tutti.trainer.weighted import Weighted
from tutti.verify.calls import CallLog
from tutti.verify.parts import KEEP_COLUMNS, KEEP_ELEMENTS, Holding, kept, kept_columns
from tutti.verify.randomness import AlignedRandom, lowest_of
from tutti.verify.recording import (
    Folder,
    Guide,
    LossRecord,
    PartRecord,
    RankRecord,
    State,
    StepRecord,
    Values,
    read,
    write,
)
from tutti.verify.state import changes, make_double, recorded_state, restore, whole_state
from tutti.verify.stillness import Still, silence

BUDGET_NBYTES = 2**30
"""Memory for module outputs of one step; modules that finish after it is used up are not compared."""


def recorder() -> "Recorder":
    """The recorder that the environment asks for (TUTTI_OBSERVER=tutti.verify.recorder:recorder)."""
    recording = read_wishes().recording
    if recording is None:
        raise LaunchError("TUTTI_OBSERVER asks for a recording, but TUTTI_RECORD names no folder; unset both")
    return Recorder(recording)


class Precise:
    """Inputs in the precision in which is computed."""

    recording: Recording

    def sampled(self, batch: Any) -> Any:
        """In float64 where the recording asks for it."""
        return pytree.tree_map(_double, batch) if self.recording.double else batch


class Recorder(Precise):
    """See `tutti.trainer.observe.Observer` for when each method is called."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.folder = Folder(recording.folder)
        self.reference = Folder(recording.reference) if recording.reference else None
        self.losses: list[tuple[tuple[Part, LossRecord | None], ...]] = []
        self.initial: Values = {}
        self._lowest: list[torch.dtype] = []
        self._drew = False
        self._still = ExitStack()
        self._notes: dict[str, None] = {}
        self._inputs: Values = {}
        self._after: State | None = None
        self._between = State()
        self._parts: list[PartRecord] = []
        self._loss: LossRecord | None = None
        self._gradients: dict[str, torch.Tensor | None] = {}
        self._hyper: dict[str, float] = {}
        self._run: Run | None = None
        self._log: CallLog | None = None

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run

    @property
    def log(self) -> CallLog:
        assert self._log is not None
        return self._log

    def built(self, model: nn.Module, world: World) -> None:
        """Keep the rank's own initial values; then, if asked, compute in float64 from here on."""
        named = [*model.named_parameters(), *model.named_buffers()]
        self.initial = {name: kept(tensor) for name, tensor in named}
        large = [name for name, tensor in named if tensor.numel() > KEEP_ELEMENTS]
        if large:
            self._note(f"of {len(large)} tensors larger than {KEEP_ELEMENTS} elements ({large[0]}, ...), evenly "
                       f"spread elements were compared")  # fmt: skip
        if self.recording.double:
            model.double()
            torch.set_default_dtype(torch.float64)

    def prepared(self, run: Run) -> None:
        """Watch the modules and the loss."""
        self._run, self._log = run, CallLog(run.model)
        for module in run.model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout > 0:
                module.register_forward_pre_hook(self._no_packed_dropout)
        if self.recording.double:
            make_double(run)
        if self.recording.still:
            silence(run.model)

    def loaded(self, step: int, batch: Any) -> Any:
        """Keep the batch and what the script changed since the last update; then start from one device's state."""
        batch = self.sampled(batch)
        flat, _ = pytree.tree_flatten_with_path(batch)
        self._inputs = {
            f"batch{pytree.keystr(path)}": kept_columns(leaf) for path, leaf in flat if isinstance(leaf, torch.Tensor)
        }
        self._parts = []
        self._between = State() if self._after is None else changes(self._after, recorded_state(self.run))
        if self.reference is None:
            write(self.folder.state(step), whole_state(self.run))
        elif self.reference.state(step).exists():
            restore(self.run, read(self.reference.state(step)))
        if self.recording.still:
            self._still.enter_context(Still())
        return batch

    @contextmanager
    def microbatch(self, step: int, index: int, share: Share) -> Iterator[None]:
        """Record forward, align random draws in forward and backward."""
        part = share.parts[index]
        guide: Guide | None = None
        if self.reference is not None and self.reference.guide(step, index).exists():
            guide = read(self.reference.guide(step, index))
        torch.manual_seed(derive_seed(self.run.settings.seed, "verify", step, index))
        mode = AlignedRandom(part, guide.draws if guide else None)
        self._loss = None
        self.log.begin(guide.calls if guide else None, BUDGET_NBYTES // len(share.parts))
        before = _foreign_generators()
        with mode:
            yield
        foreign = [name for name, state in _foreign_generators().items() if state != before[name]]
        self._lowest.append(mode.lowest)
        self._drew = self._drew or bool(mode.draws)
        self._parts.append(
            PartRecord(
                part=part,
                calls=tuple(self.log.calls),
                loss=self._loss,
                foreign=(*foreign, *(["a torch.Generator of its own"] if mode.own_generator else [])),
                unaligned=tuple(dict.fromkeys(mode.unaligned)),
                backward_ops=tuple(dict.fromkeys(mode.backward_ops)),
            )
        )
        self._note_limits()
        if self.reference is None:
            calls = frozenset(call.key for call in self.log.calls)
            write(self.folder.guide(step, index), Guide(draws=mode.draws, calls=calls))
        self.log.end()

    def gradients(self, step: int) -> None:
        """Keep the averaged gradients, and what the optimizer is about to use."""
        self._still.close()
        self._without_calls()
        layout = self.run.layout
        self._gradients = {
            layout.first_name(name): None if p.grad is None else kept(local(p.grad), layout.of_name(name))
            for name, p in self.run.model.named_parameters()
            if p.requires_grad
        }
        self._hyper = {
            f"{index}.{number}.{key}": float(value)
            for index, optimizer in enumerate(self.run.optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in _numbers(group)
        }

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        """Close the step; end the run when enough of them are recorded."""
        layout = self.run.layout
        used = {
            layout.first_name(name): float(torch.linalg.vector_norm(_dense(local(parameter.grad)).double()))
            for name, parameter in self.run.model.named_parameters()
            if parameter.grad is not None
        }
        share = self.run.loader.share
        assert share is not None
        self._after = recorded_state(self.run)
        record = StepRecord(
            step=step,
            batch_size=share.batch_size,
            indices=tuple(int(index) for index in self.run.loader.indices),
            inputs=self._inputs,
            parts=tuple(self._parts),
            loss=loss,
            gradients=self._gradients,
            hyper_parameters=self._hyper,
            learning_rate=learning_rate,
            used_norms=used,
            between=self._between,
            after=self._after,
        )
        rank = self.run.world.rank
        write(self.folder.step(rank, len(self.losses)), record)
        self.losses.append(tuple((part.part, part.loss) for part in self._parts))
        write(self.folder.rank(rank), self._record())
        if len(self.losses) >= self.recording.steps:
            raise StopRun

    def _without_calls(self) -> None:
        """Microbatches that nobody could watch: a pipeline runs those of its stages in turns."""
        share = self.run.loader.share
        if not self._parts and share is not None:
            self._parts = [PartRecord(part=part, calls=(), loss=None) for part in share.parts]
            self._note("module outputs were not compared, for a pipeline runs the microbatches of its stages in turns")

    def _record(self) -> RankRecord:
        run = self.run
        owners = {
            f"{name}.{own}" if name else own: name
            for name, module in run.model.named_modules()
            for own, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        }
        dtypes = [p.dtype for p in run.model.parameters() if p.is_floating_point()]
        return RankRecord(
            rank=run.world.rank,
            world_size=run.world.world_size,
            seed=run.settings.seed,
            global_batch_size=run.plan.batch.global_batch_size,
            model=type(run.model).__name__,
            owners=owners,
            initial=self.initial,
            dtype=str(lowest_of([*dtypes, *self._lowest])).removeprefix("torch."),
            hooked=tuple(name for name, p in run.model.named_parameters() if _has_hooks(p)),
            notes=tuple(self._notes),
            losses=tuple(self.losses),
            shapes={run.layout.first_name(name): shape for name, shape in run.layout.names.items()},
            drew=self._drew,
            holding=Holding.of(run),
        )

    def _no_packed_dropout(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Rows of packed sequences lie in an order of their own on every rank, so masks over them cannot agree."""
        if isinstance(module, nn.RNNBase) and any(isinstance(one, PackedSequence) for one in args) and module.dropout:
            module.dropout = 0.0
            self._note(f"dropout between the layers of a {type(module).__name__} was off, for its sequences are packed")

    def loss(self, value: Any) -> None:
        """Keep this part's loss as the script gave it."""
        if isinstance(value, Weighted):
            self._loss = LossRecord(total=_number(value.total), count=_number(value.count))
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            self._loss = LossRecord(total=_number(value), count=None)

    def _note_limits(self) -> None:
        if self.log.left_out and self.reference is None:
            self._note(
                f"outputs of {self.log.left_out} module calls were not compared: they exceed the memory for that"
            )
        wide = any(value.dim() > 1 and value.shape[-1] > KEEP_COLUMNS for c in self.log.calls for value in c.outputs)
        if wide:
            self._note(f"of module outputs wider than {KEEP_COLUMNS}, evenly spread columns were compared")

    def _note(self, words: str) -> None:
        self._notes[words] = None


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """A parameter group's settings that are numbers, those in tuples (betas) one by one."""
    for key, value in group.items():
        if key == "params":
            continue
        for position, one in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(one, int | float) or (isinstance(one, torch.Tensor) and one.numel() == 1):
                yield f"{key}[{position}]" if isinstance(value, tuple) else key, float(one)


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the script has put hooks on a parameter's gradient."""
    after = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    hooks = [*(parameter._backward_hooks or {}).values(), *after]
    return any(not str(getattr(hook, "__module__", "")).startswith("tutti.") for hook in hooks)


def _foreign_generators() -> dict[str, object]:
    """States of the generators a forward may draw from behind torch's back."""
    _, keys, position, *_ = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {"numpy.random": (keys.tobytes(), position), "random": random.getstate()}
