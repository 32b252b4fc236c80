"""Arrays of runs on a real, private Slurm of two nodes: submitted at once, each with a folder and a life of its own."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.command_rig import tutti
from launch.launch_rig import SCRIPTS, TUTTI, wait_until
from launch.slurm_rig import missing, own_slurm
from tutti.commands.run_array import parse_array
from tutti.errors import LaunchError

needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TRAIN = str(SCRIPTS / "train.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with own_slurm() as environment:
        yield environment


def listed(project: Path, cluster: dict[str, str], *runs: str) -> dict[str, dict[str, object]]:
    """What `tutti status` says of runs, by their folders."""
    code, out, err = tutti(project, cluster, "status", "--json", *runs)
    assert code == 0, err
    return {run["folder"]: run for run in json.loads(out)["runs"]}


@needs_slurm
@pytest.mark.slow
@pytest.mark.long
def test_the_runs_of_an_array_live_by_themselves(tmp_path: Path, cluster: dict[str, str]) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    words = ("--no-predict", "--nproc", "1", "--folder", "a sweep", TRAIN, "{epochs}", "{pause}")
    asked = ("submit", "--array", "epochs=1,200 pause=0.2,0.1 %3", *words)
    code, _, err = tutti(project, cluster, *asked)
    assert code == 0, err
    assert "a sweep/3 (epochs=200 pause=0.1)" in err.replace("\n", " ")
    names = [f"a sweep/{number}" for number in range(4)]
    assert wait_until(lambda: int(str(listed(project, cluster, names[2])[names[2]]["step"] or 0)) >= 3, 100)
    found = listed(project, cluster, "a sweep")
    assert list(found) == names
    assert [run["values"] for run in found.values()][1:3] == ["epochs=1 pause=0.1", "epochs=200 pause=0.2"]
    # One is preempted: it stops with a checkpoint, and goes on by itself, with its own.
    job = str(found[names[2]]["job"])
    subprocess.run(["scancel", "--signal=TERM", job], env={**cluster, "PATH": "/usr/bin:/bin"}, check=True)

    def starts(name: str) -> list[int]:
        rows = map(json.loads, (project / name / "metrics.jsonl").read_text().splitlines())
        return [row["resumed_at_step"] for row in rows if row["kind"] == "start"]

    assert wait_until(lambda: len(starts(names[2])) == 2, 100), (project / names[2]).glob("*.out")
    assert starts(names[2])[1] >= 3
    assert starts(names[3]) == [0], "another run of the array goes on undisturbed"
    assert (project / names[2] / f"slurm-{job}.out").exists()
    # One is cancelled, then all.
    assert tutti(project, cluster, "cancel", names[3])[0] == 0
    assert wait_until(lambda: listed(project, cluster, names[3])[names[3]]["state"] == "cancelled", 60)
    assert listed(project, cluster, names[2])[names[2]]["state"] in ("pending", "running")
    code, _, err = tutti(project, cluster, "cancel", "a sweep")
    assert code == 0, err
    assert err.count("is cancelled") == 1, "the others have ended"
    states = {name: run["state"] for name, run in listed(project, cluster, "a sweep").items()}
    assert list(states.values())[:2] == ["completed", "completed"]
    assert wait_until(lambda: listed(project, cluster, names[2])[names[2]]["state"] == "cancelled", 60)
    assert "all 4 runs of a sweep have ended already" in tutti(project, cluster, "cancel", "a sweep")[2]
    assert "has the runs of an array; name one of them" in tutti(project, cluster, "attach", "a sweep")[2]


def test_the_script_of_an_array_is_shown(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TUTTI, "submit", "--dry-run", "--array", "2,5-6%2", "--nproc", "1", TRAIN, "{index}", "{other}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "#SBATCH --array=2,5,6%2\n" in done.stdout
    assert "/runs/train-TIME/%a/slurm-%A_%a.out\n" in done.stdout
    assert "\n6)\n" in done.stdout
    assert f"{TRAIN} 6 {{other}}" in done.stdout.replace("'\"'\"'", "'").replace("'", "")
    assert not list(tmp_path.iterdir())
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--array", "lr=0.1,0.01"), "no argument has {lr}, so its values would change nothing"),
        (("--array", "0-3", "--on", "ssh", "--request", "hosts=a:1"), "ssh takes no arrays of runs; use --on slurm"),
        (("--array", "0-3", "--resume", "."), "let one of an array go on by itself"),
        (("--array", "1-2", "--mesh", "dp={index}"), "the runs need different numbers of nodes or ranks"),
        (("--array", "0-3", "--follow"), "--array and --follow exclude each other"),
    ],
)
def test_what_is_no_array_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = subprocess.run([*TUTTI, "submit", *words, TRAIN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, "one sentence"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "3-1", "0-3%0", "a-b", "1,1", "lr=", "lr=1 lr=2", "0-5000", "index=1"])
def test_texts_that_are_no_array(text: str) -> None:
    with pytest.raises(LaunchError, match=r"^--array "):
        parse_array(text, ["{lr}", "{index}"])
