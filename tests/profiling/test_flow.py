"""What a description says of values that pass by modules, against values by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.config.model import ForwardedValues, ModelSpec, ModuleSpec
from tutti.config.serialization import dumps, loads
from tutti.profile import describe_model

WIDTH, TOKENS, BATCH = 6, 5, 4
ROW = 4 * TOKENS * WIDTH
"""Bytes of one sample's hidden states."""


def described(model: nn.Module, *args: Tensor, loss: Any = None) -> dict[str, ModuleSpec]:
    spec = describe_model(model, args, {}, None, loss or (lambda output, _: output.sum()), samples=BATCH)
    assert spec.notes == ()
    assert loads(ModelSpec, dumps(spec)) == spec
    return {module.name: module for module in spec.modules}


def tokens() -> Tensor:
    return torch.ones(BATCH, TOKENS, dtype=torch.int64)


class Net(nn.Module):
    """A skip past two layers, an activation in place, a mask made of the batch, a rotation that is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.third, self.last = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("rotation", torch.ones(TOKENS, 1))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0)[..., None]
        entered = self.embed(x) + self.positions[:TOKENS]
        hidden = self.first(entered).relu_()
        hidden = self.third(torch.sigmoid(self.second(hidden))) * mask
        return self.last((hidden + entered) * self.rotation)


def test_a_skip_goes_from_where_it_is_made_to_where_it_is_used() -> None:
    modules = described(Net(), tokens())
    assert modules["embed"].passes_on == (ForwardedValues(nbytes=ROW, to=("first", "third"), trained=True),)


def test_a_value_written_to_in_place_is_passed_on_as_it_is_then() -> None:
    assert described(Net(), tokens())["first"].passes_on == (
        ForwardedValues(
            nbytes=ROW, to=("second",), kept=("first", "second")
        ),  # relu_ keeps what it makes, and so does second
    )


def test_what_the_batch_and_constants_give_passes_nowhere() -> None:
    modules = described(Net(), tokens())
    assert modules["second"].passes_on == (ForwardedValues(nbytes=2 * ROW, to=("third",), kept=("second", "third")),)
    assert modules["third"].passes_on == (ForwardedValues(nbytes=ROW, to=("last",)),)
    assert modules["last"].passes_on == (ForwardedValues(nbytes=4 * TOKENS * 3, to=("",)),)
    assert modules[""].passes_on == ()


def test_a_container_says_after_which_module_its_own_code_keeps() -> None:
    model = described(Net(), tokens())[""]
    kept = dict(model.kept_after)
    assert kept["first"] == ROW  # the output of relu_
    assert kept["second"] == 2 * ROW  # the output of the sigmoid
    assert kept["third"] == TOKENS  # the mask
    assert sum(kept.values()) == model.activation_nbytes


class Rotated(nn.Module):
    """Angles that a module makes once, whatever the samples, used by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.angles = nn.Embedding(9, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.angles.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, angles = self.embed(x), self.angles(torch.arange(TOKENS, device=x.device))
        for block in self.blocks:
            hidden = block(hidden) * angles
        return hidden


def test_rotations_are_bytes_of_a_microbatch_and_not_trained() -> None:
    passed = described(Rotated(), tokens())["angles"].passes_on
    assert [(one.nbytes, one.fixed_nbytes, one.trained) for one in passed] == [(0.0, ROW, False)]
    assert passed[0].to == ("blocks.0", "blocks.1", "blocks.2")
    assert passed[0].kept == passed[0].to  # for the gradients of what is multiplied with them


class Scaled(nn.Module):
    """What parameters alone give, used late and later; a block that works on its input before it calls a part."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.other(self.part(x.exp())) + x, torch.zeros(3, device=x.device)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scale, more = self.scale.exp(), torch.zeros(3, device=x.device)
        x = self.enter(x)
        for block in self.blocks:
            x, more = block(x)
            x = x * scale
        return self.leave(x) + more.sum()


def test_what_parameters_alone_give_is_made_where_it_is_needed_first() -> None:
    modules = described(Scaled(), torch.zeros(BATCH, TOKENS, WIDTH))
    passed = [one for one in modules["blocks.0.other"].passes_on if one.fixed_nbytes]
    assert [(one.fixed_nbytes, one.to) for one in passed] == [(4 * WIDTH, ("blocks.1.other",))]


def test_a_block_works_on_its_input_itself_and_what_it_returns_is_its_own() -> None:
    modules = described(Scaled(), torch.zeros(BATCH, TOKENS, WIDTH))
    assert [one.to for one in modules["enter"].passes_on] == [("blocks.0", "blocks.0.other")]
    assert [(one.nbytes, one.to) for one in modules["blocks.0"].passes_on] == [(ROW, ("blocks.0.part",))]
    returned = [(one.fixed_nbytes, one.to) for one in modules["blocks.1"].passes_on if one.fixed_nbytes]
    assert returned == [(4.0, ("leave",))]  # their sum, which is made where they are


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] * ctx.saved_tensors[0]


class Own(nn.Module):
    """A function of the user's own around two layers, a detached value, a module that gives what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Identity()
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.nothing(self.second(Squared.apply(first)))  # type: ignore[no-untyped-call]
        return self.third(second) + first.detach()


def test_functions_of_the_user_s_own_are_followed() -> None:
    modules = described(Own(), torch.zeros(BATCH, WIDTH))
    passed = {(one.to, one.trained, one.kept): one.nbytes for one in modules["first"].passes_on}
    assert passed == {
        (("second",), True, ()): 4 * WIDTH,
        (("third",), False, ()): 4 * WIDTH,
    }
    assert [one.to for one in modules["second"].passes_on] == [("nothing", "third")]
    assert modules[""].kept_after == (("first", 4.0 * WIDTH),)


def test_what_something_unseen_made_comes_from_the_module_before() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.vmap(lambda row: row.sin() * 2)(self.first(x)))

    passed = described(Mapped(), torch.zeros(BATCH, WIDTH))["first"].passes_on
    assert [(one.nbytes, one.to) for one in passed] == [(4 * WIDTH, ("second",))]


@pytest.mark.parametrize("looks", [False, True])
def test_what_the_loss_reads_is_needed_at_the_end(looks: bool) -> None:
    def loss(output: dict[str, Tensor], _: Any) -> Tensor:
        return output["last"].sum() + (output["middle"].sum() if looks else 0.0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            middle = self.first(x)
            return {"middle": middle, "last": self.second(middle)}

    modules = described(Two(), torch.zeros(BATCH, WIDTH), loss=loss)
    assert [one.to for one in modules["first"].passes_on] == [("second", "")]
