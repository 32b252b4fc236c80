"""Named recipes: an optimizer, a rule for its rate and its decay that belong together, for any batch size.

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
    """LARS with Nesterov's momentum; biases and normalisations are neither adapted nor decayed.

    The rate is `base_lr` at a batch of `base_batch_size` and in proportion to the batch (k ranks of n samples: k n),
    reached from `base_lr` by equal amounts a step over `warmup_epochs`; it is multiplied with `decay` after each of
    `decay_epochs`. `trust`: LARS' coefficient.
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
        """For the Job: linear in the batch, with a gradual warm-up (Goyal et al. 2017, section 2.2)."""
        return LRRule(
            base_lr=self.base_lr,
            base_batch_size=self.base_batch_size,
            scale="linear",
            warmup="gradual",
            warmup_epochs=self.warmup_epochs,
        )

    def optimizer(self, model: nn.Module) -> LARS:
        """For a model that nothing has taken apart yet."""
        return LARS(
            parameter_groups(model, self.weight_decay),
            self.base_lr,
            momentum=self.momentum,
            trust=self.trust,
            nesterov=True,
        )

    def scheduler(self, optimizer: Optimizer) -> MultiStepLR:
        """The decays, to be advanced once an epoch (`scheduler_clock="epoch"`); the rule multiplies what it gives."""
        return MultiStepLR(optimizer, list(self.decay_epochs), gamma=self.decay)


RECIPES: dict[str, LarsRecipe] = {"remote-sensing": LarsRecipe()}
"""remote-sensing: LARS and Nesterov, 0.1 k n / 256, 5 epochs of warm-up, a tenth after 30, 60 and 80 epochs: rates of
Goyal et al. 2017 (arXiv 1706.02677) for 90 epochs of ImageNet, with LARS, as used for classifying satellite pictures.
Momentum, weight decay and LARS' coefficient are those of You et al. 2017 (arXiv 1708.03888)."""


def recipe_named(name: str) -> LarsRecipe:
    """The recipe of that name. Raises PlanError with the names there are."""
    if name not in RECIPES:
        raise PlanError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
