"""Says which parameters are not trained, or twice: nearly all are frozen, or optimizers leave out or share some."""

import math
from collections import Counter

from tutti.trainer.guard.findings import has_whole_modules
from tutti.trainer.guard.replicas import named_optimizers
from tutti.trainer.run_state import Run

FEW_TRAINED = 0.01
"""Share of trained parameters below which the run says how many there are."""

_LISTED = 3


def say_few_trained(run: Run) -> None:
    """Say how many parameters are trained if nearly all are frozen; adapters and probes intend it."""
    if not has_whole_modules(run):
        return
    shapes = run.parallel.layout.names  # of the whole
    sizes = [(math.prod(shapes[name]), p.requires_grad) for name, p in run.parallel.model.named_parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    if trained < FEW_TRAINED * total:
        run.output.screen.say(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")


def say_owners(run: Run) -> None:
    """Say which parameters that require a gradient no optimizer updates, and which several do; both may be intended."""
    parallel = run.parallel
    owned = {kind: parallel.trained_by([one]) for kind, one in named_optimizers(parallel.optimizers).items()}
    owners = Counter(name for named in owned.values() for name, _ in named)
    trained = [name for name, parameter in parallel.model.named_parameters() if parameter.requires_grad]
    left_out, shared = ([name for name in trained if test(owners[name])] for test in (_none, _several))
    if left_out and has_whole_modules(run):
        run.output.screen.say(
            f"parameters that require a gradient but are in no optimizer, so that they stay as they are: "
            f"{_listed(left_out)}"
        )
    if shared and has_whole_modules(run):
        kinds = [kind for kind, named in owned.items() if any(name == shared[0] for name, _ in named)]
        run.output.screen.say(f"parameters that {' and '.join(kinds)} both update: {_listed(shared)}")


def _none(count: int) -> bool:
    return count == 0


def _several(count: int) -> bool:
    return count > 1


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more
