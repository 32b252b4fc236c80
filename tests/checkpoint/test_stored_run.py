"""Run folders in an object store: staged here, kept there, reported on from anywhere, continued elsewhere."""

import json
import shutil
import signal
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner

import tutti
from checkpoint.test_checkpoint_store import S3, SCRIPT
from checkpoint.test_checkpoint_store import s3 as _s3
from launch.launch_rig import TUTTI, running, wait_until
from tutti.checkpoint.stored_run import StoredRun
from tutti.cli.main import cli
from tutti.errors import LaunchError, ReportError, StoreError

s3 = _s3


def start(here: Path, s3: S3, *words: str) -> object:
    here.mkdir(exist_ok=True)
    (here / "train.py").write_text(SCRIPT)
    environment = {**s3.environment, "XDG_STATE_HOME": str(here / "state")}
    return running(*TUTTI, "run", "--no-predict", "--nproc", "2", *words, cwd=here, environment=environment)


def row_steps(text: bytes) -> list[int]:
    return [row["step"] for row in map(json.loads, text.splitlines()) if row["kind"] == "step"]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_kept_in_a_store_and_goes_on_on_another_machine(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = f"{s3.address}/kept", fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    one, other = tmp_path / "one machine", tmp_path / "another"
    with start(one, s3, "--folder", address, "--resume", address, "train.py", "5") as run:  # as where machines go
        assert wait_until(lambda: files.exists("bucket/kept/run/run.json"), 60), run.said()  # while it runs
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.finish()
        assert code == 75, err
        assert f"{address} has no checkpoint yet: the run begins" in err
    done = row_steps(files.cat_file("bucket/kept/run/metrics.jsonl"))
    assert done == [*range(1, done[-1] + 1)]
    assert files.exists("bucket/kept/run/ranks/1/stdout.log")
    hidden = [name for name in files.find("bucket/kept/run") if "/checkpoints/" in name or "/." in name]
    assert hidden == ["bucket/kept/run/.begun"], "by which it was found that the store can be written"
    (stopped,) = (one / "runs").iterdir()
    assert all(words.startswith("ended after step") for words in tutti.why(stopped).ranks.values())
    shutil.rmtree(one)
    epochs = str(done[-1] // 4 + 2)
    with start(other, s3, "--folder", address, "train.py", epochs) as run:
        code, _, err = run.finish()
        assert (code, f"{address} already holds a run; give another --folder, or --resume {address}" in err) == (
            2,
            True,
        )
    with start(other, s3, "--resume", address, "train.py", epochs) as run:
        code, _, err = run.finish()
        assert code == 0, err
    (folder,) = (other / "runs").iterdir()
    text = files.cat_file("bucket/kept/run/metrics.jsonl")
    assert text == (folder / "metrics.jsonl").read_bytes()
    assert row_steps(text) == [*range(1, int(epochs) * 4 + 1)], "one curve, of both machines"
    assert files.cat_file("bucket/kept/run/report/report.html") == (folder / "report/report.html").read_bytes()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert tutti.report(address).steps == tutti.report(folder).steps
    said = CliRunner().invoke(cli, ["why", address])
    assert (said.exit_code, "completed" in said.output or "ended" in said.output) == (0, True), said.output
    with pytest.raises(ReportError, match="there is no run at s3://bucket/nothing"):
        tutti.report(f"{s3.address}/nothing")


def test_what_changes_is_uploaded_and_a_store_that_fails_ends_no_run(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    (run / "ranks/0").mkdir(parents=True)
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    for name in ("run.json", "ranks/0/stdout.log", "checkpoints/step-00000002/run.pt", ".hidden", "plan.partial"):
        (run / name).write_text(name)
    stored = StoredRun("memory://stored/one")
    with stored.mirrored(run, said.append):
        pass
    (run / "ranks/0/stdout.log").write_text("more")
    with stored.mirrored(run, said.append):
        pass
    assert stored.exists()
    again = tmp_path / "again"
    StoredRun("memory://stored/one").fetch(again)
    assert sorted(str(path.relative_to(again)) for path in again.rglob("*.*")) == ["ranks/0/stdout.log", "run.json"]
    assert (again / "ranks/0/stdout.log").read_text() == "more"
    assert said == []
    readonly = StoredRun(f"file://{run}/run.json/inside")
    with readonly.mirrored(run, said.append):
        pass
    assert "the run goes on" in said[0]
    assert said[-1].endswith(f"files of this run are missing there; they are in {run}")


def test_addresses_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(StoreError, match="cannot be reached or used"):
        tutti.run("train.py", [1], nproc=1, folder=f"file://{tmp_path}/train.py/inside")
    with pytest.raises(
        LaunchError, match=r"holds no run and no checkpoint; to begin one there, add --folder memory://x"
    ):
        tutti.run("train.py", [1], nproc=1, resume="memory://x/nothing")
    assert not (tmp_path / "runs").exists()


def test_names_that_lead_out_of_the_folder_are_left_out(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/stored/bad/run/a/..hidden/x", b"x")
    fsspec.filesystem("memory").pipe_file("/stored/bad/run/samples/é (1).txt", b"y")
    StoredRun("memory://stored/bad").fetch(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")] == ["samples/é (1).txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]
