"""Ranks that stop as a Job does, by hand. Argument: how; each says in ready-RANK that it has begun."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

how, rank = sys.argv[1], os.environ["RANK"]


def save(number=None, frame=None):
    Path(f"saved-{rank}").touch()
    checkpoint = Path(os.environ["TUTTI_RUN_FOLDER"], "checkpoints", "step-00000001")
    if how != "without":
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "index.json").touch()
    sys.exit(75)


if how in ("resumable", "without"):
    signal.signal(signal.SIGTERM, save)
elif how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif how == "session":  # a daemon in a session of its own
    subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(f"ready-{rank}").write_text(str(os.getpid()))
if how == "limit":
    time.sleep(max(0, float(os.environ["TUTTI_STOP_AT_S"]) - time.time()))
    save()
elif how == "143":
    sys.exit(143)
elif how == "lines":
    for number in range(200):
        print("line", number, flush=True)
        time.sleep(0.02)
    Path(f"finished-{rank}").touch()
    sys.exit(0)
elif how == "reset" and rank == "1":
    ours, theirs = socket.socketpair()
    raise ConnectionResetError(104, "Connection reset by peer")
elif how == "gil":  # C code that never gives the interpreter back
    ctypes.PyDLL(None).sleep(600)
time.sleep(600)
