"""What an optimizer's update takes, by its name: memory traffic, calls, and what it holds for a moment."""

from tutti.config.model import ModelSpec
from tutti.cost_model import constants
from tutti.cost_model.worker import Array


def update_nbytes(model: ModelSpec, gradients: Array, states: Array, *, on_cpu: bool) -> Array:
    """Bytes that go over memory, at its bandwidth, for gradients and states of so many bytes: besides state, gradients
    and parameters are read and parameters written."""
    if on_cpu and _fused(model):
        return (3.0 * gradients + constants.FUSED_PASSES * states) / constants.FUSED_RATE
    often = constants.OPTIMIZER_PASSES.get(model.optimizer, constants.OPTIMIZER_PASSES_OTHER)
    return 3.0 * gradients + often * states


def update_calls(model: ModelSpec, *, on_cpu: bool) -> float:
    """Bare operator calls for one parameter tensor."""
    if on_cpu and _fused(model):
        return constants.FUSED_CALLS
    return constants.OPTIMIZER_CALLS.get(model.optimizer, constants.OPTIMIZER_CALLS_OTHER)


def update_temporaries(model: ModelSpec) -> float:
    """Tensors of a parameter's size that exist for a moment on a CPU; elsewhere the update is not the peak."""
    if _fused(model):
        return 0.0
    return constants.OPTIMIZER_TEMPORARIES.get(model.optimizer, constants.OPTIMIZER_TEMPORARIES_OTHER)


def _fused(model: ModelSpec) -> bool:
    """Whether runtime.fused takes torch's fused kernels on a CPU, unless the script asked for others."""
    return model.optimizer in constants.FUSED and model.dtype in constants.FUSED_DTYPES
