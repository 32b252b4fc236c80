"""Which device a rank gets, and how ranks find out that they share one."""

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti.comm import devices
from tutti.environment import RankEnvironment


def _see(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[torch.device]:
    """Let torch see `count` accelerators; returns the list of those that are made the current one."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("kind", "count", "local_rank", "device"),
    [("cuda", 4, 3, "cuda:3"), ("cuda", 1, 3, "cuda:0"), ("cuda", 4, 5, "cuda:1"), ("xpu", 2, 1, "xpu:1")],
)
def test_ranks_take_the_devices_that_they_see_in_turn(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int, local_rank: int, device: str
) -> None:
    """With srun --gpus-per-task=1 every rank sees one device."""
    chosen = _see(monkeypatch, kind, count)
    assert devices.choose_device(local_rank) == torch.device(device)
    assert chosen == [torch.device(device)]


@pytest.mark.parametrize(
    ("kind", "shared", "backend"),
    [
        ("cpu", False, "gloo"),
        ("cuda", False, "nccl"),
        ("cuda", True, "staged"),
        ("xpu", False, "xccl"),
        ("mps", False, "staged"),
    ],
)
def test_the_backend_is_that_of_the_device(kind: str, shared: bool, backend: str) -> None:
    assert devices.backend_of(torch.device(kind), shared=shared) == backend


def _identity(monkeypatch: pytest.MonkeyPatch, uuid: str | None, visible: str) -> str:
    properties = SimpleNamespace() if uuid is None else SimpleNamespace(uuid=uuid)
    module = SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return devices.device_identity(torch.device("cuda", 0))


def test_a_device_is_known_by_its_uuid_and_its_mig_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _identity(monkeypatch, "GPU-1", "")
    assert whole == _identity(monkeypatch, "GPU-1", "3")  # another number of the same GPU
    assert whole != _identity(monkeypatch, "GPU-2", "")
    assert _identity(monkeypatch, "GPU-1", "MIG-a") != _identity(monkeypatch, "GPU-1", "MIG-b")
    assert _identity(monkeypatch, None, "") == f"{socket.gethostname()} cuda:0"


def _counted(monkeypatch: pytest.MonkeyPatch, identities: list[str]) -> list[tuple[int, str]]:
    """What every rank is told; ranks are threads."""
    store, counted = dist.HashStore(), dict[int, tuple[int, str]]()
    mine = threading.local()
    monkeypatch.setattr(devices, "device_identity", lambda device: mine.identity)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)

    def join(rank: int) -> None:
        mine.identity = identities[rank]
        place: Any = RankEnvironment(rank=rank, world_size=len(identities), local_rank=rank)
        counted[rank] = devices.count_devices(store, place, torch.device("cuda", 0))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [counted[rank] for rank in range(len(identities))]


def test_every_rank_is_told_that_two_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert "only the first of several MIG instances" in _counted(monkeypatch, ["MIG-1", "MIG-1"])[0][1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _counted(monkeypatch, ["GPU-1", "GPU-2", "GPU-3"]) == [(3, "")] * 3
    told = _counted(monkeypatch, ["GPU-1", "GPU-2", "GPU-1"])
    assert len(set(told)) == 1
    count, pair = told[0]
    assert count == 2
    assert "cuda:0" in pair
    assert "0" in pair.partition(" on ")[0]
    assert "2" in pair.partition(" on ")[0]
