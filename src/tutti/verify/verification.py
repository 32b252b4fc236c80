"""The course of a verification: one device, then N ranks, then, if they differ, one device again."""

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
"""double: float64 throughout; script: the script's own dtypes; auto: double where the script can, else its own."""


_NEVER = 1_000_000
"""More updates than a verified script makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationTrial:
    """One recorded run of the script.

    Attributes:
        folder: new, for the recording and the run.
        still: without dropout.
        reference: the recording of one device to follow.
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
        found = {
            "TUTTI_OBSERVER": "tutti.verify.recorder:recorder",
            "TUTTI_RECORD": str(self.folder),
            "TUTTI_RECORD_STEPS": str(self.steps),
            "TUTTI_RECORD_DOUBLE": "1" if self.double else "0",
            "TUTTI_RECORD_STILL": "1" if self.still else "0",
        }
        if self.compress is not None:
            found["TUTTI_COMPRESS"] = self.compress
        return found if self.reference is None else {**found, "TUTTI_RECORD_REFERENCE": str(self.reference)}


Runner = Callable[[VerificationTrial], str | None]
"""Runs the script once. Returns None, or a sentence with the traceback that says how it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """What is to be verified.

    Attributes:
        tolerance: None for the one that fits the dtype of the computation.
        compress: codec of gradient reductions, which one device does not have.
    """

    script: str
    world_size: int
    steps: int = 3
    arithmetic: Arithmetic = "auto"
    tolerance: float | None = None
    compress: str | None = None


def verify(question: VerificationRequest, run: Runner, folder: Path) -> Verdict:
    """Run and compare.

    Args:
        question: what is to be verified.
        run: runs the script once.
        folder: for the recordings; the caller removes it.

    Raises:
        ScriptError: the script fails on one device, or makes no step there.
    """
    one, notes = _one_device(question, run, folder)
    exact = question.compress if _loses_nothing(question.compress) else None
    many = replace(one, world_size=question.world_size, folder=folder / "ranks", reference=one.folder, compress=exact)
    failure = run(many)
    if failure is not None:
        return _failed(question, failure, one.double)
    comparison = compare_trials(one, many, question.tolerance)
    if comparison.found is not None and comparison.draws_of_its_own:
        one, many = (replace(trial, folder=trial.folder.with_suffix(".still"), still=True) for trial in (one, many))
        many = replace(many, reference=one.folder)
        failure = run(one) or run(many)
        if failure is not None:
            return _failed(question, failure, one.double)
        comparison = compare_trials(one, many, question.tolerance)
        notes = (*notes, "dropout was off: ranks that share samples draw other masks than one device does")
    if comparison.found is None:
        return _with_compression(question, run, (one, many), _passed(question, comparison, notes))
    again = replace(one, folder=folder / "again", reference=one.folder)
    repeated = None if run(again) is not None else compare_trials(one, again, question.tolerance)
    if repeated is not None and repeated.found is not None:
        return _refused(question, replace(repeated, repeated=True), notes)
    return _refused(question, comparison, notes)


def _with_compression(
    question: VerificationRequest, run: Runner, trials: tuple[VerificationTrial, VerificationTrial], passed: Verdict
) -> Verdict:
    """The verdict on the plan with exact reductions, and what can be said of it with compressed ones."""
    one, many = trials
    if question.compress is None or question.world_size == 1 or _loses_nothing(question.compress):
        return passed
    beside = _frozen_reference(question.compress, one)
    trial = replace(many, folder=many.folder.with_suffix(".compressed"), compress=question.compress)
    if beside is not None:
        trial = replace(trial, compress=beside.compress, reference=beside.folder)
    failure = (None if beside is None else run(beside)) or run(trial)
    if failure is not None:
        return _failed(question, failure, one.double)
    if beside is not None:
        one = beside
    note, alike = compressed_note(question.compress, one.folder, trial.folder, question.world_size)
    sentence = passed.sentence.replace("one device computes,", "one device computes with exact reductions,", 1)
    if not alike:
        sentence = f"FAIL: with compressed reductions ({question.compress}), ranks differ from each other"
    return replace(passed, passed=alike, sentence=sentence, notes=(*passed.notes, note))


def _loses_nothing(compress: str | None) -> bool:
    """Whether the codec is lossless, so that its reductions are compared like any others."""
    return compress is not None and parse_compression(compress).method == FACTORS


def _frozen_reference(compress: str, one: VerificationTrial) -> VerificationTrial | None:
    """A run of one device whose second moment is frozen after the first update: momentum compression's reference."""
    how = parse_compression(compress)
    if how.freeze_step is None:
        return None
    if how.method == ZERO_ONE:  # sums go on, and the second moment learns in the first step and then rarely
        words = format_compression(replace(how, freeze_step=_NEVER, kappa=1))
    else:
        words = format_compression(replace(how, freeze_step=1))
    return replace(one, folder=one.folder.with_suffix(".frozen"), compress=words)


def _one_device(question: VerificationRequest, run: Runner, folder: Path) -> tuple[VerificationTrial, tuple[str, ...]]:
    """The reference: in float64 where asked for and possible."""
    double = question.arithmetic != "script"
    trial = VerificationTrial(world_size=1, folder=folder / "one", steps=question.steps, double=double)
    failure = run(trial)
    notes: tuple[str, ...] = ()
    if failure is not None and question.arithmetic == "auto":
        trial = replace(trial, folder=folder / "one-own", double=False)
        in_double, failure = failure, run(trial)
        last = in_double.strip().splitlines()[-1]
        notes = (f"computed in the script's own dtypes, because in float64 it fails ({last})",)
    if failure is not None:
        raise ScriptError(f"{question.script} fails on one device, so there is nothing to compare with: {failure}")
    if not read_ranks(trial.folder, 1):
        raise ScriptError(
            f"{question.script} ended without a step of a tutti.Job; make one, and train with job.step(batch)"
        )
    return trial, notes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialComparison:
    """The outcome of comparing two trials. `sides` are the recordings of the step of the difference, if it is in a
    step.
    """

    found: FirstDifference | None
    sides: StepRecordings | None
    checker: ToleranceChecker
    dtype: str
    steps: int
    heads: tuple[RankRecord, ...]
    later: tuple[FirstDifference, ...] = ()
    repeated: bool = False

    @property
    def draws_of_its_own(self) -> bool:
        """Whether random numbers were drawn of which ranks that share samples may draw others than one device."""
        return self.heads[0].drew and any(head.holding.place for head in self.heads)


def on_one_device(plan: Plan) -> Plan:
    """What one device runs beside `plan`: the same batches and precision, without any parallelism."""
    return Plan(batch=plan.batch, precision=plan.precision)


def compare_trials(one: VerificationTrial, many: VerificationTrial, tolerance: float | None) -> TrialComparison:
    """Compare two recorded trials, up to the first difference."""
    head = read_ranks(one.folder, 1)[0]
    heads = read_ranks(many.folder, many.world_size)
    if not heads:
        raise ScriptError(
            f"on {many.world_size} ranks the script ended without a step; take as many steps as on one device"
        )
    dtype = max((record.dtype for record in (head, *heads)), key=list(TOLERANCE).index)
    checker = ToleranceChecker(TOLERANCE[dtype] if tolerance is None else tolerance, FLOOR[dtype])
    steps = min(record.steps for record in (head, *heads))
    found, sides = compare_start(head, heads, checker), None
    later: list[FirstDifference] = []
    for step in range(steps if found is None else 0):
        here = StepRecordings(
            head=head,
            heads=heads,
            one=read_steps(one.folder, 1, step)[0],
            ranks=read_steps(many.folder, many.world_size, step),
        )
        if found is None:
            sides, found = here, compare_step(here, checker)
        else:
            also = compare_step(here, ToleranceChecker(checker.tolerance, checker.floor))
            later += [also] if also else []
    return TrialComparison(
        found=found,
        sides=sides,
        checker=checker,
        dtype=dtype,
        steps=steps,
        heads=(head, *heads),
        later=tuple(later),
    )


def _passed(question: VerificationRequest, comparison: TrialComparison, notes: tuple[str, ...]) -> Verdict:
    largest = comparison.checker.largest
    verb = "compute" if question.world_size > 1 else "computes"
    where = f" {largest.relative_difference or 0.0:.2g}, in {_at(largest)}" if largest else " 0"
    sentence = (
        f"PASS: {_ranks(question)} {verb} what one device computes, over {_steps(comparison)}; the largest relative "
        f"difference of {comparison.checker.compared} compared is{where}"
    )
    return _verdict(question, comparison, sentence, notes, passed=True)


def _refused(question: VerificationRequest, comparison: TrialComparison, notes: tuple[str, ...]) -> Verdict:
    assert comparison.found is not None
    first = comparison.found.first
    case = DifferenceCase(
        found=comparison.found,
        sides=comparison.sides,
        world_size=question.world_size,
        later=comparison.later,
        repeated=comparison.repeated,
    )
    cause = diagnose(case)
    what = "one device does not repeat itself" if comparison.repeated else f"{_ranks(question)} differ from one device"
    sentence = f"FAIL: {what}, first in {_at(first)}{_size(first)}. Likely cause: {cause.sentence}"
    return _verdict(question, comparison, sentence, notes, passed=False, cause=cause)


def _verdict(
    question: VerificationRequest,
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
        script=question.script,
        world_size=question.world_size,
        steps=comparison.steps,
        arithmetic=comparison.dtype,
        tolerance=comparison.checker.tolerance,
        compared=comparison.checker.compared,
        largest=comparison.checker.largest,
        first=comparison.found.first if comparison.found else None,
        cause=cause,
        notes=(*notes, *_notes(question, comparison)),
    )


def _notes(question: VerificationRequest, comparison: TrialComparison) -> list[str]:
    notes = list(dict.fromkeys(note for head in comparison.heads for note in head.notes))
    skipped = list(comparison.checker.skipped)
    if skipped:
        shown = ", ".join(skipped[:4]) + (f" and {len(skipped) - 4} more" if len(skipped) > 4 else "")
        notes.append(f"not compared, because they hold no row for each sample or not every rank has them: {shown}")
    if comparison.steps < question.steps:
        notes.append(f"the script ended after {comparison.steps} of {question.steps} steps")
    return notes


def _failed(question: VerificationRequest, failure: str, double: bool) -> Verdict:
    """The verdict where the script runs on one device and not on N ranks."""
    return Verdict(
        passed=False,
        sentence=f"FAIL: {question.script} runs on one device, but not on {_ranks(question)}: {failure}",
        script=question.script,
        world_size=question.world_size,
        steps=0,
        arithmetic="float64" if double else "script",
        tolerance=question.tolerance or 0.0,
        cause=Cause(
            kind="fails_on_ranks",
            sentence="the script fails when several ranks run it",
            remedy="make it run first: `tutti run` shows the same error",
        ),
    )


def _at(one: TensorDifference) -> str:
    """A difference as text: what, of which module, when, on which ranks."""
    module = f" of module {one.module!r}" if one.module else ""
    when = f"step {one.step}" if one.step else "before the first step"
    ranks = f", rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, one.ranks))}" if one.ranks else ""
    return f"{one.tensor}{module} ({one.stage}, {when}{ranks})"


def _size(one: TensorDifference) -> str:
    return "" if one.relative_difference is None else f", by {one.relative_difference:.2g} of its size"


def _ranks(question: VerificationRequest) -> str:
    return f"{question.world_size} rank{'s' if question.world_size > 1 else ''}"


def _steps(comparison: TrialComparison) -> str:
    return f"{comparison.steps} step{'s' if comparison.steps > 1 else ''} in {comparison.dtype}"


def compressed_note(words: str, one: Path, compressed: Path, world_size: int) -> tuple[str, bool]:
    """Describe recordings on one device and on ranks with compressed reductions.

    Returns:
        The description, and whether the ranks agree with each other.
    """
    heads = read_ranks(compressed, world_size)
    steps = min((record.steps for record in (*read_ranks(one, 1), *heads)), default=0)
    if not steps:
        return f"with compressed reductions ({words}) the script ended without a step", False
    momentum = parse_compression(words).freeze_step is not None
    if momentum and steps == 1:
        return (
            f"{words} compresses momentum from the second step on, so one step shows nothing; verify more steps",
            True,
        )
    distances, alike = [], True
    for step in range(1 if momentum else 0, steps):
        expected, ranks = read_steps(one, 1, step)[0], read_steps(compressed, world_size, step)
        distances.append(_distance(expected, heads, ranks))
        alike = alike and _alike(heads, ranks)
    low, high = min(distances), max(distances)
    shown = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    if momentum:
        return _momentum_note(words, shown, len(distances), alike), alike
    return (
        f"this plan compresses gradient reductions ({words}), which one device does not: the plan was verified with "
        f"exact reductions. Compressed, over {_count(steps)}, gradients differ from one device's by {shown} of their "
        f"norm; {_agreement(alike)}. Not proved: that training reaches the same quality"
    ), alike


def _momentum_note(words: str, shown: str, steps: int, alike: bool) -> str:
    if parse_compression(words).method == ZERO_ONE:
        return (
            f"this plan reduces gradients in one bit where the optimizer's second moment is frozen ({words}): it was "
            "verified with exact reductions. For this comparison the second moment was updated in the first step and "
            f"then ever more rarely, on one device too; over the {_count(steps)} after it, gradients differ from one "
            f"device's by {shown} of their norm; {_agreement(alike)}. Not compared: updates that ranks make on their "
            "own once it is frozen, and how they agree then. Not proved: that training reaches the same quality"
        )
    return (
        f"once the optimizer's second moment is frozen, this plan reduces momentum ({words}): it was verified with "
        "exact reductions. For this comparison it was frozen after the first step, on one device too; over the "
        f"{_count(steps)} after it, the gradients that the reductions stand for differ from one device's by {shown} of "
        f"their norm; {_agreement(alike)}. Not compared: when the plan freezes it. Not proved: that training reaches "
        "the same quality"
    )


def _agreement(alike: bool) -> str:
    return "all ranks have the same bits" if alike else "and ranks DIFFER from each other"


def _count(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''}"


def _distance(one: StepRecord, heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> float:
    """||g - g of one device|| / ||g of one device|| over all gradients; the largest of any rank."""
    largest = 0.0
    for head, step in zip(heads, ranks, strict=True):
        difference = norm = 0.0
        for name, got, held in _gradients(head, step):
            expected = one.gradients.get(name)
            if expected is None:
                continue
            whole = expected if held is None else sampled_part(expected, held, got)
            difference += float((got.double() - whole.double()).square().sum())
            norm += float(whole.double().square().sum())
        largest = max(largest, math.sqrt(difference / norm) if norm else 0.0)
    return largest


def _alike(heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> bool:
    """Whether ranks that hold the same part of a parameter have the same gradient of it."""
    seen: dict[Any, torch.Tensor] = {}
    for head, step in zip(heads, ranks, strict=True):
        for name, got, held in _gradients(head, step):
            if not torch.equal(seen.setdefault((name, None if held is None else held.cuts), got), got):
                return False
    return True


def _gradients(head: RankRecord, step: StepRecord) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, gradient in step.gradients.items():
        if gradient is not None:
            yield name, gradient, head.holding.tensors.get(name)
