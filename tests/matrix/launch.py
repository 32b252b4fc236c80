"""Cells carried out: fresh ranks for each, within a time limit, and what they say made one verdict."""

import os
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import harness
from harness import RankFailed, run_ranks
from matrix.cell import Outcome, Task, run_cell
from matrix.families import Family
from matrix.foreseen import describe_family, foreseen_nbytes
from matrix.plans import TOLERANCE, Column

PRELOAD = ("models.bert.modeling_bert", "models.gpt2.modeling_gpt2", "models.llama.modeling_llama",
           "models.vit.modeling_vit", "models.t5.modeling_t5")  # fmt: skip
PEER = re.compile(r"Connection (closed|reset)|Connection refused|Broken pipe|Timed out|DistBackendError")
"""What a rank says when another one has gone."""

Verdict = Literal["exact", "refused", "WRONG", "CRASH", "HANG", "not built"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of the table. `gap`: the largest relative difference from one device; `bytes`: the most that one rank
    holds or sends, by what; `foreseen`: the predicted peak; `one`: the same as `bytes` on one device.
    """

    family: str
    plan: str
    verdict: Verdict
    detail: str = ""
    gap: float | None = None
    tolerance: float | None = None
    seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    foreseen: int | None = None
    one: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        return self.verdict in ("WRONG", "CRASH", "HANG")

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Runner:
    """Carries out cells; `folder`: for one device's trainings, each made once. `limit_s`: of a cell. `foresee`: predict
    their peaks, for the page.
    """

    def __init__(self, folder: Path, limit_s: float, *, foresee: bool = True) -> None:
        self.folder, self.limit_s, self.foresee = folder, limit_s, foresee
        self._ones: dict[Path, Outcome] = {}
        harness.preload(*(f"transformers.{name}" for name in PRELOAD), "matrix.cell")

    def run(self, wanted: list[tuple[Family, Column]], jobs: int, done: Callable[[Cell], None]) -> list[Cell]:
        """Carry out cells, `jobs` at a time; `done` is told of each as it ends."""
        ready = [(family, column) for family, column in wanted if not column.missing]
        with ThreadPoolExecutor(jobs) as pool:
            first = {self._reference(family, column): (family, column) for family, column in ready}
            made = pool.map(lambda pair: self._launch(*pair, one=True), first.values())
            if self.foresee:
                list(pool.map(self._describe, {family.name for family, _ in ready}))
            self._ones = dict(zip(first, (outcomes[0] for outcomes in made), strict=True))

            def cell(pair: tuple[Family, Column]) -> Cell:
                result = self._cell(*pair)
                done(result)
                return result

            return list(pool.map(cell, wanted))

    def _cell(self, family: Family, column: Column) -> Cell:
        names = {"family": family.name, "plan": column.name}
        if column.missing:
            return Cell(**names, verdict="not built", detail=", ".join(column.missing))
        one = self._ones[self._reference(family, column)]
        if one.kind != "done":
            return Cell(**names, verdict="CRASH", detail=f"on one device: {_last_line(one.sentence)}")
        before = time.perf_counter()
        outcomes = self._launch(family, column, one=False)
        verdict, detail, gap = judge(outcomes, tolerance := TOLERANCE[column.dtype] * family.loose)
        facts = [outcome.facts for outcome in outcomes if outcome.facts]
        return Cell(
            **names,
            verdict=verdict,
            detail=detail,
            gap=gap,
            tolerance=tolerance,
            seconds=round(time.perf_counter() - before, 2),
            foreseen=self._foreseen(family, column) if verdict == "exact" else None,
            bytes={name: max(fact[name] for fact in facts) for name in facts[0]} if facts else {},
            one=one.facts,
        )

    def _launch(self, family: Family, column: Column, *, one: bool) -> list[Outcome]:
        plan = column.plan(family)
        with tempfile.TemporaryDirectory() as folder:
            task = Task(
                family=family.name,
                plan=None if one else plan,
                batch=plan["batch"],
                dtype=column.dtype,
                precision=column.precision,
                reference=self._reference(family, column),
                folder=Path(folder),
                limit_s=self.limit_s,
            )
            try:
                return run_ranks(run_cell, 1 if one else column.ranks, task, timeout_s=self.limit_s + 15)
            except RankFailed as error:
                stack = "; ".join(_where(path) for path in sorted(Path(folder).glob("*.stack")) if path.stat().st_size)
                return [Outcome(kind="failed", sentence=f"HANG: {stack}" if stack else str(error))]

    def _describe(self, family: str) -> None:
        with suppress(RankFailed):  # no prediction then
            run_ranks(describe_family, 1, family, self._spec(family), timeout_s=self.limit_s)

    def _foreseen(self, family: Family, column: Column) -> int | None:
        if column.precision != "full" or not self._spec(family.name).exists():
            return None
        return foreseen_nbytes(self._spec(family.name), family.subject().batch, column.plan(family))

    def _spec(self, family: str) -> Path:
        return self.folder / f"{re.sub('[^A-Za-z0-9]+', '-', family)}.json"

    def _reference(self, family: Family, column: Column) -> Path:
        words = f"{family.name}-{column.microbatches}-{column.precision}"
        return self.folder / f"{re.sub('[^A-Za-z0-9]+', '-', words)}.pt"


def judge(outcomes: list[Outcome], tolerance: float) -> tuple[Verdict, str, float | None]:
    """One verdict from what all ranks say: (verdict, detail, largest difference)."""
    failed = [outcome.sentence for outcome in outcomes if outcome.kind == "failed"]
    if failed:
        first = next((sentence for sentence in failed if not PEER.search(sentence)), failed[0])
        hang = first.startswith("HANG: ")
        return ("HANG", first[6:], None) if hang else ("CRASH", _last_line(first), None)
    refused = [outcome.sentence for outcome in outcomes if outcome.kind == "refused"]
    if len({re.sub(r"\d+", "#", sentence) for sentence in refused}) > 1 or 0 < len(refused) < len(outcomes):
        return "CRASH", f"not all ranks say the same: {refused}", None
    if refused:
        return "refused", refused[0], None
    worst = max(outcomes, key=lambda outcome: (outcome.excess, outcome.gap))
    return ("WRONG" if worst.excess > tolerance else "exact"), worst.where, worst.gap


def _last_line(text: str) -> str:
    """An exception in a line, with the last place of the project it went through."""
    lines = [line.strip() for line in text.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ") and f"{os.sep}tutti{os.sep}" in line]
    place = re.sub(r'File ".*?([^/"]+/[^/"]+)", line (\d+), in (\w+)', r"\1:\2 \3", places[-1]) if places else ""
    return f"{lines[-1]}{f' [{place}]' if place else ''}" if lines else text


def _where(stack: Path) -> str:
    """A rank that hangs, and the innermost frames of the project."""
    found = re.findall(r'File ".*?([^/"]+/[^/"]+\.py)", line (\d+) in (\w+)', stack.read_text())
    own = [
        f"{path}:{line} {name}" for path, line, name in found if not path.startswith(("matrix/", "multiprocessing/"))
    ]
    return f"{stack.stem}: {' < '.join(own[:4])}"
