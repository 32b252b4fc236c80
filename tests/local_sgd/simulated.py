"""Replicas that differ, simulated in one process from the modes' equations: what ranks must have after every step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from local_sgd.replicas import MODELS as SUBJECTS
from local_sgd.replicas import Seen, Told, plan_of
from tutti.config.consistency_modes import with_mode_defaults
from tutti.data.batches import share_of
from tutti.data.seeds import derive_seed
from tutti.parallel.layout import local_tensors
from tutti.parallel.losses import Weighted, as_weighted, default_unpack, loss_of

State = dict[str, torch.Tensor]


@contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def simulate(told: Told, batches: list[list[int]], size: int) -> tuple[list[list[State]], State]:
    """(state of every replica after every step, the model that all end with)."""
    with doubles():
        torch.manual_seed(derive_seed(0, "model"))
        build, data, loss_fn = SUBJECTS[told.model]
        first, samples = build(), data()
        models = [copy.deepcopy(first) for _ in range(size)]
        optimizers = [
            getattr(torch.optim, told.optimizer)(m.parameters(), lr=told.rate, **told.arguments) for m in models
        ]
        mode = MODES[told.sync.partition(":")[0]](told, models, optimizers)
        function, states = loss_of(default_unpack, loss_fn), []
        for batch in batches:
            mode.before()
            parts = [_parts(told, batch, rank, size, samples) for rank in range(size)]
            losses = [[_weighted(function, m, *part) for part in mine] for m, mine in zip(models, parts, strict=True)]
            count = sum(float(one.count) for mine in losses for one in mine)
            for model, optimizer, mine in zip(models, optimizers, losses, strict=True):
                optimizer.zero_grad()
                for one in mine:
                    (one.total * (size / count)).backward()
                if told.clip_norm:
                    _clip([p.grad for p in model.parameters() if p.grad is not None], told.clip_norm)
                optimizer.step()
            mode.after()
            states.append([_state(model) for model in models])
        return states, mode.ending()


def assert_follow(told: Told, ranks: list[Seen], size: int) -> None:
    """Every replica has what the mode's equations give, after every step and at the end."""
    states, ending = simulate(told, ranks[0].batches, size)
    for rank, seen in enumerate(ranks):
        for got, expected in zip((*seen.states, seen.after), (*(step[rank] for step in states), ending), strict=True):
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-12, atol=1e-13, check_dtype=False)


def _clip(gradients: list[torch.Tensor], bound: float) -> None:
    norm = torch.stack([g.to_dense().square().sum() for g in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_(min(1.0, bound / float(norm + 1e-6)))


def _parts(told: Told, batch: list[int], rank: int, size: int, samples: Any) -> list[tuple[Any, int]]:
    """A replica's batches, and how many samples of each count: 0 of the one that it loads where it has none."""
    share = share_of(len(batch), rank, plan_of(told, size))
    rows = [([batch[part.start + k] for k in range(part.loaded)], part.count) for part in share.parts]
    return [(default_collate([samples[i] for i in row]), count) for row, count in rows]


def _weighted(function: Any, model: nn.Module, batch: Any, count: int) -> Any:
    if count:
        return as_weighted(function(model, batch), count)
    for module in model.modules():
        module.training = not isinstance(module, nn.modules.batchnorm._BatchNorm)
    nothing = as_weighted(function(model, batch), 1)
    model.train()
    return Weighted(nothing.total * 0.0, 0.0)


def _state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in local_tensors(model)}


def mean(states: list[State]) -> State:
    return {name: torch.stack([s[name] for s in states]).double().mean(0) for name in states[0]}


class Mode:
    """The equations of one mode on whole models."""

    def __init__(self, told: Told, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        sync = plan_of(told, len(models)).sync
        self.told = with_mode_defaults(sync.mode, sync.relaxed)
        self.models, self.optimizers, self.steps, self.rounds = models, optimizers, 0, 0
        self.start()

    def start(self) -> None:
        """Before the first step."""

    def before(self) -> None:
        """Parameters as a step finds them."""
        self.found = [self.parameters(m) for m in self.models]

    def after(self) -> None:
        self.steps += 1
        if self.steps % (self.told.period or 10**9) == 0:
            self.exchange()
            self.rounds += 1
            self.average_buffers()

    def exchange(self) -> None:
        raise AssertionError("a mode without an exchange")

    def ending(self) -> State:
        states = [_state(m) for m in self.models]
        return {
            name: torch.stack([s[name] for s in states]).mean(0)
            if value.is_floating_point()
            else torch.stack([s[name] for s in states]).amax(0)
            for name, value in states[0].items()
        }

    def parameters(self, model: nn.Module) -> State:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def put(self, index: int, values: State) -> None:
        with torch.no_grad():
            for name, p in self.models[index].named_parameters():
                p.copy_(values[name])

    def average_buffers(self) -> None:
        for name, _ in self.models[0].named_buffers():
            every = torch.stack([m.get_buffer(name) for m in self.models])
            value = every.mean(0) if every.is_floating_point() else every.amax(0)
            for model in self.models:
                model.get_buffer(name).copy_(value)


class Local(Mode):
    def start(self) -> None:
        self.left: tuple[int, list[State]] | None = None
        self.squares: dict[int, tuple[float, float]] = {}

    def correct(self) -> None:
        """v += (1 - beta) (r - 1) g^2, r from all steps before: these models are so small that all values are seen."""
        size, optimizers = len(self.models), self.optimizers
        for place, some in enumerate(zip(*(m.parameters() for m in self.models), strict=True)):
            whole, own = self.squares.get(place, (0.0, 0.0))
            ratio = min(1.0, max(1 / size, whole / own)) if own else 1.0
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
            for p, optimizer in zip(some, optimizers, strict=True):
                if p.grad is not None:
                    (group,) = optimizer.param_groups
                    adam = "betas" in group
                    beta = group["betas"][1] if adam else group["alpha"]
                    optimizer.state[p]["exp_avg_sq" if adam else "square_avg"] += (1 - beta) * (ratio - 1) * p.grad**2
            mean_square = float(torch.stack(gradients).mean(0).square().sum())
            square = sum(float(g.square().sum()) for g in gradients) / size
            self.squares[place] = 0.9 * whole + mean_square, 0.9 * own + square

    def after(self) -> None:
        if self.told.optimizer_state == "corrected":
            self.correct()
        if not self.told.delay:
            super().after()
            return
        self.steps += 1
        if self.left is not None and self.steps - self.left[0] == self.told.delay:
            value = mean(self.left[1])
            for index, (model, then) in enumerate(zip(self.models, self.left[1], strict=True)):
                now = self.parameters(model)
                self.put(index, {name: value[name] + (now[name] - then[name]) for name in now})
            self.left = None
            self.average_buffers()
        if self.steps % self.told.period == 0:
            self.left = self.steps, [self.parameters(model) for model in self.models]

    def exchange(self) -> None:
        value = mean([self.parameters(m) for m in self.models])
        for index in range(len(self.models)):
            self.put(index, value)
        if self.told.optimizer_state == "averaged":
            for p, *others in zip(*(m.parameters() for m in self.models), strict=True):
                for key, held in self.optimizers[0].state[p].items():
                    same = [held, *(o.state[q][key] for o, q in zip(self.optimizers[1:], others, strict=True))]
                    if held.numel() > 1:
                        value = torch.stack(same).mean(0)
                        for one in same:
                            one.copy_(value)


class DiLoCo(Mode):
    """The outer optimizer is torch's own."""

    def start(self) -> None:
        self.outer = copy.deepcopy(self.models[0])
        momentum = self.told.outer_momentum
        self.optimizer = torch.optim.SGD(
            self.outer.parameters(), lr=self.told.outer_rate, momentum=momentum, nesterov=momentum > 0
        )

    def exchange(self) -> None:
        value = mean([self.parameters(m) for m in self.models])
        for name, p in self.outer.named_parameters():
            p.grad = p.detach() - value[name]
        self.optimizer.step()
        for index in range(len(self.models)):
            self.put(index, self.parameters(self.outer))

    def ending(self) -> State:
        if self.steps % self.told.period:
            self.exchange()
            self.average_buffers()
        return super().ending()


class Adasum(Mode):
    def start(self) -> None:
        self.reference = self.parameters(self.models[0])

    def exchange(self) -> None:
        changes = [{n: p - self.reference[n] for n, p in self.parameters(m).items()} for m in self.models]
        self.reference = {n: p + tree([c[n] for c in changes]) for n, p in self.reference.items()}
        for index in range(len(self.models)):
            self.put(index, self.reference)

    def ending(self) -> State:
        if self.steps % self.told.period:
            self.exchange()
            self.average_buffers()
        return super().ending()


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - dot / (2 * aa) if aa else 1) + b * (1 - dot / (2 * bb) if bb else 1)


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """Those beyond the largest power of two join their partners; then neighbours, then pairs of pairs."""
    whole = 1 << (len(values).bit_length() - 1)
    level = [pair(v, values[i + whole]) if i + whole < len(values) else v for i, v in enumerate(values[:whole])]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


class Gossip(Mode):
    """x(t+1) = W x(t) + update(t), W made by hand."""

    def after(self) -> None:
        self.steps += 1
        if self.steps > 1 and (self.steps - 1) % self.told.period == 0:
            w = self.matrix(len(self.models), self.rounds)
            now = [self.parameters(m) for m in self.models]
            for i in range(len(self.models)):
                mixed = {n: sum(w[i][j] * self.found[j][n] for j in range(len(self.models))) for n in now[i]}
                self.put(i, {n: now[i][n] - self.found[i][n] + mixed[n] for n in now[i]})
            self.rounds += 1
            self.average_buffers()

    def matrix(self, size: int, mixing: int) -> list[list[float]]:
        """Rings, hand-written."""
        if size == 1:
            return [[1.0]]
        if size == 2:
            return [[0.5, 0.5], [0.5, 0.5]]
        near = [[(i - j) % size in (0, 1, size - 1) for j in range(size)] for i in range(size)]
        return [[1 / 3 if one else 0.0 for one in row] for row in near]


class ShiftOne(Gossip):
    def matrix(self, size: int, mixing: int) -> list[list[float]]:
        if size == 1:
            return [[1.0]]
        w = [[0.5 if i == j else 0.0 for j in range(size)] for i in range(size)]
        for i in range(size // 2):
            j = size // 2 + (i + mixing) % (size // 2)
            w[i][j] = w[j][i] = 0.5
        return w


class Push(Mode):
    def exchange(self) -> None:
        size = len(self.models)
        distance = (1, 2)[self.rounds % 2] if size > 2 else 1
        now = [self.parameters(m) for m in self.models]
        for i in range(size if size > 1 else 0):
            self.put(i, {n: (now[i][n] + now[(i - distance) % size][n]) / 2 for n in now[i]})


class Elastic(Mode):
    def start(self) -> None:
        self.centre = self.parameters(self.models[0])

    def after(self) -> None:
        self.steps += 1
        if self.steps > 1 and (self.steps - 1) % self.told.period == 0:
            alpha = self.told.pull / len(self.models)
            drawn = [{n: alpha * (x[n] - c) for n, c in self.centre.items()} for x in self.found]
            for i, model in enumerate(self.models):
                self.put(i, {n: p - drawn[i][n] for n, p in self.parameters(model).items()})
            self.centre = {n: c + sum(d[n] for d in drawn) for n, c in self.centre.items()}
            self.average_buffers()

    def ending(self) -> State:
        return {**super().ending(), **self.centre}


MODES: dict[str, Callable[..., Mode]] = {
    "local": Local,
    "one-shot": Mode,
    "diloco": DiLoCo,
    "adasum": Adasum,
    "ring": Gossip,
    "shift-one": ShiftOne,
    "push": Push,
    "elastic": Elastic,
}
