"""Lookups in tables that are divided over ranks: requests go to the holders, vectors come back.

A holder that has a whole table receives bags and pools them. A table cut by rows (and every nn.Embedding) receives
distinct rows, and the asking rank pools them. All tables of a call share three exchanges: sizes, requested rows (both
small), and vectors. Backward has one exchange, of the vectors' gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.comm.traffic import CommChannel
from tutti.config.partitioning import cut
from tutti.nn.embedding_tables import Bags, Here, pooled
from tutti.nn.mixture import on_device
from tutti.parallel.all_to_all import AllToAllRoute, exchange, land, launch, plain_exchange

AnyTable = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks over which tables are divided.

    Attributes:
        own: this rank's position in their `group`.
        vectors: accounting of vectors.
        indices: accounting of requests.
    """

    group: Any
    size: int
    own: int
    vectors: CommChannel
    indices: CommChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """The ranks that hold a table: rank i has the rows bounds[i] .. bounds[i + 1] - 1. `owner`: the rank that has all
    of them.
    """

    bounds: tuple[int, ...]
    owner: int | None = None


@dataclass(slots=True, kw_only=True)
class LookupRequest:
    """This rank's request for one table.

    Attributes:
        bags: as the model asks for them.
        asked: for rank i, the requested rows, counted from its first one.
        distinct: where the asking rank pools, the position of each of the bags' rows among the returned rows.
    """

    table: AnyTable
    place: TablePlacement | None
    bags: Bags
    asked: list[Tensor] = field(default_factory=list)
    distinct: Tensor | None = None
    padding: int | None = None

    @property
    def pooled_there(self) -> bool:
        return self.place is not None and self.distinct is None

    def sizes(self, rank: int) -> list[int]:
        """The announcement to `rank`: number of rows, of bags, and whether the bags' lengths are sent too."""
        pooled_by_rank = self.pooled_there and self.place is not None and self.place.owner == rank
        bags = self.bags.count if pooled_by_rank else 0
        return [len(self.asked[rank]), bags, int(pooled_by_rank and self.bags.lengths is not None)]

    def answers(self, rank: int) -> int:
        """The number of vectors that `rank` returns."""
        rows, bags, _ = self.sizes(rank)
        return bags if self.pooled_there else rows


def request(table: AnyTable, place: TablePlacement | None, bags: Bags, size: int) -> LookupRequest:
    """Assign the rows to the ranks that hold them. Raises IndexError for rows outside of the table, as torch does."""
    lookup = LookupRequest(table=table, place=place, bags=bags)
    if place is None:  # the table is whole on every rank, so nothing is requested
        lookup.asked = [bags.rows[:0]] * size
        return lookup
    rows, count = bags.rows, table.num_embeddings
    if place.owner is not None and isinstance(table, nn.EmbeddingBag):
        low, high = torch.stack([*rows.aminmax()]).tolist() if len(rows) else (0, 0)
        lookup.asked = [rows if rank == place.owner else rows[:0] for rank in range(size)]
    else:
        rows, lookup.distinct = torch.unique(rows, return_inverse=True)
        padding = -1 if table.padding_idx is None else table.padding_idx
        sought = on_device(torch.tensor([*place.bounds, padding]), rows.device)
        # read together, since the host waits for an accelerator to read them
        places = torch.cat([torch.searchsorted(rows, sought), (rows == padding).sum(0, keepdim=True)])
        (*ends, at, padded, low, high) = (
            torch.cat([places, rows[:1], rows[-1:]]).tolist() if len(rows) else [*[0] * len(sought), 0, 0, 0]
        )
        lookup.asked = [rows[ends[i] : ends[i + 1]] - place.bounds[i] for i in range(size)]
        lookup.padding = at if padded else None
    if low < 0 or high >= count:
        raise IndexError(f"rows {low} to {high} were looked up in an embedding table that has rows 0 to {count - 1}")
    return lookup


class DividedLookup:
    """`tutti.nn.embedding_tables.Lookup` over ranks. `places`: of each table; a table without a place is whole on every
    rank.
    """

    def __init__(self, places: dict[nn.Module, TablePlacement], dtype: torch.dtype, peers: Peers) -> None:
        self.places, self.dtype, self.peers = places, dtype, peers

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedLookup":
        places = {memo.get(id(table), table): place for table, place in self.places.items()}
        return DividedLookup(places, self.dtype, self.peers)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model works without the other ranks."""
        return Here, ()

    def start(self, tables: Sequence[AnyTable], bags: Sequence[Bags]) -> Callable[[], list[Tensor]]:
        """Send requests and answer those of others; the result waits for this rank's answers. Collective."""
        peers = self.peers
        requests = [request(t, self.places.get(t), b, peers.size) for t, b in zip(tables, bags, strict=True)]
        theirs = _ask(requests, peers)
        _send_weights(requests, theirs, peers)
        nothing = torch.empty(0, tables[0].embedding_dim, dtype=self.dtype, device=bags[0].rows.device)
        answers, send = _answer(requests, theirs, nothing, peers)
        receive = [sum(lookup.answers(rank) for lookup in requests) for rank in range(peers.size)]
        route = AllToAllRoute(peers.group, peers.own, send, receive, peers.vectors)
        pending = launch(answers, route)
        return lambda: _pool(requests, land(pending, route), peers.size)


@dataclass(slots=True, kw_only=True)
class Asked:
    """One peer's request for one table here: its bags' `rows`, whose `lengths` are empty where all are equal."""

    rows: Tensor
    count: int
    lengths: Tensor
    weights: Tensor | None = None

    @property
    def sizes(self) -> Tensor:
        """(count,): the number of rows of each bag."""
        if len(self.lengths) or not self.count:
            return self.lengths
        return self.rows.new_full((self.count,), len(self.rows) // self.count)


def _ask(mine: list[LookupRequest], peers: Peers) -> list[list[Asked]]:
    """[peer][table]: every peer's request to this rank; `mine`: this rank's own requests."""
    device = mine[0].bags.rows.device
    sizes = torch.tensor([[lookup.sizes(rank) for lookup in mine] for rank in range(peers.size)], dtype=torch.int64)
    ones = [1] * peers.size
    announced = plain_exchange(
        on_device(sizes, device), AllToAllRoute(peers.group, peers.own, ones, ones, peers.indices)
    ).tolist()
    parts: list[Tensor] = []
    send = []
    for rank in range(peers.size):
        bag_lengths = [lookup.bags.lengths if lookup.sizes(rank)[2] else None for lookup in mine]
        pairs = [(lookup.asked[rank], lengths) for lookup, lengths in zip(mine, bag_lengths, strict=True)]
        of_rank = [part for pair in pairs for part in pair if part is not None]
        send.append(sum(len(part) for part in of_rank))
        parts += of_rank
    pieces = [(rows, bags * ragged) for peer in announced for rows, bags, ragged in peer]
    receive = [sum(rows + bags * ragged for rows, bags, ragged in peer) for peer in announced]
    received = plain_exchange(torch.cat(parts), AllToAllRoute(peers.group, peers.own, send, receive, peers.indices))
    split = iter(torch.split(received, [size for pair in pieces for size in pair]))
    return [[Asked(rows=next(split), count=bags, lengths=next(split)) for _, bags, _ in peer] for peer in announced]


def _send_weights(mine: list[LookupRequest], theirs: list[list[Asked]], peers: Peers) -> None:
    """Send the row weights of bags that are pooled elsewhere; their gradients come back."""
    weighted = [number for number, lookup in enumerate(mine) if lookup.pooled_there and lookup.bags.weights is not None]
    if not weighted:
        return
    parts, send = [], []
    for rank in range(peers.size):
        for number in weighted:
            weights = mine[number].bags.weights
            assert weights is not None
            parts.append(weights[: len(mine[number].asked[rank])])
        send.append(sum(len(mine[number].asked[rank]) for number in weighted))
    sizes = [[len(peer[number].rows) for number in weighted] for peer in theirs]
    route = AllToAllRoute(peers.group, peers.own, send, [sum(peer) for peer in sizes], peers.vectors)
    pieces = iter(torch.split(exchange(torch.cat(parts), route), [size for peer in sizes for size in peer]))
    for peer in theirs:
        for number in weighted:
            peer[number].weights = next(pieces)


def _answer(
    mine: list[LookupRequest], theirs: list[list[Asked]], nothing: Tensor, peers: Peers
) -> tuple[Tensor, list[int]]:
    """The vectors for all peers, in the order of peers and tables, and the number for each. `nothing`: (0, width)."""
    answers_by_peer: list[list[Tensor]] = [[] for _ in theirs]
    for number, lookup in enumerate(mine):
        asked = [peer[number] for peer in theirs]
        place = lookup.place
        if place is None or place.bounds[peers.own] == place.bounds[peers.own + 1]:
            continue
        if lookup.pooled_there:
            assert isinstance(lookup.table, nn.EmbeddingBag)
            weighted = [query.weights for query in asked if query.weights is not None]
            weights = torch.cat(weighted) if weighted else None
            lengths = torch.cat([query.sizes for query in asked])
            rows = torch.cat([query.rows for query in asked])
            vectors = pooled(lookup.table, Bags(rows=rows, count=len(lengths), lengths=lengths, weights=weights))
            counts = [query.count for query in asked]
        else:
            vectors = _rows(lookup.table, torch.cat([query.rows for query in asked]), place.bounds[peers.own])
            counts = [len(query.rows) for query in asked]
        for answers, piece in zip(answers_by_peer, torch.split(vectors, counts), strict=True):
            answers.append(piece)
    result = torch.cat([piece for answers in answers_by_peer for piece in (nothing, *answers)])
    for peer in theirs:  # weights get gradients back even where no vector depends on them
        result = result + sum(query.weights[:0].sum() for query in peer if query.weights is not None)
    if torch.is_grad_enabled() and not result.requires_grad:
        result.requires_grad_()  # backward must pass here on all ranks, also on those that hold no table
    return result, [sum(len(piece) for piece in answers) for answers in answers_by_peer]


def _rows(table: AnyTable, rows: Tensor, first: int) -> Tensor:
    """(n, width): rows of this rank's part of a table, which begins at row `first` of the whole."""
    padding = None if table.padding_idx is None else table.padding_idx - first
    if padding is not None and not 0 <= padding < len(table.weight):
        padding = None
    return F.embedding(rows, table.weight, padding_idx=padding, sparse=table.sparse)


def _pool(mine: list[LookupRequest], vectors: Tensor, size: int) -> list[Tensor]:
    """(bags, width) for each table, from the returned `vectors`, in the order of peers and tables."""
    counts = [lookup.answers(rank) for rank in range(size) for lookup in mine]
    pieces = torch.split(vectors, counts)
    results = []
    for number, lookup in enumerate(mine):
        received = torch.cat(pieces[number :: len(mine)])
        table, bags = lookup.table, lookup.bags
        if lookup.pooled_there:
            results.append(received)
        elif lookup.distinct is None:
            results.append(pooled(table, bags) if isinstance(table, nn.EmbeddingBag) else _rows(table, bags.rows, 0))
        elif isinstance(table, nn.EmbeddingBag):
            results.append(
                F.embedding_bag(
                    lookup.distinct,
                    received,
                    bags.offsets,
                    mode=table.mode,
                    per_sample_weights=bags.weights,
                    padding_idx=lookup.padding,
                )
            )
        else:
            results.append(F.embedding(lookup.distinct, received, padding_idx=lookup.padding))
    return results


BALANCED = 1.2
"""A rank may hold this multiple of its fair share of bytes before a large table is cut by rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceableTable:
    """A table to be placed. `by_rows`: cut by rows even where balance does not need it."""

    name: str
    rows: int
    nbytes: int
    by_rows: bool = False


def place_tables(tables: Sequence[PlaceableTable], ranks: int) -> dict[str, TablePlacement]:
    """Placements for all tables.

    As few tables as balance needs are cut by rows, the largest first. The others go whole to the rank with the least
    load, the largest first. A rank's load is its part of all bytes plus its part of all lookups; each table counts the
    same number of lookups.
    """
    divisible = sorted((t for t in tables if not t.by_rows and t.rows >= ranks), key=lambda t: -t.nbytes)
    forced = {t.name for t in tables if t.by_rows}
    best: tuple[float, dict[str, TablePlacement]] | None = None
    for count in range(len(divisible) + 1):
        chosen = forced | {t.name for t in divisible[:count]}
        places, excess = _place(tables, chosen, ranks)
        if best is None or excess < best[0]:
            best = (excess, places)
        if excess <= BALANCED:
            break
    return best[1] if best else {}


def _place(tables: Sequence[PlaceableTable], by_rows: set[str], ranks: int) -> tuple[dict[str, TablePlacement], float]:
    """Placements with these tables cut by rows, and the most bytes of any rank over the fair share."""
    total = max(sum(table.nbytes for table in tables), 1)
    loads, held, places = [0.0] * ranks, [0.0] * ranks, {}
    for table in sorted(tables, key=lambda t: (-t.nbytes, t.name)):
        if table.name in by_rows:
            places[table.name] = TablePlacement(bounds=tuple(cut(table.rows, ranks)))
            held = [nbytes + table.nbytes / ranks for nbytes in held]
            continue
        owner = min(range(ranks), key=loads.__getitem__)
        bounds = (0,) * (owner + 1) + (table.rows,) * (ranks - owner)
        places[table.name] = TablePlacement(bounds=bounds, owner=owner)
        loads[owner] += table.nbytes / total + 1 / len(tables)
        held[owner] += table.nbytes
    return places, max(held) * ranks / total
