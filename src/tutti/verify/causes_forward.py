"""Rules of diagnosis about forward: what makes a sample's output depend on its rank, or on the samples beside it."""

from tutti.config.verdict import Cause
from tutti.verify.evidence import Case, equal, moments_agree, padded_less, words


def padding(case: Case) -> Cause | None:
    """Ranks pad to their own longest sample, and what is padded changes the result."""
    if case.stage not in ("forward", "loss", "gradient") or case.sides is None:
        return None
    shorter = padded_less(case.sides)
    differing = case.found.first.ranks
    if not shorter or (case.stage == "forward" and not set(differing) <= set(shorter)):
        return None
    return Cause(
        kind="padding",
        sentence=f"{words(shorter)} pads its samples less than one device does (to the longest of fewer), and "
        f"{case.where} gives real tokens other values when there is more padding",
        remedy="mask padding wherever tokens are mixed or averaged (attention masks, packed sequences, masked "
        "means), or pad every sample to one length",
    )


def control_flow(case: Case) -> Cause | None:
    """Some ranks compute something else."""
    if case.stage != "forward" or case.sides is None:
        return None
    pairs = case.found.alignment or []
    agreeing = [pair.rank for pair in pairs if pair.rank not in case.found.first.ranks]
    keys = [{call.key for call in part.calls} for part in case.parts if part.part.count]
    same_calls = all(key == keys[0] for key in keys)
    always = all(one.first.ranks == case.found.first.ranks for one in case.later if one.first.stage == "forward")
    if same_calls and not (agreeing and always):
        return None
    ranks = words(case.found.first.ranks)
    return Cause(
        kind="rank_dependent_forward",
        sentence=f"forward does something else on {ranks} than on the others and on one device, first in "
        f"{case.where}: its control flow or values depend on the rank",
        remedy="take the rank, the environment and the world size out of the model's forward",
    )


def local_statistics(case: Case) -> Cause | None:
    """Every rank's rows have the same mean or mean square: they were normalised among themselves."""
    if case.stage != "forward" or not case.found.alignment or not moments_agree(case):
        return None
    return Cause(
        kind="local_batch_statistics",
        sentence=f"local BatchNorm statistics: {case.where} normalises over the samples of each rank's share, not "
        "over the whole batch",
        remedy="use torch.nn.BatchNorm*, whose statistics tutti takes over all ranks, or a normalisation of each "
        "sample alone (LayerNorm, GroupNorm)",
    )


def buffer_in_forward(case: Case) -> Cause | None:
    """A module that uses a buffer it updates from the local batch."""
    if case.stage != "forward" or case.sides is None:
        return None
    own = [name for name in case.sides.one.after.buffers if case.sides.owner(name) == case.found.first.module]
    for name in own:
        expected = case.sides.one.after.buffers[name]
        others = [step.after.buffers.get(name) for step in case.sides.ranks]
        if any(other is None or not equal(expected, other) for other in others):
            return _buffer_cause(case, name)
    return None


def buffer(case: Case) -> Cause | None:
    """A buffer that every rank updates from its own samples."""
    return _buffer_cause(case, case.found.first.tensor) if case.stage == "buffer" else None


def _buffer_cause(case: Case, name: str) -> Cause:
    return Cause(
        kind="unsynchronised_buffer",
        sentence=f"unsynchronised buffer: {name.rpartition('.')[2]!r} of {case.where} is updated from each rank's "
        "own samples, so that ranks drift apart",
        remedy="update it from statistics of all samples (torch.distributed.all_reduce of the sum and the count "
        "when it is initialised), or use torch.nn.BatchNorm*, which tutti synchronises",
    )


def coupled_forward(case: Case) -> Cause | None:
    """A sample's output depends on the samples beside it."""
    if case.stage != "forward" or case.found.alignment is None:
        return None
    return Cause(
        kind="coupled_samples",
        sentence=f"in {case.where} the output for a sample depends on the other samples of the rank's share "
        "(statistics, attention or ranking over the batch)",
        remedy="compute a sample's output from that sample alone, or gather what is needed from all ranks",
    )
