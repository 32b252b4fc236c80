"""The Job: three lines make a script train on any number of ranks, and a step computes the same on all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tutti.checkpoint.retention import parse_best
from tutti.config.plan import BatchPlan
from tutti.config.run_folder import checkpoint_place
from tutti.config.stated_facts import check_facts
from tutti.config.vocabulary import LastBatch, OnNonfinite, OnSlowRank, Precision, Unit
from tutti.data.samples import read_source
from tutti.errors import ScriptError
from tutti.event_record import recorded
from tutti.optim.learning_rate import LRRule
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.loss_means import looked_up
from tutti.parallel.losses import default_loss, default_unpack, loss_of
from tutti.trainer import capture
from tutti.trainer.callbacks import JobCallbacks
from tutti.trainer.deferred_init import Tape, build_on_meta, build_with_memory
from tutti.trainer.epoch_loop import agree_to_stop, between_batches, run_epochs, save_now
from tutti.trainer.job_context import JobHooks, open_job_context
from tutti.trainer.job_ranks import JobRanks
from tutti.trainer.loggers import Logger, check_loggers, plain_values
from tutti.trainer.metric_objects import as_functions
from tutti.trainer.metrics import redirect_other_ranks
from tutti.trainer.metrics_rows import write_evaluation_row
from tutti.trainer.prepare import (
    PrepareArguments,
    build_optimizers,
    check_arguments,
    follow_script,
    prepare_run,
    without_wrappers,
)
from tutti.trainer.run_end import RunFinalizer, begin_launch
from tutti.trainer.run_state import JobLoader, JobSettings, Run
from tutti.trainer.update import optimizers_of, settle_updates
from tutti.trainer.whole_weights import on_cpu, save_pretrained, whole_model, whole_state


class Job(JobRanks):
    """One training run. The global batch defines what it computes, which does not depend on the number of ranks.

    Args:
        global_batch_size: samples or tokens per step, over all ranks and microbatches.
        unit: what `global_batch_size` counts.
        seed: seed of initial values, data order, augmentation and dropout.
        num_microbatches: slices that a batch is cut into (gradient accumulation). None: what the plan says, or 1, and
            twice as many whenever a rank runs out of memory.
        last_batch: whether the short last batch of an epoch is kept or dropped.
        batch_ramp: (until, size) pairs. Batches numbered below `until`, counted from 0 over all epochs, have `size`
            instead; a learning-rate rule follows the batch of the step.
        precision: number format of the computation. None: the plan's, or "full".
        clip_norm: bound of the gradients' global norm.
        lr_rule: how the learning rate follows the global batch and the warm-up.
        on_nonfinite: what happens at a loss or gradient that is NaN or infinite. "stop" raises TrainingError; "skip"
            skips the update on all ranks, and leaves parameters, optimizers and running statistics as before the step;
            "rollback" also gives them the values of the newest checkpoint, and goes on with the next batch.
        loss_limit: a loss above so many times the median of the last 50 is treated as one that is not finite, once 10
            are known. None: no limit.
        on_slow_rank: "rebalance" lowers a slow rank's share of the batch, which others take over, until it is no
            slower; "warn" only names the rank. None: the launcher's choice, else "warn".
        checkpoint_every: steps between two checkpoints. None: the launcher's choice.
        keep_checkpoints: how many of the newest checkpoints stay. 0: only the newest, and none is written after the
            last epoch.
        keep_best: a value of `job.evaluate` and which is better, such as "val/loss:min": the checkpoint of the best
            evaluation stays, too, and is written when the evaluation is made.
        checkpoint_store: address of an object store ("s3://bucket/prefix", any of fsspec) that checkpoints are uploaded
            to. What stays there is as for a run folder, which then keeps the newest `keep_local`. None: the launcher's.
        noise_every: steps between measurements of the gradient noise scale, which says how large a batch pays.
            Measuring does not change the training.
        compile: whether torch.compile compiles the model: True, its mode, or its arguments as a dict. Under plans that
            divide some modules (`stage`, `expert`, `table`) it compiles the blocks that they leave whole; under those
            that divide what all modules compute (`split`, `context`, `space`) the run says so and goes on uncompiled.
        name: name of the run. None: the script's.
        folder: the run folder, unless the launcher names one. None: runs/<script>-<time>.
        resume: a run folder, a checkpoint, or the address of a store to resume from.
        facts: what only you know and the report should say: {"tuning.trials": 12, "data.start_state": "disk-cold"}.
        loggers: where the run's numbers go besides its folder: CSVLogger, TensorBoardLogger, MLflowLogger, WandbLogger,
            or any `Logger`; one or several.
        callbacks: called around epochs, steps and evaluations, on every rank: `EarlyStopping`, or any `Callback`; one
            or several.
        progress: whether a terminal shows a progress bar.
        time_limit: seconds, from here, after which all ranks save a checkpoint and leave with exit code 75, to be
            resumed. SIGTERM, SIGUSR1 and a file named `stop` in the run folder do the same.

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
    _followed: capture.FollowedScript | None = None
    _prepared: Run | None = None
    _whole: bool = False

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
        on_nonfinite: OnNonfinite = "stop",
        loss_limit: float | None = None,
        on_slow_rank: OnSlowRank | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 2,
        keep_best: str | None = None,
        checkpoint_store: str | None = None,
        keep_local: int = 1,
        noise_every: int | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        name: str | None = None,
        folder: str | Path | None = None,
        resume: str | Path | None = None,
        facts: Mapping[str, object] | None = None,
        loggers: Logger | Sequence[Logger] | None = (),
        callbacks: Any = (),
        progress: bool = True,
        time_limit: float | None = None,
    ) -> None:
        options, self._callbacks, self._compile = begin_launch(), JobCallbacks.of(callbacks), compile
        self._context = open_job_context(
            JobSettings(
                seed=seed,
                clip_norm=clip_norm,
                lr_rule=lr_rule,
                on_nonfinite=on_nonfinite,
                checkpoint_every=options.checkpoint_every if checkpoint_every is None else checkpoint_every,
                keep_checkpoints=keep_checkpoints,
                keep_best=None if keep_best is None else parse_best(keep_best, "keep_best"),
                noise_every=noise_every,
                automatic_microbatches=num_microbatches is None and options.plan is None,
                time_limit=time_limit,
                loss_limit=loss_limit,
                checkpoint_store=checkpoint_store or options.checkpoint_store,
                keep_local=keep_local,
                on_slow_rank=options.on_slow_rank if on_slow_rank is None else on_slow_rank,
            ),
            options,
            _batch_plan(global_batch_size, unit, num_microbatches, last_batch, batch_ramp),
            microbatches_stated=num_microbatches is not None,
            precision=precision,
            name=name,
            folder=Path(folder) if folder else None,
            resume=checkpoint_place(resume) if resume else None,
            facts=check_facts(facts or {}, "Job(facts=...)"),
            hooks=JobHooks(callbacks=self._callbacks, loggers=check_loggers(loggers), progress=progress),
        )
        self._finalizer = None if capture.is_capturing() else RunFinalizer(self._context.world, options.supervised)

    @property
    def global_step(self) -> int:
        """Number of updates made so far; a resumed run goes on counting."""
        return 0 if self._followed is not None else self._run().state.progress.step

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
            scheduler: a learning-rate scheduler or a list of them. Each belongs to the optimizer that it was built
                with; that optimizer's updates, or `epochs`, advance it. ReduceLROnPlateau: see `schedule`.
            scheduler_clock: whether schedulers advance once per update or once per epoch.
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
        check_arguments(model, loss_fn)
        source = read_source(dataset, shuffle=shuffle, tokens=tokens, arguments=loader_arguments)
        model = without_wrappers(model, compiled=not capture.is_capturing())
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
            compile=self._compile,
        )
        returned = list(optimizers) if isinstance(optimizer, list | tuple) else optimizers[0]
        if capture.is_capturing():
            self._followed = follow_script(self._context, prepare_arguments)
            return model, returned, JobLoader(self._followed, self._context.clock, lambda: None)
        with recorded("operation", "job.prepare"):
            self._prepared = prepare_run(self._context, prepare_arguments)
        if self._finalizer is not None:
            self._finalizer.run, self._finalizer.before_end = self._prepared, partial(self._callbacks.end, self)
        if not self._context.launch_options.supervised:
            redirect_other_ranks(self._context.world, str(self._prepared.output.folder.rank(self.rank) / "stdout.log"))
        run = self._prepared
        run.parallel.script_reads.watch()
        stopping = run.loop.stopping
        if not run.state.consistency.asynchronous:  # a checkpoint is of a step that all ranks have taken
            stopping.save = partial(save_now, run)
        return (
            model,
            returned,
            JobLoader(run.state.loader, run.loop.clock, partial(between_batches, run), stopping.listening),
        )

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs still to run, of `count`; a resumed run continues at its checkpoint."""
        if self._followed is not None:
            yield from self._followed.epochs()
        yield from run_epochs(self, self._run(), self._callbacks, count)

    def should_stop(self, condition: Any) -> bool:
        """Return whether `condition` is true on any rank, the same on every rank. Collective.

        Once it is, `job.epochs` yields no further epoch, writes its last checkpoint and ends, also if the script leaves
        the loop: `if job.should_stop(loss < 0.1): break`.

        Args:
            condition: anything that can be true; ranks may differ.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import TensorDataset
            >>> job = Job(global_batch_size=4, folder="runs/enough")
            >>> model = nn.Linear(3, 1)
            >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
            >>> model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
            >>> for epoch in job.epochs(100):
            ...     for batch in loader:
            ...         loss = job.step(batch)
            ...     if job.should_stop(loss < 1e-6):
            ...         break
            >>> epoch < 99
            True
        """
        if self._followed is not None:
            return False
        with _together(self, "job.should_stop") as run:
            return agree_to_stop(run, condition)

    def step(self, batch: Any) -> float:
        """Make one optimizer update on a global batch.

        Does what `forward_backward` with the loss function given to `prepare` and `update` do.

        Args:
            batch: this rank's share of the global batch, as the loader yielded it.

        Returns:
            The global mean loss, the same on every rank. If the plan says that ranks do not wait for each other, the
            loss of this rank's share. On an accelerator it is a number that is read when somebody looks at it.

        Raises:
            TrainingError: the loss or a gradient is not finite; on an accelerator a step later.
        """
        if self._followed is not None:
            return self._followed.step(batch)
        with _together(self, "job.step") as run:
            function = loss_of(run.loop.unpack, run.loop.loss_fn or default_loss)
            loss = run.loop.program.forward_backward(function, batch, None)
            self._callbacks.computed(loss)
            run.loop.program.update(run.parallel.optimizers)
        self._callbacks.updated(self, run.state.progress.step)
        return loss

    def forward_backward(
        self,
        function: LossFunction,
        batch: Any,
        *,
        zero_grad: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> float:
        """Compute the gradients of the global mean of `function(model, batch)`.

        For steps that are not one loss and one update. Call `update` afterwards. Gradients of several calls before an
        update add up; after an update, all gradients start from zero.

        Args:
            function: (model, batch) -> loss: a mean over samples, or a Weighted.
            batch: this rank's share of the global batch, as the loader yielded it.
            zero_grad: optimizers whose gradients start from zero, where that is another choice: as if their zero_grad
                was called before this backward. An empty list: no optimizer's.

        Returns:
            The global mean loss; on an accelerator a number that is read when somebody looks at it.

        Raises:
            ScriptError: the batch is not the loader's, or it is not clear whose gradients start from zero.
            TrainingError: the loss or a gradient is not finite; on an accelerator `update` finds it, a step later.

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
        if self._followed is not None:
            return self._followed.forward_backward(function, batch)
        with _together(self, "job.forward_backward") as run:
            zeroed = None if zero_grad is None else optimizers_of(run, zero_grad)
            loss = run.loop.program.forward_backward(function, batch, zeroed)
        self._callbacks.computed(loss)
        return loss

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Clip gradients, step the optimizer, advance its scheduler, write the step's row.

        Args:
            optimizer: one of the optimizers that were passed to prepare; None: all of them. Only its own parameters
                are clipped and updated, and only its own schedulers and warm-up advance.

        Raises:
            ScriptError: the optimizer has no new gradients, or is not one of those passed to prepare.
            TrainingError: gradients are not finite at any loss scale.
        """
        if self._followed is not None:
            return
        with _together(self, "job.update") as run:
            run.loop.program.update(run.parallel.optimizers if optimizer is None else optimizers_of(run, optimizer))
        if not run.loop.watch.inside:  # else in job.step
            self._callbacks.updated(self, run.state.progress.step)

    def schedule(self, metric: float) -> None:
        """Give a metric to the schedulers that follow one (ReduceLROnPlateau). Call it once an epoch.

        Without a call, the end of an epoch gives them the epoch's mean training loss.

        Args:
            metric: the same on every rank, as the results of `evaluate` are.

        Raises:
            ScriptError: no scheduler follows a metric.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import TensorDataset
            >>> job = Job(global_batch_size=4, folder="runs/plateau")
            >>> model = nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
            >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
            >>> model, optimizer, loader = job.prepare(model, optimizer, data, nn.MSELoss(), scheduler=plateau)
            >>> for epoch in job.epochs(2):
            ...     for batch in loader:
            ...         loss = job.step(batch)
            ...     job.schedule(job.evaluate(data)["loss"])
        """
        self._run().loop.program.schedule(float(metric))

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Any] | None = None,
        *,
        whole: Mapping[str, Any] | None = None,
        name: str = "test",
        batch_size: int | None = None,
        **loader_arguments: Any,
    ) -> dict[str, float]:
        """Evaluate the model on `dataset`. Every sample counts exactly once. Collective.

        Args:
            dataset: a map or iterable data set, or a DataLoader.
            metrics: by name, fn(output, target) -> one value per sample, their mean, or a Weighted. An object with
                reset, update(output, target) and compute, as of torchmetrics, is computed on the whole data set.
            whole: by name, fn(all outputs, all targets), for metrics that are not means; every rank holds them all.
            name: name of the evaluation in metrics and reports.
            batch_size: samples that a rank computes at once. None: as many as in training, at most 256.
            **loader_arguments: arguments of DataLoader.

        Returns:
            Results by name, the same on every rank. "loss" is one of them, unless the script has no loss function and
                asks for other metrics.
        """
        of_batches, of_all = as_functions(metrics or {}, whole or {})
        if self._followed is not None:
            return dict.fromkeys(("loss", *of_batches, *of_all), 0.0)
        with _together(self, "job.evaluate") as run:
            arguments = {"collate_fn": run.state.loader.source.collate, **loader_arguments}
            source = read_source(dataset, shuffle=False, tokens=None, arguments=arguments)
            run.loop.clock.enter("evaluation")
            values, samples = run.loop.program.evaluate(source, of_batches, of_all, batch_size)
            write_evaluation_row(run, source, name, values, samples)
            run.loop.observer.evaluated(run.state.progress.step, name, values)
            run.output.checkpoints.evaluated({f"{name}/{key}": value for key, value in values.items()})
        self._callbacks.logged(self, {f"{name}/{key}": value for key, value in values.items()})
        self._callbacks.call("on_evaluate_end", self, values)
        return values

    def log(self, /, **values: Any) -> None:
        """Write your own values to the run's metrics, loggers and callbacks; those of ranks other than 0 are ignored.

        Args:
            **values: numbers, also as tensors and arrays of one element or NumPy scalars, or texts and None, which are
                in the run's metrics only.

        Raises:
            ScriptError: a value is none of these; names its keyword.
        """
        run = self._run()
        values = plain_values(values)
        run.output.log.row(
            "log",
            run.loop.clock.elapsed_s(),
            step=run.state.progress.step,
            epoch=run.state.progress.epoch,
            values=values,
        )
        self._callbacks.logged(self, values)

    def save(self) -> Path:
        """Write a checkpoint now and return its folder. Collective.

        A run resumed from it begins with the next batch, so call it once all updates on a batch are made.
        """
        with _together(self, "job.save") as run:
            if run.loop.accumulation.waits:
                run.output.screen.say(
                    f"the checkpoint of step {run.state.progress.step} leaves out the gradients that forward_backward "
                    "has computed since the last update"
                )
            return save_now(run)

    def state_dict(self, *, main_only: bool = False) -> dict[str, Any]:
        """Return the whole model's state_dict, on the CPU, whatever the plan divides. Collective.

        It is what one device's `model.state_dict()` would return. Every rank holds a copy of the model in its host's
        memory meanwhile; `main_only` leaves that to rank 0. `tutti export` needs the memory of one tensor only.

        Args:
            main_only: return an empty dict on ranks other than 0.

        Raises:
            RankMismatchError: the ranks call different methods of the Job.

        Examples:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import TensorDataset
            >>> job = Job(global_batch_size=4, folder="runs/weights")
            >>> model = nn.Linear(3, 1)
            >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
            >>> model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
            >>> state = job.state_dict()  # on every rank
            >>> if job.is_main:
            ...     torch.save(state, "weights.pt")
            >>> nn.Linear(3, 1).load_state_dict(torch.load("weights.pt"))
            <All keys matched successfully>
        """
        if self._whole:
            return on_cpu(self._run().parallel.model.state_dict())
        with _together(self, "job.state_dict") as run:
            return whole_state(run, main_only=main_only)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Call the model's own `save_pretrained(folder, **options)` on rank 0, with whole weights. Collective.

        `from_pretrained(folder)` then loads them (transformers, diffusers); of a PEFT model it writes the adapters.
        Rank 0 holds a copy of the model in its host's memory meanwhile.

        Args:
            folder: where the model is written.
            **options: passed on.

        Raises:
            ScriptError: the model has no such method, or it fails; on every rank.
        """
        with _together(self, "job.save_pretrained") as run:
            save_pretrained(run, Path(folder), options)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Let the model hold all its weights on every rank, and compute as on one device. Collective.

        For what reads the weights as a whole or runs on some ranks only: generation, export, averaged copies, other
        methods than forward. Values that every rank changes alike are kept. Each rank needs the memory of the
        whole model beside its part. The Job's methods that train, evaluate or save wait until the context is left.

        Raises:
            ScriptError: ranks changed different tensors, or a tensor's shape or dtype.

        Examples:
            An average of the weights, and predictions on rank 0:

            >>> import torch
            >>> from torch import nn
            >>> from torch.optim.swa_utils import AveragedModel
            >>> from torch.utils.data import TensorDataset
            >>> job = Job(global_batch_size=4, folder="runs/average")
            >>> model = nn.Linear(3, 1)
            >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
            >>> model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
            >>> with job.whole_model() as whole:
            ...     average = AveragedModel(whole)
            >>> for batch in loader:
            ...     loss = job.step(batch)
            ...     with job.whole_model() as whole:
            ...         average.update_parameters(whole)
            >>> with job.whole_model() as whole, torch.no_grad():
            ...     if job.is_main:
            ...         print(whole(torch.ones(2, 3)).shape)
            torch.Size([2, 1])
        """
        if self._whole:
            yield self._run().parallel.model
            return
        with _together(self, "job.whole_model") as run, whole_model(run, edits=True) as model:
            self._whole = True
            try:
                yield model
            finally:
                self._whole = False

    def _run(self) -> Run:
        if self._followed is not None:
            self._followed.end()
        if self._prepared is None:
            raise ScriptError("the Job has no model yet; call job.prepare(model, optimizer, dataset, loss_fn) first")
        ending = self._prepared.loop.ending
        if ending.failure is not None:
            failure, ending.failure = ending.failure, None
            raise failure
        return self._prepared


_STEPPING = frozenset({"job.step", "job.forward_backward", "job.update", "job.should_stop"})
"""Methods that need not know what an accelerator has decided on the last update."""

_TRAINING = frozenset({"job.step", "job.forward_backward", "job.update", "job.save"})


class _together:
    """Give the run, and note meanwhile what this rank does together with the others."""

    __slots__ = ("_job", "_name", "_run", "_watching")

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name

    def __enter__(self) -> Run:
        job, name = self._job, self._name
        run = self._run = job._run()
        if job._whole:
            raise ScriptError(f"{name} was called inside `with job.whole_model():`; leave it first")
        if run.loop.average_applied and name in _TRAINING:
            raise ScriptError(f"{name} was called inside `with average.applied():`; leave it first")
        if not run.loop.watch.inside and name != "job.update":
            run.check_changes()
        self._watching = run.parallel.script_reads.rest()
        run.loop.watch.enter(name)
        if name not in _STEPPING:
            try:
                settle_updates(run)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return run

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._run.loop.watch.leave(error)
        finally:
            if self._watching:
                self._run.parallel.script_reads.watch()


def _batch_plan(
    size: int, unit: Unit, num_microbatches: int | None, last_batch: LastBatch, ramp: Sequence[tuple[int, int]]
) -> BatchPlan:
    return BatchPlan(
        global_batch_size=size,
        unit=unit,
        num_microbatches=1 if num_microbatches is None else num_microbatches,
        last_batch=last_batch,
        ramp=tuple((until, size) for until, size in ramp),
    )
