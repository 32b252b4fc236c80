"""The model as this rank holds it: its part of the parameters, their layout, and the reduction of their gradients."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from tutti.comm.world import World
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES
from tutti.data.seeds import derive_seed
from tutti.errors import ScriptError
from tutti.parallel.context import Sequences
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.data.gradient_hooks import GradientHooks
from tutti.parallel.data.replicate import Replica
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.model_changes import NotedModel
from tutti.parallel.part_reads import PartReads
from tutti.parallel.script_reads import ScriptReads
from tutti.parallel.whole_model import WholeModel


@dataclass(slots=True, kw_only=True)
class ParallelModel:
    """A prepared model with its optimizers, under a plan.

    Attributes:
        plan: the plan, with the script's annotations.
        model: the user's module, divided in place: this rank's part.
        layout: the shard of every parameter, buffer and optimizer state that this rank holds.
        replica: gradient reduction over the data-parallel ranks.
        scope: the ranks over which batch statistics are computed.
        sequences: how batches are divided along the context axis.
        seed: the Job's seed.
        whole: makes the whole model out of all ranks' parts.
        reads: gives losses the whole parameters that they read outside of the modules' forward.
        script_reads: watches what the script reads of parts between steps.
        mixtures: names of all mixtures of experts in the undivided model.
        gradient_hooks: hooks that the script has registered on parameters.
        noted: the model as prepare found it, which the script may not change in every way.
        group_sizes: number of parameters in each group of each optimizer, when `check_groups` looked at them last.
    """

    plan: Plan
    world: World
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    layout: Layout
    replica: Replica
    scope: BatchScope
    sequences: Sequences
    seed: int
    whole: WholeModel
    reads: PartReads
    script_reads: ScriptReads
    gradient_hooks: GradientHooks
    noted: NotedModel
    mixtures: tuple[str, ...] = ()
    group_sizes: list[list[int]] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    def draws_seed(self, step: int, microbatch: int, call: Iterable[int], *purpose: int | str) -> int:
        """Return the seed of the random draws of this rank's part of a microbatch.

        Args:
            step: number of the step, from 0.
            microbatch: number of the microbatch.
            call: tells the draws of a later call of forward_backward from those of the first; empty for the first.
            purpose: tells draws within the microbatch apart.
        """
        rank = self.mesh.index(*DATA_AXES, "context")
        return derive_seed(self.seed, "dropout", step, microbatch, rank, *call, *purpose)

    def check_changes(self) -> None:
        """Follow what the script has changed on the model since prepare, or refuse it; see NotedModel."""
        if self.noted.check():
            self.replica.changed = True

    def trained_by(self, optimizers: Iterable[Optimizer]) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank, with their names, that some of the optimizers update."""
        wanted = [number for number, known in enumerate(self.optimizers) if any(known is one for one in optimizers)]
        held = self.layout.state_names(self.model, self.optimizers)
        names = {name for number in wanted for group in self.layout.states.groups[number] for name in group}
        names |= {self.layout.first_name(name) for number in wanted for name in held[number].values()}
        return [(name, p) for name, p in self.model.named_parameters() if self.layout.first_name(name) in names]

    def check_groups(self) -> None:
        """Check the parameters that the script has added to an optimizer since the last step.

        Raises:
            ScriptError: one of them is not in the model.
        """
        self.script_reads.leave_out_absent(self.optimizers)
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if sizes == self.group_sizes:
            return
        known = {*self.model.parameters(), *self.layout.states.substitutes}
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter not in known:
                    raise ScriptError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not "
                        "in the model that prepare returned, so its gradient is not reduced over the ranks; add "
                        "parameters of that model only, and give it new modules before prepare"
                    )
        self.group_sizes = sizes

    @property
    def loss_copies(self) -> int:
        """Number of ranks that compute the same loss, of which one counts."""
        return self.mesh.degree("split", "space")
