"""The base of all modes in which replicas differ.

It manages their vectors, the averaged model, buffers, optimizer state and resuming.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tutti.local_sgd.consistency import Consistency, ReplicaState
from tutti.local_sgd.replica_group import FlatTensors, FlatVectors, ReplicaGroup
from tutti.parallel.layout import local_tensors
from tutti.parallel.parallel_model import ParallelModel
from tutti.parallel.saved_values import pack_scalar, parse_dtype, unpack_scalar


class DivergedReplicas(Consistency):
    """Replicas that make updates of their own and exchange parameters every `period` updates.

    Running statistics are averaged whenever replicas exchange; batch statistics are those of a replica's own samples.

    Args:
        replicas: the group.
        period: updates between two exchanges.

    Attributes:
        vectors: the trained parameters.
        buffers: the model's buffers that training changes.
        counts: the mode's counters by name, saved in checkpoints. `updates_since` counts updates since the last
            restart; some modes also reset it at an exchange.
        saved_vectors: the mode's vectors by name, saved in checkpoints.
        equal: whether all replicas have the same parameters.
        staleness: updates this replica has made since the values it last received from the others were current.
        disagreement: relative distances of the replicas from their mean, if the last update measured them; else None.
    """

    def __init__(self, replicas: ReplicaGroup, period: int) -> None:
        self.replicas, self.period = replicas, period
        self.counts = {"updates_since": 0}
        self.saved_vectors: dict[str, FlatVectors] = {}
        self.equal = True
        self.staleness = 0
        self.disagreement: dict[str, float | int] | None = None
        self._trained: list[nn.Parameter] = []
        self._restored = (FlatTensors(()), FlatTensors(()))

    @abstractmethod
    def restart(self) -> None:
        """Begin again with no exchange in progress, after all replicas got the same parameters."""

    @abstractmethod
    def exchange(self, parallel: ParallelModel) -> None:
        """Exchange if an exchange is due. Called after every update that a replica makes."""

    @abstractmethod
    def final_parameters(self) -> FlatVectors:
        """Return the parameters that all ranks would have if training ended now; change nothing. Collective."""

    def begin(self, parallel: ParallelModel, step: int) -> None:
        """Let replicas diverge from now on."""
        self.diverged, self.gradient_scale = True, float(self.replicas.size)
        parallel.scope.world_size, parallel.scope.group, parallel.scope.diverged = 1, None, True
        parallel.replica.diverged_axes = ("replicate",)
        parallel.replica.rebuild_buckets(None, [])
        self.buffers = ReplicaBuffers(parallel.model, self.replicas)
        self._track_parameters(parallel)
        self.restart()

    def norm_squared(self, parallel: ParallelModel, named: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        if not self.diverged:
            return super().norm_squared(parallel, named)
        squares = [_values(gradient).double().square().sum() for _, gradient in named]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def updated(self, parallel: ParallelModel, step: int) -> None:
        self.disagreement = None
        if parallel.replica.parameters is not self._trained:
            self._change_trained(parallel)
            return
        self.counts["updates_since"] += 1
        self.staleness += 1
        self.equal = False
        self.exchange(parallel)

    def finish(self, parallel: ParallelModel) -> None:
        if self.diverged and not self.equal:
            self.vectors.write(self.final_parameters())
            self.buffers.agree()
            self._restart_equal()

    @contextmanager
    def averaged_model(self, parallel: ParallelModel, *, saving: bool = False) -> Iterator[ReplicaState]:
        if not self.diverged or (self.equal and not saving):
            yield ReplicaState()
            return
        numbers, counters = self.buffers.changed()
        local, values, counts = self.vectors.read(), numbers.read(), counters.read()
        states, plain = copy_optimizer_states(parallel) if saving else ({}, [])
        replica_state = ReplicaState(
            {**_flat({"parameters": local, "numbers": values, "counters": counts, **self.saved_vectors}), **states},
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
            mean, largest = self.buffers.consensus(numbers.read(), counts)
            numbers.write(mean)
            counters.write(largest)
        if saving:
            average_optimizer_states(parallel, self.replicas)
        try:
            yield replica_state
        finally:
            self.vectors.write(local)
            numbers.write(values)
            counters.write(counts)
            if saving:
                restore_optimizer_states(parallel, states)

    def resume(self, parallel: ParallelModel, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        matches = values.get("trained") == self.vectors.names and values.get("saved_vectors") == sorted(
            self.saved_vectors
        )
        if not self.diverged or not matches:
            return {}
        self.counts.update(values["counts"])
        self.staleness, self.equal = values["staleness"], values["equal"]
        numbers, counters = self._restored = self.buffers.select(values["buffers"])
        vectors = {"parameters": self.vectors, "numbers": numbers, "counters": counters}
        flats = {name: tensors.read() for name, tensors in vectors.items()}
        return {**_flat({**flats, **self.saved_vectors}), **make_optimizer_states(parallel, values["states"])}

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        self.vectors.write(_flats("parameters", tensors))
        self._restored[0].write(_flats("numbers", tensors))
        self._restored[1].write(_flats("counters", tensors))

    def row(self) -> dict[str, Any]:
        if not self.diverged:
            return {}
        return {"replicas": {"staleness": self.staleness, "disagreement": self.disagreement}}

    def _track_parameters(self, parallel: ParallelModel) -> None:
        """Read and write the parameters that are trained now."""
        self._trained = parallel.replica.parameters
        self.vectors = FlatTensors(_named(parallel, self._trained).items())

    def _change_trained(self, parallel: ParallelModel) -> None:
        """Make replicas equal and restart, after the script has frozen or unfrozen parameters."""
        before = _named(parallel, self._trained)
        self._track_parameters(parallel)
        both = FlatTensors({**before, **_named(parallel, self._trained)}.items())
        self.restart()
        both.write(self.replicas.mean(both.read()))
        self.buffers.agree()
        self.saved_vectors = {}
        self._restart_equal()

    def _restart_equal(self) -> None:
        """Restart after all replicas got the same parameters."""
        self.equal, self.staleness, self.counts["updates_since"] = True, 0, 0
        self.restart()


def _named(parallel: ParallelModel, parameters: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    names = {parameter: name for name, parameter in parallel.model.named_parameters()}
    return {names[parameter]: parameter for parameter in parameters}


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _flat(named: dict[str, FlatVectors]) -> dict[str, torch.Tensor]:
    """Return vectors as tensors with names like "parameters/0", as in checkpoints."""
    return {f"{name}/{index}": flat for name, flats in named.items() for index, flat in enumerate(flats)}


def _flats(name: str, tensors: dict[str, torch.Tensor]) -> FlatVectors:
    """Return the vectors called `name`, from tensors named by `_flat`."""
    count = sum(key.rpartition("/")[0] == name for key in tensors)
    return [tensors[f"{name}/{index}"] for index in range(count)]


class ReplicaBuffers:
    """The buffers of a model's state_dict that training changes, made equal at exchanges.

    Examples are running statistics and counters. Buffers that no replica has changed are left out: they are equal
    already, and may contain infinities (masks). Replicas agree on the mean of floating-point buffers, and on the
    maximum of counters.

    Args:
        model: the model.
        replicas: the group.
    """

    def __init__(self, model: nn.Module, replicas: ReplicaGroup) -> None:
        self._model, self._replicas = model, replicas
        tracked = set(_tracked(model))
        self._seen = {
            name: (tensor, tensor._version) for name, tensor in self._current().items() if name not in tracked
        }

    def changed(self) -> tuple[FlatTensors, FlatTensors]:
        """Find the buffers that some replica has changed. Collective if the model has any buffers.

        Returns:
            (floating-point buffers, counters).
        """
        current = self._current()
        flags = [name not in self._seen or _changed(tensor, *self._seen[name]) for name, tensor in current.items()]
        if not flags:
            return FlatTensors(()), FlatTensors(())
        device = next(iter(current.values())).device
        anywhere = self._replicas.gather(torch.tensor(flags, dtype=torch.uint8, device=device)).amax(0).tolist()
        return self.select([name for name, flag in zip(current, anywhere, strict=True) if flag])

    def select(self, names: list[str]) -> tuple[FlatTensors, FlatTensors]:
        """Return (floating-point buffers, counters) with these names, which count as changed from now on."""
        current = self._current()
        for name in names:
            self._seen.pop(name, None)
        numbers = FlatTensors((name, current[name]) for name in names if current[name].is_floating_point())
        return numbers, FlatTensors((name, current[name]) for name in names if not current[name].is_floating_point())

    def consensus(self, numbers: FlatVectors, counters: FlatVectors) -> tuple[FlatVectors, FlatVectors]:
        """Return the values that replicas agree on: means of floating-point buffers, maxima of counters. Collective.

        Args:
            numbers: this replica's floating-point buffers; overwritten with the means.
            counters: this replica's counters.
        """
        return self._replicas.mean(numbers), [self._replicas.gather(flat).amax(0) for flat in counters]

    def agree(self) -> None:
        """Make changed buffers equal. Collective."""
        numbers, counters = self.changed()
        mean, largest = self.consensus(numbers.read(), counters.read())
        numbers.write(mean)
        counters.write(largest)

    def _current(self) -> dict[str, torch.Tensor]:
        named = local_tensors(self._model)
        buffers = ((name, tensor) for name, tensor in named if not isinstance(tensor, nn.Parameter))
        return {name: tensor for name, tensor in buffers if not tensor.is_complex()}


def _tracked(model: nn.Module) -> Iterator[str]:
    """Yield the names of running statistics of torch's own norms, whose kernels write without changing `_version`."""
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            yield from (f"{prefix}.{name}" if prefix else name for name in module._buffers)


def _changed(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Return whether a buffer is another tensor than at the beginning, or has been written to."""
    return tensor is not before or tensor._version != version


def shared_optimizer_state(parallel: ParallelModel) -> FlatTensors:
    """Return the floating-point state tensors that every replica has. Collective.

    Their names are like "optimizer-0/weight/exp_avg". A replica has no state for a parameter that its samples never
    used.
    """
    local = {name: value for name, value in _tensors(parallel).items() if value.is_floating_point()}
    everyone = parallel.world.gather([(name, tuple(value.shape)) for name, value in local.items()])
    common = set(everyone[0]).intersection(*everyone[1:])
    return FlatTensors((name, local[name]) for name, shape in everyone[0] if (name, shape) in common)


def average_optimizer_states(parallel: ParallelModel, replicas: ReplicaGroup) -> None:
    """Set the optimizers' state tensors to their mean over the replicas. Collective.

    State that some replica lacks is left as it is.
    """
    vectors = shared_optimizer_state(parallel)
    vectors.write(replicas.mean(vectors.read()))


def copy_optimizer_states(parallel: ParallelModel) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """Copy the optimizers' state.

    Returns:
        (state tensors by name, [optimizer, parameter name, key, scalar or dtype and shape] for each entry).
    """
    copies = {name: value.detach().clone() for name, value in _tensors(parallel).items()}
    plain: list[list[Any]] = []
    for number, name, _, key, value in _entries(parallel):
        tensor = copies.get(_state_key(number, name, key))
        packed = (
            pack_scalar(value)
            if tensor is None
            else ["shaped", str(tensor.dtype).removeprefix("torch."), [*tensor.shape]]
        )
        plain.append([number, name, key, packed])
    return copies, plain


def restore_optimizer_states(parallel: ParallelModel, copies: dict[str, torch.Tensor]) -> None:
    """Set the state tensors to the copies of `copy_optimizer_states`."""
    for name, value in _tensors(parallel).items():
        value.copy_(copies[name])


def make_optimizer_states(parallel: ParallelModel, plain: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Give the optimizers the entries that `copy_optimizer_states` described.

    Args:
        parallel: the model and its optimizers.
        plain: the description of each entry.

    Returns:
        The state tensors by name, to be filled.
    """
    parameters = {(number, name): parameter for number, name, parameter in _parameters(parallel)}
    before = {_state_key(number, name, key): value for number, name, _, key, value in _entries(parallel)}
    for number, _, parameter in _parameters(parallel):
        parallel.optimizers[number].state.pop(parameter, None)
    tensors: dict[str, torch.Tensor] = {}
    for number, name, key, packed in plain:
        parameter, state_key = parameters[number, name], _state_key(number, name, key)
        if packed[0] == "shaped":
            value: Any = torch.empty(packed[2], dtype=parse_dtype(packed[1]), device=parameter.device)
            tensors[state_key] = value
        else:
            value, old = unpack_scalar(packed), before.get(state_key)
            value = value.to(old.device) if isinstance(old, torch.Tensor) else value
        parallel.optimizers[number].state[parameter][key] = value
    return tensors


def _parameters(parallel: ParallelModel) -> list[tuple[int, str, nn.Parameter]]:
    names = parallel.layout.state_names(parallel.model, parallel.optimizers)
    return [(number, name, parameter) for number, named in names.items() for parameter, name in named.items()]


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
