"""Notes every collective of torch.distributed in the flight record, also those that the script calls itself.

The functions of torch.distributed are replaced by ones that note the call and pass it on, because no hook of torch sees
the collectives of Gloo. A call costs 2 to 3 microseconds more.
"""

import functools
import inspect
import json
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutti.event_record import ACTIVE, EventRecorder, RankEvent, place_in_script
from tutti.stack_watch import is_of_script

_NAMES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "reduce_scatter"),
    *("reduce_scatter_single", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "send", "recv"),
)
"""Collectives, and messages that wait. isend and irecv stay as they are: torch compares them by identity."""

_EARLIER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Earlier name of a function -> its name, which it calls where torch has it."""

_SHAPED_BY_INPUT = frozenset({"all_gather", "all_to_all_single", *_EARLIER, *_EARLIER.values()})
"""Functions whose second argument is this rank's tensor; it is the first of the others."""


def note_collectives() -> None:
    """Note the collectives of this process from now on. A second call does nothing."""
    ACTIVE.in_torch = collectives_in_torch
    for name in (*_NAMES, *_EARLIER):
        function = getattr(dist, name, None)
        if (
            function is not None
            and not hasattr(function, "__tutti_notes__")
            and not hasattr(dist, _EARLIER.get(name, ""))
        ):
            noted = _noted(function, name)
            setattr(dist, name, noted)
            setattr(distributed_c10d, name, noted)


_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Byte": "uint8"}
"""How torch's own record names some dtypes -> their names."""


def collectives_in_torch() -> list[RankEvent]:
    """Return the collectives of this process that torch has begun and not completed, the earliest first.

    Torch records them itself (the Flight Recorder), for NCCL and for Gloo, also those of compiled code.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return []
    found = []
    for entry in json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ()):
        if entry["retired"] or entry["is_p2p"]:
            continue
        shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        found.append(
            RankEvent(
                number=entry["record_id"],
                kind="collective",
                name=entry["profiling_name"].partition(":")[2],
                group=f"{_members(entry['process_group'][0])}#{entry['process_group'][0]} of torch",
                sequence=entry["collective_seq_id"],
                dtype=_DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else "",
                shape=tuple(shapes[0]) if shapes else (),
                begun_s=entry["time_created_ns"] / 1e9,
                ended_s=None,
            )
        )
    return found


def _members(name: str) -> str:
    """Return the ranks of a group, by torch's name of it; an empty text if it is gone."""
    for group, known in [*distributed_c10d._world.pg_names.items()]:
        if known == name:
            return ",".join(map(str, dist.get_process_group_ranks(group)))
    return ""


def _noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)
    group_at = parameters.index("group")
    async_at = parameters.index("async_op") if "async_op" in parameters else None
    tensor_at = None if name == "barrier" else int(name in _SHAPED_BY_INPUT)
    root = None if name in ("send", "recv") else next((each for each in ("src", "dst") if each in parameters), None)
    tensor_name = "" if tensor_at is None else parameters[tensor_at]

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder = ACTIVE.recorder
        if recorder is None or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        count = len(args)
        group = args[group_at] if count > group_at else kwargs.get("group")
        blocking = async_at is None or not (args[async_at] if count > async_at else kwargs.get("async_op"))
        tensor: Any = None
        if tensor_at is not None:
            tensor = args[tensor_at] if count > tensor_at else kwargs.get(tensor_name)
            if not isinstance(tensor, torch.Tensor):
                tensor = None
        if name in ("send", "recv"):
            peer = args[1] if count > 1 else kwargs.get(parameters[1])
            in_group = args[4] if count > 4 else kwargs.get(parameters[4])
            number = _begin_message(recorder, name, tensor, _peer(peer, group, in_group))
        else:
            number = _begin(recorder, name, group, tensor, blocking=blocking)
        if not number:
            return function(*args, **kwargs)
        caller = sys._getframe(1)
        if _is_code_of_script(caller.f_code):
            about = ""
            if root is not None:
                given = dict(zip(parameters, args, strict=False)) | kwargs
                about = _described_root(root, given.get(root), group, given.get(f"group_{root}"))
            place_in_script(recorder, number, f"{caller.f_code.co_filename}:{caller.f_lineno}", about)
        try:
            work = function(*args, **kwargs)
        except BaseException:
            recorder.end(number, failed=True)
            raise
        if blocking or work is None:
            recorder.end(number)
        else:
            recorder.end_with(number, work)
        return work

    noted.__tutti_notes__ = True  # type: ignore[attr-defined]
    return noted


def _described_root(root: str, rank: Any, group: Any, in_group: Any) -> str:
    """Return from or to which rank a collective sends, in words.

    Args:
        root: "src" or "dst".
        rank: its rank, or None.
        group: of the collective; None for all ranks.
        in_group: its number in the group, where `rank` is None. Without both, torch takes rank 0.
    """
    number = 0 if rank is None and in_group is None else _peer(rank, group, in_group)
    return f"{'from' if root == 'src' else 'to'} rank {number}"


@functools.lru_cache(maxsize=1024)
def _is_code_of_script(code: CodeType) -> bool:
    """Return whether code is the script's own."""
    return is_of_script(code.co_filename)


def _begin(recorder: EventRecorder, name: str, group: Any, tensor: Any, *, blocking: bool) -> int:
    """Note a collective that begins; those of each group are counted. Return 0 for a group that this rank is not in."""
    key, text = 0 if group is None else id(group), ""
    if key not in recorder.groups:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            return 0
        text = _text(group)
        weakref.finalize(group, recorder.groups.pop, key, None).atexit = False
    return recorder.begin_collective(name, (key, text), tensor, blocking=blocking)


def _peer(peer: Any, group: Any, in_group: Any) -> int:
    """Return the rank that a message comes from or goes to; -1 if it may come from any.

    Args:
        peer: the rank, or None.
        group: of the message; None for all ranks.
        in_group: the rank's number in the group, where `peer` is None.
    """
    try:
        if peer is None and in_group is not None:
            members: Any = dist.group.WORLD if group is None else group
            return dist.get_global_rank(members, in_group)
        return -1 if peer is None else int(peer)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):  # torch refuses it
        return -1


def _begin_message(recorder: EventRecorder, name: str, tensor: Any, peer: int) -> int:
    """Note a message; those from one rank to another are counted."""
    source, target = (recorder.rank, peer) if name == "send" else (peer, recorder.rank)
    return recorder.begin_collective(
        name, (-4 - 2 * peer - (name == "send"), f"{source}>{target}#"), tensor, blocking=True
    )


def _text(group: Any) -> str:
    """Return the ranks of a group and its name, which is the same on all of them."""
    try:
        ranks = dist.get_process_group_ranks(group)
        return f"{','.join(map(str, ranks))}#{group.group_name}"
    except (RuntimeError, ValueError, KeyError, AttributeError):  # this rank is none of the group's
        return "#"
