"""Named models of images and volumes: resnet, vit, unet (2-D or 3-D)."""

import math
from dataclasses import dataclass, replace

from tutti.config.model import ModelSpec, ModuleSpec, TensorShape
from tutti.errors import SpecError
from tutti.profile.architectures.building_blocks import (
    AttentionKind,
    Numbers,
    Optimizer,
    changed,
    cross_entropy,
    elementwise,
    linear,
    work,
)
from tutti.profile.architectures.language import Common, width_of_heads
from tutti.profile.architectures.transformer import TransformerBlock, block

_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMap:
    """Shape of a feature map.

    Attributes:
        size: cells along each spatial dim.
    """

    channels: int
    size: tuple[int, ...]

    @property
    def cells(self) -> int:
        return math.prod(self.size)

    @property
    def values(self) -> int:
        return self.channels * self.cells

    def halved(self, channels: int, stride: int) -> "FeatureMap":
        """Return the shape after a convolution that keeps the grid except for its stride."""
        return FeatureMap(channels=channels, size=tuple(-(-side // stride) for side in self.size))


def conv(
    name: str,
    numbers: Numbers,
    before: FeatureMap,
    after: FeatureMap,
    kernel: int,
    *,
    bias: bool = False,
    keeps: bool = True,
    first: bool = False,
    transposed: bool = False,
) -> ModuleSpec:
    """Return the costs of a convolution: 2 x weights x cells of the output (transposed: of the input) FLOPs in forward.

    Backward takes twice as much, and as much as forward if the input needs no gradient.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        before, after: shapes of input and output.
        kernel: cells of the kernel along each dim.
        bias: whether it has a bias.
        keeps: whether it saves its input; False if an earlier module already saves it.
        first: whether its input is the sample, which needs no gradient.
        transposed: whether it is a transposed convolution.
    """
    weights = before.channels * after.channels * kernel ** len(before.size)
    cells = before.cells if transposed else after.cells
    # Adding the bias is part of the kernel, and its gradient is a sum over cells.
    moved = (before.values + after.values) * numbers.width
    back = moved if first else moved + before.values * numbers.width
    # kernel // 2 rows of cells from each side cross a cut through the first dim.
    rows = before.values // before.size[0] * numbers.width
    return ModuleSpec(
        name=name,
        kind="ConvTranspose" if transposed else "Conv",
        **numbers.held(weights + (after.channels if bias else 0)),
        activation_nbytes=float(before.values * numbers.width if keeps else 0),
        output_nbytes=float(after.values * numbers.width),
        ops=(
            work("conv", 2.0 * weights * cells, float(moved), back=1.0 if first else 2.0, back_nbytes=float(back),
                 weight_nbytes=float(weights * numbers.width)),
        ),
        spatial=True,
        halo_nbytes_per_cut=0.0 if transposed else float(2 * (kernel // 2) * rows),
    )  # fmt: skip


def batch_norm(name: str, numbers: Numbers, space: FeatureMap, *, instance: bool = False) -> ModuleSpec:
    """Return the costs of BatchNorm in training, with running statistics.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        space: shape of the input.
        instance: InstanceNorm, over each sample and without running statistics.
    """
    nbytes = space.values * numbers.width
    return ModuleSpec(
        name=name,
        kind="InstanceNorm" if instance else "BatchNorm",
        **numbers.held(2 * space.channels),
        buffer_nbytes=0 if instance else 2 * 4 * space.channels + 8,
        activation_nbytes=float(nbytes),
        output_nbytes=float(nbytes),
        ops=(work("batch_norm", float(space.values), 2.0 * nbytes, back=1.0, back_nbytes=3.0 * nbytes),),
        batch_statistics=not instance,
        spatial=True,
    )


def relu(name: str, numbers: Numbers, space: FeatureMap, *, leaky: bool = False) -> ModuleSpec:
    """Return the costs of an activation that saves its result, which is the next module's input."""
    part = elementwise(name, "LeakyReLU" if leaky else "ReLU", numbers, space.values)
    return changed(part, spatial=True)


def _pixels(numbers: Numbers, space: FeatureMap) -> TensorShape:
    return TensorShape(name="pixels", shape=(space.channels, *space.size), dtype=numbers.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier(Common):
    """Fields of classifiers of square images.

    Attributes:
        image: pixels per side.
    """

    image: int = 224
    channels: int = 3
    classes: int = 1000

    @property
    def pixels(self) -> FeatureMap:
        return FeatureMap(channels=self.channels, size=(self.image, self.image))

    def ends(self, features: int) -> list[ModuleSpec]:
        """Return the layer that computes class scores from `features`, and the loss."""
        return [
            linear("classify", self.numbers, 1, features, self.classes),
            cross_entropy("loss", self.numbers, 1, self.classes),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet(Classifier):
    """ResNet v1.5 (He et al. 2015; stride in the 3 x 3).

    Attributes:
        depth: 18, 34, 50, 101 or 152.
        width: channels of the first group.
        blocks: blocks of each group; those of `depth` by default.
    """

    depth: int = 50
    width: int = 64
    blocks: tuple[int, ...] = ()
    optimizer: Optimizer = "SGD"

    def build(self) -> ModelSpec:
        if not self.blocks and self.depth not in _BLOCKS:
            raise SpecError(f"depth = {self.depth}; give one of {', '.join(map(str, _BLOCKS))}, or give blocks")
        numbers, pixels = self.numbers, self.pixels
        space = pixels.halved(self.width, 2)
        after = space.halved(self.width, 2)
        modules = [
            conv("stem.conv", numbers, pixels, space, 7, first=True),
            batch_norm("stem.norm", numbers, space),
            relu("stem.act", numbers, space),
            changed(
                elementwise("stem.pool", "MaxPool", numbers, after.values, reads=space.values / after.values,
                            keeps=8 / numbers.width),
                spatial=True,
            ),
        ]  # fmt: skip
        space, number = after, 0
        for group, count in enumerate(self.blocks or _BLOCKS[self.depth]):
            for index in range(count):
                stride = 2 if group and not index else 1
                made, space = self._block(number, space, self.width * 2**group, stride)
                modules += made
                number += 1
        modules += [
            elementwise("pool", "AvgPool", numbers, space.channels, reads=space.cells, keeps=0.0),
            *self.ends(space.channels),
        ]
        return self.spec(f"resnet{self.depth}", modules, (_pixels(numbers, pixels),))

    def _block(self, number: int, before: FeatureMap, width: int, stride: int) -> tuple[list[ModuleSpec], FeatureMap]:
        numbers, name, wide = self.numbers, f"blocks.{number}", self.depth >= 50
        inner = before.halved(width, stride)
        after = before.halved(4 * width if wide else width, stride)
        shortcut = stride != 1 or before.channels != after.channels
        steps: tuple[tuple[FeatureMap, FeatureMap, int], ...]
        if wide:
            narrow = before.halved(width, 1)
            steps = ((before, narrow, 1), (narrow, inner, 3), (inner, after, 1))
        else:
            steps = ((before, inner, 3), (inner, after, 3))
        modules = [
            ModuleSpec(name=name, kind="Residual", output_nbytes=float(after.values * numbers.width), spatial=True)
        ]
        for index, (source, target, kernel) in enumerate(steps, 1):
            modules.append(conv(f"{name}.conv{index}", numbers, source, target, kernel, keeps=False))
            modules.append(batch_norm(f"{name}.norm{index}", numbers, target))
            if index < len(steps):
                modules.append(relu(f"{name}.act{index}", numbers, target))
        if shortcut:
            modules.append(conv(f"{name}.shortcut.conv", numbers, before, after, 1, keeps=False))
            modules.append(batch_norm(f"{name}.shortcut.norm", numbers, after))
        total = elementwise(f"{name}.sum", "Sum", numbers, after.values, reads=2.0, keeps=0.0)
        back = 2 * before.values * numbers.width  # the gradients of both branches are added
        sums = replace(total.ops[0], nbytes_backward=float(back), flops_backward=0.0)
        modules.append(changed(total, ops=(sums,), spatial=True))
        modules.append(relu(f"{name}.act", numbers, after))
        return [changed(module, block=number) for module in modules], after


@dataclass(frozen=True, slots=True, kw_only=True)
class ViT(Classifier):
    """Vision transformer (Dosovitskiy et al. 2020): patches, a class token, learned positions, norm before, GELU."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 0
    patch: int = 16
    attention: AttentionKind = "fused"
    dropout: bool = False

    def build(self) -> ModelSpec:
        numbers, pixels = self.numbers, self.pixels
        grid = FeatureMap(channels=self.hidden, size=(self.image // self.patch, self.image // self.patch))
        tokens = grid.cells + 1
        shape = TransformerBlock(
            tokens=tokens, hidden=self.hidden, heads=self.heads, kv_heads=self.heads,
            head_dim=width_of_heads(self.hidden, self.heads), ffn=self.ffn or 4 * self.hidden, kind=self.attention,
            dropout=self.dropout,
        )  # fmt: skip
        table = (tokens + 1) * self.hidden  # positions and the class token
        modules = [
            changed(conv("patches", numbers, pixels, grid, self.patch, bias=True, first=True), halo_nbytes_per_cut=0.0),
            changed(elementwise("positions", "Positions", numbers, tokens * self.hidden, keeps=0.0),
                    **numbers.held(table)),
        ]  # fmt: skip
        for index in range(self.layers):
            modules += block(f"blocks.{index}", index, shape, numbers)
        modules += [
            shape.norm("norm", numbers),
            *self.ends(self.hidden),
        ]
        return self.spec("vit", modules, (_pixels(numbers, pixels),))


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(Common):
    """U-Net (Ronneberger et al. 2015; 3-D: Çiçek et al. 2016): two convolutions a level, down and up with skips.

    Attributes:
        dims: 2 or 3.
        widths: channels of each level.
        image: side of the input, or its sides.
        strided: down by a convolution of stride 2 instead of pooling (nnU-Net).
        instance: InstanceNorm instead of BatchNorm.
    """

    dims: int = 3
    widths: tuple[int, ...] = (32, 64, 128, 256, 320)
    image: tuple[int, ...] = (128,)
    channels: int = 1
    classes: int = 3
    strided: bool = False
    instance: bool = True
    optimizer: Optimizer = "Adam"

    def build(self) -> ModelSpec:
        size = self.image * self.dims if len(self.image) == 1 else self.image
        if len(size) != self.dims or any(side % 2 ** (len(self.widths) - 1) for side in size):
            raise SpecError(
                f"image = {list(self.image)} cannot be halved {len(self.widths) - 1} times in {self.dims} dims; "
                "give sides that can, or fewer widths"
            )
        numbers = self.numbers
        pixels = space = FeatureMap(channels=self.channels, size=size)
        modules: list[ModuleSpec] = []
        skips: list[FeatureMap] = []
        for level, width in enumerate(self.widths):
            if level and not self.strided:
                pooled = space.halved(space.channels, 2)
                pool = elementwise(f"down.{level}.pool", "MaxPool", numbers, pooled.values, reads=2.0**self.dims,
                                   keeps=8 / numbers.width)  # fmt: skip
                modules.append(changed(pool, spatial=True))
                space = pooled
            stride = 2 if level and self.strided else 1
            made, space = self._pair(f"down.{level}", space, width, stride, first=not level)
            modules += made
            skips.append(space)
        for level in reversed(range(len(self.widths) - 1)):
            skip = skips[level]
            name = f"up.{level}"
            raised = FeatureMap(channels=self.widths[level], size=skip.size)
            modules.append(conv(f"{name}.raise", numbers, space, raised, 2, bias=True, keeps=False, transposed=True))
            joined = FeatureMap(channels=raised.channels + skip.channels, size=skip.size)
            both = elementwise(f"{name}.join", "Concatenate", numbers, joined.values)
            modules.append(changed(both, spatial=True))
            made, space = self._pair(name, joined, self.widths[level], 1, first=False)
            modules += made
        out = FeatureMap(channels=self.classes, size=space.size)
        modules += [
            conv("classify", numbers, space, out, 1, bias=True, keeps=False),
            changed(cross_entropy("loss", numbers, out.cells, self.classes), spatial=True),
        ]
        return self.spec(f"unet{self.dims}d", modules, (_pixels(numbers, pixels),))

    def _pair(
        self, name: str, before: FeatureMap, width: int, stride: int, *, first: bool
    ) -> tuple[list[ModuleSpec], FeatureMap]:
        """Return convolution, norm and activation, twice; the module that made the input saves it."""
        modules: list[ModuleSpec] = []
        for index in (1, 2):
            after = before.halved(width, stride if index == 1 else 1)
            opening = first and index == 1
            modules += [
                conv(f"{name}.conv{index}", self.numbers, before, after, 3, keeps=opening, first=opening),
                batch_norm(f"{name}.norm{index}", self.numbers, after, instance=self.instance),
                relu(f"{name}.act{index}", self.numbers, after, leaky=True),
            ]
            before = after
        return modules, before
