"""The boxes of a report: hardware, recipe, data and work, provenance. One list of entries for page and terminal."""

from dataclasses import dataclass

from tutti.config.quantity import Quantity
from tutti.config.report import RunReport
from tutti.report.words import prefixed


@dataclass(frozen=True, slots=True)
class Digest:
    """A long hexadecimal digest, shown shortened."""

    hash: str | None


Entry = tuple[str, Quantity | Digest | str | None]
Box = tuple[str, list[Entry]]


def boxes(report: RunReport) -> list[Box]:
    """All boxes of a run, in order."""
    return [
        ("Hardware", _hardware(report)),
        ("Recipe", _recipe(report)),
        ("Data and work", _data(report)),
        ("Provenance", _provenance(report)),
    ]


def _hardware(report: RunReport) -> list[Entry]:
    system = report.system
    entries: list[Entry] = [
        ("device", system.device_model),
        ("ranks", system.ranks),
        ("hosts", system.hosts),
        ("cores used", system.cores_used),
        ("cores granted", system.cores_granted),
        ("year", system.year),
    ]
    entries += [(f"dense {dtype} peak", peak) for dtype, peak in system.peak_dense_flops.items()]
    for link in system.links:
        entries += [(f"{link.tier} latency", link.latency), (f"{link.tier} bandwidth", link.bandwidth)]
    versions = ", ".join(f"{name} {number}" for name, number in system.versions.items())
    sums = [("gradients are summed through", system.sums)] if system.sums else []
    return [*entries, ("backend", system.backend), *sums, ("platform", system.platform), ("versions", versions)]


def _recipe(report: RunReport) -> list[Entry]:
    recipe, batch = report.recipe, report.batch
    return [
        ("optimizer", recipe.optimizer),
        ("learning rate", recipe.lr),
        ("rate rule", recipe.lr_rule or "none"),
        ("scheduler", recipe.scheduler or "none"),
        ("clipping norm", recipe.clip_norm if recipe.clip_norm.value is not None else "none"),
        ("global batch", batch.global_size),
        ("batch of a rank", batch.local_size),
        ("microbatch of a rank", batch.micro_size),
        ("last batch", recipe.last_batch),
        *_noise(report),
        ("precision", recipe.precision),
        ("sums of gradients", recipe.compress or "exact"),
        ("seed", recipe.seed),
        ("plan", report.plan),
        *((f"replicas' {name}", value) for name, value in report.replicas.items()),
    ]


def _noise(report: RunReport) -> list[Entry]:
    noise = report.noise
    return [] if noise is None else [("critical batch", noise.critical_batch), ("measured in", noise.measured)]


def _data(report: RunReport) -> list[Entry]:
    data, flops = report.data, report.flops
    return [
        ("training data", f"{data.name} ({data.kind})"),
        ("training samples", data.train_samples),
        ("training SHA-256", Digest(data.train_sha256)),
        ("hash covers", data.hash_covers),
        ("evaluation data", data.test_name),
        ("evaluation SHA-256", Digest(data.test_sha256)),
        ("in both", data.train_test_overlap),
        ("input shape", data.input_shape),
        ("data at start", data.start_state),
        ("waiting for data", report.time.load_wait),
        ("samples trained on", report.samples_seen),
        ("work of a sample", flops.model_per_sample),
        ("rate", flops.rate),
        ("fraction of peak", flops.peak_fraction),
        ("sent by a rank a step", report.sent_per_step),
    ]


def _provenance(report: RunReport) -> list[Entry]:
    dirty = {True: "yes", False: "no"}.get(report.git_dirty) if report.git_dirty is not None else None
    stop = report.stop
    ended = f"{stop.rule} {prefixed(stop.value.value, '').strip()}" if stop.rule and stop.value.value else stop.rule
    return [
        ("script", report.script),
        ("commit", Digest(report.git_commit)),
        ("uncommitted changes", dirty),
        ("configuration SHA-256", Digest(report.config_sha256)),
        ("packages SHA-256", Digest(report.env_lock_sha256)),
        ("stopped by", ended),
        ("scope", report.scope),
        ("generations", report.time.generations),
        ("tuning trials", report.tuning.trials),
        ("baseline", report.baseline.system),
        ("verification", report.verification.sentence if report.verification else None),
        *_verified(report),
    ]


def _verified(report: RunReport) -> list[Entry]:
    verdict = report.verification
    if verdict is None:
        return []
    return [
        ("largest difference", verdict.largest),
        ("tolerance", verdict.tolerance),
        ("verified steps", verdict.steps),
        ("arithmetic", verdict.arithmetic),
    ]
