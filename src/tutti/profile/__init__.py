"""Profiles of models and machines: `nn.Module` -> ModelSpec on the meta device, hosts -> ClusterSpec by measuring.

The names below are loaded on first use, because the catalog and the named architectures need no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.profile.meta_device import parameters_on_meta
    from tutti.profile.model_profile import describe_model

__all__ = ["describe_model", "parameters_on_meta"]


def __getattr__(name: str) -> Any:
    if name == "describe_model":
        from tutti.profile.model_profile import describe_model

        return describe_model
    if name == "parameters_on_meta":
        from tutti.profile.meta_device import parameters_on_meta

        return parameters_on_meta
    raise AttributeError(f"module 'tutti.profile' has no attribute {name!r}")
