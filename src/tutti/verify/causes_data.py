"""Rules of diagnosis about where a run starts from: seeds, samples, random numbers."""

from tutti.config.verdict import Cause
from tutti.verify.evidence import Case, words


def foreign_random(case: Case) -> Cause | None:
    """Forward or loss drew random numbers behind torch's default generator."""
    sources = dict.fromkeys(source for part in case.parts for source in part.foreign)
    if case.stage not in ("forward", "loss", "gradient") or not sources:
        return None
    return Cause(
        kind="random_outside_torch",
        sentence=f"forward draws random numbers from {' and '.join(sources)}, which tutti does not seed per "
        f"sample: ranks draw equal or unrelated numbers; they first show in {case.where}",
        remedy="draw them with torch's own functions and without a generator argument (torch.rand_like, torch.randn)",
    )


def not_repeatable(case: Case) -> Cause | None:
    """One device twice gives two results."""
    if not case.repeated:
        return None
    if case.stage in ("seed", "initial state"):
        return Cause(
            kind="different_seed",
            sentence=f"{case.where} starts from other values every time the script is run, on one device too: they "
            "are drawn from a generator nobody seeded, or seeded by the clock or the process id",
            remedy="build the model after the Job, which seeds torch, and draw its initial values with torch",
        )
    if case.stage in ("batch size", "data order", "input"):
        return Cause(
            kind="unseeded_data",
            sentence="the samples differ when the script is run again on one device: the data set, sampler or "
            "collate_fn draws from a generator nobody seeded, or depends on the clock or the process",
            remedy="draw with random, numpy.random or torch's functions inside __getitem__: tutti seeds those for "
            "each sample; do not make generators without a seed",
        )
    return Cause(
        kind="non_deterministic_op",
        sentence=f"non-deterministic op in {case.where}: one device run twice gives two results (random numbers "
        "from a generator nobody seeded, the clock, or a kernel that adds in any order)",
        remedy="draw random numbers with torch's functions and no generator of your own; find such kernels with "
        "torch.use_deterministic_algorithms(True)",
    )


def different_seed(case: Case) -> Cause | None:
    """Ranks built different models."""
    ranks = words(case.found.first.ranks)
    if case.stage == "seed":
        return Cause(
            kind="different_seed",
            sentence=f"the Job's seed depends on the rank: {ranks} has another one than one device, and with it "
            "another order of samples and other initial values",
            remedy="give every rank the same Job(seed=...); dropout and augmentation are independent on ranks anyway",
        )
    if case.stage != "initial state":
        return None
    return Cause(
        kind="different_seed",
        sentence=f"different seed: {ranks} built {case.where} with other initial values than one device",
        remedy="do not seed by rank before the model is built; build it after the Job, which seeds torch alike "
        "everywhere",
    )


def batch_size(case: Case) -> Cause | None:
    """The global batch grows with the ranks."""
    if case.stage != "batch size":
        return None
    return Cause(
        kind="batch_depends_on_ranks",
        sentence=f"global_batch_size depends on the number of ranks: it is another one on {case.world_size} ranks "
        "than on one device, so the run means something else",
        remedy="give the size of the whole batch, not a rank's share times the number of ranks; tutti divides it",
    )


def data_order(case: Case) -> Cause | None:
    """Ranks do not agree on which samples the batch has."""
    if case.stage != "data order":
        return None
    return Cause(
        kind="data_order",
        sentence=f"data order: on {words(case.found.first.ranks)} the global batch holds other samples, or in "
        "another order, than on one device",
        remedy="pass the whole data set and no sampler that shares it among ranks or knows the rank; tutti shares "
        "the data",
    )


def sample_values(case: Case) -> Cause | None:
    """The same index gives other values."""
    if case.stage != "input":
        return None
    return Cause(
        kind="samples_depend_on_rank",
        sentence=f"the same samples have other values on {words(case.found.first.ranks)} than on one device "
        f"({case.found.first.tensor}): the data set or collate_fn depends on the rank, on the process, or on which "
        "samples come together",
        remedy="make a sample depend on its index and on the seeds tutti sets for it alone; do what concerns a "
        "whole batch in the model",
    )


def unaligned_random(case: Case) -> Cause | None:
    """A random operator that verification cannot give equal draws."""
    names = dict.fromkeys(name for part in case.parts for name in part.unaligned)
    if case.stage not in ("forward", "loss", "gradient") or not names:
        return None
    return Cause(
        kind="random_not_comparable",
        sentence=f"{', '.join(names)} draws random numbers that cannot be made to agree between one device and "
        f"ranks; what follows, from {case.where}, cannot be compared",
        remedy="verify with that operator's randomness turned off, or draw its random numbers with torch.rand",
    )
