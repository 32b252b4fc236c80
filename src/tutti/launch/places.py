"""How many ranks have a place on this host, where a run takes as many as there are (`--nproc 2:8`)."""

from tutti.errors import LaunchError
from tutti.launch.launch_environment import device_variables, granted_cores
from tutti.launch.visible_devices import count_here


def checked_places(least: int, most: int, *, share_device: bool = False) -> int:
    """Return how many of `most` ranks have a place on this host, where `least` of them are needed.

    Raises:
        LaunchError: fewer have.
    """
    places = places_here(most, share_device=share_device)
    if places >= least:
        return places
    raise LaunchError(
        f"--nproc {least}:{most}: this host has room for {places} rank{'s' if places != 1 else ''}, one on each GPU "
        "or, without GPUs, on each core; ask for fewer, or let ranks share a GPU with --share-device"
    )


def places_here(most: int, *, share_device: bool = False) -> int:
    """Return how many of `most` ranks have a place on this host: a GPU each, or a core each where there is no GPU.

    Args:
        most: the number of ranks that would be started.
        share_device: whether ranks may share a GPU, so that all have a place.
    """
    if share_device:
        return most
    gpus = count_here(device_variables())
    return min(most, gpus if gpus is not None else granted_cores())
