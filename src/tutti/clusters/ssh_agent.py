"""What a host runs while a run over ssh is prepared: it says what is there, and takes files.

Its source goes to the host over ssh, where tutti need not be installed: only the standard library is used. Requests and
answers are lines of JSON; a file comes in chunks, each after a line with its number of bytes.
"""

import contextlib
import grp
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import pwd
import random
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

MARK = "tutti-answer "
"""Begins each line of an answer: start-up files of a shell may print lines of their own."""

PORTS = range(20000, 32768)
"""Ports that no system gives to outgoing connections."""


_TOKENS: list[Path] = []
"""Files that are removed at the end."""


def package_digest(folder: Path) -> str:
    """Return a hash of a package's source files; empty if there is none.

    Args:
        folder: the package's folder.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def shipped_folder(digest: str) -> Path:
    """Return the folder in which a host keeps a tutti that was brought to it.

    Args:
        digest: the hash of its files.
    """
    return Path("~/.cache/tutti/python").expanduser() / digest


def distribution_versions(names: list[str]) -> dict[str, str]:
    """Return the versions of installed distributions; those that are missing are left out."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _is_safe(folder: Path) -> bool:
    """Return whether only root and this user can change a folder, what is in it, and what it is in."""
    user = pwd.getpwuid(os.geteuid())
    own_group = grp.getgrgid(user.pw_gid).gr_name == user.pw_name
    groups = {0, user.pw_gid} if own_group else {0}
    for path in {*folder.rglob("*"), folder, *folder.absolute().parents, *folder.resolve().parents}:
        state = path.lstat()
        if state.st_uid not in (0, user.pw_uid):
            return False
        if stat.S_ISLNK(state.st_mode) or state.st_mode & stat.S_ISVTX:
            continue
        if state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and state.st_gid not in groups):
            return False
    return True


def _find_package(name: str, digest: str, places: list[str]) -> tuple[str, str]:
    """Return where this host has a package of this hash ("installed": where Python looks), and the hash of its own."""
    spec = importlib.util.find_spec(name)
    own = package_digest(Path(spec.origin).parent) if spec is not None and spec.origin else ""
    if own == digest:
        return "installed", own
    for place in places:
        with contextlib.suppress(OSError, KeyError):
            if _is_safe(Path(place) / name) and package_digest(Path(place) / name) == digest:
                return place, own
    if package_digest(shipped_folder(digest) / name) == digest:
        return str(shipped_folder(digest)), own
    return "", own


def _problem(directory: Path, *, make: bool, private: bool) -> str:
    """Say why a directory cannot be used; an empty text if it can. A private one is for this user's eyes only."""
    try:
        if private:
            directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            directory.chmod(0o700)  # an older tutti may have made it
        elif make:
            directory.mkdir(parents=True, exist_ok=True)
        if not directory.is_dir():
            return "missing"
        if make:
            with tempfile.TemporaryFile(dir=directory):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 50):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    return 0


def _outside_address() -> str:
    """Return the address from which this host reaches others; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Say what this host has of what a run needs."""
    place, own = _find_package(request["package"], request["digest"], request["places"])
    connection = sys.argv[1].split() if len(sys.argv) > 1 else []
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": distribution_versions(request["distributions"]),
        "tutti": place,
        "own_tutti": own,
        "sees_run": Path(request["token_file"]).is_file(),
        "rsync": shutil.which("rsync") is not None,
        "address": connection[2] if len(connection) == 4 else "",
        "outside": _outside_address(),
        "port": _free_port(),
    }


def _facts() -> dict[str, Any]:
    """Say what this host has: cores, memory, GPUs, and what `tutti probe` has measured here."""
    probed = Path("~/.cache/tutti").expanduser() / f"cluster-{socket.gethostname()}.json"
    names = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()] if not done.returncode else []
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "gpus": names,
        "probed": probed.read_text(encoding="utf-8") if probed.is_file() else "",
    }


def _directory(request: dict[str, Any]) -> dict[str, Any]:
    """Make the directory of the code, or look for it, and tell the checkpoints of the run that is resumed there."""
    directory = Path(request["directory"]).expanduser()
    problem = _problem(directory, make=request["make"], private=request["private"])
    if request["make"] and not problem:
        token = directory / f".tutti-{request['token']}"  # by which other hosts see that they share the directory
        token.touch()
        _TOKENS.append(token)
    indices = sorted((directory / request["run"] / "checkpoints").glob("step-*/index.json"))
    checkpoints = [str(path.parent) for path in indices if "." not in path.parent.name]
    absent = [path for path in request["needed"] if not (directory / path).exists()]
    return {"directory": str(directory), "problem": problem, "checkpoints": checkpoints, "absent": absent}


class _Chunks(io.RawIOBase):
    """Reads what the other side sends in chunks as one stream."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._left, self._ended = source, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left and not self._ended:
            self._left = int(self._source.readline() or b"0")
            self._ended = not self._left
        if self._ended:
            return 0
        data = self._source.read(min(len(buffer), self._left))
        if not data:
            raise EOFError("the connection ended")
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        """Read to the end, so that the next request can be read."""
        while self.read(1 << 20):
            pass


def _receive(request: dict[str, Any], source: BinaryIO) -> dict[str, Any]:
    """Unpack a tar archive; into a folder that then appears at once, unless it is there and `merge` is said."""
    target = Path(request["to"]).expanduser()
    stream = _Chunks(source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if request["merge"]:
            _unpack(stream, target)
        else:
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
            try:
                _unpack(stream, partial)
                if target.exists():  # another run has brought it meanwhile, or it is damaged
                    shutil.rmtree(target)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, tarfile.TarError) as error:
        with contextlib.suppress(OSError, EOFError):
            stream.drain()
        return {"problem": getattr(error, "strerror", None) or str(error), "directory": str(target)}
    stream.drain()
    return {"problem": "", "directory": str(target)}


def _unpack(stream: _Chunks, target: Path) -> None:
    with tarfile.open(fileobj=io.BufferedReader(stream, 1 << 20), mode="r|") as archive:
        if hasattr(tarfile, "tar_filter"):
            archive.extractall(target, filter="tar")
        else:
            archive.extractall(target)


def _answer(request: dict[str, Any], source: BinaryIO) -> dict[str, Any]:
    if request["action"] == "check":
        return _check(request)
    if request["action"] == "facts":
        return _facts()
    if request["action"] == "directory":
        return _directory(request)
    if request["action"] == "receive":
        return _receive(request, source)
    directory = Path(request["directory"])
    if request["action"] == "space":
        return {"free": shutil.disk_usage(directory).free}
    return {"seen": [token for token in request["tokens"] if (directory / f".tutti-{token}").exists()]}


def main() -> None:
    """Answer requests until there are no more."""
    source = sys.stdin.buffer
    try:
        while line := source.readline():
            answer = _answer(json.loads(line), source)
            print(f"{MARK}{json.dumps(answer)}", flush=True)
    finally:
        for token in _TOKENS:
            token.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
