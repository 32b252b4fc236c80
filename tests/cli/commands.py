"""Call a command as from a shell, in this process."""

import sys

import pytest

from tutti.cli.main import main


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Return the exit code of `tutti WORDS`."""
    monkeypatch.setattr(sys, "argv", ["tutti", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
