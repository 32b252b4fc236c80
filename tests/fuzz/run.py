"""Fuzz the inputs of tutti by hand: `make fuzz MINUTES=60`. Every finding is printed once, with how to see it again.

Exit code 1 if an input breaks a law of `fuzz.laws`.
"""

import argparse
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("COLUMNS", "160")

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from fuzz.laws import BrokenLaw  # noqa: E402
from fuzz.subjects import SUBJECTS  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each round of 200 inputs has the next one")
    parser.add_argument("--only", choices=sorted(SUBJECTS), action="append", help="only these inputs")
    parser.add_argument("--rounds", type=int, help="how many rounds, however long they take")
    return parser.parse_args()


def place(error: BaseException) -> str:
    """Return where tutti raised what broke the law: equal places are one finding."""
    cause = error.__cause__ or error
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if "/src/tutti/" in frame.filename]
    last = frames[-1] if frames else traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__} at {last.filename.rpartition('/src/')[2]}:{last.lineno}"


def kind(broken: BrokenLaw) -> str:
    """Return the words of a broken law that do not depend on the folder or on a number."""
    return re.sub(r"[\d,]+|tutti-fuzz-\w+", "", str(broken).replace(tempfile.gettempdir(), ""))[:80]


def fuzz(name: str, number: int, count: int, findings: dict[str, str]) -> None:
    """Give tutti `count` inputs of one kind."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        counted[name] += 1
        with tempfile.TemporaryDirectory(prefix="tutti-fuzz-") as folder:
            try:
                SUBJECTS[name](data, Path(folder))
            except BrokenLaw as broken:
                at = f"{name}: {place(broken)}" if broken.__cause__ else f"{name}: {kind(broken)}"
                if at not in findings:
                    findings[at] = f"{broken} (--only {name} --seed {number} --rounds 1)"
                    print(f"{at}\n    {findings[at]}", flush=True)

    one()


counted: Counter[str] = Counter()


def main() -> None:
    arguments = parse_arguments()
    findings: dict[str, str] = {}
    number, end = arguments.seed, time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end and (arguments.rounds is None or number < arguments.seed + arguments.rounds):
        for name in arguments.only or SUBJECTS:
            fuzz(name, number, 20 if name in ("reports", "prepared-environments") else 200, findings)
        number += 1
    inputs = ", ".join(f"{count:,} {name}" for name, count in counted.items())
    print(f"seeds {arguments.seed} to {number - 1}: {inputs}; {len(findings)} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
