"""Where the ranks of a run on Ray are placed: on all the nodes that a generation needs, or on none."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

PLACE_S = 5.0
"""Seconds in which Ray places a gang that fits, before a smaller one is tried."""

_POLL_S = 0.5


class StoppedError(Exception):
    """The job was told to end before anything has begun."""


class GangPlacement:
    """Finds nodes for a gang.

    Args:
        ray: the module.
        task: what the driver runs.
        stopped: whether the job was told to end.
        say: called with why the job waits, whenever that changes.
    """

    def __init__(
        self, ray: Any, task: Mapping[str, Any], stopped: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._ray, self._task, self._stopped, self._say = ray, task, stopped, say
        self._bundle: dict[str, float] = task["bundle"]

    def place(self) -> tuple[Any, int]:
        """Return a placement group and its number of nodes: the largest from `least_nodes` to `nodes` that fits.

        Raises:
            StoppedError: the job was told to end meanwhile.
        """
        least, most = self._task["least_nodes"], self._task["nodes"]
        size = min(most, max(least, len(self._able(self._totals()))))
        while True:
            group = self._ray.util.placement_group([self._bundle] * size, strategy="STRICT_SPREAD")
            if self._waited(group, size, most, PLACE_S if size > least else None):
                return group, size
            self._ray.util.remove_placement_group(group)
            size = min(most, max(least, len(self._able(self._free())))) if size == least else size - 1

    def _waited(self, group: Any, size: int, most: int, seconds: float | None) -> bool:
        """Wait for a group; return False for one that should have another size."""
        begun, said = time.monotonic(), ""
        while True:
            if self._stopped():
                self._ray.util.remove_placement_group(group)
                raise StoppedError
            if group.wait(_POLL_S):
                return True
            waited = time.monotonic() - begun
            if seconds is not None and waited > seconds:
                return False
            if size < most and waited > PLACE_S and len(self._able(self._free())) > size:
                return False
            words = self._waits_for(size)
            if words != said and waited > 1.0:
                said = words
                self._say(words)

    def _waits_for(self, size: int) -> str:
        nodes = self._living()
        totals, free = self._totals(), self._free()
        able, now = self._able(totals), self._able(free)
        asked = (
            f"{size} nodes with {described(self._bundle)} each"
            if size > 1
            else f"a node with {described(self._bundle)}"
        )
        there = "; ".join(
            f"{node['NodeManagerHostname']} has {described(totals[key], self._bundle)}, "
            f"{described(free.get(key, {}), self._bundle)} of it free"
            for key, node in list(nodes.items())[:8]
            if key in totals
        )
        if len(able) < size:
            few = f"the cluster has {len(able) or 'no'} such node{'' if len(able) == 1 else 's'}"
            return f"it waits for {asked}, and {few}, so it starts only if nodes are added, or ask for less: {there}"
        return f"it waits for {asked}, of which {len(now) or 'none'} are free now: {there}"

    def _able(self, resources: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Return the nodes that can take a bundle."""
        leaving = self.leaving()
        return [
            key
            for key, each in resources.items()
            if key not in leaving and all(each.get(name, 0.0) >= amount for name, amount in self._bundle.items())
        ]

    def _free(self) -> dict[str, Mapping[str, float]]:
        """Return what is free on each living node."""
        living = self._living()
        free = self._ray._private.state.available_resources_per_node()  # Ray has no public name for it
        return {key: each for key, each in free.items() if key in living}

    def _living(self) -> dict[str, dict[str, Any]]:
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}

    def _totals(self) -> dict[str, Mapping[str, float]]:
        """Return what each living node has."""
        return {key: node["Resources"] for key, node in self._living().items()}

    def leaving(self) -> set[str]:
        """Return the nodes that are being drained, as before a pre-emption."""
        with contextlib.suppress(AttributeError):
            return set(self._ray._private.state.state.get_draining_nodes())
        return set()

    def further(self, used: Collection[str]) -> int:
        """Return how many nodes could be added to those that are used."""
        return len(set(self._able(self._free())) - set(used))

    def nodes_of(self, group: Any) -> dict[str, dict[str, Any]]:
        """Return the nodes of a group by their names in Ray, in the order of its bundles."""
        bundles = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        known = {node["NodeID"]: node for node in self._ray.nodes()}
        return {str(bundles[number]): known[bundles[number]] for number in sorted(bundles)}


def described(resources: Mapping[str, float], like: Mapping[str, float] | None = None) -> str:
    """Return resources in words, such as "4 CPU, 2 GPU, 1.5 GiB memory".

    Args:
        resources: amounts by name.
        like: names that are shown even where there are none; None for all.
    """
    names = list(resources) if like is None else list(like)
    found = []
    for name in names:
        amount = resources.get(name, 0.0)
        if name == "memory":
            found.append(f"{amount / 2**30:.3g} GiB memory")
        else:
            found.append(f"{amount:g} {name}")
    return ", ".join(found)
