"""The data-parallel plans worth costing: degrees, microbatches, precisions and shares for a request."""

import dataclasses

from tutti.config.cluster import ClusterSpec
from tutti.config.compression import MOMENTA
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import Precision
from tutti.cost_model.counts import samples_of
from tutti.cost_model.worker import best_rate, matrix_dtype, supports
from tutti.errors import PlanError
from tutti.planner.balance import proportional_shares
from tutti.planner.choice import Request
from tutti.planner.limits import seats

LOWER: tuple[Precision, ...] = ("tf32", "bfloat16", "float16")
"""Precisions below full, in the order in which they keep range: float16 needs loss scaling."""


def candidates(model: ModelSpec, cluster: ClusterSpec, request: Request) -> list[Plan]:
    """Every plan to cost. One-device and data-parallel plans of the script's batch, none with an idle rank."""
    samples = samples_of(request.script.batch.global_batch_size, request.script.batch.unit, model.tokens_per_sample)
    plans = []
    for degree in degrees(cluster, request, samples):
        for precision in precisions(model, cluster, request):
            for slices in microbatches(model, request, samples, degree):
                plan = dataclasses.replace(
                    request.script,
                    batch=dataclasses.replace(request.script.batch, num_microbatches=slices),
                    mesh={"replicate": degree},
                    shares=(),
                    split_shares=(),
                    precision=precision,
                )
                plans.append(plan)
                shares = _shares(model, cluster, plan, samples)
                if shares:
                    plans.append(dataclasses.replace(plan, shares=shares))
    return plans


def degrees(cluster: ClusterSpec, request: Request, samples: int) -> list[int]:
    """Data-parallel degrees: all up to 16, then divisors of the batch, whole nodes, powers of two, and the most.

    CPU hosts can take a rank for each core. Raises PlanError for a fixed degree above the batch.
    """
    if request.degree is not None:
        if request.degree > samples:
            raise PlanError(
                f"{request.degree} ranks cannot share a global batch of {samples} samples without idle ranks; "
                f"ask for at most {samples} ranks or a larger global_batch_size"
            )
        return [request.degree]
    most = min(seats(cluster), samples, request.max_devices or samples)
    per_node = {node.devices_per_node for node in cluster.nodes}
    wanted = set(range(1, min(most, 16) + 1)) | {most}
    wanted |= {degree for degree in range(17, min(most, 4096) + 1) if samples % degree == 0}
    power = 1
    while power <= most:
        wanted |= {power} | {power * count for count in per_node if power * count <= most}
        power *= 2
    return sorted(wanted)


def precisions(model: ModelSpec, cluster: ClusterSpec, request: Request) -> list[Precision]:
    """The precisions to try: one, unless the request leaves the choice. All devices must have a rate for it.

    float16 is tried where a device is faster in it than in bfloat16: it takes as much memory, and scaling of losses,
    with which codes of momenta do not go.
    """
    if request.precision == "script":
        return [request.script.precision]
    if request.precision != "auto":
        return [request.precision]
    found = [precision for precision in LOWER if possible(model, cluster, precision)]
    if "bfloat16" in found and "float16" in found:
        devices = [cluster.devices[node.device] for node in cluster.nodes]
        if all(best_rate(device, "bfloat16") >= best_rate(device, "float16") for device in devices):
            found.remove("float16")
    code = request.script.sync.compress
    if code is not None and code.method in MOMENTA and "float16" in found:
        found.remove("float16")
    return ["full", *found]


def possible(model: ModelSpec, cluster: ClusterSpec, precision: Precision) -> bool:
    """Whether every device of the cluster says how fast it is in this precision, and it is lower than the model's."""
    if model.dtype != "float32":
        return False
    dtype = matrix_dtype(model.dtype, precision)
    return all(supports(cluster.devices[node.device], dtype) for node in cluster.nodes)


def microbatches(model: ModelSpec, request: Request, samples: int, degree: int) -> list[int]:
    """Numbers of microbatches: the script's, and where results allow a change the powers of two.

    More are left out once a slice has fewer samples than ranks.
    """
    own = request.script.batch.num_microbatches
    fixed = request.keep_microbatches or (model.batch_statistics and not request.allow_microbatches)
    if fixed:
        return [own]
    counts = {own} | {2**power for power in range(samples.bit_length())}
    return sorted(count for count in counts if samples // count >= degree) or [own]


def _shares(model: ModelSpec, cluster: ClusterSpec, plan: Plan, samples: int) -> tuple[float, ...]:
    if plan.world_size == 1:
        return ()
    try:
        return proportional_shares(
            model, cluster, plan.world_size, plan.precision, samples // plan.batch.num_microbatches
        )
    except PlanError:
        return ()  # costing this plan says why it is impossible
