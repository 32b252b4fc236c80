"""Explanation: where a plan puts every module, before anything runs."""

from dataclasses import dataclass

from tutti.config.words import AxisName, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlacement:
    """One module with parameters of its own. `placement`: in words; `nbytes`: of its own parameters, whole;
    `nbytes_per_rank`: of those each previewed rank holds; `collectives`: what a step exchanges for it.
    """

    name: str
    kind: str
    placement: str
    nbytes: int
    nbytes_per_rank: tuple[int, ...]
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan's layout. `ranks`: those that were previewed (all of a small world); `state_nbytes_per_rank`: parameters,
    gradients and optimizer state each of them holds between steps.
    """

    mesh: dict[AxisName, int]
    ranks: tuple[int, ...]
    modules: tuple[ModulePlacement, ...]
    parameter_nbytes: int
    parameter_nbytes_per_rank: tuple[int, ...]
    gradient_nbytes_per_rank: tuple[int, ...]
    state_nbytes_per_rank: tuple[int, ...]
    evidence: Evidence = "predicted"
