"""The base of all modes in which replicas differ: their vectors, the averaged model, buffers, optimizer state and
resuming."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.local_sgd.consistency import Consistency, ReplicaState
from tutti.local_sgd.replica_group import FlatTensors, FlatVectors, ReplicaGroup
from tutti.parallel.parallel_model import ParallelModel
from tutti.parallel.saved_values import pack_scalar, parse_dtype, unpack_scalar


class DivergedReplicas(Consistency):
    """Replicas that make updates of their own and exchange parameters every `period` updates.

    Running statistics are averaged whenever replicas exchange; batch statistics are those of a replica's own samples.

    Attributes:
        vectors: the trained parameters.
        counts: the mode's counters, by name, saved in checkpoints.
        saved_vectors: the mode's vectors, by name, saved in checkpoints.
        staleness: updates made since what the replica last took in from the others was new.
        equal: whether all replicas have the same parameters.
        disagreement: distances from the mean at the last exchange.
    """

    def __init__(self, replicas: ReplicaGroup, period: int) -> None:
        self.replicas, self.period = replicas, period
        self.counts = {"since": 0}
        self.saved_vectors: dict[str, FlatVectors] = {}
        self.equal = True
        self.staleness = 0
        self.disagreement: dict[str, float | int] | None = None
        self._trained: list[nn.Parameter] = []
        self._restored = (FlatTensors(()), FlatTensors(()))

    @abstractmethod
    def restart(self) -> None:
        """All replicas have the same parameters: go on from there, with nothing in flight."""

    @abstractmethod
    def exchange(self, parallel: ParallelModel) -> None:
        """An update was made, `counts["since"]` since the last exchange began: exchange if it is time."""

    @abstractmethod
    def final_parameters(self) -> FlatVectors:
        """The parameters that all ranks would end with now; changes nothing. Collective."""

    def begin(self, parallel: ParallelModel, step: int) -> None:
        """From here on replicas may differ."""
        self.diverged, self.gradient_scale = True, float(self.replicas.size)
        parallel.scope.world_size, parallel.scope.group, parallel.scope.diverged = 1, None, True
        parallel.replica.diverged_axes = ("replicate",)
        parallel.replica.rebuild_buckets(None, [])
        self.buffers = ReplicaBuffers(parallel.model, self.replicas)
        self._take(parallel)
        self.restart()

    def norm_squared(self, parallel: ParallelModel, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        if not self.diverged:
            return super().norm_squared(parallel, named)
        squares = [_values(gradient).double().square().sum() for _, gradient in named]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def updated(self, parallel: ParallelModel, step: int) -> None:
        self.disagreement = None
        if parallel.replica.parameters is not self._trained:
            self._retrain(parallel)
            return
        self.counts["since"] += 1
        self.staleness += 1
        self.equal = False
        self.exchange(parallel)

    def finish(self, parallel: ParallelModel) -> None:
        if self.diverged and not self.equal:
            self.vectors.write(self.final_parameters())
            self.buffers.agree()
            self._alike()

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        if not self.diverged or (self.equal and not saving):
            yield ReplicaState()
            return
        numbers, counters = self.buffers.moved()
        mine, values, counts = self.vectors.read(), numbers.read(), counters.read()
        states, plain = copy_optimizer_states(parallel) if saving else ({}, [])
        kept = ReplicaState(
            {**_flat({"parameters": mine, "numbers": values, "counters": counts, **self.saved_vectors}), **states},
            {
                "trained": self.vectors.names,
                "saved_vectors": sorted(self.saved_vectors),
                "buffers": [*numbers.names, *counters.names],
                "states": plain,
                "counts": dict(self.counts),
                "staleness": self.staleness,
                "equal": self.equal,
            },
        )
        if not self.equal:
            self.vectors.write(self.final_parameters())
            mean, largest = self.buffers.agreed(numbers.read(), counts)
            numbers.write(mean)
            counters.write(largest)
        if saving:
            average_optimizer_states(parallel, self.replicas)
        try:
            yield kept
        finally:
            self.vectors.write(mine)
            numbers.write(values)
            counters.write(counts)
            if saving:
                restore_optimizer_states(parallel, states)

    def resume(self, parallel: ParallelModel, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        alike = values.get("trained") == self.vectors.names and values.get("saved_vectors") == sorted(
            self.saved_vectors
        )
        if not self.diverged or not alike:
            return {}
        self.counts.update(values["counts"])
        self.staleness, self.equal = values["staleness"], values["equal"]
        numbers, counters = self._restored = self.buffers.called(values["buffers"])
        vectors = {"parameters": self.vectors, "numbers": numbers, "counters": counters}
        flats = {name: one.read() for name, one in vectors.items()}
        return {**_flat({**flats, **self.saved_vectors}), **make_optimizer_states(parallel, values["states"])}

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        self.vectors.write(_flats("parameters", tensors))
        self._restored[0].write(_flats("numbers", tensors))
        self._restored[1].write(_flats("counters", tensors))

    def row(self) -> dict[str, Any]:
        if not self.diverged:
            return {}
        return {"replicas": {"staleness": self.staleness, "disagreement": self.disagreement}}

    def _take(self, parallel: ParallelModel) -> None:
        """Hold the parameters that are trained now."""
        self._trained = parallel.replica.parameters
        self.vectors = FlatTensors(_named(parallel, self._trained).items())

    def _retrain(self, parallel: ParallelModel) -> None:
        """The script has frozen or unfrozen parameters: replicas become equal in all of them and go on from there."""
        before = _named(parallel, self._trained)
        self._take(parallel)
        both = FlatTensors({**before, **_named(parallel, self._trained)}.items())
        self.restart()
        both.write(self.replicas.mean(both.read()))
        self.buffers.agree()
        self.saved_vectors = {}
        self._alike()

    def _alike(self) -> None:
        self.equal, self.staleness, self.counts["since"] = True, 0, 0
        self.restart()


def _named(parallel: ParallelModel, parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    names = {parameter: name for name, parameter in parallel.model.named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _flat(named: dict[str, FlatVectors]) -> dict[str, torch.Tensor]:
    return {f"{name}/{place}": flat for name, flats in named.items() for place, flat in enumerate(flats)}


def _flats(name: str, tensors: dict[str, torch.Tensor]) -> FlatVectors:
    count = sum(one.rpartition("/")[0] == name for one in tensors)
    return [tensors[f"{name}/{place}"] for place in range(count)]


class ReplicaBuffers:
    """The buffers of a model's state_dict that training changes (running statistics, counters), made equal at
    exchanges.

    Buffers that no replica has changed are left out: they are equal already, and may hold infinities (masks). Replicas
    agree on the mean of floating-point buffers and on the largest of counters.
    """

    def __init__(self, model: nn.Module, replicas: ReplicaGroup) -> None:
        self._model, self._replicas = model, replicas
        tracked = set(_tracked(model))
        self._seen = {name: (one, one._version) for name, one in self._now().items() if name not in tracked}

    def moved(self) -> tuple[FlatTensors, FlatTensors]:
        """(floating-point, counters) that some replica has changed. Collective where the model has any buffers."""
        now = self._now()
        flags = [name not in self._seen or _changed(tensor, *self._seen[name]) for name, tensor in now.items()]
        if not flags:
            return FlatTensors(()), FlatTensors(())
        device = next(iter(now.values())).device
        anywhere = self._replicas.gather(torch.tensor(flags, dtype=torch.uint8, device=device)).amax(0).tolist()
        return self.called([name for name, flag in zip(now, anywhere, strict=True) if flag])

    def called(self, names: list[str]) -> tuple[FlatTensors, FlatTensors]:
        """(floating-point, counters) of these names, which count as changed from here on."""
        now = self._now()
        for name in names:
            self._seen.pop(name, None)
        numbers = FlatTensors((name, now[name]) for name in names if now[name].is_floating_point())
        return numbers, FlatTensors((name, now[name]) for name in names if not now[name].is_floating_point())

    def agreed(self, numbers: FlatVectors, counters: FlatVectors) -> tuple[FlatVectors, FlatVectors]:
        """What replicas agree on, from values that `moved` read. Collective."""
        return self._replicas.mean(numbers), [self._replicas.gather(flat).amax(0) for flat in counters]

    def agree(self) -> None:
        """Make changed buffers equal. Collective."""
        numbers, counters = self.moved()
        mean, largest = self.agreed(numbers.read(), counters.read())
        numbers.write(mean)
        counters.write(largest)

    def _now(self) -> dict[str, torch.Tensor]:
        persistent = set(self._model.state_dict(keep_vars=True))
        named = ((name, tensor) for name, tensor in self._model.named_buffers() if name in persistent)
        return {name: tensor for name, tensor in named if not tensor.is_complex()}


def _tracked(model: nn.Module) -> Iterator[str]:
    """Running statistics of torch's own norms, whose kernels write to them without a version."""
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            yield from (f"{prefix}.{name}" if prefix else name for name in module._buffers)


def _changed(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether a buffer is another tensor than at the beginning, or has been written to."""
    return tensor is not before or tensor._version != version


def shared_optimizer_state(parallel: ParallelModel) -> FlatTensors:
    """Floating-point state tensors that every replica has, by "optimizer-0/name/key". Collective.

    A replica has no state of a parameter that its samples never used.
    """
    mine = {name: value for name, value in _tensors(parallel).items() if value.is_floating_point()}
    everyone = parallel.world.gather([(name, tuple(value.shape)) for name, value in mine.items()])
    common = set(everyone[0]).intersection(*everyone[1:])
    return FlatTensors((name, mine[name]) for name, shape in everyone[0] if (name, shape) in common)


def average_optimizer_states(parallel: ParallelModel, replicas: ReplicaGroup) -> None:
    """Set state tensors to their mean over the replicas. Collective."""
    vectors = shared_optimizer_state(parallel)
    vectors.write(replicas.mean(vectors.read()))


def copy_optimizer_states(parallel: ParallelModel) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """Copies of all state tensors, and plain values for each entry: [optimizer, name, key, value or shape]."""
    copies = {name: value.detach().clone() for name, value in _tensors(parallel).items()}
    plain: list[list[Any]] = []
    for number, name, _, key, value in _entries(parallel):
        tensor = copies.get(_state_key(number, name, key))
        what = (
            pack_scalar(value)
            if tensor is None
            else ["shaped", str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
        )
        plain.append([number, name, key, what])
    return copies, plain


def restore_optimizer_states(parallel: ParallelModel, copies: dict[str, torch.Tensor]) -> None:
    """Set state tensors to their copies."""
    for name, value in _tensors(parallel).items():
        value.copy_(copies[name])


def make_optimizer_states(parallel: ParallelModel, plain: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Give the optimizers the entries of `copy_optimizer_states`; returns the tensors to be filled."""
    parameters = {(number, name): parameter for number, name, parameter in _parameters(parallel)}
    before = {_state_key(number, name, key): value for number, name, _, key, value in _entries(parallel)}
    for number, _, parameter in _parameters(parallel):
        parallel.optimizers[number].state.pop(parameter, None)
    tensors: dict[str, torch.Tensor] = {}
    for number, name, key, what in plain:
        parameter, called = parameters[number, name], _state_key(number, name, key)
        if what[0] == "shaped":
            value: Any = torch.empty(what[2], dtype=parse_dtype(what[1]), device=parameter.device)
            tensors[called] = value
        else:
            value, like = unpack_scalar(what), before.get(called)
            value = value.to(like.device) if isinstance(like, torch.Tensor) else value
        parallel.optimizers[number].state[parameter][key] = value
    return tensors


def _parameters(parallel: ParallelModel) -> list[tuple[int, str, nn.Parameter]]:
    names = parallel.layout.state_names(parallel.model, parallel.optimizers)
    return [(number, name, parameter) for number, some in names.items() for parameter, name in some.items()]


def _entries(parallel: ParallelModel) -> list[tuple[int, str, nn.Parameter, str, Any]]:
    return [
        (number, name, parameter, key, value)
        for number, name, parameter in _parameters(parallel)
        for key, value in parallel.optimizers[number].state.get(parameter, {}).items()
    ]


def _tensors(parallel: ParallelModel) -> dict[str, torch.Tensor]:
    return {
        _state_key(number, name, key): value
        for number, name, _, key, value in _entries(parallel)
        if isinstance(value, torch.Tensor) and value.numel() > 1
    }


def _state_key(number: int, name: str, key: str) -> str:
    return f"optimizer-{number}/{name}/{key}"
