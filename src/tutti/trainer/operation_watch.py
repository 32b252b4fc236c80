"""The watch over what ranks do together: it names ranks that wait for each other in different operations.

Entering an operation only notes its name. A thread compares notes through the rendezvous' store once a rank has waited
for some seconds, so steps pay nothing.
"""

import itertools
import json
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from tutti.comm.world import World, thread_store
from tutti.errors import RankMismatchError, ScriptError
from tutti.event_record import ACTIVE

T = TypeVar("T")

PERIOD_S = 1.0
"""Seconds between two looks of the thread."""

PATIENCE_S = 5.0
"""Seconds in one operation after which a rank asks what the others do."""

NOTES = 32
"""Number of latest operations that a rank can tell."""

ANSWER_S = 3.0
"""Seconds that a rank whose exchange has failed waits for the others' notes; none if one of its host has ended."""

_numbers = itertools.count()
"""Every Job of a process compares its own notes only; ranks make their Jobs in the same order."""


class OperationWatch:
    """Notes the operations of this rank that all ranks must enter in the same order.

    Args:
        world: all ranks.
        place: says where in the data this rank is, as (epoch, batch).
        waits: whether ranks wait for each other in steps; if not, nothing is compared.
    """

    def __init__(self, world: World, place: Callable[[], tuple[int, int]], *, waits: bool = True) -> None:
        self._world, self._place = world, place
        self._notes: deque[tuple[int, str, int, int]] = deque(maxlen=NOTES)
        self._count = self._depth = self._recorded = 0
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._compares = waits and world.world_size > 1
        self._answered = b""
        self._thread: threading.Thread | None = None
        self._asked = self._published = 0
        self._key = f"tutti/watch/{next(_numbers)}"

    @property
    def inside(self) -> bool:
        """Whether this rank is in an operation."""
        return self._depth > 0

    def start(self) -> None:
        """Start the thread that compares notes, and tell the other ranks which process this rank is."""
        if self._compares:
            thread_store().set(f"{self._key}/process/{self._world.rank}", json.dumps([_process_space(), os.getpid()]))
            self._thread = threading.Thread(target=self._look, name="tutti-operation-watch", daemon=True)
            self._thread.start()

    def stop(self, *, wait_s: float = 0.0) -> None:
        """Compare nothing any more, and wait so long for the thread to end."""
        self._ended.set()
        if self._thread is not None and wait_s:
            self._thread.join(wait_s)

    def enter(self, name: str) -> None:
        """Note that this rank enters an operation; one within another is not noted."""
        self._depth += 1
        if self._depth == 1:
            self._count += 1
            self._since = time.monotonic()
            place = self._place()
            self._notes.append((self._count, name, *place))
            if ACTIVE.recorder is not None:
                self._recorded = ACTIVE.recorder.begin("operation", name, place)

    def leave(self, error: BaseException | None = None) -> None:
        """Note that this rank has left the operation that it entered last, if so because of an error.

        Raises:
            RankMismatchError: an exchange failed, because another rank is in another operation or in none.
            ScriptError: it failed because the script has destroyed the process group.
        """
        try:
            if isinstance(error, ValueError) and self._world.world_size > 1 and not dist.is_initialized():
                raise ScriptError(
                    f"the process group was destroyed before {self._notes[-1][1]}, which needs it; leave out "
                    "torch.distributed.destroy_process_group(): tutti calls it when the script ends"
                ) from None
            reason = self.explain(error) if isinstance(error, RuntimeError) else None
            if reason is not None:
                raise RankMismatchError(reason) from None
        finally:
            self._depth -= 1
            if not self._depth and ACTIVE.recorder is not None and self._recorded:
                name = self._notes[-1][1]
                ACTIVE.recorder.end(self._recorded, failed=error is not None)
                if error is None:
                    ACTIVE.recorder.step_ended(name, time.monotonic() - self._since)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Note an operation while the context lasts.

        Raises:
            RankMismatchError: an exchange failed, because another rank is in another operation or in none.
        """
        self.enter(name)
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise
        self.leave()

    def gather(self, purpose: str, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order, as `World.gather` does. Collective.

        Raises:
            RuntimeError: another rank gathers something else, because it is in another operation; see `during`.
        """
        everyone: list[Any] = self._world.gather((purpose, value))
        if any(type(each) is not tuple or each[:1] != (purpose,) for each in everyone):
            raise RuntimeError(f"{purpose}: another rank is in another operation")
        return [each[1] for each in everyone]

    def explain(self, error: BaseException) -> str | None:
        """Return why an exchange failed, if the ranks' operations differ."""
        if not self._compares or self._ended.is_set():
            return None
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        with suppress(RuntimeError):  # the store may be gone
            store, began = thread_store(), time.monotonic()
            all_answer = all(store.check([f"{self._key}/process/{rank}"]) for rank in range(self._world.world_size))
            until = began + (ANSWER_S if all_answer else 1.5 * PERIOD_S)  # a rank may not have come so far
            before = self._publications(store)
            while time.monotonic() < until:
                ended = self._has_ended(store)  # such a rank has told what it did before, or never will
                self._ask(store)
                if not ended:
                    time.sleep(PERIOD_S / 4)
                answered = all(count > before[rank] for rank, count in self._publications(store).items())
                reason = self._mismatch(store)
                if reason is not None:
                    return reason
                if ended or answered:
                    break
            if timed_out:
                return self._absent(store)
        return None

    def _look(self) -> None:
        """Answer other ranks, and compare notes with them while this rank waits. Runs in the thread."""
        store = thread_store()
        while not self._ended.wait(PERIOD_S):
            reason = None
            try:
                waited = self.inside and time.monotonic() - self._since > PATIENCE_S
                if waited:
                    self._ask(store)
                    reason = self._mismatch(store)
                else:
                    self._answer(store)
            except RuntimeError:  # the run has ended elsewhere
                return
            if reason is not None and not self._ended.is_set():
                raise RankMismatchError(reason)

    def _ask(self, store: Any) -> None:
        self._asked += 1
        self._publish(store)
        store.set(f"{self._key}/ask", f"{self._world.rank} {self._asked}")

    def _answer(self, store: Any) -> None:
        if store.check([f"{self._key}/ask"]):
            question = store.get(f"{self._key}/ask")
            if question != self._answered:
                self._answered = question
                self._publish(store)

    def _publish(self, store: Any) -> None:
        idle_s = 0.0 if self.inside else time.monotonic() - self._since
        self._published += 1
        note = {"inside": self.inside, "idle_s": idle_s, "notes": list(self._notes), "published": self._published}
        store.set(f"{self._key}/{self._world.rank}", json.dumps(note))

    def _has_ended(self, store: Any) -> bool:
        """Whether the process of another rank of this host has ended."""
        first = self._world.rank - self._world.local_rank
        for rank in range(first, first + self._world.local_world_size):
            key = f"{self._key}/process/{rank}"
            if rank != self._world.rank and store.check([key]):
                space, process = json.loads(store.get(key))
                if space == _process_space() and _ended(process):
                    return True
        return False

    def _others(self, store: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        """The notes that were published by rank 0, or to rank 0 by all others."""
        for rank in self._compared():
            if store.check([f"{self._key}/{rank}"]):
                yield rank, json.loads(store.get(f"{self._key}/{rank}"))

    def _compared(self) -> Iterable[int]:
        """The ranks whose notes this rank compares with its own."""
        return range(1, self._world.world_size) if self._world.is_main else (0,)

    def _publications(self, store: Any) -> dict[int, int]:
        """How often each of the ranks that are compared has published its notes."""
        return dict.fromkeys(self._compared(), 0) | {rank: note["published"] for rank, note in self._others(store)}

    def _mismatch(self, store: Any) -> str | None:
        own = {note[0]: tuple(note[1:]) for note in list(self._notes)}
        for rank, theirs in self._others(store):
            for number, *note in theirs["notes"]:
                if number in own and own[number] != tuple(note):
                    pair = sorted([(self._world.rank, own[number]), (rank, tuple(note))])
                    (one, first), (two, second) = pair
                    return (
                        f"rank {one} is in {_words(first)} while rank {two} is in {_words(second)}; every rank must "
                        "call the Job's methods and a divided model in the same order, so leave epochs together and "
                        "put nothing of it under `if job.is_main`"
                    )
        return None

    def _absent(self, store: Any) -> str | None:
        """Name a rank that did not come to the operation in which this rank's wait has timed out."""
        for rank, theirs in self._others(store):
            if not theirs["inside"] and theirs["notes"] and theirs["notes"][-1][0] < self._count:
                last = tuple(theirs["notes"][-1][1:])
                return (
                    f"rank {self._world.rank} waited in {_words(tuple(self._notes[-1][1:]))} for rank {rank}, which "
                    f"did not come after {_words(last)}; call it on every rank, or raise --timeout if that rank is slow"
                )
        return None


def count_anew() -> None:
    """Number the next Job's notes as those of a fresh process' first Job."""
    global _numbers
    _numbers = itertools.count()


def _words(note: tuple[Any, ...]) -> str:
    name, epoch, batch = note
    return f"{name} (epoch {epoch}, batch {batch})"


def _process_space() -> list[str]:
    """What tells where a process number is valid: the host's boot and the namespace."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/pid")]
    except OSError:  # not Linux
        return [f"unknown {os.getpid()}"]


def _ended(process: int) -> bool:
    """Whether a process has ended, also while its parent has not taken notice of it."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except OSError:  # not permitted
        return False
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def note_calls_of_model(model: nn.Module, watch: OperationWatch) -> None:
    """Note calls of a model whose forward communicates, where the script makes them outside of the Job's methods."""
    noted: list[bool] = []

    def before(module: nn.Module, args: Any) -> None:
        noted.append(not watch.inside)
        if noted[-1]:
            watch.enter("a call of the model")

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if noted and noted.pop():
            failure = sys.exc_info()[1]
            if isinstance(failure, RuntimeError) and watch.explain(failure) is not None:
                time.sleep(PERIOD_S)  # the ranks in the Job's methods raise the reason, which a hook cannot
            watch.leave()

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after, always_call=True)
