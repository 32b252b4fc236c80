"""How gradients are sent in fewer bytes: what a plan's `sync.compress` states, in words and in bytes.

Bytes are those that one rank sends in a step to reduce one bucket: the messages both ways, their scales and paddings,
and a flag for each gradient. A codec's entry (`codec_registry`) has the size of a message. Reductions take two phases
of p - 1 messages of a chunk each, or gather p - 1 messages of the whole bucket (`gathers_messages`), unless the entry
has a formula of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from tutti.config import serialization
from tutti.config.codec_registry import CODECS, CodecEntry, chunk_length
from tutti.config.registry import REQUIRED, Value
from tutti.config.zero_one_schedule import learns
from tutti.errors import PlanError

ZERO_ONE: Final = "zero-one-adam"
"""Sums gradients, exactly or in one bit, until the second moment is frozen; then ranks step alone."""

FACTORS: Final = "factors"
"""Exact: weights of linear layers are summed by sufficient factors where these are fewer bytes."""

STATISTICS_UPDATES, STATISTICS_NBYTES = 8, 8
"""Codecs of momentum observe how far ranks' parts of a gradient cancel: in this many of the last updates before the
second moment is frozen, zero-one-adam in every exact update. So many bytes a gradient are summed beside its flag."""

MOMENTUM_CODECS: Final = {name: entry.momentum_codec for name, entry in CODECS.items() if entry.momentum_codec}
"""The codecs of the 1-bit Adam family, with the codec that writes the momentum."""

FIRST_DENSITY, DENSITY_RATIO = 0.25, 0.25
"""dgc's warm-up: sparsity 75 %, 93.75 %, 98.44 %, 99.6 %, then its own (Lin et al. 2018, section 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The codec of a plan and its parameters; None where the codec's default holds.

    Args:
        method: a name in `CODECS`.
        bits: bits of a level of qsgd: 2, 4 or 8.
        density: share of the values that top-k and dgc send.
        gain: top-k begins with a quarter of the values and halves that down to `density` as long as messages have this
            share of the square of what is to be sent (GraVAC); 0: `density` from the beginning.
        window: steps over which a gain is judged.
        rank: columns of powersgd's matrices.
        momentum: dgc's own momentum, which the optimizer must not have.
        feedback: whether bfloat16, float16 and bytegrad keep what rounding took away and send it later. one-bit, top-k,
            dgc, top16-q4, powersgd and codecs of momentum always do, the others never.
        sparse: owners of slices add up the pairs of top-k and dgc; slices are gathered as pairs or, where those are
            longer, as values.
        warmup_steps: steps in which dgc's sparsity grows from 75 %.
        freeze_step: updates with exact sums in which the second moment learns, for codecs of momentum. It must be
            stated; 15 to 20 % of all updates are right.
        kappa: updates in which zero-one-adam's second moment learns before it does so half as often.
        local_steps: agreements after which zero-one-adam's ranks agree half as often.
        longest: updates between two of these agreements at most.
        between: "hosts": sums inside a host are exact and go through memory; "ranks"; None: hosts, where there are
            several and one has several ranks.
        options: parameters of codecs that other packages register.
    """

    method: str
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
    options: dict[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        entry, stated = self.entry, self.stated
        for name in stated:
            if name not in entry.parameters:
                having = [other.name for other in CODECS.values() if name in other.parameters]
                remedy = f"leave it out with {self.method}"
                if not having:
                    raise PlanError(f"{self.method} has no setting {name}; {remedy}")
                raise PlanError(f"{name} is a setting of {', '.join(having)}; {remedy}")
        for name, parameter in entry.parameters.items():
            value = stated.get(name)
            if parameter.default is REQUIRED and (value is None or not parameter.allowed(value)):
                raise PlanError(f"{self.method} needs {name}, {parameter.requirement}; write {self.method},{name}=N")
            if value is not None:
                parameter.check(name, value)
        if entry.check is not None:
            entry.check(stated)

    @property
    def entry(self) -> CodecEntry:
        """The codec's entry in `CODECS`."""
        return CODECS[self.method]

    @property
    def stated(self) -> dict[str, Any]:
        """The settings that were given."""
        given = {name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None}
        return {**given, **self.options}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the codec has, as stated or by default."""
        return {**self.entry.defaults(), **self.stated}

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept for later steps."""
        return self.entry.keeps(self.settings)

    @property
    def pairwise(self) -> bool:
        """Whether every round consists of messages between pairs of ranks."""
        return self.entry.pairwise

    @property
    def sends_momentum(self) -> bool:
        """Whether momenta are sent in place of gradients."""
        return self.entry.momentum_codec is not None

    @property
    def code(self) -> "Compression":
        """The codec of the messages: the momentum's, for codecs of momentum; otherwise this one."""
        messages = self.entry.momentum_codec
        if messages is None:
            return self
        return Compression(method=messages, feedback=True if "feedback" in CODECS[messages].parameters else None)

    def at(self, step: int) -> "Compression | None":
        """What is in force after `step` updates; None: sums are exact.

        dgc's density ramps down, momenta are sent from `freeze_step` on, zero-one-adam's gradients where the second
        moment does not learn.
        """
        if self.freeze_step is not None:
            now = step >= self.freeze_step
            if self.method == ZERO_ONE and not now:
                now = not learns(step, int(self.settings["kappa"]))
            return self if now else None
        if not self.warmup_steps:
            return self
        return replace(self, density=ramped_density(self.settings["density"], step / self.warmup_steps))


_SETTINGS: Final = tuple(part.name for part in fields(Compression) if part.name not in ("method", "between", "options"))
"""Fields that are settings of codecs."""


def parse_compression(text: str) -> Compression:
    """The compression that `text` states: "one-bit", or with settings "top-k,density=0.01".

    Raises:
        PlanError: names the part that is wrong.
    """
    method, *rest = (part.strip() for part in text.split(","))
    data: dict[str, Any] = {"method": method}
    options: dict[str, object] = {}
    own = set(CODECS[method].parameters).difference(_SETTINGS) if method in CODECS else set()
    for part in rest:
        name, _, value = part.partition("=")
        if not value or name in data or name in options:
            raise PlanError(f"compress {text!r}: {part!r} is no setting, or is there twice; write {name}=VALUE, once")
        target = options if name in own else data
        target[name] = {"true": True, "false": False}.get(value, _number(value))
    return serialization.from_data(Compression, {**data, "options": options}, source=f"compress {text!r}")


def format_compression(compress: Compression) -> str:
    """The text from which `parse_compression` makes `compress`; defaults are left out."""
    between = {} if compress.between is None else {"between": compress.between}
    stated = compress.stated
    order = [name for name in compress.entry.parameters if name in stated]
    pairs = {**{name: stated[name] for name in order}, **between}.items()
    return ",".join([compress.method, *(f"{name}={str(value).lower()}" for name, value in pairs)])


def ramped_density(density: float, progress: float) -> float:
    """dgc's density after the share `progress` of its warm-up."""
    if progress >= 1:
        return density
    return max(density, FIRST_DENSITY * DENSITY_RATIO ** math.floor(max(progress, 0) * 4))


def bucket_sent_nbytes(compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int) -> int:
    """Bytes one rank sends to sum gradients of `shapes` (as they lie in memory), of values of `itemsize`, in a step:
    with a flag for each. Of the step that `Compression.at` gives; None: an exact sum. Between hosts it is
    `flags_sent_nbytes` over all ranks and `all_reduce_sent_nbytes` of the rank's part over the hosts.
    """
    return flags_sent_nbytes(len(shapes), ranks, itemsize) + all_reduce_sent_nbytes(compress, shapes, ranks, itemsize)


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


def all_reduce_sent_nbytes(
    compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int
) -> int:
    """`bucket_sent_nbytes` without flags."""
    numel = sum(math.prod(shape) for shape in shapes)
    if compress is None or compress.entry.exact:  # where factors do not pay, the sum is exact
        return 2 * (ranks - 1) * numel * itemsize // ranks
    compress = compress.code
    entry, settings = compress.entry, compress.settings
    if entry.reduce_nbytes is not None:
        return entry.reduce_nbytes(settings, shapes, ranks, itemsize)
    if gathers_messages(compress, ranks):
        return (ranks - 1) * message_nbytes(compress, numel)
    length = chunk_length(numel, ranks)
    there = message_nbytes(compress, length)
    back = there if entry.return_nbytes is None else entry.return_nbytes(settings, length, ranks)
    scales = 0 if entry.shared_scales_nbytes is None else entry.shared_scales_nbytes(length)
    return (ranks - 1) * (there + back) + 2 * (ranks - 1) * scales


def gathers_messages(compress: Compression, ranks: int) -> bool:
    """Whether ranks gather messages of the whole and each adds them up, instead of reducing in two phases.

    Codecs with short messages always do. Between two ranks every codec does whose sums are written as gradients are:
    one round less costs no byte more.
    """
    compress = compress.code
    entry = compress.entry
    gathers = entry.gathers(compress.settings)
    return gathers or (ranks == 2 and not entry.two_phase_only and entry.reduce_nbytes is None)


def reduce_scatter_sent_nbytes(compress: Compression, longest: int, ranks: int) -> int:
    """Bytes one rank sends in a reduce-scatter over `ranks` whose longest part has so many values.

    Not for codecs that compress whole tensors (powersgd).
    """
    return (ranks - 1) * message_nbytes(compress.code, longest)


def message_nbytes(compress: Compression, numel: int) -> int:
    """Bytes of the message of `numel` values."""
    size = compress.entry.message_nbytes
    if size is None:
        raise PlanError(f"{compress.method} has no message of flat values; use another codec")
    return size(compress.settings, numel)


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
