"""Messages between ranks of one host through shared memory: every one arrives once, whole, and in order."""

import os

import pytest
import torch

from harness import RankFailed, run_ranks
from tutti.comm.rendezvous import make_local_group
from tutti.comm.shared_memory import MessageReceiver, MessageSender
from tutti.comm.world import join_world

SIZES = (1, 0, 3, 1000, 70_001)


def _message(source: int, target: int, number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * number + 10 * source + target)
    dtype = (torch.float32, torch.bfloat16, torch.float64, torch.bool)[number % 4]
    return torch.randint(-50, 50, (SIZES[number % len(SIZES)],), generator=draw).to(dtype)


def everyone_to_everyone(ranks: int, count: int) -> bool:
    """All ways at once, receives posted ahead and waited for backwards, half of the messages at a time."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    others = [rank for rank in range(ranks) if rank != world.rank]
    sending = {other: MessageSender(local_group, other) for other in others}
    receiving = {other: MessageReceiver(local_group, other) for other in others}
    right = True
    for part in (range(count // 2), range(count // 2, count)):
        letters = [
            (other, number, receiving[other].receive(torch.empty_like(_message(other, world.rank, number))))
            for other in others
            for number in part
        ]
        for number in part:
            for other in others:
                sending[other].send(_message(world.rank, other, number))
        for other, number, letter in letters[::-1]:
            letter.is_completed()
            letter.wait()
            right = right and torch.equal(letter.tensor, _message(other, world.rank, number))
    for way in sending.values():
        way.synchronize()
    return right


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_arrive_in_order(ranks: int) -> None:
    assert all(run_ranks(everyone_to_everyone, ranks, ranks, 100))


def one_way(count: int) -> bool:
    """Far more messages than there are places for, to a rank that reads slowly: the sender waits, none is lost."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    if world.rank == 0:
        way = MessageSender(local_group, 1)
        for number in range(count):
            way.send(torch.full((number % 7 + 1,), number))
        way.synchronize()
        return True
    receiving, right = MessageReceiver(local_group, 0), True
    for number in range(count):
        letter = receiving.receive(torch.empty(number % 7 + 1, dtype=torch.int64))
        letter.wait()
        right = right and bool((letter.tensor == number).all())
    return right


def test_a_sender_does_not_overtake_its_receiver() -> None:
    assert all(run_ranks(one_way, 2, 1000))


def abandoned(leaves: int) -> str:
    """Three ranks; one leaves. Who waits for another one goes on waiting for that; who waits for it is told."""
    world, local_group = join_world(), make_local_group()
    assert local_group is not None
    if world.rank == leaves:
        MessageSender(local_group, 1).send(torch.ones(5))
        os._exit(0)
    if world.rank == 0:
        receiving = MessageReceiver(local_group, leaves)
        receiving.receive(torch.empty(5)).wait()
    return ""


def test_a_sender_that_has_ended_is_noticed() -> None:
    with pytest.raises(RankFailed, match=r"Connection closed by peer|died without a word"):
        run_ranks(abandoned, 3, 2, timeout_s=30)
