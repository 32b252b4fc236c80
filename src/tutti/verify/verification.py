"""Run a verification: on one device, then on N ranks, then, if they differ, on one device again."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tutti.config.compression import FACTORS, ZERO_ONE, format_compression, parse_compression
from tutti.config.plan import Plan
from tutti.config.verdict import Cause, TensorDifference, Verdict
from tutti.errors import ScriptError
from tutti.verify.alignment import sampled_part
from tutti.verify.compare_recordings import FirstDifference, StepRecordings, compare_start, compare_step
from tutti.verify.diagnosis import DifferenceCase, diagnose
from tutti.verify.recording import RankRecord, StepRecord, read_ranks, read_steps
from tutti.verify.tolerance import FLOOR, TOLERANCE, ToleranceChecker

Arithmetic = Literal["auto", "double", "script"]
"""Precision of the computation.

- double: float64 throughout.
- script: the script's own dtypes.
- auto: double if the script runs in it, else script.
"""


_NEVER = 1_000_000
"""More updates than a verified script makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationTrial:
    """One recorded run of the script.

    Attributes:
        world_size: number of ranks.
        folder: new folder for the recording and the run.
        steps: number of steps to record.
        double: compute in float64.
        still: turn dropout off.
        reference: folder of one device's recording, whose states and random draws this run follows.
        compress: codec of gradient reductions.
    """

    world_size: int
    folder: Path
    steps: int
    double: bool
    still: bool = False
    reference: Path | None = None
    compress: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the ranks (see tutti.environment)."""
        variables = {
            "TUTTI_OBSERVER": "tutti.verify.recorder:recorder",
            "TUTTI_RECORD": str(self.folder),
            "TUTTI_RECORD_STEPS": str(self.steps),
            "TUTTI_RECORD_DOUBLE": "1" if self.double else "0",
            "TUTTI_RECORD_STILL": "1" if self.still else "0",
        }
        if self.compress is not None:
            variables["TUTTI_COMPRESS"] = self.compress
        return variables if self.reference is None else {**variables, "TUTTI_RECORD_REFERENCE": str(self.reference)}


Runner = Callable[[VerificationTrial], str | None]
"""Runs the script once. Returns None, or a sentence and a traceback that say how it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """What to verify.

    Attributes:
        script: path of the script.
        world_size: number of ranks to compare with one device.
        steps: number of steps to compare.
        arithmetic: precision of the computation.
        tolerance: largest accepted relative difference; None for the one that fits the dtype of the computation.
        compress: codec of gradient reductions, which one device does not have.
    """

    script: str
    world_size: int
    steps: int = 3
    arithmetic: Arithmetic = "auto"
    tolerance: float | None = None
    compress: str | None = None


def verify(request: VerificationRequest, run: Runner, folder: Path) -> Verdict:
    """Run a script on one device and on ranks, and compare the two.

    If they differ, the script runs on one device again, which shows whether it is deterministic.

    Args:
        request: what to verify.
        run: runs the script once.
        folder: for the recordings; the caller removes it.

    Raises:
        ScriptError: the script fails on one device, or makes no step there.
    """
    reference, notes = _one_device(request, run, folder)
    exact = request.compress if _loses_nothing(request.compress) else None
    tested = replace(
        reference, world_size=request.world_size, folder=folder / "ranks", reference=reference.folder, compress=exact
    )
    failure = run(tested)
    if failure is not None:
        return _failed(request, failure, reference.double)
    comparison = compare_trials(reference, tested, request.tolerance)
    if comparison.first_difference is not None and comparison.draws_may_differ:
        reference, tested = (
            replace(trial, folder=trial.folder.with_suffix(".still"), still=True) for trial in (reference, tested)
        )
        tested = replace(tested, reference=reference.folder)
        failure = run(reference) or run(tested)
        if failure is not None:
            return _failed(request, failure, reference.double)
        comparison = compare_trials(reference, tested, request.tolerance)
        notes = (*notes, "dropout was off, because ranks that share samples draw different masks than one device")
    if comparison.first_difference is None:
        return _with_compression(request, run, (reference, tested), _passed(request, comparison, notes))
    again = replace(reference, folder=folder / "again", reference=reference.folder)
    repeated = None if run(again) is not None else compare_trials(reference, again, request.tolerance)
    if repeated is not None and repeated.first_difference is not None:
        return _refused(request, replace(repeated, repeated=True), notes)
    return _refused(request, comparison, notes)


def _with_compression(
    request: VerificationRequest, run: Runner, trials: tuple[VerificationTrial, VerificationTrial], passed: Verdict
) -> Verdict:
    """Run again with compressed reductions, and add the outcome to the verdict on exact reductions."""
    reference, tested = trials
    if request.compress is None or request.world_size == 1 or _loses_nothing(request.compress):
        return passed
    frozen = _frozen_reference(request.compress, reference)
    trial = replace(tested, folder=tested.folder.with_suffix(".compressed"), compress=request.compress)
    if frozen is not None:
        trial = replace(trial, compress=frozen.compress, reference=frozen.folder)
    failure = (None if frozen is None else run(frozen)) or run(trial)
    if failure is not None:
        return _failed(request, failure, reference.double)
    if frozen is not None:
        reference = frozen
    note, ranks_agree = compressed_note(request.compress, reference.folder, trial.folder, request.world_size)
    sentence = passed.sentence.replace("one device computes,", "one device computes with exact reductions,", 1)
    if not ranks_agree:
        sentence = f"FAIL: with compressed reductions ({request.compress}), ranks differ from each other"
    return replace(passed, passed=ranks_agree, sentence=sentence, notes=(*passed.notes, note))


def _loses_nothing(compress: str | None) -> bool:
    """Return whether the codec is lossless, so that its reductions are compared like exact ones."""
    return compress is not None and parse_compression(compress).method == FACTORS


def _frozen_reference(compress: str, reference: VerificationTrial) -> VerificationTrial | None:
    """Return the reference for momentum compression: one device whose second moment is frozen after the first update.

    None if the codec does not freeze the second moment.
    """
    codec = parse_compression(compress)
    if codec.freeze_step is None:
        return None
    if codec.method == ZERO_ONE:  # reductions continue; the second moment is updated in the first step and then rarely
        option_text = format_compression(replace(codec, freeze_step=_NEVER, kappa=1))
    else:
        option_text = format_compression(replace(codec, freeze_step=1))
    return replace(reference, folder=reference.folder.with_suffix(".frozen"), compress=option_text)


def _one_device(request: VerificationRequest, run: Runner, folder: Path) -> tuple[VerificationTrial, tuple[str, ...]]:
    """Run the reference on one device, in float64 if that is asked for and the script runs in it.

    Returns:
        The trial, and notes for the verdict.
    """
    double = request.arithmetic != "script"
    trial = VerificationTrial(world_size=1, folder=folder / "one", steps=request.steps, double=double)
    failure = run(trial)
    notes: tuple[str, ...] = ()
    if failure is not None and request.arithmetic == "auto":
        trial = replace(trial, folder=folder / "one-own", double=False)
        in_double, failure = failure, run(trial)
        last = in_double.strip().splitlines()[-1]
        notes = (f"computed in the script's own dtypes, because in float64 it fails ({last})",)
    if failure is not None:
        raise ScriptError(f"{request.script} fails on one device, so there is nothing to compare with: {failure}")
    if not read_ranks(trial.folder, 1):
        raise ScriptError(
            f"{request.script} ended without a step of a tutti.Job; create a Job, and train with job.step(batch)"
        )
    return trial, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialComparison:
    """The outcome of comparing two trials.

    Attributes:
        first_difference: the first tensor that differs; None if there is none.
        recordings: recordings of the step in which it was found; None if it is not in a step.
        checker: holds the tolerance and the number of comparisons.
        dtype: the least precise dtype of the computation.
        steps: number of steps compared.
        heads: the records of one device and of the ranks.
        later: the first difference of each later step.
        repeated: whether both trials ran on one device.
    """

    first_difference: FirstDifference | None
    recordings: StepRecordings | None
    checker: ToleranceChecker
    dtype: str
    steps: int
    heads: tuple[RankRecord, ...]
    later: tuple[FirstDifference, ...] = ()
    repeated: bool = False

    @property
    def draws_may_differ(self) -> bool:
        """Whether forward drew random numbers that may differ between one device and ranks that share samples."""
        return self.heads[0].drew and any(head.rank_shard.mesh_position for head in self.heads)


def on_one_device(plan: Plan) -> Plan:
    """Return the plan of the reference run: the batches and precision of `plan`, without any parallelism."""
    return Plan(batch=plan.batch, precision=plan.precision)


def compare_trials(reference: VerificationTrial, tested: VerificationTrial, tolerance: float | None) -> TrialComparison:
    """Compare two recorded trials up to the first difference, and the later steps for further evidence.

    Args:
        reference: the trial on one device.
        tested: the trial to compare with it.
        tolerance: largest accepted relative difference; None for the one that fits the dtype.

    Raises:
        ScriptError: the second trial recorded no step.
    """
    head = read_ranks(reference.folder, 1)[0]
    heads = read_ranks(tested.folder, tested.world_size)
    if not heads:
        raise ScriptError(
            f"on {tested.world_size} ranks the script ended without a step; make as many steps as on one device"
        )
    dtype = max((record.dtype for record in (head, *heads)), key=list(TOLERANCE).index)
    checker = ToleranceChecker(TOLERANCE[dtype] if tolerance is None else tolerance, FLOOR[dtype])
    steps = min(record.steps for record in (head, *heads))
    difference, recordings = compare_start(head, heads, checker), None
    later: list[FirstDifference] = []
    for step in range(steps if difference is None else 0):
        step_recordings = StepRecordings(
            head=head,
            heads=heads,
            reference=read_steps(reference.folder, 1, step)[0],
            ranks=read_steps(tested.folder, tested.world_size, step),
        )
        if difference is None:
            recordings, difference = step_recordings, compare_step(step_recordings, checker)
        else:
            also = compare_step(step_recordings, ToleranceChecker(checker.tolerance, checker.floor))
            later += [also] if also else []
    return TrialComparison(
        first_difference=difference,
        recordings=recordings,
        checker=checker,
        dtype=dtype,
        steps=steps,
        heads=(head, *heads),
        later=tuple(later),
    )


def _passed(request: VerificationRequest, comparison: TrialComparison, notes: tuple[str, ...]) -> Verdict:
    largest = comparison.checker.largest
    verb = "compute" if request.world_size > 1 else "computes"
    where = f" {largest.relative_difference or 0.0:.2g}, in {_at(largest)}" if largest else " 0"
    sentence = (
        f"PASS: {_ranks(request)} {verb} what one device computes, over {_steps(comparison)}; the largest relative "
        f"difference of {comparison.checker.compared} compared is{where}"
    )
    return _verdict(request, comparison, sentence, notes, passed=True)


def _refused(request: VerificationRequest, comparison: TrialComparison, notes: tuple[str, ...]) -> Verdict:
    assert comparison.first_difference is not None
    first = comparison.first_difference.difference
    case = DifferenceCase(
        first_difference=comparison.first_difference,
        recordings=comparison.recordings,
        world_size=request.world_size,
        later=comparison.later,
        repeated=comparison.repeated,
    )
    cause = diagnose(case)
    what = "two runs on one device differ" if comparison.repeated else f"{_ranks(request)} differ from one device"
    sentence = f"FAIL: {what}, first in {_at(first)}{_size(first)}. Likely cause: {cause.sentence}"
    return _verdict(request, comparison, sentence, notes, passed=False, cause=cause)


def _verdict(
    request: VerificationRequest,
    comparison: TrialComparison,
    sentence: str,
    notes: tuple[str, ...],
    *,
    passed: bool,
    cause: Cause | None = None,
) -> Verdict:
    return Verdict(
        passed=passed,
        sentence=sentence,
        script=request.script,
        world_size=request.world_size,
        steps=comparison.steps,
        arithmetic=comparison.dtype,
        tolerance=comparison.checker.tolerance,
        compared=comparison.checker.compared,
        largest=comparison.checker.largest,
        first=comparison.first_difference.difference if comparison.first_difference else None,
        cause=cause,
        notes=(*notes, *_notes(request, comparison)),
    )


def _notes(request: VerificationRequest, comparison: TrialComparison) -> list[str]:
    notes = list(dict.fromkeys(note for head in comparison.heads for note in head.notes))
    skipped = list(comparison.checker.skipped)
    if skipped:
        shown = ", ".join(skipped[:4]) + (f" and {len(skipped) - 4} more" if len(skipped) > 4 else "")
        notes.append(f"not compared, because they have no row per sample or not every rank has them: {shown}")
    if comparison.steps < request.steps:
        notes.append(f"the script ended after {comparison.steps} of {request.steps} steps")
    return notes


def _failed(request: VerificationRequest, failure: str, double: bool) -> Verdict:
    """Return the verdict for a script that runs on one device but not on N ranks."""
    return Verdict(
        passed=False,
        sentence=f"FAIL: {request.script} runs on one device, but not on {_ranks(request)}: {failure}",
        script=request.script,
        world_size=request.world_size,
        steps=0,
        arithmetic="float64" if double else "script",
        tolerance=request.tolerance or 0.0,
        cause=Cause(
            kind="fails_on_ranks",
            sentence="the script fails when several ranks run it",
            remedy="make it run first: `tutti run` shows the same error",
        ),
    )


def _at(difference: TensorDifference) -> str:
    """Describe where a difference is: tensor, module, stage, step and ranks."""
    module = f" of module {difference.module!r}" if difference.module else ""
    when = f"step {difference.step}" if difference.step else "before the first step"
    ranks = (
        f", rank{'s' if len(difference.ranks) > 1 else ''} {', '.join(map(str, difference.ranks))}"
        if difference.ranks
        else ""
    )
    return f"{difference.tensor}{module} ({difference.stage}, {when}{ranks})"


def _size(difference: TensorDifference) -> str:
    return "" if difference.relative_difference is None else f", by {difference.relative_difference:.2g} of its size"


def _ranks(request: VerificationRequest) -> str:
    return f"{request.world_size} rank{'s' if request.world_size > 1 else ''}"


def _steps(comparison: TrialComparison) -> str:
    return f"{comparison.steps} step{'s' if comparison.steps > 1 else ''} in {comparison.dtype}"


def compressed_note(codec: str, reference: Path, compressed: Path, world_size: int) -> tuple[str, bool]:
    """Describe how gradients with compressed reductions differ from one device's.

    Args:
        codec: the codec's option text.
        reference: folder of the recording on one device.
        compressed: folder of the recording on ranks.
        world_size: number of ranks.

    Returns:
        The description, and whether the ranks agree with each other.
    """
    heads = read_ranks(compressed, world_size)
    steps = min((record.steps for record in (*read_ranks(reference, 1), *heads)), default=0)
    if not steps:
        return f"with compressed reductions ({codec}) the script ended without a step", False
    momentum = parse_compression(codec).freeze_step is not None
    if momentum and steps == 1:
        return (
            f"{codec} compresses momentum from the second step on, so one step cannot show it; verify more steps",
            True,
        )
    distances, agree = [], True
    for step in range(1 if momentum else 0, steps):
        expected, ranks = read_steps(reference, 1, step)[0], read_steps(compressed, world_size, step)
        distances.append(_distance(expected, heads, ranks))
        agree = agree and _ranks_agree(heads, ranks)
    low, high = min(distances), max(distances)
    shown = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    if momentum:
        return _momentum_note(codec, shown, len(distances), agree), agree
    return (
        f"this plan compresses gradient reductions ({codec}), which one device does not have: the plan was verified "
        f"with exact reductions. With compression, over {_count(steps)}, gradients differ from one device's by {shown} "
        f"of their norm; {_agreement(agree)}. Not proved: that training reaches the same quality"
    ), agree


def _momentum_note(codec: str, shown: str, steps: int, agree: bool) -> str:
    if parse_compression(codec).method == ZERO_ONE:
        return (
            f"this plan reduces gradients in one bit where the optimizer's second moment is frozen ({codec}): it was "
            "verified with exact reductions. For this comparison the second moment was updated in the first step and "
            f"then ever more rarely, on one device too; over the {_count(steps)} after it, gradients differ from one "
            f"device's by {shown} of their norm; {_agreement(agree)}. Not compared: updates that ranks make on their "
            "own once it is frozen, and how ranks synchronise then. Not proved: that training reaches the same quality"
        )
    return (
        f"once the optimizer's second moment is frozen, this plan reduces momentum ({codec}): it was verified with "
        "exact reductions. For this comparison it was frozen after the first step, on one device too; over the "
        f"{_count(steps)} after it, the gradients that the reductions stand for differ from one device's by {shown} of "
        f"their norm; {_agreement(agree)}. Not compared: when the plan freezes it. Not proved: that training reaches "
        "the same quality"
    )


def _agreement(ranks_agree: bool) -> str:
    return "all ranks have the same bits" if ranks_agree else "and ranks DIFFER from each other"


def _count(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''}"


def _distance(reference: StepRecord, heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> float:
    """Return the relative distance of all gradients from one device's (L2 norm), the largest of any rank."""
    largest = 0.0
    for head, step in zip(heads, ranks, strict=True):
        difference = norm = 0.0
        for name, got, shard in _gradients(head, step):
            expected = reference.gradients.get(name)
            if expected is None:
                continue
            whole = expected if shard is None else sampled_part(expected, shard, got)
            difference += float((got.double() - whole.double()).square().sum())
            norm += float(whole.double().square().sum())
        largest = max(largest, math.sqrt(difference / norm) if norm else 0.0)
    return largest


def _ranks_agree(heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> bool:
    """Return whether ranks that hold the same part of a parameter have equal gradients of it."""
    seen: dict[Any, torch.Tensor] = {}
    for head, step in zip(heads, ranks, strict=True):
        for name, got, shard in _gradients(head, step):
            if not torch.equal(seen.setdefault((name, None if shard is None else shard.cuts), got), got):
                return False
    return True


def _gradients(head: RankRecord, step: StepRecord) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, gradient in step.gradients.items():
        if gradient is not None:
            yield name, gradient, head.rank_shard.tensors.get(name)
