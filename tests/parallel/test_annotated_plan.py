"""Annotations become a plan; what contradicts is refused with both places named."""

import pytest
from torch import nn

import tutti
from tutti.config.mesh_axes import format_mesh, parse_mesh
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, find_placement, find_recompute
from tutti.errors import PlanError
from tutti.parallel.annotated_plan import with_annotations


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def plan(world_size: int = 4, **fields: object) -> Plan:
    return Plan(**{"batch": BatchPlan(global_batch_size=8), "mesh": {"replicate": world_size}, **fields})  # type: ignore[arg-type]


def test_a_model_without_marks_keeps_the_plan() -> None:
    assert with_annotations(plan(), Net(), stated_mesh=False) == plan()


def test_marks_give_a_mesh_and_rules() -> None:
    model = Net()
    assert tutti.split(model.head) is model.head
    tutti.replicate(model.head[2])
    tutti.stage(model.layers[3:])
    made = with_annotations(plan(), model, stated_mesh=False)
    assert made.mesh == {"stage": 2, "split": 2}
    assert made.pipeline.cuts == ("layers.3",)
    placed = {name: find_placement(made.layout, name) for name, _ in model.named_modules() if name}
    assert placed["head"] == placed["head.0"] == "split"
    assert placed["head.2"] == "replicate"
    assert placed["layers.0"] == "auto"


def test_marks_leave_recompute_as_the_plan_says() -> None:
    model = Net()
    tutti.split(model.head)
    given = plan(layout=(LayoutRule(), LayoutRule(modules="head*", recompute=True)))
    made = with_annotations(given, model, stated_mesh=True)
    assert find_recompute(made.layout, "head")
    assert find_recompute(made.layout, "head.0")


@pytest.mark.parametrize(
    ("world_size", "degree", "level", "mesh"),
    [(4, None, 3, {"shard": 4}), (4, 2, 1, {"replicate": 2, "shard": 2}), (1, None, 3, {"replicate": 1})],
)
def test_shard_takes_the_ranks_that_are_left(world_size: int, degree: int, level: int, mesh: dict[str, int]) -> None:
    model = tutti.shard(Net(), level=level, degree=degree)  # type: ignore[arg-type]
    made = with_annotations(plan(world_size), model, stated_mesh=False)
    assert made.mesh == mesh
    assert made.sharding.level == level


def test_a_stated_mesh_stays() -> None:
    model = Net()
    tutti.split(model.head)
    assert with_annotations(plan(mesh={"split": 2, "replicate": 2}), model, stated_mesh=True).mesh["split"] == 2


def refused(model: nn.Module, given: Plan, *, stated: bool = True) -> str:
    with pytest.raises(PlanError) as caught:
        with_annotations(given, model, stated_mesh=stated)
    return str(caught.value)


def test_contradictions_name_both_places() -> None:
    model = Net()
    tutti.split(model.head, degree=2)
    rules = (LayoutRule(modules="head", placement="replicate"),)
    message = refused(model, plan(mesh={"split": 2}, layout=rules))
    assert "layout rule 'head'" in message
    assert "module 'head'" in message
    assert "mesh.split = 4" in refused(model, plan(mesh={"split": 4}))
    model = Net()
    tutti.split(model.head, degree=2)
    tutti.replicate(model.head)
    assert "both tutti.split(degree=2) and tutti.replicate()" in refused(model, plan())


def test_stages_that_do_not_fit_are_refused() -> None:
    model = Net()
    tutti.stage(model.layers[2:])
    tutti.stage(model.layers[4:])
    assert "3 stages (new ones begin at layers.2, layers.4)" in refused(model, plan(4), stated=False)
    message = refused(model, plan(pipeline=PipelinePlan(cuts=("layers.1",))))
    assert "['layers.1']" in message
    assert "['layers.2', 'layers.4']" in message
    with pytest.raises(PlanError, match="empty list"):
        tutti.stage(nn.ModuleList())


def test_a_mesh_in_words() -> None:
    assert parse_mesh("replicate=2, split=4") == {"replicate": 2, "split": 4}
    assert format_mesh(parse_mesh("stage=2,shard=3")) == "stage=2,shard=3"


@pytest.mark.parametrize(
    ("text", "message"),
    [("rows=2", "no axis 'rows'; axes are replicate"), ("split=2,split=2", "twice"), ("split", "write split=2")],
)
def test_a_mesh_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_mesh(text)
    assert message in str(caught.value)
