"""Versions and device names of a host, and what differs between the hosts of a run."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.comm.devices import device_name
from tutti.config.version import VERSION
from tutti.machine import MODULES, gpu_driver

_REMEDIES = {
    "tutti": "install one version on all hosts",
    "python": "use one environment on all hosts, such as a container",
    "torch": "install one version on all hosts: versions may compute other bits and name their messages otherwise",
    "CUDA": "install the same build of torch on all hosts",
    "ROCm": "install the same build of torch on all hosts",
    "NCCL": "install the same torch on all hosts and take other NCCLs out of LD_LIBRARY_PATH: versions of NCCL may not "
    "understand each other",
    "GPU driver": "update the older drivers",
    "device": "steps wait for the slowest: describe all hosts to `tutti plan`, which gives faster ones more, or leave "
    "the slower ones out",
}
"""What to do about each kind of difference, in the order in which they are told."""


def host_versions(device: torch.device, modules: Path = MODULES) -> dict[str, str]:
    """Return the versions that should be equal on all hosts, and the name of this rank's device.

    Args:
        device: the device on which this rank computes.
        modules: the folder in which Linux lists its drivers.
    """
    versions = {"tutti": VERSION, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.hip is not None:
        versions["ROCm"] = torch.version.hip
    elif torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    if device.type == "cuda" and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    if driver := gpu_driver(modules):
        versions["GPU driver"] = driver
    versions["device"] = platform.machine() if device.type == "cpu" else device_name(device)
    return versions


def differences(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Return what differs between hosts, by kind: a sentence with the hosts and the remedy after its last semicolon.

    Args:
        ranks: (host, versions) of each rank.
    """
    hosts = list(dict.fromkeys(host for host, _ in ranks))
    told: dict[str, str] = {}
    for kind, remedy in _REMEDIES.items():
        values: dict[str, list[str]] = {}
        for host in hosts:
            own = sorted({versions.get(kind, "none") for name, versions in ranks if name == host})
            values.setdefault(" and ".join(own), []).append(host)
        if len(values) > 1:
            which = ", ".join(f"{value} on {_few(names)}" for value, names in values.items())
            told[kind] = f"{kind} differs between hosts: {which}; {remedy}"
    return told


def _few(names: list[str]) -> str:
    """Return host names, at most four of them."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
