"""Ranks that step alone under 0/1 Adam and agree now and then, on ways that travel in one bit (optim/zero_one.py)."""

import torch

from tutti.config.compression import Compression
from tutti.config.zero_one import local_updates
from tutti.local_sgd.apart import Apart
from tutti.local_sgd.coded import CodedSums
from tutti.local_sgd.measure import from_mean
from tutti.local_sgd.vectors import Flats, Replicas, Vectors
from tutti.optim.zero_one import zero_one_of
from tutti.trainer.run_state import Run


class ZeroOneApart(Apart):
    """Synchronous until the second moment stands. From then on ranks agree after `local_updates`; what one bit lost of
    their ways is kept back and sent the next time.
    """

    together = True  # a momentum is a way by the rates gone on it: these must be the same on all ranks

    def __init__(self, replicas: Replicas, how: Compression) -> None:
        super().__init__(replicas, 1)
        self.how, self.counts["agreed"] = how, 0
        self._sums: CodedSums | None = None

    def begin(self, run: Run) -> None:
        self.rule = zero_one_of(run.optimizers[0])
        if self.rule.stands:
            super().begin(run)

    def updated(self, run: Run) -> None:
        if self.apart:
            super().updated(run)
        elif self.rule.stands:
            super().begin(run)

    def restart(self) -> None:
        self.rule.rebase()
        self._sums = CodedSums(self.replicas, self.how, self._ways()) if self.replicas.size > 1 else None
        self._hold()

    def exchange(self, run: Run) -> None:
        settings = self.how.settings
        due = local_updates(self.counts["agreed"], int(settings["local_steps"]), int(settings["longest"]))
        if self.counts["since"] < due:
            return
        own, ways = self.vectors.read(), self._ways()
        flats = ways.read()
        torch._foreach_div_(flats, float(self.replicas.size))
        if self._sums is not None:
            self._sums.sum(flats)
        ways.write(flats)
        self.rule.agree()
        self.disagreement = from_mean(own, self.vectors.read(), self.replicas)
        self.buffers.agree()
        self._hold()
        self.counts["agreed"] += 1
        self.counts["since"], self.staleness, self.equal = 0, 0, True

    def ending(self) -> Flats:
        return self.replicas.mean(self.vectors.read())

    def _ways(self) -> Vectors:
        return Vectors((str(place), state["way"]) for place, (_, _, state) in enumerate(self.rule.learned()))

    def _hold(self) -> None:
        """What is kept back, for checkpoints."""
        self.held = {} if self._sums is None else self._sums.held()
