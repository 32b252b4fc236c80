"""What compressed sums keep back, in checkpoints: exact for as many ranks, and whole for any other number.

Every rank keeps its own part of a sum over ranks, in buckets, so every rank writes its own. The same ranks by the same
plan go on bit for bit: in the same buckets, with the same random numbers. Any others read what all ranks kept of their
parameters, add it up, and take equal shares of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tutti.checkpoint.collect import KEPT, Contribution, Piece
from tutti.checkpoint.source import Source, Target, transfer
from tutti.checkpoint.tensors import Item, dtype_of, item, stored_dtype
from tutti.compression.by_tensor import Kept, divided_by_tensor, keep
from tutti.config.compression import FACTORS, MOMENTA, ZERO_ONE, Compression, compression_in_words, parse_compression
from tutti.parallel.compressed.compressor import Compressor
from tutti.parallel.compressed.parts import Keeping, Row
from tutti.parallel.layout import Cut, Held
from tutti.trainer.run_state import Run


def collect_kept(run: Run, mine: Contribution, items: list[Item]) -> None:
    """Add what this rank keeps back to what it writes."""
    compressor = run.replica.compressor
    exactly = run.replica.factored.exactly()
    if exactly:
        mine.kept = {"method": FACTORS, "exactly": sorted(_names(run)[p] for p in exactly)}
    if compressor is None:
        return
    mine.kept = _described(run, compressor)
    for number, one in enumerate(_keeping(run, compressor)):
        for name, tensor in one.exchange.tensors().items():
            if tensor.dim():
                where = KEPT, f"{run.world.rank}/{number}", name
                piece = Piece(key=where, shape=tuple(tensor.shape), dtype=stored_dtype(tensor.dtype), cuts=())
                mine.pieces.append(piece)
                items.append(item(piece.stored_as, tensor))


def load_kept(run: Run, source: Source) -> None:
    """Go on with what the checkpoint's ranks kept back, at this run's loss scale. Collective."""
    saved: list[dict[str, Any] | None] = source.small.get("kept") or []
    if any(one["method"] == FACTORS for one in saved if one):
        _leave_factors(run, saved)
        saved = []
    compressor = run.replica.compressor
    if compressor is not None and compressor.momenta is not None:
        compressor.momenta.loaded()
    if not any(saved):
        return
    how = run.plan.sync.gradient_code
    if compressor is not None and how is not None and _in_other_units(how, saved):
        run.screen.say(
            "what compression kept back in the checkpoint's run is dropped: one of the two runs sums gradients, the "
            "other momenta"
        )
        return
    if compressor is None or how is None or not how.keeps:
        if any(name for name in source.entries if name[0] == KEPT and not name[2].startswith("shared.")):
            run.screen.say("what compression kept back in the checkpoint's run is dropped: this run keeps nothing back")
        if compressor is None:
            return
    fits = len(saved) == run.world.world_size and _arrange(run, compressor, saved[run.world.rank])
    if all(run.world.gather(fits)):
        _load_exactly(run, compressor, source, saved[run.world.rank])
    else:
        run.replica.restore(None, [])
        _load_shares(run, compressor, source, saved)
    scale, before = run.scaler.get_scale(), source.small["scaler"].get("scale", 1.0)
    if scale != before:
        compressor.rescale(scale / before)


def _leave_factors(run: Run, saved: list[dict[str, Any] | None]) -> None:
    """Weights whose factors were more bytes than their gradients are so in this run, too."""
    names = {name for one in saved if one for name in one["exactly"]}
    run.replica.factored.leave([p for p, name in _names(run).items() if name in names])
    run.replica.restore(None, [])


def _in_other_units(how: Compression, saved: list[dict[str, Any] | None]) -> bool:
    """Whether the checkpoint's run sent gradients and this one sends momenta, or the other way round."""
    before = next(one["method"] for one in saved if one)
    momenta = {*MOMENTA} - {ZERO_ONE}
    return (parse_compression(before).method in momenta) != (how.method in momenta)


def _described(run: Run, compressor: Compressor) -> dict[str, Any]:
    """How this rank's buckets are made up, in plain values."""
    name_of = _names(run)
    return {
        "method": compression_in_words(compressor.how),
        "order": [name_of[p] for p in run.replica.order],
        "arrived": None if run.replica.arrived is None else [name_of[p] for p in run.replica.arrived],
        "buckets": [_bucket(one) for one in _keeping(run, compressor)],
    }


def _keeping(run: Run, compressor: Compressor) -> list[Keeping]:
    """All exchanges of this rank, with the tensors that lie in their flat gradients: of buckets, then of parts."""
    name_of, found = _names(run), []
    for bucket, exchange in compressor.exchanges.items():
        named = zip((name_of[p] for p in bucket.parameters), bucket.views, strict=True)
        rows = [Row(name, tuple(view.shape), view.stride(), run.layout.of_name(name)) for name, view in named]
        found.append(Keeping(exchange, rows, exchange.holders))
    return found + [one for part in compressor.parts for one in part.keeping()]


def _bucket(one: Keeping) -> dict[str, Any]:
    exchange = one.exchange
    return {
        "names": [row.name for row in one.rows],
        "shapes": [list(row.shape) for row in one.rows],
        "strides": [list(row.strides) for row in one.rows],
        "cuts": [[[cut.dim, [list(r) for r in cut.ranges]] for cut in row.held.cuts] for row in one.rows],
        "spans": {who: [list(span) for span in spans] for who, spans in exchange.spans.items()},
        "places": {name: [list(place) for place in places] for name, places in exchange.places.items()},
        "counts": {who: state.count for who, state in exchange.states.items()},
    }


def _names(run: Run) -> dict[nn.Parameter, str]:
    return {p: run.layout.first_name(name) for name, p in run.model.named_parameters()}


def _arrange(run: Run, compressor: Compressor, saved: dict[str, Any] | None) -> bool:
    """Make this rank's buckets as it had them when it saved; whether they are now."""
    by_name = {name: p for p, name in _names(run).items()}
    if saved is None or not by_name.keys() >= {*saved["order"], *(saved["arrived"] or ())}:
        return False
    arrived = saved["arrived"]
    order = [by_name[name] for name in saved["order"]]
    if {*map(id, order)} == {*map(id, run.replica.order)}:
        run.replica.restore(order, None if arrived is None else [by_name[name] for name in arrived])
    return _without_counts(_described(run, compressor)) == _without_counts(saved)


def _without_counts(described: dict[str, Any]) -> dict[str, Any]:
    return {**described, "buckets": [{**one, "counts": None} for one in described["buckets"]]}


def _load_exactly(run: Run, compressor: Compressor, source: Source, saved: dict[str, Any] | None) -> None:
    assert saved is not None
    mine = _keeping(run, compressor)
    found = _read(run, source, run.world.rank, range(len(mine)))
    for number, (one, described) in enumerate(zip(mine, saved["buckets"], strict=True)):
        counts = {f"{who}.count": torch.tensor(count) for who, count in described["counts"].items()}
        one.exchange.load({**found[number], **counts})


def _load_shares(run: Run, compressor: Compressor, source: Source, saved: list[dict[str, Any] | None]) -> None:
    """An equal share of what all ranks of the checkpoint kept of each parameter."""
    mine = {name: p for p, name in _names(run).items()}
    wholes: dict[str, Kept] = {}
    for rank, theirs in enumerate(saved):
        buckets = theirs["buckets"] if theirs is not None else []
        wanted = [number for number, one in enumerate(buckets) if any(name in mine for name in one["names"])]
        for number, tensors in _read(run, source, rank, wanted).items():
            _add(run, wholes, buckets[number], tensors, mine)
    counts = [max(one["counts"].values()) for theirs in saved if theirs is not None for one in theirs["buckets"]]
    for one in _keeping(run, compressor):
        shares = [_share(row, wholes.get(row.name, {}), one.holders) for row in one.rows]
        sizes = [torch.Size(row.shape).numel() for row in one.rows]
        keep(one.exchange, sizes, shares, max(counts, default=0))


def _add(run: Run, wholes: dict[str, Kept], bucket: dict[str, Any], tensors: Kept, mine: Iterable[str]) -> None:
    """Add a saved bucket's parts to whole tensors by parameter's name; what ranks shared is taken once."""
    shapes = bucket["shapes"]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    kept = divided_by_tensor(tensors, bucket["spans"], bucket["places"], sizes)
    rows = zip(bucket["names"], shapes, bucket["strides"], bucket["cuts"], kept, strict=True)
    for name, shape, strides, cuts, one in rows:
        if name not in mine:
            continue
        held = Held(
            shape=run.layout.names[name],
            cuts=tuple(Cut(dim=dim, ranges=tuple((a, b) for a, b in ranges)) for dim, ranges in cuts),
        )
        whole = wholes.setdefault(name, {})
        for what, part in one.items():
            if what.startswith("shared."):
                whole.setdefault(what, part)
                continue
            into = whole.setdefault(what, part.new_zeros(held.shape))
            added = torch.zeros_like(into)
            held.put(added, torch.as_strided(part, shape, strides))
            into += added


def _share(row: Row, whole: Kept, holders: int) -> Kept:
    """What this rank keeps of one tensor, if it keeps any: flat, as it lies in memory."""
    found: Kept = {}
    for what, values in whole.items():
        if what.startswith("shared."):
            found[what] = values
        elif holders:
            flat = values.new_empty(torch.Size(row.shape).numel())
            torch.as_strided(flat, row.shape, row.strides).copy_(row.held.take(values))
            found[what] = flat / holders
    return found


def _read(run: Run, source: Source, rank: int, numbers: Iterable[int]) -> dict[int, Kept]:
    """Tensors of some buckets of a saved rank, by their numbers. Collective."""
    found: dict[int, Kept] = {}
    targets = []
    for number in numbers:
        found[number] = {}
        for key in source.state_keys(KEPT, f"{rank}/{number}"):
            entry = source.entries[key]
            out = found[number][key[2]] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
            targets.append(Target(key=key, out=out))
    transfer(run.world, source, targets)
    return found
