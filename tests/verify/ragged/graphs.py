"""Graphs of any size, concatenated: nodes, edges that index them, the graph of each node, and boundaries."""

from dataclasses import dataclass

import torch
from torch import nn

import tutti


@dataclass
class Graphs:
    nodes: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    bounds: torch.Tensor
    targets: torch.Tensor
    longest: torch.Tensor


class Rings(torch.utils.data.Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = 2 + index * 5 % 7
        ends = torch.arange(count)
        nodes = torch.randn(count, 4, generator=generator)
        # SAMPLE
        return nodes, torch.stack([ends, (ends + 1) % count]), torch.tensor(index % 3)


def collate(samples):
    sizes = torch.tensor([len(nodes) for nodes, _, _ in samples])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    batch = Graphs(
        nodes=torch.cat([nodes for nodes, _, _ in samples]),
        edges=torch.cat([edges + start for (_, edges, _), start in zip(samples, bounds, strict=False)], 1),
        graph=torch.arange(len(samples)).repeat_interleave(sizes),
        bounds=bounds,
        targets=torch.stack([target for _, _, target in samples]),
        longest=sizes.max(),
    )
    # COLLATE
    return batch


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, nodes, edges):
        messages = self.other(nodes[edges[0]])
        return torch.tanh(self.own(nodes) + torch.zeros_like(nodes).index_add(0, edges[1], messages))


class Pool(nn.Module):
    def forward(self, nodes, graph, bounds):
        return nodes.new_zeros(len(bounds) - 1, 4).index_add(0, graph, nodes) / bounds.diff()[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.pool, self.head = Messages(), Messages(), Pool(), nn.Linear(4, 3)

    def forward(self, nodes, edges, graph, bounds):
        nodes = self.second(nn.functional.dropout(self.first(nodes, edges), 0.3), edges)
        # FORWARD
        return self.head(self.pool(nodes, graph, bounds))


def unpack(batch):
    return (batch.nodes, batch.edges, batch.graph, batch.bounds), {}, batch.targets


job = tutti.Job(global_batch_size=9, seed=4)
model = Net()
# MODEL
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = job.prepare(
    model, optimizer, Rings(), nn.CrossEntropyLoss(), collate_fn=collate, unpack=unpack
)
for _ in job.epochs(2):
    for batch in loader:
        job.step(batch)
