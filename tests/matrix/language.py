"""Rows that see sequences: an LSTM translator with attention, the examples' GPT, and a GPT with experts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from against_one import Subject
from matrix.families import Family, subject, token_loss, words

VOCABULARY, SEQUENCE = 40, 16


class Translator(nn.Module):
    """Sequence to sequence: LSTM encoder and decoder, dot-product attention (Luong et al. 2015), teacher forcing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.mix = nn.Linear(2 * width, width)
        self.predict = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # (batch, seq), (batch, seq) -> (batch, seq, words)
        read, state = self.encoder(self.source(source))
        written, _ = self.decoder(self.target(target), state)
        weights = torch.softmax(written @ read.transpose(1, 2) / read.shape[-1] ** 0.5, -1)
        return self.predict(torch.tanh(self.mix(torch.cat([weights @ read, written], -1))))


def gpt_example() -> ModuleType:
    """The module of examples/gpt_tutti.py."""
    name = "gpt_example"
    if name not in sys.modules:
        path = Path(__file__).parents[2] / "examples" / "gpt_tutti.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def small_gpt() -> nn.Module:
    return gpt_example().GPT(layers=4, width=32, heads=4, context=SEQUENCE, vocabulary=VOCABULARY)


def translator() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    inputs = {"source": tokens[:, 1:].flip(1), "target": tokens[:, :-1]}
    return subject(Translator, inputs, tokens[:, 1:], token_loss)


def gpt() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    return subject(small_gpt, tokens[:, :-1], tokens[:, 1:], token_loss)


FAMILIES = (
    Family(name="LSTM translator, attention", subject=translator, blocks="mix"),
    Family(name="GPT, tied embeddings", subject=gpt, blocks="blocks.*"),
)
