"""Where samples come from and how large they really are: real data is told from noise, enlarged images from others."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from tutti.config.run_folder import FRAMED, DataOrigin
from tutti.data.fingerprint import digest_samples, first_rows, input_pattern, overlap
from tutti.data.origin import look_at, origin_of

datasets = pytest.importorskip("sklearn.datasets", reason="the data are scikit-learn's")


def origin(data: Any) -> DataOrigin:
    return origin_of(data, look_at(data, 0))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = datasets.load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def crops(size: int, count: int = 100) -> torch.Tensor:
    """Parts of two photographs, (count, 3, size, size)."""
    images = datasets.load_sample_images().images
    random = np.random.RandomState(0)
    cut = []
    for number in range(count):
        image = images[number % 2]
        top, left = random.randint(0, image.shape[0] - size), random.randint(0, image.shape[1] - size)
        cut.append(image[top : top + size, left : left + size].transpose(2, 0, 1))
    return torch.tensor(np.stack(cut)).float()


def labelled(inputs: torch.Tensor) -> TensorDataset:
    return TensorDataset(inputs, torch.arange(len(inputs)) % 7)


class Indexed(Dataset[Any]):
    """Samples made by a function of the index."""

    def __init__(self, make: Any, count: int = 500, **held: Any) -> None:
        self.make, self.count = make, count
        self.__dict__.update(held)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(self, index)


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes", "iris", "digits"])
def test_real_tables_are_not_noise(name: str) -> None:
    table = getattr(datasets, f"load_{name}")()
    spread = table.data.std(axis=0)
    values = (table.data - table.data.mean(axis=0)) / np.where(spread > 0, spread, 1)
    found = origin(TensorDataset(torch.tensor(values).float(), torch.tensor(table.target)))
    assert found.start_state == "ram"
    assert found.native_shape == values.shape[1:]


@pytest.mark.parametrize(
    "inputs",
    [
        lambda: torch.randn(1000, 20),
        lambda: 3 + 0.1 * torch.randn(500, 10),
        lambda: torch.rand(200, 3, 16, 16),
        lambda: torch.randint(0, 5000, (300, 64)),
        lambda: torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8),
    ],
)
def test_random_numbers_are_generated(inputs: Any) -> None:
    torch.manual_seed(1)
    assert origin(labelled(inputs())).start_state == "generated"


def test_text_is_not_random() -> None:
    source = Path(os.__file__).read_bytes()
    tokens = torch.tensor(list(source[: 128 * 200])).view(200, 128)
    assert origin(labelled(tokens)).start_state == "ram"
    windows = Indexed(lambda data, at: data.text[at : at + 64], text=torch.tensor(list(source)))
    assert origin(windows).start_state == "ram"


def test_samples_that_are_drawn_or_computed_are_generated() -> None:
    drawn = Indexed(lambda data, at: (torch.rand(3, 8, 8) ** 2 + torch.arange(8), 1))
    computed = Indexed(lambda data, at: (torch.sin(torch.arange(64.0) * at), at % 3))
    assert origin(drawn).start_state == "generated"
    assert "seeds" in origin(drawn).state_reason
    assert origin(computed).start_state == "ram"
    assert "computed" in origin(computed).state_reason


def test_samples_in_memory_with_augmentation_are_in_memory() -> None:
    images, _ = digits()
    augmented = Indexed(lambda data, at: data.images[at] + 0.1 * torch.randn(1, 8, 8), images=images)
    listed = Indexed(lambda data, at: data.samples[at], samples=list(images))
    assert origin(augmented).start_state == "ram"
    assert origin(listed).start_state == "ram"


def test_files_are_disk(tmp_path: Path) -> None:
    images = digits()[0].numpy()
    np.save(tmp_path / "all.npy", images)
    for number, image in enumerate(images[:100]):
        np.save(tmp_path / f"{number}.npy", image)
    each = Indexed(lambda data, at: torch.from_numpy(np.load(tmp_path / f"{at}.npy")), 100)
    mapped = Indexed(lambda data, at: np.array(data.images[at]), images=np.load(tmp_path / "all.npy", mmap_mode="r"))
    assert origin(each).start_state in ("disk-warm", "disk-cold")
    assert origin(mapped).start_state in ("disk-warm", "disk-cold")
    assert origin(Subset(mapped, range(300))).start_state in ("disk-warm", "disk-cold")


@pytest.mark.parametrize("size", [32, 64])
def test_photographs_have_their_own_size(size: int) -> None:
    plain = crops(size)
    assert origin(labelled(plain)).native_shape == (3, size, size)
    smaller = F.interpolate(plain, scale_factor=0.5, mode="bilinear", antialias=True)
    assert origin(labelled(smaller)).native_shape == (3, size // 2, size // 2)
    blurred = F.avg_pool2d(plain, 3, 1, 1)
    assert origin(labelled(blurred)).native_shape == (3, size, size)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("factor", [2, 4, 2.5])
def test_enlarged_photographs_have_the_size_of_the_source(mode: str, factor: float) -> None:
    inputs = F.interpolate(crops(32), scale_factor=factor, mode=mode)
    assert origin(labelled(inputs)).native_shape == (3, 32, 32)
    if mode != "bicubic":  # which leaves the range of a byte
        assert origin(labelled(inputs.round().to(torch.uint8))).native_shape == (3, 32, 32)


def test_borders_and_padding_are_seen() -> None:
    images, _ = digits()
    framed = origin(labelled(F.pad(images, [12] * 4)))
    assert framed.native_shape is not None
    assert max(framed.native_shape) <= 8
    assert "border" in framed.native_reason
    round_field = torch.zeros(300, 1, 64, 64)
    round_field[:, :, 14:49, 15:50] = torch.rand(300, 1, 35, 35) ** 2
    assert origin(labelled(round_field)).native_reason == FRAMED
    tokens = torch.zeros(300, 128, dtype=torch.int64)
    for row in range(300):
        tokens[row, : 20 + row % 20] = torch.arange(1, 21 + row % 20)
    padded = origin(labelled(tokens))
    assert padded.native_shape == (pytest.approx(30, abs=1),)
    assert "padding" in padded.native_reason


def test_a_stream_and_an_empty_set_say_nothing() -> None:
    assert origin_of([], look_at([], 0)) == DataOrigin()


def test_the_most_frequent_label_is_known() -> None:
    images, labels = digits()
    share = float(torch.bincount(labels).max()) / len(labels)
    assert origin(TensorDataset(images, labels)).majority == pytest.approx(share)
    assert origin(TensorDataset(images, torch.rand(len(images)))).majority is None
    pairs = Indexed(lambda data, at: (data.images[at], int(at % 4 == 0)), images=images)
    assert origin(pairs).majority == pytest.approx(0.75, abs=0.06)


def test_samples_in_both_are_unknown_where_they_are_augmented() -> None:
    images, labels = digits()
    plain = TensorDataset(images[:300], labels[:300])
    both = TensorDataset(images[200:400], labels[200:400])
    flipped = Indexed(lambda data, at: (data.images[at].flip(-1) if torch.rand(()) < 0.5 else data.images[at], 1), 300,
                      images=images)  # fmt: skip
    assert overlap(digest_samples(plain, 0), digest_samples(both, 0)) == 100
    assert digest_samples(flipped, 0) is None
    assert overlap(None, digest_samples(both, 0)) is None


def test_scaled_samples_are_recognised() -> None:
    images, labels = digits()
    train, test = TensorDataset(images[:300], labels[:300]), TensorDataset(images[200:400], labels[200:400])
    scaled = TensorDataset((images[:300] - 0.3) / 0.7, labels[:300])
    counted = {name: overlap(digest_samples(data, 0), digest_samples(test, 0)) for name, data in
               {"plain": train, "scaled": scaled}.items()}  # fmt: skip
    assert counted["plain"] == 100
    assert counted["scaled"] == pytest.approx(100, abs=5)
    colours = torch.rand(50, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    normalised = (colours - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    assert overlap(*(digest_samples(TensorDataset(data), 0) for data in (normalised, colours))) == 50


def test_the_first_rows_of_batches_of_every_kind() -> None:
    sequences = [torch.ones(2, 40), torch.ones(3, 40)]
    batch = {"x": torch.arange(80.0).view(2, 40), "y": torch.ones(2), "names": ["a", "b"], "scalar": torch.tensor(1.0)}
    assert input_pattern(first_rows(batch)) == input_pattern([torch.arange(40.0)])
    for layout in (torch.strided, torch.jagged):
        assert first_rows([torch.nested.nested_tensor(sequences, layout=layout)]) == []
    assert first_rows([torch.eye(3).to_sparse(), np.empty((0, 3)), torch.empty(0, 3)]) == []
    assert input_pattern(first_rows(["text", None, 3])) is None


def test_patterns_that_tell_nothing_apart_are_not_used() -> None:
    ramps = torch.arange(1, 101)[:, None] * torch.linspace(0, 1, 64)
    assert not digest_samples(TensorDataset(ramps), 0).patterns
    assert overlap(digest_samples(TensorDataset(ramps[:50]), 0), digest_samples(TensorDataset(ramps[50:]), 0)) == 0
