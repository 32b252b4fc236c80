"""Named models with embedding tables: dlrm and similar models."""

from dataclasses import dataclass

from tutti.config.model import ModelSpec, ModuleSpec, TensorShape
from tutti.errors import SpecError
from tutti.profile.architectures.building_blocks import Optimizer, elementwise, embedding, linear, work
from tutti.profile.architectures.language import Common


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRM(Common):
    """Deep learning recommendation model (Naumov et al. 2019): tables, a bottom MLP, pairwise products, a top MLP.

    Attributes:
        tables: number of tables, of `rows` rows each.
        sizes: rows of each table, if they differ.
        width: width of an embedding.
        dense: dense numbers of a sample.
        bottom, top: widths of the MLPs' layers; the last one of `top` is the output.
    """

    tables: int = 26
    rows: int = 100_000
    sizes: tuple[int, ...] = ()
    width: int = 128
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    optimizer: Optimizer = "SGD"

    def build(self) -> ModelSpec:
        if not self.bottom or self.bottom[-1] != self.width:
            raise SpecError(
                f"the bottom MLP ends with {self.bottom[-1] if self.bottom else 'nothing'}, but embeddings have width "
                f"{self.width}; make them equal"
            )
        numbers = self.numbers
        sizes = self.sizes or (self.rows,) * self.tables
        modules: list[ModuleSpec] = []
        modules += self._mlp("bottom", self.dense, self.bottom, last=True)
        modules += [
            embedding(f"tables.{index}", numbers, 1, rows, self.width, table=True) for index, rows in enumerate(sizes)
        ]
        vectors = len(sizes) + 1
        pairs = vectors * (vectors - 1) // 2
        wide = vectors * self.width
        modules.append(
            ModuleSpec(
                name="interaction",
                kind="Interaction",
                activation_nbytes=float(wide * numbers.width),
                output_nbytes=float((pairs + self.width) * numbers.width),
                ops=(
                    work("gemm", 2.0 * vectors * vectors * self.width, float((wide + vectors**2) * numbers.width)),
                    work("other", 0.0, float(2 * (wide + pairs + self.width) * numbers.width), calls=3),
                ),
            )
        )
        modules += self._mlp("top", pairs + self.width, self.top, last=False)
        modules.append(elementwise("loss", "BinaryCrossEntropy", numbers, 1.0, reads=2.0, keeps=2.0))
        inputs = (
            TensorShape(name="dense", shape=(self.dense,), dtype=self.dtype),
            TensorShape(name="sparse", shape=(len(sizes),), dtype="int64"),
        )
        return self.spec("dlrm", modules, inputs)

    def _mlp(self, name: str, inputs: int, widths: tuple[int, ...], *, last: bool) -> list[ModuleSpec]:
        """Return linear layers with ReLU between them, and after the last one if `last`."""
        modules: list[ModuleSpec] = []
        for index, outputs in enumerate(widths):
            modules.append(linear(f"{name}.{index}", self.numbers, 1, inputs, outputs, keeps=index == 0))
            if last or index < len(widths) - 1:
                modules.append(elementwise(f"{name}.{index}.act", "ReLU", self.numbers, outputs))
            inputs = outputs
        return modules
