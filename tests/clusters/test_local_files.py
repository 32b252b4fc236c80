"""Files of this machine that a command names: their paths in a copy of the code, and those that are sent along."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.clusters.cluster_job import JobRequest
from tutti.clusters.kubernetes_manifest import manifests, read_kubernetes_settings, with_secret
from tutti.clusters.local_files import SentFiles, moved_word, packed_files
from tutti.clusters.ray_task import read_ray_settings, task_of
from tutti.environment import FILES_VARIABLE
from tutti.errors import LaunchError


@pytest.mark.parametrize(
    ("word", "copied", "moved"),
    [
        ("/here/train.py", "train.py", "/there/train.py"),
        ("--data=/here/a=b.csv", "--data=a=b.csv", "--data=/there/a=b.csv"),
        ("/here/a=/here/b", "a=/here/b", "/there/a=/here/b"),
        ("--root=/here", "--root=.", "--root=/there"),
        ("/here/../here/x", "x", "/there/x"),
        ("--data=/hereabouts/x", "--data=/hereabouts/x", "--data=/hereabouts/x"),
        ("--data=x", "--data=x", "--data=x"),
    ],
)
def test_paths_of_this_directory_are_those_of_the_copy_on_every_cluster(word: str, copied: str, moved: str) -> None:
    request = JobRequest(name="x", folder=Path("/r"), directory=Path("/here"), words=(word,), nproc=(1,))
    assert moved_word(word, Path("/here"), "/there") == moved
    assert task_of(request, read_ray_settings({"sync": "upload"}), "job")["words"] == [copied]
    settings = read_kubernetes_settings({"image": "a", "directory": "/there", "volumes": "c:/r"})
    job, _, _ = manifests(request, settings, "n", "/r", "seen")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-1] == moved


def test_files_before_the_script_are_sent_along(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"ä": 1}')
    (tmp_path / "two.yaml").write_text("b: 2")
    words = ["--plan", "plan.json", "--name", "x", f"--cluster={tmp_path}/two.yaml", "t.py", "--plan", "plan.json"]
    others, packed = packed_files(words, "t.py", tmp_path)
    assert others == ["--name", "x", "t.py", "--plan", "plan.json"]
    files = SentFiles(packed)
    run, *options, last = files.in_command(["run", "x"])
    assert (run, last, options[::2]) == ("run", "x", ["--plan", "--cluster"])
    assert [Path(path).read_text() for path in options[1::2]] == ['{"ä": 1}', "b: 2"]
    assert [Path(path).suffix for path in options[1::2]] == [".json", ".yaml"]
    assert Path(options[1]).parent.stat().st_mode & 0o77 == 0, "others do not read them"
    files.remove()
    assert not Path(options[1]).parent.exists()
    assert packed_files(words, "t.py", tmp_path, lambda path: True) == (words, "")
    module = ["-m", "train", "--plan", "plan.json"]
    assert packed_files(module, "", tmp_path) == (module, "")
    assert SentFiles("").in_command(["run"]) == ["run"]
    (tmp_path / "large").write_bytes(random.Random(0).randbytes(200_000).hex().encode())
    with pytest.raises(LaunchError, match="--plan: the files are too large to be sent along"):
        packed_files(["--plan=large"], "t.py", tmp_path)


def test_a_pod_gets_the_plan_of_the_submitting_machine(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"mesh": "what the user wrote"}')
    (tmp_path / "train.py").touch()
    words = ("--plan", str(tmp_path / "plan.json"), "train.py")
    request = JobRequest(
        name="x", folder=tmp_path / "run", directory=tmp_path, words=words, script="train.py", nproc=(1,)
    )
    disk = tmp_path / "disk"
    settings = read_kubernetes_settings({"image": "a", "volumes": f"c:{disk}", "python": sys.executable})
    job, _, secret = manifests(request, settings, "n", str(disk / "run"), "inside")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = with_secret(secret, "a secret")["stringData"]
    environment = {each["name"]: values[each["valueFrom"]["secretKeyRef"]["key"]] for each in container["env"]}
    assert environment["TUTTI_SECRET"] == "a secret"
    assert "what the user wrote" not in json.dumps(job)
    pods = {"JOB_COMPLETION_INDEX": "0", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        container["command"], cwd=tmp_path, env=os.environ | environment | pods, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"{tmp_path}/tutti-files-" in done.stderr, "the pod has read that file, and refuses what it says"
    assert "field batch is missing from this Plan" in done.stderr
    assert not list(tmp_path.glob("tutti-files-*"))
    same = read_kubernetes_settings({"image": "a", "volumes": f"c:{tmp_path}"})
    job, _, secret = manifests(request, same, "n", str(tmp_path / "run"), "seen")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == list(words), "pods see it"
    assert FILES_VARIABLE not in json.dumps(job)


def test_a_node_of_ray_gets_the_plan_where_it_sees_no_file_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    request = JobRequest(
        name="x", folder=tmp_path, directory=tmp_path, words=("--plan=plan.json", "t.py"), script="t.py", nproc=(1,)
    )
    for settings in ({"sync": "upload"}, {"folder": "/disk"}, {"folder": "/disk", "directory": "/code"}):
        task = task_of(request, read_ray_settings(settings), "job")
        assert task["words"] == ["t.py"]
        assert SentFiles(task["files"]).options[0] == "--plan"
    assert task_of(request, read_ray_settings({}), "job")["words"] == ["--plan=plan.json", "t.py"], "nodes see it"
