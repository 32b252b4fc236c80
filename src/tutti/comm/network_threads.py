"""Gloo's network threads, and how they share a core with the threads that they serve.

A network thread that finds its connection locked comes back at once, until it is free (gloo/transport/tcp/pair.cc,
`handleEvents` tries the lock). Woken on the core of the thread that holds the lock, and in its place, it does so until
its time slice ends: sums of 4 kB between two hosts of one core took 0.3 ms or 4, 2.1 in the mean. As a batch thread it
waits until that thread waits, and the mean is 0.3 (docs/measurements.md).
"""

import os
from pathlib import Path

NAME = "gloo_tcp_loop"


def defer_network_threads() -> None:
    """Let network threads of this process not interrupt others (SCHED_BATCH): to be called when groups were made.

    Every group has a thread of its own. Does nothing where the system has no such policy, or another one is set.
    """
    for thread in network_threads() if hasattr(os, "SCHED_BATCH") else ():
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended, or it is forbidden: exchanges are slower then, and right
            continue


def network_threads() -> list[int]:
    """The ids of this process' threads that serve Gloo's connections; none where the system does not list threads."""
    found = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() == NAME:
                found.append(int(task.name))
        except OSError:  # it has ended
            continue
    return found
