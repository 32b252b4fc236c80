"""Models named on the command line instead of a script: `llama --layers 80 --hidden 8192`, or `llama3-70b`."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from tutti.config.model import ModelSpec
from tutti.errors import SpecError


def named_model(target: Sequence[str]) -> ModelSpec | None:
    """Return the ModelSpec of a named architecture or preset with its sizes; None if the first word is no such name.

    A file of that name takes precedence.

    Args:
        target: the name, then options such as --layers 80.

    Raises:
        SpecError: the architecture lacks a size or cannot have it, or the word is neither a file nor a name but
            resembles one.
    """
    from tutti.profile.architectures import architecture, names

    if not target or Path(target[0]).exists():
        return None
    if target[0].lower() not in names():
        near = get_close_matches(target[0].lower(), names(), n=3)
        if near and not Path(target[0]).suffix:
            raise SpecError(
                f"{target[0]} is neither a script nor the name of a model; did you mean {' or '.join(near)}?"
            )
        return None
    return architecture(target[0], sizes(target[1:]))


def sizes(words: Sequence[str]) -> dict[str, str]:
    """Parse `--layers 80 --kv-heads=8 --tied` into {"layers": "80", "kv_heads": "8", "tied": "true"}.

    Raises:
        SpecError: a value without a name.
    """
    values: dict[str, str] = {}
    waiting = ""
    for word in words:
        if word.startswith("--"):
            if waiting:
                values[waiting] = "true"
            name, equals, value = word[2:].partition("=")
            waiting = "" if equals else name.replace("-", "_")
            if equals:
                values[name.replace("-", "_")] = value
        elif waiting:
            values[waiting], waiting = word, ""
        else:
            raise SpecError(f"{word!r} has no name before it; sizes of a named architecture are written --name value")
    if waiting:
        values[waiting] = "true"
    return values
