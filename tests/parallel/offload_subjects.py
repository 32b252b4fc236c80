"""Runs with state on the host, and what is read off them; ranks import it."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import tutti
from against_one import Trained, train
from parallel import shard_subjects as subjects
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.parallel.offload.offloaded_pack import OffloadedPack
from tutti.parallel.sharding.parameter_sharding import Parameters

WIDTH, DEPTH, STEPS = 32, 6, 4
RECOMPUTED = (LayoutRule(modules="blocks.*", recompute=True),)


class Deep(nn.Module):
    """Equal blocks between two small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(subjects.Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def numbers() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(16, 4, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())
    return TensorDataset(inputs, torch.arange(16) % 3)


def values(cases: dict[str, tuple[str, dict[str, Any]]], dtype: torch.dtype) -> dict[str, Trained]:
    """What each case, (name of the subject, fields of the plan), trains to."""
    results = {}
    for name, (subject, fields) in cases.items():
        _new_folder()
        results[name] = train(getattr(subjects, subject), {"mesh": {"replicate": 1}, **fields}, STEPS, dtype)
    return results


def job_of(plan_fields: dict[str, Any], resume: str | None = None, **options: Any) -> tuple[Any, nn.Module, Any]:
    """A prepared Job of `Deep`, its model and its loader."""
    batch = BatchPlan(global_batch_size=8, **plan_fields.get("batch", {"num_microbatches": 2}))
    plan = Plan(**{**plan_fields, "batch": batch})
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    _new_folder()
    job = tutti.Job(global_batch_size=8, seed=3, resume=resume, **options)
    model: Any = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, _, loader = job.prepare(model, optimizer, numbers(), F.cross_entropy)
    return job, model, loader


def observe(plan_fields: dict[str, Any]) -> dict[str, Any]:
    """What the device holds while a block computes.

    `forward`: the most blocks whose parameters are on the device at once; `rest`: those between steps; `gradients`: the
    most blocks with a gradient on the device when a block's backward begins; `pools`: where state and gradients are.
    """
    job, model, loader = job_of(plan_fields)
    run = job._run()
    shards = run.parallel.replica.shards
    assert isinstance(shards, Parameters)
    blocks = [unit for unit in shards.units if unit.name.startswith("blocks.")]
    seen: dict[str, Any] = {"forward": 0, "gradients": 0}

    def parameters_held() -> int:
        return sum(any(pack.on_device_nbytes for pack in unit.packs) for unit in blocks)

    def entered(*_: Any) -> None:
        seen["forward"] = max(seen["forward"], parameters_held())

    def backward(*_: Any) -> None:
        held = sum(any(p.whole.grad is not None for p in unit.parameters) for unit in blocks)
        seen["gradients"] = max(seen["gradients"], held)

    for block in model.blocks:
        block.norm.register_forward_pre_hook(entered)
        block.register_full_backward_pre_hook(backward)
    for batch in loader:
        job.step(batch)
    packs = [pack for unit in shards.units for pack in unit.packs]
    assert all(isinstance(pack, OffloadedPack) for pack in packs)
    state = [t for o in run.parallel.optimizers for s in o.state.values() for t in s.values() if t.dim()]
    return seen | {
        "rest": parameters_held(),
        "kinds": {str(pack.dtype) for pack in packs},
        "state": {t.device.type for t in state},
        "parameters": {(p.device.type, str(p.dtype)) for p in model.parameters()},
    }


def saved_on_device(layout: tuple[LayoutRule, ...]) -> dict[str, Any]:
    """Bytes of the blocks' values that are still on the device when forward ends, and the parameters after a step."""
    job, model, loader = job_of({"layout": layout, "batch": {"num_microbatches": 1}})
    made: list[tuple[StorageWeakRef, int]] = []
    seen: dict[str, Any] = {}

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            inputs = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            if inputs and isinstance(result, torch.Tensor):  # buffers on the host are made of nothing
                storage = result.untyped_storage()
                if storage._cdata not in inputs:
                    made.append((StorageWeakRef(storage), storage.nbytes()))
            return result

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with Notes():
            output = module(batch[0])
        seen["forward"] = sum(nbytes for storage, nbytes in made if not storage.expired())
        return F.cross_entropy(output, batch[1])

    for batch in loader:
        job.forward_backward(loss, batch)
        job.update()
    seen["values"] = [parameter.detach().sum().item() for parameter in model.parameters()]
    return seen


def lived(plan_fields: dict[str, Any], folder: str, *, saves: bool) -> dict[str, Any]:
    """A run with an average, evaluation, a skipped step, and a checkpoint in its middle, which is resumed or saved."""
    resume = None if saves else folder
    job, _, loader = job_of(plan_fields, resume=resume, on_nonfinite="skip", clip_norm=0.1)
    average = tutti.AveragedWeights(job, decay=0.5)
    run = job._run()

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        output = module(batch[0])
        return F.cross_entropy(output, batch[1]) * (float("inf") if run.state.progress.step == 1 else 1.0)

    losses = []
    for _ in job.epochs(1 if saves else 2):
        for batch in loader:
            losses.append(job.forward_backward(loss, batch))
            job.update()
            average.update()
    if saves:
        os.rename(job.save(), folder)
    result = {"losses": losses, "state": job.state_dict(), "evaluation": job.evaluate(numbers())["loss"]}
    with average.applied():
        result |= {"average": job.state_dict(), "average's loss": job.evaluate(numbers())["loss"]}
    with job.whole_model() as whole, torch.no_grad():
        result["whole"] = {name: value.clone() for name, value in whole.named_parameters()}
        whole.head.bias.add_(1.0)
    result["edited"] = job.evaluate(numbers())["loss"]
    return result


def offload(what: str, **more: Any) -> dict[str, Any]:
    return {"sharding": ShardingPlan(offload=what), **more}  # type: ignore[arg-type]


def _new_folder() -> None:
    count = len(list(Path.cwd().glob("run-*")))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{count}-{os.getpid()}")
    Path(os.environ["TUTTI_RUN_FOLDER"]).mkdir(exist_ok=True)


def in_microbatches(fields: dict[str, Any], count: int) -> dict[str, Any]:
    return fields | {"batch": {"num_microbatches": count}}


def peak_nbytes(fields: dict[str, Any]) -> int:
    """Most bytes of the fake device's memory in a step, beyond those before the model was made."""
    import fakegpu

    before = fakegpu.live_nbytes()
    job, _, loader = job_of(fields)
    for batch in loader:
        torch.ops.fakegpu.reset_peak()
        job.step(batch)
    return torch.ops.fakegpu.peak_nbytes() - before
