"""The doctor between hosts: judgements of values, and hosts of a lab whose links are limited, cut or blocked."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.hosts import lab_or_skip
from tutti.commands.rank_check import rounds
from tutti.lab import Lab
from tutti.lab.lab_run import Finished, rendezvous_port
from tutti.launch import host_checks

FAST, SLOW = 125e6, 12.5e6


def links_of(rates: dict[tuple[int, int], float], latencies: dict[tuple[int, int], float] | None = None) -> Any:
    hosts = 1 + max(max(pair) for pair in rates)
    pairs = [(a, b, rate, (latencies or {}).get((a, b), 1e-4)) for (a, b), rate in rates.items()]
    return host_checks.links([f"h{at}" for at in range(hosts)], pairs)


def all_pairs(hosts: int, slow: set[tuple[int, int]] = frozenset()) -> dict[tuple[int, int], float]:  # type: ignore[assignment]
    return {(a, b): SLOW if (a, b) in slow else FAST for a in range(hosts) for b in range(hosts) if a != b}


def test_every_pair_is_measured_once_and_no_host_twice_at_a_time() -> None:
    for hosts in range(2, 12):
        all_rounds = rounds(hosts)
        pairs = [pair for each in all_rounds for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(hosts) for b in range(a + 1, hosts)]
        for each in all_rounds:
            busy = [host for pair in each for host in pair]
            assert len(busy) == len(set(busy))


def test_a_slow_host_a_slow_pair_and_two_directions_are_named() -> None:
    assert not links_of(all_pairs(4)).fix
    host = links_of(all_pairs(3, {(0, 2), (2, 0), (1, 2), (2, 1)}))
    assert host.ok
    assert "every link of h2 is slow: at most 100 Mbit/s, others carry 1.0 Gbit/s" in host.found
    assert host.fix
    assert len(host.table) == 4
    pair = links_of(all_pairs(4, {(1, 3), (3, 1)}))
    assert "slow: h1 to h3 100 Mbit/s, h3 to h1 100 Mbit/s" in pair.found
    assert "every link" not in pair.found
    one_way = links_of(all_pairs(2, {(1, 0)}))
    assert "h0 to h1 carries 1.0 Gbit/s, but h1 to h0 100 Mbit/s" in one_way.found
    late = links_of(all_pairs(3), {(0, 1): 0.03, (1, 0): 0.03})
    assert "late answers: h0-h1 30.00 ms" in late.found


def node(label: str, **facts: Any) -> dict[str, Any]:
    return {"label": label, "variables": {}, "offset_s": 0.0, "sees": True, "place": "/w", "problems": [], **facts}


def test_clocks_that_differ_are_named() -> None:
    assert not host_checks.clocks([node("a"), node("b", offset_s=0.2)]).fix
    found = host_checks.clocks([node("a"), node("b"), node("c", offset_s=-90.0)])
    assert found.ok
    assert "c 90.0 s behind" in found.found
    assert "a " not in found.found
    assert "b 90.0 s ahead" in host_checks.clocks([node("a"), node("b", offset_s=90.0)]).found
    all_behind = host_checks.clocks([node("a"), node("b", offset_s=30.0), node("c", offset_s=30.1)])
    assert "a 30.0 s behind" in all_behind.found  # the others agree with each other


def test_contradicting_environments_are_named() -> None:
    alike = [node("a", variables={"NCCL_ALGO": "Ring"}), node("b", variables={"NCCL_ALGO": "Ring"})]
    assert host_checks.environments(alike).ok
    assert not host_checks.environments(alike).fix
    found = host_checks.environments([node("a", variables={"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "4"}), node("b")])
    assert not found.ok
    assert "NCCL_ALGO: Ring on a, not set on b" in found.found
    assert "OMP_NUM_THREADS: 4 on a, not set on b" in found.found
    threads = host_checks.environments([node("a", variables={"OMP_NUM_THREADS": "4"}), node("b")])
    assert threads.ok
    assert threads.fix
    own = [node("a", variables={"NCCL_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "0"}), node("b")]
    assert not host_checks.environments(own).fix


@pytest.mark.parametrize(
    ("variables", "ok", "sentence"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, False, "GLOO_SOCKET_IFNAME names ib0, which is not here (lo, eth0)"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, False, "leaves no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo,eth"}, False, "leaves no interface"),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, True, "NCCL_SOCKET_IFNAME=^lo"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, False, "leaves no interface"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, True, "NCCL_SOCKET_IFNAME=eth"),
        ({"OMP_NUM_THREADS": "8"}, True, "they wait for each other"),
        ({}, True, "no variable"),
    ],
)
def test_variables_that_do_not_fit_the_host(variables: dict[str, str], ok: bool, sentence: str) -> None:
    found = host_checks.variables_here(variables, ["lo", "eth0"], 2, 4)
    assert found.ok is ok
    assert sentence in found.found


def test_few_open_files_are_found() -> None:
    assert host_checks.open_files(4096, 4096, 8).ok
    assert host_checks.open_files(-1, -1, 10**6).ok
    assert host_checks.open_files(256, 4096, 8).fix == "ulimit -n 1024"
    assert "administrator" in host_checks.open_files(1024, 1024, 256).fix


def test_problems_elsewhere_are_told_here() -> None:
    nodes = [node("a", problems=["memory: 1 GiB"]), node("b", problems=["shared memory: full"])]
    found = host_checks.other_problems(nodes, 0)
    assert not found.ok
    assert found.found == "b: shared memory: full"


# Hosts of a lab ----------------------------------------------------------------------------------


def diagnoses(lab: Lab, cwd: Path, **variables: str) -> tuple[Finished, ...]:
    port = rendezvous_port()

    def command(host: int) -> list[str]:
        nodes = ["--nnodes", str(lab.hosts), "--node-rank", str(host), "--rendezvous", f"{lab.address(0)}:{port}"]
        return [sys.executable, "-m", "tutti.cli.main", "doctor", "--json", "--nproc", "1", *nodes]

    return lab.run(command, cwd=cwd, environment=variables, timeout_s=200)


def findings_of(done: Finished) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(done.out)["findings"]}


def rate_in(cell: str) -> float:
    number, unit = re.search(r"([\d.]+) ([MG])bit", cell).groups()  # type: ignore[union-attr]
    return float(number) * (1e9 if unit == "G" else 1e6)


@pytest.mark.long
def test_a_slow_host_and_another_folder_are_named_in_a_lab(tmp_path: Path) -> None:
    with lab_or_skip(3, rates=("unlimited", "unlimited", "100mbit")) as lab:
        done = diagnoses(lab, tmp_path)
    assert [each.code for each in done] == [0, 0, 0], "\n".join(each.out + each.err for each in done)
    for each in done:
        found = findings_of(each)
        labels = found["links"]["table"][0].split()[3:]
        assert f"every link of {labels[2]} is slow" in found["links"]["found"], found["links"]
        assert 60e6 < rate_in(found["links"]["found"]) < 140e6
        assert found["shared folder"]["fix"] == ""
        assert "s between" in found["clocks"]["found"]
        assert not [name for name, finding in found.items() if not finding["ok"]]


@pytest.mark.long
def test_hosts_that_cannot_reach_each_other_are_named(tmp_path: Path) -> None:
    with lab_or_skip(3) as lab:
        subprocess.run(lab.inside(1, ["ip", "route", "add", "unreachable", f"{lab.address(2)}/32"]), check=True)
        done = diagnoses(lab, tmp_path)
        assert [each.code for each in done] == [1, 1, 1]
        for each in done:
            found = findings_of(each)["ports between hosts"]
            assert lab.address(2) in found["found"]
            assert "cannot reach" in found["found"]
            assert "firewall" in found["fix"]


@pytest.mark.long
def test_a_contradicting_variable_and_another_disk_are_named(tmp_path: Path) -> None:
    port = rendezvous_port()
    with lab_or_skip(2) as lab:

        def command(host: int) -> list[str]:
            (tmp_path / str(host)).mkdir()
            doctor = [sys.executable, "-m", "tutti.cli.main", "doctor", "--json", "--nproc", "2", "--nnodes", "2"]
            doctor += ["--node-rank", str(host), "--rendezvous", f"{lab.address(0)}:{port}"]
            own = ["env", f"NCCL_PROTO={('LL', 'Simple')[host]}", *doctor]
            return ["sh", "-c", f"cd {tmp_path / str(host)} && exec {' '.join(own)}"]

        done = lab.run(command, environment=dict(os.environ), timeout_s=200)
    assert [each.code for each in done] == [1, 1], "\n".join(each.out + each.err for each in done)
    for each in done:
        found = findings_of(each)
        assert "NCCL_PROTO: LL on" in found["environments of hosts"]["found"]
        assert found["shared folder"]["ok"]
        assert "is not on" in found["shared folder"]["found"]
