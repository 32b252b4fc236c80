"""What crosses the cuts of networks that are not chains: exactly the bytes that the runtime sends, for all stages."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from against_one import Subject
from cost_model.examples import cluster, cpu, link
from cost_model.flows import BATCH, foreseen, inputs_of, placed, plan_of, spec_of, travelled, unlike
from matrix import language, mixtures, pretrained_shapes, volumes
from parallel import pipeline_subjects
from tutti.config.model import ForwardedValues, ModelSpec
from tutti.config.plan import LayoutRule, Plan
from tutti.cost_model import predict
from tutti.cost_model.memory_cost import Kept, arrived, kept, kept_by_stage
from tutti.cost_model.module_costs import model_table
from tutti.cost_model.stage_cuts import stages_of
from tutti.cost_model.work_division import division, recompute_regions


class Twice(nn.Module):
    """A model with one layer that is called at the beginning and the end, and an auxiliary output from the middle."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter, self.shared = nn.Linear(12, width), nn.Linear(width, width)
        self.middle = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
        self.late = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
        self.leave = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = torch.relu_(self.shared(self.enter(x)))
        middle = self.middle(first)
        late = self.shared(self.late(middle)) + first
        return {"logits": self.leave(late), "auxiliary": middle.square().mean(-1), "seen": middle.detach()[:, :3]}


def twice() -> Subject:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(BATCH, 12, generator=generator), torch.randint(0, 5, (BATCH,)))

    def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
        assert not output["seen"].requires_grad
        return nn.functional.cross_entropy(output["logits"], target) + 0.1 * output["auxiliary"].mean()

    return Subject(model=Twice, data=data, loss_fn=loss_fn)


def one_block() -> Subject:
    """A GPT of one block: more than one stage cuts it inside."""
    return dataclasses.replace(pipeline_subjects.gpt(), model=lambda: pipeline_subjects.GPT(blocks=1))


def check(subject: Subject, plan: Plan) -> tuple[ModelSpec, np.ndarray]:  # type: ignore[type-arg]
    """Compare the description with the runtime's placement; return the description and the bytes that are sent."""
    torch.manual_seed(0)
    spec = spec_of(subject)
    placement = placed(subject.model(), plan, *inputs_of(subject))
    assert unlike(spec, plan, placement) == []
    ways = travelled(placement)
    assert foreseen(spec, plan).tolist() == ways.tolist()
    return spec, ways


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "skips of a U-Net": pipeline_subjects.unet,
    "skips of a 3-D U-Net": volumes.unet,
    "states of an LSTM translator": language.translator,
    "masks of a GPT": language.gpt,
    "a layer called twice, an auxiliary loss": twice,
    "experts": mixtures.FAMILIES[0].subject,
}


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_stages_send_is_what_the_runtime_sends(name: str, ranks: int, chunks: int) -> None:
    plan = plan_of(ranks, chunks)
    spec, ways = check(SUBJECTS[name](), plan)
    stages, away = stages_of(spec, plan), np.arange(ranks * chunks) % ranks
    ways = np.where(away[:, None] != away, ways, 0.0)
    assert (stages.sent * BATCH + stages.fixed).tolist() == ways[0].sum(axis=1)[:-1].tolist()
    by_stage = ways[0].sum(axis=1) + ways[1].sum(axis=0)
    by_rank = stages.by_rank[0] * BATCH + stages.by_rank[1]
    assert by_rank.tolist() == [by_stage[away == rank].sum() for rank in range(ranks)]
    # a tied layer's gradients are summed by both of its ranks, here the first and the last
    for _, owner in stages.ties:
        by_rank[[0, -1]] += spec.modules[owner].gradient_nbytes
    prediction = predict(spec, cluster(cpu(), (link(),)), plan)
    assert prediction.sent_nbytes_per_rank == pytest.approx(by_rank.max(), rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_not_trained_sends_no_gradients(ranks: int) -> None:
    _, ways = check(pipeline_subjects.frozen(), plan_of(ranks))
    assert ways[0, 0, 1] > 0
    assert ways[1, 0, 1] == 0


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 1)])
def test_a_block_that_is_cut_inside_passes_its_residual_straight_on(ranks: int, chunks: int) -> None:
    _, ways = check(one_block(), plan_of(ranks, chunks))
    assert np.count_nonzero(ways[0]) > 3


@pytest.mark.parametrize(
    ("name", "ranks", "cuts"),
    [
        ("llama", 2, ()),
        ("llama", 3, ()),
        ("bert", 3, ("bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.2.attention.self.key")),
        ("gpt2", 3, ("transformer.h.1.mlp.dropout", "transformer.h.3.attn.c_attn")),
        ("t5", 3, ()),
    ],
)
def test_rotations_biases_and_masks_of_transformers(name: str, ranks: int, cuts: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    spec, _ = check(getattr(pretrained_shapes, name)(), plan_of(ranks, 1, cuts))
    if name == "llama":  # cosines and sines go to each later stage, whatever the number of samples
        assert stages_of(spec, plan_of(ranks)).fixed[0] == (ranks - 1) * 2 * 16 * 8 * 4


def test_what_a_block_s_own_code_keeps_is_where_its_inputs_are() -> None:
    """The block is cut into norm1 | qkv, attention | out, norm2, mlp.0 | the rest, with 8 tokens of width 16."""
    plan = plan_of(2, 2, ("blocks.0.qkv", "blocks.0.out", "blocks.0.mlp.1"))
    spec, hidden, statistics = spec_of(one_block()), 8 * 16 * 4, 2 * 8 * 4
    stages, columns = stages_of(spec, plan), model_table(spec)
    keeps = kept(columns, division(spec, plan), (), half=False)
    held = kept_by_stage(columns, stages, keeps)
    # qkv's input; queries, keys, values and their result; two numbers for each row (one per head)
    assert held[1] == hidden + 4 * hidden + statistics
    # a copy of attention's result, as input of out; norm2's input and statistics; the input of mlp.0
    assert held[2] == hidden + (hidden + statistics) + hidden
    assert held.sum() == keeps.always.sum() + hidden
    again = LayoutRule(modules="blocks.*", recompute=True)
    regions = recompute_regions(spec, dataclasses.replace(plan, layout=(again,)))
    recomputed = kept(columns, division(spec, plan), regions, half=False)
    assert kept_by_stage(columns, stages, recomputed).sum() == recomputed.always.sum()


def test_without_flow_the_last_output_before_a_cut_is_sent() -> None:
    spec = spec_of(language.gpt())
    bare = dataclasses.replace(
        spec, modules=tuple(dataclasses.replace(module, passes_on=()) for module in spec.modules)
    )
    assert stages_of(bare, plan_of(2)).sent.tolist() == stages_of(spec, plan_of(2)).sent.tolist()


@pytest.mark.parametrize(
    ("kept", "copied"),
    [
        (("enter", "late.0", "late.2", "leave"), [0, 100, 100]),
        (("late.0", "late.2", "leave"), [0, 0, 100]),  # the first counts it, also for others on its stage
        (("late.0",), [0, 0, 0]),
        ((), [0, 0, 0]),
    ],
)
def test_values_are_sent_once_to_each_later_stage_and_copied_where_they_are_kept(
    kept: tuple[str, ...], copied: list[int]
) -> None:
    spec = spec_of(twice())
    passing = ForwardedValues(nbytes=100.0, fixed_nbytes=8.0, to=("late.0", "late.2", "leave", ""), kept=kept)
    modules = [
        dataclasses.replace(module, passes_on=(passing,) if module.name == "enter" else ()) for module in spec.modules
    ]
    made = dataclasses.replace(spec, modules=tuple(modules))
    stages = stages_of(made, plan_of(3, 1, ("late.0", "leave")))
    assert stages.sent.tolist() == [200.0, 0.0]
    assert stages.fixed.tolist() == [16.0, 0.0]
    assert stages.by_rank.tolist() == [[200.0, 100.0, 100.0], [16.0, 8.0, 8.0]]
    assert arrived(model_table(made), stages, kept_of(made, again=())).tolist() == copied
    assert arrived(model_table(made), stages, kept_of(made, again=("leave",))).tolist() == [*copied[:2], 0]


def test_what_is_made_of_something_kept_elsewhere_is_no_copy_on_its_own_stage() -> None:
    """For example, a view of a value from another stage: the received value is already the copy."""
    spec = spec_of(twice())
    view = ForwardedValues(nbytes=100.0, to=("leave",), kept=("enter", "late.2"))
    modules = [
        dataclasses.replace(module, passes_on=(view,) if module.name == "late.0" else ()) for module in spec.modules
    ]
    made = dataclasses.replace(spec, modules=tuple(modules))
    stages = stages_of(made, plan_of(3, 1, ("late.0", "leave")))
    assert arrived(model_table(made), stages, kept_of(made, again=())).tolist() == [0, 0, 0]


def kept_of(spec: ModelSpec, again: tuple[str, ...]) -> Kept:
    """Return what `spec` saves for backward where the modules `again` are recomputed."""
    columns = model_table(spec)
    saved = kept(columns, division(spec, plan_of(1)), (), half=False)
    return dataclasses.replace(saved, again=np.array([name in again for name in columns.names]))
