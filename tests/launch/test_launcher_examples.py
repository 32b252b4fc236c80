"""The commands of docs/launchers.md train, with the variables that each system sets."""

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from launch_rig import SCRIPTS, free_port, running

from lab.hosts import lab_or_skip
from tutti.environment import read_rank_environment

PAGE = (Path(__file__).parents[2] / "docs/launchers.md").read_text()


def example(section: str, language: str) -> str:
    """A block of code in a section of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the script, and this environment's commands on the path under their usual names."""
    shutil.copy(SCRIPTS / "train.py", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("tutti", "-m tutti.cli.main"), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def train(
    here: Path,
    script: str,
    nodes: list[dict[str, str]],
    inside: Callable[[int, tuple[str, ...]], tuple[str, ...]] = lambda number, command: command,
) -> None:
    """Run a script once on each of two nodes, or once, to the end; they have trained together."""
    common = {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "TUTTI_SECRET": secrets.token_hex(32)}
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                running(*inside(number, ("bash", "-ec", script)), cwd=here, environment=common | variables)
            )
            for number, variables in enumerate(nodes)
        ]
        ends = [command.finish() for command in commands]
    assert [code for code, _, _ in ends] == [0] * len(nodes), "\n".join(err for _, _, err in ends)
    assert "".join(out for _, out, _ in ends).count("epoch 1 of 2 ranks\n") == 1
    worlds = [json.loads(file.read_text())["world_size"] for file in here.glob("**/run.json")]
    assert worlds
    assert set(worlds) == {2}


def with_epochs(script: str) -> str:
    return script.replace("train.py", "train.py 2 0")


@pytest.mark.long
@pytest.mark.slow
def test_torchrun(here: Path) -> None:
    train(here, with_epochs(example("torchrun", "bash")), [{}])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (Open MPI) is not installed")
def test_mpirun(here: Path) -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    train(here, with_epochs(example("MPI", "bash")), [{**allowed, "OMPI_MCA_rmaps_base_oversubscribe": "1"}])


@pytest.mark.long
@pytest.mark.slow
def test_skypilot(here: Path) -> None:
    task = yaml.safe_load(example("SkyPilot", "yaml"))
    assert task["num_nodes"] == 2
    script = with_epochs(task["run"]).replace("s3://bucket/run7", f"file://{here}/store/run7")
    script = script.replace(":8008", f":{free_port()}")
    both = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    train(here, script, [both | {"SKYPILOT_NODE_RANK": str(number)} for number in range(2)])
    assert (here / "store/run7/run/run.json").exists()
    assert [*(here / "store/run7").glob("step-*/index.json")]


@pytest.mark.long
@pytest.mark.parametrize("form", ["yaml", "bash"])
def test_kubeflow(form: str, here: Path) -> None:
    script = example("Kubeflow PyTorchJob", form)
    if form == "yaml":
        replicas = yaml.safe_load(script)["spec"]["pytorchReplicaSpecs"]
        words = [each["template"]["spec"]["containers"][0]["command"] for each in replicas.values()]
        assert words == [["python", "train.py"]] * 2
        script = "python train.py"
    with lab_or_skip(2) as lab:
        both = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.address(0), "MASTER_PORT": "23456"}
        train(here, with_epochs(script), [both | {"RANK": str(number)} for number in range(2)], lab.inside)


def test_ranks_of_which_nothing_says_who_shares_a_host_have_one_each() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    found = read_rank_environment(pod)
    assert (found.rank, found.local_rank, found.local_world_size) == (1, 0, 1)
    assert read_rank_environment({**pod, "MASTER_ADDR": "localhost"}).local_world_size == 3
    found = read_rank_environment({**pod, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (found.local_rank, found.local_world_size) == (1, 2)
