"""Two networks trained against each other with losses and optimizers of their own; latent values are drawn."""

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import tutti

job = tutti.Job(global_batch_size=10, seed=3)
data = TensorDataset(torch.randn(40, 5, generator=torch.Generator().manual_seed(0)))
model = nn.ModuleDict(
    {
        "generator": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)),
        "critic": nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(), nn.Linear(8, 1)),
    }
)
optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in model.values()]
model, optimizers, loader = job.prepare(model, optimizers, data)


def drawn(networks, count):
    latent = Normal(torch.zeros(count, 2), torch.ones(count, 2)).rsample()
    kind = nn.functional.one_hot(Categorical(torch.ones(count, 2)).sample(), 2)
    noise = torch.bernoulli(torch.full((count, 1), 0.5)) + torch.normal(0.0, torch.ones(count, 1))
    return networks["generator"](torch.cat([latent, kind, noise, torch.rand(count, 1)], -1))


def judge(networks, batch):
    real, made = networks["critic"](batch[0]), networks["critic"](drawn(networks, len(batch[0])).detach())
    wanted, unwanted = torch.ones_like(real), torch.zeros_like(made)
    return binary_cross_entropy_with_logits(real, wanted) + binary_cross_entropy_with_logits(made, unwanted)


def generate(networks, batch):
    made = networks["critic"](drawn(networks, len(batch[0])))
    return binary_cross_entropy_with_logits(made, torch.ones_like(made))


for _ in job.epochs(2):
    for batch in loader:
        job.forward_backward(judge, batch)
        job.update(optimizers[1])
        job.forward_backward(generate, batch)
        job.update(optimizers[0])
