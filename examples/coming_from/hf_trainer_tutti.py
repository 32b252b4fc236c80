"""Train a small BERT with tutti: tutti run --nproc 2 hf_trainer_tutti.py"""

import random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import tutti
from tutti.optim.large_batch import parameter_groups

GOOD = ["good", "fine", "great", "superb", "lovely"]
BAD = ["bad", "dull", "poor", "awful", "boring"]
NEUTRAL = ["the", "a", "film", "plot", "actor", "music", "scene", "was", "and", "very", "not", "quite"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *NEUTRAL]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


class Reviews(Dataset[dict[str, object]]):
    """Sentences of 6 to 16 words; their label says whether more words are good than bad."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, samples: int, seed: int) -> None:
        draw = random.Random(seed)
        self.samples = []
        for _ in range(samples):
            words = draw.choices(GOOD + BAD + NEUTRAL, k=draw.randint(6, 16))
            label = int(sum(word in GOOD for word in words) > sum(word in BAD for word in words))
            self.samples.append({**tokenizer(" ".join(words)), "labels": label})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.samples[index]


def make_model(vocabulary: int) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    return BertForSequenceClassification(config)


def correct(outputs: SequenceClassifierOutput, batch: dict[str, Tensor]) -> Tensor:
    return (outputs.logits.argmax(dim=-1) == batch["labels"]).float()


def f1(outputs: SequenceClassifierOutput, batch: dict[str, Tensor]) -> float:
    """Of all outputs and all labels."""
    predicted, labels = outputs.logits.argmax(dim=-1), batch["labels"]
    hits = ((predicted == 1) & (labels == 1)).sum()
    return (2 * hits / ((predicted == 1).sum() + (labels == 1).sum())).item()


def main() -> None:
    job = tutti.Job(global_batch_size=64, num_microbatches=2, clip_norm=1.0, seed=0)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    train_set, eval_set = Reviews(tokenizer, 1024, seed=1), Reviews(tokenizer, 256, seed=2)
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=2e-3)
    steps = 3 * len(train_set) // 64
    model, optimizer, loader = job.prepare(
        model,
        optimizer,
        train_set,
        scheduler=get_cosine_schedule_with_warmup(optimizer, 5, steps),
        collate_fn=DataCollatorWithPadding(tokenizer),
        shuffle=False,
    )
    for _ in job.epochs(3):
        for batch in loader:
            job.step(batch)
        values = job.evaluate(eval_set, {"accuracy": correct}, whole={"f1": f1}, name="eval")
    job.print(f"loss {values['loss']:.4f}, accuracy {values['accuracy']:.4f}, F1 {values['f1']:.4f}")
    job.save_pretrained("model")
    if job.is_main:
        tokenizer.save_pretrained("model")


if __name__ == "__main__":
    main()
