"""The page stands alone: in the text of the file, and in a real browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folders import Story, write_run

from tutti.reporting.build_report import build_report
from tutti.reporting.comparison import compare
from tutti.reporting.html_report import comparison_html, report_html
from tutti.reporting.quality_metrics import parse_target
from tutti.reporting.report_files import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no host can be reached: what is shown is in the file
)
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a test asks of a page: its elements balance, its ids are unique, what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")
            if name == "aria-label":
                self.labels.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def stands_alone(text: str) -> Page:
    """The page, once it is well formed, refers to nothing outside, and says each figure in words."""
    page = Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert not re.search(r"https?:|@import|<script|url\((?!#)", text)
    assert "NaN" not in text
    assert page.count["h1"] == 1
    assert len(page.labels) == page.count.get("svg", 0)
    assert all(len(label) > 20 for label in page.labels)
    return page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("pages")
    two = build_report(write_run(path / "two"), target=parse_target("test.accuracy=0.9"))
    one = build_report(write_run(path / "one", Story(name="<one> & only", world_size=1, slower=1.8), complete=False))
    bad = build_report(write_run(path / "bad", Story(quality=(0.1,), kind="TensorDataset", lost_s=1.0)))
    return {"two": report_html(two), "one": report_html(one), "compared": comparison_html(compare([one, two, bad]))}


@pytest.mark.parametrize("name", ["two", "one", "compared"])
def test_page_is_well_formed_and_refers_to_nothing_outside(pages: dict[str, str], name: str) -> None:
    stands_alone(pages[name])


def test_names_are_escaped(pages: dict[str, str]) -> None:
    assert "<one>" not in pages["one"]
    assert "&lt;one&gt; &amp; only" in pages["one"]
    assert "<one>" not in pages["compared"]


def test_first_screen_says_what_how_good_how_long_and_whether_verified(pages: dict[str, str]) -> None:
    head = re.sub(r"<style>.*?</style>", "", pages["two"], flags=re.DOTALL).split("</header>")[0]
    for words in ("Trained DigitsCNN", "test accuracy 0.9600", "1.41 s", "Not verified", "Target reached"):
        assert words in head


def test_measured_is_solid_and_predicted_is_hatched(pages: dict[str, str]) -> None:
    step = pages["two"].split("One step, predicted and measured", 1)[1].split("</figure>")[0]
    assert step.count("<pattern") >= 1
    breakdown = pages["two"].split("Wall time by phase", 1)[1].split("</figure>")[0]
    assert "<pattern" not in breakdown


def test_time_in_no_phase_is_drawn_as_such(tmp_path: Path) -> None:
    texts = [report_html(build_report(write_run(tmp_path / str(lost), Story(lost_s=lost)))) for lost in (0.0, 0.5)]
    assert ["unaccounted</text>" in text for text in texts] == [False, True]


def test_refusals_stand_in_place_of_the_number(pages: dict[str, str]) -> None:
    row = pages["compared"].split("<tbody>")[1].split("</tbody>")[0].split("</tr>")[2]
    assert "Refused." in row
    assert "×" not in row


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_real_browser_shows_figures_and_tables_offline(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_report(folder)
    page = folder / "report" / "report.html"
    base = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"]
    dump = subprocess.run([*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90)
    assert dump.stdout.count("<svg") == 2 * 9  # for wide and narrow screens
    assert dump.stdout.count("<table") == 4
    assert not re.search("https?:", dump.stdout)
    shot = tmp_path / "shot.png"
    subprocess.run(
        [*base, f"--screenshot={shot}", "--window-size=1280,2400", page.as_uri()], capture_output=True, timeout=90
    )
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 100_000  # an empty page is a few kB
