"""A run keeps its secret and the user's, listens on its own interface only, and gives way to a long TMPDIR."""

import os
import socket
import time
from pathlib import Path

import psutil
import pytest
from launch_rig import TUTTI, running, tutti_run, wait_until

from tutti.launch.launch_environment import of_node
from tutti.launch.launcher import LaunchSpec

SCRIPT = """
import argparse, os, time
from pathlib import Path
import torch, tutti
from torch import nn

parser = argparse.ArgumentParser()
for name in ("--api-key", "--token", "--data", "--lr", "--wait"):
    parser.add_argument(name)
arguments = parser.parse_args()
assert arguments.token == arguments.api_key == "SECRETVALUE"
torch.manual_seed(0)
samples = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
model = nn.Linear(2, 1)
job = tutti.Job(global_batch_size=4, seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, samples, nn.functional.mse_loss)
for batch in loader:
    job.step(batch)
    if arguments.wait:
        Path(arguments.wait + os.environ["RANK"]).write_text(os.environ["TUTTI_SECRET"])
    while arguments.wait and not Path(arguments.wait).exists():
        time.sleep(0.05)
"""

GIVEN = ("--api-key", "SECRETVALUE", "--token=SECRETVALUE", "--data", "s3://me:SECRETVALUE@host/b", "--lr", "0.1")


def listening_addresses(processes: list[int]) -> set[str]:
    """Where these processes listen, as /proc/net/tcp and tcp6 of them say."""
    found = set()
    for pid in processes:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.ip)
    return found


def texts_below(folder: Path) -> str:
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file())


def test_a_run_keeps_secrets_and_listens_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = (*TUTTI, "run", "--no-predict", "--nproc", "2", "--folder", "run", "train.py", *GIVEN, "--wait", "go")
    with running(*command, cwd=tmp_path) as run:
        assert wait_until(lambda: (tmp_path / "go0").exists() and (tmp_path / "go1").exists(), 60), run.finish()
        time.sleep(0.2)
        addresses = listening_addresses(run.processes())
        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in run.processes()]
        (tmp_path / "go").touch()
        code, out, err = run.finish()
    assert code == 0, err
    assert addresses == {"127.0.0.1"}
    secrets = {(tmp_path / f"go{rank}").read_text() for rank in range(2)}
    assert len(secrets) == 1
    secret = secrets.pop()
    assert len(secret) == 64
    assert secret != os.environ.get("TUTTI_SECRET")
    kept = texts_below(tmp_path / "run")
    assert "***" in kept
    for hidden in (secret, "SECRETVALUE"):
        assert hidden not in kept + out + err
    assert secret not in " ".join(commands)


def test_two_nodes_listen_on_the_interface_of_the_rendezvous_and_heed_no_stranger(tmp_path: Path) -> None:
    """A stranger talks to every port of the ranks while they train, and they go on."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = (*TUTTI, "run", "--no-predict", "--nnodes", "2", "--nproc", "1", "--rendezvous", f"127.0.0.1:{port}")
    script = ("train.py", *GIVEN, "--wait", "go")
    nodes = [(*command, "--node-rank", str(node), "--folder", f"run{node}", *script) for node in (0, 1)]
    with running(*nodes[0], cwd=tmp_path) as first, running(*nodes[1], cwd=tmp_path) as second:
        assert wait_until(lambda: (tmp_path / "go0").exists() and (tmp_path / "go1").exists(), 90), first.finish()
        processes = first.processes() + second.processes()
        assert listening_addresses(processes) == {"127.0.0.1"}
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5)  # the gate is shut
        for pid in processes:
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    with socket.create_connection(connection.laddr[:2], timeout=5) as stranger:
                        stranger.sendall(b"\x80\x04\x95" * 20)
        (tmp_path / "go").touch()
        for node in (first, second):
            code, _, err = node.finish()
            assert code == 0, err


def test_a_secret_is_in_the_environment_only_where_this_launcher_starts_all(tmp_path: Path) -> None:
    alone = LaunchSpec(target="a.py", folder=tmp_path)
    assert of_node(alone, tmp_path)["TUTTI_SECRET"] == alone.secret
    assert alone.secret not in repr(alone)
    assert LaunchSpec(target="a.py", folder=tmp_path).secret != alone.secret
    several = LaunchSpec(target="a.py", folder=tmp_path, ranks_per_node=(1, 1), rendezvous="127.0.0.1:29500")
    assert "TUTTI_SECRET" not in of_node(several, tmp_path)


@pytest.mark.long
def test_a_long_folder_of_temporary_files_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tutti_run(tmp_path, "--nproc", "2", "train.py", *GIVEN, environment={"TMPDIR": str(folder)})
    assert run.code == 0, run.err
    assert not [entry.name for entry in folder.iterdir() if entry.name.startswith(("tutti-", "pymp-"))]
