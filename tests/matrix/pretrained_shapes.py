"""Rows of the classes that people take from `transformers`: random weights from a small config, dropout off."""

from torch import nn

from against_one import Subject
from matrix.families import Family, class_loss, numbers, subject, token_loss, words

VOCABULARY, SEQUENCE, WIDTH, LAYERS, HEADS = 40, 16, 32, 4, 4


def small_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def small_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def small_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HEADS,
        dropout_rate=0.0,
        use_cache=False,
        relative_attention_num_buckets=8,
    )
    return T5ForConditionalGeneration(config)


def bert() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE)
    return subject(small_bert, tokens, tokens.flip(1), token_loss)


def gpt2() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    return subject(small_gpt2, tokens[:, :-1], tokens[:, 1:], token_loss)


def llama() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    return subject(small_llama, tokens[:, :-1], tokens[:, 1:], token_loss)


def vit() -> Subject:
    return subject(small_vit, numbers(3, 16, 16), words(10), class_loss)


def t5() -> Subject:
    tokens = words(VOCABULARY, SEQUENCE + 1)
    inputs = {"input_ids": tokens[:, 1:].flip(1), "decoder_input_ids": tokens[:, :-1]}
    return subject(small_t5, inputs, tokens[:, 1:], token_loss)


FAMILIES = (
    Family(name="BERT", subject=bert, blocks="bert.encoder.layer.*"),
    Family(name="GPT-2", subject=gpt2, blocks="transformer.h.*"),
    Family(name="Llama", subject=llama, blocks="model.layers.*"),
    Family(name="ViT", subject=vit, blocks="vit.layers.*"),
    Family(name="T5", subject=t5, blocks="*.block.*"),
)
