"""Copies between the memory of a device and of its host, each direction on a stream of its own.

Where the device is a CPU, or has no streams, a copy is complete when it returns.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source)."""


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A copy that may still be running.

    Attributes:
        device: the device that it goes to or comes from.
        event: is recorded once the copy is complete; None where it is complete.
    """

    device: torch.device
    event: torch.Event | None = None

    def wait(self) -> None:
        """Let the device's current stream wait for the copy; the host goes on."""
        if self.event is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.event)

    def synchronize(self) -> None:
        """Let the host wait for the copy."""
        if self.event is not None:
            self.event.synchronize()


class CopyStreams:
    """The copies of one device.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inwards, self._outwards = _new_stream(device), _new_stream(device)

    def to_device(self, pairs: Iterable[CopyPair]) -> PendingCopy:
        """Copy from the host, after what the device's current stream has been given to do so far.

        The current stream must wait for the copy before the memory on the device is freed.
        """
        return self._copy(self._inwards, pairs)

    def to_host(self, pairs: Iterable[CopyPair]) -> PendingCopy:
        """Copy to the host, after what the device's current stream has been given to do so far.

        The caller holds the memory on the device until the copy is complete.
        """
        return self._copy(self._outwards, pairs)

    @contextmanager
    def inwards(self) -> Iterator[None]:
        """Within the context, the device's current stream is that of copies from the host."""
        with self._on(self._inwards):
            yield

    def _copy(self, stream: torch.Stream | None, pairs: Iterable[CopyPair]) -> PendingCopy:
        with self._on(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=stream is not None)
            return PendingCopy(self.device, None if stream is None else stream.record_event())

    @contextmanager
    def _on(self, stream: torch.Stream | None) -> Iterator[None]:
        """Within the context, `stream` is the current one, after what the stream before has been given to do."""
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream(self.device)
        stream.wait_stream(before)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def _new_stream(device: torch.device) -> torch.Stream | None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return None
    try:
        return torch.Stream(device=device)
    except (NotImplementedError, RuntimeError):  # a device without streams
        return None
