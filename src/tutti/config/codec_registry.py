"""The codecs that send gradients, momenta and replicas' changes in fewer bytes: one entry each.

An entry is the part of a codec that needs no torch: its name in plans, its parameters, the size of its messages, what
the cost model assumes of its kernels, and what it cannot be combined with. The part that needs torch is a factory,
imported when a run starts. A new codec is one file with that factory and one entry here; a codec of another package
calls `register_codec`:

    register_codec(
        CodecEntry(
            name="sign-only",
            summary="signs, without a scale",
            parameters={"gain": Parameter(default=1.0, allowed=lambda gain: gain > 0, requirement="above 0")},
            message_nbytes=lambda settings, numel: up_to_4(-(-numel // 8)),
            make_codec="my_package.sign_only:make",
        )
    )

A plan then says {"method": "sign-only", "options": {"gain": 2.0}}, and the command line --compress sign-only,gain=2.0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tutti.config.registry import Parameter, Registry, Value
from tutti.errors import PlanError

Settings = Mapping[str, Any]
"""Values of a codec's parameters, whether stated or defaults."""

Shapes = Sequence[Sequence[int]]
"""Shapes of tensors that lie in memory one after another."""

BLOCK: Final = {"bytegrad": 2048, "qsgd": 512, "terngrad": 2048, "one-bit": 2048, "top16-q4": 512}
"""Number of consecutive values that share a scale, by codec."""

KEEP: Final = 16
"""Values that top16-q4 sends of each block."""

MIN_RATE: Final = 2.0
"""powersgd compresses a matrix only if its factors have fewer values than the matrix by this factor."""

GAIN_NBYTES: Final = 24
"""Header of a top-k message whose density is chosen by a gain: three sums of squares of 8 bytes."""

PAIR_NBYTES: Final = 8
"""Bytes of one value that top-k sends: a 32-bit position and a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """What the cost model assumes of a codec's kernels where no probe has measured them.

    Attributes:
        cpu_factor: time on a CPU, relative to a typical codec.
        encode_share: fraction of that time spent on encoding.
        decode_share: fraction of that time spent on decoding one message.
        return_codec: the codec, as `--compress` names it, whose measured rates hold for the second phase of a reduction
            in two phases.
    """

    cpu_factor: float = 1.0
    encode_share: float = 0.5
    decode_share: float = 0.25
    return_codec: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEntry:
    """One codec.

    A reduction in two phases sends each chunk to the rank that owns it; the owners add the chunks and send the sums
    back.

    Attributes:
        name: the codec's name in plan files and on the command line.
        summary: what it sends, in a few words.
        parameters: parameters by name, with defaults and checks.
        check: (stated settings) -> raises PlanError for settings that cannot be combined.
        message_nbytes: (settings, numel) -> bytes of a message of `numel` values: a multiple of 4 that never falls as
            `numel` grows. None for codecs whose messages are not of flat values (powersgd, factors).
        return_nbytes: (settings, numel, ranks) -> bytes of the sum of one chunk in the second phase; None: as
            `message_nbytes`.
        shared_scales_nbytes: (numel of a chunk) -> bytes of the scales that ranks agree on first; None: no such scales.
        reduce_nbytes: (settings, shapes, ranks, itemsize) -> bytes one rank sends in an all-reduce that uses neither
            two phases nor an all-gather of whole messages; None: it uses one of these.
        residuals: tensors of the gradient's size that are kept between steps, where `keeps` says so.
        keeps: (settings) -> whether anything is kept between steps.
        gathers: (settings) -> whether ranks always gather messages of the whole bucket. Otherwise only two ranks do so,
            unless `two_phase_only`.
        two_phase_only: the code of the sums differs from that of the gradients, so two ranks use two phases as well.
        rounds: rounds of collectives in a reduction in two phases.
        pairwise: every round consists of messages between pairs of ranks.
        whole_tensors: the codec compresses whole tensors and is never given a part of a tensor.
        own_momentum: the codec applies the momentum itself, so the optimizer must have none.
        whole_vectors: (settings) -> whether one reduction must see the whole vector of replicas' changes.
        short_messages: a message has few of the values, so most of the time goes into encoding.
        exact: the codec loses nothing.
        momentum_codec: in the 1-bit Adam family, the codec that encodes the momentum.
        per_step_only: made for the gradients of every step, not for replicas' changes over several steps.
        excludes: conditions of a plan that the codec cannot be combined with ("mesh.stage", "sharding.level",
            "precision.float16") -> reason and remedy, to follow a colon.
        kernel_cost: what the cost model assumes of its kernels.
        make_codec: (Compression) -> Codec, or "module:function" of it.
        make_return_codec: the same for the second phase of a reduction in two phases; None: the codec itself.
        make_reducer: (Compression, shapes, **group, dtype, device, seed) -> GradientReducer, or "module:function" of
            it; None where the usual reducers serve.
    """

    name: str
    summary: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    check: Callable[[Settings], None] | None = None
    message_nbytes: Callable[[Settings, int], int] | None = None
    return_nbytes: Callable[[Settings, int, int], int] | None = None
    shared_scales_nbytes: Callable[[int], int] | None = None
    reduce_nbytes: Callable[[Settings, Shapes, int, int], int] | None = None
    residuals: int = 1
    keeps: Callable[[Settings], bool] = lambda settings: False
    gathers: Callable[[Settings], bool] = lambda settings: False
    two_phase_only: bool = False
    rounds: int = 2
    pairwise: bool = True
    whole_tensors: bool = False
    own_momentum: bool = False
    whole_vectors: Callable[[Settings], bool] = lambda settings: False
    short_messages: bool = False
    exact: bool = False
    momentum_codec: str | None = None
    per_step_only: bool = False
    excludes: Mapping[str, str] = field(default_factory=dict)
    kernel_cost: KernelCost = KernelCost()
    make_codec: str | Callable[..., Any] | None = None
    make_return_codec: str | Callable[..., Any] | None = None
    make_reducer: str | Callable[..., Any] | None = None

    def defaults(self) -> dict[str, Value | None]:
        """Return the default value of every parameter."""
        return {name: parameter.default for name, parameter in self.parameters.items()}


CODECS: Registry[CodecEntry] = Registry("codec", "sync.compress.method")
"""Every codec that a plan may name."""


def register_codec(entry: CodecEntry) -> CodecEntry:
    """Make a codec known to plans, the command line, predictions and runs.

    Returns:
        The entry.

    Raises:
        PlanError: a codec of that name is already registered.
    """
    return CODECS.register(entry)


def up_to_4(nbytes: int) -> int:
    """Round up to the next multiple of 4."""
    return -(-nbytes // 4) * 4


def block_nbytes(numel: int, *, bits: int, block: int, scale_nbytes: int = 4) -> int:
    """Return the bytes of a message of `bits` bits per value, with a scale for every `block` values."""
    return scale_nbytes * -(-numel // block) + up_to_4(-(-numel * bits // 8))


def pair_count(settings: Settings, numel: int) -> int:
    """Return how many of `numel` values are in a top-k message."""
    density: float = settings["density"]
    return min(numel, math.ceil(density * numel))


def chunk_length(numel: int, ranks: int) -> int:
    """Return the length of one rank's chunk of `numel` values: a multiple of 8, so that any code fills whole bytes."""
    return 8 * -(-numel // (8 * ranks))


def _top_k_nbytes(settings: Settings, numel: int) -> int:
    return PAIR_NBYTES * pair_count(settings, numel)


def _top_k_reduce_nbytes(settings: Settings, shapes: Shapes, ranks: int, itemsize: int) -> int:
    """Bytes that one rank sends to reduce tensors of `shapes` with top-k.

    Dense: its whole message goes to all ranks. Sparse: pairs go to the owners of slices, then the slices to all ranks.
    """
    numel = sum(math.prod(shape) for shape in shapes)
    pairs = pair_count(settings, numel)
    if not settings["sparse"]:
        return (ranks - 1) * (PAIR_NBYTES * pairs + (GAIN_NBYTES if settings.get("gain") else 0))
    # assumes that positions are spread evenly and differ between ranks; a run reports what it really sent
    width = 8 if itemsize == 8 else 4
    dense = pairs * ranks * (4 + width) > numel * width
    slices = chunk_length(numel, ranks) * width if dense else pairs * (4 + width)
    return (ranks - 1) * (16 + PAIR_NBYTES * pairs // ranks + slices)


def _check_top_k(stated: Settings) -> None:
    if "window" in stated and ("gain" not in stated or stated["window"] < 1):
        raise PlanError(f"window = {stated['window']}; give a number of steps of 1 or more, together with gain")
    if "gain" in stated and stated.get("sparse"):
        raise PlanError(
            f"gain = {stated['gain']} with sparse = true: the gain is computed from whole messages, but owners of "
            "slices see only parts of them; leave one of them out"
        )


def _bucketed_nbytes(settings: Settings, numel: int) -> int:
    blocks = -(-numel // BLOCK["top16-q4"])
    return 4 * blocks + up_to_4(2 * blocks * KEEP + blocks * -(-KEEP // 2))


def _powersgd_reduce_nbytes(settings: Settings, shapes: Shapes, ranks: int, itemsize: int) -> int:
    """Bytes that one rank sends in two ring all-reduces: P with the uncompressed tensors, then Q."""
    rank, p, q = int(settings["rank"]), 0, 0
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if len(shape) > 1 and rank * (rows + columns) * MIN_RATE < rows * columns:
            p, q = p + rows * rank, q + columns * rank
        else:
            p += math.prod(shape)
    ends = 2 * (ranks - 1) * (8 if itemsize == 8 else 4)
    return ends * p // ranks + ends * q // ranks


def _ternary_bits(ranks: int) -> int:
    """Bits that hold a sum of `ranks` values of -1, 0 or 1."""
    return 4 if ranks <= 7 else 8


def _at_least_1(requirement: str) -> dict[str, Any]:
    return {"allowed": lambda value: value >= 1, "requirement": requirement}


_DENSITY: Final[dict[str, Any]] = {
    "allowed": lambda density: 0 < density <= 1,
    "requirement": "give the fraction of the values to send, above 0 and at most 1",
}
_FEEDBACK: Final = Parameter(default=False)
_FREEZE_STEP: Final = Parameter(
    **_at_least_1("the number of updates in which the second moment learns: 1 or more, best 15 to 20 % of all updates")
)
_NO_LOSS_SCALE: Final = (
    "gradients carry a loss scale that changes, but the momentum they are added to is not scaled; use precision = "
    '"bfloat16", or compress gradients: '
)
_WHOLE_MOMENTUM: Final = (
    "every rank needs the whole momentum to encode it, but gets only its shard; use sharding.level = 1, or compress "
    "gradients: one-bit"
)
_BETWEEN_AGREEMENTS: Final = (
    "ranks step independently until they agree again, so each needs the whole model and optimizer state; use "
    "replicate, or one-bit-adam"
)


def _cast(name: str, nbytes: int, *, feedback: bool) -> CodecEntry:
    return CodecEntry(
        name=name,
        summary=f"cast to {name}, summed in the gradient's own precision",
        parameters={"feedback": _FEEDBACK} if feedback else {},
        message_nbytes=lambda settings, numel: up_to_4(nbytes * numel),
        keeps=lambda settings: bool(settings.get("feedback")),
        make_codec="tutti.compression.cast:from_compression",
    )


def _momentum(name: str, momentum_codec: str, summary: str, **more: Any) -> CodecEntry:
    """Make an entry of the 1-bit Adam family: exact gradient sums first, then momenta encoded by `momentum_codec`."""
    return CodecEntry(
        name=name,
        summary=summary,
        parameters={"freeze_step": _FREEZE_STEP, **more.pop("parameters", {})},
        keeps=lambda settings: True,
        momentum_codec=momentum_codec,
        per_step_only=True,
        excludes={
            **more.pop("excludes", {}),
            "sharding.level": _WHOLE_MOMENTUM,
            "precision.float16": _NO_LOSS_SCALE + momentum_codec,
        },
        **more,
    )


_ENTRIES: Final = (
    _cast("float64", 8, feedback=False),
    _cast("float32", 4, feedback=False),
    _cast("bfloat16", 2, feedback=True),
    _cast("float16", 2, feedback=True),
    CodecEntry(
        name="bytegrad",
        summary="8 bits a value between the smallest and largest of its block",
        parameters={"feedback": _FEEDBACK},
        message_nbytes=lambda settings, numel: block_nbytes(numel, bits=8, block=BLOCK["bytegrad"], scale_nbytes=8),
        keeps=lambda settings: bool(settings["feedback"]),
        make_codec="tutti.compression.bytegrad:from_compression",
    ),
    CodecEntry(
        name="qsgd",
        summary="unbiased levels of 2, 4 or 8 bits",
        parameters={"bits": Parameter(default=4)},
        message_nbytes=lambda settings, numel: block_nbytes(numel, bits=int(settings["bits"]), block=BLOCK["qsgd"]),
        make_codec="tutti.compression.qsgd:from_compression",
    ),
    CodecEntry(
        name="terngrad",
        summary="-1, 0 or 1 times a scale that ranks share, unbiased",
        message_nbytes=lambda settings, numel: block_nbytes(numel, bits=2, block=BLOCK["terngrad"]),
        return_nbytes=lambda settings, numel, ranks: block_nbytes(
            numel, bits=_ternary_bits(ranks), block=BLOCK["terngrad"]
        ),
        shared_scales_nbytes=lambda numel: 4 * -(-numel // BLOCK["terngrad"]),
        two_phase_only=True,
        rounds=3,
        pairwise=False,
        make_codec="tutti.compression.terngrad:from_compression",
    ),
    CodecEntry(
        name="one-bit",
        summary="signs and a mean magnitude for each block, with error feedback",
        message_nbytes=lambda settings, numel: block_nbytes(numel, bits=1, block=BLOCK["one-bit"]),
        keeps=lambda settings: True,
        make_codec="tutti.compression.one_bit:from_compression",
    ),
    CodecEntry(
        name="top-k",
        summary="the largest values and their positions, with error feedback",
        parameters={
            "density": Parameter(default=0.01, **_DENSITY),
            "gain": Parameter(
                default=0,
                allowed=lambda gain: 0 < gain < 1,
                requirement="give the fraction of the squared norm that messages must carry, above 0 and below 1",
            ),
            "window": Parameter(default=16),
            "sparse": Parameter(default=False),
        },
        check=_check_top_k,
        message_nbytes=_top_k_nbytes,
        reduce_nbytes=_top_k_reduce_nbytes,
        keeps=lambda settings: True,
        gathers=lambda settings: not settings["sparse"],
        whole_vectors=lambda settings: bool(settings["sparse"]),
        short_messages=True,
        kernel_cost=KernelCost(encode_share=0.98, decode_share=0.01),
        make_codec="tutti.compression.top_k:from_compression",
        make_reducer="tutti.compression.gravac:make_top_k_reducer",
    ),
    CodecEntry(
        name="dgc",
        summary="top-k of a velocity with momentum correction (deep gradient compression)",
        parameters={
            "density": Parameter(default=0.001, **_DENSITY),
            "momentum": Parameter(
                default=0.9,
                allowed=lambda momentum: 0 <= momentum < 1,
                requirement="give a number of 0 or more and below 1",
            ),
            "sparse": Parameter(default=False),
            "warmup_steps": Parameter(
                default=0, allowed=lambda steps: steps >= 0, requirement="give a number of steps of 0 or more"
            ),
        },
        message_nbytes=_top_k_nbytes,
        reduce_nbytes=_top_k_reduce_nbytes,
        residuals=2,
        own_momentum=True,
        keeps=lambda settings: True,
        gathers=lambda settings: not settings["sparse"],
        whole_vectors=lambda settings: bool(settings["sparse"]),
        short_messages=True,
        per_step_only=True,
        kernel_cost=KernelCost(encode_share=0.98, decode_share=0.01),
        make_codec="tutti.compression.dgc:from_compression",
        make_reducer="tutti.compression.gravac:make_top_k_reducer",
    ),
    CodecEntry(
        name="top16-q4",
        summary="16 of every 512 values in 4 bits, with error feedback",
        message_nbytes=_bucketed_nbytes,
        return_nbytes=lambda settings, numel, ranks: block_nbytes(numel, bits=4, block=512),
        keeps=lambda settings: True,
        two_phase_only=True,
        kernel_cost=KernelCost(return_codec="qsgd"),
        make_codec="tutti.compression.bucketed_top_k:from_compression",
        make_return_codec="tutti.compression.bucketed_top_k:make_return_codec",
    ),
    CodecEntry(
        name="powersgd",
        summary="every matrix as a product of two thin ones, with error feedback",
        parameters={"rank": Parameter(default=1, **_at_least_1("give powersgd's factor matrices 1 column or more"))},
        reduce_nbytes=_powersgd_reduce_nbytes,
        keeps=lambda settings: True,
        two_phase_only=True,
        pairwise=False,
        whole_tensors=True,
        whole_vectors=lambda settings: True,
        kernel_cost=KernelCost(cpu_factor=2.5, encode_share=1.0, decode_share=0.0),
        make_reducer="tutti.compression.powersgd:make_powersgd_reducer",
    ),
    CodecEntry(
        name="factors",
        summary="weight gradients of linear layers as sufficient factors where that sends fewer bytes; loses nothing",
        exact=True,
        pairwise=False,
        per_step_only=True,
        excludes={
            "mesh.stage": (
                "a stage may compute weight gradients separately from the rest of backward, which factors do not "
                "support; leave compress out, or use replicate instead of stage"
            ),
            "sharding.level": (
                "every rank needs only its shard of a reduced gradient, but factors give all of it to every rank; use "
                "sharding.level = 1, or leave compress out"
            ),
        },
    ),
    _momentum("one-bit-adam", "one-bit", "Adam's momentum in signs, once its second moment is frozen"),
    _momentum("byte-adam", "bytegrad", "Adam's momentum in 8 bits, once its second moment is frozen"),
    _momentum("one-bit-lamb", "one-bit", "LAMB's momentum in signs, once its second moment is frozen"),
    _momentum(
        "zero-one-adam",
        "one-bit",
        "0/1 Adam: one-bit sums while the second moment pauses, then independent steps with occasional agreement",
        parameters={
            name: Parameter(default=16, **_at_least_1("give a number of 1 or more"))
            for name in ("kappa", "local_steps", "longest")
        },
        pairwise=False,
        excludes={
            f"mesh.{axis}": _BETWEEN_AGREEMENTS
            for axis in ("shard", "expert", "table", "split", "stage", "context", "space")
        },
    ),
)

for _entry in _ENTRIES:
    register_codec(_entry)
