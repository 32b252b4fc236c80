"""Checkpoints between all pairs of plans: written under one, gone on with under the other, as one device goes on.

Prints a line a pair; exit code 1 if one differs, is refused or crashes.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from harness import RankFailed, run_ranks  # noqa: E402
from runtime.checkpoint_ways import PLANS, Way, resume_all, save_everywhere  # noqa: E402


def wrong_pairs(ways: list[Way], folder: Path) -> list[str]:
    """What is wrong with which pair, in words."""
    failures = save_everywhere(ways, folder)
    found = [f"{name}: {words}" for name, words in failures.items()]
    for way in ways:
        if way.name in failures:
            print(f"{way.name}: {failures[way.name]}", flush=True)
            continue
        sources = [one.name for one in ways if one.family == way.family and one.name not in failures]
        try:
            differences = run_ranks(resume_all, way.plan.world_size, way, sources, folder, 1e-12, timeout_s=600)[0]
        except RankFailed as error:
            differences = [f"-> {way.name}: {error}"]
        print(f"{way.name}: {len(sources) - len(differences)} of {len(sources)} exact", flush=True)
        found += differences
    return found


def main() -> int:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    ways = [way for way in PLANS if not way.missing and only in way.family]
    with tempfile.TemporaryDirectory() as folder:
        found = wrong_pairs(ways, Path(folder))
    print("\n".join(found) or "all exact")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
