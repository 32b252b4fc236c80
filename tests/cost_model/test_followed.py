"""Work of pipeline ranks beside the model's own: they follow its code on shapes, to know where each part belongs."""

import dataclasses

import pytest

from cost_model.examples import cluster, cpu, link
from cost_model.examples_mesh import meshed, part
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.plan import PipelinePlan, Plan
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.stage_cuts import stages_of


def staged(stages: int) -> Plan:
    return meshed(64, 8, {"stage": stages}, pipeline=PipelinePlan(schedule="1f1b"))


def chain(kind: str) -> ModelSpec:
    """Return four blocks with code of their own, of two calls each, around two layers."""
    modules = [ModuleSpec(name="", kind=kind)]
    for index in range(4):
        code_cost = OpCost(kind="elementwise", flops_forward=1.0, flops_backward=1.0, nbytes_forward=8.0,
                           nbytes_backward=8.0, calls=2)  # fmt: skip
        modules.append(ModuleSpec(name=f"{index}", kind="Block", ops=(code_cost,), output_nbytes=64.0, block=index))
        modules += [part(f"{index}.{name}", flops=1e6, output_nbytes=64.0, block=index) for name in ("up", "down")]
    return ModelSpec(name="chain", modules=tuple(modules), optimizer="SGD", dtype="float32")


@pytest.mark.parametrize(("kind", "stages", "followed"), [
    ("Model", 2, (4, 0.0)), ("Sequential", 2, (0, 0.0)), ("Model", 8, (8, 8.0)), ("Sequential", 8, (8, 8.0)),
])  # fmt: skip
def test_every_rank_follows_the_code_between_units(kind: str, stages: int, followed: tuple[int, float]) -> None:
    """The model's code calls whole blocks. Where blocks are cut inside, their own code is followed.

    Torch's Sequential makes no decisions, so its calls are followed only once.
    """
    model = chain(kind)
    assert stages_of(model, staged(stages)).followed == followed
    cuts = tuple(f"{index // 2}.{('up', 'down')[index % 2]}" for index in range(1, stages)) if stages == 8 else ("2",)
    named = dataclasses.replace(staged(stages), pipeline=PipelinePlan(schedule="1f1b", cuts=cuts))
    assert stages_of(model, named).followed == followed


def test_following_costs_a_cpu_its_calls_and_the_phases_add_up() -> None:
    plan = staged(2)
    machines = cluster(cpu(kernel_overhead_s=1e-6), (link("node", 1e-6, 1e11),), devices_per_node=2)
    known, plain = (predict(chain(kind), machines, plan) for kind in ("Model", "Sequential"))
    more = known.phases["forward"] - plain.phases["forward"]
    assert more == pytest.approx(8 * 4 * cost_constants.FOLLOWED_UNIT * 1e-6)
    assert known.step_time_s.value - plain.step_time_s.value == pytest.approx(9 / 8 * more, rel=1e-6)
    assert sum(known.phases.values()) == pytest.approx(known.step_time_s.value)
