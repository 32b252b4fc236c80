"""A run: what is trained, the loop that trains it, and what it writes."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from tutti.checkpoint import CheckpointWriter, TrainingState
from tutti.checkpoint.retention import BestMetric
from tutti.comm.clock import PhaseClock
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder
from tutti.config.vocabulary import OnNonfinite, OnSlowRank
from tutti.data.batches import Unpack
from tutti.data.microbatches import leaves
from tutti.data.seeds import HostState, host_digest, host_state
from tutti.data.share_loader import ShareLoader
from tutti.errors import PlanError, ScriptError
from tutti.event_record import recorded
from tutti.nn.mixture import Tally
from tutti.optim.learning_rate import LRRule
from tutti.parallel.data.batch_state import BatchState
from tutti.parallel.data.batchnorm import GlobalForward
from tutti.parallel.data.bucket_size_tuner import BucketSizeTuner
from tutti.parallel.parallel_model import ParallelModel
from tutti.parallel.pipeline.pipeline_runner import Pipeline
from tutti.surviving_rank import KeptState
from tutti.trainer.capture import FollowedScript
from tutti.trainer.deferred_results import DeviceOutcome, HostCopy, PendingUpdate, sum_of
from tutti.trainer.hash_schedule import HashSchedule
from tutti.trainer.metrics import MetricsLog, ProgressDisplay, Throughput
from tutti.trainer.observer import JobProgram, Observer
from tutti.trainer.operation_watch import OperationWatch
from tutti.trainer.own_times import OwnTimes
from tutti.trainer.rebalance import Rebalancer
from tutti.trainer.step_message import StepMessage
from tutti.trainer.step_profile import StepProfile
from tutti.trainer.stopping import Stopping

_MOST_PATTERNS = 100_000

_MOST_LOCATED = 3
"""Skipped batches that are computed again to find the module."""

_WATCHED_STEPS = 2
"""Steps after which a loss function that has drawn nothing is taken to draw nothing later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings passed to Job that concern training, not the plan.

    Attributes:
        clip_norm: bound of the gradients' global norm; None: no clipping.
        on_nonfinite: whether a NaN or infinite loss or gradient ends the run, only skips the update, or also rolls the
            parameters back to the newest checkpoint.
        loss_limit: a loss above so many times the median of those before it is as one that is not finite; None: no
            limit.
        checkpoint_every: steps between two checkpoints; None: none during training.
        keep_checkpoints: how many of the newest checkpoints are kept. 0: only the newest, and none is written when
            training ends.
        keep_best: the value whose best checkpoint is kept, too; None: only the newest.
        noise_every: steps between measurements of the gradient noise scale; None: not measured.
        automatic_microbatches: whether a lack of memory may raise the number of microbatches: nobody has stated it.
        time_limit: seconds after which the run stops with a checkpoint, from the making of the Job; None: no limit.
        checkpoint_store: address of an object store that checkpoints are uploaded to; None: none.
        keep_local: how many of the newest checkpoints stay in the run folder where there is a store.
        on_slow_rank: whether a slow rank is only named, or its share of the batch is lowered, too.
    """

    seed: int
    clip_norm: float | None
    lr_rule: LRRule | None
    on_nonfinite: OnNonfinite
    checkpoint_every: int | None
    keep_checkpoints: int
    keep_best: BestMetric | None = None
    noise_every: int | None = None
    automatic_microbatches: bool = False
    time_limit: float | None = None
    loss_limit: float | None = None
    checkpoint_store: str | None = None
    keep_local: int = 1
    on_slow_rank: OnSlowRank = "warn"

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise PlanError(f"clip_norm = {self.clip_norm}; give a number above 0, or None for no clipping")
        if self.lr_rule is not None and not isinstance(self.lr_rule, LRRule):
            raise PlanError(f"lr_rule = {self.lr_rule!r} is no rule; write tutti.LRRule(...), or None")
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise PlanError(f"on_nonfinite = {self.on_nonfinite!r}; use 'stop', 'skip' or 'rollback'")
        if self.on_slow_rank not in get_args(OnSlowRank):
            raise PlanError(f"on_slow_rank = {self.on_slow_rank!r}; use 'warn' or 'rebalance'")
        if self.loss_limit is not None and not self.loss_limit > 1:
            raise PlanError(f"loss_limit = {self.loss_limit}; give a factor above 1, such as 10, or None for no limit")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise PlanError(f"checkpoint_every = {self.checkpoint_every}; give a number of steps of 1 or more, or None")
        if self.noise_every is not None and self.noise_every < 1:
            raise PlanError(f"noise_every = {self.noise_every}; give a number of steps of 1 or more, or None")
        if self.time_limit is not None and not self.time_limit > 0:
            raise PlanError(f"time_limit = {self.time_limit}; give seconds above 0, or None for no limit")
        if self.keep_local < 1:
            raise PlanError(f"keep_local = {self.keep_local}; give 1 or more")
        if self.keep_checkpoints < 0:
            raise PlanError(f"keep_checkpoints = {self.keep_checkpoints}; give 0 or more")


class RunningStatistics:
    """Copies of the norm layers' running statistics, taken before each step so that a skipped step can restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._buffers: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._earlier: list[torch.Tensor] = []

    def save(self, *, keep: bool = False) -> None:
        """Save the statistics at the start of a step.

        Args:
            keep: whether the copies of the step before stay as they are, for `restorer`.
        """
        buffers = [
            buffer for norm in self._norms if norm.training for buffer in norm._buffers.values() if buffer is not None
        ]
        buffers = [buffer for buffer in buffers if not buffer.is_meta]  # a meta buffer is on another stage's ranks
        if [*map(id, buffers)] != [*map(id, self._buffers)]:
            self._buffers, self._saved, self._earlier = buffers, [torch.empty_like(buffer) for buffer in buffers], []
        elif keep:
            self._earlier = self._earlier or [torch.empty_like(buffer) for buffer in buffers]
            self._saved, self._earlier = self._earlier, self._saved
        if buffers:
            torch._foreach_copy_(self._saved, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the statistics that `save` copied."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved)

    @torch.no_grad()
    def restore_where(self, skip: torch.Tensor) -> None:
        """Restore them where `skip`, 0-d on the device, is 1."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(torch.where(skip > 0, saved, buffer))

    def restorer(self) -> Callable[[], None]:
        """Return what restores the copies of this step, also after `save(keep=True)` of the next one."""
        buffers, saved = self._buffers, self._saved

        @torch.no_grad()
        def restore() -> None:
            if buffers:
                torch._foreach_copy_(buffers, saved)

        return restore


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of forward and backward of one global batch.

    Attributes:
        loss: global mean loss.
        samples: samples of the global batch.
        count: number of samples or tokens in the loss's mean, summed over ranks.
        finite: whether no rank has a non-finite loss or gradient. Under loss scaling the scaler checks the gradients.
        batch: number of the global batch, over all epochs.
        tokens: tokens of the global batch; None where the batch counts samples.
        experts: the counts of each mixture of experts, by module name, over all ranks.
        outcomes: what decides on the device whether the update is made, where `finite` is taken to be true and numbers
            are read when somebody looks at them; empty where the host knows.
    """

    loss: float
    samples: int
    count: float
    finite: bool
    batch: int
    tokens: int | None = None
    experts: Mapping[str, Tally] = field(default_factory=dict)
    outcomes: tuple[DeviceOutcome, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of one update.

    Attributes:
        learning_rate: rate of the first optimizer's first group.
        gain: AdaScale's gain; None without AdaScale.
        grad_norm: global norm before clipping; None without clipping.
        skipped: whether the update was skipped, because float16 gradients overflowed or a loss or gradient was not
            finite.
        loss_scale: the loss scale after it; None without loss scaling.
        pending: of an update on which the device decides, the gradients' norm and the loss scale, where there are any;
            `skipped` is then not known yet.
    """

    learning_rate: float
    gain: float | None
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None = None
    pending: HostCopy | None = None


@dataclass(slots=True)
class Accumulation:
    """The gradients that the model's parameters hold: which calls of forward_backward have left them.

    Attributes:
        results: of these calls, in order.
        stepped: optimizers that have made an update with these gradients.
        counted: number of the last global batch whose samples are counted in the progress.
        several: whether the script makes several updates on a batch, as far as it has been seen to.
        same_batch: whether the last step had the batch of the one before, although the loader had given another.
        pending: updates on which the device decides, as long as the host has not read what it decided; oldest first.
    """

    results: list[StepResult] = field(default_factory=list)
    stepped: list[Optimizer] = field(default_factory=list)
    counted: int = -1
    several: bool = False
    same_batch: bool = False
    pending: list[PendingUpdate] = field(default_factory=list)
    _given: "weakref.ref[torch.Tensor] | None" = None
    _given_number: int = -1

    def note_batch(self, batch: Any, number: int) -> None:
        """Note whether a batch is, as an object, that of the step before, although the loader has given another."""
        first = next((leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)), None)
        before = None if self._given is None else self._given()
        self.same_batch = first is not None and first is before and number != self._given_number
        if first is not None and not self.same_batch:
            self._given, self._given_number = weakref.ref(first), number

    @property
    def waits(self) -> bool:
        """Whether no update has used these gradients yet."""
        return bool(self.results) and not self.stepped

    def clear(self) -> None:
        """Begin anew: the gradients are used or lost."""
        self.results, self.stepped = [], []

    def total(self) -> StepResult:
        """Return the result of all calls together: losses and counts add up, each batch's samples count once."""
        if len(self.results) == 1:
            return self.results[0]
        last, batches = self.results[-1], {result.batch: result for result in self.results}.values()
        return StepResult(
            loss=sum_of([result.loss for result in self.results]),
            samples=sum(result.samples for result in batches),
            count=sum_of([result.count for result in self.results]),
            finite=all(result.finite for result in self.results),
            batch=last.batch,
            tokens=None if last.tokens is None else sum(result.tokens or 0 for result in batches),
            experts=last.experts,
            outcomes=tuple(outcome for result in self.results for outcome in result.outcomes),
        )


@dataclass(slots=True)
class GuardState:
    """What the guard's checks have seen of a run.

    Attributes:
        losses: the code of the loss functions that have been checked, by its id.
        evaluated: whether the first evaluation has begun.
        evaluations: how many evaluations have begun.
        said: warnings so far.
        unequal_buffers: buffers that differed between ranks when the last step that was checked began.
        located: failed batches that were computed again to find the module.
        skipped: steps that were skipped because the loss or a gradient was not finite or too large.
        rolls_back: whether one has been skipped since parameters were last rolled back.
        rolled_back: the checkpoint that they were rolled back to last, after which step, and how often.
        above_limit: in how many steps in a row each loss of a step was above the Job's limit, by its name.
        hashes: when replicas are compared bit for bit.
    """

    losses: dict[int, Any] = field(default_factory=dict)
    evaluated: bool = False
    evaluations: int = 0
    said: set[str] = field(default_factory=set)
    unequal_buffers: set[str] = field(default_factory=set)
    located: int = 0
    skipped: int = 0
    rolls_back: bool = False
    rolled_back: tuple[str, int, int] = ("", 0, 0)
    above_limit: dict[str, int] = field(default_factory=dict)
    hashes: HashSchedule = field(default_factory=HashSchedule)

    def may_locate(self) -> bool:
        """Whether a further skipped batch may be computed again, which takes as long as a step; count it if so."""
        self.located += 1
        return self.located <= _MOST_LOCATED


@dataclass(slots=True)
class LossDraws:
    """Whether the loss function draws from the global generators of Python and NumPy, as the first steps show.

    A step that runs out of memory is computed again from the states before it. To take them costs 40 microseconds, so
    steps do without where the first ones have drawn nothing.

    Attributes:
        seen: draws were seen.
        watched: steps that were watched.
        digest: of the states after the last of them.
    """

    seen: bool = False
    watched: int = 0
    digest: int | None = None

    def before(self) -> HostState | None:
        """Return the states to begin again with; None where nothing is drawn."""
        return host_state() if self.seen or self.watched < _WATCHED_STEPS else None

    def after(self, before: HostState | None) -> None:
        """Note whether a step has drawn."""
        if before is None or self.seen:
            return
        self.digest = host_digest(host_state())
        self.watched += 1
        self.seen = self.digest != host_digest(before)


@dataclass(slots=True)
class LoopEnding:
    """How the loop over `job.epochs` ends.

    Attributes:
        reason: why it ends early, as all ranks have agreed; empty while it goes on.
        in_epochs: whether the script is in the loop.
        left_at: the step at which the script left the loop without an agreement; None if it did not.
        failure: what failed while the loop was closed; the Job raises it at its next call.
        closed: whether the process is ending.
    """

    reason: str = ""
    in_epochs: bool = False
    left_at: int | None = None
    failure: Exception | None = None
    closed: bool = False


class StateMarks(Protocol):
    """Marks in a run, to which the state in this rank's memory can go back when another rank is lost."""

    def mark(self) -> None:
        """A batch is done."""

    def computing(self) -> None:
        """A step begins to compute."""

    def updating(self) -> None:
        """An update begins."""

    def updated(self, *, done: bool) -> None:
        """An update is made; `done` says whether nothing follows it that belongs to its batch."""

    def keep(self) -> KeptState:
        """Return the state at the newest mark."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """The parts of a run that steps use, apart from the training state.

    Attributes:
        pipeline: runs this rank's stages; None without pipeline parallelism.
        loss_fn: (output, target) -> loss; None: the model's output is the loss.
        unpack: splits a batch into arguments and a target.
        accumulation: what the next update uses.
        initial_rates: learning rate of each optimizer before the first step.
        observer: receives the events of the run.
        clock: measures the phases of a step.
        bucket_tuner: finds the bucket size by measurement, if the plan asks for that.
        statistics: running statistics of norm layers, for steps that are skipped.
        watch: notes what this rank does together with the others.
        stopping: whether the run is to stop, as all ranks agree.
        batch_state: combines what forward writes, over ranks.
        steps_begun: steps since prepare.
        program: what the methods of the Job do; set when the Run is complete.
        guard: what the guard's checks have seen.
        draws: whether the loss function draws from global generators.
        ending: how the loop over epochs ends.
        average_applied: whether the model has averaged weights now, with which nothing trains and nothing is saved.
        device_decides: whether the device decides on updates and the host reads results a step later, where it can be.
        message: what this rank says of itself with the losses of the step that is computed.
        marks: where the run can go on from memory; None where nobody asks for that.
        own_times: the ranks' own times in steps.
        rebalancer: finds shares of the batch that suit slow ranks; None where they do not change.
    """

    pipeline: Pipeline | None
    loss_fn: Callable[[Any, Any], Any] | None
    unpack: Unpack
    accumulation: Accumulation
    initial_rates: tuple[float, ...]
    observer: Observer
    clock: PhaseClock
    bucket_tuner: BucketSizeTuner
    statistics: RunningStatistics
    watch: OperationWatch
    batch_state: BatchState
    steps_begun: int = 0
    program: JobProgram = field(init=False)
    stopping: Stopping = field(init=False)
    guard: GuardState = field(default_factory=GuardState)
    draws: LossDraws = field(default_factory=LossDraws)
    ending: LoopEnding = field(default_factory=LoopEnding)
    average_applied: bool = False
    device_decides: bool = False
    message: StepMessage | None = None
    marks: StateMarks | None = None
    own_times: OwnTimes = field(default_factory=OwnTimes)
    rebalancer: Rebalancer | None = None


@dataclass(frozen=True, slots=True)
class EvaluatedData:
    """A data set that was evaluated, the fields of metrics rows that describe it, and the patterns of its samples."""

    dataset: Any
    fields: dict[str, Any]
    patterns: frozenset[bytes]


@dataclass(slots=True)
class DataFacts:
    """The data sets of evaluations by name, and the patterns of samples that steps have trained on."""

    evaluations: dict[str, EvaluatedData] = field(default_factory=dict)
    trained: set[bytes] = field(default_factory=set)

    def note(self, pattern: bytes | None) -> None:
        """Note the pattern of a sample that a step trains on."""
        if pattern is not None and len(self.trained) < _MOST_PATTERNS:
            self.trained.add(pattern)


@dataclass(slots=True, kw_only=True)
class RunOutput:
    """The files and displays that a run writes to.

    Attributes:
        folder: the run folder.
        log: rows of metrics.
        screen: messages and progress for the user.
        checkpoints: saves the training state.
        memory: saves it in the memory of the nodes, if the launcher asks for that.
        throughput: samples or tokens per second, smoothed.
        data_facts: what was evaluated and trained on.
        profile: records some steps, if the launcher asks for that.
    """

    folder: RunFolder
    log: MetricsLog
    screen: ProgressDisplay
    checkpoints: CheckpointWriter
    memory: CheckpointWriter | None = None
    throughput: Throughput = field(default_factory=Throughput)
    data_facts: DataFacts = field(default_factory=DataFacts)
    profile: StepProfile | None = None

    @property
    def writers(self) -> tuple[CheckpointWriter, ...]:
        """What saves the training state during training."""
        return (self.checkpoints,) if self.memory is None else (self.checkpoints, self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A prepared training run. `prepare_run` builds it once; its parts do not change."""

    settings: JobSettings
    state: TrainingState
    loop: TrainingLoop
    output: RunOutput
    parallel: ParallelModel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parallel", self.state.parallel)

    def check_changes(self) -> None:
        """Follow what the script has changed on the model since prepare, or refuse it by name."""
        self.parallel.check_changes()
        if self.loop.pipeline is not None:
            self.loop.pipeline.refresh(self.parallel.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; return its output on ranks where `gives_output`, None elsewhere."""
        model, pipeline = self.parallel.model, self.loop.pipeline
        return model(*args, **kwargs) if pipeline is None else pipeline.forward(model, args, kwargs)

    @property
    def gives_output(self) -> bool:
        """Whether outputs and losses appear on this rank: on all ranks, or on a pipeline's last stage."""
        return self.loop.pipeline is None or self.loop.pipeline.is_last

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps per epoch; None for a stream, and for a growing batch, because epochs then differ."""
        loader = self.state.loader
        return None if loader.source.is_stream or self.parallel.plan.batch.ramp else len(loader)


class JobLoader:
    """Yields this rank's share of each global batch of the current epoch.

    torch's `update_bn` gets whole global batches for a copy of the model, which computes statistics on each rank alone.

    Args:
        shares: yields the shares.
        clock: measures the phases of the run.
        between: called whenever the script asks for the next batch.
        listening: a context for the time in which the script trains.
    """

    def __init__(
        self,
        shares: ShareLoader | FollowedScript,
        clock: PhaseClock,
        between: Callable[[], None],
        listening: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.shares = shares
        self.clock = clock
        self.between = between
        self.listening = listening

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self.shares)

    @property
    def dataset(self) -> Any:
        return self.shares.source.dataset

    def __iter__(self) -> Iterator[Any]:
        averaged = _model_of_update_bn(sys._getframe(1))
        if averaged is not None and isinstance(self.shares, ShareLoader):
            yield from _batches_of_statistics(self.shares, averaged)
            return
        batches = iter(self.shares)
        with self.listening():
            while True:
                self.between()
                self.clock.enter("data")
                try:
                    with recorded("loader", "next batch"):
                        batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self.clock.enter("other")
                yield batch


def _model_of_update_bn(frame: FrameType | None) -> nn.Module | None:
    """The model whose statistics torch's update_bn computes, if `frame` is its; else None."""
    module = sys.modules.get("torch.optim.swa_utils")
    if module is None or frame is None or frame.f_code is not inspect.unwrap(module.update_bn).__code__:
        return None
    model = frame.f_locals.get("model")
    return model if isinstance(model, nn.Module) else None


def _batches_of_statistics(shares: ShareLoader, model: nn.Module) -> Iterator[Any]:
    """Yield an epoch beside training: this rank's shares if the model's statistics are over all ranks, else all of it.

    Raises:
        ScriptError: the data set reads parts of samples.
    """
    plan, rank = shares.plan, shares.rank
    if not any(isinstance(vars(module).get("forward"), GlobalForward) for module in model.modules()):
        if plan.degree("space") > 1 and hasattr(shares.source.dataset, "part_of_space"):
            raise ScriptError(
                "update_bn was given the Job's loader, which reads this rank's part of every sample under mesh.space; "
                "call tutti.AveragedWeights.update_bn, or give it a DataLoader of whole samples"
            )
        plan, rank = Plan(batch=plan.batch), 0
    yield from shares.another(replace(plan, batch=replace(plan.batch, num_microbatches=1)), rank)
