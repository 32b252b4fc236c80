"""The order of files: those that start ranks or commands come first, so that no long one is left to a single worker."""

import os
import secrets
from collections.abc import Iterator
from pathlib import PurePath

import pytest
import torch

os.environ["COLUMNS"] = "160"  # the width of tables, which tests of other widths set themselves

os.environ.setdefault("TUTTI_SECRET", secrets.token_hex(32))  # of runs on several hosts; the user's file is left alone

SLOW_FOLDERS = ("matrix", "chaos", "examples", "launch", "lab", "benchmarks", "planner")


def _is_slow(item: pytest.Item) -> bool:
    path = PurePath(item.nodeid.split("::")[0])
    return path.stem.endswith("_multirank") or not set(SLOW_FOLDERS).isdisjoint(path.parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the tests chosen: every N-th of them")


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _is_slow(item))
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        if not 1 <= number <= parts:
            raise pytest.UsageError(f"--part {part}: there are parts 1 to {parts}")
        chosen = items[number - 1 :: parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


@pytest.fixture(autouse=True)
def _default_dtype_is_kept() -> Iterator[None]:
    """Fail a test that leaves another default dtype behind, and give the next one what torch starts with."""
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32, f"the test leaves {left} as torch's default dtype"
