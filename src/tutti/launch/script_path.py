"""Checks of the user's script and of the run folder, before anything is started."""

import json
import shlex
import socket
import sys
import tempfile
import tokenize
import warnings
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from pathlib import Path

from tutti.config.run_folder import RunFolder, last_rows, refuse_used_folder
from tutti.errors import LaunchError, ScriptError
from tutti.launch import process_tree

_NO_SCRIPTS = (".csv", ".html", ".ipynb", ".json", ".log", ".md", ".rst", ".sh", ".toml", ".txt", ".yaml", ".yml")
"""Suffixes of what is no script even where Python can read it."""


def check_script(path: Path) -> None:
    """Check that Python can begin to run `path`; none of it is run.

    Raises:
        ScriptError: the script does not exist, cannot be read or is not valid Python.
    """
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise ScriptError(f"{path} is a folder without a __main__.py; name the script in it")
        return
    if not path.exists() and str(path).startswith("-"):
        raise ScriptError(
            f"{path} is not an option of tutti, and no script was named before it; see tutti COMMAND --help"
        )
    if not path.exists():
        raise ScriptError(f"{path} does not exist (looked in {Path.cwd()}); name an existing Python script")
    if path.suffix in _NO_SCRIPTS:
        raise ScriptError(f"{path} is no Python script; name one, such as train.py")
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}, line {error.lineno}" if error.lineno else str(path)
        text = f": {error.text.strip()}" if error.text else ""
        raise ScriptError(f"{place} is not valid Python ({error.msg}){text}; correct this line") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ScriptError(f"{path} cannot be read as a Python script ({error}); name another one") from None


def check_module(name: str) -> None:
    """Check that a module of this dotted name can exist.

    Nothing is imported, so only the first part of the name is looked up.

    Raises:
        ScriptError: no such module or package can be found.
    """
    top = name.partition(".")[0]
    try:
        module_spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    except (ImportError, ValueError) as error:
        raise ScriptError(f"module {name} cannot be found ({error}); correct the name after -m") from None
    if module_spec is None:
        raise ScriptError(f"there is no module {top} in {Path.cwd()} or this environment; correct the name after -m")


def run_folder(asked: Path | None, resume: Path | None, name: str, node_rank: int = 0) -> Path:
    """Return the absolute run folder, and create it if it is new.

    Args:
        asked: the folder that the user named, if any.
        resume: the run folder or checkpoint to resume from, if any; its run folder is used if `asked` is None.
        name: the run's name, for a new folder runs/NAME-TIME.
        node_rank: added to the name of a new folder on nodes other than 0.

    Raises:
        LaunchError: the folder holds another run, is in use, or cannot be created or written.
    """
    if resume is not None and not resume.exists():
        raise LaunchError(f"--resume {resume} does not exist; name a run folder, or a checkpoint in one")
    if asked is not None:
        folder = asked
        resumes_here = resume is not None and folder.resolve() in (resume.resolve(), *resume.resolve().parents)
        if RunFolder(folder).header.exists() and not resumes_here and not begins_again(folder):
            raise LaunchError(
                f"{folder} already holds a run; give another --folder, or --resume {shlex.quote(str(folder))}"
            )
    elif resume is not None and (RunFolder(resume).header.exists() or begins_again(resume)):
        folder = resume
    else:
        folder = _new_folder(name, node_rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not node_rank:  # the first node may have begun already, in the same folder
            refuse_used_folder(RunFolder(folder))
        with tempfile.TemporaryFile(dir=folder):  # a unique file: other nodes may test the same folder now
            pass
    except OSError as error:
        raise LaunchError(
            f"run folder {folder} cannot be written ({error.strerror or error}); name another with --folder"
        ) from None
    return folder.resolve()


def begins_again(folder: Path) -> bool:
    """Return whether a folder holds a run that ended before its first checkpoint, so that it has to begin again.

    A run that was completed does not, nor does one whose ranks still run on this host.

    Raises:
        LaunchError: it still runs.
    """
    files = RunFolder(folder)
    if not (files.header.exists() or (folder / "ranks").is_dir()) or files.checkpoint_times():
        return False
    if _end_status(files.metrics) == "completed":
        return False
    _check_has_ended(folder)
    return True


def _end_status(metrics: Path) -> str | None:
    """Return how a run ended last, by its metrics; None if it was killed, or still runs."""
    for row in reversed(last_rows(metrics)):
        if row.get("kind") in ("start", "end"):
            return str(row["status"]) if row.get("kind") == "end" and "status" in row else None
    return None


def _check_has_ended(folder: Path) -> None:
    header = RunFolder(folder).header
    try:
        ranks = json.loads(header.read_text(encoding="utf-8"))["ranks"]
        own = [int(rank["pid"]) for rank in ranks if rank["host"] == socket.gethostname()]
        written = header.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return
    for pid in own:
        since = process_tree.started_at(pid)
        if since is not None and since <= written:
            raise LaunchError(
                f"{folder} holds a run that still runs on this host (process {pid}); wait for its end, or name another "
                "--folder"
            )


def _new_folder(name: str, node_rank: int) -> Path:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{name}-{now}" + (f"-node{node_rank}" if node_rank else "")
    folder, attempt = Path("runs") / stem, 2
    while folder.exists():
        folder, attempt = Path("runs") / f"{stem}-{attempt}", attempt + 1
    return folder
