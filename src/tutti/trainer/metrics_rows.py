"""The rows of the metrics file for the first inputs, a step, an evaluation and the choice of a bucket size."""

from collections.abc import Callable, Mapping
from typing import Any

from tutti.comm.traffic import exchanged_nbytes, sent_nbytes
from tutti.data.fingerprint import describe_data, digest_samples, first_rows, input_pattern, overlap
from tutti.data.origin import SAMPLES, input_of, native_shape, random_distribution
from tutti.data.samples import DataSource
from tutti.event_record import ACTIVE
from tutti.nn.mixture import Tally
from tutti.parallel.data.bucket_size_tuner import MIB, ChosenBucketSize
from tutti.trainer.run_header import data_fields
from tutti.trainer.run_state import EvaluatedData, Run, StepResult, UpdateResult

_NOTED_STEPS, _NOTED_EVERY = 200, 10
"""The first sample of each of so many steps is noted; of later ones, that of every tenth step. It takes 20 to
30 microseconds on one core (images of 8 x 8 and 224 x 224, 1,024 tokens)."""


def _write_attention_row(run: Run) -> None:
    """Note which kernels compute attention over the context axis, when that is known or has changed."""
    if engines := run.parallel.sequences.take_engines():
        words = " and ".join(engines)
        run.output.screen.say(f"attention over mesh.context is computed by {words}")
        run.output.log.row("attention", run.loop.clock.elapsed_s(), step=run.state.progress.step, engines=words)


def write_step_row(run: Run, result: StepResult, update_result: UpdateResult) -> None:
    """Count the step, write its row and show the progress."""
    row_of = count_step(run, result, update_result.gain)
    run.output.log.row(**row_of(result, update_result))


RowOf = Callable[[StepResult, UpdateResult], dict[str, Any]]
"""Returns the arguments of a step's row, once the step's results are known."""


def count_step(run: Run, result: StepResult, gain: float | None) -> RowOf:
    """Count the step and show the progress; return what gives its row, which the device may decide on later."""
    progress, unit = run.state.progress, run.parallel.plan.batch.unit
    _write_attention_row(run)
    if progress.step == 0:
        _say_unused(run)
    progress.step += 1
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.updated(progress.step)
    tokens = result.tokens
    accumulation = run.loop.accumulation
    if result.batch != accumulation.counted:  # a second update on a batch sees no further samples
        accumulation.counted = result.batch
        progress.samples_seen += result.samples
        progress.tokens_seen += tokens or 0
    total = None
    if progress.total_epochs is not None and run.steps_per_epoch is not None:
        total = progress.total_epochs * run.steps_per_epoch
    phases_exact = run.loop.clock.phases_exact
    wall, phases = run.loop.clock.take_row()
    run.loop.own_times.note(phases, exact=phases_exact)
    timing: dict[str, Any] = {"step": progress.step, "wall_s": wall, "phases": phases}
    timing |= {"profiled": True} if run.output.profile is not None and run.output.profile.active else {}
    carried = run.parallel.layout.traffic.take()
    sent, exchanged = sent_nbytes(carried), exchanged_nbytes(carried)
    counts: dict[str, Any] = {
        "samples_seen": progress.samples_seen,
        "epoch": progress.epoch,
        "same_batch": accumulation.same_batch or None,
        "total_steps": total,
    }
    steps = {} if gain is None else {"gain": gain, "base_steps": progress.clocks[0].base_steps}
    others = {**run.state.noise.take_row(), **run.state.consistency.row(), "timed": phases_exact}
    elapsed_s = run.loop.clock.elapsed_s()
    run.output.log.timing(kind="step", **timing, sent_nbytes=sent + exchanged)
    run.output.screen.step(
        progress.step, total, result.loss, run.output.throughput.update(tokens or result.samples), unit
    )

    def row(known: StepResult, update_result: UpdateResult) -> dict[str, Any]:
        return {
            "kind": "step",
            "time_s": elapsed_s,
            **timing,
            **counts,
            "loss": float(known.loss),
            "learning_rate": update_result.learning_rate,
            "samples": known.samples,
            "tokens": tokens,
            "grad_norm": update_result.grad_norm,
            **steps,
            "skipped": update_result.skipped,
            "loss_scale": update_result.loss_scale,
            "sent_nbytes": sent,
            "exchanged_nbytes": exchanged,
            "communication": [channel.row() for channel in carried],
            **_expert_fields(known.experts),
            **others,
        }

    return row


def _say_unused(run: Run) -> None:
    """After the first step: name the parameters that got no gradient."""
    unused = run.parallel.replica.unused(run.parallel.model)
    trained = sum(parameter.requires_grad for parameter in run.parallel.model.parameters())
    if unused and len(unused) < trained:  # else the guard says that nothing is trained
        listed = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        run.output.screen.say(
            "parameters without a gradient in the first step, because the loss does not use them or they are "
            f"detached: {listed}"
        )


def note_inputs(run: Run, batch: Any) -> None:
    """Note the first sample of a batch that a step gets, and write a row about the inputs of the run's first batch."""
    step = run.state.progress.step
    if not run.parallel.world.is_main:
        return
    if step < _NOTED_STEPS or step % _NOTED_EVERY == 0:
        run.output.data_facts.note(input_pattern(first_rows(batch)))
    if step == 0:
        _write_inputs_row(run, batch)


def _write_inputs_row(run: Run, batch: Any) -> None:
    """Write what a batch says about its inputs, which the script may have changed after reading."""
    inputs = input_of(batch)
    if inputs is None or inputs.ndim < 2 or inputs.dtype.kind not in "biuf":
        return
    samples = list(inputs[:SAMPLES])
    native, reason = native_shape(samples)
    run.output.log.row(
        "inputs",
        run.loop.clock.elapsed_s(),
        step=0,
        shape=list(inputs.shape[1:]),
        native_shape=None if native is None else list(native),
        native_reason=reason,
        random=random_distribution(samples),
    )


def _expert_fields(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    """Return the fields about mixtures of experts: tokens assigned and dropped by all ranks, and balance losses.

    Each is a total over layers (the balance loss as `auxiliary_loss` gives it); "experts" has those of each layer.
    """
    if not tallies:
        return {"tokens_assigned": None, "tokens_dropped": None}
    return {
        "tokens_assigned": sum(tally.assigned for tally in tallies.values()),
        "tokens_dropped": sum(tally.dropped for tally in tallies.values()),
        "balance_loss": sum(tally.balance_loss for tally in tallies.values()),
        "experts": {
            name: {"assigned": tally.assigned, "dropped": tally.dropped, "balance_loss": tally.balance_loss}
            for name, tally in tallies.items()
        },
    }


def write_evaluation_row(run: Run, source: DataSource, name: str, values: dict[str, float], samples: int) -> None:
    """Write the row of one evaluation, with the time since the last row.

    Args:
        run: the run.
        source: the evaluated data.
        name: name of the evaluation, such as "test".
        values: results by name.
        samples: number of evaluated samples.
    """
    run.loop.clock.enter("other")
    wall, phases = run.loop.clock.take_row()
    run.parallel.layout.traffic.take()  # drops the evaluation's traffic, which the next step's row would count
    if not run.parallel.world.is_main:
        return
    run.output.log.row(
        "evaluate",
        run.loop.clock.elapsed_s(),
        name=name,
        step=run.state.progress.step,
        epoch=run.state.progress.epoch,
        samples_seen=run.state.progress.samples_seen,
        samples=samples,
        values=values,
        wall_s=wall,
        phases=phases,
        **_evaluation_data_fields(run, source, name),
        **run.state.consistency.evaluation_row(),
    )


def _evaluation_data_fields(run: Run, source: DataSource, name: str) -> dict[str, Any]:
    """Describe the evaluated data set, which is read once for each name, and what it shares with the training data."""
    facts, seed = run.output.data_facts, run.settings.seed
    known = facts.evaluations.get(name)
    if known is None or known.dataset is not source.dataset:
        digests, trained_on = digest_samples(source.dataset, seed), run.state.loader.source.dataset
        shared = overlap(digests if trained_on is source.dataset else digest_samples(trained_on, seed), digests)
        info = describe_data(source.dataset, seed, name)
        fields = {"data": data_fields(info), "overlap_with_training": shared}
        patterns = frozenset(digests.patterns) if digests is not None else frozenset()
        known = facts.evaluations[name] = EvaluatedData(source.dataset, fields, patterns)
    trained = len(facts.trained & known.patterns) if known.patterns else None
    return known.fields | {"trained_on": trained, "trained_looked_at": len(facts.trained)}


def advance_profile(run: Run) -> None:
    """After a step: let the profiler go on; the time that it takes between steps gets a row of its own."""
    profile = run.output.profile
    if profile is not None and profile.stepped(may_start=not run.loop.bucket_tuner.measuring):
        if not run.state.consistency.asynchronous:
            run.parallel.world.gather(None)  # else the next step would wait for ranks that still write
        wall, phases = run.loop.clock.take_row()
        step, now = run.state.progress.step, run.loop.clock.elapsed_s()
        run.output.log.row("profile", now, step=step, outcome=profile.outcome, wall_s=wall, phases=phases)
        run.output.log.timing(kind="profile", step=step, wall_s=wall, phases=phases)


def write_bucket_size(run: Run, chosen: ChosenBucketSize) -> None:
    """Write and show the bucket size that the ranks chose, and the step time with each size that they tried."""
    output, mib = run.output, {f"{size / MIB:g}": seconds for size, seconds in chosen.step_s.items()}
    size = chosen.nbytes / MIB
    step, elapsed_s = run.state.progress.step, run.loop.clock.elapsed_s()
    output.log.row("buckets", elapsed_s, step=step, chosen_mib=size, step_s=mib)
    timings = ", ".join(f"{name} MiB {1e3 * seconds:.3g} ms" for name, seconds in mib.items())
    output.screen.say(f"gradients are reduced in buckets of {size:g} MiB; measured step times: {timings}")
