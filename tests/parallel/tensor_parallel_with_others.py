"""Runs divided models beside whole ones on the same ranks: losses, gradients, parameters after updates, evaluation."""

import copy
from typing import Any

import torch
from torch import nn

from against_one import close
from tutti.comm.world import World, join_world
from tutti.config.plan import BatchPlan, Plan
from tutti.parallel.layout import Layout, gather_whole, local_tensors
from tutti.parallel.mesh import Mesh
from tutti.parallel.tensor import split_model
from tutti.parallel.tensor.tensor_plan import decide


def run_cases(
    modules: dict[str, str], names: tuple[str, ...], steps: int = 2, shares: tuple[float, ...] = ()
) -> dict[str, str]:
    """On every rank: each case (its name -> the module and table it is in) beside the whole model, divided in `shares`
    if there are any. Returns failures."""
    import importlib

    torch.set_default_dtype(torch.float64)
    world = join_world()
    mesh = Mesh({"split": world.world_size}, world.rank)
    failures = {}
    for name in names:
        case = importlib.import_module(modules[name]).CASES[name]
        try:
            beside(name, case, world, mesh, steps, shares)
        except Exception as error:  # one case must not hide the others; all ranks fail alike
            import traceback

            failures[name] = f"{error}\n{traceback.format_exc(limit=-4)}"
            if "Connection" in str(error) or "Timed out" in str(error):
                break
    return failures


def beside(name: str, case: Any, world: World, mesh: Mesh, steps: int, shares: tuple[float, ...] = ()) -> None:
    torch.manual_seed(1)
    whole = case.model().double()
    divided = copy.deepcopy(whole)
    layout = Layout.of(divided, mesh)
    plan = Plan(
        batch=BatchPlan(global_batch_size=1),
        mesh={"split": mesh.world_size},
        layout=case.layout,
        split_shares=shares,
    )
    decided = {(one.name, one.role) for one in decide(divided, case.layout, mesh.world_size, weights=shares)}
    missing = {one for one in case.divided if one not in decided} - {(n, "column") for n, r in decided if r == "shared"}
    assert not missing, f"{name}: {missing} not among {decided}"
    split_model(divided, plan, layout)
    layout.assign_owners(divided, world)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, divided)]
    for step in range(steps):
        losses = [_backward(case, model) for model in (whole, divided)]
        close(losses[1], losses[0], case.tolerance, f"{name}, step {step}: loss")
        _same_gradients(f"{name}, step {step}", whole, divided, layout, world, case.tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = gather_whole(layout, world, dict(local_tensors(divided)))
    _same(f"{name}:", state, {key: value.detach() for key, value in local_tensors(whole)}, case.tolerance)
    with torch.no_grad():
        got, expected = (_values(case, model.eval()) for model in (divided, whole))
    close(got, expected, case.tolerance, f"{name}: evaluation")
    assert type(got) is torch.Tensor


def _backward(case: Any, model: nn.Module) -> torch.Tensor:
    args, kwargs = case.inputs()
    loss = case.loss(model.train()(*args, **kwargs))
    loss.backward()
    assert type(loss) is torch.Tensor
    return loss.detach()


def _values(case: Any, model: nn.Module) -> torch.Tensor:
    args, kwargs = case.inputs()
    output = model(*args, **kwargs)
    return output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) else output.logits


def _same_gradients(
    words: str, whole: nn.Module, divided: nn.Module, layout: Layout, world: World, tolerance: float
) -> None:
    named = {name: p.grad for name, p in divided.named_parameters() if p.grad is not None}
    for name in named:  # what the runtime's buckets do: here split is the only axis
        if "split" in layout.shard_of(name).sums:
            torch.distributed.all_reduce(named[name])
    got = gather_whole(layout, world, named)  # type: ignore[arg-type]
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys(), f"{words}: gradients of {got.keys() ^ expected.keys()}"
    _same(f"{words}: gradient of", got, expected, tolerance)
    own = {name: gradient for name, gradient in named.items() if not layout.shard_of(name).cuts}
    _same(f"{words}: this rank's gradient of", own, {name: expected[name] for name in own}, tolerance)


def _same(words: str, got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Close, each relative to itself; what is a hundred times smaller than others, relative to those: a bias that
    cancels (of keys, or before a norm) has a gradient of nothing but rounding."""
    largest = max((float(value.abs().max()) for value in expected.values()), default=0.0)
    for name, value in expected.items():
        scale = max(1.0, 1e-2 * largest / max(float(value.abs().max()), 1e-300))
        close(got[name], value, tolerance * scale, f"{words} {name}")
