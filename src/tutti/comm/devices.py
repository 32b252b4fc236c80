"""Which device a rank computes on, which backend exchanges its tensors, and whether ranks share a device."""

import socket
from typing import Any

import torch

from tutti.comm.staged_gloo import STAGED, register_staged_backend
from tutti.environment import RankEnvironment, visible_devices

_OWN_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""The backend of torch that exchanges tensors between devices of a kind. torch calls AMD's devices "cuda" too."""


def choose_device(local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the process's current one.

    Ranks take the host's accelerators in turn. A launcher may show each rank only a device of its own.

    Args:
        local_rank: the rank's number on its host.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return torch.device("cpu")
    device = torch.device(kind.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def current_device() -> torch.device:
    """Return this process's current accelerator; the CPU where there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def backend_of(device: torch.device, *, shared: bool) -> str:
    """Return the backend for ranks on devices of this kind: torch's, or "staged" where torch has none.

    Args:
        device: the device of a rank.
        shared: whether any ranks share a device.
    """
    return STAGED if shared and device.type != "cpu" else _OWN_BACKENDS.get(device.type, STAGED)


def message_backend() -> str:
    """Return the backend for messages at any time and with tags, which NCCL lacks: Gloo, staged for accelerators."""
    device = current_device()
    return "gloo" if device.type == "cpu" else register_staged_backend(device.type)


def device_identity(device: torch.device) -> str:
    """Return a text that is equal for two ranks if, and only if, they compute on the same device."""
    properties = torch.get_device_module(device).get_device_properties(device) if device.type in _OWN_BACKENDS else None
    number = getattr(properties, "uuid", None)
    if number is None:
        return f"{socket.gethostname()} {device}"
    return f"{number} {_mig_instance(device)}"


def _mig_instance(device: torch.device) -> str:
    """Return the MIG instance that the process was given; empty for a whole GPU. Instances of a GPU have its UUID."""
    visible = visible_devices()
    index = device.index or 0
    return visible[index] if index < len(visible) and visible[index].startswith("MIG-") else ""


def count_devices(store: Any, environment: RankEnvironment, device: torch.device) -> tuple[int, str]:
    """Count the devices of all ranks. Collective, through the ranks' store, because no group can be opened before.

    Args:
        store: torch's store in which the ranks meet.
        environment: this process's place among the ranks.
        device: this rank's device.

    Returns:
        (number of devices, two ranks that share one and which), the same on every rank; the text is empty if each rank
        has a device of its own.
    """
    key = f"device {device_identity(device)}"
    if store.add(key, 1) == 1:
        store.add("devices", 1)
        store.set(f"{key} rank", str(environment.rank))
    else:
        first = store.get(f"{key} rank").decode()
        pair = f"ranks {first} and {environment.rank} on {socket.gethostname()} both have {device}"
        instances = sum(name.startswith("MIG-") for name in visible_devices())
        why = ", because CUDA shows a process only the first of several MIG instances" if instances > 1 else ""
        sees = f"rank {environment.rank} sees {torch.accelerator.device_count()} in all{why}"
        store.set("shared device", f"{pair}; {sees}")
    if store.add("ranks with a device", 1) == environment.world_size:
        sharing = store.get("shared device").decode() if store.check(["shared device"]) else ""
        store.set("verdict on devices", f"{store.add('devices', 0)} {sharing}")
    count, _, sharing = store.get("verdict on devices").decode().partition(" ")
    return int(count), sharing


def accelerator_peak_nbytes(device: torch.device) -> int:
    """Return the most bytes that tensors have occupied on an accelerator in this process."""
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", torch.accelerator.max_memory_allocated)
    return int(peak(device))


def device_name(device: torch.device) -> str:
    """Return the model of an accelerator, such as "NVIDIA H100 80GB HBM3"; its kind where torch does not tell."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type
