"""Numbers as people read them."""

import pytest

from tutti.config.run_report import Quantity
from tutti.errors import ReportError
from tutti.reporting.formatting import duration, higher_is_better, number, prefixed, show, signed_percent, split_unit
from tutti.reporting.quality_metrics import QualityTarget, parse_target


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-6, "3.20 µs"),
        (0.01051, "10.5 ms"),
        (6.917, "6.92 s"),
        (245, "4 min 05 s"),
        (8000, "2 h 13 min"),
        (-2, "-2 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_in_units() -> None:
    assert prefixed(36392, "B") == "36.4 kB"
    assert number(1.82857e10, "FLOP/s") == "18.3 GFLOP/s"
    assert number(0.824, "ratio") == "82.4 %"
    assert number(1.65, "x") == "1.65×"
    assert number(1, "ranks") == "1 rank"
    assert number(2, "ranks") == "2 ranks"
    assert number(0.1, "") == "0.1"
    assert number(25978, "") == "25,978"
    assert signed_percent(-0.0952) == "−9.5 %"
    assert signed_percent(1.49) == "+149 %"


def test_what_is_missing_is_said() -> None:
    assert show(Quantity(unit="s")) == "not recorded"
    assert split_unit(Quantity(value=245, unit="s", evidence="measured")) == ("4 min 05 s", "")
    assert split_unit(Quantity(value=2739, unit="samples/s", evidence="measured")) == ("2,739", "samples/s")


@pytest.mark.parametrize(
    ("metric", "up"),
    [
        ("accuracy", True),
        ("f1", True),
        ("loss", False),
        ("val_loss", False),
        ("word-error", False),
        ("perplexity", False),
        ("MAPE", False),
        ("sMAPE", False),
        ("top1_err", False),
        ("brier", False),
        ("edit_distance", False),
        ("bits_per_char", False),
        ("auc", True),
        ("bleu", True),
        ("cancer_recall", True),
    ],
)
def test_direction_of_a_metric(metric: str, up: bool) -> None:
    assert higher_is_better(metric) is up


def test_targets() -> None:
    assert parse_target("test.accuracy=0.9") == QualityTarget(name="test", metric="accuracy", value=0.9)
    assert parse_target("loss<=2") == QualityTarget(name=None, metric="loss", value=2.0)
    for text in ("accuracy", "=0.9", "test.accuracy=high", "test.accuracy=nan"):
        with pytest.raises(ReportError, match=r"NAME\.METRIC=VALUE"):
            parse_target(text)
