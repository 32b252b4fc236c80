"""Signals of an exchange that this rank waits for."""

from tutti.comm.team import Team


class Expected:
    """Signals of one kind (READY, DONE) in one slot, `missing` of them: at first one of each other rank."""

    __slots__ = ("_kind", "_slot", "_team", "missing")

    def __init__(self, team: Team, slot: int, kind: int) -> None:
        self._team, self._slot, self._kind = team, slot, kind
        self.missing = team.size - 1

    def here(self) -> bool:
        """Whether all have come, without waiting."""
        while self.missing and self._team.take(self._slot, self._kind, self._team.rank):
            self.missing -= 1
        return not self.missing

    def wait(self) -> None:
        """Return when all have come. Raises RuntimeError when a rank has ended or does not come in time."""
        while self.missing:
            self._team.wait(self._slot, self._kind)
            self.missing -= 1
