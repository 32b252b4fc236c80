"""The members of a process group prove to each other, over its own connections, that they belong to this run."""

import secrets
from typing import Any

import torch
import torch.distributed as dist

from tutti.errors import LaunchError
from tutti.job_secret import mac, same, session_key

_NONCE_NBYTES, _CODE_NBYTES = 16, 32


def prove_members(group: Any = None) -> None:
    """Check that each connection of a group (None: all ranks) leads to the rank that it should. Collective.

    Gloo takes whoever connects first with the number of a connection for the rank that it waits for. So every pair of
    members exchanges a challenge and its answer, which needs the key of the run. Other back ends are left alone.

    Raises:
        LaunchError: a connection leads to a process that does not know the key.
    """
    key = session_key()
    if not key or dist.get_backend(group) not in ("gloo", "staged") or dist.get_world_size(group) < 2:
        return
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    name = dist.distributed_c10d._get_process_group_name(resolved_group(group))
    own = secrets.token_bytes(_NONCE_NBYTES * size)
    theirs = _exchange(own, size, group)
    answers = [
        mac(key, "member", name, rank, other, theirs[other * _NONCE_NBYTES :][:_NONCE_NBYTES]) for other in range(size)
    ]
    received = _exchange(b"".join(answers), size, group)
    for other in range(size):
        challenge = own[other * _NONCE_NBYTES :][:_NONCE_NBYTES]
        code = received[other * _CODE_NBYTES :][:_CODE_NBYTES]
        if not same(code, mac(key, "member", name, other, rank, challenge)):
            here, there = (
                dist.get_global_rank(resolved_group(group), rank),
                dist.get_global_rank(resolved_group(group), other),
            )
            raise LaunchError(
                f"rank {here} is connected with a process that is not rank {there}: a stranger connects to the ranks' "
                "ports; let only the job's hosts reach them, then run again"
            )


def resolved_group(group: Any) -> Any:
    """Return a process group, that of all ranks for None."""
    return dist.distributed_c10d._get_default_group() if group is None else group


def _exchange(data: bytes, size: int, group: Any) -> bytes:
    """Send the i-th part of the data to the i-th member, and return what the members have sent, in order."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.numpy().tobytes()
