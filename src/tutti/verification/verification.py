"""Run a verification: on one device, then on N ranks, then, if they differ, on one device again."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tutti.config.compression import FACTORS, ZERO_ONE, format_compression, parse_compression
from tutti.config.plan import Plan
from tutti.config.run_folder import RunFolder
from tutti.config.verdict import Cause, TensorDifference, Verdict
from tutti.errors import ScriptError
from tutti.verification.compare_recordings import (
    FirstDifference,
    StepRecordings,
    compare_evaluation,
    compare_start,
    compare_step,
)
from tutti.verification.compression_note import compressed_note, count_steps
from tutti.verification.diagnosis import INCOMPARABLE, DifferenceCase, diagnose
from tutti.verification.recording import Evaluation, ModelState, RankRecord, read_ranks, read_steps
from tutti.verification.tolerance import ASKED_TOLERANCE, FLOOR, TOLERANCE, ToleranceChecker

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
        epochs: end after so many epochs, at the latest after `steps`.
        own_step: run tutti's own step also on one device, which runs a plain program otherwise.
        save_at: write a checkpoint after so many steps.
        resume: checkpoint that the run resumes from; it begins with that state, not with the reference's.
    """

    world_size: int
    folder: Path
    steps: int
    double: bool
    still: bool = False
    reference: Path | None = None
    compress: str | None = None
    epochs: int | None = None
    own_step: bool = False
    save_at: int | None = None
    resume: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the ranks (see tutti.environment)."""
        variables = {
            "TUTTI_OBSERVER": "tutti.verification.recorder:recorder",
            "TUTTI_RECORD": str(self.folder),
            "TUTTI_RECORD_STEPS": str(self.steps),
            "TUTTI_RECORD_DOUBLE": "1" if self.double else "0",
            "TUTTI_RECORD_STILL": "1" if self.still else "0",
            "TUTTI_RECORD_OWN_STEP": "1" if self.own_step else "0",
            "TUTTI_RECORD_RESUMED": "1" if self.resume is not None else "0",
        }
        optional = {
            "TUTTI_COMPRESS": self.compress,
            "TUTTI_RECORD_REFERENCE": self.reference,
            "TUTTI_RECORD_EPOCHS": self.epochs,
            "TUTTI_RECORD_SAVE_AT": self.save_at,
            "TUTTI_RESUME": self.resume,
        }
        return variables | {name: str(value) for name, value in optional.items() if value is not None}

    @property
    def run_folder(self) -> Path:
        """The run folder, with the checkpoints."""
        return self.folder / "run"


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
        epochs: compare all steps of so many epochs, and the evaluations that follow them, instead of `steps`.
        resume_at: the ranks also resume from the checkpoint that they write after so many steps; `steps` follow it.
    """

    script: str
    world_size: int
    steps: int = 3
    arithmetic: Arithmetic = "auto"
    tolerance: float | None = None
    compress: str | None = None
    epochs: int | None = None
    resume_at: int | None = None

    @property
    def total_steps(self) -> int:
        """Number of steps of the undisturbed runs."""
        return _NEVER if self.epochs is not None else self.steps + (self.resume_at or 0)


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
    tested = replace(
        reference,
        world_size=request.world_size,
        folder=folder / "ranks",
        reference=reference.folder,
        compress=request.compress if _loses_nothing(request.compress) else None,
        own_step=True,
        save_at=request.resume_at,
    )
    failure = run(tested)
    if failure is not None:
        return _failed(request, failure, reference.double)
    comparison = compare_trials(reference, tested, request.tolerance)
    why = comparison.draws_may_differ if comparison.first_difference is not None else None
    if why is not None:
        reference, tested = (
            replace(trial, folder=trial.folder.with_suffix(".still"), still=True) for trial in (reference, tested)
        )
        tested = replace(tested, reference=reference.folder)
        failure = run(reference) or run(tested)
        if failure is not None:
            return _failed(request, failure, reference.double)
        comparison = compare_trials(reference, tested, request.tolerance)
        notes = (*notes, f"dropout was off, because {why}")
    if comparison.first_difference is not None:
        return _refused_after_trials(request, run, (reference, tested), comparison, notes)
    verdict = _passed(request, comparison, notes)
    for widen in (_with_resumption, _with_asked_precision, _with_compression):
        if verdict.passed:
            verdict = widen(request, run, (reference, tested), verdict)
    return verdict


Trials = tuple[VerificationTrial, VerificationTrial]
"""The trial on one device, and the one that is compared with it."""


def _refused_after_trials(
    request: VerificationRequest,
    run: Runner,
    trials: Trials,
    comparison: "TrialComparison",
    notes: tuple[str, ...],
) -> Verdict:
    """Return the verdict on a difference, after further runs on one device.

    They show whether the script is deterministic, and whether tutti's own step differs from the plain program.
    """
    reference = trials[0]
    again = replace(reference, folder=reference.folder.with_suffix(".again"), reference=reference.folder)
    repeated = None if run(again) is not None else compare_trials(reference, again, request.tolerance)
    if repeated is not None and repeated.first_difference is not None:
        return _refused(request, replace(repeated, repeated=True), notes)
    if not _is_alike_on_ranks(comparison):
        return _refused(request, comparison, notes)
    own = replace(again, folder=reference.folder.with_suffix(".own"), own_step=True)
    if request.world_size > 1 and (
        run(own) is not None or compare_trials(reference, own, request.tolerance).first_difference is None
    ):
        return _refused(request, comparison, notes)
    return _refused(request, replace(comparison, step_differs=True), notes)


_NOT_OF_STEPS = ("seed", "batch size", "initial state", "data order", "input", "evaluation")


def _is_alike_on_ranks(comparison: "TrialComparison") -> bool:
    """Return whether the first difference is on all ranks, and may be one of tutti's step on a single rank, too."""
    assert comparison.first_difference is not None
    difference, ranks = comparison.first_difference.difference, len(comparison.heads) - 1
    plain = comparison.heads[0].own_step is None
    return plain and difference.stage not in _NOT_OF_STEPS and len(difference.ranks) in (0, ranks)


def _with_resumption(request: VerificationRequest, run: Runner, trials: Trials, passed: Verdict) -> Verdict:
    """Resume the ranks from the checkpoint that they wrote, and add the outcome to the verdict."""
    if request.resume_at is None:
        return passed
    reference, tested = trials
    folders = sorted(RunFolder(tested.run_folder).checkpoints.glob("step-*"))
    saved = next((int(path.name[5:]) for path in folders if int(path.name[5:]) >= request.resume_at), passed.steps)
    if saved >= passed.steps:
        raise ScriptError(
            f"{request.script} made {count_steps(passed.steps)}, of which none follows a checkpoint of step "
            f"{request.resume_at} or later; give a smaller --resume-at, or let the script train longer"
        )
    checkpoint = RunFolder(tested.run_folder).checkpoints / f"step-{saved:08d}"
    resumed = replace(
        tested,
        folder=tested.folder.with_suffix(".resumed"),
        save_at=None,
        resume=checkpoint,
        steps=request.steps,
        epochs=None,
    )
    failure = run(resumed)
    after = f"resumed from the checkpoint of step {saved}"
    if failure is not None:
        return _failed(request, f"{after}: {failure}", reference.double)
    comparison = compare_trials(reference, resumed, request.tolerance)
    if comparison.first_difference is not None:
        return _prefixed(_refused(request, comparison, passed.notes), f"{after},")
    sentence = f"{passed.sentence}; {after}, they compute the same over {count_steps(comparison.steps)}"
    return replace(passed, sentence=sentence, compared=passed.compared + comparison.checker.compared)


def _with_asked_precision(request: VerificationRequest, run: Runner, trials: Trials, passed: Verdict) -> Verdict:
    """Compare in the precision that script and plan ask for, where that is less than float32, after float64."""
    reference, tested = trials
    asked = read_ranks(reference.folder, 1)[0].precision
    if not reference.double or request.arithmetic == "double" or asked in ("float32", "float64"):
        return passed
    one = replace(reference, folder=reference.folder.with_suffix(".asked"), double=False, reference=None)
    ranks = replace(
        tested, folder=tested.folder.with_suffix(".asked"), double=False, reference=one.folder, save_at=None
    )
    failure = run(one)
    if failure is not None:
        raise ScriptError(f"{request.script} fails on one device in {asked}, which it asks for: {failure}")
    failure = run(ranks)
    if failure is not None:
        return _failed(request, failure, double=False)
    comparison = compare_trials(one, ranks, ASKED_TOLERANCE.get(asked))
    if comparison.first_difference is not None:
        refused = _refused(request, comparison, passed.notes)
        return _prefixed(refused, f"in float64 they agree, but in {asked}, which is asked for,")
    largest = comparison.checker.largest
    by = f"{largest.relative_difference or 0.0:.2g}" if largest else "0"
    own, tolerance = comparison.heads[0].own_step, comparison.checker.tolerance
    sentence = f"{passed.sentence}; in {asked}, which is asked for, the largest is {by}, within {tolerance:g}" + (
        f" (there one device ran tutti's own step, because {own})" if own else ""
    )
    return replace(passed, sentence=sentence)


def _with_compression(request: VerificationRequest, run: Runner, trials: Trials, passed: Verdict) -> Verdict:
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
    trial = VerificationTrial(
        world_size=1, folder=folder / "one", steps=request.total_steps, double=double, epochs=request.epochs
    )
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
        step_differs: whether tutti's own step differs from the plain program on one device, too.
        evaluations: number of evaluations compared.
        double: whether float64 was asked for.
    """

    first_difference: FirstDifference | None
    recordings: StepRecordings | None
    checker: ToleranceChecker
    dtype: str
    steps: int
    heads: tuple[RankRecord, ...]
    later: tuple[FirstDifference, ...] = ()
    repeated: bool = False
    step_differs: bool = False
    evaluations: int = 0
    double: bool = False

    @property
    def draws_may_differ(self) -> str | None:
        """Why random numbers of forward may differ between one device and ranks; None if they are matched or none."""
        first = self.first_difference
        if not self.heads[0].drew:
            return None
        if any(head.rank_shard.mesh_position for head in self.heads):
            return "ranks that share samples draw different masks than one device"
        steps = self.recordings.ranks if self.recordings is not None else ()
        if any(step.collated is not None and step.collated.draws for step in steps):
            return None  # batches differ anyway
        unmatched = any(microbatch.unaligned for step in steps for microbatch in step.microbatches)
        if first is not None and first.difference.stage in _DRAWN and (first.ragged or unmatched):
            return "its masks cannot be matched with one device's where rows are not samples"
        return None


_DRAWN = ("forward", "loss", "gradient")
"""Stages in which random numbers of forward have an effect first."""


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
    offset = _resumed_at(reference, tested, head) if tested.resume is not None else 0
    head = replace(head, losses=head.losses[offset:])
    records = min(record.steps for record in (head, *heads))
    difference, recordings, updates = compare_start(head, heads, checker), None, 0
    later: list[FirstDifference] = []
    for number in range(records if difference is None else 0):
        step_recordings = StepRecordings(
            head=head,
            heads=heads,
            reference=read_steps(reference.folder, 1, offset + number)[0],
            ranks=read_steps(tested.folder, tested.world_size, number),
        )
        if tested.resume is not None and number == 0:  # what the script did between the two is in the checkpoint
            step_recordings = replace(
                step_recordings, reference=replace(step_recordings.reference, between=ModelState())
            )
        updates += step_recordings.reference.updated
        if difference is None:
            recordings, difference = step_recordings, compare_step(step_recordings, checker)
        else:
            also = compare_step(step_recordings, ToleranceChecker(checker.tolerance, checker.floor))
            later += [also] if also else []
    evaluations = _evaluations(reference, tested, (head, *heads), offset) if difference is None else []
    for evaluation in evaluations:
        difference = difference or compare_evaluation(*evaluation, checker)
    return TrialComparison(
        first_difference=difference,
        recordings=recordings,
        checker=checker,
        dtype=dtype,
        steps=updates,
        heads=(head, *heads),
        later=tuple(later),
        evaluations=len(evaluations),
        double=reference.double,
    )


def _resumed_at(reference: VerificationTrial, tested: VerificationTrial, head: RankRecord) -> int:
    """Return the number of one device's record of the step with which a resumed run begins."""
    step = read_steps(tested.folder, 1, 0)[0].step
    for number in range(head.steps):
        if read_steps(reference.folder, 1, number)[0].step == step:
            return number
    raise ScriptError(
        f"the resumed run begins with step {step + 1}, which one device did not reach; if the script resumes from a "
        "checkpoint of its own, verify it without"
    )


def _evaluations(
    reference: VerificationTrial, tested: VerificationTrial, heads: tuple[RankRecord, ...], offset: int
) -> list[tuple[Evaluation, tuple[Evaluation | None, ...]]]:
    """Pair one device's evaluations with those of every rank; of a resumed run only those after its first step."""
    begin = read_steps(reference.folder, 1, offset)[0].step if tested.resume is not None else -1
    of_ranks = [[result for result in head.evaluations if result.step > begin] for head in heads]
    if tested.resume is not None:  # it ends earlier
        of_ranks[0] = of_ranks[0][: min(map(len, of_ranks))]
    return [
        (expected, tuple(results[number] if number < len(results) else None for results in of_ranks[1:]))
        for number, expected in enumerate(of_ranks[0])
    ]


def _passed(request: VerificationRequest, comparison: TrialComparison, notes: tuple[str, ...]) -> Verdict:
    largest = comparison.checker.largest
    verb = "compute" if request.world_size > 1 else "computes"
    where = f" {largest.relative_difference or 0.0:.2g}, in {_at(largest)}" if largest else " 0"
    notes = (*notes, _not_seen(request, comparison))
    sentence = (
        f"PASS: {_ranks(request)} {verb} what one device computes, over {_steps(comparison)}; the largest relative "
        f"difference of {comparison.checker.compared} compared is{where}; one device ran {_program(comparison)}"
    )
    return _verdict(request, comparison, sentence, notes, passed=True)


def _program(comparison: TrialComparison) -> str:
    head = comparison.heads[0]
    if head.own_step is not None:
        return f"tutti's own step, because {head.own_step}"
    counts = ", but for the weights of batches whose loss is a mean over something else than samples"
    return f"a plain loop, with none of tutti's step{counts if head.used_counts else ''}"


def _not_seen(request: VerificationRequest, comparison: TrialComparison) -> str:
    """Return what a verification that passes has not seen, and the options that show it."""
    unseen = []
    if not comparison.evaluations:
        unseen.append(
            "evaluation (none followed)" if request.epochs is not None else "evaluation (--epochs 1: of one epoch)"
        )
    if request.epochs is None:
        unseen.append(f"steps after {comparison.steps} (--steps), further epochs (--epochs)")
    if request.resume_at is None:
        unseen.append("resuming from a checkpoint (--resume-at)")
    if comparison.double and comparison.heads[0].precision == "float32":
        unseen.append("rounding in float32 (--arithmetic script)")
    count = comparison.evaluations
    compared = f"results of {count} evaluation{'s' if count > 1 else ''} compared. " if count else ""
    return f"{compared}not seen: {'; '.join(unseen)}" if unseen else compared or "nothing was left out"


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
    cause = _step_cause(first) if comparison.step_differs else diagnose(case)
    notes = (*notes, f"one device ran {_program(comparison)}")
    what = "two runs on one device differ" if comparison.repeated else f"{_ranks(request)} differ from one device"
    at = f"first in {_at(first)}{_size(first)}"
    if cause.kind in INCOMPARABLE:
        sentence = f"NOT COMPARABLE: {what}, {at}, but that need not be a fault: {cause.sentence}"
        verdict = _verdict(request, comparison, sentence, notes, passed=False, cause=cause)
        return replace(verdict, comparable=False)
    sentence = f"FAIL: {what}, {at}. Likely cause: {cause.sentence}"
    return _verdict(request, comparison, sentence, notes, passed=False, cause=cause)


def _prefixed(verdict: Verdict, where: str) -> Verdict:
    """Return a verdict whose sentence says, after its first word, under which condition it holds."""
    word, _, rest = verdict.sentence.partition(":")
    return replace(verdict, sentence=f"{word}: {where}{rest}")


def _step_cause(first: TensorDifference) -> Cause:
    return Cause(
        kind="step_differs",
        sentence=f"on one device, too, tutti's step differs from a plain loop, in {first.tensor}, so it is not the "
        "number of ranks: a fault of tutti's step, or the script changes what lies between its calls "
        "(gradients, learning rates, accumulation by hand) in another way than docs/updates.md says",
        remedy="compare the script's calls with docs/updates.md; if they agree, report it with the script",
    )


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
    if comparison.double and comparison.dtype != "float64":
        notes.append(
            f"the tolerance is that of {comparison.dtype} ({comparison.checker.tolerance:g}), because model or loss "
            f"convert values to {comparison.dtype} themselves, although the script ran in float64"
        )
    skipped = list(comparison.checker.skipped)
    if skipped:
        shown = ", ".join(skipped[:4]) + (f" and {len(skipped) - 4} more" if len(skipped) > 4 else "")
        notes.append(f"not compared, because they have no row per sample or not every rank has them: {shown}")
    grouped = list(comparison.checker.grouped)
    if grouped:
        shown = ", ".join(grouped[:4]) + (f" and {len(grouped) - 4} more" if len(grouped) > 4 else "")
        notes.append(
            f"not compared, because they depend on which samples are collated together: {shown}; the samples before "
            "collate_fn are equal, and so is all that was compared of what is computed from them"
            if comparison.first_difference is None
            else f"not compared, because they depend on which samples are collated together: {shown}"
        )
    if comparison.steps < request.steps and request.epochs is None:
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
            remedy="do what the error says; `tutti run` shows it too",
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
