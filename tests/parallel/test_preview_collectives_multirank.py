"""What the listing of a plan names is what a step of its run exchanges, counted on 2 ranks."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_parallel_models import plain, values
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject
from parallel.test_table_linear import EVERY, tokens
from parallel.test_tensor_parallel_multirank import clipped, mlp
from spatial_models import plain2d
from trainer.several import Case, on_ranks
from tutti.config.plan import BatchPlan, Plan
from tutti.parallel.preview import explain_layout, modules_without_input_gradient
from tutti.trainer.metrics import read_rows


def pairs(count: int, *shape: int) -> TensorDataset:
    return TensorDataset(values(count, *shape), torch.arange(count) % 5)


def frozen_front() -> Subject:
    """Its first pair of layers is not trained."""

    def made() -> nn.Module:
        net = plain(8, 11, 6, 13, 7, 9, 5)
        net[:3].requires_grad_(False)
        return net

    return Subject(model=made, data=pairs(16, 8), loss_fn=nn.CrossEntropyLoss())


def frozen() -> Subject:
    """Nothing but the head is trained."""

    def made() -> nn.Module:
        net = plain(8, 11, 6, 5)
        net[:3].requires_grad_(False)
        return net

    return Subject(model=made, data=pairs(16, 8), loss_fn=nn.CrossEntropyLoss())


class Attending(nn.Module):
    """Its attention sees the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rest = plain(8, 12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.heads(x, x, x, need_weights=False)[0]).mean(1)  # type: ignore[no-any-return]


def attending() -> Subject:
    return Subject(model=Attending, data=pairs(16, 3, 8), loss_fn=F.cross_entropy)


SPLIT: dict[str, Any] = {"mesh": {"split": 2}, "batch": {"num_microbatches": 1}}

CASES: dict[str, Case] = {
    "perceptron": (mlp, SPLIT),
    "frozen front": (frozen_front, SPLIT),
    "frozen": (frozen, SPLIT),
    "attention": (attending, SPLIT),
    "tied language model": (clipped, SPLIT),
    "table": (tokens, {**SPLIT, "mesh": {"table": 2}, **EVERY}),
    "space": (plain2d, {**SPLIT, "mesh": {"space": 2}}),
}


def carried(run: Any) -> Any:
    """How often, and how many bytes, this rank sent in the first step, by what."""
    if not run.parallel.world.is_main:
        return {}
    channels = next(row for row in read_rows(run.output.folder.metrics) if row.get("kind") == "step")["communication"]
    return {channel["carried"]: (channel["count"], channel["nbytes"]) for channel in channels}


def listed(name: str) -> dict[str, tuple[str, ...]]:
    """Module -> what its listing says, without sums of gradients over replicas."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # as `train`
    try:
        make, fields = CASES[name]
        subject = make()
        batch = BatchPlan(global_batch_size=subject.batch)
        plan = Plan(batch=batch, **{key: value for key, value in fields.items() if key != "batch"})
        x = subject.data.tensors[0][:2]
        found = explain_layout(subject.model(), plan, sample=lambda: ((x,), {}))
    finally:
        torch.set_default_dtype(before)
    return {
        one.name: tuple(words for words in one.collectives if not words.startswith("gradients reduced"))
        for one in found.modules
    }


@pytest.fixture(scope="module")
def exchanged() -> dict[str, dict[str, tuple[int, int]]]:
    ranks = on_ranks(CASES, 2, steps=1, look=carried)
    return {name: trained.facts for name, trained in ranks[0].items()}


ROWS = {"perceptron": 8, "frozen front": 8, "frozen": 8, "attention": 24, "tied language model": 64}
"""Rows (samples, or tokens) of a step."""

OF_THE_LOSS = {"tied language model": 4}
"""Exchanges, of one value a row, of a loss of scores that are divided: no module's."""


@pytest.mark.parametrize("name", ROWS)
def test_a_listing_names_what_a_step_exchanges_over_split(
    name: str, exchanged: dict[str, dict[str, tuple[int, int]]]
) -> None:
    """As often, and as many bytes: a ring of 2 sends all values once."""
    named = [words for some in listed(name).values() for words in some if "over split" in words]
    sizes = [int(size) for words in named for size in re.findall(r"of (\d+) values per row", words)]
    assert len(sizes) == len(named)
    sizes += [1] * OF_THE_LOSS.get(name, 0)
    assert exchanged[name]["activations"] == (len(sizes), sum(sizes) * ROWS[name] * 8)


def test_the_gradient_of_the_batch_is_in_no_listing() -> None:
    assert listed("perceptron")["0"] == ()
    assert listed("frozen front")["4"] == ()
    assert listed("attention")["heads"] == ()
    assert listed("attention")["rest.0"] == ("backward: all-reduce over split of 8 values per row",)


def test_over_table_and_space_it_is_in_none_either(exchanged: dict[str, dict[str, tuple[int, int]]]) -> None:
    """Of a divided layer rows go there and back, and so do gradients; halos go once in each direction."""
    table = [words for some in listed("table").values() for words in some if "over table" in words]
    first = [words for words in table if words.endswith("and the gradients of the returned values")]
    assert len(first) == 1
    assert exchanged["table"]["activations"][0] == 4 * len(table) - 1
    space = {one: words for one, some in listed("space").items() for words in some if "halos" in words}
    assert space == {
        "stem": "halos with neighbours over space, forward",
        "middle": "halos with neighbours over space, forward and backward",
        "pool": "halos with neighbours over space, forward and backward",
    }
    assert exchanged["space"]["halos"][0] == 5


class Reading(nn.Module):
    """Looks at values, which a forward without any cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(8, 13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y if float(y.detach().sum()) > 0 else -y


def test_a_forward_that_cannot_be_followed_is_listed_with_every_gradient() -> None:
    assert modules_without_input_gradient(Reading(), lambda: ((torch.zeros(2, 8),), {})) == frozenset()
    assert modules_without_input_gradient(plain(8, 13, 7), lambda: ((torch.zeros(2, 8),), {})) == {"", "0"}


class Leaving(nn.Module):
    """Leaves a tensor in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = plain(8, 13, 7), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.net(x)
        return self.last


def test_the_model_is_left_alone() -> None:
    model = Leaving()
    assert modules_without_input_gradient(model, lambda: ((torch.zeros(2, 8),), {})) == {"", "net", "net.0"}
    assert torch.equal(model.last, torch.zeros(1))
    assert "_compiled_call_impl" not in vars(model.net)
