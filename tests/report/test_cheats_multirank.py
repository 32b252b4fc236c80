"""Each rule of honest reporting finds its cheat, made by really running it, and lets the honest twin pass."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cheats
import pytest

from harness import run_ranks
from tutti.config.run_report import RunReport
from tutti.config.several_runs import Comparison
from tutti.reporting.build_report import build_report
from tutti.reporting.comparison import compare
from tutti.reporting.quality_metrics import parse_target

pytest.importorskip("sklearn", reason="the trainings' data are scikit-learn's")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cheats")
    run_ranks(cheats.run_all, 1, path)
    return path


def bad(report: RunReport | Comparison, rule: int | None = None) -> set[str]:
    """Codes of refusals and warnings."""
    return {f.code for f in report.findings if f.severity != "note" and (rule is None or f.rule == rule)}


@pytest.mark.parametrize(
    ("name", "rule", "code"),
    [
        ("quality/missed", 1, "QUALITY-LOSS"),
        ("quality/worse", 1, "QUALITY-LOSS"),
        ("held-out/training-data", 2, "TRAIN-QUALITY"),
        ("held-out/mixed", 2, "DATA-OVERLAP"),
        ("held-out/scaled", 2, "DATA-OVERLAP"),
        ("held-out/trained-on", 2, "TRAINED-ON-TEST"),
        ("held-out/validated", 2, "TEST-USED-BEFORE"),
        ("quality/lost", 1, "QUALITY-LOST"),
        ("part/continued", 5, "CONTINUED"),
        ("held-out/none", 2, "NO-TEST-QUALITY"),
        ("held-out/best", 2, "BEST-OF-EPOCHS"),
        ("held-out/reloaded", 2, "BEST-OF-EPOCHS"),
        ("held-out/stopped", 2, "STOPPED-ON-TEST"),
        ("tuned/0.3", 3, "TUNING-HIDDEN"),
        ("baseline/published", 4, "DIFFERENT-HARDWARE"),
        ("part/five-steps", 5, "KERNEL-ONLY"),
        ("part/one-batch", 5, "KERNEL-ONLY"),
        ("part/nothing-learned", 5, "NOTHING-LEARNED"),
        ("part/same-batch", 5, "SAME-BATCH"),
        ("part/same-samples", 5, "SAME-SAMPLES"),
        ("part/subset", 5, "PART-OF-THE-DATA"),
        ("part/each-epoch", 5, "PART-OF-THE-DATA"),
        ("data/in-memory", 6, "DATA-IN-RAM"),
        ("data/drawn", 6, "SYNTHETIC-DATA"),
        ("data/noise", 6, "SYNTHETIC-DATA"),
        ("data/noise-in-the-loop", 6, "SYNTHETIC-DATA"),
        ("data/misstated", 6, "DATA-MISSTATED"),
        ("size/bilinear", 9, "INPUT-INFLATED"),
        ("size/nearest", 9, "INPUT-INFLATED"),
        ("size/in-the-loop", 9, "INPUT-INFLATED"),
        ("size/padded", 9, "INPUT-INFLATED"),
        ("size/misstated", 9, "INPUT-INFLATED"),
        ("stop/clock-stated", 10, "STOPPED-BY-TIME"),
        ("stop/misstated", 10, "STOP-MISSTATED"),
        ("baseline/published", 12, "BASELINE-NOT-RERUN"),
    ],
)
def test_a_cheat_is_found(root: Path, name: str, rule: int, code: str) -> None:
    report = build_report(root / name)
    assert bad(report, rule) >= {code}
    assert report.outcomes[rule - 1].outcome == "objection"


@pytest.mark.parametrize("name", ["honest/one", "honest/two", "quality/as-good", "stop/stated", "tuned-stated/second"])
def test_an_honest_twin_passes(root: Path, name: str) -> None:
    report = build_report(root / name)
    assert not bad(report)
    assert report.scope == "train"
    assert report.data.start_state == "disk-warm"


def test_sequences_that_are_not_padded_are_of_their_real_size(root: Path) -> None:
    assert not bad(build_report(root / "honest/sequences"), 9)


def test_what_is_not_stated_is_unstated(root: Path) -> None:
    outcomes = {item.rule: item for item in build_report(root / "honest/one").outcomes}
    assert {rule for rule, item in outcomes.items() if item.outcome == "unstated"} - {8} == {1, 3, 7, 12}
    assert "tuning.trials=N" in outcomes[3].missing
    stated = build_report(root / "honest/one", facts={"tuning.trials": "1"})
    assert stated.outcomes[2].outcome == "kept"


def test_a_loop_left_after_evaluations_on_test_data_is_to_say_why(root: Path) -> None:
    """The honest runs ended after the epochs that they asked for; their steps were given no test sample."""
    outcome = build_report(root / "held-out/left").outcomes[1]
    assert outcome.outcome == "unstated"
    assert "decided when training ended" in outcome.missing
    assert build_report(root / "part/five-steps").outcomes[1].outcome == "kept"  # evaluated once, at the end
    honest = build_report(root / "honest/two")
    assert (honest.outcomes[1].outcome, honest.data.trained_on.value) == ("kept", 0)


@pytest.mark.parametrize(
    ("first", "second", "rule", "code"),
    [
        ("quality/small", "quality/large", 1, "QUALITY-LOSS"),
        ("recipe/good", "recipe/fast", 8, "DIFFERENT-RECIPE"),
        ("scaling/base", "scaling/grown", 11, "NOT-STRONG"),
        ("honest/two", "size/in-the-loop", 9, "DIFFERENT-INPUTS"),
        ("honest/two", "held-out/fewer", 2, "DIFFERENT-TEST-DATA"),
        ("honest/two", "part/five-steps", 10, "DIFFERENT-WORK"),
        ("honest/two", "stop/clock-stated", 10, "STOPPED-BY-TIME"),
    ],
)
def test_a_comparison_that_flatters_is_refused(root: Path, first: str, second: str, rule: int, code: str) -> None:
    comparison = compare([build_report(root / first), build_report(root / second)])
    assert code in bad(comparison, rule)
    assert comparison.rows[1].speedup.value is None
    assert comparison.outcomes[rule - 1].outcome == "objection"


def test_an_honest_comparison_states_a_speed_up(root: Path) -> None:
    runs = [
        build_report(root / name, target=parse_target("test.accuracy=0.6")) for name in ("honest/two", "recipe/good")
    ]
    comparison = compare(runs)
    assert not bad(comparison)
    assert comparison.rows[1].speedup.value is not None
    assert {item.rule for item in comparison.outcomes if item.outcome == "kept"} >= {1, 4, 5, 6, 9, 10, 11}


HONEST_FACTS = {
    "quality.target": "test.accuracy=0.6",
    "tuning.trials": 1,
    "baseline.source": "measured-here",
    "baseline.system": "the same script on one device",
    "baseline.tuned_by": "nobody",
    "scaling": "strong",
}

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import cheats, torch, tutti
from torch.nn import functional as F

facts = {facts!r}
job = tutti.Job(global_batch_size=64, facts=facts, name="digits")
model = cheats.Net()
data = cheats.Mapped(Path("digits.npy"), slice(0, cheats.TRAIN))
model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), data, F.cross_entropy)
{loop}
"""
WHOLE = """
for _ in job.epochs(3):
    for batch in loader:
        job.step(batch)
    job.evaluate(cheats.tensors(slice(cheats.TRAIN, None)), {"accuracy": cheats.correct}, name="test")
"""
CLOCK = """
start = time.monotonic()
elapsed = 0.0
for _ in job.epochs(1000):
    for batch in loader:
        job.step(batch)
        elapsed = time.monotonic() - start
        if elapsed > 1.5:
            break
    if elapsed > 1.5:
        break
job.evaluate(cheats.tensors(slice(cheats.TRAIN, None)), {"accuracy": cheats.correct}, name="test")
"""


def launched(folder: Path, loop: str, facts: dict[str, object], *command: str) -> Path:
    """Run a script from a git repository of its own; return the run folder."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), facts=facts, loop=loop)
    (folder / "train.py").write_text(script)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    for arguments in (["init", "-q"], ["add", "train.py"], [*identity, "commit", "-qm", "train"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
    done = subprocess.run(
        [sys.executable, "-m", "tutti", "run", *command, "--folder", "run", "train.py"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_an_honest_run_that_states_everything_passes_all_twelve_rules(tmp_path: Path) -> None:
    run = launched(tmp_path, WHOLE, HONEST_FACTS, "--nproc", "2")
    device = json.loads((run / "run.json").read_text())["ranks"][0]["device_model"]
    report = build_report(run, facts={"baseline.device": device})
    slow = {f.code for f in report.findings if "is slow in steps" in f.sentence}  # for what else runs on the machine
    assert not bad(report) - {"TIME-STOLEN", "FUNCTION-NOT-SPEED"} - slow, report.findings
    assert [item.outcome for item in report.outcomes] == ["kept"] * 12


def test_a_loop_that_ends_by_the_clock_is_seen(tmp_path: Path) -> None:
    run = launched(tmp_path, CLOCK, {}, "--nproc", "1")
    report = build_report(run)
    assert "STOPPED-BY-TIME" in bad(report, 10)
    assert "line 22 of train.py" in next(f.sentence for f in report.findings if f.rule == 10)
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    assert "STOPPED-BY-TIME" in bad(build_report(copied), 10)  # the script need not be there
