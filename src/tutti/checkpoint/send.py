"""Tensors of a checkpoint sent between ranks whose hosts share no disk."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tutti.checkpoint.collect import Piece
from tutti.checkpoint.tensors import Item, dtype_of, in_file_order, plain_item, write_tensors
from tutti.comm.world import World
from tutti.parallel.layout import Held


def send_items(world: World, items: list[Item]) -> None:
    """Send this rank's tensors to rank 0, one by one, in the order of their file."""
    for one in in_file_order(items):
        if one.nbytes:
            data = one.make().detach().contiguous().reshape(-1).view(torch.uint8)
            dist.send(data.to(world.device), dst=0)


def receive_file(world: World, sender: int, pieces: list[Piece], path: Path) -> int:
    """On rank 0: write the file of a rank that sends it, each tensor as it comes; returns its size in bytes.

    What is sent is received to the end even if the disk is full; then raises OSError.
    """
    items = [_expected(piece) for piece in pieces]
    incoming = _incoming(world, sender, items)
    fed = [Item(key=one.key, shape=one.shape, dtype=one.dtype, make=lambda: next(incoming)) for one in items]
    try:
        return write_tensors(path, fed)
    finally:
        for _ in incoming:
            pass


def _expected(piece: Piece) -> Item:
    shape = Held(shape=piece.shape, cuts=piece.cuts).local_shape
    return plain_item(piece.stored_as, shape, dtype_of(piece.dtype), lambda: torch.empty(0))


def _incoming(world: World, sender: int, items: list[Item]) -> Iterator[torch.Tensor]:
    for one in in_file_order(items):
        data = torch.empty(one.nbytes, dtype=torch.uint8, device=world.device)
        if one.nbytes:
            dist.recv(data, src=sender)
        yield data.cpu().view(one.dtype).reshape(one.shape)


def broadcast_tensor(
    world: World, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Rank 0's tensor on every rank's CPU."""
    if tensor is None:
        data = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    else:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel():
        sent = data.to(world.device)
        dist.broadcast(sent, src=0)
        data = sent.cpu()
    return data.view(dtype).reshape(shape)
