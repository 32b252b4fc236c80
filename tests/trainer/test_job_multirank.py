"""What users lean on beside exactness: resume, evaluation, dropout streams, custom steps, and clear failures."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import tutti
from harness import RankFailed, run_ranks
from trainer.training import Case, Mlp, train, vectors
from tutti.trainer.metrics import read_rows


def make(model: nn.Module, data: Any, loss: Any = nn.functional.cross_entropy, lr: float = 0.1, **options: Any) -> Any:
    """A Job with plain SGD; returns (job, model, loader)."""
    prepare = {name: options.pop(name) for name in ("unpack", "tokens", "shuffle") if name in options}
    job = tutti.Job(**{"global_batch_size": 8, **options})
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), data, loss, **prepare)
    return job, model, loader


# Resume ------------------------------------------------------------------------------------------


def train_in(folder: str, case: Case, world_size: int, resume: str | None = None) -> Any:
    os.environ["TUTTI_RUN_FOLDER"] = folder
    return train(case, world_size, resume=resume)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_resumes_exactly_in_mid_epoch_at_another_world_size(tmp_path: Path, world_size: int) -> None:
    rule = tutti.LRRule(base_batch_size=4, warmup="gradual", warmup_steps=9)
    options = {"checkpoint_every": 4, "keep_checkpoints": 100, "lr_rule": rule}
    case = Case(model="augmented", batch=8, microbatches=2, options=options)
    whole = run_ranks(train_in, 2, str(tmp_path / "whole"), case, 2)[0]
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000004"
    resumed = run_ranks(train_in, world_size, str(tmp_path / "resumed"), case, world_size, str(checkpoint))[0]
    assert resumed.batches == whole.batches[4:]
    assert resumed.rates == whole.rates[4:]
    for name, value in whole.state.items():
        torch.testing.assert_close(resumed.state[name], value, rtol=1e-12, atol=1e-12)
    rows = read_rows(tmp_path / "resumed" / "metrics.jsonl")
    assert next(row["step"] for row in rows if row["kind"] == "step") == 5


def count_updates() -> list[int]:
    data, counts = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3), []
    job, _, loader = make(nn.Linear(6, 3), data)
    for _ in job.epochs(1):
        counts.append(job.global_step)
        for batch in loader:
            job.step(batch)
    resumed, _, loader = make(nn.Linear(6, 3), data, resume=job.save())
    for _ in resumed.epochs(2):
        counts.append(resumed.global_step)
        for batch in loader:
            resumed.step(batch)
    return [*counts, resumed.global_step]


def test_a_resumed_run_goes_on_counting_updates() -> None:
    assert run_ranks(count_updates, 2) == [[0, 3, 6]] * 2


def grow_until_full(folder: str) -> str:
    os.environ["TUTTI_RUN_FOLDER"] = folder
    model = nn.Linear(6, 3)
    model.register_buffer("large", torch.zeros(1))
    job, model, loader = make(model, TensorDataset(torch.randn(16, 6), torch.arange(16) % 3))
    for batch in loader:
        job.step(batch)
    job.save()
    model.large = torch.zeros(1_000_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))  # as a full disk: writes fail
    for batch in loader:
        job.step(batch)
    try:
        job.save()
    except tutti.TuttiError as error:
        return str(error)
    return "saved"


def test_a_full_disk_at_a_checkpoint_leaves_the_earlier_one_whole(tmp_path: Path) -> None:
    messages = run_ranks(grow_until_full, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "checkpoint of step 4 could not be written" in messages[0]
    assert "step-00000002" in messages[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads((tmp_path / "checkpoints" / "step-00000002" / "index.json").read_text())["step"] == 2


# Evaluation --------------------------------------------------------------------------------------


def count_samples(total: int) -> Any:
    job, _, _ = make(Mlp(), TensorDataset(*(t.float() if t.is_floating_point() else t for t in vectors().tensors)))
    data = TensorDataset(torch.randn(total, 6), torch.arange(total) % 3, torch.arange(total))
    seen: list[int] = []
    job._prepared.loop.unpack = lambda batch: ((batch[0],), {}, (batch[1], batch[2]))
    job._prepared.loop.loss_fn = lambda output, target: nn.functional.cross_entropy(output, target[0])

    def remember(output: torch.Tensor, target: Any) -> torch.Tensor:
        seen.extend(target[1].tolist())
        return target[1].double()

    values = job.evaluate(
        data,
        {"mean_id": remember, "weighted": lambda o, t: tutti.Weighted(t[1].double().sum(), 2 * len(t[1]))},
        whole={"in_order": lambda o, t: float((t[1] == torch.arange(total)).all())},
        batch_size=4,
    )
    return seen, values, job._prepared.parallel.model.training


@pytest.mark.parametrize(("world_size", "total"), [(1, 37), (3, 37), (4, 3)])
def test_every_sample_is_evaluated_exactly_once(world_size: int, total: int) -> None:
    ranks = run_ranks(count_samples, world_size, total)
    assert sorted(index for seen, _, _ in ranks for index in seen) == list(range(total))
    for _, values, training in ranks:
        assert values == ranks[0][1]
        assert values["mean_id"] == pytest.approx((total - 1) / 2, rel=1e-14)
        assert values["weighted"] == pytest.approx((total - 1) / 4, rel=1e-14)
        assert values["in_order"] == 1.0
        assert training


# Dropout -----------------------------------------------------------------------------------------


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.functional.dropout(torch.ones(2, 64), 0.5, self.training)
        self.seen.append("".join(str(int(v > 0)) for v in mask.flatten()))
        return x * self.scale


def dropout_masks(seed: int) -> list[str]:
    data = TensorDataset(torch.randn(32, 1), torch.randn(32, 1))
    job, model, loader = make(Masks(), data, nn.functional.mse_loss, seed=seed, num_microbatches=2)
    for batch in loader:
        job.step(batch)
    return model.seen


def test_dropout_streams_never_repeat_and_are_reproducible() -> None:
    first, again, other = run_ranks(dropout_masks, 3, 0), run_ranks(dropout_masks, 3, 0), run_ranks(dropout_masks, 3, 1)
    masks = [mask for rank in first + other for mask in rank]
    assert len(masks) == len(set(masks)) == 2 * 3 * 4 * 2
    assert first == again


# Custom steps, streams, conditional parameters ---------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(6, 6, dtype=torch.float64)
        self.critic = nn.Linear(6, 1, dtype=torch.float64)


def adversarial() -> dict[str, torch.Tensor]:
    job = tutti.Job(global_batch_size=8)
    torch.manual_seed(3)
    model = Pair()
    one = torch.optim.SGD(model.generator.parameters(), lr=0.1)
    two = torch.optim.SGD(model.critic.parameters(), lr=0.1)
    model, (one, two), loader = job.prepare(model, [one, two], vectors(21))

    def critic_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model.critic(model.generator(batch[0]).detach()) - model.critic(batch[0])).mean()

    def generator_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return -model.critic(model.generator(batch[0])).mean()

    for _ in job.epochs(2):
        for batch in loader:
            job.forward_backward(critic_loss, batch)
            job.update(two)
            job.forward_backward(generator_loss, batch)
            job.update(one)
    return model.state_dict()


def test_two_losses_and_two_optimizers_agree_with_one_device() -> None:
    one = run_ranks(adversarial, 1)[0]
    for many in run_ranks(adversarial, 3):
        for name, value in one.items():
            torch.testing.assert_close(many[name], value, rtol=1e-12, atol=1e-12)


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        for index in range(29):
            yield torch.full((6,), index / 29), index % 3


def stream() -> Any:
    job, _model, loader = make(nn.Linear(6, 3), Counting(), num_microbatches=2)
    losses = [job.step(batch) for _ in job.epochs(2) for batch in loader]
    return losses, job.evaluate(Counting(), batch_size=4)


def test_a_stream_is_shared_like_a_map_data_set() -> None:
    one = run_ranks(stream, 1)[0]
    assert len(one[0]) == 8
    for many in run_ranks(stream, 3):
        assert many[0] == pytest.approx(one[0], rel=1e-6)
        assert many[1] == pytest.approx(one[1], rel=1e-6)


class Sometimes(nn.Module):
    """Uses `rare` only for batches with a large first feature: on some ranks, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.usual(x)
        rare = x[:, 0] > 1.2
        return output.index_add(0, rare.nonzero()[:, 0], self.rare(x[rare])) if rare.any() else output


def sometimes() -> dict[str, torch.Tensor]:
    job, model, loader = make(Sometimes(), vectors(), num_microbatches=2)
    for _ in job.epochs(2):
        for batch in loader:
            job.step(batch)
    return model.state_dict()


def test_a_parameter_used_on_some_ranks_and_steps_only() -> None:
    one = run_ranks(sometimes, 1)[0]
    for many in run_ranks(sometimes, 4):
        for name, value in one.items():
            torch.testing.assert_close(many[name], value, rtol=1e-12, atol=1e-12)


def batch_of_tokens() -> Any:
    lengths = [1 + index % 7 for index in range(40)]
    data = [torch.full((length,), index) for index, length in enumerate(lengths)]
    collate = torch.nn.utils.rnn.pad_sequence
    job = tutti.Job(global_batch_size=30, unit="tokens")
    model = nn.Embedding(40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output: torch.Tensor, tokens: torch.Tensor) -> tutti.Weighted:
        return tutti.Weighted((output**2).sum(), (tokens >= 0).sum())

    _, _, loader = job.prepare(
        model, optimizer, data, loss, tokens=lengths, collate_fn=lambda s: collate(s, True, -0.0), shuffle=False
    )
    return [(loader.shares.indices.tolist(), loader.shares.tokens) for batch in loader if job.step(batch) >= 0]


def test_a_global_batch_of_tokens_is_the_same_on_any_number_of_ranks() -> None:
    one = run_ranks(batch_of_tokens, 1)[0]
    assert [index for indices, _ in one for index in indices] == list(range(40))
    assert all(tokens == sum(1 + index % 7 for index in indices) <= 30 for indices, tokens in one)
    assert run_ranks(batch_of_tokens, 2) == [one, one]


# Precision ---------------------------------------------------------------------------------------


def mixed(precision: str) -> Any:
    torch.manual_seed(0)
    x, y = vectors(64).tensors
    job, model, loader = make(Mlp().float(), TensorDataset(x.float(), y), precision=precision, clip_norm=1.0)
    losses = [job.step(batch) for _ in job.epochs(3) for batch in loader]
    return losses, {str(p.dtype) for p in model.parameters()}


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_mixed_precision_keeps_float32_weights_and_agrees_with_full(precision: str, tolerance: float) -> None:
    full, one, two = (
        run_ranks(mixed, 1, "full")[0],
        run_ranks(mixed, 1, precision)[0],
        run_ranks(mixed, 2, precision)[0],
    )
    assert one[1] == two[1] == {"torch.float32"}
    assert one[0] != full[0]
    assert one[0] == pytest.approx(full[0], rel=tolerance)
    assert two[0] == pytest.approx(one[0], rel=tolerance)


def overflow(folder: str) -> Any:
    os.environ["TUTTI_RUN_FOLDER"] = folder
    data = TensorDataset(torch.full((24, 6), 1.0), torch.zeros(24, dtype=torch.long))
    job, model, loader = make(nn.Linear(6, 3), data, lambda o, t: (o * 1e3).mean(), precision="float16", lr=1e-6)
    before = model.weight.clone()
    changed = []
    for batch in loader:
        job.step(batch)
        changed.append(bool((model.weight != before).any()))
    return changed


def test_float16_overflow_skips_the_update_on_every_rank(tmp_path: Path) -> None:
    ranks = run_ranks(overflow, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0][0] is False
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "step"]
    assert rows[0]["skipped"]
    assert rows[1]["loss_scale"] < rows[0]["loss_scale"] * 2


# Failures ----------------------------------------------------------------------------------------


def poisoned(on_nonfinite: str) -> Any:
    x, y = vectors(24).tensors
    x = x.clone()
    x[13] = float("nan")  # in the second batch of 8; of 2 ranks with 4 samples each, on rank 1
    job, model, loader = make(Mlp().double(), TensorDataset(x, y), shuffle=False, on_nonfinite=on_nonfinite)
    states, losses = [], []
    try:
        for batch in loader:
            losses.append(job.step(batch))
            states.append(model.second.weight.clone())
    except tutti.TuttiError as error:
        return str(error), error.exit_code
    return losses, states


def test_a_nan_loss_stops_all_ranks_with_step_and_rank_named() -> None:
    for message, code in run_ranks(poisoned, 2, "stop"):
        assert "the loss is NaN at step 2 on rank 1; the model's input has such values already; samples: 13;" in message
        assert "parameters are as they were after step 1" in message
        assert code == 1


def test_a_nan_loss_is_skipped_where_the_job_says_so() -> None:
    for losses, states in run_ranks(poisoned, 2, "skip"):
        assert len(losses) == 3
        assert torch.equal(states[0], states[1])
        assert not torch.equal(states[1], states[2])
        assert bool(torch.isfinite(states[2]).all())


def differing(kind: str) -> Any:
    rank = int(os.environ["RANK"])
    width = 8 if kind == "shape" and rank == 1 else 6
    layers = [nn.Linear(6, 6), nn.Linear(6, width)] + ([nn.Linear(6, 6)] if kind == "more" and rank == 1 else [])
    model = nn.Sequential(*layers)
    torch.manual_seed(rank)
    if kind == "values":
        nn.init.normal_(model[1].weight)
    try:
        make(model, TensorDataset(torch.randn(8, 6), torch.arange(8) % 3))
    except tutti.TuttiError as error:
        return str(error)
    return model[1].weight.detach()


def test_models_that_differ_between_ranks_are_refused_by_name() -> None:
    for message in run_ranks(differing, 2, "shape"):
        assert "rank 0 has '1.weight' of shape (6, 6), float32, rank 1 has '1.weight' of shape (8, 6)" in message
    for message in run_ranks(differing, 2, "more"):
        assert "only rank 1 has '2.weight'" in message


def test_values_that_differ_become_rank_0s() -> None:
    weights = run_ranks(differing, 2, "values")
    assert torch.equal(weights[0], weights[1])


def test_a_rank_that_fails_reaches_the_test() -> None:
    with pytest.raises(RankFailed, match="no such attribute"):
        run_ranks(fail_on_rank_1, 2)


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise AttributeError("no such attribute")
