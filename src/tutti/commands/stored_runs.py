"""Runs whose folder is in an object store: what `tutti run` stages here, and what other commands read."""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.commands.messages import console, status, warn
from tutti.commands.run_options import RunOptions
from tutti.config.run_folder import RunFolder, is_store_address
from tutti.environment import state_folder
from tutti.errors import LaunchError, ReportError

if TYPE_CHECKING:
    from tutti.checkpoint.stored_run import StoredRun


def staged(options: RunOptions) -> "tuple[RunOptions, StoredRun | None]":
    """Return the options with a local folder in the place of an address, and the run at that address.

    Raises:
        LaunchError: the address has a run already, or another one is resumed.
        StoreError: it is no address, or the store cannot be read.
    """
    folder, resume = options.folder, options.resume
    address = str(folder) if is_store_address(folder) else None
    if address is None and not (folder is None and is_store_address(resume)):
        return options, None
    from tutti.checkpoint.stored_run import StoredRun

    stored = StoredRun(str(address or resume))
    exists = stored.exists()
    if address is None:
        if not exists and not stored.has_checkpoint():
            raise LaunchError(f"{resume} holds no run and no checkpoint; to begin one there, add --folder {resume}")
        return options, stored if exists else None
    if exists and str(resume or "").rstrip("/") != stored.address:
        raise LaunchError(f"{address} already holds a run; give another --folder, or --resume {address}")
    if not exists:
        stored.check()
    store = stored.address if options.checkpoint_store is None else options.checkpoint_store
    options = replace(options, folder=None, checkpoint_store=store)
    if str(resume or "").rstrip("/") == stored.address and not stored.has_checkpoint():
        console.print(f"{address} has no checkpoint yet: the run begins", markup=False, soft_wrap=True)
        options = replace(options, resume=None)
    return options, stored


def mirrored(stored: "StoredRun | None", folder: Path, options: RunOptions) -> AbstractContextManager[None]:
    """Keep a run's files at its address while it runs, after what an earlier start has left there was brought here.

    Args:
        stored: the run at the address; None for a run without one.
        folder: its folder here.
        options: of the run.

    Raises:
        StoreError: the store cannot be read.
    """
    if stored is None:
        return nullcontext()
    if options.resume is not None and options.node_rank == 0 and not RunFolder(folder).header.exists():
        stored.fetch(folder)
    return stored.mirrored(folder, warn, only="" if options.node_rank == 0 else "ranks")


def run_here(place: Path | str) -> Path:
    """Return a run folder of this machine: the given one, or a copy of one in an object store, made now.

    Raises:
        ReportError: there is no run at the address.
        StoreError: the store cannot be read.
    """
    if isinstance(place, Path) or not is_store_address(place):
        return Path(place)
    from tutti.checkpoint.stored_run import StoredRun

    stored = StoredRun(place)
    if not stored.exists():
        raise ReportError(f"there is no run at {place}; name one that `tutti run --folder {place}` made")
    name = hashlib.sha256(stored.address.encode()).hexdigest()[:12]
    folder = state_folder() / "stored-runs" / f"{stored.address.rpartition('/')[2]}-{name}"
    with status(f"reading {stored.address}"):
        stored.fetch(folder)
    return folder
