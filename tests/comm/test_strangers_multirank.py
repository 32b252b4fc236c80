"""Ranks prove the job's secret: strangers who know the port and not the secret change nothing, and are named."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from harness import RankFailed, run_ranks
from tutti import job_secret, network_interfaces
from tutti.comm import admission, group_proof
from tutti.comm.authenticated_store import AuthenticatedStore
from tutti.comm.rendezvous import open_group
from tutti.comm.world import join_world, leave_world
from tutti.errors import LaunchError

GOOD, OTHER = "g" * 32, "o" * 32


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def join_at(
    port: int, secrets: list[str], timeout_s: float = 30.0, late_s: float = 0.0
) -> tuple[float, list[Any], list[str]]:
    """Meet at a port; return a sum over ranks, gathered values, and the addresses at which this process listens.

    Ranks other than 0 come `late_s` seconds later, so that the gate is open for a while.
    """
    rank = int(os.environ["RANK"])
    time.sleep(late_s if rank else 0.0)
    os.environ.update(
        TUTTI_RENDEZVOUS=f"tcp://127.0.0.1:{port}", TUTTI_SECRET=secrets[rank], TUTTI_TIMEOUT_S=str(timeout_s)
    )
    world = join_world()
    total = float(world.sum(torch.tensor(rank + 1.0)))
    everyone = world.gather((rank, "x" * rank))
    group = open_group(range(world.world_size))
    dist.all_reduce(torch.ones(1), group=group)
    process = psutil.Process()
    listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    leave_world()
    return total, everyone, listening


def refusal_at(port: int, secrets: list[str], timeout_s: float = 30.0) -> tuple[str, int, float]:
    began = time.monotonic()
    try:
        join_at(port, secrets, timeout_s)
    except LaunchError as error:
        return str(error), error.exit_code, time.monotonic() - began
    return "", 0, 0.0


def say(port: int, *lines: bytes) -> bytes:
    """What a stranger hears who connects as soon as something listens, and says these lines."""
    for _ in range(3000):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
                heard = stranger.recv(4096)
                for line in lines:
                    stranger.sendall(line)
                    heard += stranger.recv(4096)
                return heard
        except OSError:
            time.sleep(0.02)
    return b""


def hello(rank: int, *, proof: str = "00" * 32) -> bytes:
    said = {"rank": rank, "world": 2, "host": "evil\x1b[31m", "nonce": "11" * 16, "proof": proof}
    return json.dumps(said).encode() + b"\n"


def beside(function: Callable[..., Any], *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    heard: list[Any] = []
    thread = threading.Thread(target=lambda: heard.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, heard


STRANGERS = [
    pytest.param((hello(1),), b'"refusal"', id="takes a rank's number"),
    pytest.param((b'{"rank": 1e99, "world": []}\n',), b"challenge", id="says nonsense"),
    pytest.param((hello(1).replace(b'"rank": 1', b'"rank": 1e999'),), b"challenge", id="says infinity"),
    pytest.param((b"\x80\x04\x95\n",), b"challenge", id="says a pickle"),
    pytest.param((b"GET / HTTP/1.1\r\n",), b"challenge", id="is a browser"),
    pytest.param((), b"challenge", id="says nothing"),
]


@pytest.mark.parametrize(("lines", "heard"), STRANGERS)
def test_a_stranger_before_the_ranks_meet_changes_nothing(lines: tuple[bytes, ...], heard: bytes) -> None:
    port = free_port()
    thread, answers = beside(say, port, *lines)
    results = run_ranks(join_at, 2, port, [GOOD, GOOD], 30.0, 1.5)
    thread.join(60)
    assert [total for total, *_ in results] == [3.0, 3.0]
    assert results[1][1] == [(0, ""), (1, "x")]
    assert heard in answers[0]
    assert GOOD.encode() not in answers[0]
    assert b"session" not in answers[0]


def test_a_false_rank_0_is_not_believed() -> None:
    """What listens there says the right things, and does not know the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pose() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(json.dumps({"tutti": 1, "challenge": "22" * 16}).encode() + b"\n")
                accepted.recv(4096)
                accepted.sendall(json.dumps({"port": 1, "session": "", "proof": "00" * 32}).encode() + b"\n")

        thread, _ = beside(pose)
        address = server.getsockname()[:2]
        applicant = admission.Applicant(rank=1, world_size=2, host="here")
        with pytest.raises(LaunchError, match="rank 1 on here does not know the job's secret"):
            admission.apply_for_admission(lambda: address, GOOD.encode(), applicant, 10)
        thread.join(5)


def test_another_program_at_the_rendezvous_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pose() -> None:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        beside(pose)
        address = server.getsockname()[:2]
        applicant = admission.Applicant(rank=1, world_size=2, host="here")
        with pytest.raises(LaunchError, match="is not rank 0 of this run; choose another port"):
            admission.apply_for_admission(lambda: address, GOOD.encode(), applicant, 10)


def test_a_rank_with_another_secret_is_named_by_all_once_and_soon() -> None:
    answers = run_ranks(refusal_at, 3, free_port(), [GOOD, OTHER, GOOD])
    assert len({text for text, *_ in answers}) == 1
    assert "rank 1 on" in answers[0][0]
    assert "does not know the job's secret, so it may not join; give all hosts the same one" in answers[0][0]
    assert [code for _, code, _ in answers] == [2, 2, 2]
    assert max(seconds for *_, seconds in answers) < 3 * admission.WRONG_SECRET_S


def count_wrongly(port: int) -> str:
    os.environ["WORLD_SIZE"] = {"0": "2", "1": "3"}[os.environ["RANK"]]
    return refusal_at(port, [GOOD, GOOD])[0]


def test_nodes_that_count_ranks_differently_are_named() -> None:
    answers = run_ranks(count_wrongly, 2, free_port())
    assert answers[0] == answers[1]
    assert "was started as one of 3 ranks, rank 0 as one of 2" in answers[0]


def test_a_rank_that_does_not_come_is_named() -> None:
    answers = run_ranks(lone, 1, free_port())
    assert "rank 1 of 2 did not come to the rendezvous within 1 s" in answers[0]


def lone(port: int) -> str:
    os.environ["WORLD_SIZE"] = "2"
    return refusal_at(port, [GOOD], 1.0)[0]


def test_ranks_listen_on_the_interface_of_the_rendezvous_only() -> None:
    """The store and Gloo; the environment names no interface."""
    results = run_ranks(join_without_interface, 2, free_port())
    assert len(results[0]) >= 2
    assert {address for addresses in results for address in addresses} == {"127.0.0.1"}


def join_without_interface(port: int) -> list[str]:
    del os.environ["GLOO_SOCKET_IFNAME"]
    return join_at(port, [GOOD, GOOD])[2]


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))


@pytest.mark.parametrize("change", ["flip", "swap", "cut", "replace", "foreign key"])
def test_a_value_that_was_tampered_with_is_refused(store: dist.TCPStore, change: str) -> None:
    ours, stranger = AuthenticatedStore(store, b"k" * 32), dist.TCPStore("127.0.0.1", store.port, is_master=False)
    ours.set("a", b"value of a")
    ours.set("b", "value of b")
    assert (ours.get("a"), ours.get("b")) == (b"value of a", b"value of b")
    names = stranger.list_keys()
    assert len(names) == 2
    assert not {"a", "b"} & set(names)
    first, second = (bytes(stranger.get(name)) for name in names)
    changed = {
        "flip": first[:-1] + bytes([first[-1] ^ 1]),
        "swap": second,
        "cut": first[:-1],
        "replace": b"",
        "foreign key": job_secret.mac(b"x" * 32, "value", "a", b"1") + b"1",
    }[change]
    stranger.set(names[0], changed)
    stranger.set(names[1], second if change != "swap" else first)
    with pytest.raises(LaunchError, match="was not written by a rank of this job"):
        [ours.get("a"), ours.get("b")]


def answer_with_another_key() -> str:
    """Open a group in which rank 1 has another key, as a stranger has who took its connection."""
    os.environ["TUTTI_SECRET"] = GOOD
    world = join_world()
    if world.rank == 1:
        job_secret.set_session_key(b"stranger" * 4)
    try:
        group_proof.prove_members()
    except LaunchError as error:
        return str(error)
    return ""


def test_a_connection_held_by_a_stranger_is_found() -> None:
    answers = run_ranks(answer_with_another_key, 3)
    assert "rank 0 is connected with a process that is not rank 1: a stranger connects" in answers[0]
    assert "rank 2 is connected with a process that is not rank 1" in answers[2]


def gather_what_cannot_be_sent() -> list[str]:
    world, said = join_world(), []
    within: list[Any] = []
    within.append(within)
    for value in ([lambda: 0, 1], [1, lambda: 0], [within, 1]):
        try:
            world.gather(value[world.rank])
        except Exception as error:
            said.append(str(error))
    return said


def test_all_ranks_refuse_together_what_one_cannot_send() -> None:
    answers = run_ranks(gather_what_cannot_be_sent, 2)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
    assert "RecursionError" in answers[0][2]
    assert "builtins.function cannot be sent to other ranks" in answers[0][0]


def test_secret_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUTTI_SECRET", raising=False)
    monkeypatch.delenv("TUTTI_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    first = job_secret.find_secret()
    file = tmp_path / "config" / "tutti" / "secret"
    assert len(first) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert job_secret.find_secret() == first
    assert [entry.name for entry in file.parent.iterdir()] == ["secret"]
    file.chmod(0o644)
    with pytest.raises(LaunchError, match="can be read by other users, so it proves nothing; make it yours alone"):
        job_secret.find_secret()
    monkeypatch.setenv("TUTTI_SECRET", "short")
    with pytest.raises(LaunchError, match="has 5 characters, which can be guessed"):
        job_secret.find_secret()
    monkeypatch.delenv("TUTTI_SECRET")
    monkeypatch.setenv("TUTTI_SECRET_FILE", str(tmp_path / "absent"))
    with pytest.raises(LaunchError, match="absent cannot be read"):
        job_secret.find_secret()


def test_a_rendezvous_without_a_scheme_is_refused() -> None:
    with pytest.raises(RankFailed, match="the ranks cannot meet at 'node0:1'"):
        run_ranks(join_nowhere, 2)


def join_nowhere() -> None:
    os.environ["TUTTI_RENDEZVOUS"] = "node0:1"
    join_world()


def test_the_address_of_a_rendezvous() -> None:
    assert network_interfaces.here_address("127.0.0.1", spans_hosts=True) == "127.0.0.1"
    assert network_interfaces.here_address("localhost", spans_hosts=False) in ("127.0.0.1", "::1")
    with pytest.raises(OSError, match="not known"):  # ranks other than 0 wait for the name
        network_interfaces.here_address("no-such-host.invalid", spans_hosts=True)
