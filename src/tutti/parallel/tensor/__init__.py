"""Tensor parallelism: the layers of a model divided over the ranks of the mesh's split axis.

`decide` derives from the layout rules and known layer patterns how each module is divided. `apply_decisions` carries
this out on one rank. Between divided layers, an activation is a `SplitTensor`: it holds this rank's part and behaves
as the whole tensor, so the model's code is unchanged.
"""

from torch import nn

from tutti.comm.hierarchical import make_communicator
from tutti.config.plan import Plan
from tutti.parallel.layout import Layout
from tutti.parallel.tensor import tensor_functions, tensor_reshapes
from tutti.parallel.tensor.apply_tensor_parallel import apply_decisions, whole_parameter
from tutti.parallel.tensor.tensor_activation import whole
from tutti.parallel.tensor.tensor_collectives import SplitGroup
from tutti.parallel.tensor.tensor_plan import SplitModule, decide, describe_split

TABLES = (tensor_functions, tensor_reshapes)
"""The modules that register handlers for torch functions on parts when they are imported (`SplitTensor.handlers`)."""


def rules_for_others(plan: Plan) -> bool:
    """Whether layout rules may be meant for other axes, so that a rule may divide nothing over the split axis."""
    return plan.degree("expert", "table", "stage", "space") > 1


def split_model(model: nn.Module, plan: Plan, layout: Layout) -> None:
    """Divide `model` over the split axis, in place, and record in `layout` what this rank holds. Collective.

    Raises:
        PlanError: if a rule asks for a module that cannot be divided; it names the module and the remedy.
    """
    mesh = layout.mesh
    degree = mesh.degree("split")
    if degree == 1:
        return
    weights = plan.split_weights
    decisions = decide(model, plan.layout, degree, rules_for_others=rules_for_others(plan), weights=weights)
    handle = mesh.new_group("split")
    group = SplitGroup(
        handle=handle,
        rank=mesh.index("split"),
        size=degree,
        weights=weights,
        channel=layout.channel("activations", "split"),
        communicator=make_communicator(handle),
    )
    apply_decisions(model, decisions, layout, group)


__all__ = ["SplitModule", "describe_split", "rules_for_others", "split_model", "whole", "whole_parameter"]
