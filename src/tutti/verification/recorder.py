"""The observer that records a run during verification: everything that is compared, and hints at causes.

One device also saves the state that every step starts from, and the shapes of its random draws. Ranks start each step
from that state and draw the same values. Each step is therefore compared on its own, and differences do not accumulate.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from tutti.checkpoint.training_state import TrainingState
from tutti.comm.world import World
from tutti.data.batches import BatchShare, MicrobatchShare
from tutti.data.contents import is_graph
from tutti.data.microbatches import map_tensors
from tutti.data.seeds import derive_seed, generator_states, held_generators
from tutti.environment import Recording, read_launch_options
from tutti.errors import LaunchError
from tutti.parallel.layout import TensorShard, to_local
from tutti.parallel.loss_means import CountedMean
from tutti.parallel.losses import Weighted
from tutti.trainer.observer import StopRun
from tutti.trainer.run_state import Run
from tutti.verification.alignment import (
    MAX_COLUMNS,
    MAX_ELEMENTS,
    RankShard,
    in_double,
    named_tensors,
    sample_elements,
)
from tutti.verification.batch_tensors import batch_tensors
from tutti.verification.call_log import CallLog
from tutti.verification.matched_randomness import AlignedRandom, lowest_of
from tutti.verification.plain_step import PlainProgram, own_step_reason
from tutti.verification.recording import (
    Evaluation,
    LossRecord,
    MicrobatchRecord,
    ModelState,
    RankRecord,
    RecordingFolder,
    ReferenceGuide,
    StepRecord,
    Values,
    read_record,
    write_record,
)

BUDGET_NBYTES = 2**30
"""Memory for the module outputs of one step. Modules that finish after it is used up are not compared."""


def recorder() -> "RunRecorder":
    """Return the recorder that the environment asks for (TUTTI_OBSERVER=tutti.verification.recorder:recorder).

    Raises:
        LaunchError: TUTTI_RECORD names no folder.
    """
    recording = read_launch_options().recording
    if recording is None:
        raise LaunchError(
            "TUTTI_OBSERVER asks for a recording, but TUTTI_RECORD names no folder; set it to a folder, or unset both"
        )
    return RunRecorder(recording)


class DoublePrecisionInputs:
    """Converts inputs to the precision of the computation."""

    recording: Recording

    def sampled(self, batch: Any) -> Any:
        """Return the batch, in float64 if the recording asks for it."""
        if not self.recording.double:
            return batch
        if is_graph(batch):
            return copy.copy(batch).apply(_double)
        return map_tensors(_double, batch)


class RunRecorder(DoublePrecisionInputs):
    """Records a run; `tutti.trainer.observer.Observer` says when each method is called."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.folder = RecordingFolder(recording.folder)
        self.reference = RecordingFolder(recording.reference) if recording.reference else None
        self.losses: list[tuple[tuple[MicrobatchShare, LossRecord | None], ...]] = []
        self.initial: Values = {}
        self._lowest: list[torch.dtype] = []
        self._drew = False
        self._still = ExitStack()
        self._notes: dict[str, None] = {}
        self._inputs: Values = {}
        self._draws: tuple[str, ...] = ()
        self._after: ModelState | None = None
        self._updates = 0
        self._call = -1
        self._call_loss = 0.0
        self._first_epoch: int | None = None
        self._built_dtype = "float32"
        self._program: PlainProgram | None = None
        self._own_step: str | None = None
        self._evaluations: list[Evaluation] = []
        self._between = ModelState()
        self._microbatches: list[MicrobatchRecord] = []
        self._loss: LossRecord | None = None
        self._gradients: dict[str, torch.Tensor | None] = {}
        self._hyper: dict[str, float] = {}
        self._training: TrainingState | None = None
        self._log: CallLog | None = None

    @property
    def training(self) -> TrainingState:
        assert self._training is not None
        return self._training

    @property
    def log(self) -> CallLog:
        assert self._log is not None
        return self._log

    def built(self, model: nn.Module, world: World) -> None:
        """Record this rank's initial values; then switch to float64 if the recording asks for it."""
        named = [*model.named_parameters(), *model.named_buffers()]
        self.initial = {name: sample_elements(tensor) for name, tensor in named}
        large = [name for name, tensor in named if tensor.numel() > MAX_ELEMENTS]
        if large:
            self._note(f"only evenly spread elements were compared of {len(large)} tensors with more than "
                       f"{MAX_ELEMENTS} elements ({large[0]}, ...)")  # fmt: skip
        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()]
        self._built_dtype = str(lowest_of(dtypes)).removeprefix("torch.")
        if self.recording.double:
            model._apply(_double)  # type: ignore[no-untyped-call]
            torch.set_default_dtype(torch.float64)

    def prepared(self, training: TrainingState) -> None:
        """Register hooks on the modules, and apply the recording's precision and dropout settings."""
        self._training, self._log = training, CallLog(training.parallel.model)
        training.loader.recorded = True
        for module in training.parallel.model.modules():
            if isinstance(module, nn.RNNBase) and module.dropout > 0:
                module.register_forward_pre_hook(self._no_packed_dropout)
        if self.recording.double:
            make_double(training)
        if self.recording.still:
            disable_dropout(training.parallel.model)

    def program(self, run: Run) -> PlainProgram | None:
        """Return the plain program, which takes the place of tutti's own step on one device."""
        if run.parallel.world.world_size > 1 or self.recording.own_step:
            return None
        self._own_step = own_step_reason(run)
        self._program = PlainProgram(run) if self._own_step is None else None
        return self._program

    def loaded(self, step: int, batch: Any) -> Any:
        """Record the batch and what the script changed since the last update; then start from one device's state.

        A further call of forward_backward before an update is recorded as a step of its own, without an update.

        Returns:
            The batch to compute with.
        """
        epoch = self.training.loader.epoch
        self._first_epoch = epoch if self._first_epoch is None else self._first_epoch
        if self.recording.epochs is not None and epoch - self._first_epoch >= self.recording.epochs:
            raise StopRun
        if self._call >= 0:
            self._write(self._step_record(step, updated=False))
        self._call += 1
        self._draws = self.training.loader.draws
        batch = self.sampled(batch)
        self._inputs = batch_tensors(batch)
        self._microbatches = []
        self._between = ModelState() if self._after is None else changes(self._after, recorded_state(self.training))
        if self._call > 0:
            self._between = ModelState()
        elif self.reference is None:
            write_record(self.folder.state(step), whole_state(self.training))
        elif self.reference.state(step).exists() and not (self.recording.resumed and not self.losses):
            restore(self.training, read_record(self.reference.state(step)))
        if self.recording.still:
            self._still.enter_context(NoDropout())
        return batch

    @contextmanager
    def microbatch(self, step: int, index: int, share: BatchShare) -> Iterator[None]:
        """Record forward, and align random draws in forward and backward."""
        rank_share = share.parts[index]
        guide: ReferenceGuide | None = None
        if self.reference is not None and self.reference.guide(step, self._call, index).exists():
            guide = read_record(self.reference.guide(step, self._call, index))
        mode = AlignedRandom(rank_share, guide.draws if guide else None)
        self._loss = None
        own = [generator for module in self.training.parallel.model.modules() for generator in held_generators(module)]
        with seeded_microbatch(derive_seed(self.training.parallel.seed, "verify", step, self._call, index)):
            drew = OtherDraws(mode, own)
            self.log.begin(guide.calls if guide else None, BUDGET_NBYTES // len(share.parts), drew)
            with mode:
                yield
            self.log.end()
            foreign = drew.sources
        self._lowest.append(mode.lowest)
        self._drew = self._drew or bool(mode.draws)
        self._microbatches.append(
            MicrobatchRecord(
                share=rank_share,
                calls=tuple(self.log.calls),
                loss=self._loss,
                foreign=foreign,
                unaligned=tuple(dict.fromkeys(mode.unaligned)),
                backward_ops=tuple(dict.fromkeys(mode.backward_ops)),
                draw_at=self.log.draw_at,
            )
        )
        self._note_limits()
        for name in foreign:
            if name in ("numpy.random", "random"):
                self._note(
                    f"forward drew from {name}, which was seeded equally on ranks and on one device to compare them; "
                    "otherwise each rank draws numbers of its own"
                )
        if self.reference is None:
            calls = frozenset(call.key for call in self.log.calls)
            write_record(self.folder.guide(step, self._call, index), ReferenceGuide(draws=mode.draws, calls=calls))

    def gradients(self, step: int, loss: float) -> None:
        """Record the reduced gradients and the settings of the optimizers."""
        self._still.close()
        self._call_loss = loss
        self._without_calls()
        layout = self.training.parallel.layout
        self._gradients = {
            layout.first_name(name): None
            if p.grad is None
            else sample_elements(to_local(p.grad), layout.shard_of(name))
            for name, p in self.training.parallel.model.named_parameters()
            if p.requires_grad
        }
        self._hyper = {
            f"{index}.{number}.{key}": float(value)
            for index, optimizer in enumerate(self.training.parallel.optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for key, value in _numbers(group)
        }

    def updated(self, step: int, loss: float, learning_rate: float) -> None:
        """Write the record of the step, and end the run when enough steps are recorded."""
        self._after = recorded_state(self.training)
        self._updates += 1
        self._write(self._step_record(step, updated=True, loss=loss, learning_rate=learning_rate))
        self._call = -1
        if self._updates >= self.recording.steps:
            raise StopRun

    def evaluated(self, step: int, name: str, values: dict[str, float]) -> None:
        """Record the results of an evaluation."""
        self._evaluations.append(Evaluation(step=step, name=name, values=dict(values)))
        if self.losses:
            write_record(self.folder.rank(self.training.parallel.world.rank), self._record())

    def _step_record(
        self, step: int, *, updated: bool, loss: float | None = None, learning_rate: float = 0.0
    ) -> StepRecord:
        layout = self.training.parallel.layout
        used = {
            layout.first_name(name): float(torch.linalg.vector_norm(in_double(_dense(to_local(parameter.grad)))))
            for name, parameter in self.training.parallel.model.named_parameters()
            if parameter.grad is not None and updated
        }
        share = self.training.loader.share
        assert share is not None
        return StepRecord(
            step=step,
            batch_size=share.batch_size,
            indices=tuple(int(index) for index in self.training.loader.indices),
            inputs=self._inputs,
            microbatches=tuple(self._microbatches),
            loss=self._call_loss,
            update_loss=loss,
            gradients=self._gradients,
            hyper_parameters=self._hyper,
            learning_rate=learning_rate,
            used_norms=used,
            between=self._between,
            after=self._after if updated and self._after is not None else ModelState(),
            updated=updated,
            collated=self.training.loader.collated,
            draws=self._draws,
        )

    def _write(self, record: StepRecord) -> None:
        """Write a record, and the record of the run so far."""
        rank = self.training.parallel.world.rank
        write_record(self.folder.step(rank, len(self.losses)), record)
        self.losses.append(tuple((microbatch.share, microbatch.loss) for microbatch in self._microbatches))
        write_record(self.folder.rank(rank), self._record())

    def _without_calls(self) -> None:
        """Add records of microbatches that could not be observed because a pipeline interleaves them."""
        share = self.training.loader.share
        if not self._microbatches and share is not None:
            self._microbatches = [MicrobatchRecord(share=rank_share, calls=(), loss=None) for rank_share in share.parts]
            self._note("module outputs were not compared, because a pipeline interleaves its stages' microbatches")

    def _record(self) -> RankRecord:
        training = self.training
        owners = {
            f"{name}.{tensor_name}" if name else tensor_name: name
            for name, module in training.parallel.model.named_modules()
            for tensor_name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        }
        dtypes = [p.dtype for p in training.parallel.model.parameters() if p.is_floating_point() or p.is_complex()]
        precision = training.parallel.plan.precision
        return RankRecord(
            rank=training.parallel.world.rank,
            world_size=training.parallel.world.world_size,
            seed=training.parallel.seed,
            global_batch_size=training.parallel.plan.batch.global_batch_size,
            model=type(training.parallel.model).__name__,
            owners=owners,
            initial=self.initial,
            dtype=str(lowest_of([*dtypes, *self._lowest])).removeprefix("torch."),
            hooked=tuple(name for name, p in training.parallel.model.named_parameters() if _has_hooks(p)),
            notes=tuple(self._notes),
            losses=tuple(self.losses),
            shapes={
                training.parallel.layout.first_name(name): shape
                for name, shape in training.parallel.layout.names.items()
            },
            drew=self._drew,
            rank_shard=RankShard.of(training),
            updates=self._updates,
            evaluations=tuple(self._evaluations),
            precision=self._built_dtype if precision == "full" else precision,
            own_step=self._own_step,
            used_counts=self._program is not None and self._program.used_counts,
        )

    def _no_packed_dropout(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Turn off dropout over packed sequences, whose rows have a different order on every rank."""
        if (
            isinstance(module, nn.RNNBase)
            and any(isinstance(argument, PackedSequence) for argument in args)
            and module.dropout
        ):
            module.dropout = 0.0
            self._note(
                f"dropout between the layers of a {type(module).__name__} was off, because its sequences are packed"
            )

    def loss(self, value: Any) -> None:
        """Record the loss of this part of the microbatch as the script returned it."""
        if isinstance(value, Weighted):
            total, count = _number(value.total), _number(value.count)
            self._loss = LossRecord(total=total, count=count, stated=not isinstance(value, CountedMean))
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            self._loss = LossRecord(total=_number(value), count=None)

    def _note_limits(self) -> None:
        if self.log.left_out and self.reference is None:
            self._note(
                f"outputs of {self.log.left_out} module calls were not compared, because they exceed the memory limit"
            )
        wide = any(value.dim() > 1 and value.shape[-1] > MAX_COLUMNS for c in self.log.calls for value in c.outputs)
        if wide:
            self._note(f"only evenly spread columns were compared of module outputs wider than {MAX_COLUMNS}")

    def _note(self, text: str) -> None:
        self._notes[text] = None


def _double(leaf: Any) -> Any:
    inexact = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return in_double(leaf) if inexact else leaf


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the settings of a parameter group that are numbers; the entries of tuples (betas) one by one."""
    for key, value in group.items():
        if key == "params":
            continue
        for position, number in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(number, int | float) or (isinstance(number, torch.Tensor) and number.numel() == 1):
                yield f"{key}[{position}]" if isinstance(value, tuple) else key, float(number)


def _number(value: torch.Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether the script has registered hooks on a parameter's gradient."""
    after = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    hooks = [*(parameter._backward_hooks or {}).values(), *after]
    return any(not str(getattr(hook, "__module__", "")).startswith("tutti.") for hook in hooks)


@contextmanager
def seeded_microbatch(seed: int) -> Iterator[None]:
    """Seed all global generators, so that ranks and one device draw alike where they draw as often.

    Afterwards Python's and NumPy's are as before, since ranks may have drawn another number of values.
    """
    python, numpy_state = random.getstate(), np.random.get_state()
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


class OtherDraws:
    """Tells whether forward has drawn random numbers that need not be one device's.

    Args:
        mode: sees the draws of torch.
        own: generators that modules hold, beside torch's.
    """

    def __init__(self, mode: AlignedRandom, own: list[object]) -> None:
        self.mode = mode
        self.own = [generator for generator in own if not isinstance(generator, torch.Generator)]
        self.before = generator_states(self.own)

    def __call__(self) -> bool:
        return bool(self.mode.unaligned or self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        """The generators, other than torch's global one, that forward has drawn from."""
        now = generator_states(self.own)
        names = [name for name, state in now.items() if name != "torch" and state != self.before[name]]
        return (*names, *(["a torch.Generator of its own"] if self.mode.own_generator else []))


def recorded_state(training: TrainingState) -> ModelState:
    """Return the current parameters, buffers and optimizer state; large tensors are sampled."""
    layout, optimizer = training.parallel.layout, dict[str, torch.Tensor]()
    names: dict[int, dict[Any, str]] = {**layout.state_names(training.parallel.model, training.parallel.optimizers)}
    for index, current in enumerate(training.parallel.optimizers):
        for parameter, entries in current.state.items():
            name = names[index].get(parameter)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    first = "?" if name is None else layout.first_name(name)
                    optimizer[f"{index}.{first}.{key}"] = sample_elements(
                        value, None if name is None else layout.state_shard_of(name)
                    )
    return ModelState(
        parameters=_sampled(training, "parameters"), buffers=_sampled(training, "buffers"), optimizer=optimizer
    )


def _sampled(training: TrainingState, kind: str) -> Values:
    layout = training.parallel.layout
    named = (
        training.parallel.model.named_parameters() if kind == "parameters" else training.parallel.model.named_buffers()
    )
    return {
        layout.first_name(name): sample_elements(
            to_local(tensor), layout.shard_of(name) if name in layout.names else None
        )
        for name, tensor in named
    }


def changes(before: ModelState, after: ModelState) -> ModelState:
    """Return `after` - `before`, tensor by tensor, without the tensors that are equal in both."""
    return ModelState(
        parameters=_changed(before.parameters, after.parameters),
        buffers=_changed(before.buffers, after.buffers),
        optimizer=_changed(before.optimizer, after.optimizer),
    )


def _changed(before: Values, after: Values) -> Values:
    return {
        name: in_double(value) - in_double(before[name])
        for name, value in after.items()
        if name in before and value.shape == before[name].shape and not torch.equal(value, before[name])
    }


def whole_state(training: TrainingState) -> dict[str, Any]:
    """Return what `restore` needs, on one device: parameters and buffers, and each optimizer's state, by name."""
    layout = training.parallel.layout
    names = layout.state_names(training.parallel.model, training.parallel.optimizers)
    return {
        "model": {layout.first_name(name): tensor.detach().cpu() for name, tensor in named_tensors(training)},
        "optimizers": [
            {
                layout.first_name(name): dict(optimizer.state[p])
                for p, name in names[index].items()
                if p in optimizer.state
            }
            for index, optimizer in enumerate(training.parallel.optimizers)
        ],
    }


@torch.no_grad()
def restore(training: TrainingState, saved: dict[str, Any]) -> None:
    """Copy this rank's part of one device's state into its tensors in place.

    The settings of the optimizers stay as the script set them on this rank.

    Args:
        training: the run to copy into.
        saved: what `whole_state` returned on one device.
    """
    layout = training.parallel.layout
    for name, tensor in named_tensors(training):
        whole = saved["model"].get(layout.first_name(name))
        if whole is not None:
            part = whole if whole.shape == tensor.shape else layout.shard_of(name).take(whole)
            if part.shape == tensor.shape:
                tensor.copy_(part)
    for hook in layout.states.after_load:
        hook()
    names = layout.state_names(training.parallel.model, training.parallel.optimizers)
    for index, (optimizer, states) in enumerate(zip(training.parallel.optimizers, saved["optimizers"], strict=True)):
        for parameter, name in names[index].items():
            entries = states.get(layout.first_name(name))
            if entries is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = {
                    key: _on(optimizer.state[parameter].get(key), _part(value, layout.state_shard_of(name)), parameter)
                    for key, value in entries.items()
                }


def _part(value: Any, shard: TensorShard) -> Any:
    """Return a saved entry, or this rank's part of it if it has the parameter's shape."""
    whole = isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == shard.shape
    return shard.take(value) if whole else value


def make_double(training: TrainingState) -> None:
    """Convert optimizer state that the script loaded to float64, like its parameters."""
    for optimizer in training.parallel.optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    entries[key] = _double(value)


def _on(present: Any, value: Any, parameter: torch.Tensor) -> Any:
    """Return a copy of a saved entry on the device where the optimizer keeps it.

    That is the device of the present entry, or else the parameter's, and the CPU for entries without dims.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(present, torch.Tensor):
        return value.to(present.device, copy=True)
    return value.to(parameter.device if value.dim() else "cpu", copy=True)


_POSITIONS = {F.scaled_dot_product_attention: ("dropout_p", 4), F.multi_head_attention_forward: ("dropout_p", 10)}
"""Functions that apply dropout among other things: name and position of its argument."""


_DROPOUT = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)  # fmt: skip


class NoDropout(TorchFunctionMode):
    """While open, dropout returns its input."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func in _POSITIONS:
            name, position = _POSITIONS[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)


def disable_dropout(model: nn.Module) -> None:
    """Set the dropout of layers that draw inside their kernels to 0."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
