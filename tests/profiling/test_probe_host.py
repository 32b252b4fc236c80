"""What a host grants, read from control groups of both versions, and what it is made of."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tutti.profile.probe import host_facts


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/user.slice/job\n"
V1 = "5:cpu,cpuacct:/job\n3:memory:/job\n1:name=systemd:/other\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/user.slice/job/cpu.max": "150000 100000"}, 1.5),
        # An ancestor's quota binds too.
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/user.slice/job/cpu.max": "400000 100000",
                "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
            },
            2.0,
        ),
        # In a container the group's own path is not mounted: the mount is the group.
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert host_facts.cpu_quota(tree(tmp_path, files)) == quota


def test_cores_are_the_affinity_bounded_by_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert host_facts.cores_granted(root) == 2
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000")
    assert host_facts.cores_granted(root) == 1
    (root / "sys/fs/cgroup/cpu.max").write_text("1600000 100000")
    assert host_facts.cores_granted(root) == 8


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1000000"}, 1_000_000),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_memory_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    root = tree(tmp_path, files)
    assert host_facts.memory_limit(root) == limit
    assert host_facts.memory_granted(root) == (limit or psutil.virtual_memory().total)


def test_cpu_model_and_caches(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu0/cache"
    root = tree(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some  CPU @ 3 GHz\n",
            f"{cache}/index0/size": "48K\n",
            f"{cache}/index3/size": "32768K\n",
        },
    )
    assert host_facts.cpu_model(root) == "Some CPU @ 3 GHz"
    assert host_facts.cache_nbytes(root) == 32 * 2**20
    assert host_facts.cache_nbytes(tmp_path / "nothing") == 32 * 2**20


def test_this_host() -> None:
    here = host_facts.facts()
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.memory_nbytes > 2**28
    assert here.name
    assert here.cpu
    assert {"python", "torch", "system"} <= host_facts.versions().keys()


def test_load_is_other_work_on_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts.os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    monkeypatch.setattr(host_facts.psutil, "cpu_percent", lambda interval, percpu: [100.0, 30.0, 100.0, 90.0])
    assert host_facts.load() == pytest.approx(1.2)


def test_load_sees_a_process_that_computes_now() -> None:
    (core, *_) = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"])
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [core])
        time.sleep(0.5)
        assert host_facts.load() > 0.8
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, before)


def test_what_is_kept_is_found_without_torch() -> None:
    """`tutti run` looks for it on each node, where torch would take seconds."""
    code = (
        "import sys; from tutti.commands.inputs import kept_cluster as kept; kept(1); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
