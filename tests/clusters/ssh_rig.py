"""Real sshd's as hosts on this machine: own keys, own ports, own homes, and disks that the others do not see."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SSHD = "/usr/sbin/sshd"

SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {base}/host_key
PidFile {base}/{name}.pid
AuthorizedKeysFile {base}/authorized_keys
UsePAM no
LogLevel VERBOSE
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv HOME={base}/home-{name} OMP_NUM_THREADS=1 TEST_MARK={mark}
Subsystem sftp internal-sftp
"""

CLIENT_CONFIG = """\
Host {name}
    HostName {address}
    Port {port}
    User root
    IdentityFile {base}/key
    IdentitiesOnly yes
    UserKnownHostsFile {base}/known_hosts
    StrictHostKeyChecking yes
"""

_MOUNT = """
mount --bind "$2" "$1" && mount -t tmpfs -o size=100k tmpfs "$3" && mkdir "$3/nothing" &&
mount --bind "$3/nothing" "$4" && shift 4 && exec "$@"
"""


def missing_for_ssh() -> str | None:
    """Why no sshd can be brought up here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a private sshd with a disk of its own needs root on Linux"
    absent = [name for name in ("ssh", "rsync", "unshare") if shutil.which(name) is None]
    absent += [] if Path(SSHD).exists() else ["sshd"]
    return f"not installed: {', '.join(absent)}" if absent else None


@dataclass
class SshHosts:
    """Hosts that run.

    Attributes:
        base: their files, with the client's `config`.
        disk: a folder that is another one on each host; its content is in base/disk-NAME.
        small: the same, with room for 100 KB.
        daemons: the sshd of each.
    """

    base: Path
    disk: Path
    mark: str
    hidden: Path | None = None
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def small(self) -> Path:
        return self.base / "small"

    @property
    def config(self) -> Path:
        return self.base / "config"

    def on(self, name: str) -> Path:
        """What is `disk` on a host."""
        return self.base / f"disk-{name}"

    def processes(self) -> list[int]:
        """Living processes that a host's sshd has started and not ended, without the daemons."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                if f"TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state not in "ZX" else []
        return found


def _make_key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text()


def make_noisy(hosts: SshHosts, name: str) -> Path:
    """Let the shell of a host print something when it starts; returns the file that does it."""
    file = hosts.base / f"home-{name}/.bashrc"
    file.write_text(f"echo welcome to {name}\n")
    return file


@contextmanager
def ssh_hosts(
    base: Path,
    names: Sequence[str],
    *,
    addresses: Sequence[str] = (),
    inside: Sequence[Sequence[str]] = (),
    hidden: Path | None = None,
) -> Iterator[SshHosts]:
    """Hosts that ssh reaches by `ssh -F base/config NAME`.

    Args:
        base: a new folder for all their files.
        names: of the hosts.
        addresses: where they listen; all on loopback if not given.
        inside: for each, the words that run a command there, such as those of a lab; none if not given.
        hidden: a folder that is empty on the hosts.
    """
    hosts = SshHosts(base=base, disk=base / "a disk", hidden=hidden, mark=secrets.token_hex(8))
    Path("/run/sshd").mkdir(exist_ok=True)
    hosts.disk.mkdir(parents=True)
    hosts.small.mkdir()
    (base / "authorized_keys").write_text(_make_key(base / "key"))
    key = " ".join(_make_key(base / "host_key").split()[:2])
    known, client = [], []
    try:
        for number, name in enumerate(names):
            address = addresses[number] if addresses else "127.0.0.1"
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            fields = {"base": base, "name": name, "port": port, "address": address, "mark": hosts.mark}
            (base / f"sshd-{name}").write_text(SSHD_CONFIG.format(**fields))
            client.append(CLIENT_CONFIG.format(**fields))
            known.append(f"[{address}]:{port} {key}\n")
            hosts.on(name).mkdir()
            (base / f"home-{name}").mkdir()
            hosts.daemons[name] = _start(hosts, name, list(inside[number]) if inside else [])
        (base / "known_hosts").write_text("".join(known))
        hosts.config.write_text("\n".join(client))
        for name in names:
            _wait_for(hosts, name)
        yield hosts
    finally:
        for daemon in hosts.daemons.values():
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for pid in hosts.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in hosts.daemons.values():
            daemon.wait(10)


def _start(hosts: SshHosts, name: str, inside: list[str]) -> "subprocess.Popen[bytes]":
    """Start an sshd in a mount namespace of its own."""
    base = hosts.base
    sshd = [SSHD, "-D", "-e", "-f", str(base / f"sshd-{name}")]
    mounts = [str(hosts.disk), str(hosts.on(name)), str(hosts.small), str(hosts.hidden or hosts.small / "nothing")]
    with (base / f"sshd-{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*inside, "unshare", "-m", "sh", "-c", _MOUNT, "sh", *mounts, *sshd],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _wait_for(hosts: SshHosts, name: str) -> None:
    deadline = time.monotonic() + 20
    pid = hosts.base / f"{name}.pid"
    while not pid.exists():
        if time.monotonic() > deadline or hosts.daemons[name].poll() is not None:
            raise TimeoutError(f"sshd of {name} did not come up: {(hosts.base / f'sshd-{name}.log').read_text()}")
        time.sleep(0.05)
