"""Checkpoints in object stores: moto's S3 server over HTTP, and fsspec's store in memory."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import tutti
from harness import RankFailed, run_ranks
from trainer.training import vectors
from tutti.checkpoint.index import INDEX, RUN_STATE
from tutti.checkpoint.retention import BestMetric, Retention
from tutti.checkpoint.store import EVALUATIONS, CheckpointStore, explain
from tutti.checkpoint.uploads import Uploads, prune_store
from tutti.cli.main import cli
from tutti.commands.checkpoints import list_checkpoints
from tutti.errors import DamagedCheckpointError, NoCheckpointError, StoreError
from tutti.trainer.metrics import read_rows

SCRIPT = """
import sys, time, torch, tutti
from torch import nn
from torch.utils.data import TensorDataset
torch.set_default_dtype(torch.float64)
job = tutti.Job(global_batch_size=8, seed=3)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(32, 6, generator=generator), torch.arange(32) % 3)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), data,
                                       nn.functional.cross_entropy)
for epoch in job.epochs(int(sys.argv[1])):
    for batch in loader:
        job.step(batch)
        time.sleep(0.5)
"""


class S3(NamedTuple):
    """A bucket of a real S3 server on this host, and the environment that leads to it."""

    address: str
    environment: dict[str, str]

    def to(self, prefix: str, **options: Any) -> dict[str, Any]:
        """Options of a Job that stores its checkpoints there."""
        return {"checkpoint_store": f"{self.address}/{prefix}", "environment": self.environment, **options}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    server_of = pytest.importorskip("moto.server", reason="pip install 'tutti[dev]' has moto").ThreadedMotoServer
    pytest.importorskip("s3fs", reason="pip install 'tutti[stores]' has s3fs")
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield S3("s3://bucket", variables)
    server.stop()


def job_of(folder: Path, **options: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    os.environ.update(options.pop("environment", {}), TUTTI_RUN_FOLDER=str(folder))
    job = tutti.Job(**{"global_batch_size": 8, "seed": 3, "checkpoint_every": 2, **options})
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return job, *job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)[::2]


def train(folder: Path, epochs: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train; return the model's state. The last checkpoints are in the store when it returns."""
    job, _, loader = job_of(folder, **options)
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
    state: dict[str, torch.Tensor] = job.state_dict()
    writer = job._run().output.checkpoints
    failed = writer.finish_uploads()
    assert failed is None, failed
    return state


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])


def flip(address: str, name: str, file: str, at: int = -3) -> None:
    files, root = fsspec.core.url_to_fs(address)
    data = bytearray(files.cat_file(f"{root}/{name}/{file}"))
    data[at] ^= 1
    files.pipe_file(f"{root}/{name}/{file}", bytes(data))


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


# Training, resuming, commands --------------------------------------------------------------------

STEPS = 7
"""Steps of an epoch."""


def train_in(folder: Path, epochs: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return train(folder, epochs, options)


def test_a_run_goes_on_elsewhere_from_s3(s3: S3, tmp_path: Path) -> None:
    address = f"{s3.address}/life"
    run_ranks(train_in, 2, tmp_path / "a", 2, s3.to("life", keep_best="val/loss:min"))
    store = CheckpointStore(address)
    stored = store.complete()
    assert stored[-1].step == 2 * STEPS
    assert len(stored) == 2
    assert len(list((tmp_path / "a" / "checkpoints").glob("step-*"))) == 1
    assert not list((tmp_path / "a" / "checkpoints").glob(".uploading/*"))
    last = rows_of(tmp_path / "a", "upload")[-1]
    assert last["step"] == 2 * STEPS
    assert last["nbytes"] > 0
    assert last["uploaded_s"] > 0
    assert json.loads((tmp_path / "a" / "run.json").read_text())["checkpoint_store"] == address
    listed = json.loads(command("list", address, "--json").stdout)["checkpoints"]
    assert [row["step"] for row in listed] == [each.step for each in stored]
    assert {row["world_size"] for row in listed} == {2}
    assert command("verify", address).exit_code == 0

    with pytest.raises(RankFailed, match="already holds checkpoints of a run, the newest of step 14"):
        run_ranks(train_in, 1, tmp_path / "c", 3, s3.to("life"))
    # Without the folder of the first run, on another number of ranks.
    states = run_ranks(train_in, 1, tmp_path / "b", 3, {"resume": address, "environment": s3.environment})[0]
    expected = run_ranks(train_in, 1, tmp_path / "whole", 3, {})[0]
    for name, value in expected.items():
        torch.testing.assert_close(states[name], value, rtol=0, atol=1e-12)
    assert store.complete()[-1].step == 3 * STEPS
    pruned = command("prune", address, "--keep", 1)
    assert pruned.exit_code == 0, pruned.output
    assert [each.step for each in store.complete()] == [3 * STEPS]


def slow_links(folder: Path, address: str) -> None:
    """Rank 0 links its files when rank 1 has uploaded its own already."""
    if os.environ["RANK"] == "0":
        link = os.link

        def later(*arguments: Any) -> None:
            time.sleep(0.3)
            link(*arguments)

        pytest.MonkeyPatch().setattr(os, "link", later)
    train(folder, 1, {"checkpoint_store": address, "checkpoint_every": None})


def test_a_rank_that_has_uploaded_leaves_links_of_others_alone(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    run_ranks(slow_links, 2, tmp_path / "run", address)
    assert [each.step for each in CheckpointStore(address).complete()] == [STEPS]
    assert not list((tmp_path / "run" / "checkpoints").glob(".uploading/*"))


def damaged_life(folder: Path) -> list[str]:
    """In one process, with a store in memory: a flipped byte, a missing object and a torn upload are passed over."""
    address = "memory://life/one"
    train(folder / "a", 1, {"checkpoint_store": address, "keep_checkpoints": 9, "keep_local": 2})
    store = CheckpointStore(address)
    newest, before, earlier = store.complete()[-1:-4:-1]
    for checkpoint in store.complete()[:-3]:
        store.remove(checkpoint)
    flip(address, newest.name, "rank-00000.safetensors")
    files, root = fsspec.core.url_to_fs(address)
    files.rm_file(f"{root}/{before.name}/{RUN_STATE}")
    files.pipe_file(f"{root}/step-00000090.abc/rank-00000.safetensors", b"torn")
    files.pipe_file(f"{root}/step-00000091.abc/../index.json", b"{}")
    files.pipe_file(f"{root}/others/index.json", b"{}")
    findings = []
    for checkpoint in (newest, before):
        with pytest.raises(DamagedCheckpointError) as caught:
            store.verify(checkpoint)
        findings.append(caught.value.finding)
        with pytest.raises(DamagedCheckpointError):
            store.download(checkpoint, folder / "d" / "checkpoints")
    assert not list((folder / "d" / "checkpoints").glob("step-*"))
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        job_of(folder / "e", resume=f"{address}/{newest.name}")
    # The run's own folder has the two newest, which are sound.
    job, _, loader = job_of(folder / "a", resume=folder / "a")
    findings.append(f"local at step {job.global_step}")
    del job, loader
    (folder / "b").mkdir()
    job, _, _ = job_of(folder / "b", resume=address)
    findings.append(f"store at step {job.global_step}")
    assert job.global_step == earlier.step
    assert [each.name for each in store.checkpoints()] == [earlier.name, before.name, newest.name]
    return findings


def test_what_is_damaged_in_the_store_is_passed_over(tmp_path: Path) -> None:
    findings = run_ranks(damaged_life, 1, tmp_path)[0]
    assert (
        findings[0]
        == "rank-00000.safetensors: the values of 'optimizer-0/2.bias/exp_avg_sq' are not those that were saved"
    )
    assert findings[1] == "run.pt is missing"
    assert findings[2] == "local at step 7"
    assert findings[3].startswith("store at step ")


# Kept and removed --------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Callable[[int, str, bool], str]]:
    """Puts a checkpoint that is not one into a store in memory; the store is empty at the end."""

    def put(step: int, id: str, whole: bool = True) -> str:
        name = f"step-{step:08d}.{id}"
        files = fsspec.filesystem("memory")
        files.pipe_file(f"/kept/{name}/rank-00000.safetensors", b"x")
        if whole:
            files.pipe_file(f"/kept/{name}/{INDEX}", b"{}")
            time.sleep(0.002)
        return name

    yield put
    fsspec.filesystem("memory").store.clear()


def test_the_newest_and_the_best_stay(memory: Callable[..., str]) -> None:
    store = CheckpointStore("memory://kept")
    names = {step: memory(step, "a") for step in (1, 2, 3, 4)}
    memory(2, "b", False)
    again, later = memory(3, "c"), memory(9, "d", False)
    best = Retention(keep=1, best=BestMetric(metric="loss", mode="min"), values={1: 0.1, 2: 0.5, 4: 0.2})
    prune_store(store, best, newest=names[4])
    assert {each.name for each in store.checkpoints()} == {names[1], names[4], later}  # the last is on its way
    assert again not in {each.name for each in store.checkpoints()}
    prune_store(store, Retention(keep=5))
    assert [each.name for each in store.checkpoints()] == [names[1], names[4]]


def test_of_two_of_one_step_the_later_stays(memory: Callable[..., str]) -> None:
    first, second = memory(3, "f"), memory(3, "a")
    store = CheckpointStore("memory://kept")
    assert [each.name for each in store.complete()] == [first, second]
    prune_store(store, Retention(keep=5))
    assert [each.name for each in store.complete()] == [second]


# Refusals and errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("s3://me:pw@bucket/x", "has a password in it"),
        ("nonsense://bucket/x", "Protocol not known: nonsense"),
        ("s3://", "names no bucket"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(address: str, sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence) as caught:
        CheckpointStore(address)
    assert "pw" not in str(caught.value).replace("password", "")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(StoreError, match=r"pip install 'tutti\[stores\]'"):
        CheckpointStore("s3://bucket/x")


@pytest.mark.parametrize(
    ("error", "sentence", "again"),
    [
        (PermissionError("Access Denied"), "access is refused", False),
        (FileNotFoundError("The specified bucket does not exist"), "create the bucket", False),
        (OSError(28, "No space left on device"), "the store is full", False),
        (OSError("XMinioStorageFull: Storage backend has reached its minimum free drive threshold"), "full", False),
        (OSError(16, "Please reduce your request rate."), "fewer requests", True),
        (ConnectionResetError(104, "Connection reset by peer"), "check the network", True),
        (TimeoutError(), "TimeoutError", True),
    ],
)
def test_errors_are_said_with_their_remedy(error: Exception, sentence: str, again: bool) -> None:
    reason, tried_again = explain(error)
    assert sentence in reason
    assert tried_again is again


def test_a_missing_bucket_and_missing_rights_end_the_start(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"it does not exist .*create the bucket"):
        run_ranks(train_in, 1, tmp_path / "a", 1, s3.to("x") | {"checkpoint_store": "s3://nothing/x"})
    with pytest.raises(NoCheckpointError, match="holds no checkpoint"):
        list_checkpoints(f"{s3.address}/empty")
    with pytest.raises(StoreError, match=r"access is refused .*credentials"):
        without_credentials()


def without_credentials() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        CheckpointStore("s3://bucket/rights").put(EVALUATIONS, b"{}")


# Kills, cuts and a store that goes away ----------------------------------------------------------


def killed_at(folder: Path, point: str, options: dict[str, Any]) -> None:
    """The process is killed while the checkpoint of step 4 is on its way."""
    job, _, loader = job_of(folder, keep_checkpoints=9, **options)
    store = job._run().output.checkpoints.uploads.store
    put = store.put

    def kill(name: str, data: bytes | Path) -> None:
        if "step-00000004" in name and name.endswith(point):
            os.kill(os.getpid(), signal.SIGKILL)
        put(name, data)

    store.put = kill
    for _ in job.epochs(1):
        for batch in loader:
            job.step(batch)
            writer = job._run().output.checkpoints
            writer.finish()
            while writer.uploads.busy:
                time.sleep(0.01)


@pytest.mark.parametrize("point", [RUN_STATE, pytest.param(INDEX, marks=pytest.mark.long)])
def test_a_kill_in_the_middle_of_an_upload_leaves_the_one_before(s3: S3, tmp_path: Path, point: str) -> None:
    address, options = f"{s3.address}/kill-{point}", s3.to(f"kill-{point}")
    with pytest.raises(RankFailed):
        run_ranks(killed_at, 1, tmp_path / "a", point, options)
    store = CheckpointStore(address)
    assert [each.step for each in store.complete()] == [2]
    assert command("verify", f"{address}/{store.complete()[0].name}").exit_code == 0
    # The run's own folder has step 4, elsewhere there is step 2; what was torn is removed.
    run_ranks(train_in, 1, tmp_path / "b", 1, {"resume": address, "environment": s3.environment})
    assert all(each.complete for each in store.checkpoints())
    assert store.complete()[-1].step == STEPS


class BadNetwork:
    """Passes bytes on between ranks and the store, until it is told to misbehave.

    Args:
        port: the store's.

    Attributes:
        cut: how many more connections that carry a tensor file end in the middle of it.
        busy: how many more requests of tensor files are answered with S3's "SlowDown".
        down: whether no connection is passed on.
    """

    def __init__(self, port: int) -> None:
        self._port, self.cut, self.busy, self.down, self.done = port, 0, 0, False, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._socket.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server, suppress(OSError):
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                if self.down:
                    return
                if data.startswith(b"PUT ") and b"safetensors" in data[:200]:
                    if self.busy:
                        self.busy, self.done = self.busy - 1, self.done + 1
                        client.sendall(SLOW_DOWN)
                        return
                    if self.cut:
                        self.cut, self.done = self.cut - 1, self.done + 1
                        server.sendall(data[: len(data) // 2])
                        return
                server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


SLOW_DOWN_BODY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: "
    + str(len(SLOW_DOWN_BODY)).encode()
    + b"\r\n\r\n"
    + SLOW_DOWN_BODY
)


@pytest.fixture
def network(s3: S3) -> Iterator[BadNetwork]:
    proxy = BadNetwork(int(s3.environment["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    yield proxy
    proxy.close()


def through(s3: S3, network: BadNetwork) -> dict[str, str]:
    return s3.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.port}"}


@pytest.mark.parametrize("fault", ["cut", pytest.param("busy", marks=pytest.mark.long)])
def test_uploads_are_tried_again(s3: S3, network: BadNetwork, tmp_path: Path, fault: str) -> None:
    setattr(network, fault, 2)
    options = s3.to(fault, environment=through(s3, network), checkpoint_every=None)
    run_ranks(train_in, 1, tmp_path / "a", 1, options)
    assert network.done == 2
    assert [each.step for each in CheckpointStore(f"{s3.address}/{fault}").complete()] == [STEPS]
    assert command("verify", f"{s3.address}/{fault}").exit_code == 0
    assert [row.get("failure") for row in rows_of(tmp_path / "a", "upload")] == [None]


@pytest.mark.long
def test_a_store_that_goes_away_ends_no_training(s3: S3, network: BadNetwork, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    address = f"{s3.address}/away"
    environment = {**os.environ, **through(s3, network)}
    base = [sys.executable, "-m", "tutti", "run", "--no-predict", "--nproc", "2", "--checkpoint-every", "4"]
    first = subprocess.Popen(
        [*base, "--folder", folder, "--checkpoint-store", address, script, "4"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    store, deadline = CheckpointStore(address), time.monotonic() + 120
    while not store.complete() and time.monotonic() < deadline:
        time.sleep(0.05)
    network.down = True
    output = first.communicate(timeout=240)[0]
    assert first.returncode == 1, output
    assert "the checkpoint of step 16 could not be uploaded" in output
    assert "check the network" in output, output
    assert "it is complete in " in output
    assert json.loads((folder / "run.json").read_text())["checkpoint_store"] == address
    newest = store.complete()[-1].step
    assert newest < 16
    assert next((folder / "checkpoints").glob("step-*16")).is_dir()
    assert command("verify", address).exit_code == 0

    # Back again: the run goes on in its folder, and stores there without being told.
    network.down = False
    again = subprocess.run(
        [*base, "--resume", folder, script, "5"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert store.complete()[-1].step == 20
    elsewhere = subprocess.run(
        [*base, "--resume", address, "--folder", tmp_path / "other", script, "6"],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert elsewhere.returncode == 0, elsewhere.stdout + elsewhere.stderr
    assert f"downloaded {address}/step-00000020" in elsewhere.stdout + elsewhere.stderr
    assert store.complete()[-1].step == 24


class Elsewhere:
    """The world of a rank whose others do not answer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size, self.is_main = rank, 2, rank == 0


def uploads_of(folder: Path, rank: int, said: list[str]) -> Uploads:
    world: Any = Elsewhere(rank)
    store = CheckpointStore(f"file://{folder}/store")
    options: Any = {"keep_local": 1, "write_row": lambda fields: None, "say": said.append, "evaluations": {}}
    return Uploads(store, world, folder, **options)


def test_no_rank_waits_for_a_checkpoint_that_the_others_do_not_upload(tmp_path: Path) -> None:
    said: list[str] = []
    uploads = uploads_of(tmp_path, 0, said)
    pending: Any = SimpleNamespace(step=4, id="a", uploads=[], files=["rank-00001.safetensors"])
    uploads.begin(pending, Retention(keep=1), skip=True)
    uploads.forget_left_out()
    began = time.monotonic()
    failed = uploads.finish(Retention(keep=1))
    assert failed is not None
    assert "the checkpoint of step 4 could not be uploaded: the one after it was not finished" in failed
    assert time.monotonic() - began < 30


def test_a_rank_that_cannot_tell_of_its_files_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> Any:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("tutti.checkpoint.uploads.thread_store", gone)
    uploads = uploads_of(tmp_path, 1, [])
    for step in (4, 8):
        pending: Any = SimpleNamespace(step=step, id="a", uploads=[], files=[])
        uploads.begin(pending, Retention(keep=1), skip=False)
    assert uploads.finish(Retention(keep=1)) is None
    told = capsys.readouterr().err
    assert told.count("rank 1 could not tell rank 0 of its files of the checkpoint of step 4") == 1
    assert told.count("\n") == 1
