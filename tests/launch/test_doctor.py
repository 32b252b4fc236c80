"""The doctor finds what would stop a launch, names the fix, and finds nothing where nothing is wrong."""

import json
import socket
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, running

from tutti.launch import doctor_checks

TRAIN = str(SCRIPTS / "train.py")


def test_a_healthy_host_passes_with_ranks_that_really_met(tmp_path: Path) -> None:
    with running(*TUTTI, "doctor", "--nproc", "2", TRAIN, cwd=tmp_path) as run:
        code, out, err = run.finish()
        run.assert_nothing_left()
    assert code == 0, out + err
    assert "2 started, met and all-reduced a number" in out
    assert "PROBLEM" not in out


def test_problems_come_with_their_fix_and_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet = f"127.0.0.1:{server.getsockname()[1]}"
        command = (*TUTTI, "doctor", "--json", "--nproc", "1", "--rendezvous", meet, "absent.py")
        with running(*command, cwd=tmp_path) as run:
            code, out, _ = run.finish()
    diagnosis = json.loads(out)
    assert code == 1
    assert diagnosis["ok"] is False
    problems = {finding["name"]: finding for finding in diagnosis["findings"] if not finding["ok"]}
    assert set(problems) == {"script", "rendezvous"}
    assert "is in use" in problems["rendezvous"]["found"]
    assert all(finding["fix"] for finding in problems.values())


def test_a_full_or_absent_shared_memory_is_found(tmp_path: Path) -> None:
    finding = doctor_checks.shared_memory(tmp_path / "absent")
    assert not finding.ok
    assert "mount" in finding.fix


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not doctor_checks.run_folder(Path("/proc/here")).ok
    assert doctor_checks.run_folder(tmp_path / "deep" / "er").ok


def test_more_ranks_than_memory_are_found() -> None:
    finding = doctor_checks.memory(10**6)
    assert not finding.ok
    assert "start at most" in finding.fix


def test_an_old_or_absent_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.metadata, "version", lambda name: "2.5.1+cpu")
    assert not doctor_checks.torch().ok
    monkeypatch.setattr(doctor_checks.metadata, "version", lambda name: "2.13.0+cpu")
    assert doctor_checks.torch().ok


@pytest.mark.parametrize(("source", "ok"), [("import tutti\n", True), ("import torch\n", False), ("x = (\n", False)])
def test_a_script_is_read_and_not_run(tmp_path: Path, source: str, ok: bool) -> None:
    path = tmp_path / "script.py"
    path.write_text(source + "raise SystemExit('it was run')\n" if ok else source)
    assert doctor_checks.script(path).ok is ok


def test_an_address_without_a_host_is_found() -> None:
    finding = doctor_checks.rendezvous("no-such-host.invalid:29500")
    assert not finding.ok
    assert "no-such-host.invalid is not known" in finding.found
