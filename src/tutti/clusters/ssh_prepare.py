"""Before a run over ssh: all hosts are looked at, and what they lack is brought there: code, tutti, a checkpoint."""

import contextlib
import errno
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import secrets
import selectors
import shlex
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from tutti.clusters import ssh_agent
from tutti.clusters.driver_job import job_in
from tutti.clusters.ssh_hosts import SshHost, SshSettings, bash_script, explain_ssh, ssh_command, ssh_words
from tutti.config.safe_text import plain_text
from tutti.errors import LaunchError
from tutti.launch.launch_environment import variables

ANSWER_S = 60.0
"""Seconds that a host has for an answer."""

_LITTLE_NBYTES = 1 << 24

_PACKAGE = Path(ssh_agent.__file__).parents[1]

_EXCLUDED = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", "/runs", ".tutti-*")
"""What rsync leaves out besides what .gitignore names: on the hosts it stays as it is."""


class Conversation:
    """A connection to a host's `tutti.clusters.ssh_agent`.

    Args:
        settings: of the run.
        host: the host.

    Raises:
        LaunchError: ssh is not installed here.
    """

    def __init__(self, settings: SshSettings, host: SshHost) -> None:
        self._settings, self.host = settings, host
        command = ssh_command(settings, host)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
            )
        except FileNotFoundError:
            raise LaunchError(
                "ssh is not installed here; install it (Debian, Ubuntu: apt install openssh-client)"
            ) from None
        self._data = bytearray()
        source = inspect.getsource(ssh_agent).encode()
        self._write(b"%b%d\n%b" % (bash_script(settings), len(source), source))

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            LaunchError: there is none; the message says why.
        """
        self._write(json.dumps({"action": action, **request}).encode() + b"\n")
        return self._answer(ANSWER_S)

    def send(self, to: str, fill: Callable[[IO[bytes]], None], *, merge: bool = False) -> dict[str, Any]:
        """Send a tar archive that the host unpacks, and return the answer.

        Args:
            to: the folder in which it is unpacked.
            fill: writes the archive.
            merge: unpack into a folder that may be there already; else it appears when it is whole.

        Raises:
            LaunchError: the connection ended.
        """
        self._write(json.dumps({"action": "receive", "to": to, "merge": merge}).encode() + b"\n")
        fill(_ChunkWriter(self._write))  # type: ignore[arg-type]
        self._write(b"0\n")
        return self._answer(None)

    def close(self) -> None:
        """End the connection."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):  # what the host says last tells why
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

    def _answer(self, timeout_s: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        said: list[str] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._data:
                    line, _, rest = bytes(self._data).partition(b"\n")
                    self._data[:] = rest
                    text = line.decode("utf-8", "replace")
                    if text.startswith(ssh_agent.MARK):
                        return dict(json.loads(text.removeprefix(ssh_agent.MARK)))
                    said.append(text)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not selector.select(left):
                    raise LaunchError(explain_ssh(self._settings, self.host, None, "\n".join(said)))
                data = self._process.stdout.read(1 << 16)
                if not data:
                    said.append(self._data.decode("utf-8", "replace"))
                    raise LaunchError(explain_ssh(self._settings, self.host, self._process.wait(), "\n".join(said)))
                self._data += data


class _ChunkWriter:
    """A stream whose content goes out in chunks, each after its length."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._out = write

    def write(self, data: bytes) -> int:
        if data:
            self._out(b"%d\n%b" % (len(data), bytes(data)))
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedHost:
    """A host that is ready.

    Attributes:
        python_path: where its Python finds tutti; empty if it is installed there.
        directory: where the command runs.
        folder: the run folder there.
        first_of: number of the first host that shares its directory.
        resume: what it resumes from; empty for nothing.
        address, outside: under which ssh reached it, and from which it reaches others.
        port: free there.
    """

    host: SshHost
    python_path: str
    directory: str
    folder: str
    first_of: int
    resume: str
    address: str
    outside: str
    port: int

    @property
    def copy(self) -> str:
        """Where the code is, as HOST:DIRECTORY."""
        return f"{self.host.address}:{self.directory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """What a run needs on its hosts.

    Attributes:
        settings: of the run.
        hosts: the hosts.
        here: the directory of the command on this machine.
        folder: the run folder on this machine.
        script: the script's path as the command names it; empty for a module.
        files: other files of this directory that the command names, which are copied whatever is left out.
        outside: relative paths that lead out of this directory.
        resume: a run folder or checkpoint on this machine, or the address of a store.
        remote_name: the run folder's name below "runs" of the directory on hosts that do not share this machine's.
        restarts: whether the run goes on after failures.
        least: fewest hosts to begin with; None for all.
        first_ranks: number of ranks on the first host.
        bare: no code is needed, so none is copied.
        token: by which hosts see that they share a folder.
    """

    settings: SshSettings
    hosts: tuple[SshHost, ...]
    here: Path
    folder: Path
    script: str
    files: tuple[str, ...]
    outside: tuple[str, ...]
    resume: Path | str | None
    remote_name: str
    restarts: bool
    least: int | None
    first_ranks: int
    bare: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(6))

    @property
    def directory(self) -> str:
        """The directory on the hosts, where they do not see this machine's."""
        return self.settings.directory or f"~/tutti/{_plain(self.here.name)}-{_digest(str(self.here))}"


def prepare_hosts(needs: HostNeeds, say: Callable[[str], None]) -> tuple[tuple[PreparedHost, ...], bool]:
    """Look at all hosts and bring what they lack.

    Args:
        needs: what the run needs there.
        say: takes messages for the user.

    Returns:
        The hosts, and whether they see this machine's run folder.

    Raises:
        LaunchError: a sentence for each host that cannot take part; nothing is left running.
    """
    token_file = needs.folder / f".tutti-{needs.token}"
    token_file.touch()
    conversations: list[Conversation] = []
    try:
        for host in needs.hosts:
            conversations.append(Conversation(needs.settings, host))
        with ThreadPoolExecutor(len(conversations)) as pool:
            return _prepared(needs, conversations, pool, token_file, say)
    finally:
        token_file.unlink(missing_ok=True)
        for conversation in conversations:
            conversation.close()


def host_facts(settings: SshSettings, hosts: Sequence[SshHost]) -> list[dict[str, Any]]:
    """Return what hosts have: cores, memory, GPUs, and what was measured there.

    Raises:
        LaunchError: a sentence for each host that does not answer.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as pool:
        asked = [stack.enter_context(contextlib.closing(Conversation(settings, host))) for host in hosts]
        told, problems = _all(pool, lambda number: asked[number].ask("facts"), range(len(hosts)))
        _refuse(problems)
        return [told[number] for number in range(len(hosts))]


def _prepared(
    needs: HostNeeds,
    conversations: Sequence[Conversation],
    pool: ThreadPoolExecutor,
    token_file: Path,
    say: Callable[[str], None],
) -> tuple[tuple[PreparedHost, ...], bool]:
    names, digest = _distributions(), ssh_agent.package_digest(_PACKAGE)
    here = ssh_agent.distribution_versions(names)
    request = {
        "token_file": str(token_file),
        "package": _PACKAGE.name,
        "digest": digest,
        "places": [str(_PACKAGE.parent)],
        "distributions": names,
    }
    known, problems = _all(pool, lambda number: conversations[number].ask("check", **request), range(len(needs.hosts)))
    if problems and needs.least is not None and 0 in known and len(known) >= needs.least:
        for words in problems.values():
            say(f"{words}\nthe run begins without this host")
        needs = replace(needs, hosts=tuple(needs.hosts[number] for number in known))
        conversations = [conversations[number] for number in known]
        known, problems = dict(enumerate(known.values())), {}
    count = len(conversations)
    sync = needs.settings.sync or ("none" if needs.settings.directory is None else "rsync")
    shared = not needs.bare and sync == "none" and all(answer["sees_run"] for answer in known.values())
    tokens = [f"{needs.token}-{number}" for number in range(count)]
    made, lost = _all(pool, lambda number: _make(needs, conversations[number], tokens[number], shared=shared), known)
    answers = {number: answer | made.get(number, {}) for number, answer in known.items()}
    problems |= lost
    for number in made:
        if found := _problems(needs, answers[number], here, names, shared=shared):
            problems[number] = "\n".join(f"{needs.hosts[number].name}: {words}" for words in found)
    _refuse(problems)
    firsts = [0] * count
    if not shared:
        firsts = [*range(count)] if needs.bare else _sharing(conversations, answers, tokens, pool)
    if needs.restarts and not shared and any(firsts):
        others = ", ".join(needs.hosts[number].name for number, first in enumerate(firsts) if first)
        what = "--max-restarts" if needs.least is None else f"--nnodes {needs.least}:{count}"
        raise LaunchError(
            f"{what} goes on from checkpoints in a folder that all hosts share, and {others} does not see "
            f"{answers[0]['directory']} of {needs.hosts[0].name}; name one with --request directory=PATH, or leave "
            f"{what} out"
        )
    _ship_tutti(needs, conversations, answers, digest, pool, say)
    if not shared and not needs.bare:
        for number, answer in answers.items():
            if job := job_in(f"{needs.hosts[number].address}:{answer['directory']}"):
                problems[number] = (
                    f"{needs.hosts[number].name}: ssh job {job} still runs the code in {answer['directory']}, which a "
                    "copy would change; wait for its end, `tutti cancel` it, or copy to another directory: --request "
                    "directory=PATH"
                )
        _refuse(problems)
        _sync(needs, conversations, answers, sorted(set(firsts)), pool)
    resume = _resumed(needs, conversations[0], answers[0], say, shared=shared)
    return _hosts(needs, answers, firsts, resume, shared=shared), shared


def _make(needs: HostNeeds, conversation: Conversation, token: str, *, shared: bool) -> dict[str, Any]:
    """Let a host make the directory, or look for it where the hosts see what is here."""
    if needs.bare:
        return conversation.ask("directory", directory="~", make=False, private=False, token=token, run="", needed=[])
    make = not shared and needs.settings.sync != "none"
    directory = needs.directory if make else _shared_directory(needs)
    run = f"runs/{needs.remote_name}"
    private = make and needs.settings.directory is None
    needed = [*([needs.script] if _outside(needs) else []), *(path for path in needs.outside if path != needs.script)]
    return conversation.ask(
        "directory", directory=directory, make=make, private=private, token=token, run=run, needed=needed
    )


def _sharing(
    conversations: Sequence[Conversation],
    answers: Mapping[int, dict[str, Any]],
    tokens: Sequence[str],
    pool: ThreadPoolExecutor,
) -> list[int]:
    """Return for each host the number of the first one that shares its directory."""

    def look(number: int) -> dict[str, Any]:
        return conversations[number].ask("look", directory=answers[number]["directory"], tokens=tokens)

    seen, problems = _all(pool, look, answers)
    _refuse(problems)
    return [min(tokens.index(token) for token in seen[number]["seen"]) for number in sorted(seen)]


def _hosts(
    needs: HostNeeds,
    answers: Mapping[int, dict[str, Any]],
    firsts: Sequence[int],
    resume: str,
    *,
    shared: bool,
) -> tuple[PreparedHost, ...]:
    found = []
    for number, host in enumerate(needs.hosts):
        answer = answers[number]
        folder, own = str(needs.folder), resume
        if not shared:
            # A host that does not see the first one's disk begins with an empty folder, in which only its logs are.
            name = needs.remote_name if not firsts[number] else f"{needs.remote_name}-node{number}-{needs.token}"
            folder = f"{answer['directory']}/{'.cache/tutti' if needs.bare else 'runs'}/{name}"
            own = folder if resume and firsts[number] and not is_address(resume) else resume
        found.append(
            PreparedHost(
                host=host,
                python_path="" if answer["tutti"] == "installed" else answer["tutti"],
                directory=answer["directory"],
                folder=folder,
                first_of=firsts[number],
                resume=own,
                address=answer["address"],
                outside=answer["outside"],
                port=answer["port"],
            )
        )
    return tuple(found)


def is_address(place: str) -> bool:
    """Return whether this is the address of a store of checkpoints."""
    return "://" in place


def _all(
    pool: ThreadPoolExecutor, function: Callable[[int], dict[str, Any]], numbers: Iterable[int]
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Call a function for hosts at once, and return the answers, and what went wrong, by the hosts' numbers."""
    futures = {number: pool.submit(function, number) for number in numbers}
    answers, problems = {}, {}
    for number, future in futures.items():
        try:
            answers[number] = future.result()
        except LaunchError as error:
            problems[number] = str(error)
    return answers, problems


def _refuse(problems: Mapping[int, str]) -> None:
    if problems:
        raise LaunchError("\n".join(dict.fromkeys(problems[number] for number in sorted(problems))))


def _problems(
    needs: HostNeeds, answer: dict[str, Any], here: dict[str, str], names: Sequence[str], *, shared: bool
) -> list[str]:
    """Return why a host cannot take part, a sentence for each reason."""
    found, there = [], answer["versions"]
    missing = [name for name in names if name not in there]
    if missing:
        found.append(
            f"{answer['executable']} (Python {answer['python']}) lacks {', '.join(missing)}; install them there, or "
            "name another Python: --request python=PATH"
        )
    elif needs.settings.versions == "same" and _release(there["torch"]) != _release(here["torch"]):
        found.append(
            f"torch is {there['torch']} there and {here['torch']} here; install one version, or allow it: "
            "--request versions=any"
        )
    if needs.settings.sync == "none" and not answer["sees_run"] and not needs.bare:
        found.append(
            f"it does not see the run folder {needs.folder}, as sync=none needs; name one that all hosts share with "
            "--folder, or let the code be copied: --request sync=rsync"
        )
    if answer["problem"]:
        found.append(
            f"the directory {answer['directory']} cannot be used there ({answer['problem']}); name another one: "
            "--request directory=PATH"
        )
    if not shared and not needs.bare and needs.settings.sync in (None, "rsync") and not answer["rsync"]:
        found.append("rsync is not installed there; install it, or copy what is committed with --request sync=git")
    found += [
        f"there is no {path}, and only what is below {needs.here} is copied; name a path in there"
        for path in answer["absent"]
    ]
    return found


def _release(version: str) -> str:
    return version.partition("+")[0]


def _distributions() -> list[str]:
    """Return the names of the distributions that tutti needs."""
    try:
        required = importlib.metadata.requires("tutti") or []
    except importlib.metadata.PackageNotFoundError:
        required = ["torch", "numpy", "pydantic", "click", "rich", "psutil"]
    return [match[0] for text in required if "extra ==" not in text and (match := re.match(r"[\w.-]+", text))]


def _ship_tutti(
    needs: HostNeeds,
    conversations: Sequence[Conversation],
    answers: Mapping[int, dict[str, Any]],
    digest: str,
    pool: ThreadPoolExecutor,
    say: Callable[[str], None],
) -> None:
    """Bring this machine's tutti to hosts that have another or none, and note where their Pythons find it."""
    lacking = [number for number, answer in answers.items() if not answer["tutti"]]
    for number in lacking:
        state = "another tutti" if answers[number]["own_tutti"] else "no tutti"
        say(f"{needs.hosts[number].name} has {state}: this machine's is brought there")

    def fill(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            archive.add(_PACKAGE, "tutti", filter=lambda entry: None if "__pycache__" in entry.name else entry)

    def send(number: int) -> dict[str, Any]:
        answer = conversations[number].send(f"~/.cache/tutti/python/{digest}", fill)
        return _checked(needs.hosts[number], answer, "tutti")

    sent, problems = _all(pool, send, lacking)
    _refuse(problems)
    for number, answer in sent.items():
        answers[number]["tutti"] = answer["directory"]


def _checked(host: SshHost, answer: dict[str, Any], what: str) -> dict[str, Any]:
    if answer["problem"]:
        raise LaunchError(
            f"{host.name}: {what} could not be copied to {answer['directory']} ({answer['problem']}); free space "
            "there, or name another directory: --request directory=PATH"
        )
    return answer


def _sync(
    needs: HostNeeds,
    conversations: Sequence[Conversation],
    answers: Mapping[int, dict[str, Any]],
    chosen: Sequence[int],
    pool: ThreadPoolExecutor,
) -> None:
    """Bring the code to hosts, one of each group that shares a disk."""
    if needs.settings.sync == "git":
        archive = _git_archive(needs.here)
        _refuse(_all(pool, lambda number: _send_archive(conversations[number], answers[number], archive), chosen)[1])
        return
    if shutil.which("rsync") is None:
        raise LaunchError(
            "rsync is not installed here; install it (Debian, Ubuntu: apt install rsync), or copy what is committed "
            "with --request sync=git"
        )
    ignored = git_ignored(needs.here)

    def copy(number: int) -> dict[str, Any]:
        return _rsync(needs, conversations[number], answers[number]["directory"], ignored)

    _refuse(_all(pool, copy, chosen)[1])


def git_ignored(here: Path) -> bytes | None:
    """Return what git ignores below a directory, as patterns of rsync that end with a zero byte each.

    Returns:
        None outside of repositories, and for a directory that its repository ignores as a whole.

    Raises:
        LaunchError: git cannot say what it ignores.
    """
    command = ["git", "--no-optional-locks", "-C", str(here), "rev-parse", "--show-prefix"]
    environment = variables() | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
    except FileNotFoundError:
        if not any((folder / ".git").exists() for folder in (here, *here.parents)):
            return None
        raise LaunchError(
            f"{here} is in a git repository, and git is not installed here, so what it ignores is not known; install "
            "git, or keep the code on a disk that the hosts see: --request sync=none"
        ) from None
    if done.returncode and b"not a git repository" in done.stderr:
        return None
    prefix, patterns, nested = done.stdout.removesuffix(b"\n"), [], []
    words = ["status", "--porcelain", "-z", "--no-renames", "--ignored=matching", "--untracked-files=all", "--", "."]
    if not done.returncode:
        done = subprocess.run([*command[:4], *words], capture_output=True, check=False, env=environment)
    if not done.returncode:
        entries = done.stdout.split(b"\0")
        modules = subprocess.run(
            [*command[:4], "ls-files", "--stage", "-z"], capture_output=True, check=False, env=environment
        )
        nested = [line.partition(b"\t")[2] for line in modules.stdout.split(b"\0") if line.startswith(b"160000 ")]
        nested += [entry[3 + len(prefix) :] for entry in entries if entry.startswith(b"?? ") and entry.endswith(b"/")]
        patterns = [entry[3:] for entry in entries if entry.startswith(b"!! ")]
    if done.returncode:
        said = " ".join(plain_text(done.stderr.decode("utf-8", "replace")).split())[:200]
        raise LaunchError(
            f"git does not say what it ignores in {here} ({said}); correct that, or use another --request sync"
        )
    if any(prefix.startswith(path) for path in patterns):
        return None
    lines = [_rsync_pattern(path[len(prefix) :]) for path in patterns]
    for name in filter(None, nested):
        below = here / os.fsdecode(name)
        if (below / ".git").exists() and (inner := git_ignored(below)):
            base = _rsync_pattern(name.rstrip(b"/"))
            lines += [base + line for line in inner.split(b"\0") if line]
    return b"".join(line + b"\0" for line in lines)


def _rsync_pattern(path: bytes) -> bytes:
    """Return the pattern of rsync for one path, in which a backslash counts only beside a wildcard."""
    return b"/" + (re.sub(rb"([\\*?\[\]])", rb"\\\1", path) if re.search(rb"[*?\[]", path) else path)


def rsync_command(needs: HostNeeds, host: SshHost, directory: str, *, in_git: bool) -> list[str]:
    """Return the command that copies this directory to a host.

    Files that were removed here are removed there only in a directory that tutti has made by itself. What git ignores
    comes to the input of the command, if this directory is in a repository.
    """
    own = [f"/{needs.folder.relative_to(needs.here)}"] if needs.folder.is_relative_to(needs.here) else []
    excluded = [f"--exclude={pattern}" for pattern in (*_EXCLUDED, *own, *needs.settings.exclude)]
    managed = ["--delete", "--chmod=Dgo="] if needs.settings.directory is None else []
    ssh = shlex.join(ssh_words(needs.settings))
    filters = [*excluded, *(["--from0", "--exclude-from=-"] if in_git else ["--filter=:- .gitignore"])]
    return ["rsync", "-a", "-s", *managed, *filters, "-e", ssh, "./", f"{host.address}:{directory}/"]


def _files_command(needs: HostNeeds, host: SshHost, directory: str) -> list[str]:
    """Return the command that copies files to a host which the other one may leave out."""
    files = [f"./{name}" for name in needs.files]
    return [
        "rsync",
        "-a",
        "-s",
        "-R",
        *(["--chmod=Dgo="] if needs.settings.directory is None else []),
        "-e",
        shlex.join(ssh_words(needs.settings)),
        *files,
        f"{host.address}:{directory}/",
    ]


def _rsync(needs: HostNeeds, conversation: Conversation, directory: str, ignored: bytes | None) -> dict[str, Any]:
    host = conversation.host
    commands = [rsync_command(needs, host, directory, in_git=ignored is not None)]
    commands += [_files_command(needs, host, directory)] if needs.files else []
    for command in commands:
        done = subprocess.run(command, cwd=needs.here, capture_output=True, check=False, input=ignored or b"")
        if done.returncode:
            break
    else:
        return {}
    said = done.stderr.decode("utf-8", "replace")
    lines = [line for line in plain_text(said).splitlines() if line.strip()]
    full = re.search(r"No space left on device|Disk quota exceeded", said)
    words = full[0] if full else (lines[0] if lines else f"rsync ended with exit code {done.returncode}")[:200]
    if not lines and conversation.ask("space", directory=directory)["free"] < _LITTLE_NBYTES:  # rsync may say nothing
        words = os.strerror(errno.ENOSPC)
    if full or not lines:
        return _checked(host, {"problem": words, "directory": directory}, "the code")
    if "is your shell clean" in said:
        raise LaunchError(
            f"{host.name}: its shell prints something when it starts, which rsync does not bear; let ~/.bashrc do "
            "so in interactive shells only there, or copy what is committed with --request sync=git"
        )
    again = shlex.join(command)
    raise LaunchError(f"{host.name}: the code could not be copied to {directory} ({words}); try `{again}`")


def _git_archive(here: Path) -> bytes:
    """Return what is committed of a directory, as a tar archive.

    Raises:
        LaunchError: it is in no git repository, or nothing is committed.
    """
    try:
        done = subprocess.run(["git", "archive", "HEAD", "."], cwd=here, capture_output=True, check=False)
    except FileNotFoundError:
        raise LaunchError("git is not installed here; install it, or use --request sync=rsync") from None
    if done.returncode:
        words = " ".join(plain_text(done.stderr.decode("utf-8", "replace")).split())[:200]
        raise LaunchError(f"git has no archive of {here} ({words}); commit the code, or use --request sync=rsync")
    return done.stdout


def _send_archive(conversation: Conversation, answer: dict[str, Any], archive: bytes) -> dict[str, Any]:
    def fill(stream: IO[bytes]) -> None:
        for begin in range(0, len(archive), 1 << 20):
            stream.write(archive[begin : begin + (1 << 20)])

    return _checked(conversation.host, conversation.send(answer["directory"], fill, merge=True), "the code")


def _resumed(
    needs: HostNeeds, first: Conversation, answer: dict[str, Any], say: Callable[[str], None], *, shared: bool
) -> str:
    """Return what the first host resumes from, after bringing it there if only this machine has it."""
    resume = needs.resume
    if resume is None or isinstance(resume, str) or shared:
        return str(resume or "")
    run, only = (resume.parent.parent, resume.name) if (resume / "index.json").is_file() else (resume, None)
    here = sorted(path.parent for path in run.glob("checkpoints/step-*/index.json") if "." not in path.parent.name)
    newest = next((path for path in reversed(here) if only in (None, path.name)), None)
    there = [Path(path) for path in answer["checkpoints"] if run == needs.folder and only in (None, Path(path).name)]
    if there and (newest is None or there[-1].name >= newest.name):
        return str(there[-1] if only else there[-1].parent.parent)
    if newest is None:
        say(f"{resume} has no checkpoint yet: the run begins again")
        return ""
    to = f"{answer['directory']}/runs/{needs.remote_name}"
    logs = [f"ranks/{rank}/{name}" for rank in range(needs.first_ranks) for name in ("stdout.log", "stderr.log")]
    logs += [f"ranks/{rank}/metrics.jsonl" for rank in range(needs.first_ranks)]
    kept = ["run.json", "metrics.jsonl", "plan.json", *logs]
    say(f"{newest.name} is brought to {first.host.name}")

    def fill(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for path in (run / name for name in kept if run == needs.folder):
                if path.is_file():
                    archive.add(path, path.relative_to(run).as_posix())
            archive.add(newest, f"checkpoints/{newest.name}")

    _checked(first.host, first.send(to, fill, merge=True), newest.name)
    return f"{to}/checkpoints/{newest.name}" if only or run != needs.folder else to


def _shared_directory(needs: HostNeeds) -> str:
    return needs.settings.directory or str(needs.here)


def _outside(needs: HostNeeds) -> bool:
    """Return whether the script is not below the directory that is copied."""
    return bool(needs.script) and not (needs.here / needs.script).resolve().is_relative_to(needs.here.resolve())


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "code"


def _digest(text: str) -> str:
    return hashlib.sha256(f"{socket.gethostname()}:{text}".encode()).hexdigest()[:8]
