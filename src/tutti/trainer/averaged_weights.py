"""Averages of a run's weights over its updates (EMA, SWA), under every plan: each rank averages its own parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.checkpoint.averages import load_average
from tutti.checkpoint.contribution import named_tensors
from tutti.checkpoint.training_state import Average
from tutti.data.device_copies import to_device
from tutti.data.seeds import derive_seed, preserved_generators, seed_device, seed_everything
from tutti.errors import PlanError, ScriptError
from tutti.parallel.layout import to_local
from tutti.parallel.mixed_precision import autocast
from tutti.trainer.callbacks import is_number
from tutti.trainer.job import Job, _together
from tutti.trainer.run_state import Run

Tensors = dict[str, torch.Tensor]


class AveragedWeights:
    """An average of a Job's weights: `torch.optim.swa_utils.AveragedModel` for a model that a plan may divide.

    Each rank averages the parts that it holds, so an average costs no communication, and as much memory as the rank's
    parameters. It is in the checkpoints: made again in a resumed run, it continues under any plan and number of ranks.
    Call its methods on all ranks.

    Args:
        job: a Job whose `prepare` has been called.
        decay: share of the average that an update keeps (EMA), or a function of the number of updates before. None: the
            equal mean of all updates (SWA).
        use_buffers: whether floating-point buffers are averaged too. Otherwise they are the model's.
        name: tells several averages of a run apart.

    Attributes:
        updates: calls of `update` so far.

    Raises:
        PlanError: the plan lets replicas differ.
        ScriptError: the Job is not prepared, or has an average of this name.

    Examples:
        >>> import torch, tutti
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> job = tutti.Job(global_batch_size=4, folder="runs/ema")
        >>> model = nn.Linear(3, 1)
        >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        >>> model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
        >>> ema = tutti.AveragedWeights(job, decay=0.999)
        >>> for batch in loader:
        ...     loss = job.step(batch)
        ...     ema.update()
        >>> with ema.applied():  # job.evaluate, job.state_dict, job.save_pretrained and the model see the average
        ...     values = job.evaluate(data)
    """

    def __init__(
        self,
        job: Job,
        decay: float | Callable[[int], float] | None = None,
        *,
        use_buffers: bool = False,
        name: str = "average",
    ) -> None:
        if isinstance(decay, torch.Tensor) and decay.numel() == 1:
            decay = float(decay)
        if not callable(decay) and decay is not None and not (is_number(decay) and 0.0 <= decay <= 1.0):
            raise ScriptError(f"AveragedWeights(decay={decay!r}): give a number from 0 to 1, a function, or None")
        self._job, self._decay, self._use_buffers = job, decay, use_buffers
        self._average = Average()
        self._following = job._followed is not None  # a process that only captures the script has no weights
        if self._following:
            return
        with _together(job, "AveragedWeights") as run:
            _check_name(run, name)
            _check_replicas_equal(run)
            run.parallel.replica.shards.rest()
            parameters, buffers = _held(run)
            self._average.tensors = {key: tensor.clone() for key, tensor in parameters.items()}
            if use_buffers:
                self._average.buffers = {key: tensor.clone() for key, tensor in buffers.items()}
            run.state.averages[name] = self._average
            if run.state.resumed_from and not load_average(run.state, name, buffers):
                run.output.screen.say(
                    f"the checkpoint {run.state.resumed_from} has no average called {name!r}; it begins with the "
                    "present weights"
                )

    @property
    def updates(self) -> int:
        return self._average.updates

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average. The first call copies them."""
        if self._following:
            return
        with _together(self._job, "AveragedWeights.update") as run:
            _refuse_applied(run, "AveragedWeights.update")
            run.parallel.replica.shards.rest()
            parameters, buffers = _held(run)
            self._blend(self._average.tensors, parameters)
            if self._use_buffers:
                self._blend(self._average.buffers, buffers)
            else:
                self._average.buffers = {}
            self._average.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged weights within the context, on all ranks.

        Training and checkpoints wait until the context is left. Values that are changed inside
        `job.whole_model()` are changed in the average.
        """
        if self._following:
            yield
            return
        with _together(self._job, "AveragedWeights.applied") as run:
            _refuse_applied(run, "AveragedWeights.applied")
            self._exchange(run)
            run.loop.average_applied = True
        try:
            yield
        finally:
            with run.parallel.script_reads.resting():
                self._exchange(run)
                run.loop.average_applied = False

    @torch.no_grad()
    def update_bn(self) -> None:
        """Compute the BatchNorm statistics of the average anew, over one epoch of the training data.

        It is `torch.optim.swa_utils.update_bn`: every statistic is the mean over global batches, the same on any number
        of ranks. The next `update` takes the model's own statistics again, unless buffers are averaged.
        """
        if self._following:
            return
        run = self._job._run()
        if not self._average.buffers:
            self._average.buffers = {key: buffer.clone() for key, buffer in _held(run)[1].items()}
        with self.applied(), _together(self._job, "AveragedWeights.update_bn"), preserved_generators():
            _compute_statistics(run)

    def _blend(self, averages: Tensors, current: Tensors) -> None:
        count = self._average.updates
        share = 1.0 / (count + 1)
        if count and self._decay is not None:
            share = 1.0 - (self._decay(count) if callable(self._decay) else self._decay)
        floating = [name for name in current if averages[name].is_floating_point() or averages[name].is_complex()]
        if floating and count:
            torch._foreach_lerp_([averages[n] for n in floating], [current[n] for n in floating], share)
        for name in current if not count else current.keys() - set(floating):
            averages[name].copy_(current[name])

    @torch.no_grad()
    def _exchange(self, run: Run) -> None:
        """Exchange the values of the model and of the average."""
        run.parallel.replica.shards.rest()
        parameters, buffers = _held(run)
        held = parameters | {name: buffers[name] for name in self._average.buffers}
        for name, average in (self._average.tensors | self._average.buffers).items():
            present = held[name].clone()
            held[name].copy_(average)
            average.copy_(present)


def _held(run: Run) -> tuple[Tensors, Tensors]:
    """Return this rank's parts of the parameters and of the buffers, by first name."""
    parameters: Tensors = {}
    buffers: Tensors = {}
    for _, first, tensor in named_tensors(run.parallel.model, run.parallel.layout):
        if not tensor.is_meta:  # of another stage
            (parameters if isinstance(tensor, nn.Parameter) else buffers)[first] = to_local(tensor.detach())
    return parameters, buffers


def _check_name(run: Run, name: str) -> None:
    if name in run.state.averages:
        raise ScriptError(
            f"the Job has an average called {name!r} already; give each its own: AveragedWeights(..., name=...)"
        )


def _check_replicas_equal(run: Run) -> None:
    if run.state.consistency.diverged or run.state.consistency.asynchronous:
        raise PlanError(
            f'AveragedWeights with sync.mode = "{run.parallel.plan.sync.mode}": replicas differ between their '
            "exchanges, so each would average another model; average a copy inside `with job.whole_model():`, or use "
            "a mode in which replicas stay equal"
        )


def _refuse_applied(run: Run, name: str) -> None:
    if run.loop.average_applied:
        raise ScriptError(f"{name} was called inside `with average.applied():`; leave it first")


def _compute_statistics(run: Run) -> None:
    """Give the model's BatchNorms the mean of the statistics of an epoch's global batches. Collective."""
    parallel, loader = run.parallel, run.state.loader
    model, device, plan = parallel.model, parallel.world.device, parallel.plan
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and _is_here(m.running_mean)]
    if not any(parallel.world.gather(bool(norms))):
        return
    momentum_of = {norm: norm.momentum for norm in norms}
    modes = {module: module.training for module in model.modules()}
    shares = loader.another(replace(plan, batch=replace(plan.batch, num_microbatches=1)), parallel.mesh.data_index)
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches
        model.train()
        for number, batch in enumerate(shares):
            assert shares.share is not None
            parallel.scope.counts = shares.share.parts[0].count > 0
            seed = derive_seed(run.settings.seed, "statistics", number, parallel.mesh.data_index)
            seed_everything(seed)
            seed_device(seed, device)
            run.loop.batch_state.begin()
            with (
                parallel.sequences.part(to_device(batch, device)) as part,
                autocast(plan.precision, device),
            ):
                args, kwargs, _ = run.loop.unpack(part)
                run.forward(*args, **kwargs)
            run.loop.batch_state.combine(shares.share.parts[0].count)
    finally:
        parallel.scope.counts = True
        for norm, momentum in momentum_of.items():
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training


def _is_here(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and not buffer.is_meta
