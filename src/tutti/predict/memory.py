"""Peak memory of a rank, by what holds it."""

from tutti.predict import constants
from tutti.predict.layout import Region
from tutti.spec.cluster import DeviceKind
from tutti.spec.model import ModelSpec, ModuleSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import RankMemory


def rank_memory(
    model: ModelSpec,
    plan: Plan,
    *,
    regions: tuple[Region, ...],
    slice_samples: int,
    bucket_nbytes: float,
    kind: DeviceKind,
) -> RankMemory:
    """Peak bytes of a rank that computes `slice_samples` samples of its largest slice at once.

    Gradients live in the buckets (they are views of them), so that communication takes one bucket more while it
    is under way, `bucket_nbytes`, and nothing on one rank. Peak is taken at the start of backward.
    """
    half = plan.precision in ("bfloat16", "float16")
    modules = model.modules
    parameters = float(sum(module.parameter_nbytes for module in modules))
    if half:  # autocast keeps a 2-byte copy of the weights it multiplies with
        parameters += sum(module.parameter_nbytes / 2 for module in modules if _multiplies(module))
    gradients = float(sum(module.gradient_nbytes for module in modules))
    optimizer = float(sum(module.optimizer_nbytes for module in modules))
    activations = slice_samples * activation_nbytes(model, regions, half=half)
    communication = bucket_nbytes if plan.data_parallel_degree > 1 else 0.0
    tensors = parameters + gradients + optimizer + activations + communication
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        communication=communication,
        buffers=float(sum(module.buffer_nbytes for module in modules)),
        reserve=constants.RESERVE_NBYTES[kind] + constants.FRAGMENTATION[kind] * tensors,
    )


def activation_nbytes(model: ModelSpec, regions: tuple[Region, ...], *, half: bool) -> float:
    """Bytes of one sample that live at the start of backward.

    What modules keep for backward, plus the largest output's gradient. A recomputed region keeps only its input
    (taken as large as its output) until its own backward, when it holds everything inside it: the largest region
    counts in full.
    """
    kept = [_kept(module, half=half) for module in model.modules]
    inside = {index for region in regions for index in region.members}
    always = sum(nbytes for index, nbytes in enumerate(kept) if index not in inside)
    inputs = sum(model.modules[region.root].output_nbytes for region in regions)
    largest = max((sum(kept[index] for index in region.members) for region in regions), default=0.0)
    transient = max((module.output_nbytes for module in model.modules), default=0.0)
    return always + inputs + largest + transient


def _kept(module: ModuleSpec, *, half: bool) -> float:
    """Autocast keeps the inputs of matrix products at half their size, approximately all such a module keeps."""
    return module.activation_nbytes * (0.5 if half and _multiplies(module) else 1.0)


def _multiplies(module: ModuleSpec) -> bool:
    return any(op.kind in constants.MATRIX_KINDS for op in module.ops)
