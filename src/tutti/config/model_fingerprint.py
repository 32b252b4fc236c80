"""The model a plan was made for, as the plan records it, and how another model differs from it."""

from collections.abc import Mapping

_TOLD = 4


def merge_siblings(entries: Mapping[str, str]) -> dict[str, str]:
    """Merge equal numbered siblings into one entry, such as "layers.0-11.query".

    Args:
        entries: description of each module by its dotted name.
    """
    merged: dict[str, str] = {}
    runs: dict[tuple[tuple[str, ...], str], list[tuple[int, ...]]] = {}
    for name, words in entries.items():
        parts = name.split(".")
        shape = tuple("#" if part.isdecimal() else part for part in parts)
        runs.setdefault((shape, words), []).append(tuple(int(part) for part in parts if part.isdecimal()))
    for (shape, words), places in runs.items():
        for name in _names(shape, places):
            merged[name] = words
    return merged


def describe_module(kind: str, parameters: int) -> str:
    """Describe a module by its class and number of parameters."""
    return f"{kind} {parameters:,}"


def differences(made_for: Mapping[str, str], now: Mapping[str, str], unsure: frozenset[str] = frozenset()) -> str:
    """Describe which modules are new, gone or changed.

    Args:
        made_for: the entries that the plan records.
        now: the entries of the model at hand, one per module.
        unsure: names of modules that are not compared.

    Returns:
        A sentence part; empty where nothing differs or the plan records no model.
    """
    if not made_for:
        return ""
    before = {name: words for name, words in _spread(made_for).items() if name not in unsure}
    now = {name: words for name, words in now.items() if name not in unsure}
    new, gone = [name for name in now if name not in before], [name for name in before if name not in now]
    other = [
        f"{name} ({before[name]} then, {now[name]} now)" for name in now if name in before and before[name] != now[name]
    ]
    parts = [
        f"{_listed(_roots(names, set(keep)))} {_verb(_roots(names, set(keep)), verb)}"
        for names, keep, verb in ((new, before, "new"), (gone, now, "gone"))
        if names
    ]
    parts += [f"{_listed(other)} {_verb(other, 'different')}"] if other else []
    return "; ".join(parts)


def _names(shape: tuple[str, ...], places: list[tuple[int, ...]]) -> list[str]:
    """Merged names: consecutive values of the first number form a range where everything else is equal."""
    if not places[0]:
        return [".".join(shape)]
    rest: dict[tuple[int, ...], list[int]] = {}
    for first, *others in places:
        rest.setdefault(tuple(others), []).append(first)
    names = []
    for fixed, firsts in rest.items():
        ordered = sorted(firsts)
        start = 0
        for end in range(1, len(ordered) + 1):
            if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
                span = str(ordered[start]) if end - start == 1 else f"{ordered[start]}-{ordered[end - 1]}"
                numbers = iter([span, *map(str, fixed)])
                names.append(".".join(next(numbers) if part == "#" else part for part in shape))
                start = end
    return names


def _spread(stamped: Mapping[str, str]) -> dict[str, str]:
    """Expand merged names such as "layers.0-11.query" to one entry per module."""
    entries = {}
    for name, words in stamped.items():
        parts = name.split(".")
        span = next(((at, part) for at, part in enumerate(parts) if _is_span(part)), None)
        if span is None:
            entries[name] = words
            continue
        at, text = span
        first, last = (int(number) for number in text.split("-"))
        for number in range(first, last + 1):
            entries[".".join([*parts[:at], str(number), *parts[at + 1 :]])] = words
    return entries


def _is_span(part: str) -> bool:
    first, dash, last = part.partition("-")
    return bool(dash) and first.isdecimal() and last.isdecimal()


def _roots(names: list[str], kept: set[str]) -> list[str]:
    """The outermost modules that contain only the given names: layers.12 instead of every module inside it."""
    roots: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        root = name
        for count in range(len(parts) - 1, 0, -1):
            candidate = ".".join(parts[:count])
            if any(other == candidate or other.startswith(candidate + ".") for other in kept):
                break
            root = candidate
        roots[root] = None
    return list(roots)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_TOLD])
    return shown + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


def _verb(names: list[str], words: str) -> str:
    return f"{'is' if len(names) == 1 else 'are'} {words}"
