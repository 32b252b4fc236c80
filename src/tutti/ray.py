"""Ranks as workers of a program that uses Ray, as Ray Train's trainers start them.

    from tutti.ray import TuttiTrainer

    def train_loop(config):
        job = tutti.Job(global_batch_size=512)
        ...

    TuttiTrainer(train_loop, train_loop_config={"epochs": 10}, num_workers=4, use_gpu=True).fit()

Runs that are to be watched, restarted and resumed are jobs: `tutti run --on ray`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tutti.clusters.ray_node import free_port
from tutti.errors import LaunchError, TrainingError
from tutti.launch.launch_environment import become

__all__ = ["TuttiTrainer"]


class RankWorker:
    """The actor of one rank."""

    def where(self) -> tuple[str, str, int]:
        """Return its node in Ray, the address of that, and a free port there."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, variables: dict[str, str], train_loop: Callable[..., Any], config: Mapping[str, Any] | None) -> Any:
        """Become the rank that the variables say, train, and return what `train_loop` returns."""
        become(variables)
        return train_loop() if config is None else train_loop(dict(config))


class TuttiTrainer:
    """Runs a function on ranks that Ray places, all or none, in a Ray that is connected (`ray.init`).

    Args:
        train_loop: what each rank runs; it makes its `tutti.Job`. It gets `train_loop_config`, if there is one.
        train_loop_config: plain data for it.
        num_workers: number of ranks.
        use_gpu: give each rank a GPU.
        resources_per_worker: what Ray reserves for each rank, such as {"CPU": 4}; one core if not given.
        placement_strategy: of Ray's placement group: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        run_folder: where rank 0 writes the run; a folder that all nodes see.
        timeout_s: seconds to wait for the resources; None for ever.

    Raises:
        LaunchError: Ray is not connected, or the numbers cannot be right.
    """

    def __init__(
        self,
        train_loop: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str = "PACK",
        run_folder: str | Path | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if num_workers < 1:
            raise LaunchError(f"num_workers={num_workers}: a run needs 1 rank or more; give such a number")
        self._train_loop, self._config = train_loop, train_loop_config
        self._bundle = {"CPU": 1.0, **({"GPU": 1.0} if use_gpu else {}), **(resources_per_worker or {})}
        self._count, self._strategy = num_workers, placement_strategy
        self._folder, self._timeout_s = run_folder, timeout_s

    def fit(self) -> list[Any]:
        """Train, and return what `train_loop` returned on each rank, in the order of ranks.

        Raises:
            LaunchError: Ray is not connected, or has not had the resources in time.
            TrainingError: a rank failed; the others are ended.
        """
        if not ray.is_initialized():
            raise LaunchError("no Ray is connected; call ray.init(address=...) before TuttiTrainer.fit")
        group = ray.util.placement_group([self._bundle] * self._count, strategy=self._strategy)
        try:
            if not group.wait(1e9 if self._timeout_s is None else self._timeout_s):
                raise LaunchError(
                    f"Ray had no {self._count} times {self._bundle} in {self._timeout_s:g} s; ask for less, or wait "
                    "longer (timeout_s)"
                )
            workers = [self._worker(group, number) for number in range(self._count)]
            return self._trained(*self._ordered(workers))
        finally:
            ray.util.remove_placement_group(group)

    def _worker(self, group: Any, number: int) -> Any:
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU", "memory")}
        return (
            ray.remote(RankWorker)
            .options(
                num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), resources=others,
                memory=self._bundle.get("memory"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
        )  # fmt: skip

    def _ordered(self, workers: Sequence[Any]) -> tuple[list[Any], list[dict[str, str]]]:
        """Return the workers in the order of ranks, those of a node one after the other, and their variables."""
        places = ray.get([worker.where.remote() for worker in workers])
        names = list(dict.fromkeys(node for node, _, _ in places))
        order = sorted(range(len(workers)), key=lambda number: names.index(places[number][0]))
        _, address, port = places[order[0]]
        shared = {"WORLD_SIZE": str(len(workers)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        shared["TUTTI_SECRET"] = secrets.token_hex(32)
        if self._folder is not None:
            shared["TUTTI_RUN_FOLDER"] = str(Path(self._folder).resolve())
        nodes = [places[number][0] for number in order]
        variables = [
            {
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "NODE_RANK": str(names.index(node)),
            }
            for rank, node in enumerate(nodes)
        ]
        return [workers[number] for number in order], variables

    def _trained(self, workers: Sequence[Any], variables: Sequence[dict[str, str]]) -> list[Any]:
        calls = [
            worker.run.remote(each, self._train_loop, self._config)
            for worker, each in zip(workers, variables, strict=True)
        ]
        left = list(calls)
        while left:  # the first failure counts: the other ranks would wait for that one
            done, left = ray.wait(left)
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                said = (str(cause).strip().splitlines() or [""])[-1]
                raise TrainingError(
                    f"rank {calls.index(done[0])} failed ({type(cause).__name__}: {said}); the others were ended"
                ) from error
        return list(ray.get(calls))
