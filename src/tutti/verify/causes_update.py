"""Rules of diagnosis about loss, gradients and settings of the optimizer."""

from tutti.config.verdict import Cause
from tutti.verify.evidence import Case, plain_losses
from tutti.verify.measure import number_difference

CLOSE = 1e-4
"""Relative difference under which a rule takes two numbers for equal; rules tell apart what differs by per cents."""


def sum_loss(case: Case) -> Cause | None:
    """The loss adds up over ranks."""
    if case.stage != "loss" or not plain_losses(case):
        return None
    added = all(number_difference(one, sum(ranks)) < CLOSE for one, ranks in plain_losses(case))
    several = any(len(ranks) > 1 for _, ranks in plain_losses(case))
    if not (added and several):
        return None
    return Cause(
        kind="loss_is_a_sum",
        sentence="the loss is a sum over samples: the ranks' losses add up to one device's, where a mean was "
        "expected, so its size and the step depend on how the batch is cut",
        remedy="return the mean over samples (reduction='mean'), or tutti.Weighted(total=sum, count=number it is over)",
    )


def weighted_loss(case: Case) -> Cause | None:
    """A Weighted whose parts do not add up."""
    weighted = case.sides is not None and any(
        part.loss is not None and part.loss.count is not None for part in case.sides.one.parts
    )
    if case.stage != "loss" or not weighted:
        return None
    return Cause(
        kind="weighted_does_not_add_up",
        sentence="the loss is a tutti.Weighted whose total or count over the whole batch is not the sum over its parts",
        remedy="return as total the sum over this part's tokens, and as count their number",
    )


def mean_of_means(case: Case) -> Cause | None:
    """One device's loss lies among the ranks' losses, but not at their mean by samples."""
    if case.stage != "loss":
        return None
    pairs = [(one, ranks) for one, ranks in plain_losses(case) if len(ranks) > 1]
    slack = [CLOSE * abs(one) for one, _ in pairs]
    inside = [min(r) - s <= one <= max(r) + s for (one, r), s in zip(pairs, slack, strict=True)]
    if not pairs or not all(inside):
        return None
    return Cause(
        kind="mean_over_ranks",
        sentence="mean over ranks instead of samples: the loss is a mean over something that ranks have different "
        "numbers of (tokens, masked entries, weights), so the mean of the ranks' means is not the global mean",
        remedy="return tutti.Weighted(total=sum of the losses, count=number of tokens) instead of the mean",
    )


def coupled_loss(case: Case) -> Cause | None:
    """The loss of the whole is no mean of its parts' losses."""
    if case.stage != "loss":
        return None
    return Cause(
        kind="coupled_samples",
        sentence="the loss couples samples: over the whole batch it is no mean of what the ranks' shares give "
        "(contrastive pairs, a term squared after averaging, a ranking within the batch)",
        remedy="compare with samples of all ranks (gather the features), or choose a loss that is a mean over "
        "samples; num_microbatches=1 alone does not help",
    )


def local_clipping(case: Case) -> Cause | None:
    """Gradients were changed on each rank before they were averaged."""
    if case.stage != "gradient" or case.sides is None:
        return None
    operators = dict.fromkeys(name for part in case.parts for name in part.backward_ops)
    hooked = case.sides.head.hooked
    if not operators and not hooked:
        return None
    what = (
        f"hooks on {', '.join(hooked[:3])}" if hooked else f"operators of clipping in backward ({', '.join(operators)})"
    )
    return Cause(
        kind="local_clipping",
        sentence=f"local clipping: gradients are changed on each rank before they are averaged ({what}); outputs "
        f"and loss agree, the gradient of {case.where} does not",
        remedy="let the Job clip the averaged gradient: Job(clip_norm=...), and remove the hooks",
    )


def learning_rate(case: Case) -> Cause | None:
    """The rate depends on the number of ranks."""
    if case.stage != "learning rate" or case.sides is None:
        return None
    one, other = case.sides.one, case.sides.ranks[(case.found.first.ranks or (0,))[0]]
    for name, rate in one.hyper_parameters.items():
        theirs = other.hyper_parameters.get(name, 0.0)
        if not name.endswith(".lr") or not rate or rate == theirs:
            continue
        if one.step == 0:
            return Cause(
                kind="learning_rate_depends_on_ranks",
                sentence=f"the learning rate is {theirs:g} on {case.world_size} ranks and {rate:g} on one device, "
                f"{theirs / rate:g} times: it depends on the number of ranks, while the global batch does not",
                remedy="give the learning rate of the global batch; state how it scales with the batch in "
                "Job(lr_rule=...)",
            )
        return Cause(
            kind="scheduler_depends_on_ranks",
            sentence=f"the learning rate of step {one.step + 1} is {theirs:g} on {case.world_size} ranks and "
            f"{rate:g} on one device: the scheduler advances another number of times a step",
            remedy="pass the scheduler to job.prepare(scheduler=...), which advances it once a step, and do not "
            "step it yourself",
        )
    return None
