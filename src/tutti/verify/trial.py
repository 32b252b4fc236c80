"""The course of a verification: one device, then N ranks, then, where they differ, one device again."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tutti.config.compression import FACTORS, ZERO_ONE, compression_in_words, parse_compression
from tutti.config.plan import Plan
from tutti.config.verdict import Cause, TensorDifference, Verdict
from tutti.errors import ScriptError
from tutti.verify.causes import diagnose
from tutti.verify.compare import Found, Sides, compare_start, compare_step
from tutti.verify.compressed import compressed_note
from tutti.verify.evidence import Case
from tutti.verify.gauge import Gauge
from tutti.verify.measure import FLOOR, TOLERANCE
from tutti.verify.recording import RankRecord, read_ranks, read_steps

Arithmetic = Literal["auto", "double", "script"]
"""double: float64 throughout; script: the script's own dtypes; auto: double where the script can, else its own."""


_NEVER = 1_000_000
"""Updates that no script that is verified makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of the script to be recorded. `folder`: new, for the recording and the run; `reference`: the recording
    of one device to follow; `still`: without dropout; `compress`: how sums of gradients are written."""

    world_size: int
    folder: Path
    steps: int
    double: bool
    still: bool = False
    reference: Path | None = None
    compress: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks find in their environment (see tutti.environment)."""
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


Runner = Callable[[Trial], str | None]
"""Runs the script once; returns None, or a sentence (with the traceback) that says how it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be verified. `tolerance`: None for the one that fits the dtype computed in; `compress`: how sums of
    gradients are written, which one device does not do.
    """

    script: str
    world_size: int
    steps: int = 3
    arithmetic: Arithmetic = "auto"
    tolerance: float | None = None
    compress: str | None = None


def verify(question: Question, run: Runner, folder: Path) -> Verdict:
    """Run and compare. `folder`: for the recordings, which the caller removes.

    Raises ScriptError when the script fails on one device, or makes no step there.
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


def _with_compression(question: Question, run: Runner, trials: tuple[Trial, Trial], passed: Verdict) -> Verdict:
    """The verdict on the plan with exact sums, and what there is to say of it with them compressed."""
    one, many = trials
    if question.compress is None or question.world_size == 1 or _loses_nothing(question.compress):
        return passed
    beside = _standing(question.compress, one)
    trial = replace(many, folder=many.folder.with_suffix(".compressed"), compress=question.compress)
    if beside is not None:
        trial = replace(trial, compress=beside.compress, reference=beside.folder)
    failure = (None if beside is None else run(beside)) or run(trial)
    if failure is not None:
        return _failed(question, failure, one.double)
    if beside is not None:
        one = beside
    note, alike = compressed_note(question.compress, one.folder, trial.folder, question.world_size)
    sentence = passed.sentence.replace("one device computes,", "one device computes where sums are exact,", 1)
    if not alike:
        sentence = f"FAIL: with sums compressed ({question.compress}), ranks differ from each other"
    return replace(passed, passed=alike, sentence=sentence, notes=(*passed.notes, note))


def _loses_nothing(compress: str | None) -> bool:
    """Whether sums are one device's all the same, and are compared with it like any others."""
    return compress is not None and parse_compression(compress).method == FACTORS


def _standing(compress: str, one: Trial) -> Trial | None:
    """One device whose second moment stands after the first update, beside which sums of momenta can be seen."""
    how = parse_compression(compress)
    if how.freeze_step is None:
        return None
    if how.method == ZERO_ONE:  # sums go on, and the second moment learns in the first step and then rarely
        words = compression_in_words(replace(how, freeze_step=_NEVER, kappa=1))
    else:
        words = compression_in_words(replace(how, freeze_step=1))
    return replace(one, folder=one.folder.with_suffix(".standing"), compress=words)


def _one_device(question: Question, run: Runner, folder: Path) -> tuple[Trial, tuple[str, ...]]:
    """The reference: in float64 where asked for and possible."""
    double = question.arithmetic != "script"
    trial = Trial(world_size=1, folder=folder / "one", steps=question.steps, double=double)
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
class Comparison:
    """The outcome of comparing two trials. `sides`: the step of the difference, where it is one of a step."""

    found: Found | None
    sides: Sides | None
    gauge: Gauge
    dtype: str
    steps: int
    heads: tuple[RankRecord, ...]
    later: tuple[Found, ...] = ()
    repeated: bool = False

    @property
    def draws_of_its_own(self) -> bool:
        """Whether random numbers were drawn, of which ranks that share samples may draw others than one device."""
        return self.heads[0].drew and any(head.holding.place for head in self.heads)


def on_one_device(plan: Plan) -> Plan:
    """What one device runs beside `plan`: the same batches and precision, and nothing of how they are spread."""
    return Plan(batch=plan.batch, precision=plan.precision)


def compare_trials(one: Trial, many: Trial, tolerance: float | None) -> Comparison:
    """Compare two recorded trials, up to the first difference."""
    head = read_ranks(one.folder, 1)[0]
    heads = read_ranks(many.folder, many.world_size)
    if not heads:
        raise ScriptError(
            f"on {many.world_size} ranks the script ended without a step; take as many steps as on one device"
        )
    dtype = max((record.dtype for record in (head, *heads)), key=list(TOLERANCE).index)
    gauge = Gauge(TOLERANCE[dtype] if tolerance is None else tolerance, FLOOR[dtype])
    steps = min(record.steps for record in (head, *heads))
    found, sides = compare_start(head, heads, gauge), None
    later: list[Found] = []
    for step in range(steps if found is None else 0):
        here = Sides(
            head=head,
            heads=heads,
            one=read_steps(one.folder, 1, step)[0],
            ranks=read_steps(many.folder, many.world_size, step),
        )
        if found is None:
            sides, found = here, compare_step(here, gauge)
        else:
            also = compare_step(here, Gauge(gauge.tolerance, gauge.floor))
            later += [also] if also else []
    return Comparison(
        found=found,
        sides=sides,
        gauge=gauge,
        dtype=dtype,
        steps=steps,
        heads=(head, *heads),
        later=tuple(later),
    )


def _passed(question: Question, comparison: Comparison, notes: tuple[str, ...]) -> Verdict:
    largest = comparison.gauge.largest
    verb = "compute" if question.world_size > 1 else "computes"
    where = f" {largest.relative_difference or 0.0:.2g}, in {_at(largest)}" if largest else " 0"
    sentence = (
        f"PASS: {_ranks(question)} {verb} what one device computes, over {_steps(comparison)}; the largest relative "
        f"difference of {comparison.gauge.compared} compared is{where}"
    )
    return _verdict(question, comparison, sentence, notes, passed=True)


def _refused(question: Question, comparison: Comparison, notes: tuple[str, ...]) -> Verdict:
    assert comparison.found is not None
    first = comparison.found.first
    case = Case(
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
    question: Question,
    comparison: Comparison,
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
        tolerance=comparison.gauge.tolerance,
        compared=comparison.gauge.compared,
        largest=comparison.gauge.largest,
        first=comparison.found.first if comparison.found else None,
        cause=cause,
        notes=(*notes, *_notes(question, comparison)),
    )


def _notes(question: Question, comparison: Comparison) -> list[str]:
    notes = list(dict.fromkeys(note for head in comparison.heads for note in head.notes))
    skipped = list(comparison.gauge.skipped)
    if skipped:
        shown = ", ".join(skipped[:4]) + (f" and {len(skipped) - 4} more" if len(skipped) > 4 else "")
        notes.append(f"not compared, because they hold no row for each sample or not every rank has them: {shown}")
    if comparison.steps < question.steps:
        notes.append(f"the script ended after {comparison.steps} of {question.steps} steps")
    return notes


def _failed(question: Question, failure: str, double: bool) -> Verdict:
    """The script runs on one device and not on N ranks."""
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
    """A difference in words: what, of which module, when, on which ranks."""
    module = f" of module {one.module!r}" if one.module else ""
    when = f"step {one.step}" if one.step else "before the first step"
    ranks = f", rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, one.ranks))}" if one.ranks else ""
    return f"{one.tensor}{module} ({one.stage}, {when}{ranks})"


def _size(one: TensorDifference) -> str:
    return "" if one.relative_difference is None else f", by {one.relative_difference:.2g} of its size"


def _ranks(question: Question) -> str:
    return f"{question.world_size} rank{'s' if question.world_size > 1 else ''}"


def _steps(comparison: Comparison) -> str:
    return f"{comparison.steps} step{'s' if comparison.steps > 1 else ''} in {comparison.dtype}"
