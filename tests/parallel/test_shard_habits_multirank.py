"""Training habits under sharding levels 2 and 3: ranks and steps that run different blocks, and unusual backwards.

Kinds from deepspeedai/DeepSpeed#1888 and huggingface/transformers#16688 (branches), pytorch/pytorch#47562 and #63812
(double backward), pytorch/pytorch#173709 (a loss of what a block keeps).
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from parallel.habits import STEPS, Habit, assert_as_plain
from tutti.config.plan import ShardingPlan

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 10)
        self.narrow = nn.Linear(10, WIDTH)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != WIDTH:
            raise ValueError("a width that this block does not know")
        self.kept = torch.tanh(self.wide(self.norm(x)))
        return x + self.narrow(self.kept)


class Net(nn.Module):
    """Four blocks between two layers; `order` says which blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.last(x)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    count = 6 * STEPS
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator))


def habit(model: Any, function: Any = None, **options: Any) -> Habit:
    return Habit(model=model, function=function or loss, data=samples, **options)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Routed(Net):
    """Each sample goes through one block, some several times: ranks run different blocks, differently often."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        times = 1 + (x[:, 2] > 0).long() + (x[:, 3] > 0.5).long()
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            for turn in range(3):
                rows = ((kind == number) & (times > turn)).nonzero()[:, 0]
                if len(rows):
                    x = x.index_copy(0, rows, block(x[rows]))
        return self.last(x)


def routed() -> Habit:
    return habit(Routed)


def some_teach(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model is asked once more, but only by ranks with certain samples."""
    x, target = batch
    rows = (x[:, 4] > 0.8).nonzero()[:, 0]
    taught = torch.zeros(())
    if len(rows):
        with torch.no_grad():
            aim = model(-x[rows]).softmax(-1)
        taught = (model(x[rows]).softmax(-1) - aim).square().sum() / len(x)
    return F.cross_entropy(model(x), target) + taught


def called_by_some() -> Habit:
    return habit(Net, some_teach)


def reordered() -> Habit:
    """Another order each step; some blocks not at all, some twice."""

    def order(model: Any, step: int) -> None:
        model.order = [[2, 0, 1], [3, 3, 0], [1], [0, 2, 0, 2], [3, 2, 1, 0]][step]

    return habit(Net, between=order)


def penalised_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0].detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def gradient_penalty() -> Habit:
    return habit(Net, penalised_gradient)


class Energy(Net):
    """Forces are gradients of an energy, taken inside of forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces[:, :3]


def energy() -> Habit:
    return habit(Energy)


def what_blocks_keep(model: Any, batch: Any) -> torch.Tensor:
    model(batch[0])
    return model.blocks[1].kept.square().mean() + model.blocks[0].kept.mean()


def kept() -> Habit:
    return habit(Net, what_blocks_keep)


def features(model: Any, batch: Any) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.blocks[2].wide.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(batch[0])
    handle.remove()
    return seen[0].square().mean()


def hooked() -> Habit:
    return habit(Net, features)


class Adapted(Net):
    """A frozen base with trained adapters, one block frozen whole, one without adapters but with a trained norm."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks[:2]:
            block.down, block.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.blocks[3].norm.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if hasattr(block, "down"):
                x = x + block.up(block.down(x))
        return self.last(x)


class LowRank(nn.Module):
    """As PEFT puts them: a frozen linear layer with a trained one beside it, inside the block."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Lora(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks[:3]:
            block.wide, block.narrow = LowRank(block.wide), LowRank(block.narrow)


def adapted() -> Habit:
    return habit(Adapted)


def lora() -> Habit:
    return habit(Lora)


def switched() -> Habit:
    """The script freezes and unfreezes between steps, and once inside of the loss."""

    def switch(model: Any, step: int) -> None:
        model.blocks[0].requires_grad_(step % 2 == 1)
        model.blocks[2].wide.weight.requires_grad_(step > 1)
        model.last.bias.requires_grad_(step == 2)

    return habit(Net, freezing_loss, between=switch)


def freezing_loss(model: Any, batch: Any) -> torch.Tensor:
    model(batch[0])
    model.blocks[3].norm.requires_grad_(bool(model.blocks[0].norm.bias.requires_grad))
    return loss(model, batch)


def siamese_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    one, two = model(batch[0]), model(2 * batch[0])
    with torch.no_grad():
        teacher = model(batch[0] + 1).softmax(-1)
    return F.cross_entropy(one, batch[1]) + (one - two).square().mean() + (two.softmax(-1) - teacher).square().mean()


def siamese() -> Habit:
    return habit(Net, siamese_loss)


def weighed_loss(model: Any, batch: Any) -> torch.Tensor:
    """Two backward passes inside of the loss, without a graph of their own; a validation in between."""
    output = model(batch[0])
    each = F.cross_entropy(output, batch[1], reduction="none")
    (slope,) = torch.autograd.grad(each.sum(), output, retain_graph=True)
    (inner,) = torch.autograd.grad(each.sum(), model.blocks[1].kept, retain_graph=True)
    model.eval()
    with torch.no_grad():
        sure = model(batch[0]).softmax(-1).amax(1)
    model.train()
    return (each * (slope.norm(dim=1) + inner.norm(dim=1) + sure)).mean()


def weighed() -> Habit:
    return habit(Net, weighed_loss)


class Heads(Net):
    """Two answers, of which the loss uses one; the other's blocks get no gradient."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        x = self.blocks[0](self.first(x))
        return {"used": self.last(self.blocks[1](x)), "other": self.blocks[3](self.blocks[2](x))}


def part() -> Habit:
    return habit(Heads, lambda model, batch: F.cross_entropy(model(batch[0])["used"], batch[1]))


def caught_loss(model: Any, batch: Any) -> torch.Tensor:
    try:
        model.blocks[1](batch[0])
    except ValueError:
        x = model.blocks[0](model.first(batch[0]))
    try:
        model(batch[0][:, :3])
    except RuntimeError:
        return F.cross_entropy(model.last(model.blocks[1](x)), batch[1])
    raise AssertionError


def caught() -> Habit:
    """Blocks are called without the model, and what they raise is caught."""
    return habit(Net, caught_loss)


def inside_loss(model: Any, batch: Any) -> torch.Tensor:
    """Modules inside of blocks are called without their block."""
    x = model.blocks[2].narrow(F.gelu(model.blocks[1].wide(model.first(batch[0]))))
    return F.cross_entropy(model.last(model.blocks[3].norm(x)), batch[1]) + 0.1 * loss(model, batch)


def inside() -> Habit:
    return habit(Net, inside_loss)


class Checkpointed(Net):
    """Activation checkpoints of single blocks, of two at once, of one that runs twice; batch statistics inside."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(self.pair, x, use_reentrant=self.reentrant)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        return self.last(self.blocks[3](x))

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[1](x))


class Reentrant(Checkpointed):
    reentrant = True


def checkpointed() -> Habit:
    return habit(Checkpointed)


def reentrant() -> Habit:
    return habit(Reentrant)


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class OpaqueBlock(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x))


class Opaques(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OpaqueBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).hidden
        return self.last(x)


def opaque() -> Habit:
    return habit(Opaques)


SAME_ON_ALL_RANKS = [
    reordered,
    gradient_penalty,
    energy,
    kept,
    hooked,
    adapted,
    lora,
    switched,
    siamese,
    weighed,
    part,
    caught,
    inside,
    checkpointed,
    reentrant,
    opaque,
]
DIFFERENT = [routed, called_by_some]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("level", [2, 3])
def test_as_on_one_device(level: int, ranks: int) -> None:
    plan: dict[str, Any] = {"mesh": {"shard": ranks}, "sharding": ShardingPlan(level=level)}
    assert_as_plain([*DIFFERENT, *SAME_ON_ALL_RANKS], ranks, **plan)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("level", [2, 3])
def test_as_on_one_device_by_messages(level: int, ranks: int) -> None:
    """As between hosts, where all ranks take part in every gather."""
    plan: dict[str, Any] = {"mesh": {"shard": ranks}, "sharding": ShardingPlan(level=level)}
    assert_as_plain(SAME_ON_ALL_RANKS, ranks, shared="off", **plan)
