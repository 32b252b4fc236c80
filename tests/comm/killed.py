"""What ranks are told when one of them has been killed."""

import os
import signal
from collections.abc import Callable

DIES = [0, 3]
"""Of four ranks on two hosts: the first of one, the last of the other."""


def told(dies: int, begin: Callable[[], Callable[[], None]]) -> str:
    """To be called on every rank: `begin` gives an exchange to be made again and again, which rank `dies` does once.
    The killed one is a child of the rank, which stays."""
    if int(os.environ["RANK"]) == dies:
        child = os.fork()
        if child:
            return f"ended {os.waitpid(child, 0)[1]}"
    exchange = begin()
    try:
        for number in range(100):
            if number == 1 and int(os.environ["RANK"]) == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            exchange()
    except RuntimeError as error:
        return f"told: {error}"
    return "never"


def check(said: list[str], dies: int) -> None:
    """That all but the killed rank were told."""
    assert said[dies] == "ended 9"
    assert all(words.startswith("told: ") for rank, words in enumerate(said) if rank != dies), said
