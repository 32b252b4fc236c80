"""Describe what compressed reductions change, which one device does not have."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tutti.config.compression import ZERO_ONE, parse_compression
from tutti.verification.alignment import sampled_part
from tutti.verification.recording import RankRecord, StepRecord, read_ranks, read_steps


def compressed_note(codec: str, reference: Path, compressed: Path, world_size: int) -> tuple[str, bool]:
    """Describe how gradients with compressed reductions differ from one device's.

    Args:
        codec: the codec's option text.
        reference: folder of the recording on one device.
        compressed: folder of the recording on ranks.
        world_size: number of ranks.

    Returns:
        The description, and whether the ranks agree with each other.
    """
    heads = read_ranks(compressed, world_size)
    steps = min((record.steps for record in (*read_ranks(reference, 1), *heads)), default=0)
    if not steps:
        return f"with compressed reductions ({codec}) the script ended without a step", False
    momentum = parse_compression(codec).freeze_step is not None
    if momentum and steps == 1:
        return (
            f"{codec} compresses momentum from the second step on, so one step cannot show it; verify more steps",
            True,
        )
    distances, agree = [], True
    for step in range(1 if momentum else 0, steps):
        expected, ranks = read_steps(reference, 1, step)[0], read_steps(compressed, world_size, step)
        distances.append(_distance(expected, heads, ranks))
        agree = agree and _ranks_agree(heads, ranks)
    low, high = min(distances), max(distances)
    counted = count_steps(steps)
    shown = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    if momentum:
        return _momentum_note(codec, shown, len(distances), agree), agree
    return (
        f"this plan compresses gradient reductions ({codec}), which one device does not have: the plan was verified "
        f"with exact reductions. With compression, over {counted}, gradients differ from one device's by {shown} "
        f"of their norm; {_agreement(agree)}. Not proved: that training reaches the same quality"
    ), agree


def _momentum_note(codec: str, shown: str, steps: int, agree: bool) -> str:
    counted = count_steps(steps)
    if parse_compression(codec).method == ZERO_ONE:
        return (
            f"this plan reduces gradients in one bit where the optimizer's second moment is frozen ({codec}): it was "
            "verified with exact reductions. For this comparison the second moment was updated in the first step and "
            f"then ever more rarely, on one device too; over the {counted} after it, gradients differ from one "
            f"device's by {shown} of their norm; {_agreement(agree)}. Not compared: updates that ranks make on their "
            "own once it is frozen, and how ranks synchronise then. Not proved: that training reaches the same quality"
        )
    return (
        f"once the optimizer's second moment is frozen, this plan reduces momentum ({codec}): it was verified with "
        "exact reductions. For this comparison it was frozen after the first step, on one device too; over the "
        f"{counted} after it, the gradients that the reductions stand for differ from one device's by {shown} of "
        f"their norm; {_agreement(agree)}. Not compared: when the plan freezes it. Not proved: that training reaches "
        "the same quality"
    )


def _agreement(ranks_agree: bool) -> str:
    return "all ranks have the same bits" if ranks_agree else "and ranks DIFFER from each other"


def count_steps(steps: int) -> str:
    """Format a number of steps."""
    return f"{steps} step{'s' if steps > 1 else ''}"


def _distance(reference: StepRecord, heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> float:
    """Return the relative distance of all gradients from one device's (L2 norm), the largest of any rank."""
    largest = 0.0
    for head, step in zip(heads, ranks, strict=True):
        difference = norm = 0.0
        for name, got, shard in _gradients(head, step):
            expected = reference.gradients.get(name)
            if expected is None:
                continue
            whole = expected if shard is None else sampled_part(expected, shard, got)
            difference += float((got.double() - whole.double()).square().sum())
            norm += float(whole.double().square().sum())
        largest = max(largest, math.sqrt(difference / norm) if norm else 0.0)
    return largest


def _ranks_agree(heads: Sequence[RankRecord], ranks: Sequence[StepRecord]) -> bool:
    """Return whether ranks that hold the same part of a parameter have equal gradients of it."""
    seen: dict[Any, torch.Tensor] = {}
    for head, step in zip(heads, ranks, strict=True):
        for name, got, shard in _gradients(head, step):
            if not torch.equal(seen.setdefault((name, None if shard is None else shard.cuts), got), got):
                return False
    return True


def _gradients(head: RankRecord, step: StepRecord) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, gradient in step.gradients.items():
        if gradient is not None:
            yield name, gradient, head.rank_shard.tensors.get(name)
