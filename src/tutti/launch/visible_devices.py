"""Which GPUs a rank sees: what CUDA_VISIBLE_DEVICES and its relatives mean on this host, and one MIG instance a rank.

CUDA drops entries that it cannot use without a word, so they are refused here. Rules: CUDA C++ Programming Guide,
"CUDA Environment Variables", and the MIG User Guide, "CUDA Device Enumeration".
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import LaunchError
from tutti.host_topology import SYS
from tutti.launch.gpu_topology import Ask, ask_nvidia_smi

VARIABLE = "CUDA_VISIBLE_DEVICES"
_HIDES_ALL = ("", "-1", "NoDevFiles", "none", "void")
"""Values that hide every GPU; "NoDevFiles" is Slurm's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevice:
    """A GPU, or a MIG instance of one.

    Attributes:
        gpu: the GPU's number in nvidia-smi.
        name: model of the GPU, and profile of the instance.
        uuid: as CUDA_VISIBLE_DEVICES takes it.
    """

    gpu: int
    name: str
    uuid: str

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance."""
        return self.uuid.startswith("MIG-")


def parse_gpus(text: str) -> dict[int, list[VisibleDevice]]:
    """Read the output of `nvidia-smi -L`: GPU -> the GPU itself and then its MIG instances."""
    gpus: dict[int, list[VisibleDevice]] = {}
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+): (.+) \(UUID: (\S+)\)", line):
            number = int(match[1])
            gpus[number] = [VisibleDevice(gpu=number, name=match[2], uuid=match[3])]
        elif gpus and (match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)):
            number = max(gpus)
            gpus[number].append(VisibleDevice(gpu=number, name=f"{gpus[number][0].name} {match[1]}", uuid=match[2]))
    return gpus


def devices_of(value: str | None, gpus: Mapping[int, list[VisibleDevice]]) -> list[VisibleDevice]:
    """Return the devices that processes of this host may use, in the order of CUDA_VISIBLE_DEVICES.

    A GPU that is divided into MIG instances stands for its instances.

    Args:
        value: the variable; None if it is not set.
        gpus: the host's GPUs, as `parse_gpus` returns them.

    Raises:
        LaunchError: CUDA would not use an entry, or not all of them, as it was meant.
    """
    if value is None:
        return [device for devices in gpus.values() for device in _usable(devices)]
    if value.strip() in _HIDES_ALL:
        return []
    entries = [entry.strip() for entry in value.split(",")]
    kinds = {_kind(entry) for entry in entries}
    if len(kinds) > 1:
        raise _wrong(
            value,
            f"{' and '.join(sorted(kinds))} are mixed, and CUDA drops all after the first kind",
            _LIST[min(kinds)],
        )
    found: list[VisibleDevice] = []
    for entry in entries:
        devices = _meant(entry, value, gpus)
        if any(device in found for device in devices):
            raise _wrong(value, f"entry {entry} repeats a device, and CUDA then shows none", "name each device once")
        found += devices
    return found


def _usable(devices: list[VisibleDevice]) -> list[VisibleDevice]:
    """Return the instances of a GPU that has any, else the GPU."""
    return devices[1:] or devices


_NUMBERS, _GPUS, _INSTANCES = "numbers", "GPU UUIDs", "MIG instances"
_LIST = {
    _NUMBERS: "give only numbers, only GPU-... or only MIG-... (`nvidia-smi -L` lists them)",
    _GPUS: "give only GPU-... or only MIG-... (`nvidia-smi -L` lists them)",
    _INSTANCES: "give only MIG-..., one for each rank (`nvidia-smi -L` lists them)",
}


def _kind(entry: str) -> str:
    return _INSTANCES if entry.startswith("MIG-") else _GPUS if entry.startswith("GPU-") else _NUMBERS


def _meant(entry: str, value: str, gpus: Mapping[int, list[VisibleDevice]]) -> list[VisibleDevice]:
    """Return the devices of one entry."""
    dropped = "CUDA drops it and every later entry without a word"
    if _kind(entry) == _NUMBERS:
        if not entry.isdigit():
            raise _wrong(value, f"entry {entry or '(empty)'} is no number; {dropped}", "write numbers such as 0,1")
        if int(entry) not in gpus:
            numbers = ", ".join(map(str, gpus))
            raise _wrong(value, f"this host has no GPU {entry}, and {dropped}", f"choose among {numbers}")
        return _usable(gpus[int(entry)])
    instance = entry.startswith("MIG-")
    known = [device for devices in gpus.values() for device in devices if device.is_instance == instance]
    meant = [device for device in known if device.uuid.startswith(entry)]
    exact = [device for device in meant if device.uuid == entry] or meant
    if len(exact) != 1:
        what = "several devices begin with" if exact else f"this host has no {'instance' if instance else 'GPU'}"
        raise _wrong(value, f"{what} {entry}, and {dropped}", "copy the UUID from `nvidia-smi -L`")
    return exact if instance else _usable(next(devices for devices in gpus.values() if exact[0] in devices))


def _wrong(value: str, why: str, remedy: str) -> LaunchError:
    return LaunchError(f"{VARIABLE}={value}: {why}; {remedy}")


def variables_of_rank(local_rank: int, devices: Sequence[VisibleDevice]) -> dict[str, str]:
    """Return the variable that gives a rank its own MIG instance; empty where no instance is among the devices.

    CUDA shows a process only the first of several instances.
    """
    if not any(device.is_instance for device in devices):
        return {}
    return {VARIABLE: devices[local_rank % len(devices)].uuid}


def describe_devices(ranks: int, value: str | None, devices: Sequence[VisibleDevice]) -> str:
    """Return which physical device each local rank gets, as a phrase.

    Args:
        ranks: number of ranks on the host.
        value: the variable CUDA_VISIBLE_DEVICES; None if it is not set.
        devices: what it lets processes use.
    """
    stated = f"{VARIABLE} is not set" if value is None else f"{VARIABLE}={value}"
    if not devices:
        return f"{stated}: no GPU is visible, ranks compute on the CPU"
    given = []
    for rank in range(ranks):
        device = devices[rank % len(devices)]
        name = "is" if device.is_instance else f"cuda:{rank % len(devices)} is"
        given.append(f"rank {rank}: {name} GPU {device.gpu}, {device.name} ({device.uuid})")
    idle = len(devices) - ranks
    words = f"{stated}; {'; '.join(given)}"
    return words + (f"; {idle} more for other ranks" if idle > 0 else "")


def devices_here(values: Mapping[str, str], ask: Ask = ask_nvidia_smi) -> list[VisibleDevice] | None:
    """Return the devices that processes of this host may use; None where no NVIDIA driver answers.

    Args:
        values: those of the variables that are set.
        ask: asks nvidia-smi.

    Raises:
        LaunchError: CUDA would not use CUDA_VISIBLE_DEVICES as it was meant.
    """
    gpus = parse_gpus(ask("-L") or "")
    return devices_of(values.get(VARIABLE), gpus) if gpus else None


def count_here(values: Mapping[str, str], ask: Ask = ask_nvidia_smi, root: Path = SYS) -> int | None:
    """Return how many GPUs processes of this host may use, of NVIDIA or AMD; None where there is none.

    Args:
        values: those of the variables that are set.
        ask: asks nvidia-smi.
        root: the folder /sys, where the driver of AMD lists its GPUs.

    Raises:
        LaunchError: a driver would not use a variable as it was meant.
    """
    devices = devices_here(values, ask)
    if devices is not None:
        return len(devices) or None
    check_others(values, root)
    count = _count_of_amd(root)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", VARIABLE):
        if name in values:
            chosen = [entry for entry in values[name].split(",") if entry.strip() not in _HIDES_ALL]
            count = min(count, len(chosen))
    return count or None


def order_is_known(values: Mapping[str, str], ask: Ask = ask_nvidia_smi) -> bool:
    """Return whether CUDA numbers GPUs as nvidia-smi does: by default it numbers the fastest model first.

    Args:
        values: those of the variables that are set.
        ask: asks nvidia-smi.
    """
    models = {devices[0].name for devices in parse_gpus(ask("-L") or "").values()}
    return values.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) < 2


def check_others(values: Mapping[str, str], root: Path = SYS) -> str:
    """Check the variables of ROCm and Level Zero that are set, and return them as a phrase.

    ROCR_VISIBLE_DEVICES chooses among the host's GPUs, HIP_VISIBLE_DEVICES among those that it leaves.

    Args:
        values: the variables that are set.
        root: the folder /sys, where the driver of AMD lists its GPUs.

    Raises:
        LaunchError: an entry is no number or UUID, repeats, or is larger than the number of GPUs.
    """
    gpus = _count_of_amd(root)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        entries = [entry.strip() for entry in values.get(name, "").split(",")]
        if values.get(name) is None or entries == [""] or entries == ["-1"]:
            continue
        form = r"\d+(\.\d+)?" if name.startswith("ZE_") else r"\d+|GPU-\w+"
        for entry in entries:
            if not re.fullmatch(form, entry) or entries.count(entry) > 1:
                why = "repeats a device" if entries.count(entry) > 1 else "is no number of a device"
                raise LaunchError(f"{name}={values[name]}: entry {entry or '(empty)'} {why}; write such as 0,1")
            if gpus and entry.isdigit() and not name.startswith("ZE_") and int(entry) >= gpus:
                chosen = name.startswith("HIP") and values.get("ROCR_VISIBLE_DEVICES")
                of = "that ROCR_VISIBLE_DEVICES leaves" if chosen else "of this host"
                raise LaunchError(
                    f"{name}={values[name]}: GPU {entry} is not among the {gpus} {of}, and the driver drops it and "
                    f"every later entry without a word; choose from 0 to {gpus - 1}"
                )
        if name.startswith("ROCR"):
            gpus = min(gpus, len(entries)) if gpus else len(entries)
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _count_of_amd(root: Path) -> int:
    """Return the number of GPUs that AMD's driver lists; 0 without the driver."""
    count = 0
    for file in (root / "class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        with contextlib.suppress(OSError, ValueError):
            count += int(file.read_text(encoding="ascii")) > 0  # processors are nodes with the id 0
    return count
