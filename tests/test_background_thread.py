"""Work in the background goes to threads that never end, and forks wait for short tasks."""

import os
import threading
import time

import pytest

from tutti.background_thread import BackgroundThread


def test_tasks_run_in_the_order_in_which_they_are_due_in_one_thread() -> None:
    thread, ran = BackgroundThread("test-order"), list[tuple[int, int]]()
    tasks = [
        thread.submit(lambda number=number: ran.append((number, threading.get_ident())), delay_s)  # type: ignore[misc]
        for number, delay_s in enumerate((0.2, 0.1, 0.0))
    ]
    for task in tasks:
        task.join()
    assert [number for number, _ in ran] == [2, 1, 0]
    assert len({ident for _, ident in ran}) == 1


def test_what_a_task_raises_is_said_and_the_thread_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    thread = BackgroundThread("test-error")
    bad = thread.submit(lambda: print(1 / 0))
    thread.submit(lambda: None).join()
    assert isinstance(bad.error, ZeroDivisionError)
    assert "a task of the thread test-error failed" in capfd.readouterr().err


def test_a_fork_waits_for_a_short_task_and_its_child_has_its_own_thread() -> None:
    thread, steps = BackgroundThread("test-fork", short=True), list[str]()
    begun = threading.Event()

    def task() -> None:
        begun.set()
        time.sleep(0.3)
        steps.append("task")

    thread.submit(task)
    begun.wait()
    child = os.fork()
    if child == 0:
        ran = list[int]()
        thread.submit(lambda: ran.append(1)).join()
        os._exit(0 if steps == ["task"] and ran == [1] else 1)
    assert steps == ["task"], "the fork came in the middle of the task"
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_does_not_wait_for_ever() -> None:
    thread, held = BackgroundThread("test-hang", short=True), threading.Event()
    thread.submit(lambda: held.wait() and None)
    time.sleep(0.05)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began < 10
    held.set()
