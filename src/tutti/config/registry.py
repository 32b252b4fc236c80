"""Registries of what a plan may name: one entry per name, extensible from outside the package.

An installed package registers its entries in a module that it announces as an entry point of the group `tutti.plugins`.
That module is imported when a plan names something that is not registered yet. A script may also import the module
itself before it calls tutti.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeVar

from tutti.errors import PlanError

Value = bool | int | float | str
"""The types that a parameter of an entry may have in a plan file."""

REQUIRED: Final = None
"""The default of a parameter that the user must give."""

PLUGIN_GROUP = "tutti.plugins"
"""Group of entry points whose modules register codecs, consistency modes and refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a codec or of a consistency mode.

    Attributes:
        default: value where the plan gives none; `REQUIRED` if the plan must give one.
        allowed: (value) -> whether it is allowed.
        requirement: what is allowed, to follow "name = value; " in an error message.
    """

    default: Value | None = REQUIRED
    allowed: Callable[[Any], bool] = lambda value: True
    requirement: str = ""

    def check(self, name: str, value: Value) -> None:
        """Raise PlanError if `value` is not allowed."""
        if not self.allowed(value):
            raise PlanError(f"{name} = {value}; {self.requirement}")


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


class Registry(Mapping[str, Entry]):
    """Entries by the name that plan files and the command line use.

    Args:
        noun: what an entry is, for error messages.
        field: the plan's field that names an entry, for error messages.
    """

    def __init__(self, noun: str, field: str) -> None:
        self._noun, self._field = noun, field
        self._entries: dict[str, Entry] = {}
        self._plugins_loaded = False

    def register(self, entry: Entry) -> Entry:
        """Add an entry and return it.

        Raises:
            PlanError: the name is already registered.
        """
        if entry.name in self._entries:
            raise PlanError(f"a {self._noun} {entry.name!r} is already registered; choose another name")
        self._entries[entry.name] = entry
        return entry

    def remove(self, name: str) -> None:
        """Remove an entry."""
        del self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            self._load_plugins()
        if name not in self._entries:
            raise PlanError(
                f"{self._field} = {name!r}: there is no such {self._noun}; choose from {', '.join(self._entries)}"
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def loaded(self) -> list[Entry]:
        """Return all entries, including those of installed packages."""
        self._load_plugins()
        return list(self._entries.values())

    def _load_plugins(self) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            for point in entry_points(group=PLUGIN_GROUP):
                point.load()


def load_factory(factory: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory, imported if it is given as "module:name", so that registering an entry does not load torch."""
    if callable(factory):
        return factory
    module, _, name = factory.partition(":")
    imported: Callable[..., Any] = getattr(import_module(module), name)
    return imported
