"""Forwards of a pipeline: which of them are followed again, what modules leave in attributes, when sums start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from against_one import train
from harness import run_ranks
from parallel import pipeline_subjects as subjects
from parallel.test_pipeline_stages import CPU, traced
from tutti.config.plan import PipelinePlan, SyncPlan
from tutti.errors import PlanError
from tutti.parallel.data.buckets import Bucket
from tutti.parallel.pipeline.placeholders import is_unknown
from tutti.parallel.pipeline.stage_building import Forwards, StagePartition
from tutti.parallel.pipeline.stage_placement import StageHolders, calls_of
from tutti.parallel.pipeline.stage_tracing import Ending
from tutti.parallel.pipeline.stage_work import StageWork


class Counting(nn.Linear):
    """Calls are counted where its code runs on shapes or values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.tanh())


class Alternating(nn.Sequential):
    """Its own code decides what is called, by a counter that nobody else sees."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else self[0](x)


def forwards_of(model: nn.Module, x: torch.Tensor) -> tuple[Forwards, Callable[[torch.Tensor], Any]]:
    """Forwards of a model with two stages, and a function that places one."""
    tracer, program = traced(model, x)
    starts = (calls_of(program)[1],)
    units = {node.unit: frozenset({stage}) for node, stage in zip(program.nodes, (0, 1, 1), strict=False)}
    names = {name: frozenset(units[name.partition(".")[0]]) for name, _ in model.named_parameters()}
    holders = StageHolders(units=units, parameters=names)
    stages = StagePartition(
        ranks=2, position=0, starts=starts, tracer=tracer, holders=holders, first={}, shared={}, trained=frozenset()
    )
    forwards = Forwards(stages)
    return forwards, lambda batch: forwards.place(lambda: model(batch), Ending())


def computed(placement: Any, model: nn.Module) -> torch.Tensor:
    values: dict[int, torch.Tensor] = {}
    for stage in range(2):
        work = StageWork(placement, stage, model, CPU)
        needed = [key for keys in placement.parts[stage].receives.values() for key in keys]
        values |= work.forward({key: values[key].detach() for key in needed})
    return work.output(values)  # type: ignore[no-any-return]


def test_a_plain_sequential_is_followed_once_for_each_form_of_its_arguments() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    _, place_one = forwards_of(model, torch.randn(3, 4))
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    placements = [place_one(first), place_one(second)]
    assert placements[0].program is placements[1].program
    for placement, batch in zip(placements, (first, second), strict=True):
        torch.testing.assert_close(computed(placement, model), model(batch))
    others = [place_one(torch.randn(2, 4)), place_one(torch.randn(4, 4).t()[:3])]
    model.train()
    others.append(place_one(first))
    with torch.no_grad():
        others.append(place_one(first))
    hook = model.eval()[0].register_forward_hook(lambda module, args, output: output)
    others.append(place_one(first))
    hook.remove()
    assert place_one(first).program is placements[0].program
    model.register_forward_hook(lambda module, args, output: output)
    others.append(place_one(first))
    assert all(one.program is not placements[0].program for one in others)


def test_code_of_the_models_own_is_followed_every_time() -> None:
    torch.manual_seed(0)
    model, x = Alternating(Counting(4, 4), Counting(4, 4)), torch.randn(3, 4)
    _, place_one = forwards_of(model, x)
    called = [len(place_one(x).program.nodes) for _ in range(4)]
    assert called == [1, 2, 1, 2]


class Leaving(nn.Module):
    """What a unit, and the model's own code, leave in attributes; one depends on the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Noisy(), Noisy()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean()
        for layer in self.layers:
            x = layer(x)
        self.last = x * 2
        return x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.size = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size, self.unread = x.square().sum(), x
        return self.inner(x)


def test_what_modules_leave_in_attributes_is_known_by_who_reads_it() -> None:
    model, x = Leaving(), torch.randn(3, 4)
    before = [dict(vars(module)) for module in model.modules()]
    tracer, _ = traced(model, x)

    def loss() -> torch.Tensor:
        return model(x).sum() + model.layers[0].size + model.last.sum() + model.mean  # type: ignore[union-attr, operator]

    ending = tracer.ends_with_model(loss)
    assert ending is not None
    assert ending.reads == {("layers.0", "size"), ("", "last")}
    program = tracer.trace(lambda: model(x), ending)
    assert program.kept.keys() == ending.reads
    assert (
        program.hidden.keys()
        == {("", "mean"), *((f"layers.{n}", key) for n in (0, 1) for key in ("size", "unread"))} - ending.reads
    )
    assert all(dict(vars(module)).keys() == old.keys() for module, old in zip(model.modules(), before, strict=True))
    assert all(is_unknown(vars(module).get("size")) is False for module in model.modules())
    with pytest.raises(PlanError, match="parameters outside its forward"):
        tracer.finish(lambda: model(x).sum() + model.last.sum(), x, {("", "last"): tracer.stand_ins.outline(x)})


def events(schedule: str, bucket_nbytes: int) -> list[str]:
    """Backwards that begin and end on this rank in the second step, and sums that start."""
    seen: list[str] = []

    def noted(kind: type, name: str, begin: str, end: str) -> None:
        plain = getattr(kind, name)

        def method(*args: Any) -> Any:
            seen.append(begin)
            result = plain(*args)
            seen.append(end)
            return result

        setattr(kind, name, method)

    for name in ("backward", "backward_inputs", "backward_weights"):
        noted(StageWork, name, "(", ")")
    noted(Bucket, "launch", "sum", "")
    plan = {
        "mesh": {"replicate": 2, "stage": 2},
        "pipeline": PipelinePlan(schedule=schedule),  # type: ignore[arg-type]
        "sync": SyncPlan(bucket_nbytes=bucket_nbytes),
        "batch": {"num_microbatches": 3},
    }
    train(subjects.gpt, plan, 2, torch.float64)
    seen = [one for one in seen if one]
    second = [place for place, one in enumerate(seen) if one == "("][seen.count("(") // 2]
    return seen[second:]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_sums_over_replicas_start_within_a_stages_last_backward(schedule: str) -> None:
    for seen in run_ranks(events, 4, schedule, 2000):
        last = len(seen) - 1 - seen[::-1].index("(")
        assert "sum" not in seen[:last], "a gradient is summed once it is complete"
        within = seen[last : len(seen) - 1 - seen[::-1].index(")")]
        assert within.count("sum") >= 3, seen
        assert seen.count("sum") > within.count("sum"), "tied gradients wait for the other stage's"
