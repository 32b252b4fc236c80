"""Step times of one peer for `pays`: Horovod, DeepSpeed or Hivemind, in its own virtual environment.

Runs on each host of the lab under the peer's Python, which has torch and the peer but not tutti's dependencies.
Blocks of the peer and of the same step without communication take turns.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pays_wire import Output, Wire, in_turns, warm_steps  # noqa: E402
from pays_work import WORKS, Work, fresh  # noqa: E402

Step = Callable[[], object]
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=list(PEERS), required=True)
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument(
        "--unit", type=Path, required=True, help="JSON file: limits, rates, terms and the hosts' addresses"
    )
    parser.add_argument("--data", type=Path, required=True, help="the global batches of seed 0, saved by torch")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    unit = json.loads(args.unit.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    os.environ.update(RANK=os.environ["NODE_RANK"], WORLD_SIZE=os.environ["NNODES"], LOCAL_RANK="0", LOCAL_SIZE="1")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    meet = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=meet, rank=int(os.environ["RANK"]), world_size=unit["hosts"])
    wire, output, work = Wire(unit["limits"]), Output(args.output), WORKS[args.work]
    wire.limit("unlimited")
    steps = {"floor": uncontended(work, share(work, args.data)), args.peer: PEERS[args.peer](work, args, unit)}
    periods = {"floor": 1, args.peer: unit["period"]}
    for name, step in steps.items():
        for _ in range(warm_steps(periods[name])):
            step()
    for rate in unit["rates"]:
        wire.limit(rate)
        result = in_turns(steps, periods, unit, lambda name: None)
        output.row({"kind": "peer", "method": args.peer, "rate": rate, **result})
    wire.limit("unlimited")
    sys.stdout.flush()
    os._exit(0)  # do not wait for what peers leave running


def share(work: Work, data: Path) -> Batches:
    """Yield this rank's contiguous part of each global batch, again and again."""
    inputs, target = torch.load(data)
    part = work.batch // dist.get_world_size()
    while True:
        for step in range(len(inputs) // work.batch):
            begin = step * work.batch + dist.get_rank() * part
            yield inputs[begin : begin + part], target[begin : begin + part]


def uncontended(work: Work, batches: Batches, optimizer_of: Callable[..., Any] = lambda model, own: own) -> Step:
    """Return the plain step; `optimizer_of` may wrap its optimizer."""
    model = fresh(work, 0)
    optimizer = optimizer_of(model, work.optimizer(model))

    def step() -> None:
        inputs, target = next(batches)
        optimizer.zero_grad()
        loss = work.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def horovod(work: Work, args: argparse.Namespace, unit: dict[str, Any]) -> Step:
    """Horovod's DistributedOptimizer over Gloo, with the ranks placed as `horovodrun --gloo` would."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), [0]
    if rank == 0:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = [server.start()]
        server.init(get_host_assignments(parse_hosts(",".join(f"{host}:1" for host in unit["addresses"])), size))
    dist.broadcast_object_list(port, src=0)
    places = {"RANK": rank, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": size}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in places.items()})
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="eth0",
        HOROVOD_GLOO_RENDEZVOUS_ADDR=unit["addresses"][0],
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port[0]),
        HOROVOD_HOSTNAME=unit["addresses"][rank],
        HOROVOD_NUM_THREADS="1",
    )
    import horovod.torch as hvd

    hvd.init()
    return uncontended(
        work,
        share(work, args.data),
        lambda model, own: hvd.DistributedOptimizer(own, named_parameters=model.named_parameters()),
    )


def deepspeed(work: Work, args: argparse.Namespace, unit: dict[str, Any]) -> Step:
    """DeepSpeed's ZeRO-2 in float32 with the work's optimizer.

    Its operator for ranks of one host is switched off: these hosts share memory only because they are parts of a
    lab.
    """
    os.environ.update(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1")
    import deepspeed as ds

    # Imported by its full name, because the package's attribute `torch` is torch itself.
    backend = importlib.import_module("deepspeed.comm.torch")
    vars(backend)["build_shm_op"] = lambda: None
    ds.init_distributed(dist_backend="gloo")
    model = fresh(work, 0)
    settings = {
        "train_micro_batch_size_per_gpu": work.batch // dist.get_world_size(),
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = ds.initialize(model=model, optimizer=work.optimizer(model), config=settings)[0]
    batches = share(work, args.data)

    def step() -> None:
        inputs, target = next(batches)
        loss = work.loss(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        loss.item()

    return step


def hivemind(work: Work, args: argparse.Namespace, unit: dict[str, Any]) -> Step:
    """Models averaged by Hivemind's DecentralizedAverager in float16 every `period` steps, including its search for
    partners.
    """
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression

    rank, size = dist.get_rank(), dist.get_world_size()
    listen = [f"/ip4/{unit['addresses'][rank]}/tcp/{31000 + rank}"]
    addresses: list[Any] = [None]
    if rank == 0:
        dht = DHT(host_maddrs=listen, start=True)
        addresses = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(addresses, src=0)
    if rank:
        dht = DHT(host_maddrs=listen, initial_peers=addresses[0], start=True)
    count, models = [0], []
    plain = uncontended(work, share(work, args.data), lambda model, own: models.append(model) or own)
    averager = DecentralizedAverager(
        [parameter.detach().clone() for parameter in models[0].parameters()],
        dht,
        prefix="pays",
        target_group_size=size,
        min_group_size=size,
        min_matchmaking_time=1.0,
        compression=Float16Compression(),
        start=True,
    )

    def step() -> None:
        plain()
        count[0] += 1
        if count[0] % unit["period"] == 0:
            average(averager, models[0])

    return step


def average(averager: Any, model: torch.nn.Module) -> None:
    """Replace this model by the mean of all hosts' models; waits for partners that are not there yet."""
    with averager.get_tensors() as tensors, torch.no_grad():
        for tensor, parameter in zip(tensors, model.parameters(), strict=True):
            tensor.copy_(parameter)
    until = time.monotonic() + 120
    while averager.step(timeout=60) is None:
        if time.monotonic() > until:
            raise TimeoutError("no partners were found in two minutes")
    with averager.get_tensors() as tensors, torch.no_grad():
        for tensor, parameter in zip(tensors, model.parameters(), strict=True):
            parameter.copy_(tensor)


PEERS: dict[str, Callable[[Work, argparse.Namespace, dict[str, Any]], Step]] = {
    "horovod": horovod,
    "deepspeed": deepspeed,
    "hivemind": hivemind,
}

if __name__ == "__main__":
    main()
