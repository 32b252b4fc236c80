"""Learning-rate rules: worked examples, every step against an independent loop, laws, refusals."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import PlanError
from tutti.optim.learning_rate import LRRule, learning_rate, learning_rate_factor, warmup_length
from worked.examples import EXAMPLES


def test_importing_the_rule_loads_no_torch() -> None:
    code = "import sys, tutti.optim.learning_rate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("case", EXAMPLES["lr_linear"]["cases"], ids=lambda case: str(case["global_batch"]))
def test_linear_rule_of_the_tutorial(case: dict[str, float]) -> None:
    """eta = 0.1 k n / 256 for k workers of n samples each."""
    rule = LRRule(base_lr=0.1, base_batch_size=256)
    batch = int(case["k"] * case["n"])
    assert batch == case["global_batch"]
    assert learning_rate(rule, 7.0, 0, global_batch_size=batch, steps_per_epoch=None) == pytest.approx(case["eta"])


def test_square_root_rule_of_the_tutorial() -> None:
    cases = EXAMPLES["lr_sqrt"]["derived_cases"]
    rule = LRRule(base_lr=cases[0]["eta"], base_batch_size=cases[0]["batch"], scale="sqrt")
    for case in cases:
        rate = learning_rate(rule, 1.0, 0, global_batch_size=case["batch"], steps_per_epoch=None)
        assert rate == pytest.approx(case["eta"])


def _by_loop(rule: LRRule, base: float, target: float, start: float, steps: int, total: int) -> list[float]:
    """The rate of every step by adding the same increment, as a training loop would keep it."""
    rates, rate = [], start
    for step in range(total):
        rates.append(rate if step < steps else target)
        if rule.warmup == "gradual":
            rate += (target - start) / steps
    return rates


RULES = [
    (LRRule(base_lr=0.1, base_batch_size=256), 0.1, 3.2, 3.2, 0),
    (LRRule(base_batch_size=256, warmup="gradual", warmup_steps=7), 0.1, 3.2, 0.1, 7),
    (LRRule(base_lr=0.1, base_batch_size=256, warmup="gradual", warmup_epochs=1.5), 0.1, 3.2, 0.1, 15),
    (LRRule(base_lr=0.1, base_batch_size=256, warmup="constant", warmup_steps=7), 0.1, 3.2, 0.1, 7),
    (LRRule(base_batch_size=512, scale="sqrt", warmup="gradual", warmup_epochs=2), 0.1, 0.4, 0.1, 20),
    (LRRule(scale="none", warmup="gradual", warmup_steps=9), 0.1, 0.1, 0.0, 9),
    (
        LRRule(scale="none", warmup="constant", warmup_steps=3, warmup_start_lr=0.02),
        0.1,
        0.1,
        0.02,
        3,
    ),
    # a smaller batch than the base: the warm-up never starts above its target
    (LRRule(base_batch_size=2**14, warmup="gradual", warmup_steps=5), 0.1, 0.05, 0.05, 5),
]


@pytest.mark.parametrize(("rule", "base", "target", "start", "steps"), RULES)
def test_closed_form_equals_a_loop_at_every_step(
    rule: LRRule, base: float, target: float, start: float, steps: int
) -> None:
    batch, steps_per_epoch, total = 8192, 10, 40
    assert warmup_length(rule, steps_per_epoch) == steps
    expected = _by_loop(rule, base, target, start, steps, total)
    for step in range(total):
        rate = learning_rate(rule, 0.1, step, global_batch_size=batch, steps_per_epoch=steps_per_epoch)
        assert rate == pytest.approx(expected[step], rel=1e-12, abs=1e-15), step
        scaled = learning_rate_factor(rule, 0.1, step, global_batch_size=batch, steps_per_epoch=steps_per_epoch)
        assert scaled * 0.1 == pytest.approx(expected[step], rel=1e-12, abs=1e-15), step


def test_a_resumed_run_goes_on_with_the_same_rates() -> None:
    """Nothing but the step's number enters: a run resumed at any step has the rest of the sequence."""
    for rule, *_ in RULES:
        rates = [learning_rate(rule, 0.1, s, global_batch_size=8192, steps_per_epoch=10) for s in range(30)]
        for resumed_at in (0, 3, 8, 29):
            again = LRRule(**{name: getattr(rule, name) for name in LRRule.__dataclass_fields__})
            rest = [
                learning_rate(again, 0.1, s, global_batch_size=8192, steps_per_epoch=10) for s in range(resumed_at, 30)
            ]
            assert rest == rates[resumed_at:]


batches = st.integers(1, 10**6)
positive = st.floats(1e-8, 1e3)


@given(positive, batches, batches, st.sampled_from(["linear", "sqrt", "none"]), st.integers(1, 5000))
def test_gradual_warmup_rises_and_ends_exactly_at_the_target(
    base: float, base_batch: int, batch: int, scale: str, steps: int
) -> None:
    rule = LRRule(base_lr=base, base_batch_size=base_batch, scale=scale, warmup="gradual", warmup_steps=steps)  # type: ignore[arg-type]
    plain = LRRule(base_lr=base, base_batch_size=base_batch, scale=scale)  # type: ignore[arg-type]
    target = learning_rate(plain, 1.0, 0, global_batch_size=batch, steps_per_epoch=None)
    shown = sorted({0, 1, steps // 3, steps // 2, steps - 2, steps - 1, steps, steps + 1} - {-1})
    rates = [learning_rate(rule, 1.0, step, global_batch_size=batch, steps_per_epoch=None) for step in shown]
    assert rates == sorted(rates)
    assert rates[0] == (0.0 if scale == "none" else min(base, target))
    assert rates[-1] == rates[-2] == target


@given(positive, batches, st.integers(1, 64), st.integers(0, 100))
def test_linear_and_square_root_scale_as_named(base: float, batch: int, k: int, step: int) -> None:
    for scale, expected in (("linear", k), ("sqrt", math.sqrt(k)), ("none", 1.0)):
        rule = LRRule(base_lr=base, base_batch_size=batch, scale=scale)  # type: ignore[arg-type]
        rate = learning_rate(rule, 1.0, step, global_batch_size=k * batch, steps_per_epoch=None)
        assert rate == pytest.approx(base * expected)


@given(positive, positive, st.integers(0, 40))
def test_without_base_lr_the_factor_does_not_depend_on_the_optimizers_rate(a: float, b: float, step: int) -> None:
    rule = LRRule(base_batch_size=64, warmup="gradual", warmup_steps=20)
    factors = [learning_rate_factor(rule, rate, step, global_batch_size=512, steps_per_epoch=None) for rate in (a, b)]
    assert factors[0] == pytest.approx(factors[1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "base_batch_size is missing"),
        ({"base_batch_size": 0}, "base_batch_size = 0"),
        ({"base_batch_size": 64.0}, "base_batch_size = 64.0"),
        ({"base_batch_size": 64, "base_lr": 0.0}, "base_lr = 0.0"),
        ({"base_batch_size": 64, "base_lr": math.nan}, "base_lr = nan"),
        ({"base_batch_size": 64, "scale": "cubic"}, "use one of 'none', 'linear', 'sqrt'"),
        ({"base_batch_size": 64, "warmup": "slow"}, "use one of 'none', 'constant', 'gradual'"),
        ({"base_batch_size": 64, "warmup": "gradual"}, "neither is given: give one"),
        (
            {"base_batch_size": 64, "warmup": "gradual", "warmup_steps": 3, "warmup_epochs": 1},
            "both are given: give one",
        ),
        ({"base_batch_size": 64, "warmup_steps": 3}, "set warmup to"),
        ({"base_batch_size": 64, "warmup_start_lr": 0.1}, "set warmup to"),
        ({"base_batch_size": 64, "warmup": "gradual", "warmup_steps": 0}, "warmup_steps = 0"),
        ({"base_batch_size": 64, "warmup": "gradual", "warmup_epochs": -1}, "warmup_epochs = -1"),
        ({"scale": "none", "warmup": "constant", "warmup_steps": 3}, "give warmup_start_lr"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match="LRRule") as caught:
        LRRule(**fields)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_epochs_of_unknown_length_and_a_rate_of_zero_are_refused() -> None:
    rule = LRRule(base_batch_size=64, warmup="gradual", warmup_epochs=2)
    with pytest.raises(PlanError, match="give warmup_steps instead"):
        learning_rate(rule, 0.1, 0, global_batch_size=64, steps_per_epoch=None)
    with pytest.raises(PlanError, match="a rate above 0"):
        learning_rate_factor(rule, 0.0, 0, global_batch_size=64, steps_per_epoch=3)
