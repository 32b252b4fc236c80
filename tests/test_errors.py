"""The error tree: one base, an exit code each, and a public list that is complete."""

import inspect

import pytest

from tutti import errors

KINDS = [value for value in vars(errors).values() if inspect.isclass(value)]


def test_the_list_is_complete_and_sorted() -> None:
    assert errors.__all__ == sorted(kind.__name__ for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_tuttis_and_has_an_exit_code_and_a_promise(kind: type[errors.TuttiError]) -> None:
    assert issubclass(kind, errors.TuttiError)
    assert kind.exit_code in (1, 2)
    assert kind.__doc__


def test_exit_codes_part_user_input_from_what_happened_in_a_run() -> None:
    happened = {kind.__name__ for kind in KINDS if kind.exit_code == 1}
    assert happened == {"CheckpointError", "TrainingError"}
