"""Files of this machine that a command names: how nodes with a copy of the code call them, and which are sent along."""

import base64
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import LaunchError

SENT_OPTIONS = ("--plan", "--cluster")
"""Options of `tutti run` whose files are sent along; they are read here, too."""

_MOST_NBYTES = 100_000  # Linux takes 128 KiB in one argument or variable


def path_below(text: str, here: Path) -> str | None:
    """Return a path relative to a directory, whatever leads there; None if it is not below it."""
    for path, top in (
        (os.path.normpath(here / text), str(here)),
        (os.path.realpath(here / text), os.path.realpath(here)),
    ):
        if path == top or path.startswith(f"{top}/"):
            return os.path.relpath(path, top)
    return None


def path_in_word(word: str, here: Path) -> tuple[str, str] | None:
    """Return what comes before an absolute path below a directory in a word or an option, and the path within it.

    Args:
        word: of the command, such as "/here/x" or "--data=/here/a=b".
        here: the directory.

    Returns:
        None if the word has no such path.
    """
    option, equals, path = ("", "", word) if word.startswith("/") else word.partition("=")
    name = path_below(path, here) if path.startswith("/") else None
    return None if name is None else (f"{option}{equals}", name)


def moved_word(word: str, here: Path, there: str) -> str:
    """Return a word with the absolute path in it, or in an option, moved from one directory to another."""
    found = path_in_word(word, here)
    return word if found is None else f"{found[0]}{os.path.normpath(f'{there}/{found[1]}')}"


def packed_files(
    words: Sequence[str], script: str, here: Path, seen: Callable[[str], bool] = lambda path: False
) -> tuple[list[str], str]:
    """Return the words without the options whose files are sent along, and these files as text; empty without one.

    Args:
        words: arguments of `tutti run`.
        script: the script among them, what follows is its own; empty for a module.
        here: where relative paths begin.
        seen: whether nodes see a path, which stays then.

    Raises:
        LaunchError: a file cannot be read, or they are too large.
    """
    ends = {script} if script else {"-m", "--module"}
    end = next((number for number, word in enumerate(words) if word in {*ends, "--"}), len(words))
    found, others, number = dict[str, tuple[str, str]](), list[str](), 0
    while number < end:
        option, equals, path = words[number].partition("=")
        following = not equals and number + 1 < end
        path = words[number + 1] if following else path
        if option in SENT_OPTIONS and (here / path).is_file() and not seen(str(here / path)):
            try:
                found[option] = (Path(path).suffix, (here / path).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise LaunchError(f"{option} {path} cannot be read ({error}); name another file") from None
            number += 1 + following
        else:
            others.append(words[number])
            number += 1
    if not found:
        return list(words), ""
    packed = base64.b64encode(zlib.compress(json.dumps(found).encode(), 9)).decode()
    if len(packed) > _MOST_NBYTES:
        raise LaunchError(
            f"{' and '.join(found)}: the files are too large to be sent along ({len(packed)} bytes, at most "
            f"{_MOST_NBYTES}); name a run folder, a plan and a cluster on a disk that all nodes see"
        )
    return [*others, *words[end:]], packed


class SentFiles:
    """Files that were sent along, in a folder of this process's own.

    Args:
        packed: what `packed_files` returned.
    """

    def __init__(self, packed: str) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.options: list[str] = []
        if not packed:
            return
        files: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
        self._folder = tempfile.TemporaryDirectory(prefix="tutti-files-")
        for option, (suffix, text) in files.items():
            file = Path(self._folder.name) / f"{option.removeprefix('--')}{suffix}"
            file.write_text(text, encoding="utf-8")
            self.options += [option, str(file)]

    def in_command(self, arguments: Sequence[str]) -> list[str]:
        """Return arguments of `tutti` with the options of the files."""
        return [*arguments[:1], *self.options, *arguments[1:]]

    def remove(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()
