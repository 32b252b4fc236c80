"""Train a small language model with DeepSpeed: deepspeed deepspeed_before.py --deepspeed_config ds_config.json"""

import argparse

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)  # passed by the launcher
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    train_set, test_set = Sums(1024, seed=1), Sums(256, seed=2)
    model = GPT()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=decay_groups(model, 0.1))
    micro_batch = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(train_set, micro_batch, sampler=DistributedSampler(train_set, shuffle=False))
    test_loader = DataLoader(test_set, micro_batch, sampler=DistributedSampler(test_set, shuffle=False))

    for epoch in range(args.epochs):
        engine.train()
        for tokens, following in loader:
            tokens, following = tokens.to(engine.device), following.to(engine.device)
            loss = cross_entropy(engine(tokens), following)
            engine.backward(loss)
            engine.step()

        engine.eval()
        total = torch.zeros((), device=engine.device)
        with torch.no_grad():
            for tokens, following in test_loader:
                tokens, following = tokens.to(engine.device), following.to(engine.device)
                total += cross_entropy(engine(tokens), following)
        deepspeed.comm.all_reduce(total)
        if deepspeed.comm.get_rank() == 0:
            print(f"epoch {epoch}: test loss {total.item() / len(test_loader) / deepspeed.comm.get_world_size():.4f}")
    engine.save_checkpoint("checkpoints")


if __name__ == "__main__":
    main()
