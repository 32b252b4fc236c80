"""From a plan's words to an exchange that sums one bucket."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.codec import Codec
from tutti.compression.dgc import DGC
from tutti.compression.exchange import Exchange, Wire
from tutti.compression.gravac import Gravac
from tutti.compression.levels import Levels
from tutti.compression.onebit import OneBit
from tutti.compression.powersgd import PowerSGD
from tutti.compression.qsgd import qsgd
from tutti.compression.scatter import ScatterSum
from tutti.compression.sparcml import TOP16_Q4
from tutti.compression.sparse import SparseSum
from tutti.compression.terngrad import TernGrad
from tutti.compression.topk import TopK
from tutti.compression.two_phase import Gathered, TwoPhase
from tutti.config.compression import MIN_RATE, Compression, gathered


def make_exchange(
    how: Compression,
    shapes: Sequence[Sequence[int]],
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> Exchange:
    """The exchange for tensors of `shapes`, as they lie in memory one behind the other. All ranks make it alike."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    if how.method == "powersgd":
        rank = int(how.settings["rank"])
        return PowerSGD(shapes, rank=rank, min_rate=MIN_RATE, group=group, dtype=dtype, device=device, seed=seed)
    codec = _codec(how)
    if isinstance(codec, TopK) and how.settings["sparse"]:
        return SparseSum(codec, numel, group=group, dtype=dtype, device=device, seed=seed)
    if isinstance(codec, TopK) and how.settings.get("gain"):
        gain, window = how.settings["gain"], int(how.settings["window"])
        return Gravac(codec, shapes, gain=gain, window=window, group=group, dtype=dtype, device=device, seed=seed)
    if gathered(how, Wire(group).size):
        return Gathered(codec, numel, group=group, dtype=dtype, device=device, seed=seed)
    back = Levels(4, feedback=True) if how.method == "top16-q4" else None
    return TwoPhase(codec, numel, group=group, back=back, dtype=dtype, device=device, seed=seed)


def make_scatter(
    how: Compression,
    lengths: Sequence[int],
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> ScatterSum | None:
    """The exchange of which each rank gets its part, of `lengths`; None: the method sums whole tensors."""
    if how.method == "powersgd":
        return None
    return ScatterSum(_codec(how), lengths, group=group, dtype=dtype, device=device, seed=seed)


def turns_of(how: Compression, ranks: int) -> int:
    """Rounds of collectives of the exchange that `make_exchange` gives for a group of so many ranks."""
    if how.settings.get("sparse"):
        return 4
    return 1 if gathered(how, ranks) else 3 if how.method == "terngrad" else 2


def code_nbytes(how: Compression, numel: int) -> int:
    """Bytes of a message of so many values; not of powersgd, whose depend on shapes."""
    return _codec(how.code).nbytes(numel)


def by_pairs(how: Compression, group: Any, devices: Iterable[torch.device]) -> bool:
    """Whether all rounds of that exchange are messages of pairs of ranks (collectives.pairs), which are in order
    whatever else the group is used for meanwhile, so that a thread of their own may send and receive them."""
    here = how.by_pairs and all(device.type == "cpu" for device in devices)
    return here and Wire(group).size > 1 and dist.get_backend(group) == "gloo"


def _codec(how: Compression) -> Codec:
    settings = how.settings
    match how.method:
        case "float64" | "float32":
            return Cast(how.method)
        case "bfloat16" | "float16":
            return Cast(how.method, feedback=bool(settings["feedback"]))
        case "bytegrad":
            return ByteGrad(feedback=bool(settings["feedback"]))
        case "qsgd":
            return qsgd(how.bits or 4)
        case "terngrad":
            return TernGrad()
        case "one-bit":
            return OneBit()
        case "top-k":
            return TopK(settings["density"])
        case "dgc":
            return DGC(settings["density"], settings["momentum"], int(settings["warmup_steps"]))
        case _:
            return TOP16_Q4
