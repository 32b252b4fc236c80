"""`tutti verify` on ranks that share the one device: every axis of the mesh once, and combinations."""

import os
import re
from collections.abc import Iterator
from typing import Any

from gpu_run import SCRIPT, PartRun, Row, last_line, skipped

SHARED = (
    ("digits", "replicate=2"), ("gpt", "shard=2"), ("gpt", "split=2"), ("gpt", "stage=2"), ("gpt", "context=2"),
    ("moe", "expert=2"), ("dlrm", "table=2"), ("unet", "space=2"), ("gpt", "replicate=2,shard=2"),
    ("gpt", "split=2,stage=2"), ("resnet", "replicate=4"), ("lstm", "shard=4"),
)  # fmt: skip
REHEARSED = (("gpt", "split=2"),)


def measure(run: PartRun) -> Iterator[Row]:
    """Run `tutti verify` on ranks that share the device, a few commands at a time."""
    share = _share_option(run)
    if share is None:
        yield skipped("ranks that share the device", "this tutti verify has no --share-device")
        return
    waiting = list(REHEARSED if run.tiny else SHARED)
    at_once = max(1, len(os.sched_getaffinity(0)) // 4)
    running: list[tuple[str, Any]] = []
    while waiting or running:
        while waiting and len(running) < at_once and run.left_s() > 10:
            name, mesh = waiting.pop(0)
            running.append((f"{name}, {mesh}, shared device", run.start(_verify(name, mesh, share))))
        if not running:
            yield from (skipped(f"{name}, {mesh}, shared device", "no time was left") for name, mesh in waiting)
            return
        what, process = running.pop(0)
        yield _verdict(what, *run.output(process, 90))


def _share_option(run: PartRun) -> list[str] | None:
    """Return the option that lets ranks share a device; nothing on the CPU, None where tutti has none."""
    if run.device == "cpu":
        return []
    _, text = run.output(run.start(["-m", "tutti", "verify", "--help"]), 30)
    return ["--share-device"] if "--share-device" in text else None


def _verify(name: str, mesh: str, share: list[str]) -> list[str]:
    ranks = 1
    for degree in re.findall(r"=(\d+)", mesh):
        ranks *= int(degree)
    options = ["--nproc", str(ranks), "--mesh", mesh, "--steps", "2", "--timeout", "30", *share]
    return ["-m", "tutti", "verify", *options, str(SCRIPT), name, "--tiny"]


def _verdict(what: str, code: int, text: str) -> Row:
    found = re.search(r"largest relative difference of \d+ compared is ([\d.e+-]+\d)", text)
    said = "took too long" if code == 124 else "" if code == 0 else last_line(text)
    return {"what": what, "difference": float(found[1]) if found else None, "ok": code == 0, "said": said}
