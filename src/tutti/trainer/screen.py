"""What a person sees of a run that no supervisor watches: one line of progress, and messages said once."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.comm.world import World


class Screen:
    """Messages and a progress bar on standard error, on rank 0 only; the bar only when a person watches."""

    def __init__(self, world: World, *, supervised: bool) -> None:
        self.speaks = world.is_main
        self._console = Console(stderr=True)
        self._watched = self.speaks and not supervised and self._console.is_terminal
        self._bar: Progress | None = None
        self._said: set[str] = set()

    def say(self, message: str) -> None:
        """Print a message once; nothing for an empty one."""
        if message and self.speaks and message not in self._said:
            self._said.add(message)
            self._console.print(f"tutti: {message}", markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, total: int | None, loss: float, throughput: float, unit: str) -> None:
        """Show a step."""
        if not self._watched:
            return
        if self._bar is None:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=total)
            self._bar.start()
        text = f"loss {loss:.4f}  {throughput:,.0f} {unit}/s"
        self._bar.update(self._bar.task_ids[0], completed=step, total=total, description=text)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


class Throughput:
    """Recent samples or tokens a second, smoothed over about ten steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._rate = 0.0

    def update(self, amount: float) -> float:
        """Add one step's amount and return the rate."""
        now = self._clock()
        rate = amount / max(now - self._last, 1e-9)
        self._rate = rate if self._rate == 0.0 else 0.9 * self._rate + 0.1 * rate
        self._last = now
        return self._rate


def silence_others(world: World, path: str) -> None:
    """Send what ranks other than 0 print to a file, so that a line appears once and not once a rank."""
    if not world.is_main:
        sys.stdout.flush()
        sys.stdout = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
