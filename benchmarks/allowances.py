"""Steps that each relaxed strategy needs to a quality, beside exact sums; the planner's allowances rest on them.

The planner reads them in tutti/planner/relaxed_strategies.py. The works (benchmarks/allowance_work.py) differ from
those of `pays`, on which the planner is judged; the latter can be named, too. Each figure comes from whole
trainings until the held-out loss reaches the target. No trajectory depends on timing, so the machine may be busy.
Unbiased codecs are counted by their variance; one of them can be trained to check that.
"""

import math
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from allowance_work import OTHERS
from harness import run_ranks
from pays_loops import TuttiLoop
from pays_methods import Method
from pays_work import WORKS, Work
from tutti.config.compression import format_compression
from tutti.config.plan import SyncPlan
from tutti.config.sync_notation import format_sync
from tutti.planner.relaxed_strategies import CORRECTABLE, RELAXED_STRATEGIES, RelaxedStrategy

KNOWN = OTHERS | WORKS
EXACT = "exact sums"
EVERY = 2
"""Steps between two evaluations."""

PATIENCE = 4
"""A training is given up after this many times the steps of the longest exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is trained.

    Attributes:
        models: names of works.
        replicas: numbers of ranks.
        strategies: names of strategies; empty for all whose allowances are measured.
        seeds: trainings of each.
    """

    models: tuple[str, ...] = tuple(OTHERS)
    replicas: tuple[str, ...] = ("2", "4", "8")
    strategies: tuple[str, ...] = ()
    seeds: int = 4


QUICK = Sizes(models=("table",), replicas=("2",), strategies=("local:period=8",), seeds=1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Train everything.

    Returns:
        {"steps": {part: {strategy: one entry a seed}}, "summary": {strategy: {part: ratio, "mean of ..": ..,
        "largest of ..": ..}}}. A part is MODEL-REPLICAS; None means a training that was given up.
    """
    steps = {}
    for model in sizes.models:
        for replicas in map(int, sizes.replicas):
            part = f"{model}-{replicas}"
            steps[part] = run_ranks(_train_all, replicas, model, sizes, timeout_s=7200)[0]
            print(part, steps[part], file=sys.stderr, flush=True)
    return {"steps": steps, "summary": summary(steps)}


def read(sizes: Sizes) -> list[RelaxedStrategy]:
    """Return the strategies that are trained."""
    if sizes.strategies:
        known = {strategy.words: strategy for strategy in RELAXED_STRATEGIES}
        return [known[words] for words in sizes.strategies]
    return [strategy for strategy in RELAXED_STRATEGIES if strategy.variance is None]


def _train_all(model: str, sizes: Sizes) -> dict[str, list[int | None]]:
    """Return the steps of exact sums and of each strategy, seed by seed; the same on every rank."""
    from tutti.comm.world import join_world, leave_world

    torch.set_num_threads(1)
    join_world()
    work = replace(KNOWN[model], every=EVERY)
    taken = {EXACT: [train(work, (), seed, work.most) for seed in range(sizes.seeds)]}
    most = PATIENCE * max(steps or work.most for steps in taken[EXACT])
    longer = replace(work, most=most)
    optimizer = type(work.optimizer(work.model())).__name__
    for strategy in read(sizes):
        if strategy.corrects and optimizer not in CORRECTABLE:
            continue  # this optimizer has no second moments to correct
        taken[strategy.words] = [train(longer, words_of(strategy), seed, most) for seed in range(sizes.seeds)]
    leave_world()
    return taken


def words_of(strategy: RelaxedStrategy) -> tuple[tuple[str, str], ...]:
    """Return the environment variables that a launcher would set."""
    variables = []
    if strategy.compress is not None:
        variables.append(("TUTTI_COMPRESS", format_compression(strategy.compress)))
    if strategy.mode != "synchronous":
        variables.append(("TUTTI_SYNC", format_sync(SyncPlan(mode=strategy.mode, relaxed=strategy.relaxed))))
    return tuple(variables)


def train(work: Work, words: tuple[tuple[str, str], ...], seed: int, most: int) -> int | None:
    """Return the steps to the target; None if `most` are not enough."""
    loop = TuttiLoop(Method(name="", side="tutti", words=words), work, seed)
    steps = None
    for step in range(work.every, most + 1, work.every):
        for _ in range(work.every):
            loop.step()
        if loop.job.evaluate(work.data()[1], batch_size=360)["loss"] <= work.target:
            steps = step
            break
    loop.close()
    return steps


def summary(steps: dict[str, dict[str, list[int | None]]]) -> dict[str, dict[str, float | None]]:
    """Return, for each strategy and part, the ratio of its steps to those of exact sums, over all seeds together.

    Also gives the geometric mean and the largest ratio over the parts with equal numbers of replicas. None where
    a seed was given up.
    """
    names = list(dict.fromkeys(name for part in steps.values() for name in part if name != EXACT))
    ratios_by_strategy: dict[str, dict[str, float | None]] = {}
    for name in names:
        ratios: dict[str, float | None] = {
            part: ratio(taken[name], taken[EXACT]) for part, taken in steps.items() if name in taken
        }
        for replicas in dict.fromkeys(part.rpartition("-")[2] for part in ratios):
            values = [value for part, value in ratios.items() if part.endswith(f"-{replicas}")]
            known = [value for value in values if value is not None]
            whole = len(known) == len(values)
            ratios[f"mean of {replicas}"] = math.exp(statistics.fmean(map(math.log, known))) if whole else None
            ratios[f"largest of {replicas}"] = max(known) if whole else None
        ratios_by_strategy[name] = ratios
    return ratios_by_strategy


def ratio(taken: list[int | None], exact: list[int | None]) -> float | None:
    """Return the steps divided by those of exact sums, over all seeds together."""
    counted, theirs = [count for count in taken if count], [count for count in exact if count]
    return sum(counted) / sum(theirs) if len(counted) == len(taken) == len(theirs) else None


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    parts = list(next(iter(result["summary"].values())))
    table = [
        [name, *("given up" if ratios.get(part) is None else f"{ratios[part]:.2f}" for part in parts)]
        for name, ratios in result["summary"].items()
    ]
    return ["strategy", *parts], table
