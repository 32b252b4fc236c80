"""Rows whose parameters are mostly tables: DLRM (Naumov et al. 2019)."""

import torch
from torch import Tensor, nn

from against_one import Subject
from matrix.families import SAMPLES, Family, seeded, subject

ROWS, BAG = (30, 17, 50, 8), 3


class DLRM(nn.Module):
    """Dense features through an MLP, categories through tables, dot products of all pairs, an MLP on top."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in ROWS)
        pairs = len(ROWS) * (len(ROWS) + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:  # (batch, 6), (batch, tables, bag) -> (batch,)
        features = self.bottom(dense)
        looked_up = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        vectors = torch.stack([features, *looked_up], 1)
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return self.top(torch.cat([features, products[:, row, column]], 1)).squeeze(1)


def click_data() -> tuple[dict[str, Tensor], Tensor]:
    """Dense features, BAG categories a table, and clicks."""
    generator = seeded()
    dense = torch.randn(SAMPLES, 6, generator=generator)
    categories = torch.stack([torch.randint(rows, (SAMPLES, BAG), generator=generator) for rows in ROWS], 1)
    clicks = torch.randint(2, (SAMPLES,), generator=generator).to(dense.dtype)
    return {"dense": dense, "categories": categories}, clicks


def dlrm() -> Subject:
    return subject(DLRM, *click_data(), nn.BCEWithLogitsLoss())


FAMILIES = (Family(name="DLRM", subject=dlrm, blocks="top"),)
