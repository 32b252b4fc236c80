"""Several nodes: supervisors that meet at host:port, on one machine and in network namespaces of their own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, free_port, running

from lab.hosts import lab_or_skip
from tutti.lab import Lab

ACT = str(SCRIPTS / "act.py")
TRAIN = str(SCRIPTS / "train.py")


def node(rank: int, rendezvous: str, nproc: str, *script: str, folder: str = "") -> tuple[str, ...]:
    return (
        *TUTTI, "run", "--no-predict", "--nnodes", "2", "--node-rank", str(rank), "--nproc", nproc,
        "--rendezvous", rendezvous, "--timeout", "60", "--folder", folder or f"run{rank}", *script,
    )  # fmt: skip


def test_two_unequal_nodes_train_together(tmp_path: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    with (
        running(*node(1, meet, "2,1", TRAIN, "1", "0"), cwd=tmp_path) as second,
        running(*node(0, meet, "2,1", TRAIN, "1", "0"), cwd=tmp_path) as first,
    ):
        code, out, err = first.finish()
        assert code == 0, err
        assert out == "epoch 0 of 3 ranks\n"
        assert second.finish()[0] == 0
        first.assert_nothing_left()
        second.assert_nothing_left()
    assert json.loads((tmp_path / "run0/run.json").read_text())["world_size"] == 3
    for folder, ranks in (("run0", "01"), ("run1", "2")):
        assert all((tmp_path / folder / "ranks" / rank / "stdout.log").exists() for rank in ranks)


def test_a_failure_on_one_node_ends_both_and_each_says_what_it_knows(tmp_path: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    with (
        running(*node(0, meet, "1", ACT, "raise", "1"), cwd=tmp_path) as first,
        running(*node(1, meet, "1", ACT, "raise", "1"), cwd=tmp_path) as second,
    ):
        code, _, err = second.finish()
        assert code == 1
        assert "rank 1 on host" in err
        assert "ValueError: boom in user code" in err
        code, _, err = first.finish()
        assert code == 1
        assert "another node failed or was cut off" in err
        first.assert_nothing_left()
        second.assert_nothing_left()


@pytest.mark.long
def test_a_shared_folder_lets_every_node_name_the_cause(tmp_path: Path) -> None:
    meet = f"127.0.0.1:{free_port()}"
    with (
        running(*node(0, meet, "1", ACT, "raise", "1", folder="shared"), cwd=tmp_path) as first,
        running(*node(1, meet, "1", ACT, "raise", "1", folder="shared"), cwd=tmp_path) as second,
    ):
        assert second.finish()[0] == 1
        assert "ValueError: boom in user code" in first.finish()[2]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts with networks of their own."""
    with lab_or_skip(2) as made:
        yield made


@pytest.mark.long
def test_two_hosts_of_their_own_train_together(lab: Lab, tmp_path: Path) -> None:
    meet = f"{lab.address(0)}:29500"
    with (
        running(*lab.inside(0, node(0, meet, "1", TRAIN, "1", "0")), cwd=tmp_path) as first,
        running(*lab.inside(1, node(1, meet, "1", TRAIN, "1", "0")), cwd=tmp_path) as second,
    ):
        code, out, err = first.finish()
        assert code == 0, err
        assert out == "epoch 0 of 2 ranks\n"
        code, _, err = second.finish()
        assert code == 0, err


def test_node_0_on_another_host_than_the_rendezvous_is_refused(lab: Lab, tmp_path: Path) -> None:
    command = node(0, f"{lab.address(1)}:29500", "1", TRAIN, "1", "0")
    with running(*lab.inside(0, command), cwd=tmp_path) as run:
        code, _, err = run.finish()
    assert code == 2
    assert "not an address of host0" in err
    assert lab.address(0) in err, "the address to name instead"
