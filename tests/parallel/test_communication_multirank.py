"""What a step's row says of communication, with real ranks: who sent what, and times that fit together."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, Trained
from parallel.test_expert import top2
from trainer.several import Case, on_ranks
from tutti.config.plan import LayoutRule, PipelinePlan
from tutti.parallel.spatial.apply_spatial_parallel import halo_nbytes_of
from tutti.trainer.metrics import read_rows

STEPS, BATCH, SIZE = 3, 4, 12
FLOAT = 8  # bytes of a float64


def halves() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def vectors() -> Subject:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw))
    return Subject(model=halves, data=data, loss_fn=F.cross_entropy, batch=BATCH)


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 5, padding=2))


def images() -> Subject:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 1, SIZE, SIZE, generator=draw), torch.randint(3, (24, SIZE, SIZE), generator=draw)
    )
    return Subject(model=convolutions, data=data, loss_fn=F.cross_entropy, batch=BATCH)


class Attending(nn.Module):
    """(batch, tokens, 6) -> (batch, tokens, 3) with one attention of two heads of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.enter(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(mixed.transpose(1, 2).flatten(2))


def each_token(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sequences() -> Subject:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 8, 6, generator=draw), torch.randint(3, (24, 8), generator=draw))
    return Subject(model=Attending, data=data, loss_fn=each_token, batch=BATCH)


def look(run: Any) -> dict[str, Any]:
    """The run's rows (rank 0's) and this rank's own."""
    own = read_rows(run.output.folder.rank(run.parallel.world.rank) / "metrics.jsonl")
    rows = read_rows(run.output.folder.metrics) if run.parallel.world.is_main else []
    return {
        "steps": [row for row in rows if row["kind"] == "step"],
        "own": [row for row in own if row["kind"] == "step"],
        "replica": run.parallel.replica.sent_nbytes,
    }


TWO: dict[str, Case] = {
    "replicate": (vectors, {"mesh": {"replicate": 2}}),
    "split": (vectors, {"mesh": {"split": 2}}),
    "shard": (vectors, {"mesh": {"shard": 2}}),
    "stage": (vectors, {"mesh": {"stage": 2}, "pipeline": PipelinePlan(cuts=("2",)), "batch": {"num_microbatches": 2}}),
    "context": (sequences, {"mesh": {"context": 2}}),
    "heads": (sequences, {"mesh": {"context": 2}, "context": "all-to-all"}),
    "space": (images, {"mesh": {"space": 2}}),
    "expert": (top2, {"mesh": {"expert": 2}, "batch": {"num_microbatches": 2}}),
}


@functools.cache
def trained() -> list[dict[str, Trained]]:
    return on_ranks(TWO, 2, steps=STEPS, look=look)


def steps(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trained()[0][name].facts["steps"]
    assert len(found) == STEPS
    return found


def channels(row: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(entry["axes"], entry["carried"]): entry for entry in row["communication"]}


KINDS = {
    "replicate": {"gradients"},
    "split": {"activations"},
    "shard": {"parameters", "gradients"},
    "stage": {"messages"},
    "context": {"keys", "gradients"},
    "heads": {"heads", "gradients"},
    "space": {"halos", "statistics", "gradients"},
    "expert": {"tokens", "routing", "gradients"},
}


@pytest.mark.parametrize("name", TWO)
def test_every_mechanism_says_what_it_exchanged(name: str) -> None:
    axis = "context" if name == "heads" else name
    for row in steps(name):
        assert set(channels(row)) - {(axis, "scalars")} == {(axis, carried) for carried in KINDS[name]}
        assert all(entry["count"] > 0 and entry["nbytes"] > 0 for entry in row["communication"])


@pytest.mark.parametrize("name", TWO)
def test_phases_add_up_and_waiting_is_exposed_communication(name: str) -> None:
    """Exchanges are waited for at most as long as they are under way, and no phase loses more than it had."""
    for row in steps(name):
        assert sum(row["phases"].values()) == pytest.approx(row["wall_s"], rel=1e-3)
        assert all(seconds >= -1e-9 for seconds in row["phases"].values())
        waited = {"forward", "backward", "optimizer", "exposed_communication"}
        exposed = [
            seconds
            for entry in row["communication"]
            for phase, seconds in entry["exposed_s"].items()
            if phase in waited
        ]
        assert 0 < sum(exposed) <= row["phases"]["exposed_communication"] + 1e-5
        for entry in row["communication"]:
            if entry["in_progress_s"] is None:
                assert entry["carried"] in ("messages", "scalars")
            else:
                assert 0 < sum(entry["exposed_s"].values()) <= 1.001 * entry["in_progress_s"] + 1e-6  # four digits
                assert entry["in_progress_s"] <= row["wall_s"] + 1e-6


@pytest.mark.parametrize(("name", "both_ways"), [("split", "activations"), ("heads", "heads"), ("stage", "messages")])
def test_waits_are_told_apart_by_the_phase_they_were_in(name: str, both_ways: str) -> None:
    for row in steps(name):
        entry = next(entry for entry in row["communication"] if entry["carried"] == both_ways)
        assert set(entry["exposed_s"]) & {"forward", "backward"}


def nbytes(name: str, carried: str) -> set[int]:
    """In steps after the first one, which under context also compares a short piece with one device."""
    return {entry["nbytes"] for row in steps(name)[1:] for entry in row["communication"] if entry["carried"] == carried}


def test_bytes_are_those_of_the_arithmetic() -> None:
    parameters = sum(p.numel() for p in halves().parameters())
    assert nbytes("replicate", "gradients") == {parameters * FLOAT}
    keys_and_values = 2 * BATCH * 2 * 4 * 4 * FLOAT  # heads, tokens of a part, width of a head
    assert nbytes("context", "keys") == {(1 + 1 + 2) * keys_and_values}  # forward, backward, and their gradients
    assert nbytes("heads", "heads") == {2 * 4 * (keys_and_values // 2) // 2}  # q, k, v and the result, both ways
    assert nbytes("stage", "messages") == {BATCH * 16 * FLOAT}  # activations forward; gradients are the other rank's


def test_halos_are_as_many_bytes_as_foreseen() -> None:
    both = halo_nbytes_of(convolutions(), (BATCH, 1, SIZE, SIZE), (2, 1), 0, torch.float64)
    assert nbytes("space", "halos") == {sum(both)}


@pytest.mark.parametrize("name", TWO)
def test_exchanged_bytes_are_activations_and_every_rank_says_what_it_sent(name: str) -> None:
    beside = {"gradients", "parameters", "statistics", "routing", "indices", "scalars"}
    for row in steps(name):
        exchanged = [entry["nbytes"] for entry in row["communication"] if entry["carried"] not in beside]
        assert row["exchanged_nbytes"] == sum(exchanged)
        sent = [entry["nbytes"] for entry in row["communication"] if entry["carried"] in ("gradients", "parameters")]
        assert row["sent_nbytes"] == sum(sent)
        if name != "stage":  # a tied parameter's, had it one
            assert row["sent_nbytes"] == pytest.approx(trained()[0][name].facts["replica"], rel=1e-3)
    for rank, results in enumerate(trained()):
        own = results[name].facts["own"]
        assert len(own) == STEPS
        if rank == 0:
            assert [row["sent_nbytes"] for row in own] == [
                row["sent_nbytes"] + row["exchanged_nbytes"] for row in steps(name)
            ]


RECOMPUTED = (LayoutRule(), LayoutRule(modules="moe", recompute=True))
MIXTURES: dict[str, Case] = {
    "split": (top2, {"mesh": {"split": 2}, "batch": {"num_microbatches": 2}}),
    "stage": (top2, {"mesh": {"stage": 2}, "batch": {"num_microbatches": 2}}),
    "expert, recomputed": (top2, {"mesh": {"expert": 2}, "batch": {"num_microbatches": 2}, "layout": RECOMPUTED}),
}
ALONE: dict[str, Case] = {
    "one": (top2, {"batch": {"num_microbatches": 2}}),
    "recomputed": (top2, {"batch": {"num_microbatches": 2}, "layout": RECOMPUTED}),
}


def test_layers_of_experts_add_up_and_are_those_of_one_device_under_any_plan() -> None:
    """Every rank's numbers are added up with the loss; ranks with the same ones, and second forwards, count once."""
    alone = on_ranks(ALONE, 1, steps=STEPS, look=look)[0]
    several = on_ranks(MIXTURES, 2, steps=STEPS, look=look)[0]
    ways = {name: result.facts["steps"] for name, result in (alone | several).items()} | {"expert": steps("expert")}
    for name, found in ways.items():
        assert len(found) == STEPS
        for row, one in zip(found, ways["one"], strict=True):
            assert list(row["experts"]) == ["moe", "second"]
            for layer, counted in row["experts"].items():
                assert counted == pytest.approx(one["experts"][layer], rel=1e-9), (name, layer)
            for what in ("assigned", "dropped"):
                assert sum(layer[what] for layer in row["experts"].values()) == row[f"tokens_{what}"]
                assert isinstance(row[f"tokens_{what}"], int)
            losses = [layer["balance_loss"] for layer in row["experts"].values()]
            assert row["balance_loss"] == pytest.approx(sum(losses))
            assert all(loss > 0.5 for loss in losses)
    assert any(row["tokens_dropped"] for row in ways["one"])
