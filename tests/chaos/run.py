"""Chaos by hand: `make chaos SEEDS=20` or `MINUTES=60`. One line for each schedule; `--seed N` makes one happen again.

Exit code 1 if a law does not hold; the folder of that run then stays.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from chaos.laws import BrokenLaw  # noqa: E402
from chaos.schedule import PLANS, Schedule, draw_schedule  # noqa: E402
from chaos.suffer import check, suffer, undisturbed  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many schedules")
    parser.add_argument("--minutes", type=float, help="how long, instead of how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, again")
    parser.add_argument("--only", choices=sorted(PLANS), help="only this plan")
    return parser.parse_args()


def happen(schedule: Schedule, folder: Path) -> str:
    """Run a schedule and check the laws; returns the law that does not hold, or nothing."""
    own = folder / f"seed-{schedule.seed}"
    try:
        reference = undisturbed(schedule, folder)
        check(suffer(schedule, own), reference)
    except BrokenLaw as broken:
        return f"{broken} (in {own})"
    shutil.rmtree(own)
    return ""


def main() -> None:
    arguments = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    end = time.monotonic() + 60 * (arguments.minutes or 0)
    seed, broken = arguments.seed if arguments.seed is not None else arguments.first, 0
    last = seed + (1 if arguments.seed is not None else arguments.seeds)
    while time.monotonic() < end if arguments.minutes else seed < last:
        schedule = draw_schedule(seed, arguments.only, root=os.geteuid() == 0)
        before = time.monotonic()
        law = happen(schedule, folder)
        broken += bool(law)
        print(f"{schedule}: {law or 'laws hold'} ({time.monotonic() - before:.0f} s)", flush=True)
        seed += 1
    if not broken:
        shutil.rmtree(folder)
    print(f"{broken} schedules break a law; `python tests/chaos/run.py --seed N` makes one happen again")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
