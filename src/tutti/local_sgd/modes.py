"""Make the consistency mode that a plan names."""

from tutti.config.compression import ZERO_ONE
from tutti.config.consistency_modes import CONSISTENCY_MODES, with_mode_defaults
from tutti.config.plan import SyncPlan
from tutti.config.registry import load_factory
from tutti.local_sgd.consistency import Consistency, ModeArguments
from tutti.local_sgd.replica_group import ReplicaGroup
from tutti.local_sgd.zero_one_replicas import ZeroOneReplicas
from tutti.parallel.layout import Layout


def make_consistency(sync: SyncPlan, layout: Layout, seed: int = 0) -> Consistency:
    """Make the mode of `sync`, among the ranks along `replicate`. Collective.

    Args:
        sync: the plan's synchronisation.
        layout: the run's layout.
        seed: seed of the mode's random draws.
    """
    channel, scalar_channel = layout.channel("parameters", "replicate"), layout.channel("scalars", "replicate")
    if sync.compress is not None and sync.compress.method == ZERO_ONE:
        return ZeroOneReplicas(ReplicaGroup.of(layout.mesh, channel, scalar_channel), sync.compress)
    make = CONSISTENCY_MODES[sync.mode].make
    if make is None:
        return Consistency()
    arguments = ModeArguments(with_mode_defaults(sync.mode, sync.relaxed), sync.compress, seed)
    mode: Consistency = load_factory(make)(ReplicaGroup.of(layout.mesh, channel, scalar_channel), arguments)
    return mode
