"""Ways to send less that the planner may choose where the dial is opened: one table, open to additions.

A way changes what is computed, so it may take more samples to the same quality. How many is known of few: an unbiased
code adds a variance to the gradient's noise that can be worked out; for all others an allowance is counted, which is
assumed, until past runs have measured it (Request.samples).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tutti.config.compression import Compression
from tutti.config.consistency_modes import Relaxed
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan, SyncPlan
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import Evidence, Relaxation
from tutti.planner.plan_request import PlanRequest

RELAXATIONS: tuple[Relaxation, ...] = ("exact", "reduced", "relaxed")
"""From exact to relaxed; each allows what those before it do."""

POWERSGD: Final[dict[int, float]] = {4: 1.4, 2: 1.4, 1: 2.4}
"""Allowances for powersgd by its rank, how many times the steps of exact sums. Assumed, after few readings of short
trainings to the qualities of benchmarks/pays.py (MLP, CNN, GPT; docs/compression.md): exact sums took 24, 48 and 28
steps, rank 2 took 28, 64 and 48, which is 1.17, 1.33 and 1.71 times, in the geometric mean 1.39. Rank 1 took the MLP
2.4 times the steps (48 for 20, three seeds, `2026-11-23-pays-17`); of rank 4 nothing was read, it is counted as 2."""

QSGD: Final[dict[Literal[8, 4], float]] = {8: 2e-4, 4: 0.04}
"""Variance that qsgd adds to a gradient's square, by its bits."""

CHANGES: Final[dict[Literal[8, 4, 2], float]] = {8: 1.0, 4: 1.0, 2: 1.02}
"""Allowances for averages whose changes of several updates are in qsgd, by its bits, times those of averages as they
are. In 4 bits they took as many within 0.01 (`2026-11-25-allowances-2`). In 2 bits, every 8, four replicas
(`2026-11-25-allowances-6`), SGD 1.01 (CNN) and 0.99 (table) times the steps of exact sums where they took 1.02 and
1.00; with corrected moments 1.03, 1.10 and 1.12 where they took 1.04, 1.11 and 1.06, taken in two updates later 1.05,
1.13 and 1.13 (1.04, 1.19, 1.07)."""

SPARSE, QUANTISED = 2.3, 4.0
"""The same for top-k, which took 44, 100 and 88 steps: 1.83, 2.08 and 3.14 times, in the geometric mean 2.29; and for
top16-q4, which keeps back 97 of 100 values, by hand: CNN and GPT took 2.7 and 2.9 times (one seed, two replicas), the
MLP with four more than 4 (three seeds, given up). In longer trainings it may be less: on handwritten digits (440 steps)
all of them reach what exact sums do (tests/trainer/test_compressed_digits_multirank.py)."""

DIVERGED_SAMPLES = 1.25
"""Allowance for replicas that differ in other ways than by averages, besides what `LOCAL` takes. Assumed: on
handwritten digits they reach what exact sums do after as many steps
(tests/local_sgd/test_digits_multirank.py), larger tasks may not."""


@dataclass(frozen=True, slots=True)
class Each:
    """What each replica beyond the first adds to the samples, as a part of them: with SGD (with momentum too), and
    with any other optimizer.

    An average of steps that SGD makes is a step for the average of gradients. An adaptive optimizer divides by the root
    of a second moment, in which the noise of a replica's small part of the batch stands: its steps are shorter, the
    more replicas the batch is divided among.
    """

    sgd: float = 0.0
    others: float = 0.0


LOCAL: Final = Each(0.01, 0.1)
"""Averages up to every `LONGEST` updates. Assumed, after trainings of other models and data than those that
benchmarks/pays.py judges by (`2026-11-25-allowances` to `-3`, three seeds each). With two and four replicas, every 8
updates: SGD 1.00 and 1.02, 1.00 and 1.00 times the steps of exact sums (CNN with BatchNorm, table); Adam 1.10 and 1.25,
1.17 and 1.51, 1.04 and 1.13 (GRU, transformer, autoencoder), in the geometric mean 1.10 and 1.29. Every 4 and every 16
updates as many within 0.11, in 4 bits within 0.01. (That suite's MLP and CNN, with SGD, took 1.0 and 0.92 times with
four, its GPT, with AdamW, 1.2.)"""

HALF: Final = Each(0.05, 0.15)
"""The same for averages that are taken in half a period after they were begun, or sooner. Of the same trainings, every
8 by 4 and every 16 by 8, two and four replicas: SGD 1.01 and 1.05, 1.06 and 1.09 (CNN), 1.00 (table); the others in the
geometric mean 1.19 and 1.39, 1.17 and 1.41, at most 1.77 (the transformer). Every 4 by 2 was not read."""

SOON: Final = Each(0.015, 0.1)
"""The same for averages that are taken in a quarter of a period after they were begun, or sooner. Of the same
trainings with four replicas, every 8 by 1 and by 2 (`2026-11-25-allowances-5`): SGD 1.02 and 1.05 (CNN), 1.00 (table);
the others in the geometric mean 1.29 and 1.30, as those that are waited for. (The CNN of benchmarks/pays.py, with SGD,
took 1.13 and 1.19 times with four.)"""

DELAYED: Final = Each(0.14, 0.3)
"""The same for averages that are taken in a whole period after they were begun, every 8. Of the same trainings: SGD
1.00 and 1.15, 1.00 and 1.00; Adam 1.19 and 1.35, 1.54 and 1.86, 2.4 and 2.3, in the geometric mean 1.6 and 1.8, more
than is counted for two. On handwritten digits, with SGD, four replicas need what is counted: after exact sums' 440
steps their loss is 0.03 to 0.04 (three seeds, by hand), after as many as counted 0.007 to 0.013
(tests/local_sgd/test_digits_multirank.py). Not every 16: in 8 bits they got 349 of 360 right after 440."""

BEGINS = 4
"""Updates that are synchronous before replicas part, where they are to begin alike: what these take is counted, so it
is tried where the number of steps is known."""

BEGUN: Final = Each(0.01, 0.085)
"""Averages up to every `LONGEST` updates after the first `BEGINS` were synchronous. Of the same trainings with four
replicas, every 8 (`2026-11-25-allowances-4`): SGD 1.03 (CNN) and 1.00 (table), no fewer than without; Adam 1.24, 1.44
and 1.11, in the geometric mean 1.26 where averages from the first update on took 1.29. (The CNN of benchmarks/pays.py
took 1.02 times with four, where it took 1.10 without.)"""

CORRECTED: Final = Each(others=0.025)
"""Averages with second moments that are corrected (local_sgd/moments.py). Of the same trainings with Adam,
four replicas, every 8 (`2026-11-25-allowances-4`): 1.04, 1.11 and 1.06, in the geometric mean 1.07 where it is 1.29
without. (The GPT of benchmarks/pays.py, which is there after 24 to 26 steps, gains nothing: begun alike it took 1.01
times with four, corrected or not, but every 8 by 4, not begun alike, 1.37, where it took 1.29 without.)"""

CORRECTED_BEGUN: Final = Each(others=0.02)
"""The same after `BEGINS` synchronous updates: 1.04, 1.08 and 1.04, in the geometric mean 1.05."""

CORRECTED_HALF: Final = Each(others=0.055)
"""The same for averages that are taken in half a period after they were begun, every 8 by 4: 1.04, 1.25 and 1.20, in
the geometric mean 1.16. Whole periods were not read."""

CORRECTED_SOON: Final = Each(others=0.035)
"""And in a quarter of one, or sooner: every 8 by 1 1.04, 1.15 and 1.07, by 2 1.04, 1.19 and 1.07, in the geometric mean
1.09 and 1.10 (`2026-11-25-allowances-5`)."""

CORRECTABLE = ("Adam", "AdamW", "NAdam", "RAdam")
"""Optimizers, as ModelSpec names them, whose second moments may be corrected; amsgrad's, which keep a third vector, may
not."""

WORTH = 0.05
"""What a way that changes training must take less, with all it is counted with: for no smaller part than choices are
to be right to is it changed."""

WORTH_IN_TURNS = 0.15
"""The same for a code of every step where ranks or hosts take turns on cores, for what codes cost there is known less:
between four hosts on two cores copies in bfloat16 were predicted to gain 5 and 7 %, and took 7 and 13 % longer than
exact sums (benchmarks/results/2026-11-23-pays-17.json). Of averages every n updates the n-th part of what this is more,
for so much less is written and read."""

LONGEST = 16
"""Updates between two exchanges that the planner goes to by itself. Longer ones are for the user to ask for."""

HIDDEN = ((8, 1), (8, 2), (4, 2), (8, 4), (LONGEST, 8), (8, 8))
"""(updates between two averages, those in which one travels): a quarter of a period costs hardly any samples, half of
one few, a whole one hides most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStrategy:
    """One way. `variance`: what an unbiased code adds to a gradient's square; `samples`: else, the allowance, and
    `each`: what replicas add to it."""

    relaxation: Relaxation
    compress: Compression | None = None
    mode: str = "synchronous"
    relaxed: Relaxed = field(default_factory=Relaxed)
    variance: float | None = None
    samples: float = 1.0
    each: Each = Each()

    @property
    def corrects(self) -> bool:
        """Whether second moments are corrected."""
        return self.relaxed.optimizer_state == "corrected"

    @property
    def words(self) -> str:
        """As a user types it after --compress or --sync, or after both."""
        return format_relaxation(SyncPlan(mode=self.mode, relaxed=self.relaxed, compress=self.compress))

    def of(self, plan: Plan) -> Plan:
        """The plan that exchanges so."""
        return replace(plan, sync=replace(plan.sync, mode=self.mode, relaxed=self.relaxed, compress=self.compress))


def _code(method: str, variance: float | None = None, samples: float = 1.0, **settings: object) -> RelaxedStrategy:
    how = Compression(method=method, **settings)  # type: ignore[arg-type]
    return RelaxedStrategy(relaxation="reduced", compress=how, variance=variance, samples=samples)


def _diverging(mode: str, period: int) -> RelaxedStrategy:
    return RelaxedStrategy(
        relaxation="relaxed", mode=mode, relaxed=Relaxed(period=period), samples=DIVERGED_SAMPLES, each=LOCAL
    )


def _local(
    period: int, bits: Literal[8, 4, 2] | None = None, delay: int = 0, after: int = 0, *, corrected: bool = False
) -> RelaxedStrategy:
    how = None if bits is None else Compression(method="qsgd", bits=bits)
    samples = 1.0 if bits is None else CHANGES[bits]
    each = _added(delay / period, begun=bool(after))[corrected]
    relaxed = Relaxed(
        period=period, delay=delay or None, after=after or None, optimizer_state="corrected" if corrected else None
    )
    mode: str = "post-local" if after else "local"
    return RelaxedStrategy(relaxation="relaxed", mode=mode, relaxed=relaxed, compress=how, samples=samples, each=each)


def _added(late: float, *, begun: bool) -> tuple[Each, Each]:
    """What replicas add where averages are taken in so large a part of a period after they were begun: with moments as
    they are, and corrected."""
    if begun:
        return BEGUN, CORRECTED_BEGUN
    if not late:
        return LOCAL, CORRECTED
    if late <= 0.25:
        return SOON, CORRECTED_SOON
    return (HALF, CORRECTED_HALF) if late <= 0.5 else (DELAYED, DELAYED)


def _averages(*, corrected: bool = False) -> tuple[RelaxedStrategy, ...]:
    """All that average replicas now and then."""
    delays = [(period, delay) for period, delay in HIDDEN if 2 * delay <= period or not corrected]
    return (
        *(_local(period, corrected=corrected) for period in (2, 4, 8, LONGEST)),
        *(_local(period, bits, corrected=corrected) for period in (4, 8, LONGEST) for bits in CHANGES),
        *(_local(period, bits, delay, corrected=corrected) for period, delay in delays for bits in (None, *CHANGES)),
        *(
            _local(period, bits, after=BEGINS, corrected=corrected)
            for period in (4, 8, LONGEST)
            for bits in (None, *QSGD)
        ),
    )


RELAXED_STRATEGIES: tuple[RelaxedStrategy, ...] = (
    RelaxedStrategy(relaxation="exact", compress=Compression(method="factors"), variance=0.0),
    _code("bfloat16", variance=1e-5),
    _code("bytegrad", variance=1e-4),
    *(_code("qsgd", variance=variance, bits=bits) for bits, variance in QSGD.items()),
    _code("top16-q4", samples=QUANTISED),
    _code("top-k", samples=SPARSE, density=0.01),
    *(_code("powersgd", samples=samples, rank=rank) for rank, samples in POWERSGD.items()),
    *_averages(),
    *_averages(corrected=True),
    *(_diverging(mode, period) for mode in ("elastic", "ring", "shift-one", "push") for period in (1, 4)),
)
"""What is tried. Variances are of normal values in the code's blocks: of rounding to 8 bits of mantissa, of 256 even
steps over 7 standard deviations, and of levels drawn below the largest of 512 (4 bits: 0.039 was measured).

Not here, and why: one-bit diverges at learning rates that exact sums bear, and averages in it took 1.48 times the steps
of exact sums (four replicas, the trainings above), up to 2.06; terngrad adds as much variance as there is;
dgc needs an optimizer without momentum; DiLoCo's outer optimizer has rates to tune; Adasum changes the step's length
with the number of replicas; one average at the end is another training.
"""


def correctable(model: ModelSpec) -> bool:
    """Whether replicas of the model may correct the second moments that its optimizer divides by."""
    trained = sum(module.gradient_nbytes for module in model.modules)
    state = sum(module.optimizer_nbytes for module in model.modules)
    return model.optimizer in CORRECTABLE and state < 2.5 * trained


def strategies(request: PlanRequest, steps: int | None, *, corrected: bool = False) -> list[RelaxedStrategy]:
    """Those that the request's dial allows, without those whose runs did not get to the quality. Where the number of
    steps is known, periods stay within its root: assumed after Stich 2018, arXiv 1805.09767, whose bound grows so;
    where it is not, what first steps take cannot be weighed, and none begins otherwise than it goes on. `corrected`:
    averages are with second moments that are corrected; without, which take more samples, only where past runs say how
    many.
    """
    allowed = RELAXATIONS[: RELAXATIONS.index(request.relax) + 1]
    longest = math.isqrt(steps) if steps is not None else LONGEST
    failed = {words for words, factor in request.samples.items() if factor is None}
    near = [
        strategy
        for strategy in RELAXED_STRATEGIES
        if strategy.relaxation in allowed and (strategy.relaxed.period or 1) <= longest
    ]
    able = [
        strategy
        for strategy in near
        if (corrected if strategy.corrects else not corrected or _uncorrected(strategy, request))
    ]
    return [
        strategy
        for strategy in able
        if strategy.words not in failed and (steps is not None or not strategy.relaxed.after)
    ]


def _uncorrected(strategy: RelaxedStrategy, request: PlanRequest) -> bool:
    """Whether a way is offered as it is where moments could be corrected: no average, or one that past runs know."""
    return strategy.mode not in ("local", "post-local") or strategy.words in request.samples


def samples_of(strategy: RelaxedStrategy, request: PlanRequest, plan: Plan, optimizer: str) -> tuple[float, Evidence]:
    """How many times the samples of exact training the way is counted with, and where that comes from. `optimizer`: as
    ModelSpec names it.

    Of an unbiased code: noise of variance v beside the gradient's own makes the critical batch 1 + v times as large,
    and samples grow as batch + critical batch (plan.quality); without a noise scale, 1 + v, which is the most.
    """
    if strategy.relaxation == "exact":
        return 1.0, "measured"  # it is the same training
    measured = request.samples.get(strategy.words)
    if measured is not None:
        return measured, "measured"
    if strategy.variance is None:
        each = strategy.each.sgd if optimizer == "SGD" else strategy.each.others
        return strategy.samples * (1.0 + each * (plan.data_parallel_degree - 1)), "assumed"
    if request.noise is None:
        return 1.0 + strategy.variance, "assumed"
    batch, critical = plan.batch.global_batch_size, request.noise.critical_batch
    return (batch + (1.0 + strategy.variance) * critical) / (batch + critical), request.noise.evidence
