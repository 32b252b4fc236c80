# mypy: disable-error-code="override, assignment, attr-defined"
"""Gloo for tensors of an accelerator: every collective goes through pinned host memory ("staged").

NCCL refuses two ranks on one GPU, and Gloo knows tensors of the CPU only. With this backend, ranks that share a device
train by every mechanism all the same. A collective copies its inputs to the host and waits for the copies, Gloo then
exchanges them, and waiting for its work copies the results back. It is for proving that a plan is right on a device,
not for speed.

Tensors of the CPU go to Gloo as they are.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ProcessGroup, ProcessGroupGloo

STAGED = "staged"
"""The name of the backend, as `torch.distributed.get_backend` returns it."""

_CPU = torch.device("cpu")
_GLOO_DTYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def register_staged_backend(device_type: str) -> str:
    """Let torch make process groups of the backend "staged" for the CPU and `device_type`; returns its name."""
    if STAGED.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(STAGED, StagedGloo, devices=["cpu", device_type])
    return STAGED


class StagedWork(dist.Work):
    """A collective in progress.

    Args:
        work: Gloo's handle.
        results: (device tensor, host tensor) to copy back once Gloo has finished.
        kept: host tensors to keep alive until then.
    """

    def __init__(self, work: Any, results: Sequence[tuple[Tensor, Tensor]], kept: Any = ()) -> None:
        super().__init__()
        self._work: Any = work
        self._results, self._kept = results, kept
        self._copying = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for Gloo and copy the results to the device; further calls return at once."""
        work = self._work
        if work is not None:
            work.wait(timeout)
            self._copy_back()
        return True

    def _copy_back(self) -> None:
        """Copy the results to the device, once; a callback of Gloo's thread may do it while another thread waits."""
        with self._copying:
            if self._work is not None:
                with torch.no_grad():
                    for tensor, host in self._results:
                        tensor.copy_(_as_dtype(host, tensor.dtype).view(tensor.shape), non_blocking=True)
                self._work, self._kept = None, ()

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would not have to wait for other ranks."""
        work = self._work
        return work is None or bool(work.is_completed())

    def is_success(self) -> bool:
        """Return whether Gloo has finished without an error."""
        work = self._work
        return work is None or bool(work.is_success())

    def exception(self) -> Any:
        """Return the error with which Gloo failed, if any."""
        return None if self._work is None else self._work.exception()

    def result(self) -> list[Tensor]:
        """Return the tensors that the collective fills."""
        return [tensor for tensor, _ in self._results]

    def get_future(self) -> Any:
        """Return a future of the filled tensors, whose callbacks run once they are on the device."""
        devices = sorted({tensor.device for tensor, _ in self._results}, key=str)
        future: Any = torch.futures.Future(devices=[*devices])

        def finish(gloo: Any) -> None:
            try:
                gloo.wait()
                self._copy_back()
                _synchronize(devices)
                future.set_result(self.result())
            except Exception as error:
                future.set_exception(error)

        work = self._work
        if work is None:
            future.set_result(self.result())
        else:
            work.get_future().add_done_callback(finish)
        return future


class _Works(dist.Work):
    """Several collectives as one work handle."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while self._works:
            self._works.pop(0).wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        def results(each: Any) -> list[Tensor]:
            return [tensor for future in each.wait() for tensor in future.wait()]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(results)


class _StagedGroup(ProcessGroup):
    """Starts collectives of a Gloo group on host copies of tensors.

    Args:
        store: where the ranks meet.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout: longest time that a collective waits for other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch lets only groups without a store be made in Python
        self._store = store
        gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo = ProcessGroup(store, rank, size)
        for group in (self, self._gloo):  # this one too, because torch and others ask it for the CPU's backend
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
            group._register_backend(_CPU, ProcessGroup.BackendType.GLOO, gloo)
        self._coalescing: list[Any] | None = None

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        """Return the backend's name; C++ calls this."""
        return STAGED

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalescing = self._coalescing, None
        return _Works(works or [])

    def _run(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], Any],
        *,
        same: bool = False,
        moved: bool = False,
    ) -> Any:
        """Start a collective of Gloo on host copies.

        Args:
            inputs: tensors whose values the collective reads.
            outputs: tensors that it fills.
            start: starts it for the host's (inputs, outputs) and returns Gloo's work.
            same: the collective works in place: it fills its inputs.
            moved: values are only moved, so that types which Gloo lacks can go as bytes.
        """
        tensors = [*inputs, *outputs]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return self._started(start(list(inputs), list(outputs)))
        _check(tensors)
        sent = _to_host(inputs)
        received = sent[: len(outputs)] if same else [_host_memory(tensor) for tensor in outputs]
        sides = ([_as_bytes(host) for host in side] if moved else side for side in (sent, received))
        sent, received = sides
        work = start(sent, received)
        return self._started(StagedWork(work, list(zip(outputs, received, strict=True)), (sent, received)))

    def _started(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


class StagedGloo(_StagedGroup):
    """A process group whose tensors are staged through the host; `register_staged_backend` makes torch use it.

    torch calls its methods from Python and from C++. Their names and arguments are those of torch's `ProcessGroup`.
    """

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> Any:
        tensors = _listed(tensors)
        options = {"opts": opts} if opts is not None else options
        return self._run(tensors, tensors, lambda inputs, outputs: self._gloo.allreduce(inputs, **options), same=True)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        single = dist.AllreduceOptions()
        if opts is not None:
            single.reduceOp, single.timeout = opts.reduceOp, opts.timeout
        return _Works([self.allreduce([tensor], single) for tensor in tensors])

    def reduce(self, tensors: Any, opts: Any) -> Any:
        outputs = tensors if opts.rootRank == self.rank() else []
        return self._run(tensors, outputs, lambda inputs, _: self._gloo.reduce(inputs, opts), same=True)

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        (inputs,) = input_tensors
        return self._run(inputs, output_tensors, lambda ins, outs: self._gloo.reduce_scatter(outs, [ins], opts))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._run([input], [output], lambda ins, outs: self._gloo._reduce_scatter_base(outs[0], ins[0], opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _Works([self.reduce_scatter_single(output, mine, opts) for output, mine in pairs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---------------------------------------------------------------- copies

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        is_root = opts.rootRank == self.rank()
        inputs, outputs = (tensors, []) if is_root else ([], tensors)
        return self._run(inputs, outputs, lambda ins, outs: self._gloo.broadcast(ins or outs, opts), moved=True)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        (outputs,) = output_tensors
        call = self._gloo.allgather
        return self._run(input_tensors, outputs, lambda ins, outs: call([outs], ins, opts), moved=True)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        call = self._gloo._allgather_base
        return self._run([input], [output], lambda ins, outs: call(outs[0], ins[0], opts), moved=True)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _Works([self.all_gather_single(output, mine, opts) for output, mine in pairs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        columns = zip(*output_lists, strict=True)  # torch's lists are by rank, then by tensor
        pairs = zip(columns, input_list, strict=True)
        return _Works([self.allgather([list(column)], [mine], opts) for column, mine in pairs])

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        outputs = output_tensors[0] if output_tensors else []
        call = self._gloo.gather
        nested = bool(output_tensors)
        return self._run(
            input_tensors, outputs, lambda ins, outs: call([outs] if nested else [], ins, opts), moved=True
        )

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Any:
        inputs = input_tensors[0] if input_tensors else []
        call = self._gloo.scatter
        nested = bool(input_tensors)
        return self._run(
            inputs, output_tensors, lambda ins, outs: call(outs, [ins] if nested else [], opts), moved=True
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = dist.AllToAllOptions() if opts is None else opts
        call = self._gloo.alltoall_base

        def start(ins: list[Tensor], outs: list[Tensor]) -> Any:
            return call(outs[0], ins[0], output_sizes, input_sizes, opts)

        return self._run([input], [output], start, moved=True)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        device = input_tensors[0].device
        if device.type != "cpu":
            _check([*input_tensors, *output_tensors])
        opts = dist.AllToAllOptions() if opts is None else opts
        output_sizes, input_sizes = ([tensor.numel() for tensor in each] for each in (output_tensors, input_tensors))
        sent = torch.cat([tensor.reshape(-1) for tensor in _to_host(input_tensors)])
        received = sent.new_empty(sum(output_sizes))
        work = self._gloo.alltoall_base(received, sent, output_sizes, input_sizes, opts)
        results = list(zip(output_tensors, torch.split(received, output_sizes), strict=True))
        return self._started(StagedWork(work, results, (sent, received)))

    # ---------------------------------------------------------------- messages

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._run(tensors, [], lambda ins, _: self._gloo.send(ins, peer, tag), moved=True)

    def recv(self, tensors: Any, peer: int, tag: int) -> Any:
        return self._run([], tensors, lambda _, outs: self._gloo.recv(outs, peer, tag), moved=True)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self._run([], tensors, lambda _, outs: self._gloo.recv_anysource(outs, tag), moved=True)

    def barrier(self, opts: Any = None, **options: Any) -> Any:
        opts = dist.BarrierOptions() if opts is None else opts
        opts.device = _CPU
        return self._gloo.barrier(opts)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check(tensors: Sequence[Tensor]) -> None:
    """Raise for what cannot be staged: sparse tensors, and tensors of several devices."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise RuntimeError(f"a collective got tensors of several devices, {' and '.join(devices)}; move them to one")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise RuntimeError(
            "a collective got a sparse tensor, which ranks that share a device cannot exchange; make it dense"
        )


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the host, contiguous and in pinned memory, once the device has made them."""
    hosts = [_host_memory(tensor) for tensor in tensors]
    with torch.no_grad():
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
    _synchronize({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
    return hosts


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for what this thread has put on its streams of these devices."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _host_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def _as_bytes(host: Tensor) -> Tensor:
    """Return a tensor that Gloo can move: itself, or its bytes in rows of the same dim 0."""
    if host.dtype in _GLOO_DTYPES:
        return host
    return host.view(len(host) if host.ndim else 1, -1).view(torch.uint8) if host.numel() else host.view(-1).byte()


def _as_dtype(host: Tensor, dtype: torch.dtype) -> Tensor:
    return host if host.dtype == dtype else host.view(dtype)
