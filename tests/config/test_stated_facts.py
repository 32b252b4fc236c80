"""What a user states for the report is checked when it is stated."""

import pytest

from tutti.config.stated_facts import check_facts
from tutti.errors import SpecError


def test_known_facts_and_own_notes_pass() -> None:
    facts = {
        "tuning.trials": 3,
        "data.start_state": "disk-warm",
        "quality.target": "test.accuracy=0.9",
        "weather": "fine",
    }
    assert check_facts(facts, "Job(facts=...)")["tuning.trials"] == "3"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"tuning.trial": 3}, "did you mean 'tuning.trials'"),
        ({"data.colour": "blue"}, "known are"),
        ({"scalling": "strong"}, "did you mean 'scaling'"),
        ({"tuning.trials": "many"}, "a number of 0 or more"),
        ({"data.start_state": "disk"}, "disk-cold or disk-warm or ram or generated"),
        ({"stop.rule": "lunch"}, "plateau"),
        ({"quality.target": "0.9"}, "NAME.METRIC=VALUE"),
        ({"data.native_shape": "large"}, "3x32x32"),
    ],
)
def test_what_no_rule_would_read_is_refused(facts: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("(", r"\(").replace("[", r"\[")):
        check_facts(facts, "Job(facts=...)")
