"""Checkpoints between all pairs of plans: written under one, gone on with under the other, as one device goes on.

Prints a line a plan; `--page FILE` adds them as a section. Exit code 1 if a pair differs, is refused or crashes.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoint.checkpoint_variants import PLANS, Way, resume_all, save_everywhere  # noqa: E402
from harness import RankFailed, run_ranks  # noqa: E402


def go_on(ways: list[Way], folder: Path) -> tuple[list[str], list[tuple[Way, int, int]]]:
    """What is wrong with which pair, in words; and for each way, how many of how many checkpoints it went on with."""
    failures = save_everywhere(ways, folder)
    found = [f"{name}: {words}" for name, words in failures.items()]
    table = []
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
        table.append((way, len(sources) - len(differences), len(sources)))
        found += differences
    return found, table


def section(table: list[tuple[Way, int, int]], found: list[str]) -> str:
    """The section of the page, in Markdown."""
    lines = [f"| {way.name} | {exact} of {count} |" for way, exact, count in table]
    wrong = [f"- {words}" for words in found]
    return "\n".join(
        [
            "\n## Checkpoints between plans\n",
            "Every plan below went on with the checkpoints of all plans of its family (parameters, optimizer state, "
            "schedule, random state, position in the data), and its next steps are those of one device that was never "
            "interrupted, to 1e-12 in float64.\n",
            "| goes on under | exact |",
            "|---|---|",
            *lines,
            *wrong,
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="a part of the family's name")
    parser.add_argument("--page", type=Path, help="add a section to this file")
    args = parser.parse_args()
    ways = [way for way in PLANS if not way.missing and args.only in way.family]
    with tempfile.TemporaryDirectory() as folder:
        found, table = go_on(ways, Path(folder))
    if args.page:
        with args.page.open("a") as file:
            file.write(section(table, found) + "\n")
    print("\n".join(found) or "all exact")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
