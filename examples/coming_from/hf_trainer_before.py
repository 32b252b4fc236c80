"""Train a small BERT with the Trainer: torchrun --nproc-per-node 2 hf_trainer_before.py"""

import random

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

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


def compute_metrics(predictions: EvalPrediction) -> dict[str, float]:
    predicted, labels = predictions.predictions.argmax(axis=-1), predictions.label_ids
    hits = np.sum((predicted == 1) & (labels == 1))
    return {"accuracy": np.mean(predicted == labels), "f1": 2 * hits / (np.sum(predicted == 1) + np.sum(labels == 1))}


def main() -> None:
    set_seed(0)
    tokenizer = make_tokenizer()
    train_set, eval_set = Reviews(tokenizer, 1024, seed=1), Reviews(tokenizer, 256, seed=2)
    model = make_model(len(tokenizer))
    model.accepts_loss_kwargs = False  # or the Trainer adds the losses of accumulation steps and ranks up
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train_set,
        eval_dataset=eval_set,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    values = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"loss {values['eval_loss']:.4f}, accuracy {values['eval_accuracy']:.4f}, F1 {values['eval_f1']:.4f}")
    trainer.save_model("model")


if __name__ == "__main__":
    main()
