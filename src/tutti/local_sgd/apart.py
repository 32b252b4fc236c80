"""What all modes share in which replicas differ: their vectors, the model that is shown, how runs end and resume."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tutti.local_sgd.buffers import Buffers
from tutti.local_sgd.mode import Consistency, Kept
from tutti.local_sgd.states import average_states, make_states, own_states, restore_states
from tutti.local_sgd.vectors import Flats, Replicas, Vectors
from tutti.trainer.run_state import Run


class Apart(Consistency):
    """Replicas that make updates of their own and exchange parameters every `period` updates.

    Running statistics are averaged whenever replicas exchange; batch statistics are those of a replica's own samples.
    `vectors`: the trained parameters; `counts` and `held`: the mode's own counters and vectors, by name, which a
    checkpoint has. `staleness`: updates made since what a replica last took in of the others was new.
    """

    def __init__(self, replicas: Replicas, period: int) -> None:
        self.replicas, self.period = replicas, period
        self.counts = {"since": 0}
        self.held: dict[str, Flats] = {}
        self.equal = True
        self.staleness = 0
        self.disagreement: dict[str, float | int] | None = None
        self._trained: list[nn.Parameter] = []
        self._restored = (Vectors(()), Vectors(()))

    @abstractmethod
    def restart(self) -> None:
        """All replicas have the same parameters: go on from there, with nothing under way."""

    @abstractmethod
    def exchange(self, run: Run) -> None:
        """An update was made, `counts["since"]` since the last exchange began: exchange if it is time."""

    @abstractmethod
    def ending(self) -> Flats:
        """The parameters that all ranks would end with now; changes nothing. Collective."""

    def begin(self, run: Run) -> None:
        """From here on replicas may differ."""
        self.apart, self.gain = True, float(self.replicas.size)
        run.scope.world_size, run.scope.group, run.scope.apart = 1, None, True
        run.replica.apart = ("replicate",)
        run.replica.restore(None, [])
        self.buffers = Buffers(run.model, self.replicas)
        self._take(run)
        self.restart()

    def norm_squared(self, run: Run, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        if not self.apart:
            return super().norm_squared(run, named)
        squares = [_values(gradient).double().square().sum() for _, gradient in named]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def updated(self, run: Run) -> None:
        self.disagreement = None
        if run.replica.parameters is not self._trained:
            self._retrain(run)
            return
        self.counts["since"] += 1
        self.staleness += 1
        self.equal = False
        self.exchange(run)

    def finish(self, run: Run) -> None:
        if self.apart and not self.equal:
            self.vectors.write(self.ending())
            self.buffers.agree()
            self._alike()

    @contextmanager
    def shown(self, run: Run, *, saving: bool = False) -> Iterator[Kept]:
        if not self.apart or (self.equal and not saving):
            yield Kept()
            return
        numbers, counters = self.buffers.moved()
        mine, values, counts = self.vectors.read(), numbers.read(), counters.read()
        states, plain = own_states(run) if saving else ({}, [])
        kept = Kept(
            {**_flat({"parameters": mine, "numbers": values, "counters": counts, **self.held}), **states},
            {
                "trained": self.vectors.names,
                "held": sorted(self.held),
                "buffers": [*numbers.names, *counters.names],
                "states": plain,
                "counts": dict(self.counts),
                "staleness": self.staleness,
                "equal": self.equal,
            },
        )
        if not self.equal:
            self.vectors.write(self.ending())
            mean, largest = self.buffers.agreed(numbers.read(), counts)
            numbers.write(mean)
            counters.write(largest)
        if saving:
            average_states(run, self.replicas)
        try:
            yield kept
        finally:
            self.vectors.write(mine)
            numbers.write(values)
            counters.write(counts)
            if saving:
                restore_states(run, states)

    def resume(self, run: Run, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        alike = values.get("trained") == self.vectors.names and values.get("held", sorted(self.held)) == sorted(
            self.held
        )
        if not self.apart or not alike:
            return {}
        self.counts.update(values["counts"])
        self.staleness, self.equal = values["staleness"], values["equal"]
        numbers, counters = self._restored = self.buffers.called(values["buffers"])
        vectors = {"parameters": self.vectors, "numbers": numbers, "counters": counters}
        flats = {name: one.read() for name, one in vectors.items()}
        return {**_flat({**flats, **self.held}), **make_states(run, values["states"])}

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        self.vectors.write(_flats("parameters", tensors))
        self._restored[0].write(_flats("numbers", tensors))
        self._restored[1].write(_flats("counters", tensors))

    def row(self) -> dict[str, Any]:
        if not self.apart:
            return {}
        return {"replicas": {"staleness": self.staleness, "disagreement": self.disagreement}}

    def _take(self, run: Run) -> None:
        """The parameters that are trained now."""
        self._trained = run.replica.parameters
        self.vectors = Vectors(_named(run, self._trained).items())

    def _retrain(self, run: Run) -> None:
        """The script has frozen or unfrozen parameters: replicas become equal in all of them and go on from there."""
        before = _named(run, self._trained)
        self._take(run)
        both = Vectors({**before, **_named(run, self._trained)}.items())
        self.restart()
        both.write(self.replicas.mean(both.read()))
        self.buffers.agree()
        self.held = {}
        self._alike()

    def _alike(self) -> None:
        self.equal, self.staleness, self.counts["since"] = True, 0, 0
        self.restart()


def _named(run: Run, parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _flat(named: dict[str, Flats]) -> dict[str, torch.Tensor]:
    return {f"{name}/{place}": flat for name, flats in named.items() for place, flat in enumerate(flats)}


def _flats(name: str, tensors: dict[str, torch.Tensor]) -> Flats:
    count = sum(one.rpartition("/")[0] == name for one in tensors)
    return [tensors[f"{name}/{place}"] for place in range(count)]
