"""Runs a function on several ranks: real processes and real Gloo groups, forked from a preloaded server.

Each rank gets one thread, so that 4 ranks on 2 cores stay quick; every wait has a time-out.
"""

import atexit
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

HANG_S = 300  # a rank that says nothing for so long hangs, however slow the machine is

_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_wanted = [
    "tutti.launch.preload",
    "tutti.verification.recorder",
    "tutti.compression.cpu_kernels",
    "pytest",
    "against_one",
    "trainer.training",
]


def preload(*modules: str) -> None:
    """Load these modules too where ranks are forked from, once instead of in every rank. For the top of a file of
    tests: what all files want is loaded when the first ranks are started.
    """
    _wanted.extend(modules)
    _context.set_forkserver_preload([*_wanted, "forked"])


preload()


class RankFailed(AssertionError):
    """A rank raised or died; carries its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S) -> list[Any]:
    """Call `function(*args)` on ranks 0..world_size-1 and return what each returned, in order of rank.

    The environment of a launched rank (RANK, WORLD_SIZE, ...) is set and nothing else is: the function makes its
    Job, or joins the world with `tutti.comm.world.join_world`. It must be importable (defined at module level).
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(target=_rank, args=(rank, world_size, folder, pipes[rank][1], function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.terminate()
                process.join(5)
                if process.is_alive():  # a rank that trains takes the first signal for a wish to stop at the next step
                    process.kill()


def _start_server() -> None:
    """Start the server that ranks are forked from, if it is not running; it finds the tests' own modules."""
    with _starting:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        ready = wait(list(waiting), timeout_s)
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish in {timeout_s} s")
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[index, arg-type]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailed(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(results))]


def _rank(
    rank: int, world_size: int, folder: str, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # as a launched rank: data loaders fork, not a server each
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        TUTTI_RENDEZVOUS=f"file://{folder}/store",
        TUTTI_RUN_FOLDER=f"{folder}/run",
        GLOO_SOCKET_IFNAME="lo",
    )
    os.chdir(folder)
    try:
        result = function(*args)
        metrics = sys.modules.get("tutti.trainer.metrics")
        if metrics is not None:  # the test may read them, and ends this process
            metrics.write_rows()
        sender.send_bytes(pickle.dumps((True, result)))  # plain pickle: tensors travel by value
        atexit._run_exitfuncs()  # multiprocessing leaves them out, and a Job ends in one
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
