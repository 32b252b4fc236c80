"""Exchange small Python values between ranks, without pickle: `value_codec` says which."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tutti.comm.value_codec import MAX_NBYTES, decode, encode
from tutti.errors import SpecError

T = TypeVar("T")

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_values(value: T, group: Any = None) -> list[T]:
    """Return the value of every rank of a group, in order of rank, on every rank. Collective.

    Args:
        value: this rank's value.
        group: the process group; None: all ranks.

    Raises:
        SpecError: on all ranks, if a rank's value cannot be sent, or what a rank has sent cannot be read.
    """
    size, device = dist.get_world_size(group), _device(group)
    message, failure = _encoded(value)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    own_length = torch.tensor([len(message) if failure is None else -len(message)], device=device)
    _all_gather(lengths, own_length, group=group)
    sent = [_checked(length) for length in lengths.tolist()]
    longest = max(map(abs, sent))
    buffer = torch.empty(size * longest, dtype=torch.uint8, device=device)
    _all_gather(buffer, _padded(message, longest, device), group=group)
    data = memoryview(buffer.cpu().numpy())  # type: ignore[arg-type]
    parts = [data[place * longest :][: abs(length)] for place, length in enumerate(sent)]
    return [_read(part, length) for part, length in zip(parts, sent, strict=True)]


def broadcast_value(value: T, source: int = 0) -> T:
    """Return one rank's value on every rank. Collective.

    Args:
        value: the value; other ranks may pass anything.
        source: the rank whose value is returned.

    Raises:
        SpecError: on all ranks, if it cannot be sent.
    """
    rank, device = dist.get_rank(), _device(None)
    message, failure = _encoded(value) if rank == source else (b"", None)
    length = torch.tensor([len(message) if failure is None else -len(message)], device=device)
    dist.broadcast(length, src=source)
    sent = _checked(int(length.item()))
    buffer = _padded(message, abs(sent), device)
    dist.broadcast(buffer, src=source)
    return _read(memoryview(buffer.cpu().numpy()), sent)  # type: ignore[no-any-return, arg-type]


def _device(group: Any) -> torch.device:
    """Return the device of tensors that a group exchanges."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def _encoded(value: Any) -> tuple[bytes, str | None]:
    """Return the message of a value, or of the reason why it cannot be sent: all ranks then raise it together."""
    try:
        return encode(value), None
    except SpecError as error:
        reason = str(error)
    except Exception as error:  # all ranks must reach the exchange
        reason = f"a value cannot be sent to other ranks ({type(error).__name__}: {error}); send plain values"
    return encode(reason), reason


def _checked(length: int) -> int:
    if not 0 < abs(length) <= MAX_NBYTES:
        raise SpecError(
            f"another rank announces a message of {length} bytes, of which at most {MAX_NBYTES} are allowed; run the "
            "same version of tutti on all hosts"
        )
    return length


def _padded(message: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    buffer = np.zeros(nbytes, dtype=np.uint8)
    buffer[: len(message)] = np.frombuffer(message, dtype=np.uint8)
    return torch.from_numpy(buffer).to(device)


def _read(part: memoryview, length: int) -> Any:
    value = decode(part)
    if length < 0:
        raise SpecError(value)
    return value
