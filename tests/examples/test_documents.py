"""Documents name files that exist, every page is in the navigation, and commit subjects are bounded."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "coming-from").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|docs|benchmarks|examples|src)/[\w./-]+\.\w+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    assert not [name for name in re.findall(r"`(test_\w+\.py)`", text) if not list((ROOT / "tests").rglob(name))]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / ".nav.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert not [page for page in pages if page not in navigation]


def test_the_readmes_links_lead_to_files() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8"))
        assert links
        assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize(
    ("subject", "accepted"),
    [("docs: a site", True), ("a" * 72, True), ("a" * 73, False), ("", False), ("Merge branch " + "a" * 80, True)],
)
def test_the_hook_bounds_the_subject_of_a_commit(subject: str, accepted: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\n{'a body may be long ' * 20}\n", encoding="utf-8")
    done = subprocess.run([ROOT / ".ci" / "commit-subject", message], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is accepted
    assert accepted or "72" in done.stderr


@pytest.mark.long
def test_the_loop_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8")
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    options = ["--nproc", "2", "--no-predict", "--profile", "2", "--folder", "run"]
    command = [sys.executable, "-c", "from tutti.cli.main import main; main()", "run", *options, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "stopped early: job.should_stop was true at step" in done.stderr
    table = (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert {"train/loss", "val/loss", "gap"} <= set(table[0].split(","))
    assert len(list((tmp_path / "run" / "profile").glob("rank-*.trace.json.gz"))) == 2
    assert "stopped early: job.should_stop" in (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
