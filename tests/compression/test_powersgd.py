"""PowerSGD's parts, and when factors pay, by themselves."""

import pytest
import torch

from compression.codecs import gradient
from tutti.compression.powersgd import PowerSGDReducer, orthogonalise
from tutti.config.compression import factors_pay
from tutti.errors import PlanError


def test_columns_become_orthonormal_and_dependent_ones_zero() -> None:
    p = gradient("normal", 40, torch.float64).view(10, 4)
    p[:, 2] = 3 * p[:, 0] - p[:, 1]
    orthogonalise(p)
    expected = torch.eye(4).double()
    expected[2, 2] = 0
    torch.testing.assert_close(p.t() @ p, expected, rtol=0, atol=1e-14)
    orthogonalise(zeros := torch.zeros(5, 2))
    assert not zeros.any()


def test_a_matrix_of_low_rank_comes_out_whole() -> None:
    matrix = gradient("normal", 24, torch.float64).view(12, 2) @ gradient("normal", 20, torch.float64, 1).view(2, 10)
    exchange = PowerSGDReducer([(12, 10)], rank=2, dtype=torch.float64)
    flat = matrix.flatten().clone()
    exchange.run(flat)
    torch.testing.assert_close(flat.view(12, 10), matrix)
    assert exchange.states["worker"].new["residual"].norm() < 1e-12


def test_vectors_and_small_matrices_are_sent_as_they_are() -> None:
    exchange = PowerSGDReducer([(100, 50), (50,), (3, 3), ()], rank=2)
    assert [(m.rows, m.columns) for m in exchange.matrices] == [(100, 50)]
    assert exchange.plain == [(5000, 5050), (5050, 5059), (5059, 5060)]
    flat = gradient("normal", exchange.numel)
    expected = flat.clone()
    exchange.run(flat)
    assert torch.equal(flat[5000:], expected[5000:])
    assert not torch.equal(flat[:5000], expected[:5000])
    with pytest.raises(PlanError, match="rank"):
        PowerSGDReducer([(3, 3)], rank=0)


def test_warm_start_finds_a_fixed_matrix() -> None:
    """Power iteration: with the last Q, the approximation of one matrix gets as good as its singular values allow."""
    matrix = gradient("normal", 30 * 20, torch.float64).view(30, 20)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = (left[:, :3] * values[:3]) @ right[:3]
    exchange = PowerSGDReducer([(30, 20)], rank=3, min_rate=1, dtype=torch.float64)
    for _ in range(200):
        flat = matrix.flatten().clone()
        exchange.run(flat)
        exchange.finish_step(True)
        exchange.states["worker"].old["residual"].zero_()
    torch.testing.assert_close(flat.view(30, 20), best, rtol=0, atol=1e-6)


def test_factors_pay_below_the_predicted_number_of_rows() -> None:
    out_features, in_features, ranks = 4096, 1024, 4
    limit = 2 * out_features * in_features / (out_features + in_features) / ranks
    assert factors_pay(int(limit) * ranks, out_features, in_features)
    assert not factors_pay((int(limit) + 1) * ranks, out_features, in_features)
    assert factors_pay((int(limit) + 1) * ranks, out_features, in_features, 4, 2)  # rows in half precision
