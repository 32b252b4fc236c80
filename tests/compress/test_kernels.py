"""How kernels are loaded: late, kept on disk, and usable in processes that were forked."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import torch

from compress.codecs import gradient
from tutti.compress.onebit import OneBit


def test_importing_tutti_or_a_codec_loads_no_numba() -> None:
    code = (
        "import sys, tutti, tutti.compress.onebit, tutti.compress.two_phase, tutti.compress.sparse; "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def coded() -> torch.Tensor:
    codec, values = OneBit(), gradient("normal", 5000)
    return codec.encode(values, codec.state(5000, dtype=torch.float32))


def _send(sender: Connection) -> None:
    sender.send_bytes(coded().numpy().tobytes())


def test_kernels_work_in_a_process_forked_after_they_were_used() -> None:
    expected = coded()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender,))
    child.start()
    try:
        assert receiver.poll(60)
        assert receiver.recv_bytes() == expected.numpy().tobytes()
    finally:
        child.join(10)
    assert child.exitcode == 0
