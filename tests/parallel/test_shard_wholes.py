"""Memory of whole parameters: it comes and goes at one place, and what has gone cannot be read."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tutti.parallel.sharding.gather_buffers import LEAST_NBYTES, Memory, Pages, Resized, huge_pages, memory_of

CPU = torch.device("cpu")
NUMEL = 3 * LEAST_NBYTES + 123

needs_huge_pages = pytest.mark.skipif(not huge_pages(), reason="this system has no transparent huge pages")


def _pages() -> Memory:
    return Pages(2 * NUMEL, torch.bfloat16)


def _resized() -> Memory:
    return Resized(2 * NUMEL, torch.bfloat16, CPU)


@pytest.mark.parametrize("make", [_pages, _resized])
def test_views_come_back_with_the_memory(make: Callable[[], Memory]) -> None:
    memory = make()
    memory.have()
    view = memory.tensor.as_strided((100, 1000), (1, 100), 7)
    for value in (1.0, 2.0):
        memory.have()
        view.fill_(value)
        assert view.sum() == value * view.numel()
        memory.free()


def test_nothing_is_resident_in_between() -> None:
    process, memory = psutil.Process(), _pages()
    before = process.memory_info().rss
    memory.have()
    memory.tensor.fill_(1)
    there = process.memory_info().rss
    memory.free()
    gone = process.memory_info().rss
    assert there - before > 0.9 * 2 * NUMEL
    assert there - gone > 0.9 * 2 * NUMEL


def test_what_has_gone_ends_who_reads_it() -> None:
    script = (
        "import torch\nfrom tutti.parallel.sharding.gather_buffers import Pages\nmemory = Pages(2**23, torch.float32)\n"
        "memory.have()\nmemory.tensor.fill_(1)\nprint('there', flush=True)\nmemory.free()\nprint(memory.tensor.sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGSEGV, ["there"])


@needs_huge_pages
def test_large_ones_have_pages_of_their_own() -> None:
    assert isinstance(memory_of(LEAST_NBYTES // 4, torch.float32, CPU), Pages)
    assert isinstance(memory_of(LEAST_NBYTES // 4 - 1, torch.float32, CPU), Resized)


def test_without_huge_pages_the_heap_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr("tutti.parallel.sharding.gather_buffers._HUGE_PAGES", setting)
    assert isinstance(memory_of(LEAST_NBYTES, torch.float32, CPU), Resized)
    setting.write_text("always madvise [never]\n")
    assert isinstance(memory_of(LEAST_NBYTES, torch.float32, CPU), Resized)
