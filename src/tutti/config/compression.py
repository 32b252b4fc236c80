"""Gradient compression: what a plan's `sync.compress` states, as text and in bytes sent.

Byte counts are those that one rank sends in a step to reduce one bucket: the messages in both directions, their scales
and padding, and a flag for each gradient. A codec's entry (`codec_registry`) gives the size of a message. A reduction
takes two phases of p - 1 messages of a chunk each, or gathers p - 1 messages of the whole bucket (`gathers_messages`),
unless the entry has a formula of its own.
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
"""Reduces gradients, exactly or in one bit, until the second moment is frozen; from then on ranks take local steps."""

FACTORS: Final = "factors"
"""Exact: weight gradients of linear layers are reduced as sufficient factors where that sends fewer bytes."""

STATISTICS_UPDATES, STATISTICS_NBYTES = 8, 8
"""Momentum codecs observe how far ranks' parts of a gradient cancel. They do so in the last STATISTICS_UPDATES updates
before the second moment is frozen, zero-one-adam in every exact update. STATISTICS_NBYTES are reduced for each gradient
beside its flag."""

MOMENTUM_CODECS: Final = {name: entry.momentum_codec for name, entry in CODECS.items() if entry.momentum_codec}
"""The codecs of the 1-bit Adam family -> the codec that encodes the momentum."""

FIRST_DENSITY, DENSITY_RATIO = 0.25, 0.25
"""dgc's warm-up: sparsity 75 %, 93.75 %, 98.44 %, 99.6 %, then as `density` states (Lin et al. 2018, section 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The codec of a plan and its parameters; None stands for the codec's default.

    Attributes:
        method: a name in `CODECS`.
        bits: qsgd: bits per value, 2, 4 or 8.
        density: top-k and dgc: fraction of the values that are sent.
        gain: top-k starts with a quarter of the values. It halves that down to `density` as long as messages carry this
            fraction of the squared norm of what is to be sent (GraVAC). 0: `density` from the start.
        window: steps whose squared norms are added up before the gain is judged.
        rank: powersgd: columns of the factor matrices.
        momentum: dgc: its own momentum; the optimizer must have none.
        feedback: whether bfloat16, float16 and bytegrad use error feedback. one-bit, top-k, dgc, top16-q4, powersgd and
            momentum codecs always do, the others never.
        sparse: top-k and dgc: owners of slices add up the pairs; slices are then gathered as pairs, or as plain values
            where those are shorter.
        warmup_steps: dgc: steps in which the sparsity grows from 75 %.
        freeze_step: momentum codecs: updates with exact sums in which the second moment learns. Required; choose 15 to
            20 % of all updates.
        kappa: zero-one-adam: updates in which the second moment learns before it learns half as often.
        local_steps: zero-one-adam: agreements after which ranks agree half as often.
        longest: zero-one-adam: the most updates between two of these agreements.
        between: "hosts": sums inside a host are exact and go through memory; "ranks": all ranks compress. None: "hosts"
            where there are several hosts and one has several ranks.
        options: parameters of codecs that other packages register.

    Raises:
        PlanError: the codec does not have a setting that was given, lacks one that it requires, or forbids a value.
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
        """All settings of the codec, as given or by default."""
        return {**self.entry.defaults(), **self.stated}

    @property
    def keeps(self) -> bool:
        """Whether the codec keeps values for later steps, such as the residual of error feedback."""
        return self.entry.keeps(self.settings)

    @property
    def pairwise(self) -> bool:
        """Whether every round consists of messages between pairs of ranks."""
        return self.entry.pairwise

    @property
    def sends_momentum(self) -> bool:
        """Whether momenta are sent instead of gradients."""
        return self.entry.momentum_codec is not None

    @property
    def code(self) -> "Compression":
        """The codec that encodes the messages: for momentum codecs the momentum's, otherwise this one."""
        messages = self.entry.momentum_codec
        if messages is None:
            return self
        return Compression(method=messages, feedback=True if "feedback" in CODECS[messages].parameters else None)

    def at(self, step: int) -> "Compression | None":
        """Return the compression in force after `step` updates; None where sums are exact.

        dgc's density ramps down. Momentum codecs are exact before `freeze_step`, except that zero-one-adam compresses
        gradients in updates in which the second moment does not learn.
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
    """Parse the text of a compression: "one-bit", or with settings "top-k,density=0.01".

    Raises:
        PlanError: names the part that is wrong.
    """
    method, *rest = (part.strip() for part in text.split(","))
    if method not in CODECS:
        raise PlanError(f"compress {text!r}: there is no such codec; choose from {', '.join(CODECS)}")
    data: dict[str, Any] = {"method": method}
    options: dict[str, object] = {}
    option_names = set(CODECS[method].parameters).difference(_SETTINGS)
    for part in rest:
        name, _, value = part.partition("=")
        if not value or name in data or name in options:
            raise PlanError(f"compress {text!r}: {part!r} is not a setting or appears twice; write {name}=VALUE once")
        target = options if name in option_names else data
        target[name] = {"true": True, "false": False}.get(value, _number(value))
    return serialization.from_data(Compression, {**data, "options": options}, source=f"compress {text!r}")


def format_compression(compress: Compression) -> str:
    """Format a compression as `parse_compression` reads it; defaults are left out."""
    between = {} if compress.between is None else {"between": compress.between}
    stated = compress.stated
    order = [name for name in compress.entry.parameters if name in stated]
    pairs = {**{name: stated[name] for name in order}, **between}.items()
    return ",".join([compress.method, *(f"{name}={str(value).lower()}" for name, value in pairs)])


def ramped_density(density: float, progress: float) -> float:
    """Return dgc's density when `progress` (0 to 1) of its warm-up is over."""
    if progress >= 1:
        return density
    return max(density, FIRST_DENSITY * DENSITY_RATIO ** math.floor(max(progress, 0) * 4))


def bucket_sent_nbytes(compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int) -> int:
    """Return the bytes that one rank sends in a step to reduce one bucket of gradients, including a flag for each.

    For compression between hosts, add `flags_sent_nbytes` over all ranks and `all_reduce_sent_nbytes` of the rank's
    part over the hosts instead.

    Args:
        compress: the codec in force in that step (`Compression.at`); None for an exact sum.
        shapes: shapes of the gradients as they lie in memory.
        ranks: ranks of the group.
        itemsize: bytes of one gradient value.
    """
    return flags_sent_nbytes(len(shapes), ranks, itemsize) + all_reduce_sent_nbytes(compress, shapes, ranks, itemsize)


def factors_pay(
    rows: int | float, out_features: float, in_features: float, itemsize: int = 4, width: int | None = None
) -> bool:
    """Return whether sufficient factors send fewer bytes than a ring all-reduce of the weight gradient.

    The condition is rows (outputs + inputs) width < 2 outputs inputs itemsize.

    Args:
        rows: rows of factors over all ranks.
        out_features: M, outputs of the layer.
        in_features: N, inputs of the layer.
        itemsize: bytes of a value of the gradient.
        width: bytes of a value of the factors; None: `itemsize`.
    """
    return rows * (out_features + in_features) * (width or itemsize) < 2 * out_features * in_features * itemsize


def factors_sent_nbytes(rows: float, out_features: float, in_features: float, ranks: int, width: int = 4) -> float:
    """Return the bytes that a rank with `rows` rows of factors sends to the other ranks.

    To each it sends (outputs + inputs) values of `width` bytes per row, and 8 bytes with the number of rows.
    """
    return (ranks - 1) * (rows * (out_features + in_features) * width + 8)


def flags_sent_nbytes(gradients: int, ranks: int, itemsize: int) -> int:
    """Return the bytes that one rank sends for the flags of `gradients` gradients."""
    return 2 * (ranks - 1) * gradients * itemsize // ranks


def all_reduce_sent_nbytes(
    compress: Compression | None, shapes: Sequence[Sequence[int]], ranks: int, itemsize: int
) -> int:
    """Return the bytes of `bucket_sent_nbytes` without those of the flags."""
    numel = sum(math.prod(shape) for shape in shapes)
    if compress is None or compress.entry.exact:  # where factors do not pay, the gradients are reduced directly
        return 2 * (ranks - 1) * numel * itemsize // ranks
    compress = compress.code
    entry, settings = compress.entry, compress.settings
    if entry.reduce_nbytes is not None:
        return entry.reduce_nbytes(settings, shapes, ranks, itemsize)
    if gathers_messages(compress, ranks):
        return (ranks - 1) * message_nbytes(compress, numel)
    length = chunk_length(numel, ranks)
    first = message_nbytes(compress, length)
    second = first if entry.return_nbytes is None else entry.return_nbytes(settings, length, ranks)
    scales = 0 if entry.shared_scales_nbytes is None else entry.shared_scales_nbytes(length)
    return (ranks - 1) * (first + second) + 2 * (ranks - 1) * scales


def gathers_messages(compress: Compression, ranks: int) -> bool:
    """Return whether ranks gather messages of the whole bucket and add them up, instead of reducing in two phases.

    Codecs with short messages always do. Between two ranks, so does every codec that encodes sums as it encodes
    gradients: this saves a round and costs no extra byte.
    """
    compress = compress.code
    entry = compress.entry
    gathers = entry.gathers(compress.settings)
    return gathers or (ranks == 2 and not entry.two_phase_only and entry.reduce_nbytes is None)


def reduce_scatter_sent_nbytes(compress: Compression, longest: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a reduce-scatter.

    Not for codecs that compress whole tensors (powersgd).

    Args:
        compress: the codec.
        longest: number of values in the longest part.
        ranks: ranks of the group.
    """
    return (ranks - 1) * message_nbytes(compress.code, longest)


def message_nbytes(compress: Compression, numel: int) -> int:
    """Return the bytes of a message of `numel` values.

    Raises:
        PlanError: the codec's messages are not of flat values.
    """
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
