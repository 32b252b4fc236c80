"""Hosts that are reached by ssh: their list, the settings, the ssh command, and what ssh's errors mean."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tutti.clusters.profile_file import read_cluster_settings
from tutti.config.safe_text import plain_text
from tutti.errors import LaunchError

CONNECT_TIMEOUT_S = 10

_MOST_NBYTES = 1 << 20

_HOST = re.compile(r"(?P<who>[\w.-]+@)?(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][\w.-]*)(?::(?P<ranks>\d+))?")

Text = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00-\x1f]*$")]


class SshSettings(BaseModel):
    """The settings of a run over ssh, from `[ssh]` of tutti.toml and from --request.

    Attributes:
        hosts: such as "node0:8,user@node1:4", a list of such texts, or a file with one a line.
        port: of sshd.
        user: on the hosts.
        identity: file of the key.
        config: ssh's file of settings, instead of the user's.
        options: further arguments of ssh, such as "-J gateway".
        python: the interpreter on the hosts.
        directory: where the code is on the hosts, or is copied to.
        sync: how the code comes to the hosts: "rsync" copies this directory, "git" what is committed, "none" nothing,
            as the hosts see it. If it is not given: "none" if all hosts see the run folder and no directory is named,
            else "rsync".
        exclude: further patterns that rsync leaves out.
        fetch: what comes back at the end: "all", or all but the checkpoints, which stay on the first host.
        versions: "same": the versions of Python and torch on the hosts must be those of this machine; "any".
        rendezvous: HOST:PORT where the hosts meet, if the first host is not reached where ssh reaches it.
        setup: shell lines that run first on each host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    hosts: Text | tuple[Text, ...] = ()
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    user: Text | None = None
    identity: Text | None = None
    config: Text | None = None
    options: tuple[Text, ...] = ()
    python: Text | None = None
    directory: Text | None = None
    sync: Literal["rsync", "git", "none"] | None = None
    exclude: tuple[Text, ...] = ()
    fetch: Literal["all", "reports"] = "all"
    versions: Literal["same", "any"] = "same"
    rendezvous: Annotated[str, Field(pattern=r"^.+:\d+$")] | None = None
    setup: tuple[Annotated[str, Field(pattern=r"^[^\x00]*$")], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """A host: its address as ssh takes it, and the number of ranks there; None leaves that to --nproc."""

    address: str
    ranks: int | None = None

    @property
    def name(self) -> str:
        """Its name in messages: the address without the user."""
        return self.address.rpartition("@")[2]


def read_ssh_settings(given: Mapping[str, Any]) -> SshSettings:
    """Return the settings after a check.

    Raises:
        LaunchError: one does not exist, or has no value that it may have.
    """
    lists = ("options", "exclude", "setup")  # which --request gives as one text
    read = {name: (value,) if name in lists and isinstance(value, str) else value for name, value in given.items()}
    return read_cluster_settings(SshSettings, read, "ssh")


def read_hosts(settings: SshSettings, directory: Path) -> tuple[SshHost, ...]:
    """Return the hosts.

    Args:
        settings: of the run.
        directory: where a relative path of a file of hosts begins.

    Raises:
        LaunchError: there are none, one is written twice or cannot be read, or only some have a number of ranks.
    """
    stated = settings.hosts if isinstance(settings.hosts, tuple) else (settings.hosts,)
    file = directory / os.path.expanduser(stated[0]) if len(stated) == 1 else None
    place = "--hosts"
    if file is not None and (os.path.isfile(file) or ("/" in stated[0] and "," not in stated[0])):
        place, texts = stated[0], _lines(file)
    else:
        texts = [text.strip() for part in stated for text in part.split(",")]
    hosts = []
    for text in texts:
        match = _HOST.fullmatch(text)
        if match is None or match["ranks"] == "0":
            raise LaunchError(f"{place}: {text!r} is no host; write user@host:RANKS, such as node1:8, or host alone")
        ranks = None if match["ranks"] is None else int(match["ranks"])
        hosts.append(SshHost(address=f"{match['who'] or ''}{match['host']}", ranks=ranks))
    if not hosts:
        raise LaunchError("no hosts are named; write --hosts node0:8,node1:8, or `hosts` under [ssh] in tutti.toml")
    for host in hosts:
        if hosts.count(host) > 1 or len([one for one in hosts if one.address == host.address]) > 1:
            raise LaunchError(f"{place} names {host.address} twice; name it once, with the ranks of both")
    if len({host.ranks is None for host in hosts}) > 1:
        raise LaunchError(f"{place}: only some hosts have a number of ranks; give all of them one, such as node1:8")
    return tuple(hosts)


def _lines(file: Path) -> list[str]:
    try:
        if file.stat().st_size > _MOST_NBYTES:
            raise LaunchError(f"{file} has more than 1 MiB; name a file with one host a line")
        lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the file of hosts {file} cannot be read ({error}); correct --hosts") from None
    return [re.sub(r"\s+(?:slots=)?(\d+)$", r":\1", line) for line in lines if line]


def ssh_words(settings: SshSettings) -> list[str]:
    """Return the ssh command without the host."""
    words = ["ssh", "-T", "-o", "BatchMode=yes"]
    for option in settings.options:
        words += shlex.split(option)
    words += ["-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "-o", "ServerAliveInterval=5"]
    words += ["-o", "ServerAliveCountMax=3"]
    config = None if settings.config is None else os.path.expanduser(settings.config)
    for option, value in (("-F", config), ("-p", settings.port), ("-l", settings.user)):
        words += [option, str(value)] if value is not None else []
    return words + (["-i", settings.identity] if settings.identity is not None else [])


def ssh_command(settings: SshSettings, host: SshHost) -> list[str]:
    """Return the command that runs a bash script on a host: what comes to its input, up to a zero byte.

    The script stands on no command line, which others could read here and there. Any login shell takes this line.
    """
    return [
        *ssh_words(settings),
        "--",
        host.address.replace("[", "").replace("]", ""),
        """bash -c 'IFS= read -r -d "" s && eval "unset s; $s"'""",
    ]


NO_PYTHON, NO_SETUP = "tutti-no-python", "tutti-no-setup"

_BOOT = "import sys; sys.path[:] = filter(None, sys.path); s = sys.stdin.buffer; exec(s.read(int(s.readline())))"
"""What Python runs on a host: the code that comes first, which reads the rest. Its argument is the connection."""


_SAFE = r"""
safe() {
  local p=$1 m o g
  while :; do
    read -r m _ o g _ <<< "$(command ls -ldn -- "$p" 2>/dev/null)"
    [[ $o == 0 || $o == "$EUID" ]] || return 1
    case $m in
      l*|?????????[tT]*) ;;
      ????????w*) return 1;;
      ?????w*) [[ $g == 0 || ( $g == "$(id -g)" && $(id -gn) == "$(id -un)" ) ]] || return 1;;
    esac
    [[ $p == / ]] && return
    p=${p%/*}
    p=${p:-/}
  done
}
"""
"""Whether only root and this user can change what is under a path: a stranger may have put an interpreter there."""


def bash_script(settings: SshSettings) -> bytes:
    """Return what runs on a host: the setup lines, then Python, which runs the code that comes to its input.

    Python is the one that is named, else one of this minor version: under the path that it has here, if nobody else
    can change it there, else on PATH. The script ends with a zero byte.
    """
    wanted = f"sys.version_info[:2] != {sys.version_info[:2]}"
    minor = "python{}.{}".format(*sys.version_info)
    names = f"{minor} python3"
    if settings.python:
        home = '"$HOME"/' if settings.python.startswith("~/") else ""
        names = home + shlex.quote(settings.python.removeprefix("~/") if home else settings.python)
    if settings.versions == "any":
        wanted = "sys.version_info < (3, 11)"
    lines = []
    for number, line in enumerate(settings.setup, 1):
        failed = f"echo; echo {NO_SETUP} {number}; exit 97"
        lines += [f"trap {shlex.quote(failed)} EXIT", f"eval {shlex.quote(line)} </dev/null || exit 97"]
    start = f'exec "$p" -u -c {shlex.quote(_BOOT)} "$SSH_CONNECTION"'
    tested = f'"$p" -c "import sys; sys.exit({wanted})" 2>/dev/null </dev/null && {start}'
    lines += ["trap - EXIT", "set +eu", "seen=", f"set -- {names}"]
    if not settings.python:
        same = shlex.quote(sys.executable)
        lines += [
            _SAFE,
            f'(PATH=/usr/bin:/bin:$PATH; safe {same} && safe "$(readlink -f {same})") && set -- {same} "$@"',
        ]
    lines += [
        'for p in "$@"; do',
        f'if command -v "$p" >/dev/null 2>&1; then {tested}; seen="$seen, $p is $("$p" -V 2>&1 </dev/null)"; fi',
        "done",
        f'echo "{NO_PYTHON}$seen"; exit 96',
    ]
    return "\n".join(lines).encode() + b"\0"


_MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*changed",
     "its host key is another than the one known here",
     "if that is right, remove the old one: ssh-keygen -R {host}"),
    (r"host key verification failed|no .* host key is known",
     "its host key is not known here",
     "connect once by hand (`{hand}`) and compare the fingerprint, or add it to known_hosts"),
    (r"permission denied", "it does not let you in without a password ({said})",
     "add your key there (`ssh-copy-id {host}`), or name user and key: --request user=NAME,identity=FILE"),
    (r"could not resolve hostname", "its name is not known here", "correct it in --hosts, or in ssh's config"),
    (r"connection refused", "no sshd listens there ({said})", "start sshd, or name its port: --request port=N"),
    (r"timed out|no route to host|network is unreachable", "it cannot be reached ({said})",
     "check that it is up, and the network to it"),
    (r"bash: (command )?not found|exec .*bash", "it has no bash", "install it there"),
    (r"bad configuration option|can't open user config file|unknown (option|key)|usage: ssh|command-line",
     "ssh does not take its settings ({said})", "correct them in tutti.toml or --request"),
)  # fmt: skip


def explain_ssh(settings: SshSettings, host: SshHost, code: int | None, said: str) -> str:
    """Return why a connection failed, as a sentence that begins with the host and ends with the remedy.

    Args:
        settings: of the run.
        host: the host.
        code: ssh's exit code; None if there was no answer in time.
        said: what ssh and the host's shell wrote.
    """
    lines = [line for line in plain_text(said).splitlines() if line.strip()]
    for line in lines:
        if line.startswith(NO_PYTHON):
            return f"{host.name}: {_no_python(settings, line.removeprefix(NO_PYTHON).lstrip(', '))}"
        if line.startswith(NO_SETUP):
            number = int(line.split()[1])
            return f"{host.name}: setup line {number} failed ({settings.setup[number - 1]}); correct it in tutti.toml"
    words = " ".join(lines[-1:])[:200] or (f"ssh ended with exit code {code}" if code is not None else "no answer")
    hand = shlex.join([*ssh_words(settings.model_copy(update={"options": ()}))[:1], *_by_hand(settings), host.address])
    for pattern, meaning, remedy in _MEANINGS:
        if re.search(pattern, said, re.IGNORECASE):
            fields = {"said": words, "host": host.name, "hand": hand}
            return f"{host.name}: {meaning.format(**fields)}; {remedy.format(**fields)}"
    return f"{host.name}: {words}; try `{hand}`"


def _by_hand(settings: SshSettings) -> list[str]:
    return [
        word for name, value in (("-F", settings.config), ("-p", settings.port)) if value for word in (name, str(value))
    ]


def _no_python(settings: SshSettings, seen: str) -> str:
    here = "{}.{}".format(*sys.version_info)
    wanted = "3.11 or newer" if settings.versions == "any" else f"{here}, as here"
    if settings.python:
        is_there = seen.partition(" is ")[2]
        found = f"{settings.python} is {is_there} there" if is_there else f"there is no {settings.python}"
        return f"{found}, and Python {wanted} is needed; correct --request python=PATH"
    return (
        f"there is no Python {wanted} ({seen or 'none was found'}); install it, or name it with --request python=PATH"
    )
