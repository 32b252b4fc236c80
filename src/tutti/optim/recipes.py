"""Named recipes: an optimizer, a learning-rate rule and a decay that belong together, for any batch size.

recipe = recipe_named("remote-sensing")
job = tutti.Job(global_batch_size=8192, lr_rule=recipe.lr_rule)
optimizer = recipe.optimizer(model)
job.prepare(model, optimizer, data, loss, scheduler=recipe.scheduler(optimizer), scheduler_clock="epoch")
"""

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from tutti.errors import PlanError
from tutti.optim.large_batch import LARS, parameter_groups
from tutti.optim.learning_rate import LRRule


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsRecipe:
    """LARS with Nesterov momentum. Biases and normalisations are neither adapted nor decayed.

    The rate is proportional to the global batch size. During the warm-up it rises from `base_lr`.

    Attributes:
        base_lr: rate at a batch of `base_batch_size`.
        base_batch_size: batch size for which `base_lr` holds.
        warmup_epochs: epochs in which the rate rises by equal amounts per step.
        decay_epochs: epochs after which the rate is multiplied with `decay`.
        decay: factor of each decay.
        momentum: momentum of LARS.
        weight_decay: weight decay of the adapted parameters.
        trust: trust coefficient of LARS.
    """

    base_lr: float = 0.1
    base_batch_size: int = 256
    warmup_epochs: float = 5.0
    decay_epochs: tuple[int, ...] = (30, 60, 80)
    decay: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    trust: float = 0.001

    @property
    def lr_rule(self) -> LRRule:
        """The rule for the Job: linear in the batch size, with a gradual warm-up (Goyal et al. 2017, section 2.2)."""
        return LRRule(
            base_lr=self.base_lr,
            base_batch_size=self.base_batch_size,
            scale="linear",
            warmup="gradual",
            warmup_epochs=self.warmup_epochs,
        )

    def optimizer(self, model: nn.Module) -> LARS:
        """Make the optimizer. Call this before the model's parameters are divided or flattened."""
        return LARS(
            parameter_groups(model, self.weight_decay),
            self.base_lr,
            momentum=self.momentum,
            trust=self.trust,
            nesterov=True,
        )

    def scheduler(self, optimizer: Optimizer) -> MultiStepLR:
        """Make the scheduler of the decays, to be advanced once per epoch (`scheduler_clock="epoch"`).

        The Job's rule multiplies the rates that it sets.
        """
        return MultiStepLR(optimizer, list(self.decay_epochs), gamma=self.decay)


RECIPES: dict[str, LarsRecipe] = {"remote-sensing": LarsRecipe()}
"""Recipes by name.

remote-sensing: LARS with Nesterov momentum, for classifying satellite images. The rate is 0.1 per 256 samples, with 5
epochs of warm-up and a tenth after 30, 60 and 80 epochs, as Goyal et al. 2017 (arXiv 1706.02677) use for 90 epochs of
ImageNet. Momentum, weight decay and trust coefficient are those of You et al. 2017 (arXiv 1708.03888).
"""


def recipe_named(name: str) -> LarsRecipe:
    """Return the recipe of this name.

    Raises:
        PlanError: if there is none; the message lists the names.
    """
    if name not in RECIPES:
        raise PlanError(f"there is no recipe {name!r}; use one of {', '.join(RECIPES)}")
    return RECIPES[name]
