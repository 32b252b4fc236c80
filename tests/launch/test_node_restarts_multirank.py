"""Several nodes go on after failures: a rank dies, a node is lost, comes again, or cannot take part."""

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, Running, free_port, running, wait_until
from test_restarts_multirank import batches, difference, recovered, starts

from lab.hosts import lab_or_skip
from tutti.launch.node_link import NodeLink, admit, join

RECOVER = str(SCRIPTS / "recover.py")


def node(number: int, meet: str, *options: str, script: tuple[str, ...], nodes: int = 2) -> tuple[str, ...]:
    return (
        *TUTTI, "run", "--no-predict", "--nnodes", str(nodes), "--node-rank", str(number), "--nproc", "2",
        "--rendezvous", meet, "--timeout", "60", "--folder", "run", *options, RECOVER, *script,
    )  # fmt: skip


@contextmanager
def started(folder: Path, *options: str, script: tuple[str, ...], nodes: int = 2) -> Iterator[list[Running]]:
    """All nodes of a run on this host, two ranks each."""
    meet = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        yield [
            stack.enter_context(running(*node(number, meet, *options, script=script, nodes=nodes), cwd=folder))
            for number in range(nodes)
        ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = recovered(folder, "--", "0", ranks=4)
    assert done.code == 0, done.err
    return folder


@pytest.mark.long
def test_a_rank_that_dies_lets_all_nodes_go_on_from_the_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    with started(tmp_path, "--max-restarts", "3", script=("4", "kill@10:3", "exit@21:0")) as nodes:
        ends = [one.finish() for one in nodes]
        for one in nodes:
            one.assert_nothing_left()
    for code, _, err in ends:
        assert code == 0, err
        assert "rank 3 on host" in err, "each node names the cause"
        assert "it was killed by signal 9" in err
        assert "restart 1 of 3: 4 ranks go on from step-00000008" in err
        assert "restart 2 of 3: 4 ranks go on from step-00000020" in err
    assert starts(tmp_path) == [0, 8, 20]
    assert batches(tmp_path) == batches(undisturbed)
    assert difference(tmp_path, undisturbed) == 0


def test_a_lost_node_is_left_out_and_takes_part_when_it_comes_again(tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    options = ("--max-restarts", "3", "--on-failure", "shrink")
    first, second = (node(number, meet, *options, script=("4", "pause@8:0", "pause@16:0")) for number in (0, 1))
    with running(*first, cwd=tmp_path) as leader, running(*second, cwd=tmp_path) as lost:
        assert wait_until(lambda: "pause" in faults(tmp_path), 60)
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.assert_nothing_left()
        (tmp_path / "go-8").touch()
        assert wait_until(lambda: faults(tmp_path).count("pause") == 2, 60), leader.process.poll()
        with running(*second, cwd=tmp_path) as again:
            assert leader.says("has come: the ranks pause"), leader.said()  # while rank 0 waits in its step
            (tmp_path / "go-16").touch()
            code, _, err = leader.finish()
            assert code == 0, err
            assert again.finish()[0] == 0
            again.assert_nothing_left()
        leader.assert_nothing_left()
    assert re.search(r"node 1 \(.*\) is lost: .*\n?.*restart 1 of 3: 2 ranks go on from step-00000008", err), err
    assert "node 1 on " in err
    assert "has come: the ranks pause to go on with more" in err
    assert "4 ranks go on from step-" in err
    assert re.search(r"paused after step \d+; the checkpoint is ", err)
    assert "go on with:" not in err, "nobody has to do anything"
    assert not [*(tmp_path / "run").glob(".pause*")]
    assert batches(tmp_path) == batches(undisturbed), "no sample is lost, and none counted twice"
    assert 0 < difference(tmp_path, undisturbed) <= 1e-12


def faults(folder: Path) -> str:
    return (folder / "faults").read_text() if (folder / "faults").exists() else ""


@pytest.mark.long
def test_a_lost_node_is_waited_for_where_it_is_to_be_replaced(tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    first, second = (node(number, meet, "--max-restarts", "3", script=("4", "pause@8:0")) for number in (0, 1))
    with running(*first, cwd=tmp_path) as leader, running(*second, cwd=tmp_path) as lost:
        assert wait_until(lambda: "pause" in faults(tmp_path), 60)
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.assert_nothing_left()
        (tmp_path / "go-8").touch()
        with running(*second, cwd=tmp_path) as again:
            code, _, err = leader.finish()
            assert code == 0, err
            assert again.finish()[0] == 0
    assert "restart 1 of 3: 4 ranks go on from step-00000008" in err
    assert difference(tmp_path, undisturbed) == 0


@pytest.mark.long
@pytest.mark.parametrize("ends", ["signal", "time limit"])
def test_a_run_that_waits_for_a_lost_node_can_be_ended(ends: str, tmp_path: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    limit = ("--time-limit", "25s") if ends == "time limit" else ()
    commands = [node(n, meet, "--max-restarts", "3", *limit, script=("4", "pause@8:0"), nodes=3) for n in range(3)]
    with (
        running(*commands[0], cwd=tmp_path) as leader,
        running(*commands[1], cwd=tmp_path) as lost,
        running(*commands[2], cwd=tmp_path) as other,
    ):
        assert wait_until(lambda: "pause" in faults(tmp_path), 60)
        os.kill(lost.process.pid, signal.SIGKILL)
        if ends == "signal":
            assert leader.says("waiting up to 60 s for node 1"), leader.said()
            other.process.send_signal(signal.SIGTERM)
        found = [one.finish(45) for one in (leader, other)]
        for one in (leader, other):
            one.assert_nothing_left()
    assert "waiting up to 60 s for node 1" in found[0][2]
    assert [code for code, _, _ in found] == ([143, 143] if ends == "signal" else [75, 75])


@pytest.mark.long
def test_without_node_0_the_others_end_and_say_so(tmp_path: Path) -> None:
    with started(tmp_path, "--max-restarts", "3", script=("4", "pause@8:0")) as (leader, other):
        assert wait_until(lambda: "pause" in faults(tmp_path), 60)
        os.kill(leader.process.pid, signal.SIGKILL)
        code, _, err = other.finish()
        other.assert_nothing_left()
    assert code == 75
    assert "node 0, which decides for all nodes, is lost" in err
    assert "--resume run" in err


@pytest.mark.long
def test_commands_that_differ_and_folders_that_are_not_shared_are_refused(tmp_path: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    (tmp_path / "other").mkdir()
    bad = (
        ("2", tmp_path, {}, "started with --max-restarts 2, and node 0 with 3"),
        ("3", tmp_path / "other", {}, "does not see node 0's run folder"),
        ("3", tmp_path, {"TUTTI_SECRET": "f" * 32}, "does not know the job's secret"),
    )
    with running(*node(0, meet, "--max-restarts", "3", script=("4",)), cwd=tmp_path) as leader, ExitStack() as stack:
        others = [
            stack.enter_context(
                running(*node(1, meet, "--max-restarts", restarts, script=("4",)), cwd=folder, environment=environment)
            )
            for restarts, folder, environment, _ in bad
        ]
        for other, (*_, said) in zip(others, bad, strict=True):
            code, _, err = other.finish()
            assert code == 2
            assert said in err
        leader.process.send_signal(signal.SIGINT)
        code, _, err = leader.finish()
        assert code == 130, err
        leader.assert_nothing_left()


@pytest.mark.long
def test_a_node_whose_link_is_cut_is_left_out(tmp_path: Path, undisturbed: Path) -> None:
    with lab_or_skip(2) as lab:
        meet = f"{lab.address(0)}:29500"
        options = ("--max-restarts", "3", "--on-failure", "shrink")
        commands = [node(number, meet, *options, script=("4", "pause@8:0")) for number in (0, 1)]
        with (
            running(*lab.inside(0, commands[0]), cwd=tmp_path) as leader,
            running(*lab.inside(1, commands[1]), cwd=tmp_path) as lost,
        ):
            assert wait_until(lambda: "pause" in faults(tmp_path), 90)
            subprocess.run(["ip", "-n", lab.record.namespace(1), "link", "set", "eth0", "down"], check=True)
            (tmp_path / "go-8").touch()
            code, _, err = leader.finish()
            assert code == 0, err
            code, _, said = lost.finish()
            lost.assert_nothing_left()
    assert re.search(r"node 1 \(.*\) is lost", err)
    assert code == 75
    assert "node 0, which decides for all nodes, is lost" in said
    assert batches(tmp_path) == batches(undisturbed)
    assert difference(tmp_path, undisturbed) <= 1e-12


@pytest.mark.parametrize("harm", ["none", "alter", "repeat"])
def test_a_line_that_was_altered_or_sent_twice_ends_the_connection(harm: str) -> None:
    admitted: list[NodeLink] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            link, _ = admit(server.accept()[0], b"s" * 32) or pytest.fail("refused")
            link.send({"kind": "welcome"})
            admitted.append(link)

        thread = threading.Thread(target=answer)
        thread.start()
        member, welcome = join(server.getsockname(), b"s" * 32, {"node": 1, "host": "h"}, 10, lambda: False)
        thread.join()
    assert welcome == {"kind": "welcome"}
    real, sent = member._socket, Sent()
    member._socket = sent  # type: ignore[assignment]
    report = {"kind": "report", "step": 4}
    member.send(report)
    line = sent.lines[0]
    real.sendall(line.replace(b"4}", b"5}") if harm == "alter" else line)
    if harm == "repeat":
        real.sendall(line)
    received = [admitted[0].receive() for _ in range(1 + (harm == "repeat"))]
    for connection in (real, admitted[0]):
        connection.close()
    assert received == {"none": [report], "alter": [None], "repeat": [report, None]}[harm]


class Sent:
    """Keeps lines in the place of a socket."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def sendall(self, line: bytes) -> None:
        self.lines.append(line)
