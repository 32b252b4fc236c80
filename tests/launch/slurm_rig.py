"""A private Slurm of two nodes on this machine: own munge key, own ports, loopback only, no database."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

NODES = 2

CONFIGURATION = """\
ClusterName=tutti
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
CommunicationParameters=NoAddrCache
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=20
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/{scheduler}
SchedulerParameters=requeue_delay=0,batch_sched_delay=1,bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
"""


def missing() -> str | None:
    """Why no Slurm can be brought up here, or None."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    programs = ("slurmctld", "slurmd", "munged", "srun", "scontrol")
    absent = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


GPU_NODES = {"g0": "a100:8", "g1": "a100:8", "u0": "zx81:4"}
"""Nodes that Slurm counts GPUs on, by name, with the type and number; there are no devices behind them."""

_GPU_LINES = """\
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=500000 Gres=gpu:{gpus}
"""

_GPU_PARTITIONS = """\
NodeName=g2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=500000 Gres=gpu:a100:8 State=DOWN
PartitionName=gpu Nodes=g[0-2] MaxTime=1-00:00:00 MaxNodes=2 State=UP
PartitionName=odd Nodes=u0 State=UP
PartitionName=closed Nodes=u0 State=DOWN
"""


@contextmanager
def slurm(
    base: Path,
    *,
    scheduler: str = "builtin",
    gpus: int = 0,
    types: Sequence[str] = (),
    gpu_partitions: bool = False,
) -> Iterator[dict[str, str]]:
    """A running cluster; yields the environment in which srun finds it. All its daemons end with the context.

    Args:
        base: a short path (sockets) that everybody may enter (munge insists).
        scheduler: "backfill" also starts heterogeneous jobs.
        gpus: that Slurm counts on each node, which are devices of no use.
        types: what Slurm calls the GPUs of each node; it has no name for them if there are none.
        gpu_partitions: there are also partitions of `GPU_NODES`, and a node that is down.
    """
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        yield _up(base, daemons, scheduler, gpus, types, GPU_NODES if gpu_partitions else {})
    finally:
        for daemon in reversed(daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


@contextmanager
def own_slurm(**options: Any) -> Iterator[dict[str, str]]:
    """A cluster of `slurm` in a folder of its own, where the state of submitted runs is, too; skips without Slurm."""
    if missing() is not None:
        pytest.skip(str(missing()))
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    base.chmod(0o755)
    try:
        with slurm(base, **options) as environment:
            yield {**environment, "XDG_STATE_HOME": str(base)}
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _up(
    base: Path,
    daemons: list[subprocess.Popen[bytes]],
    scheduler: str,
    gpus: int,
    types: Sequence[str],
    typed: Mapping[str, str],
) -> dict[str, str]:
    host = socket.gethostname().partition(".")[0]
    names = [f"n{index}" for index in range(NODES)]
    ports = _free_ports(NODES + len(typed) + 2)
    lines = [CONFIGURATION.format(host=host, base=base, port=ports[0], scheduler=scheduler)]
    lines += ["GresTypes=gpu\n"] if gpus or typed else []
    for name, port, kind in zip(names, ports[1 : NODES + 1], types or [""] * NODES, strict=True):
        gres = f" Gres=gpu:{kind}{':' if kind else ''}{gpus}" if gpus else ""
        lines.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4{gres} State=UNKNOWN\n")
    for (name, counted), port in zip(typed.items(), ports[NODES + 1 :], strict=False):
        lines.append(_GPU_LINES.format(name=name, host=host, port=port, gpus=counted))
    if gpus or typed:
        found = [
            *_gpus_of_nodes(base, gpus, types),
            *(_gpus_of(base, name, counted) for name, counted in typed.items()),
        ]
        (base / "gres.conf").write_text("".join(found))
    if typed:
        lines.append(_GPU_PARTITIONS.format(host=host, port=ports[-1]))
    for name in (*names, *typed):
        (base / f"spool-{name}").mkdir()
    lines.append(f"PartitionName=main Nodes=n[0-{NODES - 1}] Default=YES MaxTime=INFINITE State=UP GraceTime=40\n")
    lines.append(f"PartitionName=urgent Nodes=n[0-{NODES - 1}] PriorityTier=10 PreemptMode=OFF State=UP\n")
    (base / "state").mkdir()
    configuration = base / "slurm.conf"
    configuration.write_text("".join(lines))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}

    def start(*command: str) -> None:
        with (base / f"{command[0]}.out").open("ab") as log:
            daemons.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    key = base / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    start(
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={base}/munge.socket",
        f"--pid-file={base}/munged.pid", f"--log-file={base}/munged.log", f"--seed-file={base}/munged.seed",
    )  # fmt: skip
    _wait("munged", lambda: (base / "munge.socket").exists(), base)
    start("slurmctld", "-D", "-f", str(configuration))
    for name in (*names, *typed):
        start(*slurmd({"SLURM_CONF": str(configuration)}, name))
    _wait("the nodes", lambda: idle_nodes(environment) == NODES + len(typed), base)
    return {"SLURM_CONF": str(configuration)}


def _gpus_of_nodes(base: Path, count: int, types: Sequence[str]) -> Iterator[str]:
    """Make the files that Slurm counts as GPUs of each node; yield their lines of gres.conf."""
    for node in range(NODES):
        for gpu in range(count):
            file = base / f"gpu-{node}-{gpu}"  # Slurm gives jobs devices only; this is another /dev/null
            os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            kind = f"Type={types[node]} " if types else ""
            yield f"NodeName=n{node} Name=gpu {kind}File={file}\n"


def _gpus_of(base: Path, name: str, counted: str) -> str:
    """Return the line of gres.conf for a node; slurmd counts files, whatever is in them."""
    kind, _, count = counted.partition(":")
    for index in range(int(count)):
        (base / f"{name}-gpu{index}").touch()
    return f"NodeName={name} Name=gpu Type={kind} File={base}/{name}-gpu[0-{int(count) - 1}]\n"


def idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return len(set(done.stdout.split())) if done.returncode == 0 else 0


def lose_node(cluster: dict[str, str], name: str) -> None:
    """Kill a node: its slurmd, and everything that it has started."""
    lost: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == slurmd(cluster, name):
                lost.append(process)
            variables = process.environ()
            here = variables.get("SLURM_CONF") == cluster["SLURM_CONF"]
            if here and variables.get("SLURMD_NODENAME") == name and process.pid != os.getpid():
                parent = process.parent()
                lost += [process] if parent is None or "slurmstepd" not in parent.name() else [parent, process]
    for process in lost:
        with suppress(psutil.Error):
            process.kill()


def slurmd(cluster: dict[str, str], name: str) -> list[str]:
    """Return the command that starts a node."""
    return ["slurmd", "-D", "-N", name, "-f", cluster["SLURM_CONF"]]


def _wait(what: str, ready: object, base: Path, timeout_s: float = 40) -> None:
    assert callable(ready)
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(base.glob("*.log")))
            raise TimeoutError(f"{what} did not come up in {timeout_s:g} s\n{logs}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports
