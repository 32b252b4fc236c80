"""A plan that compresses sums cannot compute what one device does: what can be said of it all the same.

The plan with exact sums is verified like any other. Then its sums are compressed; every step begins at the state of one
device there, too. How far the gradients are from one device's is measured, and whether all ranks have the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tutti.config.compression import ZERO_ONE, parse_compression
from tutti.verify.parts import part_of
from tutti.verify.recording import RankRecord, StepRecord, read_ranks, read_steps


def compressed_note(words: str, one: Path, compressed: Path, world_size: int) -> tuple[str, bool]:
    """(what was found, whether ranks agree) of recordings on one device and on ranks whose sums were compressed."""
    heads = read_ranks(compressed, world_size)
    steps = min((record.steps for record in (*read_ranks(one, 1), *heads)), default=0)
    if not steps:
        return f"with sums compressed ({words}) the script ended without a step", False
    momenta = parse_compression(words).freeze_step is not None
    if momenta and steps == 1:
        return f"with momenta summed ({words}) from the second step on, one step tells nothing; verify more steps", True
    far, alike = [], True
    for step in range(1 if momenta else 0, steps):
        alone, ranks = read_steps(one, 1, step)[0], read_steps(compressed, world_size, step)
        far.append(_distance(alone, heads, ranks))
        alike = alike and _alike(heads, ranks)
    shown = f"{min(far):.2g}" if max(far) == min(far) else f"{min(far):.2g} to {max(far):.2g}"
    if momenta:
        return _of_momenta(words, shown, len(far), alike), alike
    agreement = "all ranks have the same bits" if alike else "and ranks DIFFER from each other"
    return (
        f"sums of gradients are compressed by this plan ({words}), which one device does not do: verified is the plan "
        f"with exact sums. With them compressed, over {steps} step{'s' if steps > 1 else ''}, gradients are {shown} of "
        f"their norm away from one device's; {agreement}. Not proved: that training reaches the same quality"
    ), alike


def _of_momenta(words: str, shown: str, steps: int, alike: bool) -> str:
    agreement = "all ranks have the same bits" if alike else "and ranks DIFFER from each other"
    if parse_compression(words).method == ZERO_ONE:
        return (
            "where the optimizer's second moment does not learn, gradients are summed in one bit by this plan "
            f"({words}): verified is the plan with exact sums. For this comparison it learned in the first step and "
            f"then ever more rarely, on one device too; over the {steps} step"
            f"{'s' if steps > 1 else ''} after it, gradients are {shown} of their norm away from one device's; "
            f"{agreement}. Not compared: updates that ranks make alone once it "
            "stands, and how they agree then. Not proved: that training reaches the same quality"
        )
    after = f"the {steps} step{'s' if steps > 1 else ''} after it"
    return (
        f"once the optimizer's second moment stands, momenta are summed by this plan ({words}): verified is the plan "
        f"with exact sums. For this comparison it stood after the first step, on one device too; over {after}, the "
        f"gradients that the sums stand for are {shown} of their norm away from one device's; {agreement}. Not "
        "compared: when it stands by the plan. Not proved: that training reaches the same quality"
    )


def _distance(one: StepRecord, heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> float:
    """||g - g of one device|| / ||g of one device|| over all gradients, the largest of any rank's own."""
    largest = 0.0
    for head, step in zip(heads, ranks, strict=True):
        apart = norm = 0.0
        for name, got, held in _gradients(head, step):
            expected = one.gradients.get(name)
            if expected is None:
                continue
            whole = expected if held is None else part_of(expected, held, got)
            apart += float((got.double() - whole.double()).square().sum())
            norm += float(whole.double().square().sum())
        largest = max(largest, math.sqrt(apart / norm) if norm else 0.0)
    return largest


def _alike(heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> bool:
    """Whether ranks that hold the same part of a parameter have the same gradient of it."""
    seen: dict[Any, torch.Tensor] = {}
    for head, step in zip(heads, ranks, strict=True):
        for name, got, held in _gradients(head, step):
            if not torch.equal(seen.setdefault((name, None if held is None else held.cuts), got), got):
                return False
    return True


def _gradients(head: RankRecord, step: StepRecord) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, gradient in step.gradients.items():
        if gradient is not None:
            yield name, gradient, head.holding.tensors.get(name)
