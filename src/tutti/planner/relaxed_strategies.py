"""The strategies that send less, from which the planner may choose where relaxation is allowed.

A strategy changes what is computed, so it may need more samples to the same quality. An unbiased codec adds a
variance to the noise of the gradient, from which the number of samples follows. For all others the planner counts an
assumed allowance, until past runs have measured the number (PlanRequest.samples).
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
"""Relaxation levels in order. Each allows everything that the levels before it allow."""

POWERSGD: Final[dict[int, float]] = {4: 1.4, 2: 1.4, 1: 2.4}
"""Allowance by PowerSGD's rank: steps as a multiple of those of exact gradient reduction. Assumed, from few readings.

The readings are short trainings to the qualities of benchmarks/pays.py (MLP, CNN, GPT; docs/compression.md).
Exact reduction took 24, 48 and 28 steps. Rank 2 took 28, 64 and 48: 1.17, 1.33 and 1.71 times as many, in the
geometric mean 1.39. Rank 1 took 2.4 times the steps with the MLP (48 instead of 20, three seeds,
`2026-11-23-pays-17`). Rank 4 was not measured; it is counted like rank 2.
"""

QSGD: Final[dict[Literal[8, 4], float]] = {8: 2e-4, 4: 0.04}
"""The variance that qsgd adds, by number of bits, as a fraction of the gradient's square."""

CHANGES: Final[dict[Literal[8, 4, 2], float]] = {8: 1.0, 4: 1.0, 2: 1.02}
"""Allowance for encoding the change over several updates with qsgd, by number of bits.

It is a factor on the allowance of averages that are not encoded. In 4 bits the numbers of steps agree within 0.01
(`2026-11-25-allowances-2`). The readings in 2 bits are of averages every 8 updates with four replicas
(`2026-11-25-allowances-6`), as multiples of the steps of exact reduction:
- SGD took 1.01 (CNN) and 0.99 (table), against 1.02 and 1.00 without the codec.
- With corrected moments it took 1.03, 1.10 and 1.12, against 1.04, 1.11 and 1.06.
- Applied two updates later it took 1.05, 1.13 and 1.13, against 1.04, 1.19 and 1.07.
"""

SPARSE, QUANTISED = 2.3, 4.0
"""Allowances for top-k and top16-q4, as multiples of the steps of exact gradient reduction.

Top-k took 44, 100 and 88 steps: 1.83, 2.08 and 3.14 times as many, in the geometric mean 2.29. Top16-q4 holds back 97
of 100 values. In trainings run by hand, CNN and GPT took 2.7 and 2.9 times the steps (one seed, two replicas). The MLP
with four replicas took more than 4 times (three seeds, given up). Longer trainings may need less: on handwritten
digits (440 steps) all of them reach what exact reduction does (tests/parallel/test_compressed_digits_multirank.py).
"""

DIVERGED_SAMPLES = 1.25
"""Allowance for replicas that diverge in other modes than averaging, in addition to `LOCAL`.

Assumed: on handwritten digits they reach what exact reduction does after as many steps
(tests/local_sgd/test_digits_multirank.py), but larger tasks may not.
"""


@dataclass(frozen=True, slots=True)
class Each:
    """The additional samples for each replica beyond the first, as a fraction of the samples of exact training.

    With SGD, the average of the replicas' steps is a step with the average of their gradients. An adaptive optimizer
    divides by the root of a second moment, which includes the noise of a replica's small part of the batch. The more
    replicas share the batch, the shorter its steps become.

    Attributes:
        sgd: with SGD, with or without momentum.
        others: with any other optimizer.
    """

    sgd: float = 0.0
    others: float = 0.0


LOCAL: Final = Each(0.01, 0.1)
"""For averages up to every `LONGEST` updates. Assumed, from trainings with other models and data than those of
benchmarks/pays.py (`2026-11-25-allowances` to `-3`, three seeds each).

The readings are multiples of the steps of exact reduction, averaging every 8 updates, with two and with four
replicas:
- SGD: 1.00 and 1.02 (CNN with BatchNorm), 1.00 and 1.00 (table).
- Adam: 1.10 and 1.25 (GRU), 1.17 and 1.51 (transformer), 1.04 and 1.13 (autoencoder); in the geometric mean 1.10
  and 1.29.

Averages every 4 and every 16 updates agree within 0.11, averages in 4 bits within 0.01. In benchmarks/pays.py, MLP
and CNN with SGD took 1.0 and 0.92 times the steps with four replicas, the GPT with AdamW 1.2 times.
"""

HALF: Final = Each(0.05, 0.15)
"""For averages that are applied at most half a period after they were started.

Measured in the same trainings as LOCAL with two and with four replicas, averaging every 8 updates with a delay of 4
and every 16 with a delay of 8. SGD: 1.01 and 1.05, 1.06 and 1.09 (CNN), 1.00 (table). Other optimizers, in the
geometric mean: 1.19 and 1.39, 1.17 and 1.41; at most 1.77 (the transformer). Averaging every 4 updates with a delay
of 2 was not measured.
"""

SOON: Final = Each(0.015, 0.1)
"""For averages that are applied at most a quarter of a period after they were started.

Measured in the same trainings as LOCAL with four replicas, averaging every 8 updates with a delay of 1 and of 2
(`2026-11-25-allowances-5`). SGD: 1.02 and 1.05 (CNN), 1.00 (table). Other optimizers, in the geometric mean: 1.29
and 1.30, the same as averages that are waited for. The CNN of benchmarks/pays.py, with SGD, took 1.13 and 1.19 times
the steps with four replicas.
"""

DELAYED: Final = Each(0.14, 0.3)
"""For averages that are applied a whole period after they were started, every 8 updates.

Measured in the same trainings as LOCAL. SGD: 1.00 and 1.15, 1.00 and 1.00. Adam: 1.19 and 1.35, 1.54 and 1.86, 2.4
and 2.3; in the geometric mean 1.6 and 1.8. With two replicas that is more than this allowance. On handwritten digits
with SGD, four replicas need as many steps as it allows. After the 440 steps of exact reduction their loss is 0.03 to
0.04 (three seeds, by hand), after the steps that it allows 0.007 to 0.013
(tests/local_sgd/test_digits_multirank.py). A period of 16 is not offered: in 8 bits, 349 of 360 digits were right
after 440 steps.
"""

BEGINS = 4
"""Number of synchronous updates before replicas diverge, for strategies that start synchronously. The time of these
updates is counted, so such strategies are tried only where the number of steps is known.
"""

BEGUN: Final = Each(0.01, 0.085)
"""For averages up to every `LONGEST` updates after the first `BEGINS` updates were synchronous.

Measured in the same trainings as LOCAL with four replicas, averaging every 8 updates (`2026-11-25-allowances-4`).
SGD: 1.03 (CNN) and 1.00 (table), no fewer steps than without a synchronous start. Adam: 1.24, 1.44 and 1.11; in the
geometric mean 1.26, against 1.29 without. The CNN of benchmarks/pays.py took 1.02 times the steps with four replicas,
against 1.10 without.
"""

CORRECTED: Final = Each(others=0.025)
"""For averages with corrected second moments (local_sgd/moments.py).

Measured in the same trainings as LOCAL with Adam and four replicas, averaging every 8 updates
(`2026-11-25-allowances-4`): 1.04, 1.11 and 1.06; in the geometric mean 1.07, against 1.29 without correction. The
GPT of benchmarks/pays.py, which is done after 24 to 26 steps, gains nothing. With a synchronous start it took 1.01
times the steps with four replicas, corrected or not. Averaging every 8 updates with a delay of 4 and no synchronous
start took 1.37 times, against 1.29 without correction.
"""

CORRECTED_BEGUN: Final = Each(others=0.02)
"""For CORRECTED averages after `BEGINS` synchronous updates: 1.04, 1.08 and 1.04; in the geometric mean 1.05."""

CORRECTED_HALF: Final = Each(others=0.055)
"""For CORRECTED averages that are applied at most half a period after they were started. Measured every 8 updates
with a delay of 4: 1.04, 1.25 and 1.20; in the geometric mean 1.16. Whole periods were not measured.
"""

CORRECTED_SOON: Final = Each(others=0.035)
"""For CORRECTED averages that are applied at most a quarter of a period after they were started. Measured every 8
updates with a delay of 1: 1.04, 1.15 and 1.07; with a delay of 2: 1.04, 1.19 and 1.07. The geometric means are 1.09
and 1.10 (`2026-11-25-allowances-5`).
"""

CORRECTABLE = ("Adam", "AdamW", "NAdam", "RAdam")
"""Optimizers, as ModelSpec names them, whose second moments can be corrected. With amsgrad they cannot, because it has
a third vector.
"""

REQUIRED_SAVING = 0.05
"""The fraction that a strategy which changes training must save, including its additional samples, to be chosen. The
planner's choices are to be right within this fraction, so a smaller gain does not justify a change.
"""

REQUIRED_SAVING_OVERSUBSCRIBED = 0.15
"""The same for a codec that runs in every step where ranks or hosts take turns on cores. There the cost of a codec is
less certain.

Between four hosts on two cores, copies in bfloat16 were predicted to save 5 and 7 %, and took 7 and 13 % longer than
exact reduction (benchmarks/results/2026-11-23-pays-17.json). With averaging every n updates, the extra margin is
divided by n, because the codec runs that much less often.
"""

LONGEST = 16
"""Longest period, in updates, that the planner chooses by itself. Users may ask for longer ones."""

HIDDEN = ((8, 1), (8, 2), (4, 2), (8, 4), (LONGEST, 8), (8, 8))
"""Pairs (period, delay), in updates, of averages that are applied later than they are started. A delay of a quarter
of a period costs hardly any samples, one of half a period few. A delay of a whole period hides the most communication.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedStrategy:
    """One strategy that sends less, and the samples that it takes.

    Attributes:
        relaxation: the lowest level that allows it.
        compress: its codec, or None.
        mode: its consistency mode.
        relaxed: settings of the mode.
        variance: variance that an unbiased codec adds, as a fraction of the gradient's square; else None.
        samples: the allowance where `variance` is None, as a multiple of the samples of exact training.
        each: what every further replica adds to the allowance.
    """

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
        """The strategy as a user types it after --compress or --sync, or after both."""
        return format_relaxation(SyncPlan(mode=self.mode, relaxed=self.relaxed, compress=self.compress))

    def of(self, plan: Plan) -> Plan:
        """Return the plan with this strategy."""
        return replace(plan, sync=replace(plan.sync, mode=self.mode, relaxed=self.relaxed, compress=self.compress))


def _code(method: str, variance: float | None = None, samples: float = 1.0, **settings: object) -> RelaxedStrategy:
    """Return the strategy of reducing gradients with a codec."""
    codec = Compression(method=method, **settings)  # type: ignore[arg-type]
    return RelaxedStrategy(relaxation="reduced", compress=codec, variance=variance, samples=samples)


def _diverging(mode: str, period: int) -> RelaxedStrategy:
    """Return the strategy of a mode in which replicas diverge and do not average periodically."""
    return RelaxedStrategy(
        relaxation="relaxed", mode=mode, relaxed=Relaxed(period=period), samples=DIVERGED_SAMPLES, each=LOCAL
    )


def _local(
    period: int, bits: Literal[8, 4, 2] | None = None, delay: int = 0, after: int = 0, *, corrected: bool = False
) -> RelaxedStrategy:
    """Return the strategy of averaging replicas periodically."""
    codec = None if bits is None else Compression(method="qsgd", bits=bits)
    samples = 1.0 if bits is None else CHANGES[bits]
    per_replica = _added(delay / period, begun=bool(after))[corrected]
    relaxed = Relaxed(
        period=period, delay=delay or None, after=after or None, optimizer_state="corrected" if corrected else None
    )
    mode: str = "post-local" if after else "local"
    return RelaxedStrategy(
        relaxation="relaxed", mode=mode, relaxed=relaxed, compress=codec, samples=samples, each=per_replica
    )


def _added(late: float, *, begun: bool) -> tuple[Each, Each]:
    """Return what further replicas add, first with second moments as they are, then with corrected ones.

    Args:
        late: the fraction of a period after which averages are applied.
        begun: whether the first updates are synchronous.
    """
    if begun:
        return BEGUN, CORRECTED_BEGUN
    if not late:
        return LOCAL, CORRECTED
    if late <= 0.25:
        return SOON, CORRECTED_SOON
    return (HALF, CORRECTED_HALF) if late <= 0.5 else (DELAYED, DELAYED)


def _averages(*, corrected: bool = False) -> tuple[RelaxedStrategy, ...]:
    """Return all strategies that average replicas periodically."""
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
"""The strategies that the planner tries.

Variances hold for normally distributed values in the blocks of a codec. They are those of rounding to 8 bits of
mantissa, of 256 even steps over 7 standard deviations, and of levels drawn below the largest of 512 values (in 4
bits, 0.039 was measured).

Left out, with the reason:
- one-bit diverges at learning rates that exact reduction tolerates. Averages encoded with it took 1.48 times the steps
  of exact reduction (four replicas, the trainings above), and up to 2.06 times.
- terngrad adds as much variance as the gradient has.
- dgc needs an optimizer without momentum.
- The outer optimizer of DiLoCo has learning rates to tune.
- Adasum changes the length of a step with the number of replicas.
- A single average at the end is a different training.
"""


def correctable(model: ModelSpec) -> bool:
    """Return whether replicas of the model can correct the second moments by which its optimizer divides."""
    trained = sum(module.gradient_nbytes for module in model.modules)
    state = sum(module.optimizer_nbytes for module in model.modules)
    return model.optimizer in CORRECTABLE and state < 2.5 * trained


def strategies(request: PlanRequest, steps: int | None, *, corrected: bool = False) -> list[RelaxedStrategy]:
    """Return the strategies that the request's relaxation level allows, without those whose runs missed the quality.

    Where the number of steps is known, periods are at most its square root. This is assumed, after the bound of
    Stich 2018, arXiv 1805.09767. Where it is unknown, the cost of the first steps cannot be weighed, so no strategy
    that starts synchronously is offered.

    Args:
        request: the relaxation level, and the samples that past runs measured.
        steps: steps of the training, or None.
        corrected: whether averages use corrected second moments. Uncorrected averages need more samples, so they are
            then offered only where past runs measured how many.
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
    """Return whether a strategy is offered without corrected moments where they could be corrected.

    It is if it does not average, or if past runs measured it.
    """
    return strategy.mode not in ("local", "post-local") or strategy.words in request.samples


def samples_of(strategy: RelaxedStrategy, request: PlanRequest, plan: Plan, optimizer: str) -> tuple[float, Evidence]:
    """Return the samples that a strategy takes, as a multiple of exact training, and the evidence for it.

    An unbiased codec adds noise of variance v to that of the gradient. This makes the critical batch 1 + v times as
    large, and samples grow as batch + critical batch (see plan_request.samples_to_quality). Without a noise scale the
    result is 1 + v, the upper bound.

    Args:
        strategy: how less is sent.
        request: the noise scale, and the samples that past runs measured.
        plan: the plan with the strategy.
        optimizer: the optimizer as ModelSpec names it.
    """
    if strategy.relaxation == "exact":
        return 1.0, "measured"  # the result is the same training
    measured = request.samples.get(strategy.words)
    if measured is not None:
        return measured, "measured"
    if strategy.variance is None:
        per_replica = strategy.each.sgd if optimizer == "SGD" else strategy.each.others
        return strategy.samples * (1.0 + per_replica * (plan.data_parallel_degree - 1)), "assumed"
    if request.noise is None:
        return 1.0 + strategy.variance, "assumed"
    batch, critical = plan.batch.global_batch_size, request.noise.critical_batch
    return (batch + (1.0 + strategy.variance) * critical) / (batch + critical), request.noise.evidence
