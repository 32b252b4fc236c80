"""What a model costs, from shapes alone: `nn.Module` -> ModelSpec, module by module, on the meta device."""

from tutti.describe.meta import parameters_on_meta
from tutti.describe.model import describe_model

__all__ = ["describe_model", "parameters_on_meta"]
