"""The run folder: the header that is written when training starts, and the path of each file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.config.vocabulary import LastBatch, Precision, StartState, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Where one rank runs.

    Attributes:
        device: "cpu" or "cuda:0".
        threads: threads that it computes with.
        sums: what its gradient reductions go through, as text; empty where it makes none.
    """

    rank: int
    local_rank: int
    host: str
    device: str
    device_model: str
    pid: int
    threads: int
    sums: str = ""


LIKE_RANDOM = "cannot be told from"
"""Words of a reason for generated data, which transformed rows of a table may give, too."""

FRAMED = "the border is equal in all samples"
"""Reason for a smaller native shape that real data may also have: scans and microscopes show a round field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrigin:
    """Where samples come from and how large they really are, as found by looking at some; None where it is not known.

    Attributes:
        start_state: where the samples were when the run began.
        native_shape: shape of an input before it was enlarged or padded; its own shape where it was not.
        state_reason, native_reason: how it was seen, as a clause.
        majority: share of the most frequent label; None if labels are not classes.
        distinct: share of the samples looked at that differ from the others; None for small ones.
        ragged: whether inputs have different shapes.
        chosen_from: number of samples of the data set that a Subset was chosen from; None for others.
    """

    start_state: StartState | None = None
    state_reason: str = ""
    native_shape: tuple[int, ...] | None = None
    native_reason: str = ""
    majority: float | None = None
    distinct: float | None = None
    ragged: bool = False
    chosen_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """A data set as the run saw it.

    Attributes:
        kind: class name.
        samples: number of samples; None for a stream.
        hash_covers: what `sha256` was computed over.
    """

    name: str
    kind: str
    samples: int | None
    sha256: str
    hash_covers: str
    input_shapes: tuple[tuple[int, ...], ...] = ()
    origin: DataOrigin = DataOrigin()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the optimizer is driven: the settings that determine the result.

    They do not depend on the number of ranks, except `compress`: the codec of gradient reductions, None where they were
    exact.
    """

    optimizer: str
    learning_rate: float
    global_batch_size: int
    unit: Unit
    num_microbatches: int
    last_batch: LastBatch
    precision: Precision
    seed: int
    clip_norm: float | None = None
    learning_rate_rule: dict[str, Any] | None = None
    scheduler: str | None = None
    batch_ramp: tuple[tuple[int, int], ...] = ()
    compress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """run.json: everything about a run that is known when its first step starts."""

    name: str
    script: str
    arguments: tuple[str, ...]
    command: str
    started_utc: str
    world_size: int
    backend: str
    ranks: tuple[RankInfo, ...]
    versions: dict[str, str]
    platform: str
    git_commit: str | None
    git_dirty: bool | None
    environment_sha256: str  # of the sorted list of installed distributions
    model: str
    parameters: int
    recipe: Recipe
    data: DatasetInfo
    resumed_from: str | None = None
    resumed_at_step: int = 0
    extra: dict[str, str] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder. Text files are UTF-8; metrics are JSON lines."""

    path: Path

    @property
    def header(self) -> Path:
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        return self.path / "cluster.json"

    @property
    def model(self) -> Path:
        return self.path / "model.json"

    @property
    def prediction(self) -> Path:
        return self.path / "prediction.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def verdict(self) -> Path:
        return self.path / "verify.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def rank(self, rank: int) -> Path:
        """The folder of one rank: stdout.log, stderr.log, metrics.jsonl (timings), and error.json if it failed."""
        return self.path / "ranks" / str(rank)
