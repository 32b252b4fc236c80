"""The slots of this host, of which each rank takes one, where a run has as many ranks as there are (`--nproc 2:8`).

A slot is a GPU, or a core on a host without GPUs.
"""

from tutti.errors import LaunchError
from tutti.launch.launch_environment import device_variables, granted_cores
from tutti.launch.visible_devices import count_here


def checked_slots(least: int, most: int, *, share_device: bool = False) -> int:
    """Return the number of slots, at most `most`.

    Raises:
        LaunchError: there are fewer than `least`.
    """
    slots = slots_here(most, share_device=share_device)
    if slots >= least:
        return slots
    raise LaunchError(
        f"--nproc {least}:{most}: this host has slots for {slots} rank{'s' if slots != 1 else ''}, one on each GPU or, "
        "without GPUs, on each core; ask for fewer, or let ranks share a GPU with --share-device"
    )


def slots_here(most: int, *, share_device: bool = False) -> int:
    """Return the number of slots, at most `most`.

    Args:
        most: the number of ranks that would be started.
        share_device: whether ranks may share a GPU, so that there is a slot for each.
    """
    if share_device:
        return most
    gpus = count_here(device_variables())
    return min(most, gpus if gpus is not None else granted_cores())
