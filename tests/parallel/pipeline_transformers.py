"""Models from `transformers` configs, small, with the loss they compute themselves."""

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from against_one import Subject

WORDS, TOKENS = 37, 8


def _rows(count: int = 20) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, WORDS, (count, TOKENS), generator=generator)
    keep = torch.ones(TOKENS, dtype=torch.long)
    short = (torch.arange(TOKENS) < TOKENS - 2).long()
    masks = [short if row % 3 == 0 else keep for row in range(count)]
    return [
        {"input_ids": row, "attention_mask": mask, "labels": row.clone()}
        for row, mask in zip(tokens, masks, strict=True)
    ]


def _subject(model: Any, **more: Any) -> Subject:
    return Subject(model=model, data=_rows(), batch=8, optimizer=torch.optim.SGD, rate=0.1, **more)


def gpt2() -> Subject:
    config = GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=TOKENS, bos_token_id=1, eos_token_id=1
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return _subject(lambda: GPT2LMHeadModel(config))


def t5() -> Subject:
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0
    )
    config.decoder_start_token_id = 0
    return _subject(lambda: T5ForConditionalGeneration(config))
