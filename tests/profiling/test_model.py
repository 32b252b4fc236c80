"""Costs against closed formulas, and against PyTorch's own counter and hooks on real tensors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.serialization import dumps, loads
from tutti.profile import describe_model

COUNTED = ("gemm", "conv", "attention", "rnn")


def describe(
    model: nn.Module, *args: Tensor, target: Any = None, loss: Any = None, optimizer: Any = None, **kwargs: Any
) -> ModelSpec:
    samples = len((*args, *kwargs.values())[0])
    return describe_model(
        model, args, kwargs, target, loss or (lambda output, _: output.sum()), optimizer, samples=samples
    )


def by_name(spec: ModelSpec) -> dict[str, ModuleSpec]:
    return {module.name: module for module in spec.modules}


def flops(spec: ModelSpec | ModuleSpec, *kinds: str) -> tuple[float, float]:
    """Forward and backward FLOPs of the operators of some kinds (default: those that torch counts)."""
    modules = spec.modules if isinstance(spec, ModelSpec) else (spec,)
    ops = [op for module in modules for op in module.ops if op.kind in (kinds or COUNTED)]
    return sum(op.flops_forward for op in ops), sum(op.flops_backward for op in ops)


def kept_by_autograd(model: nn.Module, *args: Tensor) -> int:
    """Bytes that autograd keeps for backward in a real forward; parameters and buffers excluded."""
    constants = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in constants:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(storage.nbytes() for storage in storages.values())


MLP = (lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3)), (4, 10))
CNN = (
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, (3, 5), stride=2),
        nn.SiLU(),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
        nn.Flatten(),
        nn.LayerNorm(576),
        nn.Linear(576, 10),
    ),
    (4, 3, 28, 32),
)


@pytest.mark.parametrize(("build", "shape"), [MLP, CNN])
def test_flops_and_activations_agree_with_torch_on_real_tensors(build: Any, shape: tuple[int, ...]) -> None:
    model, x = build(), torch.randn(shape)
    spec = describe(model, x)
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert flops(spec) == (forward / 4, (counter.get_total_flops() - forward) / 4)
    kept = sum(module.activation_nbytes for module in spec.modules)
    # what does not grow with the samples (BatchNorm's two means) is not of a sample
    assert kept == pytest.approx((kept_by_autograd(model, x) - kept_by_autograd(model, x[:2].clone())) / 2)


def test_each_module_of_an_mlp_by_hand() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    spec = describe(model, torch.randn(4, 10), optimizer=torch.optim.Adam(model.parameters()))
    root, first, relu, last = spec.modules
    assert [module.name for module in spec.modules] == ["", "0", "1", "2"]
    assert (first.parameters, first.parameter_nbytes, first.gradient_nbytes, first.optimizer_nbytes) == (
        220,
        880,
        880,
        1760,
    )
    assert flops(first, "gemm") == (2 * 10 * 20, 2 * 10 * 20)  # no gradient of the input is needed
    assert flops(last, "gemm") == (2 * 20 * 3, 2 * 2 * 20 * 3)
    # kept: the input, for the first weight's gradient; relu's result, for its own and the last weight's
    assert (first.activation_nbytes, relu.activation_nbytes, last.activation_nbytes) == (40, 80, 0)
    assert (first.output_nbytes, last.output_nbytes, root.output_nbytes) == (80, 12, 12)
    gemm = next(op for op in first.ops if op.kind == "gemm")
    assert (gemm.nbytes_forward, gemm.weight_nbytes, gemm.calls) == (4 * (10 + 20), 880, 1)
    assert spec.parameters == 283
    assert spec.evidence == "predicted"
    assert spec.notes == ()
    assert [(each.name, each.shape, each.dtype) for each in spec.inputs] == [("input", (10,), "float32")]
    assert loads(ModelSpec, dumps(spec)) == spec


def test_grouped_convolution_by_formula() -> None:
    """2 x batch x output pixels x weight elements, which already count one group's inputs only."""
    conv = nn.Conv2d(8, 12, 3, groups=4, bias=False)
    spec = describe(nn.Sequential(nn.ReLU(), conv), torch.randn(2, 8, 10, 10))
    assert flops(spec)[0] == 2 * 8 * 8 * 12 * (8 // 4) * 9
    up = nn.Sequential(nn.Linear(6, 6), nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2, bias=False))
    assert flops(by_name(describe(up, torch.randn(2, 4, 6)))["1"]) == (2 * 6 * 4 * 3 * 3, 2 * 2 * 6 * 4 * 3 * 3)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers(kind: Any, gates: int, batch_first: bool) -> None:
    """Each token of each layer: 2 x gates x (inputs + hidden) x hidden; backward twice, less the input's gradient."""
    seq, inputs, hidden = 7, 5, 6
    layer = kind(inputs, hidden, num_layers=2, bidirectional=True, batch_first=batch_first)
    x = torch.randn((4, seq, inputs) if batch_first else (seq, 4, inputs))
    spec = describe_model(layer, (x,), {}, None, lambda output, _: output[0].sum(), samples=4)
    first = 2 * gates * (inputs + hidden) * hidden * seq * 2
    second = 2 * gates * (2 * hidden + hidden) * hidden * seq * 2
    not_needed = 2 * gates * inputs * hidden * seq * 2
    assert flops(spec, "rnn") == (first + second, 2 * (first + second) - not_needed)
    assert by_name(spec)[""].output_nbytes == 4 * (seq * 2 * hidden + (2 if gates == 4 else 1) * 4 * hidden)


def test_packed_sequences_count_their_tokens() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(10, 8), nn.LSTM(8, 6, batch_first=True)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
            )
            return self.rnn(packed)[1][0]

    ids, lengths = torch.randint(0, 10, (4, 7)), torch.tensor([3, 7, 3, 7])
    spec = describe(Reader(), ids=ids, lengths=lengths)
    assert flops(spec, "rnn")[0] == 5 * 2 * 4 * (8 + 6) * 6  # 5 tokens a sample
    assert [each.name for each in spec.inputs] == ["ids", "lengths"]


class Attention(nn.Module):
    def __init__(self, key_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.key_heads, self.options = key_heads, options
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 2 * 4 * key_heads)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.key_heads, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_heads": 2, "enable_gqa": True}])
def test_attention_by_formula(options: dict[str, Any]) -> None:
    """4 s^2 d forward (Q K^T and P V over all heads), causal or not; the fused backward has five products for two."""
    spec = describe(Attention(**options), torch.randn(4, 9, 16))
    assert flops(spec, "attention") == (4 * 9 * 9 * 16, 10 * 9 * 9 * 16)
    assert any("causal" in note for note in spec.notes) == ("is_causal" in options)


def test_attention_keeps_no_scores_unless_dropout_does() -> None:
    x = torch.randn(4, 32, 16)
    fused, unfused = Attention(), Attention(dropout_p=0.5)
    kept = sum(module.activation_nbytes for module in describe(fused, x).modules)
    assert kept == kept_by_autograd(fused, x) / 4
    spec = describe(unfused, x)
    assert sum(module.activation_nbytes for module in spec.modules) == kept_by_autograd(unfused, x) / 4
    assert flops(spec, "attention") == (4 * 32 * 32 * 16, 8 * 32 * 32 * 16)
    scores = 4 * 32 * 32
    assert flops(spec, "random") == (scores, 0)  # a number for each score: hundreds of FLOPs' time
    assert flops(spec, "exponential") == (scores, scores)
    assert any("dropout" in note for note in spec.notes)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_module(need_weights: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    spec = describe(Block(), torch.randn(4, 9, 16))
    products = 2 * 9 * 16 * 4 * 16 + 4 * 9 * 9 * 16
    assert flops(spec)[0] == products
    assert spec.parameters == sum(p.numel() for p in Block().parameters())
    assert not any("never" in note for note in spec.notes)  # out_proj is used, though not called


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer_has_no_hidden_path(training: bool) -> None:
    layer = (
        nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training).requires_grad_(training)
    )
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 16))
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    for spec in (describe(model, torch.randn(4, 9, 16)), describe(model[0], torch.randn(4, 9, 16), mask=mask)):
        layers = sum(flops(each)[0] for each in spec.modules if "layers" in each.name)
        assert layers == 2 * (2 * 9 * 16 * (4 * 16 + 2 * 32) + 4 * 9 * 9 * 16)


def test_embedding_moves_rows_not_the_table() -> None:
    spec = describe(nn.Embedding(1000, 16), torch.randint(0, 1000, (4, 5)))
    (op,) = [op for op in spec.modules[0].ops if op.kind == "embedding"]
    assert (op.flops_forward, op.flops_backward, op.weight_nbytes) == (0, 0, 0)
    assert op.nbytes_forward == 5 * (2 * 16 * 4 + 8)  # rows read and written, and the indices
    assert spec.modules[0].activation_nbytes == 5 * 8


def test_tied_weights_are_counted_once_and_in_the_first_user() -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    model[1].weight = model[0].weight
    spec = describe(model, torch.randint(0, 50, (4, 5)), optimizer=torch.optim.Adam(model.parameters()))
    table, head = by_name(spec)["0"], by_name(spec)["1"]
    assert (table.parameters, head.parameters) == (800, 50)
    assert (table.tied_to, head.tied_to) == (None, "0")
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    assert sum(module.optimizer_nbytes for module in spec.modules) == 8 * spec.parameters
    assert flops(head, "gemm") == (2 * 5 * 16 * 50, 4 * 5 * 16 * 50)


def test_a_module_called_twice_accumulates() -> None:
    layer = nn.Linear(16, 16)
    spec = describe(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(4, 16))
    assert [module.name for module in spec.modules] == ["", "0", "1"]
    assert flops(by_name(spec)["0"], "gemm") == (2 * 512, 3 * 512)


def test_batch_statistics_are_flagged() -> None:
    class Functional(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, training=True)

    class Standardised(nn.Conv2d):  # timm's ScaledStdConv2d normalises its weight
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.weight.reshape(1, self.out_channels, -1)
            weight = F.batch_norm(rows, None, None, training=True, momentum=0.0).reshape_as(self.weight)
            return F.conv2d(x, weight, self.bias)

    x = torch.randn(4, 3, 8, 8)
    flags = {
        "": False,
        "0": True,
        "1": False,
        "2": False,
        "3": True,
        "4": False,
    }
    frozen = nn.BatchNorm2d(3).eval()
    model = nn.Sequential(nn.BatchNorm2d(3), frozen, nn.InstanceNorm2d(3), Functional(), Standardised(3, 3, 1))
    spec = describe(model, x)
    assert {module.name: module.batch_statistics for module in spec.modules} == flags
    assert spec.batch_statistics


def test_backward_is_attributed_to_the_module_that_made_the_node() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.left.weight.sum()  # outside any child
            return self.right(x) @ self.left(x).T

    modules = by_name(describe(Branches(), torch.randn(4, 16)))
    assert flops(modules["left"], "gemm") == flops(modules["right"], "gemm") == (256, 512)


def test_recompute_is_counted_in_the_backward() -> None:
    class Blocks(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)
            )
            self.recompute = recompute

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            return x

    plain, again = (describe(Blocks(recompute), torch.randn(4, 16)) for recompute in (False, True))
    assert flops(again)[0] == flops(plain)[0]
    # the first product of each block runs once more; the last one's result is not needed again
    assert flops(again)[1] == flops(plain)[1] + 3 * 2 * 16 * 64
    kept = [sum(module.activation_nbytes for module in spec.modules) for spec in (plain, again)]
    assert kept == [3 * (64 + 256), 3 * 64]


def test_a_big_transformer_costs_six_flops_a_parameter_and_token() -> None:
    width, layers, seq, vocabulary = 1024, 4, 64, 512

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, vocabulary)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.layers(self.embedding(ids)))

    with torch.device("meta"):
        model = Model()
    ids = torch.zeros(4, seq, dtype=torch.long)
    spec = describe(model, ids, target=ids, loss=lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()))
    assert spec.flops_forward + spec.flops_backward == pytest.approx(6 * spec.parameters * seq, rel=0.03)


def test_never_used_modules_come_last_and_are_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.late, self.early = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.late[0](self.early(x))

    spec = describe(Model(), torch.randn(4, 4))
    assert [module.name for module in spec.modules] == ["", "early", "late", "late.0", "unused"]
    assert spec.notes == ("never used in the forward pass: unused",)


def test_frozen_parameters_have_no_gradient_and_cost_no_backward() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    trained = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    first, last = (by_name(describe(model, torch.randn(4, 16), optimizer=trained))[name] for name in ("0", "2"))
    assert (first.trainable_parameters, first.gradient_nbytes, first.optimizer_nbytes) == (0, 0, 0)
    assert flops(first, "gemm") == (512, 0)
    assert last.optimizer_nbytes == last.gradient_nbytes == 4 * 272


def test_the_model_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    describe(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in model.parameters())


def test_the_memory_format_of_convolutions_is_seen() -> None:
    def spec(layout: torch.memory_format) -> ModelSpec:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        return describe(model.to(memory_format=layout), torch.zeros(4, 3, 6, 6))

    assert not spec(torch.contiguous_format).channels_last
    assert spec(torch.channels_last).channels_last
    assert not describe(MLP[0](), torch.zeros(MLP[1])).channels_last
