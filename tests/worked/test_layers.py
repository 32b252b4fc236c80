"""Worked examples of layers: convolution, pooling, flattening, softmax, activations, attention, shapes, counts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutti.profile.model_profile import describe_model
from worked.examples import EXAMPLES

CNN = EXAMPLES["cnn_7x7x3_tail"]


def channels_first(values: list[object]) -> Tensor:
    """(height, width, channel) as printed -> (1, channel, height, width) as torch has it."""
    return torch.tensor(values, dtype=torch.float64).permute(2, 0, 1)[None]


def test_cnn_relu_and_pool() -> None:
    relu = F.relu(channels_first(CNN["qa_NHWC"]))
    assert torch.equal(relu, channels_first(CNN["qb_relu_NHWC"]))
    assert torch.equal(F.max_pool2d(relu, kernel_size=2, stride=1), channels_first(CNN["qc_pool_NHWC"]))


def test_cnn_flatten_is_channel_first() -> None:
    """Erratum: the caption says row major; the printed order is torch's, channel after channel."""
    pooled = channels_first(CNN["qc_pool_NHWC"])
    assert nn.Flatten()(pooled)[0].tolist() == CNN["qd_flat"]
    assert pooled.permute(0, 2, 3, 1).flatten().tolist() == [9, 7, 9, 1, 9, 6, 9, 0] != CNN["qd_flat"]


def test_cnn_softmax() -> None:
    found = torch.softmax(torch.tensor(CNN["qd_flat"], dtype=torch.float64), dim=0)
    torch.testing.assert_close(found, torch.tensor(CNN["softmax_float64"], dtype=torch.float64), rtol=1e-14, atol=0)
    published = torch.tensor(CNN["softmax_slide"], dtype=torch.float64)
    torch.testing.assert_close(found, published, rtol=CNN["softmax_rtol"], atol=0)


def test_cnn_shapes_and_the_captioned_networks_parameters() -> None:
    """Erratum: 146 parameters are those of convolution + dense 8 -> 8 -> 2, not of the softmax that is shown."""
    stride, pad = CNN["derived"]["conv_stride"], CNN["derived"]["conv_pad"]
    network = nn.Sequential(
        nn.Conv2d(3, 2, 3, stride=stride, padding=pad),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.Linear(8, 2),
    )
    shapes = {}
    value = torch.zeros(1, 3, 7, 7)
    for name, layer in zip(("qa", "qb", "qc", "qd", "dense", "neurons"), network, strict=True):
        value = shapes[name] = layer(value)
    for name in ("qa", "qc"):
        assert list(shapes[name].permute(0, 2, 3, 1).shape) == CNN["shapes"][name]
    assert list(shapes["qd"].shape) == CNN["shapes"]["qd"]
    assert parameters(network) == 146


def test_single_convolution_is_a_cross_correlation() -> None:
    entry = EXAMPLES["conv_single_3x3"]
    patch, kernel = (torch.tensor(entry[name])[None, None] for name in ("patch", "kernel"))
    assert F.conv2d(patch, kernel).item() == entry["expected"]
    assert F.conv2d(patch, kernel.flip(2, 3)).item() == -entry["expected"]  # this kernel is odd under the flip


def test_a_padded_laplacian_keeps_the_size() -> None:
    laplacian = torch.tensor([[1.0, 1, 1], [1, -8, 1], [1, 1, 1]])[None, None]
    image = torch.ones(1, 1, 5, 6)
    found = F.conv2d(image, laplacian, padding=1)
    assert found.shape == image.shape
    assert not found[..., 1:-1, 1:-1].any()  # nothing inside a flat image


def test_nchw_layout() -> None:
    entry = EXAMPLES["nchw_layout"]
    n, c, h, w = (entry[name] for name in "NCHW")
    tensor = torch.arange(n * c * h * w).view(n, c, h, w)
    assert tensor.stride() == (c * h * w, h * w, w, 1)
    for channel, first in entry["first_of_channel"].items():
        assert tensor[0, int(channel), 0, 0] == first
    assert tensor[-1, -1, -1, -1] == entry["last"]
    assert all(tensor[0, c_, h_, w_] == c_ * 20 + h_ * 4 + w_ for c_, h_, w_ in [(3, 1, 2), (40, 4, 3), (63, 0, 1)])


def mnist_network() -> nn.Sequential:
    """The layers of worked example mnist_shapes; "same" padding as its framework has it, in torch's terms."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.ZeroPad2d(2),  # 28 -> 14 with a kernel of 6 and stride 2
        nn.Conv2d(12, 24, 6, stride=2),
        nn.ReLU(),
        nn.ZeroPad2d(2),
        nn.Conv2d(24, 32, 6, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    )


def parameters(model: nn.Module, *, biases: bool = True) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if biases or not name.endswith("bias"))


def described(model: nn.Module, shape: tuple[int, ...]) -> int:
    """The number of parameters that `tutti describe` counts."""
    samples = 4
    inputs, target = torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.int64)
    return describe_model(model, (inputs,), {}, target, F.cross_entropy, samples=samples).parameters


def test_mnist_shapes_and_counts() -> None:
    entry = EXAMPLES["mnist_shapes"]
    network = mnist_network()
    weights = [layer.weight.numel() for layer in network if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert weights == [layer[-1] for layer in entry["layers"] if layer[0] != "flatten"]
    assert parameters(network, biases=False) == entry["weights"]
    assert parameters(network) == described(network, (1, 28, 28)) == entry["weights_plus_biases"]
    sizes, value = [], torch.zeros(2, 1, 28, 28)
    for layer in network:
        value = layer(value)
        sizes += [value.shape[-1]] if isinstance(layer, nn.Conv2d) else []
        if isinstance(layer, nn.Flatten):
            assert value.shape == (2, entry["layers"][3][1])
    assert [28, *sizes] == entry["spatial"]


def test_mlp_counts() -> None:
    """Erratum: "325 weights (+biases)" counts the biases already: 300 + 25."""
    entry = EXAMPLES["mlp_10_20_5"]
    a, b, c = entry["layers"]
    network = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))
    assert parameters(network, biases=False) == entry["weights"]
    assert parameters(network) == entry["total"] == entry["weights"] + entry["biases"]
    assert described(network, (a,)) == entry["total"]


def test_activations() -> None:
    """Erratum: ELU is alpha (e^z - 1) for z < 0, without a further factor z."""
    cases = EXAMPLES["activations"]["cases"]
    z = torch.tensor(-1.0, dtype=torch.float64)
    assert F.elu(z, alpha=1.0).item() == pytest.approx(cases["elu_minus1_alpha1"], rel=1e-15)
    assert (math.expm1(-1) * -1) != pytest.approx(cases["elu_minus1_alpha1"])
    zero = torch.zeros((), dtype=torch.float64)
    assert F.softplus(zero).item() == pytest.approx(cases["softplus0"], rel=1e-15)
    for value in (-2.0, -0.1, 0.0, 3.0):
        x = torch.tensor(value, dtype=torch.float64)
        assert F.leaky_relu(x, 0.1).item() == max(0.1 * value, value)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_of_scaled_products(causal: bool) -> None:
    """softmax(Q K^T / sqrt(d_k)) V, with values of another width than queries (erratum: W_V is D_x x D_V)."""
    torch.manual_seed(0)
    batch, seq, d_x, d_k, d_v = 2, 5, 7, 6, 3
    x = torch.randn(batch, seq, d_x, dtype=torch.float64)
    w_q, w_k, w_v = (torch.randn(d_x, d, dtype=torch.float64) for d in (d_k, d_k, d_v))
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)
    if causal:
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    expected = torch.softmax(scores, dim=-1) @ v
    assert expected.shape == (batch, seq, d_v)
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
