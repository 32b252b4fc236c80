"""What replicas that differ resume from, in checkpoints: each rank writes its own, beside the model that all share.

As many ranks under the same mode and code go on bit for bit. Any others begin alike, from the model that was saved: the
one that all ranks would have ended with, and the mean of the optimizers' states.
"""

from tutti.checkpoint.collect import KEPT, Contribution, Piece
from tutti.checkpoint.source import Source, Target, transfer
from tutti.checkpoint.tensors import Item, item, stored_dtype
from tutti.local_sgd.mode import Kept
from tutti.trainer.run_state import Run


def collect_replica(run: Run, own: Kept, mine: Contribution, items: list[Item]) -> None:
    """Add a replica's own tensors and values to what this rank writes."""
    mine.replica = own.values
    for name, tensor in own.tensors.items():
        key = KEPT, f"{run.world.rank}/replica", name
        piece = Piece(key=key, shape=tuple(tensor.shape), dtype=stored_dtype(tensor.dtype), cuts=())
        mine.pieces.append(piece)
        items.append(item(piece.stored_as, tensor))


def load_replica(run: Run, source: Source) -> None:
    """Begin the plan's mode, and go on as the replica that this rank was. Collective."""
    run.consistency.begin(run)
    saved = source.small.get("replicas", [])
    if not any(saved):
        return
    same = source.small["mode"] == run.plan.sync.mode and len(saved) == run.world.world_size
    wanted = run.consistency.resume(run, saved[run.world.rank]) if same else {}
    if not all(run.world.gather(bool(wanted))):
        run.screen.say(
            "replicas begin alike, from the model that was saved: those in it were of another mode or code, of other "
            "ranks, or trained other parameters"
        )
        return
    where = f"{run.world.rank}/replica"
    transfer(run.world, source, [Target(key=(KEPT, where, name), out=out) for name, out in wanted.items()])
    run.consistency.resumed(run, wanted)
