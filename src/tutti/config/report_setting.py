"""Parts of a RunReport that were settled before the first step: data, machines, batch, recipe, when to stop."""

from dataclasses import dataclass, field
from typing import Literal

from tutti.config.quantity import Quantity
from tutti.config.words import Unit

StartState = Literal["disk-cold", "disk-warm", "ram", "generated"]
StopRule = Literal["target", "epochs", "steps", "time"]
BaselineSource = Literal["measured-here", "published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What was trained and evaluated on, and where the data lay when the clock started."""

    name: str
    kind: str
    train_samples: Quantity
    train_sha256: str | None
    hash_covers: str
    test_name: str | None = None
    test_sha256: str | None = None
    train_test_overlap: Quantity = Quantity(unit="samples")
    start_state: StartState | None = None
    bytes_read: Quantity = Quantity(unit="B")
    preprocess_timed: bool | None = None
    input_shape: str | None = None
    native_shape: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """What was spent on finding the recipe before this run."""

    trials: Quantity = Quantity()
    device_seconds: Quantity = Quantity(unit="device s")
    space: str | None = None
    search_log_sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One tier of links."""

    tier: str
    latency: Quantity
    bandwidth: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """The machines. `peak_dense_flops`: of one device, by dtype, dense. `device_model` of all ranks, "+"-joined.
    `sums`: what sums of gradients went through, in words.
    """

    device_model: str
    device_kind: str  # "cpu" or "cuda"
    ranks: Quantity
    hosts: Quantity
    devices: Quantity  # of a CPU run: its hosts, whose cores the ranks share
    cores_used: Quantity
    cores_granted: Quantity = Quantity(unit="cores")
    year: Quantity = Quantity()
    peak_dense_flops: dict[str, Quantity] = field(default_factory=dict)
    links: tuple[LinkReport, ...] = ()
    backend: str = ""
    sums: str = ""
    platform: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The batch of a step: global, a rank's share of it, and what a rank computes at once."""

    global_size: Quantity
    local_size: Quantity
    micro_size: Quantity
    num_microbatches: Quantity
    unit: Unit = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    """How the optimizer was driven. `compress`: how sums of gradients were written, None where they were exact."""

    optimizer: str
    lr: Quantity
    lr_rule: str | None
    scheduler: str | None
    clip_norm: Quantity
    precision: str
    seed: Quantity
    last_batch: str
    compress: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """What ended the run."""

    rule: StopRule | None = None
    value: Quantity = Quantity()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineReport:
    """What the run is compared with, and who tuned that."""

    source: BaselineSource | None = None
    system: str | None = None
    tuned_by: str | None = None
