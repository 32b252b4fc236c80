"""What methods give up for fewer bytes or less waiting: steps and bytes to a held-out quality, in whole trainings.

Steps and bytes do not depend on the machine's load, except where ranks do not wait for each other. In those
trainings every rank sleeps in some of its steps, and the seconds show how much of that time the others wait.
"""

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpt_torch import GPT
from harness import run_ranks
from pays_loops import TuttiLoop
from pays_methods import Method
from pays_work import WORKS, Work, begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is trained.

    Attributes:
        claims: names of claims.
        seeds: trainings of each case.
        percent: part of each training's steps; less than 100 only shows that it runs.
    """

    claims: tuple[str, ...] = ("one-bit-adam", "top16-q4", "staleness", "adasum")
    seeds: int = 3
    percent: int = 100


QUICK = Sizes(seeds=1, percent=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method of training.

    Attributes:
        work: what is trained.
        ranks: number of ranks.
        words: environment variables that the launcher would set.
        nap_s: seconds for which a rank sleeps in a tenth of its steps; each rank does so in different steps.
    """

    work: Work
    ranks: int
    words: tuple[tuple[str, str], ...] = ()
    nap_s: float = 0.0


def small_gpt() -> nn.Module:
    """1.0 M parameters over bytes, context 64."""
    return GPT(layers=2, width=192, heads=6, context=64)


def small_mlp() -> nn.Module:
    """0.3 M parameters: 64 -> 512 -> 512 -> 10."""
    return begun(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))


def _momentum(rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


TEXT = replace(WORKS["gpt"], model=small_gpt, optimizer=_adam, batch=16, target=2.2, most=600, every=20)
DIGITS = replace(
    WORKS["mlp"], model=small_mlp, optimizer=partial(_momentum, 0.02), batch=64, target=0.15, most=400, every=10
)


def _at(rate: float) -> Work:
    return replace(DIGITS, optimizer=partial(_momentum, rate))


def _compress(work: Work, words: str) -> Case:
    return Case(work=work, ranks=2, words=(("TUTTI_COMPRESS", words),))


def _sync(work: Work, words: str, nap_s: float = 0.0) -> Case:
    return Case(work=work, ranks=4, words=(("TUTTI_SYNC", words),), nap_s=nap_s)


NAP_S, NAPS = 0.1, 0.1
"""Seconds of a nap, and the part of its steps in which a rank has one."""

SELDOM = replace(DIGITS, every=20)  # evaluations are rare, because replicas wait for each other there
CLAIMS: dict[str, dict[str, Case]] = {
    "one-bit-adam": {
        "Adam": Case(work=TEXT, ranks=2),
        "1-bit Adam, frozen from 15 %": _compress(TEXT, "one-bit-adam,freeze_step=90"),
        "byte Adam, frozen from 15 %": _compress(TEXT, "byte-adam,freeze_step=90"),
        "one-bit gradients": _compress(TEXT, "one-bit"),
    },
    "top16-q4": {
        "exact": Case(work=DIGITS, ranks=2),
        "Top16_Q4": _compress(DIGITS, "top16-q4"),
        "top-k, 3 %": _compress(DIGITS, "top-k,density=0.03125"),
    },
    "staleness": {
        "synchronous": Case(work=SELDOM, ranks=4, nap_s=NAP_S),
        **{f"stale, bound {bound}": _sync(SELDOM, f"stale:{bound}", NAP_S) for bound in (0, 1, 4, 8)},
        "asynchronous": _sync(SELDOM, "asynchronous", NAP_S),
    },
    "adasum": {
        **{f"sum, rate {rate}": Case(work=_at(rate), ranks=4) for rate in (0.01, 0.02, 0.04)},
        **{f"Adasum, rate {rate}": _sync(_at(rate), "adasum") for rate in (0.01, 0.02, 0.04)},
    },
}
"""Claim -> the cases that it compares, the plain one first."""


def measure(sizes: Sizes) -> dict[str, Any]:
    """Train all claims. Returns {"trainings": {claim: {case: one entry a seed}}, "summary": {claim: {case:
    medians}}}, and the works.
    """
    trainings = {}
    for claim in sizes.claims:
        trainings[claim] = trained_all(CLAIMS[claim], sizes)
        print(claim, json.dumps(summary(trainings[claim])), file=sys.stderr, flush=True)
    return {
        "works": {name: work.says for name, work in (("text", TEXT), ("digits", DIGITS))},
        "trainings": trainings,
        "summary": {claim: summary(strategies) for claim, strategies in trainings.items()},
    }


def trained_all(cases: dict[str, Case], sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    """Run all trainings of a claim in one launch."""
    (ranks,) = {case.ranks for case in cases.values()}
    return dict(run_ranks(_train_all, ranks, cases, sizes, timeout_s=3600)[0])


def _train_all(cases: dict[str, Case], sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    from tutti.comm.world import join_world, leave_world

    torch.set_num_threads(1)
    join_world()
    results = {name: [train(case, seed, sizes.percent) for seed in range(sizes.seeds)] for name, case in cases.items()}
    leave_world()
    return results


def train(case: Case, seed: int, percent: int) -> dict[str, Any]:
    """Run one training.

    Returns:
        {"looks": [[steps, held-out loss, accuracy], ..], "steps": to the target, or None, "last_loss": ..,
        "best_loss": .., "sent_nbytes": by rank 0 in all steps, "sent_to_target_nbytes": .., "step_s": mean
        seconds of a step, without evaluations}.
    """
    import torch.distributed as dist

    loop = TuttiLoop(Method(name="", side="tutti", words=case.words), case.work, seed)
    draw = random.Random(f"{seed} {dist.get_rank()}")
    most = max(case.work.every, case.work.most * percent // 100)
    looks, taken = list[list[float]](), 0.0
    for step in range(case.work.every, most + 1, case.work.every):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(case.work.every):
            if case.nap_s and draw.random() < NAPS:
                time.sleep(case.nap_s)
            loop.step()
        taken += time.perf_counter() - start
        looks.append([step, *loop.quality()])
    sent = sent_nbytes(loop)
    loop.close()
    steps = next((int(look[0]) for look in looks if look[1] <= case.work.target), None)
    return {
        "looks": looks,
        "steps": steps,
        "last_loss": looks[-1][1],
        "best_loss": min(look[1] for look in looks),
        "sent_nbytes": sum(sent),
        "sent_to_target_nbytes": sum(sent[:steps]) if steps else None,
        "step_s": taken / looks[-1][0],
    }


def sent_nbytes(loop: TuttiLoop) -> list[int]:
    """Return the bytes that this rank sent, step by step."""
    import torch.distributed as dist

    from tutti.trainer.metrics import read_rows

    prepared = loop.job._prepared
    assert prepared is not None
    file = prepared.output.folder.rank(dist.get_rank()) / "metrics.jsonl"
    rows = read_rows(file)
    return [row["sent_nbytes"] for row in rows if row["kind"] == "step"]


def summary(strategies: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the seeds, and ratios to those of the first case."""
    result: dict[str, Any] = {}
    for name, runs in strategies.items():
        reached = [run["steps"] for run in runs if run["steps"] is not None]
        entry: dict[str, Any] = {
            "steps": [run["steps"] for run in runs],
            "reached": len(reached) == len(runs),
            "best_loss": statistics.median(run["best_loss"] for run in runs),
            "last_loss": statistics.median(run["last_loss"] for run in runs),
            "sent_nbytes": statistics.median(run["sent_nbytes"] for run in runs),
            "step_s": statistics.median(run["step_s"] for run in runs),
        }
        if entry["reached"]:
            entry["median_steps"] = statistics.median(reached)
            entry["to_target_nbytes"] = statistics.median(run["sent_to_target_nbytes"] for run in runs)
            entry["to_target_s"] = entry["median_steps"] * entry["step_s"]
        result[name] = entry
    plain = next(iter(result.values()))
    for entry in result.values():
        for ratio, what in RATIOS.items():
            if entry.get(what) and plain.get(what):
                entry[ratio] = plain[what] / entry[what]
    return result


RATIOS = {"fewer_bytes": "sent_nbytes", "fewer_bytes_to_target": "to_target_nbytes", "fewer_steps": "median_steps",
          "sooner": "to_target_s"}  # fmt: skip
"""Value of the plain case divided by that of this one: above 1, this one needs less."""


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table for the terminal."""
    header = [
        "claim: case",
        "steps to target",
        "best loss",
        "sent MB",
        "fewer bytes",
        "to target",
        "ms a step",
        "sooner",
    ]
    lines = [
        [
            f"{claim}: {name}",
            ", ".join(str(steps or "-") for steps in entry["steps"]),
            f"{entry['best_loss']:.3f}",
            f"{entry['sent_nbytes'] / 1e6:.1f}",
            *(f"{entry[ratio]:.2f}" if ratio in entry else "-" for ratio in ("fewer_bytes", "fewer_bytes_to_target")),
            f"{entry['step_s'] * 1e3:.1f}",
            f"{entry['sooner']:.2f}" if "sooner" in entry else "-",
        ]
        for claim, strategies in result["summary"].items()
        for name, entry in strategies.items()
    ]
    return header, lines
