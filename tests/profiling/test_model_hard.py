"""Models whose forward wants values: what is still counted, and what is said about the rest."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.config.model import ModelSpec
from tutti.nn import attention
from tutti.nn.sparse_attention import sliding_window
from tutti.profile import describe_model


def describe(model: nn.Module, *args: Tensor, target: Any = None, loss: Any = None, **kwargs: Any) -> ModelSpec:
    samples = len((*args, *kwargs.values())[0])
    return describe_model(model, args, kwargs, target, loss or (lambda output, _: output.sum()), samples=samples)


def forward_of(function: Any, *, linear: int = 16) -> nn.Module:
    """A model of one Linear, `inner.linear`, around which `function(linear, x)` is computed."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(linear, linear)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.linear, x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    return Outer()


def branch(linear: nn.Module, x: Tensor) -> Tensor:
    x = linear(x)
    return x + 1 if x.sum() > 0 else x


def through_numpy(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(torch.from_numpy(x.detach().numpy()))


@pytest.mark.parametrize("function", [branch, through_numpy])
def test_what_cannot_be_traced_is_named_and_parameters_remain(function: Any) -> None:
    spec = describe(forward_of(function), torch.randn(4, 16))
    assert spec.parameters == 272
    assert spec.flops_forward == 0
    (note,) = spec.notes
    assert note.startswith("module inner (Inner) could not be traced on shapes alone: ")
    assert note.endswith("; only parameters are counted")


def test_branches_on_known_values_are_followed() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        if not mask.all() and mask.sum() == x.shape[1] * (x.shape[1] + 1) / 2:
            x = linear(x)
        if torch.arange(5, device=x.device).max().item() == 4:
            x = linear(x)
        return linear(x) if torch.zeros(3, device=x.device).any() else x

    assert describe(forward_of(forward), torch.randn(4, 16)).flops_forward // 1024 == 1


def test_a_mask_of_the_batch_keeps_its_values_when_it_follows_the_parameters() -> None:
    """As masks of transformers do: `attention_mask.to(hidden.device)`, then a branch on whether all are seen."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.linear = nn.Embedding(30, 16), nn.Linear(16, 16)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.tokens(ids)
            seen = mask.to(device=x.device, dtype=torch.bool)
            return x if seen.all() else self.linear(x) * seen[..., None]

    ids = torch.randint(0, 30, (4, 8))
    assert describe(Masked(), ids, torch.ones(4, 8)).flops_forward < 8 * 2 * 16 * 16
    padded = describe(Masked(), ids, (torch.arange(8) < 5).long().repeat(4, 1))
    assert padded.untraced == ""
    assert padded.flops_forward >= 8 * 2 * 16 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_groups_count_every_row_once(dtype: torch.dtype) -> None:
    """torch's shape rule takes only bfloat16, and only rows of a multiple of 16 bytes."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 6, 10, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            ends = torch.full((3,), len(rows) // 3, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
            return torch._grouped_mm(rows, self.weight, offs=ends)

    spec = describe(Experts(), torch.randn(4, 9, 6, dtype=dtype))
    (product,) = (op for module in spec.modules for op in module.ops if op.kind == "gemm")
    assert spec.untraced == ""
    assert (product.flops_forward, product.flops_backward) == (2 * 9 * 6 * 10, 2 * 9 * 6 * 10)


def test_a_ctc_loss_is_counted_without_the_values_of_its_lengths() -> None:
    model = nn.Linear(4, 5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        log_probs = output.log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(target),), len(log_probs))
        return F.ctc_loss(log_probs, target[target > 0], frames, (target > 0).sum(-1))

    spec = describe(model, torch.randn(2, 12, 4), target=torch.tensor([[1, 2, 3], [4, 1, 0]]), loss=loss)
    assert spec.untraced == ""
    (product,) = (op for module in spec.modules for op in module.ops if op.kind == "gemm")
    assert product.flops_forward == 12 * 2 * 4 * 5


def test_masks_of_the_batch_select_what_they_select() -> None:
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
    ids = torch.randint(0, 30, (4, 8))
    labels = ids.clone()
    labels[:, ::2] = -100

    def loss(output: Tensor, target: Tensor) -> Tensor:
        chosen = target != -100
        return F.cross_entropy(output[chosen], target[chosen])

    spec = describe(model, ids, target=labels, loss=loss)
    assert spec.notes == ()
    softmax = next(op for op in spec.modules[0].ops if op.kind == "exponential")
    assert 4 * 30 <= softmax.flops_forward <= 4 * 30 + 20  # 4 of 8 tokens


def test_routing_by_computed_values_is_bounded_with_a_note() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 2)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).argmax(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == index)
                out = out.index_add(0, rows, expert(x[rows]))
            return out

    spec = describe(Experts(), torch.randn(4, 16))
    assert any("upper bound" in note for note in spec.notes)
    assert spec.flops_forward >= 2 * 2 * 16 * 16


def test_results_written_into_a_new_tensor() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 32)
        for start in (0, 16):
            out[:, start : start + 16] = linear(x)
        return out

    spec = describe(forward_of(forward), torch.randn(4, 16))
    gemm = [op for module in spec.modules for op in module.ops if op.kind == "gemm"]
    assert [(op.flops_forward, op.flops_backward) for op in gemm] == [(1024, 1024)]


def test_an_operator_without_a_shape_rule_is_run_on_zeros() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        solution = torch.linalg.lstsq(output.detach(), target).solution
        return (output * solution.mT.mean(1, keepdim=True)).square().mean()

    spec = describe(nn.Linear(8, 5), torch.randn(4, 20, 8), target=torch.randn(4, 20, 3), loss=loss)
    assert any("lstsq" in note for note in spec.notes)
    assert sum(op.flops_backward for op in spec.modules[0].ops if op.kind == "gemm") == 2 * 20 * 8 * 5


def test_own_autograd_functions_are_attributed() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradients[0] @ weight.t(), x.t() @ gradients[0]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.weight)

    spec = describe(nn.Sequential(nn.Linear(16, 16), Own()), torch.randn(4, 16))
    assert [(op.kind, op.flops_forward, op.flops_backward) for op in spec.modules[2].ops] == [("gemm", 512, 1024)]
    assert spec.modules[2].activation_nbytes == 64


def test_a_backward_that_fails_is_assumed_twice_the_forward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise RuntimeError("needs real values.")

    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        return Broken.apply(linear(x))

    spec = describe(forward_of(forward), torch.randn(4, 16))
    assert spec.notes == ("the backward pass could not be traced (needs real values): assumed twice the forward",)
    assert spec.flops_backward == 2 * spec.flops_forward > 0


def test_recommender_of_dict_batches() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(3))
            self.head = nn.Linear(16 * 4, 1)

        def forward(self, *, dense: Tensor, sparse: Tensor) -> Tensor:
            bags = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
            return self.head(torch.cat([dense, *bags], 1)).squeeze(1)

    spec = describe(
        Model(),
        dense=torch.randn(4, 16),
        sparse=torch.randint(0, 1000, (4, 3, 2)),
        target=torch.rand(4),
        loss=F.binary_cross_entropy_with_logits,
    )
    assert spec.notes == ()
    assert [(each.name, each.shape, each.dtype) for each in spec.inputs] == [
        ("dense", (16,), "float32"),
        ("sparse", (3, 2), "int64"),
    ]
    assert sum(any(op.kind == "embedding" for op in module.ops) for module in spec.modules) == 3


def test_one_sample_is_divided_and_said_so() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    one, four = describe(model, x[:1]), describe(model, x)
    (product, *_), (same, *_) = one.modules[0].ops, four.modules[0].ops
    assert (product.flops_forward, product.flops_backward) == (same.flops_forward, same.flops_backward)
    assert (product.nbytes_forward, product.weight_nbytes) == (same.nbytes_forward, same.weight_nbytes)
    assert any("divided" in note for note in one.notes)
    assert four.notes == ()


def test_parameters_without_shape_are_named() -> None:
    spec = describe(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)), torch.randn(4, 4))
    assert spec.parameters == 20
    assert spec.notes[0].startswith("1.weight, 1.bias: no shape")


def test_low_precision_halves_the_bytes() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(4, 16)
    full, half = describe(model, x), describe(model.bfloat16(), x.bfloat16())
    assert (full.dtype, half.dtype) == ("float32", "bfloat16")
    assert [module.activation_nbytes for module in full.modules] == [
        2 * module.activation_nbytes for module in half.modules
    ]
    assert full.flops_forward == half.flops_forward


def test_autocast_of_the_input_s_device_is_that_of_a_cpu() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(device_type=kind, enabled=False):
            return linear(x.float())

    plain = describe(forward_of(lambda linear, x: linear(x)), torch.zeros(4, 16))
    spec = describe(forward_of(forward), torch.zeros(4, 16))
    assert not spec.untraced
    assert spec.flops_forward == plain.flops_forward > 0
    with pytest.raises(RuntimeError):  # as before: torch knows none
        torch.autocast("meta", enabled=False)


DOCUMENTS = torch.arange(32).div(10, rounding_mode="floor").expand(4, -1)
PATTERN = sliding_window(32, block_size=8)


@pytest.mark.parametrize(
    "settings", [{"window": 8}, {"causal": True, "window": 8}, {"documents": DOCUMENTS}, {"pattern": PATTERN}]
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_attention_with_windows_documents_and_patterns_is_traced(
    settings: dict[str, Any], autocast: torch.dtype | None
) -> None:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:  # x (batch, seq 32, width 16)
        values = linear(x).unflatten(2, (2, 8)).transpose(1, 2)
        chosen = {name: value[: len(x)] if name == "documents" else value for name, value in settings.items()}
        return attention(values, values, values, **chosen)

    model, x = forward_of(forward), torch.zeros(4, 32, 16)
    spec = describe_model(model, (x,), {}, None, lambda out, _: out.sum(), samples=4, autocast=autocast)
    assert not spec.untraced
    assert not [note for note in spec.notes if "autocast" in note]
    products = 2 * 2 * 32 * 32 * 16  # scores and their weighted values, of all pairs
    linear = 2 * 32 * 16 * 16
    assert 0 < spec.flops_forward - linear <= 1.5 * products
