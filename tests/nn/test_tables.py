"""Tables looked up together, on one device: as each alone, in every form in which rows may be given."""

import copy
import io

import pytest
import torch
from torch import nn

from tutti.errors import ScriptError
from tutti.nn.embedding_tables import EmbeddingTables, bags_of

ROWS = torch.tensor([[[0, 1, 1], [2, 0, 3]], [[4, 4, 0], [1, 1, 1]]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_vectors_are_those_of_each_table(mode: str) -> None:
    tables = EmbeddingTables([5, 4], 3, mode=mode)  # type: ignore[arg-type]
    expected = torch.stack([table(ROWS[:, i]) for i, table in enumerate(tables.tables.values())], 1)
    torch.testing.assert_close(tables(ROWS), expected)
    torch.testing.assert_close(tables.start(ROWS)(), expected)
    flat = [(ROWS[:, i].flatten(), torch.tensor([0, 3])) for i in range(2)]
    torch.testing.assert_close(tables(flat), expected)
    torch.testing.assert_close(tables([ROWS[:, 0], flat[1]]), expected)
    torch.testing.assert_close(tables(ROWS[:, :, 0]), tables(ROWS[:, :, :1]))


def test_weights_have_the_shape_of_the_rows_and_a_gradient() -> None:
    tables = EmbeddingTables([5, 4], 3)
    weights = torch.rand(2, 2, 3, requires_grad=True)
    expected = [table(ROWS[:, i], per_sample_weights=weights[:, i]) for i, table in enumerate(tables.tables.values())]
    output = tables(ROWS, weights)
    torch.testing.assert_close(output, torch.stack(expected, 1))
    torch.testing.assert_close(tables(list(ROWS.unbind(1)), list(weights.unbind(1))), output)
    output.sum().backward()
    assert weights.grad is not None


def test_bags_may_be_empty_and_offsets_may_hold_the_end() -> None:
    rows, table = torch.tensor([1, 0, 2]), nn.EmbeddingBag(3, 2, mode="sum", include_last_offset=True)
    bags = bags_of(rows, torch.tensor([0, 2, 2, 3]), None, include_last=True)
    assert bags.count == 3
    assert bags.lengths is not None
    assert bags.lengths.tolist() == [2, 0, 1]
    assert bags.offsets.tolist() == [0, 2, 2]
    assert table(rows, torch.tensor([0, 2, 2, 3])).shape == (3, 2)


def test_initial_values_are_within_the_bound_of_dlrm_and_gradients_may_be_sparse() -> None:
    tables = EmbeddingTables([100, 4], 8, sparse=True)
    assert [name for name, _ in tables.named_parameters()] == ["tables.0.weight", "tables.1.weight"]
    assert float(tables.tables["0"].weight.detach().abs().max()) <= 0.1
    tables(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    assert all(p.grad is not None and p.grad.is_sparse for p in tables.parameters())


def test_a_model_with_tables_can_be_copied_saved_and_shaped_without_memory() -> None:
    tables = EmbeddingTables([5, 4], 3)
    torch.testing.assert_close(copy.deepcopy(tables)(ROWS), tables(ROWS))
    torch.save(tables, io.BytesIO())
    assert EmbeddingTables([5, 4], 3, device="meta")(ROWS.to("meta")).shape == (2, 2, 3)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ScriptError, match="no sizes"):
        EmbeddingTables([], 3)
    with pytest.raises(ScriptError, match="2 tables, but got rows for 3"):
        EmbeddingTables([5, 4], 3)(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="per_sample_weights"):
        bags_of(torch.zeros(2, 3, dtype=torch.int64), None, torch.zeros(2))
    with pytest.raises(ValueError, match="1D"):
        bags_of(torch.zeros(2, dtype=torch.int64), None, None)
