"""Train a small language model with tutti: tutti run --nproc 2 deepspeed_tutti.py"""

import argparse

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import tutti


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 16 digits; each is the last digit of the sum of the two before it, with a mistake now and then."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(10, (samples, 17), generator=generator)
        mistakes = torch.rand(samples, 17, generator=generator) < 0.05
        for place in range(2, 17):
            following = (self.tokens[:, place - 1] + self.tokens[:, place - 2]) % 10
            self.tokens[:, place] = torch.where(mistakes[:, place], self.tokens[:, place], following)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(10, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices; none for biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def cross_entropy(scores: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def warmup_decay(update: int) -> float:
    """WarmupDecayLR: to the full rate in 8 updates, then to 0 at update 48. Its first rate holds for two updates."""
    update = max(update - 1, 0)
    return min(update / 8, (48 - update) / 40)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    job = tutti.Job(global_batch_size=64, num_microbatches=2, clip_norm=1.0, seed=0)
    torch.manual_seed(0)
    train_set, test_set = Sums(1024, seed=1), Sums(256, seed=2)
    model = tutti.shard(GPT(), level=2)  # ZeRO stage 2, on any number of ranks
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.003, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, warmup_decay)
    model, optimizer, loader = job.prepare(
        model, optimizer, train_set, cross_entropy, scheduler=scheduler, shuffle=False
    )

    for epoch in job.epochs(args.epochs):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(test_set)
        job.print(f"epoch {epoch}: test loss {values['loss']:.4f}")


if __name__ == "__main__":
    main()
