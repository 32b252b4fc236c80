"""What happens to a run, and when: drawn from a seed, so that it can happen again."""

import random
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "kill", "stop", "preempt", "preempt-all", "kill-launcher", "full-disk", "kill-node", "cut-link", "shake-link"
]
"""preempt-all: SIGUSR1 for every process, as Slurm sends it. kill-launcher: that of node 0. cut-link: until the other
node is lost. shake-link: for half a second."""

ENDS_RUN = ("preempt", "preempt-all", "kill-launcher")
"""Faults after which the run is to be resumed."""

Damage = Literal["none", "flipped", "truncated", "missing"]

STEPS = 24
EVERY = 4
PLANS: dict[str, tuple[str, ...]] = {
    "replicate": ("--mesh", "replicate=3"),
    "shard-1": ("--mesh", "shard=2", "--shard", "level=1"),
    "shard-2": ("--mesh", "shard=2", "--shard", "level=2"),
    "shard-3": ("--mesh", "shard=2", "--shard", "level=3"),
    "stage": ("--mesh", "stage=2"),
    "split": ("--mesh", "split=2"),
    "replicate-stage": ("--mesh", "replicate=2,stage=2"),
    "local-sgd": ("--mesh", "replicate=2", "--sync", "local:4"),
    "nodes": ("--mesh", "replicate=4"),
    "nodes-shard": ("--mesh", "shard=4", "--shard", "level=2"),
}
NODES = ("nodes", "nodes-shard")
"""Plans whose ranks are on two hosts of a lab, which needs root."""

RANKS = {"replicate": 3, "replicate-stage": 4, "nodes": 4, "nodes-shard": 4}
"""Ranks of a plan, where it does not have 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        step: it comes when some rank has begun this step.
        delay_s: so long after that.
        rank: the rank that suffers it.
        damage: what then happens to a file of the newest checkpoint, of a run that has ended.
    """

    kind: FaultKind
    step: int
    delay_s: float
    rank: int = 0
    damage: Damage = "none"

    def __str__(self) -> str:
        who = f" of rank {self.rank}" if self.kind in ("kill", "stop") else ""
        after = f", then a {self.damage} file" if self.damage != "none" else ""
        return f"{self.kind}{who} in step {self.step} + {self.delay_s * 1e3:.0f} ms{after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The plan of a run and its faults, in the order of their steps.

    Attributes:
        shrink: whether the run goes on without a rank that was killed.
        workers: workers of the data loader of each rank.
    """

    seed: int
    plan: str
    faults: tuple[Fault, ...]
    shrink: bool = False
    workers: int = 0

    @property
    def ranks(self) -> int:
        return RANKS.get(self.plan, 2)

    @property
    def memory_every(self) -> int:
        """Steps between two checkpoints in memory; 0, for every other seed, for none."""
        return 3 * (self.seed % 2)

    @property
    def dropout(self) -> float:
        """Dropout of the model; none where the number of ranks changes, because each rank draws its own masks."""
        return 0.0 if self.shrink else 0.1

    def __str__(self) -> str:
        how = ("shrink, " if self.shrink else "") + (f"{self.workers} workers, " if self.workers else "")
        return f"seed {self.seed}: {self.plan}, {how}{'; '.join(map(str, self.faults))}"


def draw_schedule(seed: int, plan: str | None = None, *, root: bool = False) -> Schedule:
    """Return the schedule of a seed.

    Args:
        seed: any number.
        plan: the plan; drawn if None.
        root: whether plans and faults may be drawn that need root: several hosts, a full disk.
    """
    drawn = random.Random(seed)
    plan = plan or drawn.choice(sorted(name for name in PLANS if root or name not in NODES))
    kinds: list[FaultKind] = ["kill", "kill", "stop", "preempt", "preempt-all", "kill-launcher"]
    if plan in NODES:
        kinds += ["kill-node", "kill-node", "cut-link", "shake-link"]
    elif root:
        kinds.append("full-disk")
    steps = sorted(drawn.sample(range(2, STEPS - 1), drawn.choice((1, 2, 2, 3))))
    faults = tuple(_fault(drawn, drawn.choice(kinds), step, RANKS.get(plan, 2)) for step in steps)
    # Replicas that diverge keep a state for each rank, so their number stays; it is refused by name.
    kills = sum(fault.kind == "kill" for fault in faults)
    shrinks = plan in ("replicate", "shard-1", "shard-2", "shard-3") and 0 < kills < RANKS.get(plan, 2)
    return Schedule(
        seed=seed, plan=plan, faults=faults, shrink=shrinks and drawn.random() < 0.4, workers=drawn.choice((0, 0, 1))
    )


def _fault(drawn: random.Random, kind: FaultKind, step: int, ranks: int) -> Fault:
    ends = kind in ENDS_RUN
    damages: tuple[Damage, ...] = ("none", "flipped", "truncated", "missing") if ends else ("none",)
    return Fault(
        kind=kind,
        step=step,
        delay_s=round(drawn.uniform(0, 0.08), 3),
        rank=drawn.randrange(ranks),
        damage=drawn.choice(damages),
    )
