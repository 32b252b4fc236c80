"""Validate predictions against published rows: fit to some rows of a family and score the others."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.config.cluster import ClusterSpec
from tutti.validation.cluster_fit import UNFITTED, Constants, Fit, Sample, apply_fit, fit_constants
from tutti.validation.published_rows import PublishedRow, Uncosted
from tutti.validation.scoring import Case, Errors, Scored, Setting, case_of, errors, misses, scored

ENOUGH = 16
"""Minimum rows of one kind of machine for a fit of its constants; with fewer, only a factor on the time is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit:
    """The fit for one kind of machine in a family.

    Attributes:
        borrowed: family whose device constants the fit started from; empty if none.
    """

    machine: str
    fit: Fit
    borrowed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The errors of a family's rows in one setting.

    Attributes:
        calibration: errors of the rows that were fitted to, kept separate from `test`.
        misses: the aims that the test rows miss, with the likely reason.
    """

    setting: Setting
    calibration: Errors | None
    test: Errors | None
    misses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """The result of one family.

    Attributes:
        rows: number of rows of the family.
        uncosted: number of rows that could not be costed, by reason.
        worst: the three test rows with the largest errors.
    """

    family: str
    rows: int
    scores: tuple[Score, ...]
    fits: tuple[MachineFit, ...]
    uncosted: dict[str, int]
    worst: tuple[Scored, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of a validation.

    Attributes:
        families: in the order of the rows.
        scored: every test row.
    """

    families: tuple[FamilyResult, ...]
    scored: tuple[Scored, ...]
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationShare:
    """How a family is calibrated.

    Attributes:
        count: number of calibration rows.
        borrow: a family fitted before, whose device constants the fit starts from.
    """

    count: int = 0
    borrow: str = ""


def validate(
    rows: Sequence[PublishedRow],
    fit: Mapping[str, CalibrationShare],
    progress: Callable[[str], None] = lambda family: None,
) -> Validation:
    """Score the predictions of `rows`, family by family.

    The hash of a row's row_id alone decides which rows calibrate, so that nobody can choose them. Families without an
    entry in `fit` are predicted from data sheets.

    Args:
        rows: the published rows.
        fit: how each family is calibrated; families are fitted in this order, before the others.
        progress: called with the name of each family.
    """
    families: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    known: dict[tuple[str, str], Constants] = {}
    results: dict[str, tuple[FamilyResult, list[Scored]]] = {}
    for family in [*(name for name in fit if name in families), *(name for name in families if name not in fit)]:
        progress(family)
        results[family] = _family(family, families[family], fit.get(family, CalibrationShare()), known)
    ordered = [results[family] for family in families]
    return Validation(
        families=tuple(result for result, _ in ordered),
        scored=tuple(row for _, tested in ordered for row in tested),
    )


def _family(
    family: str, rows: Sequence[PublishedRow], wanted: CalibrationShare, known: dict[tuple[str, str], Constants]
) -> tuple[FamilyResult, list[Scored]]:
    """Return the result of one family, and its scored test rows."""
    uncosted: Counter[str] = Counter()
    cases = []
    for row in rows:
        try:
            cases.append(case_of(row))
        except Uncosted as reason:
            uncosted[str(reason)] += 1
    cases.sort(key=lambda case: hashlib.sha256(case.row.row_id.encode()).hexdigest())
    fits = _fits(family, cases[: wanted.count], wanted.borrow, known)
    parts: dict[Setting, tuple[list[Scored], list[Scored]]] = defaultdict(lambda: ([], []))
    for index, case in enumerate(cases):
        try:
            done, setting = _predicted(case, fits)
        except Uncosted as reason:
            uncosted[str(reason)] += 1
            continue
        parts[setting][0 if index < wanted.count else 1].append(done)
    tested = [row for _, test in parts.values() for row in test]
    result = FamilyResult(
        family=family,
        rows=len(rows),
        scores=tuple(_score(family, setting, *both) for setting, both in parts.items()),
        fits=tuple(fits.values()),
        uncosted=dict(uncosted.most_common()),
        worst=tuple(sorted(tested, key=lambda row: -abs(row.error))[:3]),
    )
    return result, tested


def _score(family: str, setting: Setting, calibration: list[Scored], test: list[Scored]) -> Score:
    """Return the errors of calibration and test rows in one setting."""
    test_errors = errors(test)
    return Score(
        setting=setting,
        calibration=errors(calibration),
        test=test_errors,
        misses=misses(family, setting, test_errors) if test_errors else (),
    )


def _fits(
    family: str, cases: Sequence[Case], borrow: str, known: dict[tuple[str, str], Constants]
) -> dict[str, MachineFit]:
    """Return a fit for each kind of machine among the calibration rows."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.machine].append(case)
    fits = {}
    for machine, group in groups.items():
        samples = [
            Sample(model=case.model, cluster=case.cluster, plan=case.plan, measured_s=case.measured_s) for case in group
        ]
        start = known.get((borrow, machine), UNFITTED)
        fit = fit_constants(samples, start, few=ENOUGH)
        fits[machine] = MachineFit(machine=machine, fit=fit, borrowed=borrow if start != UNFITTED else "")
        # Another family has another network between nodes, but the same devices and links inside a node.
        known[family, machine] = replace(fit.constants, network_bandwidth=0.0, network_latency=0.0)
    return fits


def _predicted(case: Case, fits: Mapping[str, MachineFit]) -> tuple[Scored, Setting]:
    """Predict a case with the fit for its machine, if there is one, and return it with its setting."""
    cluster: ClusterSpec = case.cluster
    mixed = len(cluster.devices) > 1
    machine_fit = fits.get(case.machine)
    if machine_fit is not None:
        cluster = apply_fit(
            machine_fit.fit, cluster, f"fitted to {machine_fit.fit.rows} published rows of {case.row.family}"
        )
    setting: Setting = "data sheet"
    if machine_fit is not None:
        setting = "calibrated" if machine_fit.fit.rows >= ENOUGH else "one factor"
    return scored(case, cluster), "mixed devices" if mixed else setting
