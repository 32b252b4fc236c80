"""Bytes of every step during and after a warm-up, as predicted and as ranks count them, on one host and on two."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from against_one import Subject, train
from cost_model.examples import cluster
from harness import run_ranks
from matrix.described import described
from parallel.test_between_hosts_multirank import name_hosts
from tutti.config.compression import parse_compression
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.prediction import Prediction
from tutti.cost_model import predict
from tutti.trainer.metrics import read_rows

STEPS, BATCH, WIDTH = 12, 8, 64


def net() -> nn.Module:
    """Return layers with one parameter each, so that a flag per module is a flag per gradient.

    The layers are square, because powersgd is predicted for square matrices.
    """
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def subject(optimizer: Any = torch.optim.Adam) -> Subject:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, WIDTH, generator=draw), torch.randint(WIDTH, (64,), generator=draw))
    return Subject(model=net, data=data, loss_fn=F.cross_entropy, batch=BATCH, optimizer=optimizer)


def plain() -> Subject:
    return subject(torch.optim.SGD)


def spec() -> ModelSpec:
    net_subject = subject()
    return described(net_subject.model(), net_subject.data, net_subject.loss_fn, batch=BATCH, name="net")


def sync_of(words: str, bucket_nbytes: int) -> SyncPlan:
    return SyncPlan(bucket_nbytes=bucket_nbytes, compress=parse_compression(words))


def rows_of(run: Any) -> dict[str, Any]:
    rows = read_rows(run.output.folder.metrics) if run.parallel.world.is_main else []
    return {"sent": [row["sent_nbytes"] for row in rows if row["kind"] == "step"]}


def counted(hosts: tuple[int, ...], cases: list[tuple[str, int]]) -> list[list[int]]:
    """Return the bytes that the first rank counts in each step, by case."""
    import os

    name_hosts(hosts)
    sent_by_case = []
    for number, (words, bucket) in enumerate(cases):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        fields = {"mesh": {"replicate": sum(hosts)}, "sync": sync_of(words, bucket)}
        make = plain if words.startswith("dgc") else subject
        sent_by_case.append(train(make, fields, STEPS, torch.float32, rows_of).facts["sent"])
    return sent_by_case


def foreseen(model: ModelSpec, hosts: tuple[int, ...], words: str, bucket: int) -> Prediction:
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": sum(hosts)}, sync=sync_of(words, bucket))
    return predict(model, cluster(devices_per_node=hosts[0], count=len(hosts)), plan)


def by_step(prediction: Prediction) -> list[float]:
    """Return the predicted bytes of the first steps."""
    ends = [0, *(phase.until for phase in prediction.first)]
    sent = [phase.sent_nbytes_per_rank for phase in prediction.first for _ in range(STEPS)]
    first = [sent[place * STEPS] for place, (a, b) in enumerate(pairwise(ends)) for _ in range(b - a)]
    return [*first, *[prediction.sent_nbytes_per_rank] * STEPS][:STEPS]


WHOLE, CUT = 25 * 2**20, 20_000
CASES = [
    ("one-bit-adam,freeze_step=2", WHOLE),
    ("byte-adam,freeze_step=3,between=ranks", CUT),
    ("one-bit-adam,freeze_step=10", CUT),
    ("dgc,density=0.01,warmup_steps=4", CUT),
    ("dgc,density=0.1,warmup_steps=2,between=hosts", WHOLE),
    ("one-bit,between=hosts", CUT),
    ("qsgd,between=ranks", WHOLE),
    ("top16-q4", CUT),
    ("powersgd,rank=2", WHOLE),
]


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param((2,), marks=pytest.mark.long),
        pytest.param((4,), marks=pytest.mark.long),
        (2, 2),
        pytest.param((1, 1), marks=pytest.mark.long),
    ],
)
def test_bytes_of_every_step_are_those_that_ranks_count(hosts: tuple[int, ...]) -> None:
    model = spec()
    cases = [case for case in CASES if not (len(hosts) == 1 and "between=hosts" in case[0])]
    results = run_ranks(counted, sum(hosts), hosts, cases)[0]
    for (words, bucket), sent in zip(cases, results, strict=True):
        assert (len(set(sent)) > 1) == ("step" in words)
        assert sent == [pytest.approx(nbytes, abs=1) for nbytes in by_step(foreseen(model, hosts, words, bucket))], (
            words
        )
