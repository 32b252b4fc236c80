"""PowerSGD (Vogels et al. 2019): every matrix of the gradient is sent as a product of two thin matrices.

M = gradient + residual. P = the sum over ranks of M Q, with its columns made orthonormal; Q = the sum over ranks of M^T
P; the sum of M is approximated by P Q^T. The next step starts from this Q. The residual is the paper's: M - P Q_own^T
with this rank's own Q before the sum, for compressed tensors only. So the workers' errors add up to the error of the
sum, and do not grow with the number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.compression.codec_state import CodecState, rank_seed, stream_key
from tutti.compression.reducer import CountedCollectives, GradientReducer, Rounds, SharedSpan, Span
from tutti.config.codec_registry import MIN_RATE
from tutti.config.compression import Compression
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A tensor of the flat gradient as a matrix.

    P and Q are stored column by column, which halves the time of thin products.

    Attributes:
        start: index of its first value in the flat gradient.
        rows, columns: its shape.
        p, q: index of its first value in the flat P and in the flat Q.
    """

    start: int
    rows: int
    columns: int
    p: int
    q: int


class PowerSGDReducer(GradientReducer):
    """Sums a flat gradient of consecutive tensors over a group, in two all-reduces.

    A tensor becomes a matrix (first dim, rest). If rank (rows + columns) >= rows columns / min_rate, it is not
    compressed, but sent exactly together with P. A zero column of P stays zero; a zero column of Q is replaced by
    random numbers.

    Args:
        shapes: shapes of the tensors, in the order in which they lie in the flat gradient.
        rank: number of columns of P and Q.
        min_rate: compress a matrix only if its factors have fewer values by this factor.
        group: process group, None for all ranks.
        lone: treat this rank as a group of its own.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the first Q, the same on all ranks.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        *,
        rank: int = 1,
        min_rate: float = 2.0,
        group: Any = None,
        lone: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise PlanError(f"rank = {rank}; PowerSGD needs a rank of 1 or more")
        collectives = CountedCollectives(group, lone=lone)
        self.rank, self.seed = rank, seed
        self.matrices, self.plain, self.numel = _lay_out(shapes, rank, min_rate)
        self._p = sum(matrix.rows * rank for matrix in self.matrices)
        q = sum(matrix.columns * rank for matrix in self.matrices)
        compressed = sum(matrix.rows * matrix.columns for matrix in self.matrices)
        factor_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        state = CodecState.zeros(
            ("residual",), compressed, dtype=dtype, device=device, seed=rank_seed(seed, collectives.rank)
        )
        self._next_q = torch.zeros(q, dtype=factor_dtype, device=device)
        first_q, drawn = torch.zeros_like(self._next_q), _normal(q, seed, 0).to(self._next_q)
        for m in self.matrices:
            self._q_of(first_q, m).copy_(drawn[m.q : m.q + m.columns * rank].view(m.columns, rank))
        super().__init__(collectives, {"worker": state}, {"q": first_q})

    @property
    def spans(self) -> dict[str, list[Span]]:
        return {"worker": [(m.start, m.start + m.rows * m.columns) for m in self.matrices]}

    @property
    def shared_spans(self) -> dict[str, list[SharedSpan]]:
        return {"q": [(m.start, m.q, m.q + m.columns * self.rank) for m in self.matrices]}

    @property
    def step_nbytes(self) -> int:
        """Bytes that a rank sends in a step, as a ring does: 2 (p - 1)/p of P, the uncompressed tensors and Q."""
        ends, size, width = 2 * (self.collectives.size - 1), self.collectives.size, self.shared["q"].element_size()
        plain = sum(stop - start for start, stop in self.plain)
        return ends * (self._p + plain) * width // size + ends * self.shared["q"].numel() * width // size

    def rounds(self, flat: Tensor) -> Rounds:
        state, q = self.states["worker"], self._initial_q()
        old, new = state.old["residual"], state.new["residual"]
        packed = torch.empty(self._p + sum(b - a for a, b in self.plain), dtype=q.dtype, device=q.device)
        offset = 0
        for m in self.matrices:
            size = m.rows * m.columns
            torch.add(flat[m.start : m.start + size], old[offset : offset + size], out=new[offset : offset + size])
            torch.mm(new[offset : offset + size].view(m.rows, -1), self._q_of(q, m), out=self._p_of(packed, m))
            offset += size
        if self.plain:
            torch.cat([flat[start:stop] for start, stop in self.plain], out=packed[self._p :])
        yield [self.collectives.all_reduce(packed)]
        offset = 0
        for m in self.matrices:
            size = m.rows * m.columns
            orthogonalise(self._p_of(packed, m))
            torch.mm(new[offset : offset + size].view(m.rows, -1).t(), self._p_of(packed, m), out=self._q_of(q, m))
            left, right = self._p_of(packed, m), self._q_of(q, m)
            new[offset : offset + size].view(m.rows, -1).sub_(left @ right.t())
            offset += size
        yield [self.collectives.all_reduce(q)]
        self._next_q = q
        for m in self.matrices:
            into = flat[m.start : m.start + m.rows * m.columns].view(m.rows, -1)
            left, right = self._p_of(packed, m), self._q_of(q, m)
            if into.dtype == left.dtype:
                torch.mm(left, right.t(), out=into)  # in place: one pass over the gradient where a copy makes three
            else:
                into.copy_(left @ right.t())
        offset = self._p
        for start, stop in self.plain:
            flat[start:stop] = packed[offset : offset + stop - start]
            offset += stop - start

    def revert(self, start: int, stop: int) -> None:
        super().revert(start, stop)
        for at, begin, end in self.shared_spans["q"]:
            if start <= at < stop:
                self._next_q[begin:end] = self.shared["q"][begin:end]

    def finish_step(self, finite: bool) -> None:
        if finite:
            self.shared["q"].copy_(self._next_q)
        super().finish_step(finite)

    def _initial_q(self) -> Tensor:
        """Return the last step's Q. Columns of zeros are replaced by random numbers, the same on all ranks."""
        q = self.shared["q"].clone()
        for m in self.matrices:
            zero = (self._q_of(q, m) == 0).all(dim=0)
            if bool(zero.any()):
                fresh = _normal(m.columns * self.rank, self.seed, 1 + m.start).to(q).view(m.columns, -1)
                self._q_of(q, m)[:, zero] = fresh[:, zero]
        return q

    def _p_of(self, packed: Tensor, m: _Matrix) -> Tensor:
        return packed[m.p : m.p + m.rows * self.rank].view(self.rank, m.rows).t()

    def _q_of(self, q: Tensor, m: _Matrix) -> Tensor:
        return q[m.q : m.q + m.columns * self.rank].view(self.rank, m.columns).t()


def orthogonalise(p: Tensor) -> None:
    """Make the columns orthonormal, in place, by Gram-Schmidt. A column that depends on earlier ones becomes zero."""
    tiny = torch.finfo(p.dtype).tiny
    for column in range(p.shape[1]):
        vector = p[:, column]
        norm_before = torch.linalg.vector_norm(vector)
        for _ in range(2):  # twice is enough (Kahan)
            if column:
                vector -= p[:, :column] @ (p[:, :column].t() @ vector)
        norm = torch.linalg.vector_norm(vector)
        if float(norm) <= max(float(norm_before) * 4 * torch.finfo(p.dtype).eps, tiny):
            vector.zero_()
        else:
            vector /= norm


def _lay_out(
    shapes: Sequence[Sequence[int]], rank: int, min_rate: float
) -> tuple[list[_Matrix], list[tuple[int, int]], int]:
    """Return the matrices, the ranges that are not compressed, and the size of the whole gradient."""
    matrices: list[_Matrix] = []
    plain: list[tuple[int, int]] = []
    offset = p = q = 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = numel // max(rows, 1)
        if len(shape) > 1 and rank * (rows + columns) * min_rate < rows * columns:
            matrices.append(_Matrix(offset, rows, columns, p, q))
            p, q = p + rows * rank, q + columns * rank
        elif numel:
            plain.append((offset, offset + numel))
        offset += numel
    return matrices, plain, offset


def _normal(numel: int, seed: int, stream: int) -> Tensor:
    """Return normal random numbers of a stream, the same on every rank."""
    low, high = stream_key(seed, stream)
    return torch.randn(numel, generator=torch.Generator().manual_seed(low | high >> 1 << 32), dtype=torch.float64)


def make_powersgd_reducer(compression: Compression, shapes: Sequence[Sequence[int]], **options: Any) -> PowerSGDReducer:
    """Make the PowerSGD reducer that a plan states.

    Args:
        compression: the plan's compression.
        shapes: shapes of the tensors, in the order in which they lie in the flat gradient.
        **options: group, dtype, device and seed.
    """
    return PowerSGDReducer(shapes, rank=int(compression.settings["rank"]), min_rate=MIN_RATE, **options)
