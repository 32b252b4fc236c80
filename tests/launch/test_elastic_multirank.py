"""Runs whose numbers of nodes and ranks are ranges: nodes come, leave and are lost, and the batch keeps its meaning."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, Running, free_port, running, wait_until
from test_restarts_multirank import batches, difference, recovered

from tutti.launch.launch_environment import granted_cores
from tutti.launch.launcher import LaunchSpec
from tutti.launch.node_rendezvous import NodeTable
from tutti.launch.visible_devices import count_here

RECOVER = str(SCRIPTS / "recover.py")


def anywhere(meet: str, *options: str, script: tuple[str, ...], nnodes: str = "1:3") -> tuple[str, ...]:
    """The command that is the same on all nodes."""
    return (
        *TUTTI, "run", "--no-predict", "--nnodes", nnodes, "--nproc", "1", "--rendezvous", meet, "--timeout", "60",
        "--folder", "run", *options, RECOVER, *script,
    )  # fmt: skip


@contextmanager
def second_of(command: tuple[str, ...], folder: Path) -> Iterator[Running]:
    """The same command again, once the first one is node 0: on one host, both would be."""
    assert wait_until(lambda: (folder / "run/.nodes").exists(), 60)
    with running(*command, cwd=folder) as second:
        yield second


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = recovered(folder, "--", "0", ranks=1)
    assert done.code == 0, done.err
    return folder


def faults(folder: Path) -> str:
    return (folder / "faults").read_text() if (folder / "faults").exists() else ""


@pytest.mark.long
def test_nodes_come_are_lost_and_leave_with_a_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    script = ("2", "pause@6:0", "pause@12:0", "pause@18:0")
    with running(*anywhere(meet, script=script), cwd=tmp_path) as first:
        assert wait_until(lambda: "pause" in faults(tmp_path), 60), first.process.poll()  # alone, after a while
        with running(*anywhere(meet, script=script), cwd=tmp_path) as second:
            assert first.says("node 1 on"), first.said()  # while rank 0 waits in its step
            (tmp_path / "go-6").touch()
            assert wait_until(lambda: faults(tmp_path).count("pause") == 2, 60)
            assert (tmp_path / "run/ranks/1").exists()
            with running(*anywhere(meet, script=script), cwd=tmp_path) as third:
                assert first.says("node 2 on"), first.said()
                os.kill(second.process.pid, signal.SIGKILL)
                second.assert_nothing_left()
                (tmp_path / "go-12").touch()
                assert wait_until(lambda: faults(tmp_path).count("pause") == 3, 60)
                third.process.send_signal(signal.SIGTERM)
                assert third.says("stopping all ranks")
                (tmp_path / "go-18").touch()
                code, _, said = third.finish()
                assert code == 75, said
                third.assert_nothing_left()
                code, _, err = first.finish()
                assert code == 0, err
        first.assert_nothing_left()
    assert "up to 3 ranks on 1 to 3 nodes" in err
    assert "1 of up to 3 nodes is there, so the run begins" in err
    assert re.search(r"node 1 on \S+ has come: the ranks pause to go on with more", err)
    assert re.search(r"node 1 \(\S+\) is lost", err)
    assert "restart" not in err, "none was asked for, and none is counted"
    assert re.search(r"node \d on \S+ left with a checkpoint, as it was told to stop there\n1 rank goes on from", err)
    assert batches(tmp_path) == batches(undisturbed), "no sample is lost, and none counted twice"
    assert 0 < difference(tmp_path, undisturbed) <= 1e-12


@pytest.mark.long
def test_too_few_nodes_wait_for_another_one(tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    command = anywhere(meet, script=("2", "pause@6:0"), nnodes="2:3")
    with running(*command, cwd=tmp_path) as first, second_of(command, tmp_path) as second:
        assert wait_until(lambda: "pause" in faults(tmp_path), 60), first.process.poll()
        second.process.send_signal(signal.SIGTERM)
        assert second.says("stopping all ranks")
        (tmp_path / "go-6").touch()
        assert second.finish()[0] == 75
        with running(*command, cwd=tmp_path) as third:
            code, _, err = first.finish()
            assert code == 0, err
            assert third.finish()[0] == 0
    assert re.search(
        r"node 1 on \S+ left .*\n2 ranks go on from step-0000000\d\n"
        r"waiting up to 60 s for more nodes, as it goes on with 2 or more: start the same command on them",
        err,
    ), err
    assert batches(tmp_path) == batches(undisturbed)
    assert 0 < difference(tmp_path, undisturbed) <= 1e-12


@pytest.mark.long
@pytest.mark.parametrize("how", ["signal", "time limit"])
def test_node_0_and_the_time_limit_stop_all_nodes(how: str, tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    limit = ("--time-limit", "25s") if how == "time limit" else ()
    command = anywhere(meet, *limit, script=("2", "pause@6:0"), nnodes="1:2")
    with running(*command, cwd=tmp_path) as first, second_of(command, tmp_path) as second:
        assert wait_until(lambda: "pause" in faults(tmp_path), 60), first.process.poll()
        if how == "signal":
            first.process.send_signal(signal.SIGTERM)
            assert first.says("stopping all ranks")
        else:
            time.sleep(20)
        (tmp_path / "go-6").touch()
        ends = [one.finish() for one in (first, second)]
        second.assert_nothing_left()
    assert [code for code, _, _ in ends] == [75, 75], ends[0][2]
    done = recovered(tmp_path, "--resume", "run", "--", "0", ranks=2)
    assert done.code == 0, done.err
    assert batches(tmp_path) == batches(undisturbed)


def test_a_host_gets_as_many_ranks_as_it_has_slots(tmp_path: Path) -> None:
    slots = min(3, granted_cores())
    command = (*TUTTI, "run", "--no-predict", "--nproc", "1:3", "--folder", "run", "--max-restarts", "1", "--json")
    with running(*command, RECOVER, "0", f"kill@10:{slots - 1}", cwd=tmp_path) as one:
        code, out, err = one.finish()
    assert code == 0, err
    assert json.loads(out)["world_size"] == slots
    assert f"restart 1 of 1: {slots} rank" in err, "the slot is still there"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--nproc", "100:200"),
            r"--nproc 100:200: this host has slots for \d+ ranks?, one on each GPU",
        ),
        (("--nproc", "4:2"), "'4:2' is no range; give two numbers of 1 or more, the smaller one first"),
        (("--nnodes", "1:x"), "'1:x' is no range"),
        (("--nnodes", "0"), "'0' is no number of nodes; give such as 4, or 1:4"),
        (("--nnodes", "1:2", "--nproc", "1"), "--nnodes 1:2 needs a rendezvous"),
        (
            ("--nnodes", "1:2", "--nproc", "1", "--rendezvous", "localhost:29511"),
            "all nodes see; name it",
        ),
        (("--nnodes", "1:2", "--nproc", "1,1", "--rendezvous", "localhost:29511"), "the same number of ranks on each"),
        (("--nnodes", "1:2", "--rendezvous", "localhost:29511", "--folder", "run"), "needs the ranks per node"),
        (
            ("--on", "mpi", "--nnodes", "1:2", "--nproc", "1"),
            "1:2: jobs of mpi have one number of nodes",
        ),
    ],
)
def test_ranges_that_cannot_be_are_refused(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with running(*TUTTI, "run", "--no-predict", *options, RECOVER, "0", cwd=tmp_path) as one:
        code, _, err = one.finish()
    assert code == 2
    assert re.search(says, err), err


@pytest.mark.parametrize(
    ("values", "gpus", "count"),
    [
        ({}, 4, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 4, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, None),
        ({}, 0, None),
    ],
)
def test_slots_are_the_gpus_that_may_be_used(values: dict[str, str], gpus: int, count: int | None) -> None:
    listed = "".join(f"GPU {number}: NVIDIA H200 (UUID: GPU-{number}{'0' * 7})\n" for number in range(gpus))
    assert count_here(values, lambda *_: listed or None) == count


def test_slots_are_those_of_the_driver_of_amd_too(tmp_path: Path) -> None:
    for node, number in enumerate((0, 11, 12, 13)):  # the first one is a processor
        folder = tmp_path / f"class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{number}\n")
    counts = [count_here(values, lambda *_: None, tmp_path) for values in ({}, {"HIP_VISIBLE_DEVICES": "0,2"})]
    assert counts == [3, 2]


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_stop_before_the_first_step_waits_for_no_agreement(number: int, tmp_path: Path, undisturbed: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    command = anywhere(meet, "--grace", "3", script=("2", "pause@-2:0", "pause@-2:1"), nnodes="1:2")
    with running(*command, cwd=tmp_path) as first, second_of(command, tmp_path) as second:
        assert wait_until(lambda: faults(tmp_path).count("pause") == 2, 60), first.said()
        (first, second)[number].process.send_signal(signal.SIGINT)
        ends = [one.finish(45) for one in (second, first)]
        for one in (first, second):
            one.assert_nothing_left()
    assert [code for code, _, _ in ends] == ([130, 0] if number else [130, 130]), ends
    if number:
        assert re.search(r"node 1 on \S+ left, as it was told to stop there\n1 rank goes on", ends[1][2])
        assert "this node has left, and the run goes on on the others" in ends[0][2]
        assert batches(tmp_path) == batches(undisturbed)


def test_a_node_that_goes_while_it_waits_for_a_number_leaves_none_taken(tmp_path: Path) -> None:
    spec = LaunchSpec(target="t.py", folder=tmp_path, ranks_per_node=(1, 1), rendezvous="127.0.0.1:1")
    table = NodeTable(spec, "token")
    first, gone, later = Line(), Line(), Line()
    hello = {"node": None, "host": "h", "ranks": 1}
    for line in (first, gone):
        table.queue(line, hello)  # type: ignore[arg-type]
    table.let_in()
    node = table.of_link(first)  # type: ignore[arg-type]
    assert node is not None
    assert table.begin(node, is_ready=True)
    table.let_in()
    assert (first.sent[0]["node"], gone.sent) == (1, []), "there is no second number"
    table.forget(gone)  # type: ignore[arg-type]
    del table.nodes[1]
    table.let_in()
    table.queue(later, hello)  # type: ignore[arg-type]
    table.let_in()
    assert (gone.sent, later.sent[0]["node"]) == ([], 1)


class Line:
    """A connection in the place of a NodeLink, which keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []

    def send(self, message: dict[str, object]) -> bool:
        self.sent.append(message)
        return True

    def close(self) -> None:
        pass
