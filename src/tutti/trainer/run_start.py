"""The beginning of a run's records: its header, the first row, and loggers and callbacks that are ready."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from tutti.comm.host_versions import differences, host_versions
from tutti.config import serialization
from tutti.config.compression import format_compression
from tutti.config.last_batch import MOST_SAMPLES, LastBatchFile
from tutti.config.run_folder import Recipe
from tutti.data.batches import BatchShare, Indices
from tutti.data.fingerprint import describe_data
from tutti.errors import ScriptError
from tutti.trainer.job_context import JobContext
from tutti.trainer.loggers import RunLoggers, last_logged
from tutti.trainer.metrics import read_rows
from tutti.trainer.run_header import make_header, script_path, this_rank
from tutti.trainer.run_state import Run


def write_header(run: Run, context: JobContext, resumed: Path | None) -> None:
    """Write the header and the plan on rank 0. Collective.

    Args:
        run: the prepared run.
        context: what the script asked for.
        resumed: the checkpoint that was loaded.
    """
    replica = run.parallel.replica
    transports = (*replica.transports, *replica.shards.transports)
    world = run.parallel.world
    gathered = world.gather((this_rank(world, transports), host_versions(world.device)))
    if not world.is_main:
        return
    ranks = [info for info, _ in gathered]
    differing = differences([(info.host, versions) for info, versions in gathered])
    for sentence in differing.values():
        run.output.screen.say(sentence)
    data = describe_data(run.state.loader.source.dataset, run.settings.seed, "train")
    header = make_header(
        world,
        ranks,
        name=context.name,
        model=run.parallel.model,
        parameters=run.parallel.layout.parameters,
        mesh=run.parallel.plan.mesh,
        recipe=_recipe(run),
        data=data,
        resumed_from=resumed,
        resumed_at_step=run.state.progress.step,
        checkpoint_store=None
        if run.output.checkpoints.uploads is None
        else run.output.checkpoints.uploads.store.address,
        facts={**({"hosts_differ": "; ".join(differing)} if differing else {}), **context.facts},
    )
    serialization.save(run.parallel.plan, run.output.folder.plan)
    serialization.save(header, run.output.folder.header)


def _recipe(run: Run) -> Recipe:
    rule, compressor, sync = run.settings.lr_rule, run.parallel.replica.compressor, run.parallel.plan.sync
    compression = (
        sync.compress if sync.mode != "synchronous" else None if compressor is None else compressor.compression
    )
    return Recipe(
        optimizer=" + ".join(type(optimizer).__name__ for optimizer in run.parallel.optimizers),
        learning_rate=run.loop.initial_rates[0],
        global_batch_size=run.parallel.plan.batch.global_batch_size,
        unit=run.parallel.plan.batch.unit,
        num_microbatches=run.parallel.plan.batch.num_microbatches,
        last_batch=run.parallel.plan.batch.last_batch,
        precision=run.parallel.plan.precision,
        seed=run.settings.seed,
        clip_norm=run.settings.clip_norm,
        learning_rate_rule=None if rule is None else asdict(rule),
        scheduler=run.state.schedules.names,
        batch_ramp=run.parallel.plan.batch.ramp,
        compress=None if compression is None else format_compression(compression),
    )


def write_start_row(run: Run, context: JobContext, *, from_memory: bool) -> None:
    """Write the row that begins this process's part of the metrics.

    Args:
        run: the prepared run.
        context: what the script asked for.
        from_memory: whether it goes on from memory.
    """
    wall, phases = run.loop.clock.take_row()
    run.output.log.row(
        "start",
        run.loop.clock.elapsed_s(),
        resumed_at_step=run.state.progress.step,
        **({"from_memory": True} if from_memory else {}),
        **({} if context.hooks.progress else {"progress": False}),
        startup_s={"rendezvous": run.parallel.world.rendezvous_s, "prepare": wall},
        wall_s=wall,
        phases=phases,
    )


def start_hooks(run: Run, context: JobContext, *, resumed: bool) -> None:
    """Start the loggers on rank 0, and compare the ranks' callbacks. Collective.

    A run that is only observed passes nothing to the script's loggers.

    Raises:
        ScriptError: on every rank, if a logger cannot start.
        RankMismatchError: the ranks' callbacks differ.
    """
    failure, output = None, run.output
    if run.parallel.world.is_main:
        observed = context.launch_options.observer is not None
        loggers = RunLoggers(() if observed else context.hooks.loggers, output.screen.say)
        rows = read_rows(output.folder.metrics) if resumed else []
        failure = loggers.start(
            {
                "name": context.name or script_path().stem,
                "folder": output.folder.path,
                "plan": serialization.to_data(run.parallel.plan),
                "settings": serialization.to_data(_recipe(run)),
                "facts": dict(context.facts),
                "step": run.state.progress.step,
                "resumed": any(row.get("kind") == "step" for row in rows),
                "logged": last_logged(rows),
            }
        )
        output.log.loggers = loggers
    everyone = run.parallel.world.gather((context.hooks.callbacks.names, failure))
    if everyone[0][1] is not None:
        raise ScriptError(everyone[0][1])
    context.hooks.callbacks.check_same([names for names, _ in everyone])


def note_batches(run: Run) -> None:
    """Let each batch be noted in the rank's folder before it is loaded, so that one that makes the rank fail is known.

    A stream's samples have no numbers; a disk that is full or read-only keeps nothing.
    """
    loader = run.state.loader
    if loader.source.is_stream:
        return
    try:
        file = LastBatchFile(run.output.folder.rank(run.parallel.world.rank))
    except OSError:
        return
    latest: BatchShare | None = None
    positions, total = np.empty(0, dtype=np.int64), 0

    def announce(share: BatchShare, indices: Indices) -> None:
        nonlocal latest, positions, total
        if share is not latest:
            whole = share.positions
            latest, positions, total = share, np.asarray(whole[:MOST_SAMPLES], dtype=np.int64), len(whole)
        file.note(loader.epoch + 1, loader.position + 1, indices[positions].tolist(), total)

    loader.announce = announce
