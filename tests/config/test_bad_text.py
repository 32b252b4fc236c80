"""Texts that are no plan, cluster or header are refused in one sentence, whatever is in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.plan import Plan
from tutti.config.run_folder import RunHeader
from tutti.errors import SpecError, TuttiError


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ('{"mesh": ' * 5000 + "1" + "}" * 5000, "is nested too deeply"),
        ('{"version": ' + "9" * 5000 + "}", "has a number of too many digits"),
    ],
)
def test_unusable_text(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence) as refused:
        serialization.loads(Plan, text)
    assert len(str(refused.value)) < 600


def test_unusable_names() -> None:
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(SpecError, match="cannot be read"):
            serialization.load(Plan, Path(name))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLAN = {"version", "mesh", "batch", "sharding", "pipeline", "sync", "precision", "layout"}
CLUSTER = {"version", "name", "nodes", "links", "kind", "devices"}


@given(st.sampled_from((Plan, ClusterSpec, RunHeader)), st.data())
@settings(deadline=None, max_examples=200)
def test_any_json_is_read_or_refused(cls: Any, data: st.DataObject) -> None:
    fields = sorted(PLAN | CLUSTER)
    drawn = data.draw(st.dictionaries(st.sampled_from(fields) | st.text(max_size=4), values, max_size=5))
    refused: TuttiError | None = None
    try:
        serialization.loads(cls, json.dumps(drawn))
    except TuttiError as error:
        refused = error
    assert refused is None or refused.exit_code == 2
