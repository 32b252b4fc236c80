"""Compressed sums of gradients, in words and in bytes.

Bytes are those that one rank sends in a step to sum one bucket: the codes both ways, their scales and paddings, and a
flag for each gradient. Formulas: two phases of p - 1 codes of a chunk each (casts, levels, signs, top16-q4); p - 1
codes of the whole bucket (`gathered`; top-k and dgc are added up by owners of slices where `sparse`); two ring sums of
thin matrices (powersgd). The momentum of one-bit-adam and one-bit-lamb is written like one-bit, that of byte-adam like
bytegrad; before that, gradients are summed exactly. Sufficient factors (factors) lose nothing: `factors_sent_nbytes`
where that is less than an exact sum, else that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tutti.config import serialization
from tutti.config.vocabulary import CompressMethod
from tutti.config.zero_one import learns
from tutti.errors import PlanError

BLOCK = {"bytegrad": 2048, "qsgd": 512, "terngrad": 2048, "one-bit": 2048, "top16-q4": 512}
"""Values that share a scale."""

KEEP = 16
"""Values of a block that top16-q4 sends."""

MIN_RATE = 2.0
"""powersgd leaves a matrix as it is unless its factors are fewer values by so much."""

ZERO_ONE: CompressMethod = "zero-one-adam"
"""Sums gradients, exactly or in one bit, until the second moment stands; then ranks step alone (spec.zero_one)."""

FACTORS: CompressMethod = "factors"
"""Exact: linear layers' weights whose factors are fewer bytes than their gradients are summed by factors."""

LOOKS, LOOK_NBYTES = 8, 8
"""In so many of the last updates before their second moment stands, methods of momentum see how far ranks' parts of a
gradient cancel, and zero-one-adam in every exact one: so many bytes a gradient, summed beside its flag."""

MOMENTA: dict[CompressMethod, CompressMethod] = {
    "one-bit-adam": "one-bit",
    "byte-adam": "bytegrad",
    "one-bit-lamb": "one-bit",
    "zero-one-adam": "one-bit",
}
"""Methods that sum the optimizer's momentum, with what it is written like."""

GAIN_NBYTES = 24
"""What a message of top-k begins with where a gain decides on its density: three sums of squares."""

FIRST_DENSITY, DENSITY_RATIO = 0.25, 0.25
"""dgc's warm-up: sparsity 75 %, 93.75 %, 98.44 %, 99.6 %, then its own (Lin et al. 2018, section 3.3)."""

_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How gradients are written in fewer bytes while ranks sum them.

    `bits`: of a level of qsgd, 2, 4 (default) or 8. `density`: share of the values that top-k (0.01) and dgc (0.001)
    send. `gain`: top-k begins with a quarter of the values, and halves that down to `density` as long as messages have
    this share of the square of what is to be sent, over windows of `window` steps (16); 0: it is `density` from the
    beginning (GraVAC; compress.gravac). `rank`: columns of powersgd's matrices (1). `momentum`: dgc's own (0.9), that
    the optimizer must not have. `feedback`: bfloat16, float16 and bytegrad keep what rounding took away and send it
    later (False); one-bit, top-k, dgc, top16-q4, powersgd and methods of momentum always do, the others never.
    `sparse`: top-k and dgc are added up by owners of slices, and gathered as pairs or, where those are longer, as
    values (False). `warmup_steps`: of dgc, in which sparsity grows from 75 % (0). `freeze_step`: of methods of
    momentum, updates with exact sums in which the second moment learns; it must be stated, for 15 to 20 % of all
    updates are right. Of zero-one-adam, `kappa`: after how many updates in which it learns it does so half as often
    (16); `local_steps`: after how many times that ranks agree they do so half as often (16), until `longest` updates
    lie between (16). `between`: "ranks", or "hosts", inside which sums are exact and go through memory; None: hosts,
    where there are several and one has several ranks.
    """

    method: CompressMethod
    bits: Literal[2, 4, 8] | None = None
    density: float | None = None
    gain: float | None = None
    window: int | None = None
    rank: int | None = None
    momentum: float | None = None
    feedback: bool | None = None
    sparse: bool | None = None
    warmup_steps: int | None = None
    freeze_step: int | None = None
    kappa: int | None = None
    local_steps: int | None = None
    longest: int | None = None
    between: Literal["ranks", "hosts"] | None = None

    def __post_init__(self) -> None:
        for name, methods in _SETTINGS.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise PlanError(f"{name} is a setting of {', '.join(methods)}; leave it out with {self.method}")
        if self.density is not None and not 0 < self.density <= 1:
            raise PlanError(f"density = {self.density}; a share of the values that are sent, above 0 and at most 1")
        if self.gain is not None and not 0 < self.gain < 1:
            raise PlanError(f"gain = {self.gain}; a share of what is to be sent, above 0 and below 1")
        if self.window is not None and (self.gain is None or self.window < 1):
            raise PlanError(f"window = {self.window}; give a number of steps of 1 or more, with gain")
        if self.gain is not None and self.sparse:
            raise PlanError(
                f"gain = {self.gain} with sparse = true: ranks judge by what every message says, and owners of slices "
                "see parts of messages; leave one of them out"
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise PlanError(f"momentum = {self.momentum}; give a number of 0 or more and below 1")
        if self.rank is not None and self.rank < 1:
            raise PlanError(f"rank = {self.rank}; powersgd needs matrices of 1 column or more")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise PlanError(f"warmup_steps = {self.warmup_steps}; give a number of steps of 0 or more")
        for name in ("kappa", "local_steps", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} = {value}; give a number of 1 or more")
        if self.method in MOMENTA and (self.freeze_step is None or self.freeze_step < 1):
            raise PlanError(
                f"{self.method} needs freeze_step, the updates in which the second moment learns: 1 or more, and best "
                f"15 to 20 % of all; write {self.method},freeze_step=N"
            )

    @property
    def settings(self) -> dict[str, float]:
        """The settings that the method has, as stated or by default."""
        found = {name: methods[self.method] for name, methods in _SETTINGS.items() if self.method in methods}
        stated = {name: getattr(self, name) for name in found if getattr(self, name) is not None}
        return {**found, **stated}

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept back for later steps."""
        always = self.method in ("one-bit", "top-k", "dgc", "top16-q4", "powersgd", *MOMENTA)
        return always or bool(self.settings.get("feedback"))

    @property
    def by_pairs(self) -> bool:
        """Whether codes go as messages of pairs of ranks alone: sums of thin matrices and largest scales do not."""
        return self.method not in ("powersgd", "terngrad", ZERO_ONE, FACTORS)

    @property
    def code(self) -> "Compression":
        """What is on the wire: of methods of momentum, the code of it; else this."""
        like = MOMENTA.get(self.method)
        return self if like is None else Compression(method=like, feedback=True if like == "bytegrad" else None)

    def at(self, step: int) -> "Compression | None":
        """What is in force after `step` updates: dgc's density grows thin, momenta are sent from `freeze_step` on, and
        zero-one-adam's gradients where v does not learn. None: sums are exact.
        """
        if self.freeze_step is not None:
            now = step >= self.freeze_step
            if self.method == ZERO_ONE and not now:
                now = not learns(step, int(self.settings["kappa"]))
            return self if now else None
        if not self.warmup_steps:
            return self
        return replace(self, density=ramped_density(self.settings["density"], step / self.warmup_steps))


_SETTINGS: dict[str, dict[CompressMethod, float]] = {
    "bits": {"qsgd": 4},
    "density": {"top-k": 0.01, "dgc": 0.001},
    "gain": {"top-k": 0},
    "window": {"top-k": 16},
    "rank": {"powersgd": 1},
    "momentum": {"dgc": 0.9},
    "feedback": {"bfloat16": False, "float16": False, "bytegrad": False},
    "sparse": {"top-k": False, "dgc": False},
    "warmup_steps": {"dgc": 0},
    "freeze_step": dict.fromkeys(MOMENTA, 0),
    "kappa": {"zero-one-adam": 16},
    "local_steps": {"zero-one-adam": 16},
    "longest": {"zero-one-adam": 16},
}
"""Settings of compression: by name, the methods that have it, with what it is by default."""


def parse_compression(text: str) -> Compression:
    """What `text` says: "one-bit", or with settings "top-k,density=0.01". Raises PlanError naming what is wrong."""
    method, *rest = (part.strip() for part in text.split(","))
    data: dict[str, object] = {"method": method}
    for part in rest:
        name, _, value = part.partition("=")
        if not value or name in data:
            raise PlanError(f"compress {text!r}: {part!r} is no setting, or is there twice; write {name}=VALUE, once")
        data[name] = {"true": True, "false": False}.get(value, _number(value))
    return serialization.from_data(Compression, data, source=f"compress {text!r}")


def compression_in_words(compress: Compression) -> str:
    """The same, the other way round, with settings by default left out."""
    said = {name: getattr(compress, name) for name in compress.settings if getattr(compress, name) is not None}
    between = {} if compress.between is None else {"between": compress.between}
    pairs = {**said, **between}.items()
    return ",".join([compress.method, *(f"{name}={str(value).lower()}" for name, value in pairs)])


def ramped_density(density: float, progress: float) -> float:
    """dgc's density after the share `progress` of its warm-up."""
    if progress >= 1:
        return density
    return max(density, FIRST_DENSITY * DENSITY_RATIO ** math.floor(max(progress, 0) * 4))


def bucket_sent_nbytes(compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int) -> int:
    """Bytes one rank sends to sum gradients of `shapes` (as they lie in memory), of values of `itemsize`, in a step:
    with a flag for each. Of the step that `Compression.at` gives; None: an exact sum. Between hosts it is
    `flags_sent_nbytes` over all ranks and `sum_sent_nbytes` of the rank's part over the hosts.
    """
    return flags_sent_nbytes(len(shapes), ranks, itemsize) + sum_sent_nbytes(compress, shapes, ranks, itemsize)


def factors_pay(
    rows: int | float, out_features: float, in_features: float, itemsize: int = 4, width: int | None = None
) -> bool:
    """Whether `rows` rows of factors over all ranks, of values of `width` bytes, are fewer bytes than a ring's sum of
    the matrix: T (M + N) width < 2 M N itemsize.
    """
    return rows * (out_features + in_features) * (width or itemsize) < 2 * out_features * in_features * itemsize


def factors_sent_nbytes(rows: float, out_features: float, in_features: float, ranks: int, width: int = 4) -> float:
    """Bytes that a rank with so many rows of factors sends: K (p - 1) (M + N) values of `width`, and 8 to each rank
    that say how many."""
    return (ranks - 1) * (rows * (out_features + in_features) * width + 8)


def flags_sent_nbytes(gradients: int, ranks: int, itemsize: int) -> int:
    """Bytes one rank sends for the flags of so many gradients."""
    return 2 * (ranks - 1) * gradients * itemsize // ranks


def sum_sent_nbytes(compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int) -> int:
    """`bucket_sent_nbytes` without flags."""
    numel = sum(math.prod(shape) for shape in shapes)
    if compress is None or compress.method == FACTORS:  # what is no factors' sum is exact
        return 2 * (ranks - 1) * numel * itemsize // ranks
    compress = compress.code
    if compress.method == "powersgd":
        return _thin(compress, shapes, ranks, 8 if itemsize == 8 else 4)
    if compress.method in ("top-k", "dgc"):
        kept = min(numel, math.ceil(compress.settings["density"] * numel))
        if compress.settings["sparse"]:
            return _sparse(kept, numel, ranks, itemsize)
        return (ranks - 1) * (8 * kept + (GAIN_NBYTES if compress.settings.get("gain") else 0))
    if gathered(compress, ranks):
        return (ranks - 1) * message_nbytes(compress, numel)
    length = chunk_length(numel, ranks)
    sent = (ranks - 1) * (message_nbytes(compress, length) + message_nbytes(_back(compress, ranks), length))
    if compress.method == "terngrad":  # ranks agree on scales first
        sent += 2 * (ranks - 1) * 4 * -(-length // BLOCK["terngrad"])
    return sent


def gathered(compress: Compression, ranks: int) -> bool:
    """Whether ranks tell each other codes of the whole, which all of them add up: of top-k and dgc, and between two
    ranks of every method whose sums are written as gradients are. There a round less costs no byte more.
    """
    method = compress.code.method
    if method in ("top-k", "dgc"):
        return not compress.settings["sparse"]
    return ranks == 2 and method not in ("powersgd", "terngrad", "top16-q4")


def parts_sent_nbytes(compress: Compression, longest: int, ranks: int) -> int:
    """Bytes one rank sends for sums of which each of `ranks` gets its part, the longest of so many values; of a method
    that sums no whole tensors (powersgd).
    """
    compress = compress.code
    if compress.method in ("top-k", "dgc"):
        return (ranks - 1) * 8 * min(longest, math.ceil(compress.settings["density"] * longest))
    return (ranks - 1) * message_nbytes(compress, longest)


def chunk_length(numel: int, ranks: int) -> int:
    """Values of one rank's chunk of `numel`: a multiple of 8, so that chunks are whole bytes of any code."""
    return 8 * -(-numel // (8 * ranks))


def message_nbytes(compress: Compression | tuple[int, int], numel: int) -> int:
    """Bytes of the code of `numel` values; (bits, block) of a level stands for its method."""
    if isinstance(compress, tuple):
        bits, block = compress
        return 4 * -(-numel // block) + _up_to_4(-(-numel * bits // 8))
    method = compress.method
    if method in _WIDTH:
        return _up_to_4(_WIDTH[method] * numel)
    rows = -(-numel // BLOCK[method])
    if method == "bytegrad":
        return 8 * rows + _up_to_4(numel)
    if method == "top16-q4":
        return 4 * rows + _up_to_4(2 * rows * KEEP + rows * -(-KEEP // 2))
    bits = {"qsgd": int(compress.settings.get("bits", 0)), "terngrad": 2, "one-bit": 1}[method]
    return message_nbytes((bits, BLOCK[method]), numel)


def _back(compress: Compression, ranks: int) -> Compression | tuple[int, int]:
    """What sums are written with: top16-q4's in 4 bits, and terngrad's in as many as hold a sum of -1, 0 and 1."""
    if compress.method == "top16-q4":
        return (4, 512)
    if compress.method == "terngrad":
        return (4 if ranks <= 7 else 8, BLOCK["terngrad"])
    return compress


def _thin(compress: Compression, shapes: Sequence[Sequence[int]], ranks: int, width: int) -> int:
    """P and what is not compressed in one ring sum, Q in another."""
    rank, p, q = int(compress.settings["rank"]), 0, 0
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        if len(shape) > 1 and rank * (rows + columns) * MIN_RATE < rows * columns:
            p, q = p + rows * rank, q + columns * rank
        else:
            p += math.prod(shape)
    ends = 2 * (ranks - 1) * width
    return ends * p // ranks + ends * q // ranks


def _sparse(kept: int, numel: int, ranks: int, itemsize: int) -> int:
    """Pairs to the owners of slices, then the slices' pairs or values to all, and counts before both.

    For places that are spread evenly and that no two ranks share; a run's rows say what was sent.
    """
    width = 8 if itemsize == 8 else 4
    dense = kept * ranks * (4 + width) > numel * width
    slices = chunk_length(numel, ranks) * width if dense else kept * (4 + width)
    return (ranks - 1) * (16 + 8 * kept // ranks + slices)


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _up_to_4(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
