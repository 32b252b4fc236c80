"""The Job: three lines make a script train on any number of ranks, and a step computes the same on all of them."""

import atexit
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from tutti.comm.clock import PhaseClock
from tutti.comm.shared_segment import attached_resident_nbytes
from tutti.comm.world import World, leave_world
from tutti.config.plan import BatchPlan
from tutti.config.vocabulary import LastBatch, Precision, Unit
from tutti.data.samples import read_source
from tutti.data.seeds import derive_seed, seed_everything
from tutti.data.share_loader import ShareLoader
from tutti.environment import read_launch_options
from tutti.errors import ScriptError, TuttiError
from tutti.optim.learning_rate import LRRule
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.loss_means import looked_up
from tutti.parallel.losses import default_loss, default_unpack, loss_of
from tutti.trainer import capture
from tutti.trainer.deferred_init import Tape, build_on_meta, build_with_memory
from tutti.trainer.evaluate import Metric, evaluate, samples_at_once
from tutti.trainer.job_context import open_job_context
from tutti.trainer.metrics import redirect_other_ranks
from tutti.trainer.metrics_rows import write_bucket_size, write_evaluation_row, write_step_row
from tutti.trainer.prepare import PrepareArguments, build_optimizers, captured_script, prepare_run
from tutti.trainer.run_state import JobSettings, Run
from tutti.trainer.step import StepResult, forward_backward
from tutti.trainer.update import update


class JobLoader:
    """Yields this rank's share of each global batch of the current epoch."""

    def __init__(self, shares: ShareLoader, clock: PhaseClock) -> None:
        self.shares = shares
        self.clock = clock

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self.shares)

    @property
    def dataset(self) -> Any:
        return self.shares.source.dataset

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.shares)
        while True:
            self.clock.enter("data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.clock.enter("other")
            yield batch


class Job:
    """One training run. The global batch defines what it computes, which does not depend on the number of ranks.

    Args:
        global_batch_size: samples or tokens per step, over all ranks and microbatches.
        unit: what `global_batch_size` counts.
        seed: seed of initial values, data order, augmentation and dropout.
        num_microbatches: slices that a batch is cut into (gradient accumulation). None: 1, or what the plan says.
        last_batch: whether the short last batch of an epoch is kept or dropped.
        batch_ramp: (until, size) pairs. Batches numbered below `until`, counted from 0 over all epochs, have `size`
            instead; a learning-rate rule follows the batch of the step.
        precision: number format of the computation. None: the plan's, or "full".
        clip_norm: bound of the gradients' global norm.
        lr_rule: how the learning rate follows the global batch and the warm-up.
        on_nonfinite: what happens at a loss or gradient that is NaN or infinite. "stop" raises TrainingError; "skip"
            skips the update on all ranks, and leaves parameters, optimizers and running statistics as before the step.
        checkpoint_every: steps between two checkpoints. None: the launcher's choice.
        keep_checkpoints: how many of the newest checkpoints stay. 0: only the newest, and none is written after the
            last epoch.
        noise_every: steps between measurements of the gradient noise scale, which says how large a batch pays.
            Measuring does not change the training.
        name: name of the run. None: the script's.
        folder: the run folder, unless the launcher names one. None: runs/<script>-<time>.
        resume: a run folder or a checkpoint to resume from.
        facts: what only you know and the report should say: {"tuning.trials": 12, "data.start_state": "disk-cold"}.

    Raises:
        PlanError: settings contradict each other, the plan or the number of ranks.
        LaunchError: the ranks cannot find each other.

    Examples:
        The same script trains on one device and, under `tutti run --nproc 4 script.py`, on four:

        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> job = Job(global_batch_size=8, seed=1, folder="runs/line")
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> data = TensorDataset(x, 3 * x + 1)
        >>> model = nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss())
        >>> for epoch in job.epochs(20):
        ...     for batch in loader:
        ...         loss = job.step(batch)
        ...     job.log(epoch_loss=loss)
        >>> values = job.evaluate(data, {"absolute error": lambda output, target: (output - target).abs().mean(dim=1)})
        >>> job.print(f"within 0.01: {values['absolute error'] < 0.01}")
        within 0.01: True
        >>> job.save().name
        'step-00000160'
    """

    _tape: Tape | None = None
    _prepared: Run | None = None
    _result: StepResult | None = None

    def __init__(
        self,
        *,
        global_batch_size: int,
        unit: Unit = "samples",
        seed: int = 0,
        num_microbatches: int | None = None,
        last_batch: LastBatch = "keep",
        batch_ramp: Sequence[tuple[int, int]] = (),
        precision: Precision | None = None,
        clip_norm: float | None = None,
        lr_rule: LRRule | None = None,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 2,
        noise_every: int | None = None,
        name: str | None = None,
        folder: str | Path | None = None,
        resume: str | Path | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        launch_options = read_launch_options()
        self._context = open_job_context(
            JobSettings(
                seed=seed,
                clip_norm=clip_norm,
                lr_rule=lr_rule,
                on_nonfinite=on_nonfinite,
                checkpoint_every=launch_options.checkpoint_every if checkpoint_every is None else checkpoint_every,
                keep_checkpoints=keep_checkpoints,
                noise_every=noise_every,
            ),
            launch_options,
            BatchPlan(
                global_batch_size=global_batch_size,
                unit=unit,
                num_microbatches=1 if num_microbatches is None else num_microbatches,
                last_batch=last_batch,
                ramp=tuple((until, size) for until, size in batch_ramp),
            ),
            microbatches_stated=num_microbatches is not None,
            precision=precision,
            name=name,
            folder=Path(folder) if folder else None,
            resume=Path(resume) if resume else None,
            facts={key: str(value) for key, value in (facts or {}).items()},
        )
        self._finalizer = (
            None if capture.is_capturing() else RunFinalizer(self._context.world, supervised=launch_options.supervised)
        )
        # Python's and NumPy's draws may decide control flow, so they are the same on all ranks. torch's differ between
        # members of an ensemble.
        seed_everything(derive_seed(seed, "model"))
        torch.manual_seed(self._context.model_seed)

    @property
    def rank(self) -> int:
        return self._context.world.rank

    @property
    def world_size(self) -> int:
        return self._context.world.world_size

    @property
    def device(self) -> torch.device:
        return self._context.world.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self._context.world.is_main

    def build(self, function: Callable[[], nn.Module]) -> nn.Module:
        """Build a model; with several ranks it has no memory until `prepare` gives every rank its part.

        Initial values are bit for bit those that one device would have computed. torch's generators are left as they
        were before the call, at any number of ranks.

        Args:
            function: builds the model.

        Raises:
            ScriptError: the constructor needs values that are not computed yet, or build was called before.

        Examples:
            >>> from torch import nn
            >>> job = Job(global_batch_size=4)
            >>> job.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
            Sequential(
              (0): Linear(in_features=8, out_features=8, bias=True)
              (1): Linear(in_features=8, out_features=2, bias=True)
            )
        """
        if self._tape is not None:
            raise ScriptError("build was called twice, but a Job trains one model; compose several into one module")
        if capture.is_capturing():
            return build_on_meta(function)[0]
        if self._context.world.world_size == 1 or self._context.launch_options.observer:
            return build_with_memory(function)
        model, self._tape = build_on_meta(function)
        return model

    def prepare(
        self,
        model: nn.Module,
        optimizer: Any,
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        scheduler: Any = None,
        scheduler_clock: Literal["step", "epoch"] = "step",
        unpack: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]] | None = None,
        shuffle: bool | None = None,
        tokens: int | Sequence[int] | None = None,
        weights: str | Path | None = None,
        **loader_arguments: Any,
    ) -> tuple[nn.Module, Any, JobLoader]:
        """Prepare model, optimizer and data for training on this rank. Collective.

        Args:
            model: the model; its parameters are divided in place as the plan says.
            optimizer: a torch optimizer, a callable that takes parameters and returns one, or a list of either.
            dataset: a map or iterable data set, or a DataLoader.
            loss_fn: loss_fn(output, target) -> mean over samples, or a Weighted. None: the model computes its loss:
                `output.loss`, `output["loss"]`, or a 0-d output.
            scheduler: a learning-rate scheduler; `update` and `epochs` advance it.
            scheduler_clock: whether it advances once per step or once per epoch.
            unpack: unpack(batch) -> (args, kwargs, target). None: a batch is (inputs, target), a dict or a tensor.
            shuffle: whether samples are shuffled in each epoch. None: as the DataLoader does, else True.
            tokens: tokens of every sample, or a list with one number per sample; needed if the batch counts tokens.
            weights: a .safetensors or .pt file with the model's state_dict, or a folder in torch's distributed
                checkpoint format. Training starts with these values, unless it is resumed.
            **loader_arguments: arguments of DataLoader.

        Returns:
            (model, optimizer, loader); optimizer is a list if one was passed.

        Raises:
            ScriptError: arguments cannot be used, or prepare was called before.
            PlanError: the plan cannot train this model.
            RankMismatchError: models differ between ranks.
            CheckpointError: the checkpoint or the weights cannot be read or do not fit.
        """
        if self._prepared is not None:
            raise ScriptError("prepare was called twice, but a Job trains one model; compose several into one module")
        if scheduler_clock not in ("step", "epoch"):
            raise ScriptError(f"scheduler_clock = {scheduler_clock!r}; use 'step' or 'epoch'")
        source = read_source(dataset, shuffle=shuffle, tokens=tokens, arguments=loader_arguments)
        optimizers = build_optimizers(model, optimizer)
        prepare_arguments = PrepareArguments(
            model=model,
            optimizers=optimizers,
            source=source,
            loss_fn=looked_up(loss_fn or default_loss),
            unpack=unpack or default_unpack,
            scheduler=scheduler,
            scheduler_clock=scheduler_clock,
            weights=Path(weights) if weights is not None else None,
            tape=self._tape,
        )
        if capture.is_capturing():
            raise capture.CaptureDone(captured_script(self._context, prepare_arguments))
        self._prepared = prepare_run(self._context, prepare_arguments)
        if self._finalizer is not None:
            self._finalizer.run = self._prepared
        if not self._context.launch_options.supervised:
            redirect_other_ranks(self._context.world, str(self._prepared.output.folder.rank(self.rank) / "stdout.log"))
        returned = list(optimizers) if isinstance(optimizer, list | tuple) else optimizers[0]
        return model, returned, JobLoader(self._prepared.state.loader, self._prepared.loop.clock)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to run, of `count`; a resumed run continues at its checkpoint."""
        run = self._run()
        run.state.progress.total_epochs = count
        first = run.state.loader.epoch
        while run.state.loader.epoch < count:
            epoch = run.state.progress.epoch = run.state.loader.epoch
            yield epoch
            if run.state.loader.epoch == epoch:  # the script left the loader early
                run.state.loader.next_epoch()
            if run.state.scheduler is not None and run.loop.scheduler_clock == "epoch":
                run.state.scheduler.step()
            run.output.log.row("epoch", run.loop.clock.elapsed_s(), epoch=epoch, step=run.state.progress.step)
        if run.state.loader.epoch > first and run.settings.keep_checkpoints:
            self.save()
        run.state.consistency.finish(run.parallel)

    def step(self, batch: Any) -> float:
        """Make one optimizer update on a global batch.

        Calls `forward_backward` with the loss function given to `prepare`, then `update`.

        Args:
            batch: this rank's share of the global batch, as the loader yielded it.

        Returns:
            The global mean loss, the same on every rank. If the plan says that ranks do not wait for each other, the
            loss of this rank's share.
        """
        run = self._run()
        loss = self.forward_backward(loss_of(run.loop.unpack, run.loop.loss_fn or default_loss), batch)
        self.update()
        return loss

    def forward_backward(self, function: LossFunction, batch: Any) -> float:
        """Compute the gradients of the global mean of `function(model, batch)`.

        For steps that are not one loss and one update. Call `update` afterwards.

        Args:
            function: (model, batch) -> loss: a mean over samples, or a Weighted.
            batch: this rank's share of the global batch, as the loader yielded it.

        Returns:
            The global mean loss.

        Examples:
            A penalty beside the loss of `prepare`:

            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import TensorDataset
            >>> job = Job(global_batch_size=4, folder="runs/penalty")
            >>> model = nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
            >>> model, optimizer, loader = job.prepare(model, optimizer, data)
            >>> def loss(model, batch):
            ...     inputs, target = batch
            ...     output = model(inputs)
            ...     return nn.functional.mse_loss(output, target) + 0.01 * output.square().mean()
            >>> for batch in loader:
            ...     value = job.forward_backward(loss, batch)
            ...     job.update()
        """
        self._result = forward_backward(self._run(), function, batch)
        return self._result.loss

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip gradients, step the optimizer (None: all), advance the scheduler, write the step's row."""
        run, result = self._run(), self._result
        if result is None:
            raise ScriptError("update was called before forward_backward; compute gradients first")
        run.loop.clock.enter("optimizer")
        done = update(run, run.parallel.optimizers if optimizer is None else (optimizer,), finite=result.finite)
        run.state.consistency.updated(run.parallel, run.state.progress.step)
        run.loop.clock.enter("other")
        chosen = run.loop.bucket_tuner.end(full_batch=result.samples == run.state.loader.stated_size)
        if chosen is not None:
            write_bucket_size(run, chosen)
        self._result = None
        write_step_row(run, result, done)
        run.loop.observer.updated(run.state.progress.step - 1, result.loss, done.learning_rate)
        run.output.checkpoints.save_when_due()

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None = None,
        *,
        whole: Mapping[str, Metric] | None = None,
        name: str = "test",
        batch_size: int | None = None,
        **loader_arguments: Any,
    ) -> dict[str, float]:
        """Evaluate the model on `dataset`. Every sample counts exactly once. Collective.

        Args:
            dataset: a map or iterable data set, or a DataLoader.
            metrics: by name, fn(output, target) -> one value per sample, their mean, or a Weighted.
            whole: by name, fn(all outputs, all targets), for metrics that are not means.
            name: name of the evaluation in metrics and reports.
            batch_size: samples that a rank computes at once. None: as many as in training, at most 256.
            **loader_arguments: arguments of DataLoader.

        Returns:
            Results by name, the same on every rank; "loss" is always one of them.
        """
        run = self._run()
        arguments = {"collate_fn": run.state.loader.source.collate, **loader_arguments}
        source = read_source(dataset, shuffle=False, tokens=None, arguments=arguments)
        run.loop.clock.enter("evaluation")
        size = batch_size or samples_at_once(run)
        with run.state.consistency.averaged_model(run.parallel):
            values, samples = evaluate(run, source, metrics or {}, whole or {}, size)
        write_evaluation_row(run, source, name, values, samples)
        return values

    def log(self, **values: float | int | str) -> None:
        """Write your own values to the run's metrics and TensorBoard; those of ranks other than 0 are ignored."""
        run = self._run()
        run.output.log.row(
            "log",
            run.loop.clock.elapsed_s(),
            step=run.state.progress.step,
            epoch=run.state.progress.epoch,
            values=values,
        )

    def save(self) -> Path:
        """Write a checkpoint now and return its folder. Collective."""
        return self._run().output.checkpoints.save()[0]

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only, with the arguments of the built-in `print`."""
        if self.is_main:
            print(*values, **options)

    def _run(self) -> Run:
        if self._prepared is None:
            raise ScriptError("the Job has no model yet; call job.prepare(model, optimizer, dataset, loss_fn) first")
        return self._prepared


class RunFinalizer:
    """Writes a run's last rows when the process ends, however it ends.

    Attributes:
        run: the prepared run, once there is one.
        failed: whether the run has failed on this rank.
    """

    def __init__(self, world: World, *, supervised: bool) -> None:
        self.world = world
        self.run: Run | None = None
        self.failed = False
        self._ended = False
        if not supervised:
            sys.excepthook = self._on_exception
        atexit.register(self.close)

    def close(self) -> None:
        """Write the memory and end rows and leave the world; further calls do nothing."""
        if self._ended:
            return
        self._ended = True
        if self.run is not None:
            self._last_rows(self.run)
        if not self.failed:
            if self.run is not None:
                self.run.state.consistency.on_exit(self.run.parallel)
            leave_world()

    def _last_rows(self, run: Run) -> None:
        rank_folder = run.output.folder.rank(run.parallel.world.rank)
        self.failed = self.failed or (rank_folder / "error.json").exists()
        failure = run.output.checkpoints.finish_at_exit()
        if failure is not None:
            self.failed = True
            print(f"tutti: {failure}", file=sys.stderr)
        wall, phases = run.loop.clock.take_row()
        now = run.loop.clock.elapsed_s()
        memory = {
            "step": run.state.progress.step,
            "rank": run.parallel.world.rank,
            "device": str(run.parallel.world.device),
            "peak_nbytes": peak_memory_nbytes(run.parallel.world.device),
        }
        run.output.log.timing(kind="memory", **memory)
        run.output.log.timing(kind="machine", step=run.state.progress.step, stolen=run.loop.clock.stolen.share())
        run.output.log.row("memory", now, **memory)
        status = "failed" if self.failed else "stopped" if (rank_folder / "stopped").exists() else "completed"
        run.output.log.row("end", now, status=status, step=run.state.progress.step, wall_s=wall, phases=phases)
        run.output.log.close()
        run.output.screen.close()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed = True
        if not isinstance(error, TuttiError):
            sys.__excepthook__(kind, error, trace)
            return
        if self.world.is_main or (self.run is not None and self.run.state.consistency.asynchronous):
            print(f"tutti: {error}", file=sys.stderr)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)


def peak_memory_nbytes(device: torch.device) -> int:
    """Return this rank's peak memory: allocated on a GPU; resident on a CPU, without memory shared by other ranks."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - attached_resident_nbytes()
