"""Matched random draws: each rank gets its samples' rows of what one device draws for the whole microbatch.

Every random operator takes one number from torch's default generator, which has the same state on all ranks. That
number seeds draws in the shape that one device needs. Recompute restores the generator, so it repeats the same masks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.comm.devices import current_device
from tutti.data.batches import MicrobatchShare
from tutti.data.seeds import forked_device

_IN_PLACE = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip
_LIKE = {"rand_like", "randn_like", "randint_like"}
_SIZES = {"rand": 0, "randn": 0, "randint": 1}
"""Operators that take a size, and the position of that argument (one later with a lower bound)."""
_CLIPPING = ("clamp", "_foreach_norm", "_foreach_clamp", "linalg_vector_norm")
_PRECISION = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3,
              torch.complex128: 0, torch.complex64: 1, torch.complex32: 2}  # fmt: skip

Draw = Callable[[tuple[int, ...]], torch.Tensor]


def in_backward() -> bool:
    """Return whether autograd is running backward on this thread. Forward operators there belong to a recompute."""
    return bool(torch._C._current_graph_task_id() != -1)


class AlignedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, random operators draw one device's values.

    Args:
        share: the samples of the microbatch that this rank computes.
        guide: shapes of one device's draws by seed; None on the one device itself.

    Attributes:
        draws: shapes of the draws made here, by seed.
        unaligned: operators whose draws could not be aligned.
        own_generator: operators that drew from a generator of the script.
        lowest: the least precise dtype of the computation.
        backward_ops: operators of gradient clipping that ran within backward.
    """

    draws_whole = True
    """Divided layers draw for the whole activation while this is set (parallel/tensor)."""

    def __init__(self, share: MicrobatchShare, guide: Mapping[int, tuple[int, ...]] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = share
        self.guide = guide
        self.draws: dict[int, tuple[int, ...]] = {}
        self.unaligned: list[str] = []
        self.own_generator: list[str] = []
        self.backward_ops: list[str] = []
        self.lowest: torch.dtype = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # so that parts of tensors act as plain local tensors
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._random(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
            name = func.overloadpacket.__name__
            if name.startswith(_CLIPPING) and in_backward():
                self.backward_ops.append(name)
        self._note_precision(result)
        return result

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if kwargs.get("generator") is not None:
            self.own_generator.append(name)
            return func(*args, **kwargs)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        with forked_device(current_device()):
            torch.manual_seed(seed)
            drawn = self._drawn(func, name, seed, args, kwargs)
            if drawn is not None:
                return drawn
            result = func(*args, **kwargs)
        if not self._as_one_device(seed, result) and not _draws_nothing(func, args, kwargs):
            self.unaligned.append(name)
        return result

    def _drawn(self, func: Any, name: str, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's result with aligned draws, or None if it cannot be aligned."""
        first = args[0] if args else None
        if name in _SIZES or (name == "normal" and func._overloadname == "float_float"):
            at = _SIZES.get(name, 2) + ("low" in func._overloadname)
            return self._rows(seed, tuple(args[at]), lambda shape: func(*args[:at], shape, *args[at + 1 :], **kwargs))
        if name == "normal":
            return self._normal(seed, args)
        if not isinstance(first, torch.Tensor):
            return None
        tensor_arguments = sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
        if name in _LIKE or (name in _IN_PLACE and tensor_arguments == 1):
            rows = self._rows(seed, tuple(first.shape), lambda full: func(first.new_empty(full), *args[1:], **kwargs))
            return rows if rows is None or name in _LIKE else first.copy_(rows)
        uniform = self._uniform(seed, first)
        if uniform is None:
            return None
        return _by_value(name, first, args[1:], uniform)

    def _uniform(self, seed: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's rows of uniform numbers in [0, 1), in the shape of a tensor."""
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return self._rows(seed, tuple(like.shape), lambda full: torch.rand(full, device=like.device, dtype=dtype))

    def _normal(self, seed: int, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return normal numbers with given means and deviations, at least one of which is a tensor."""
        mean, deviation = args[0], args[1] if len(args) > 1 else 1.0
        like = mean * 1.0 + deviation * 0.0
        rows = self._rows(seed, tuple(like.shape), lambda full: torch.randn(full, device=like.device, dtype=like.dtype))
        return None if rows is None else mean + deviation * rows

    def _rows(self, seed: int, shape: tuple[int, ...], draw: Draw) -> torch.Tensor | None:
        """Return this rank's rows of what one device draws under `seed`."""
        self.draws[seed] = shape
        full = shape if self.guide is None else self.guide.get(seed, shape)
        take_rows = rows_of(full, shape, self.share)
        return None if take_rows is None else take_rows(draw(full))

    def _as_one_device(self, seed: int, result: Any) -> bool:
        """Return whether an operator's result has the shape that it has on one device, so that equal seeds suffice."""
        first = next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), None)
        shape = self.draws[seed] = () if first is None else tuple(first.shape)
        return self.guide is None or self.guide.get(seed, shape) == shape

    def _note_precision(self, result: Any) -> None:
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.dim() > 0
                and _PRECISION.get(leaf.dtype, 0) > _PRECISION[self.lowest]
            ):
                self.lowest = leaf.dtype


def lowest_of(dtypes: list[torch.dtype]) -> torch.dtype:
    """Return the least precise of floating-point and complex dtypes; for a complex one, the dtype of its parts."""
    return max(dtypes, key=lambda dtype: _PRECISION.get(dtype, 0), default=torch.float64).to_real()


def _by_value(name: str, first: torch.Tensor, rest: tuple[Any, ...], uniform: torch.Tensor) -> Any:
    """Return the result of an operator whose draws depend on its operand; None for an unknown operator.

    Args:
        name: the operator.
        first: its operand.
        rest: its other arguments.
        uniform: uniform numbers in the operand's shape.
    """
    if name == "native_dropout":
        keep = 1.0 - rest[0] if rest[1] is not False else 1.0
        mask = uniform < keep
        return first * mask * (1.0 / keep if keep else 0.0), mask
    if name == "bernoulli":
        return (uniform < (rest[0] if rest else first)).to(first.dtype)
    if name == "rrelu_with_noise":
        noise, lower, upper = (*rest[:3], 1 / 8, 1 / 3)[:3]
        noise.copy_(torch.where(first <= 0, lower + (upper - lower) * uniform, 1.0))
        return first * noise
    if name == "multinomial" and (len(rest) < 2 or not rest[1] or rest[0] == 1):
        return (first / -torch.log1p(-uniform)).topk(rest[0], dim=-1).indices  # exponential races
    return None


def rows_of(
    full: tuple[int, ...], shape: tuple[int, ...], share: MicrobatchShare
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function that takes a share's rows from a tensor of the whole microbatch.

    Samples lie along the dim where the two shapes differ in the ratio of their samples, possibly flattened with other
    dims. A tensor without such a dim has no samples and is taken whole. If other dims are smaller too, because each
    rank pads to its own longest sample, their leading entries are taken.

    Args:
        full: shape of the tensor for the whole microbatch.
        shape: shape of the share's rows.
        share: the samples of the share.

    Returns:
        The function, or None if the shapes do not say where the samples are.
    """
    whole, share_size, offset = share.slice_size, share.loaded, share.start - share.slice_start
    if full == shape:
        return lambda tensor: tensor
    if len(full) != len(shape):
        return None
    differing = [dim for dim in range(len(full)) if full[dim] != shape[dim]]
    dim = differing[0]
    if len(differing) == 1 and full[dim] % whole == 0 and full[dim] * share_size == shape[dim] * whole:
        length = full[dim] // whole
        return lambda tensor: tensor.narrow(dim, offset * length, share_size * length)
    for dim in sorted(
        differing, key=lambda dim: (full[dim], shape[dim]) != (whole, share_size)
    ):  # rows of samples first
        others_fit = all(shape[d] <= full[d] for d in range(len(full)) if d != dim)
        if (
            full[dim] % whole == 0
            and shape[dim] % share_size == 0
            and shape[dim] // share_size <= full[dim] // whole
            and others_fit
        ):
            return _take_unpadded(full, shape, dim, share)
    return None


def _take_unpadded(
    full: tuple[int, ...], shape: tuple[int, ...], dim: int, share: MicrobatchShare
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that takes a share's rows and shortens their other dims to `shape`."""
    whole, share_size, offset = share.slice_size, share.loaded, share.start - share.slice_start

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.reshape(*full[:dim], whole, full[dim] // whole, *full[dim + 1 :]).narrow(
            dim, offset, share_size
        )
        target = (*shape[:dim], share_size, shape[dim] // share_size, *shape[dim + 1 :])
        return tensor[tuple(slice(0, size) for size in target)].reshape(shape)

    return cut


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator with optional dropout was told not to drop (attention kernels with dropout_p = 0)."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return not value
    return False
