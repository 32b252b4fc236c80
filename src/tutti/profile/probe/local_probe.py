"""A probe of this host by processes of its own: they are started, listened to, and always ended."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tutti.config.cluster import ClusterSpec
from tutti.errors import LaunchError, TuttiError
from tutti.machine import use_short_socket_folder
from tutti.profile.probe.host_facts import cores_granted
from tutti.profile.probe.probe_timing import Effort

PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "numpy"]
MOST_RANKS_BY_DEFAULT = 4


def measure_here(
    effort: Effort, ranks: int | None, *, folder: Path, say: Callable[[str], None], timeout_s: float
) -> ClusterSpec:
    """Measure this host with several processes.

    The processes are forked from a server that imported torch once, before any device is touched.

    Args:
        effort: how much to measure.
        ranks: number of processes; None for one per GPU, or else one per core, from 2 to 4.
        folder: on the disk whose read speed is measured.
        say: receives what is being measured.
        timeout_s: longest time for the whole probe.

    Raises:
        LaunchError: a process fails, or `timeout_s` passes.
    """
    use_short_socket_folder()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    deadline = time.monotonic() + timeout_s
    gpus = _answer(context, deadline)
    if gpus and ranks is not None and ranks > gpus:
        raise LaunchError(f"{ranks} ranks do not fit the {gpus} GPUs of this host; ask for at most {gpus}")
    count = ranks or gpus or max(2, min(cores_granted(), MOST_RANKS_BY_DEFAULT))
    with tempfile.TemporaryDirectory(prefix="tutti-probe-") as rendezvous_folder:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        processes = [
            context.Process(
                target=_rank, args=(rank, count, rendezvous_folder, effort, folder, pipes[rank][1]), daemon=True
            )
            for rank in range(count)
        ]
        try:
            _start(processes, [sender for _, sender in pipes])
            return _listen([receiver for receiver, _ in pipes], say, deadline)
        finally:
            for process in processes:
                _end(process)


def _answer(context: ForkServerContext, deadline: float) -> int:
    """Return the number of GPUs, counted by a process that may touch them."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_count_gpus, args=(sender,), daemon=True)
    try:
        _start([process], [sender])
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            raise LaunchError("counting the GPUs of this host took too long; check them with nvidia-smi")
        return int(receiver.recv())
    except EOFError:
        raise LaunchError("the process that counts GPUs died; check them with nvidia-smi") from None
    finally:
        _end(process)


def _count_gpus(sender: Connection) -> None:
    import torch

    sender.send(torch.accelerator.device_count())  # 0 without any


def _start(processes: list[ForkServerProcess], senders: list[Connection]) -> None:
    try:
        for process in processes:
            process.start()
    except (OSError, EOFError) as error:
        raise LaunchError(
            f"ranks for the probe could not be started ({error or 'the fork server died'}); free memory or processes, "
            "or ask for fewer with --nproc"
        ) from error
    finally:
        for sender in senders:  # so that the pipe of a dead rank ends
            sender.close()


def _end(process: ForkServerProcess) -> None:
    if process.pid is None:
        return
    process.terminate()
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()


def _listen(receivers: list[Connection], say: Callable[[str], None], deadline: float) -> ClusterSpec:
    """Pass on rank 0's messages until it returns the spec; the first failure of any rank ends the probe."""
    open_pipes = {receiver: rank for rank, receiver in enumerate(receivers)}
    while True:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise LaunchError("the probe did not end in time; try `tutti probe --quick`, or fewer ranks with --nproc")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                kind, value = receiver.recv()
            except EOFError:
                rank = open_pipes.pop(receiver)
                if rank == 0:
                    raise LaunchError(
                        "rank 0 of the probe died without an error; check that the host has enough memory"
                    ) from None
                continue
            if kind == "say":
                say(value)
            elif kind == "error":
                raise value
            else:
                assert isinstance(value, ClusterSpec)
                return value


def _rank(rank: int, ranks: int, rendezvous_folder: str, effort: Effort, folder: Path, sender: Connection) -> None:
    def send(kind: str, value: Any) -> None:
        if rank == 0 or kind == "error":
            sender.send((kind, value))

    try:
        send("spec", _measured(rank, ranks, rendezvous_folder, effort, folder, lambda text: send("say", text)))
    except TuttiError as error:
        send("error", error)
    except Exception:
        send("error", LaunchError(f"rank {rank} of the probe failed:\n{traceback.format_exc()}"))


def _measured(
    rank: int, ranks: int, rendezvous_folder: str, effort: Effort, folder: Path, say: Callable[[str], None]
) -> ClusterSpec:
    import torch.distributed as dist

    from tutti.comm.devices import backend_of, choose_device
    from tutti.comm.staged_gloo import STAGED, register_staged_backend
    from tutti.profile.probe.host_facts import pin_loopback
    from tutti.profile.probe.rank_probe import measure_ranks

    pin_loopback()
    device = choose_device(rank)
    backend = backend_of(device, shared=False)
    if backend == STAGED:
        register_staged_backend(device.type)
    dist.init_process_group(backend, init_method=f"file://{rendezvous_folder}/store", rank=rank, world_size=ranks)
    try:
        return measure_ranks(device, effort, folder=folder, say=say)
    finally:
        dist.destroy_process_group()
