"""From the first difference and what was recorded around it to its likely cause: one small rule a cause.

Rules are tried in order. Each looks for evidence only its cause would leave: losses that add up, moments equal on every
rank, a rate in the ratio of the ranks. A difference no rule explains is described by where it stands.
"""

from collections.abc import Callable

from tutti.config.verdict import Cause
from tutti.verify import causes_data, causes_forward, causes_update
from tutti.verify.evidence import Case

Rule = Callable[[Case], Cause | None]


def diagnose(case: Case) -> Cause:
    """The likely cause: the first rule that finds its evidence, else what the stage alone says."""
    causes = (rule(case) for rule in RULES)
    return next((cause for cause in causes if cause is not None), _unexplained(case))


def _unexplained(case: Case) -> Cause:
    kind, sentence, remedy = _BY_STAGE.get(case.stage, _BY_STAGE["forward"])
    return Cause(kind=kind, sentence=sentence.format(where=case.where), remedy=remedy)


_SAME = "make forward, loss and update depend on the samples, the parameters and torch's random numbers alone"
_BY_STAGE: dict[str, tuple[str, str, str]] = {
    "forward": ("forward_differs", "{where} computes something else on ranks than on one device", _SAME),
    "loss": ("loss_differs", "the loss differs though the model's outputs agree", _SAME),
    "gradient": (
        "gradient_changed_locally",
        "a rank's gradient of {where} depends on which samples it has, beyond their outputs and losses: a backward of "
        "the script's own, or hooks, change gradients before they are averaged",
        "leave gradients to autograd, and clip with Job(clip_norm=...)",
    ),
    "gradient used": (
        "gradient_changed_after_averaging",
        "the script changes gradients between forward_backward and update, in a way that depends on the rank or on "
        "their number: {where} first",
        "do not scale or average gradients: tutti has averaged them over the global batch already",
    ),
    "hyper-parameter": (
        "settings_depend_on_ranks",
        "a setting of the optimizer depends on the rank or on the number of ranks",
        "give the optimizer the settings of the global batch on every rank",
    ),
    "parameter": (
        "update_differs",
        "gradients and settings agree, but the updated {where} does not: the optimizer itself depends on the rank, or "
        "is not deterministic",
        "let the optimizer's step depend on gradients and settings alone",
    ),
    "optimizer state": (
        "optimizer_state_differs",
        "the optimizer keeps other state for {where} on ranks than on one device",
        "let the optimizer's state depend on gradients and settings alone",
    ),
    "between steps": (
        "changed_between_steps",
        "between two steps the script changes {where} in a way that depends on the rank or on their number",
        "do what changes parameters alike on every rank, from the same numbers",
    ),
}

RULES: tuple[Rule, ...] = (
    causes_data.foreign_random,
    causes_data.not_repeatable,
    causes_data.different_seed,
    causes_data.batch_size,
    causes_data.data_order,
    causes_data.sample_values,
    causes_data.unaligned_random,
    causes_forward.padding,
    causes_forward.local_statistics,
    causes_forward.buffer_in_forward,
    causes_forward.control_flow,
    causes_forward.coupled_forward,
    causes_update.sum_loss,
    causes_update.weighted_loss,
    causes_update.mean_of_means,
    causes_update.coupled_loss,
    causes_update.local_clipping,
    causes_update.learning_rate,
    causes_forward.buffer,
)
