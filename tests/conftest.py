"""The order of files: those that start ranks or commands come first, so that no long one is left to a single worker."""

from pathlib import PurePath

import pytest

SLOW_FOLDERS = ("matrix", "examples", "launch", "lab", "consistency")


def _is_slow(item: pytest.Item) -> bool:
    path = PurePath(item.nodeid.split("::")[0])
    return path.stem.endswith("_multirank") or not set(SLOW_FOLDERS).isdisjoint(path.parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _is_slow(item))
