"""Every collective on tensors of a device that two ranks share gives what Gloo gives for tensors of the CPU."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import fakegpu
from fakegpu import needs_fakegpu
from harness import run_ranks
from tutti.comm.rendezvous import open_group
from tutti.comm.world import join_world, leave_world
from tutti.errors import LaunchError

pytestmark = needs_fakegpu

_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _values(device: torch.device, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values that differ between ranks; on the device they are not contiguous, as gradients of convolutions are not."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(*shape).to(dtype)
    values = (numbers * (3 * dist.get_rank() + 1)).to(dtype).to(device)
    return values.t().contiguous().t() if len(shape) == 2 else values


def _empty(device: torch.device, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def _in_place(operation: Callable[..., Any], **options: Any) -> Callable[[torch.device], list[Tensor]]:
    def run(device: torch.device) -> list[Tensor]:
        tensor = _values(device, 3, 2)
        operation(tensor, **options)
        return [tensor]

    return run


def _reduce(device: torch.device) -> list[Tensor]:
    tensor = _values(device, 4)
    dist.reduce(tensor, dst=1)
    return [tensor] if dist.get_rank() == 1 else []


def _all_gather_list(device: torch.device) -> list[Tensor]:
    outputs = [_empty(device, 3, 2) for _ in range(2)]
    dist.all_gather(outputs, _values(device, 3, 2).contiguous())
    return outputs


def _all_gather_single(device: torch.device) -> list[Tensor]:
    output = _empty(device, 6, 2)
    work = _gather(output, _values(device, 3, 2).contiguous(), async_op=True)
    work.wait()
    work.wait()
    return [output]


def _reduce_scatter_list(device: torch.device) -> list[Tensor]:
    output = _empty(device, 3)
    dist.reduce_scatter(output, [_values(device, 3), _values(device, 3) + 1])
    return [output]


def _reduce_scatter_single(device: torch.device) -> list[Tensor]:
    output = _empty(device, 3)
    _scatter(output, _values(device, 6), op=dist.ReduceOp.AVG)
    return [output]


def _all_to_all_uneven(device: torch.device) -> list[Tensor]:
    rank = dist.get_rank()
    sends, receives = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    output = _empty(device, sum(receives), 2)
    dist.all_to_all_single(output, _values(device, sum(sends), 2).contiguous(), receives, sends)
    return [output]


def _all_to_all_list(device: torch.device) -> list[Tensor]:
    outputs = [_empty(device, 2, 2), _empty(device, 2, 2)]
    inputs = [_values(device, 2, 2), _values(device, 2, 2) + 1]
    if device.type == "cpu":  # Gloo has no all-to-all of lists
        joined = torch.empty(4, 2, dtype=torch.float64)
        dist.all_to_all_single(joined, torch.cat(inputs))
        return [*joined.split(2)]
    dist.all_to_all(outputs, inputs)
    return outputs


def _gather_and_scatter(device: torch.device) -> list[Tensor]:
    first = dist.get_rank() == 0
    gathered = [_empty(device, 3), _empty(device, 3)] if first else None
    dist.gather(_values(device, 3), gathered, dst=0)
    scattered = _empty(device, 3)
    dist.scatter(scattered, [_values(device, 3), _values(device, 3) + 1] if first else None, src=0)
    return [*(gathered or []), scattered]


def _messages(device: torch.device) -> list[Tensor]:
    other = 1 - dist.get_rank()
    received, later = _empty(device, 3), _empty(device, 2, 2)
    operations = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, _values(device, 3), other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    receiving = dist.irecv(later, other, tag=4)
    sending = dist.isend(_values(device, 2, 2).contiguous(), other, tag=4)
    assert receiving is not None
    assert sending is not None
    receiving.wait()
    sending.wait()
    return [received, later]


def _subgroup(device: torch.device) -> list[Tensor]:
    tensor = _values(device, 2)
    group = open_group([0, 1])
    dist.all_reduce(tensor, group=group)
    dist.barrier(group)
    dist.broadcast_object_list([0], src=0, group=group)
    return [tensor]


def _functional(device: torch.device) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    mine = _values(device, 4)
    return [
        functional.wait_tensor(functional.all_reduce(mine, "sum", group)),
        functional.wait_tensor(functional.all_gather_tensor(mine, 0, group)),
        functional.wait_tensor(functional.reduce_scatter_tensor(mine, "sum", 0, group)),
        functional.wait_tensor(functional.all_to_all_single(mine, [2, 2], [2, 2], group)),
        *map(functional.wait_tensor, functional.all_reduce_coalesced([mine, mine + 1], "sum", group)),
        *map(functional.wait_tensor, functional.all_gather_into_tensor_coalesced([mine, mine + 1], group)),
    ]


def _coalesced(device: torch.device) -> list[Tensor]:
    one, other, gathered = _values(device, 3), _values(device, 2), _empty(device, 4)
    with dist._coalescing_manager(device=device):
        dist.all_reduce(one)
        dist.all_reduce(other)
    _gather(gathered, _values(device, 2))
    return [one, other, gathered]


def _kinds(device: torch.device) -> list[Tensor]:
    """Other types than float64: what Gloo reduces, and what it can only move."""
    results = []
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        tensor = _values(device, 3, dtype=dtype)
        dist.all_reduce(tensor)
        results.append(tensor.double())
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.int16, torch.complex64):
        tensor = _values(torch.device("cpu"), 3, 2).to(dtype).to(device)
        if device.type != "cpu":
            dist.broadcast(tensor, src=1)
        else:
            tensor = ((torch.arange(6, dtype=torch.float64) + 1) * 4).view(3, 2).to(dtype)
        results.append(torch.view_as_real(tensor) if dtype.is_complex else tensor)
    return [tensor.cpu().double() for tensor in results]


def _future(device: torch.device) -> list[Tensor]:
    tensor = _values(device, 3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (result,) = work.get_future().wait()
    return [result]


CASES: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "all-reduce": _in_place(dist.all_reduce),
    "maximum": _in_place(dist.all_reduce, op=dist.ReduceOp.MAX),
    "broadcast": _in_place(dist.broadcast, src=1),
    "reduce": _reduce,
    "all-gather": _all_gather_list,
    "all-gather into one": _all_gather_single,
    "reduce-scatter": _reduce_scatter_list,
    "reduce-scatter of one": _reduce_scatter_single,
    "all-to-all": _all_to_all_uneven,
    "all-to-all of lists": _all_to_all_list,
    "gather, scatter": _gather_and_scatter,
    "messages": _messages,
    "subgroup": _subgroup,
    "functional": _functional,
    "coalesced": _coalesced,
    "types": _kinds,
    "future": _future,
}


def _late() -> str:
    """Rank 1 does not take part: what rank 0 says after the time-out."""
    group = open_group([0, 1], timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return ""
    try:
        dist.all_reduce(torch.ones(2, device=fakegpu.load()), group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _everything() -> dict[str, object]:
    device = fakegpu.load()
    try:
        join_world()
        refused = ""
    except LaunchError as error:
        refused = str(error)
    os.environ |= {"TUTTI_SHARE_DEVICE": "1", "TUTTI_TIMEOUT_S": "10"}
    os.environ["TUTTI_RENDEZVOUS"] += "again"
    world = join_world()
    seen: dict[str, object] = {"refused": refused, "backend": world.backend, "device": str(world.device)}
    for name, case in CASES.items():
        expected, found = case(torch.device("cpu")), case(device)
        seen[name] = [torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True)]
    seen["late"] = _late()
    leave_world()
    return seen


@pytest.mark.long
def test_every_collective_gives_what_gloo_gives() -> None:
    both = run_ranks(_everything, 2)
    for seen in both:
        assert "two ranks would compute on one device (ranks" in seen["refused"]
        assert "--share-device" in seen["refused"]
        assert (seen["backend"], seen["device"]) == ("staged", "fakegpu:0")
        wrong = {name: seen[name] for name in CASES if not all(seen[name])}
        assert not wrong
    assert both[0]["refused"] == both[1]["refused"]
    assert "imed out" in both[0]["late"], both[0]["late"]
