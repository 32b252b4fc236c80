"""Labs for real: hosts that see each other alone, links limited both ways, nothing left whatever died."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.hosts import lab_or_skip, needs_labs
from tutti.errors import LabError
from tutti.lab import Lab, lab_network
from tutti.lab.lab_record import LabRecord, Owner, locked, new_record, records, this_process, write

TUTTI = (sys.executable, "-m", "tutti.cli.main", "lab")
OWNER = """
import sys, time
from tutti.lab import Lab
with Lab(2) as lab:
    lab.start(("sleep", "600"))
    print(lab.record.id, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with lab_or_skip(2, rates=["100mbit", "unlimited"]) as made:
        yield made


def remains(lab_id: str) -> list[str]:
    """Namespaces, processes and files of a lab."""
    names = [name for name in lab_network.namespaces() if lab_id in name]
    files = [str(path) for path in Path("/run/tutti-lab").glob(f"{lab_id}*")]
    return [*names, *(str(pid) for name in names for pid in lab_network.pids(name)), *files]


def tutti_lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TUTTI, *words], capture_output=True, text=True, check=False, timeout=60)


def test_hosts_have_names_of_their_own_and_know_each_other(lab: Lab) -> None:
    before = os.uname().nodename
    done = lab.run(
        ("sh", "-c", "hostname; getent ahostsv4 host1 | head -1 | cut -d' ' -f1; echo $NODE_RANK of $NNODES >&2")
    )
    assert [one.out.split() for one in done] == [["host0", lab.address(1)], ["host1", lab.address(1)]]
    assert [one.err for one in done] == ["0 of 2\n", "1 of 2\n"]
    assert os.uname().nodename == before


def test_a_limited_link_is_limited_at_both_ends_and_an_unlimited_one_at_none(lab: Lab) -> None:
    def queue(namespace: str, device: str) -> str:
        command = ["tc", "-n", namespace, "qdisc", "show", "dev", device]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    record = lab.record
    for namespace, device in ((record.namespace(0), "eth0"), (record.switch, "port0")):
        assert "tbf" in queue(namespace, device)
        assert "rate 100Mbit" in queue(namespace, device)
    for namespace, device in ((record.namespace(1), "eth0"), (record.switch, "port1")):
        assert "tbf" not in queue(namespace, device)


def test_the_machine_itself_has_no_part_in_the_labs_network(lab: Lab) -> None:
    links = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True).stdout)
    addresses = [entry["local"] for link in links for entry in link["addr_info"]]
    assert not any(address.startswith(f"{lab.record.subnet}.") for address in addresses)


def test_a_failure_on_one_host_ends_the_others(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.lab.lab_run.SETTLE_S", 0.2)
    done = lab.run(lambda host: ("sh", "-c", "exit 3") if host else ("sleep", "600"))
    assert [one.code for one in done] == [-signal.SIGTERM, 3]


def test_what_takes_too_long_is_ended_with_its_descendants(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(("sh", "-c", "setsid sleep 600 & setsid sleep 600 & wait"), timeout_s=0.5)
    assert not any(lab_network.pids(name) for name in lab.record.namespaces)


def test_labs_side_by_side_do_not_see_each_other(lab: Lab) -> None:
    with lab_or_skip(2) as other:
        assert other.record.subnet != lab.record.subnet
        there = ("sh", "-c", f"ping -c 1 -W 1 {lab.address(0)} || ip route get {lab.address(0)}")
        assert all(one.code != 0 for one in other.run(there))
        assert [one.out.strip() for one in other.run(("hostname",))] == ["host0", "host1"]
    assert [one.code for one in lab.run(("true",))] == [0, 0], "it stands although the other is down"


def test_a_block_leaves_nothing() -> None:
    with lab_or_skip(2) as made:
        made.start(("sleep", "600"))
        lab_id = made.record.id
        assert len(remains(lab_id)) >= 5
    assert remains(lab_id) == []
    with pytest.raises(LabError, match="inside its `with` block"):
        made.address(0)


def test_a_killed_owners_lab_is_removed_by_the_next_command() -> None:
    needs_labs()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        lab_id = owner.stdout.readline().strip()
        end = time.monotonic() + 20
        while len(remains(lab_id)) < 7 and time.monotonic() < end:  # the command is on its way into its host
            time.sleep(0.05)
        assert len(remains(lab_id)) >= 7
        tutti_lab("down", "--name", "none")
        assert len(remains(lab_id)) >= 7, "its owner lives: it is left alone"
        owner.kill()
    assert len(remains(lab_id)) >= 7
    name = f"after-{lab_id}"
    try:
        done = tutti_lab("up", "--name", name, "--hosts", "1")
        assert done.returncode == 0, done.stderr
        assert remains(lab_id) == []
    finally:
        assert tutti_lab("down", "--name", name).stdout == f"lab {name} is down\n"
    assert name not in {record.name for record in records()}


def test_a_lab_half_made_is_removed_and_what_others_made_is_not() -> None:
    needs_labs()
    dead = subprocess.Popen(["true"])
    dead.wait()
    half = new_record((None, None), ranks_per_host=1, name="", owner=Owner(pid=dead.pid, started=1), subnet="10.213.9")
    foreign = f"tutti-{half.id}-host9"  # by a name of the same form that the lab has not
    write(half)
    for name in (half.switch, foreign):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert half in lab_network.remove_stale()
        assert remains(half.id) == [foreign]
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


def test_no_name_takes_down_or_enters_a_lab_that_is_someones_block(lab: Lab) -> None:
    for words in (("down",), ("exec", "all", "--", "true"), ("run", "train.py"), ("up", "--hosts", "1")):
        done = tutti_lab(words[0], "--name", "", *words[1:])
        assert done.returncode == 2, done.stdout
        assert "names no lab" in done.stderr
    assert lab.record in records()
    assert len(lab.run(("true",))) == 2
    with pytest.raises(LabError, match="names no lab"):
        lab_network.make((None,), ranks_per_host=1, name="", standing=True)
    with pytest.raises(LabError, match="names no lab"):
        lab_network.make((None,), ranks_per_host=1, name="../evil", standing=False)


def test_a_number_that_was_given_again_is_another_process() -> None:
    owner = this_process()
    assert owner.alive
    assert not Owner(pid=owner.pid, started=owner.started - 1).alive


def test_the_command_line_from_up_to_down() -> None:
    needs_labs()
    name = f"test-{os.getpid()}"
    try:
        done = tutti_lab("up", "--name", name, "--rate", "1gbit,100mbit", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0]["rates"] == [10**9, 10**8]
        again = tutti_lab("up", "--name", name)
        assert again.returncode == 2
        assert "is up already" in again.stderr
        assert "host1" in tutti_lab("status").stdout
        one = tutti_lab("exec", "--name", name, "host1", "--", "sh", "-c", "hostname; exit 7")
        assert (one.returncode, one.stdout) == (7, "host1\n")
        both = tutti_lab("exec", "--name", name, "all", "--", "hostname")
        assert sorted(both.stdout.splitlines()) == ["host0", "host1: host1"]
    finally:
        tutti_lab("down", "--name", name)
    gone = tutti_lab("exec", "--name", name, "0", "--", "true")
    assert gone.returncode == 2
    assert "tutti lab up" in gone.stderr


def test_an_interrupted_command_ends_what_it_started() -> None:
    needs_labs()
    name = f"stop-{os.getpid()}"
    tutti_lab("up", "--name", name)
    try:
        command = [*TUTTI, "exec", "--name", name, "all", "--", "sh", "-c", "echo on; sleep 600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().endswith("on\n")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        record = next(record for record in records() if record.name == name)
        assert not any(lab_network.pids(namespace) for namespace in record.namespaces)
    finally:
        tutti_lab("down", "--name", name)


def test_a_killed_command_leaves_nothing_running() -> None:
    """What it started is not its child: the commands' own children, too, and what listens to no signal but KILL."""
    needs_labs()
    name = f"kill-{os.getpid()}"
    tutti_lab("up", "--name", name)
    try:
        words = "trap '' TERM HUP; (sleep 600; true) & echo on; sleep 600; true"
        command = [*TUTTI, "exec", "--name", name, "all", "--", "sh", "-c", words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline()[-3:] for _ in range(2)] == ["on\n", "on\n"]
            process.kill()
        record = next(record for record in records() if record.name == name)
        end = time.monotonic() + 20
        while any(lab_network.pids(namespace) for namespace in record.namespaces) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(lab_network.pids(namespace) for namespace in record.namespaces)
    finally:
        tutti_lab("down", "--name", name)


def test_without_root_or_tools_one_sentence_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.lab.lab_network.sys.platform", "linux")
    monkeypatch.setattr("tutti.lab.lab_network.shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LabError, match=r"needs tc, .* apt install iproute2"):
        lab_network.check_possible()
    monkeypatch.setattr("tutti.lab.lab_network.shutil.which", lambda tool: tool)
    monkeypatch.setattr("tutti.lab.lab_network.os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root") as caught:
        lab_network.check_possible()
    assert caught.value.exit_code == 2


def test_who_waits_for_a_stopped_process_is_told_which() -> None:
    needs_labs()
    holds = (
        "import time; from tutti.lab.lab_record import locked\n"
        "with locked(): print('holds', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline()
            other.send_signal(signal.SIGSTOP)
            said = f"process {other.pid} has been .* for 0.3 s; resume it .* or end it"
            with pytest.raises(LabError, match=said), locked(0.3):
                pass
        finally:
            other.kill()
    with locked(10.0):  # it goes with its process
        pass


def test_a_record_says_what_it_cannot_be() -> None:
    good = LabRecord(id="a", name="", owner=None, subnet="10.213.0", rates=(None,), made_utc="")
    assert good.namespaces == ("tutti-a-host0", "tutti-a-switch")
    for rates, ranks in (((), 1), ((None,) * 201, 1), ((None,), 0)):
        with pytest.raises(LabError):
            LabRecord(id="a", name="", owner=None, subnet="", rates=rates, ranks_per_host=ranks, made_utc="")
