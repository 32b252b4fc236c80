"""Where the probe touches the environment: the user's cache folder, and the interface of ranks on one host."""

import os
import socket
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME, else ~/.cache."""
    stated = os.environ.get("XDG_CACHE_HOME")
    return Path(stated) if stated else Path.home() / ".cache"


def pin_loopback() -> None:
    """Let ranks of one host meet over the loopback interface, whatever the network looks like."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
