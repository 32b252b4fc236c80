"""A run is predicted beside itself, or planned on the spot; a script that fails on the way says why."""

import json
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, running

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.config.run_folder import RunFolder

TRAIN = str(SCRIPTS / "train.py")


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    device = DeviceSpec(
        name="cpu", kind="cpu", memory_nbytes=2**34, memory_bandwidth_bytes_per_s=1e10,
        peak_flops_per_s={"float32": 1e11}, cores=2, source="made up", evidence="assumed",
    )  # fmt: skip
    link = LinkSpec(tier="node", latency_s=1e-4, bandwidth_bytes_per_s=1e9, source="made up", evidence="assumed")
    node = NodeSpec(name="host", device="cpu", devices_per_node=2, memory_nbytes=2**34)
    spec = ClusterSpec(name="made up", devices={"cpu": device}, nodes=(node,), links=(link,))
    return str(serialization.save(spec, tmp_path / "cluster.json"))


@pytest.mark.parametrize("ranks", [("--nproc", "2"), ()])
def test_the_prediction_is_of_the_plan_that_ran(tmp_path: Path, cluster: str, ranks: tuple[str, ...]) -> None:
    command = (*TUTTI, "run", "--json", "--cluster", cluster, "--folder", "run", *ranks, TRAIN, "1", "0")
    with running(*command, cwd=tmp_path) as run:
        code, out, err = run.finish()
        run.assert_nothing_left()
    assert code == 0, err
    folder = RunFolder(tmp_path / "run")
    plan = serialization.load(Plan, folder.plan)
    assert serialization.load(Prediction, folder.prediction).plan_digest == serialization.digest(plan)
    assert serialization.load(ClusterSpec, folder.cluster).name == "made up"
    assert json.loads(out)["world_size"] == plan.world_size
    assert Path(json.loads(out)["report"]).exists()
    assert ("Predicted step" in err) is (not ranks), "a plan made on the spot is explained before it runs"


def test_a_script_that_fails_while_it_is_planned_for_says_where(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "broken.py").write_text("import tutti\nraise ValueError('before any Job')\n")
    with running(*TUTTI, "run", "--cluster", cluster, "broken.py", cwd=tmp_path) as run:
        code, _, err = run.finish()
        run.assert_nothing_left()
    assert code == 2
    assert "broken.py failed before its Job was prepared" in err
    assert err.count("ValueError: before any Job") == 1
    assert "runpy" not in err
