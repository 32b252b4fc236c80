"""Finds silent corruption: replicas' parameters and optimizer state are compared bit for bit every few steps.

In synchronous training all replicas make the same updates with the same bits. A bit that memory or a processor has
flipped on one of them stays, and spoils the gradients of all. Where other devices round in another way, the first
comparison shows that replicas differ in most tensors; that is said once, and they are not compared so.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tutti.errors import TrainingError
from tutti.parallel.layout import to_local
from tutti.trainer.guard.agreement import check_replicas
from tutti.trainer.guard.findings import warn
from tutti.trainer.guard.replicas import Checksums, Held, checksum_of_bits, states_of, unequal, weights_of
from tutti.trainer.hash_schedule import HashTimes
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import should_agree

_LARGEST_NUMEL = 2**22
"""The first so many values of a tensor are compared value by value."""

_MOST_FLIPPED = 16
"""If more values differ, and a quarter of those compared, updates were not the same."""

_Part = tuple[int, torch.Tensor]


def compare_replicas(run: Run) -> None:
    """Compare the bits of replicas' parameters and optimizer state, and choose the next step for that. Collective.

    Raises:
        TrainingError: on every rank, if a few values differ, naming what and the rank.
        RankMismatchError: on every rank, if many do, naming the cause where that is known.
    """
    schedule = run.loop.guard.hashes
    if not schedule.exact or not _has_replicas(run):
        schedule.exact = False
        return
    began_s = time.perf_counter()
    held = _held(run)
    own = _digests(held)
    read_s = time.perf_counter()
    times = HashTimes(reading_s=read_s - began_s, exchange_s=schedule.exchange_s, step_s=schedule.step_s())
    everyone: list[tuple[Checksums, HashTimes]] = run.loop.watch.gather("bits of replicas", (own, times))
    schedule.exchange_s = time.perf_counter() - read_s
    if unequal([digests for digests, _ in everyone]) and _differ_by_rounding(run, held):
        schedule.exact = False
        return
    schedule.good_step = run.state.progress.step
    schedule.choose(run.loop.steps_begun, [each for _, each in everyone])


def compare_before_checkpoint(run: Run) -> None:
    """Compare replicas before their state is saved, so that no checkpoint has the damage. Collective.

    Raises:
        TrainingError, RankMismatchError: on every rank, if they differ.
    """
    schedule = run.loop.guard.hashes
    if schedule.good_step is not None and schedule.good_step != run.state.progress.step:
        compare_replicas(run)


def _has_replicas(run: Run) -> bool:
    """Whether some ranks hold equal tensors and make the same updates of them."""
    mesh, level = run.parallel.mesh, run.parallel.plan.sharding.level
    copies = mesh.degree("replicate") > 1 or (level == 1 and mesh.degree("shard") > 1)
    return copies and should_agree(run)


def _held(run: Run) -> Held:
    held = {**weights_of(run), **states_of(run)}
    return {
        name: (place, tensor)
        for name, (place, tensor) in held.items()
        if tensor is None or (tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 1)
    }


def _digests(held: Held) -> Checksums:
    """One number for all weights, and one for all state."""
    groups: dict[str, list[_Part]] = {}
    for name, (place, tensor) in sorted(held.items(), key=lambda item: item[0]):  # a loaded state has another order
        parts = groups.setdefault(name.partition(" of ")[0].partition(" '")[0], [])
        if tensor is not None:
            parts.append((place, tensor))
    return {
        kind: (held[kind][0], _digest(tensor for _, tensor in parts)) for kind, parts in groups.items() if kind in held
    }


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    """A number of 64 bits, in one wait for each device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        sums.setdefault(tensor.device, []).append(checksum_of_bits(tensor))
    total = 0
    for values in sums.values():
        for number in torch.stack(values).tolist():
            total = (total * 0x9E3779B97F4A7C15 + number) & ((1 << 63) - 1)
    return total


def _differ_by_rounding(run: Run, held: Held) -> bool:
    """Look at the tensors that differ, and refuse what is more than rounding. Collective.

    Returns:
        True if updates were rounded in another way; False if nothing differs any more.

    Raises:
        TrainingError: on every rank, naming the tensor and the rank, if so few values differ that a bit was flipped.
        RankMismatchError: on every rank, if updates differ.
    """
    own: Checksums = {
        name: (place, None if tensor is None else int(checksum_of_bits(tensor)))
        for name, (place, tensor) in held.items()
    }
    everyone: list[Checksums] = run.loop.watch.gather("bits of tensors", own)
    different = unequal(everyone)
    if not different:  # a wrong value was read once
        return False
    name, origin, rank = different[0]
    place = everyone[origin][name][0]
    values = {number: sums[name][1] for number, sums in enumerate(everyone) if sums.get(name, (None,))[0] == place}
    odd, agreeing = _odd(values)
    pair = (agreeing[0], odd[0]) if agreeing else (origin, rank)
    tensor = held[name][1] if name in held and run.parallel.world.rank in pair else None
    sent = None if tensor is None else to_local(tensor).detach().reshape(-1)[:_LARGEST_NUMEL].cpu()
    tensors: list[torch.Tensor | None] = run.loop.watch.gather("values of a tensor", sent)
    where, many = _difference(tensors[pair[0]], tensors[pair[1]])
    good, step = run.loop.guard.hashes.good_step, run.state.progress.step
    more = len({other for other, _, _ in different}) - 1
    if many or (good is None and not _are_few(more + 1, len({other for sums in everyone for other in sums}))):
        check_replicas(run, f"after step {step}")
        since = "from the beginning" if good is None else f"since step {good}"
        warn(
            run,
            f"replicas differ by rounding {since}, first in {name} on ranks {pair[0]} and {pair[1]}, so they are "
            f"{'not' if good is None else 'no longer'} compared bit for bit, and silent corruption is not seen",
        )
        return True
    also = f", and {more} more tensor{'s' if more > 1 else ''}," if more else ""
    differ = "differ" if also or name.startswith("the weights") else "differs"
    raise TrainingError(
        f"silent corruption: after step {step}, {name}{also} {_ranks_differ(differ, odd, agreeing, pair)}{where}; "
        f"{'all other bits are equal' if good is None else f'all bits were equal after step {good}'}. "
        f"{_remedy(run, odd, agreeing)}"
    )


def _are_few(different: int, tensors: int) -> bool:
    """Whether so few of all tensors differ that devices which round in another way are not the cause.

    One wrong weight may be in its optimizer's state, too.
    """
    return different <= max(3, tensors // 4) and 2 * different < tensors


def _odd(values: dict[int, Any]) -> tuple[list[int], list[int]]:
    """Return the ranks that differ from most, and those most; no rank agrees where there is no majority."""
    counted = Counter(values.values()).most_common()
    common, number = counted[0]
    if 2 * number <= len(values):
        return sorted(values), []
    return [rank for rank, each in values.items() if each != common], [
        r for r, each in values.items() if each == common
    ]


def _ranks_differ(differ: str, odd: Sequence[int], agreeing: Sequence[int], pair: tuple[int, int]) -> str:
    if not agreeing:
        return f"{differ} between ranks {pair[0]} and {pair[1]}, and which of them is right cannot be known"
    names = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    return f"on {names} {differ} from what ranks {', '.join(map(str, agreeing))} have, which agree"


def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None) -> tuple[str, bool]:
    """Return which value differs, as a clause, and whether so many do that no flipped bit explains it."""
    if expected is None or actual is None or expected.shape != actual.shape:
        return "", False
    places = (expected != actual).nonzero()[:, 0]
    if not len(places):
        return "", False
    if len(places) > _MOST_FLIPPED and 4 * len(places) > len(expected):
        return "", True
    place = int(places[0])
    pair = f"{expected[place].item():.6g} and {actual[place].item():.6g}"
    return f" ({len(places)} of {len(expected)} values compared; {pair})", False


def _remedy(run: Run, odd: Sequence[int], agreeing: Sequence[int]) -> str:
    where = f"the host of rank {odd[0]}" if agreeing else "their hosts"
    return (
        f"Memory or processor of {where} may be faulty: test or leave it out; checkpoints are written only where "
        f"replicas are equal, so go on with: tutti run --resume {run.output.folder.path}"
    )
