"""What pipelines are tested with: models whose stages are not simply one module after another."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from against_one import Subject
from tutti import Weighted


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied embedding and head, positions as a bare parameter, a mask made from the batch."""

    def __init__(self, vocabulary: int = 23, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        if bool((tokens == 0).any()):  # Python that looks at the batch
            mask = mask & (tokens != 0)[:, None, None, :] | torch.eye(length, dtype=torch.bool)
        x = self.embed(tokens) + self.positions[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Skips from every level down to its mirror up; batch statistics; activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = _convs(2, 4), _convs(4, 6), _convs(6, 8)
        self.up2, self.up1 = _convs(14, 6), _convs(10, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.down3(F.max_pool2d(two, 2))
        up = self.up2(torch.cat([F.interpolate(three, scale_factor=2), two], 1))
        up = self.up1(torch.cat([F.interpolate(up, scale_factor=2), one], 1))
        return self.head(up).mean((2, 3))


def _convs(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Tagger(nn.Module):
    """Keyword arguments, two results in a dict, a skip in place, a decoder whose modules are called once a token."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.score = nn.Linear(width, width)
        self.out = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        encoded, (hidden, state) = self.encoder(self.embed(tokens))
        first = hidden, state = hidden[0], state[0]
        longest = int(lengths.max())
        logits = torch.zeros(tokens.shape[0], longest, 5)
        for step in range(longest):
            weights = (self.score(hidden)[:, None] * encoded).sum(-1).softmax(-1)
            context = (weights[..., None] * encoded).sum(1)
            hidden, state = self.cell(torch.cat([context, encoded[:, step]], -1), (hidden, state))
            logits[:, step] = self.out(hidden)
        return {"logits": logits, "state": first[1]}


def token_loss(output: torch.Tensor, target: torch.Tensor) -> Weighted:
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=0)
    return Weighted(losses, (target != 0).sum())


def tagger_loss(output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> Weighted:
    logits = output["logits"]
    keep = torch.arange(logits.shape[1]) < target["lengths"][:, None]
    labels = target["tokens"][:, : logits.shape[1]] % 5
    return Weighted(
        F.cross_entropy(logits[keep], labels[keep], reduction="sum") + output["state"].square().sum() * 0.01, keep.sum()
    )


def gpt() -> Subject:
    tokens = torch.randint(0, 23, (30, 9), generator=torch.Generator().manual_seed(1))
    tokens[:16] = tokens[:16].clamp(min=1)  # the first batches hold no padding
    return Subject(model=GPT, data=TensorDataset(tokens[:, :-1], tokens[:, 1:]), loss_fn=token_loss, batch=8)


def clipped() -> Subject:
    subject = gpt()
    return Subject(model=subject.model, data=subject.data, loss_fn=token_loss, batch=8, job={"clip_norm": 0.5})


def frozen() -> Subject:
    """Nothing to train in the first half; the loss counts tokens, gradients are clipped."""

    def model() -> GPT:
        made = GPT()
        for part in (made.embed, made.blocks[0], made.blocks[1]):
            part.requires_grad_(False)
        made.positions.requires_grad_(False)
        made.head.weight = nn.Parameter(made.embed.weight.detach().clone())
        return made

    subject = clipped()
    return Subject(model=model, data=subject.data, loss_fn=token_loss, batch=8, job=subject.job)


def unet() -> Subject:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(22, 2, 8, 8, generator=generator), torch.randint(0, 3, (22,), generator=generator))
    return Subject(model=UNet, data=data, loss_fn=nn.CrossEntropyLoss(), batch=8, optimizer=torch.optim.SGD)


def tagger() -> Subject:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 19, (26, 7), generator=generator)
    lengths = torch.randint(2, 8, (26,), generator=generator)
    rows = [{"tokens": t, "lengths": n} for t, n in zip(tokens, lengths, strict=True)]
    return Subject(model=Tagger, data=rows, loss_fn=tagger_loss, batch=8)
