"""Sequences over ranks against one device: whole training runs, and what is refused."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from against_one import Subject, Trained, assert_agree, train
from harness import run_ranks
from trainer.several import Case, on_ranks, once
from tutti.comm.world import join_world
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.config.vocabulary import ContextKind
from tutti.errors import TuttiError
from tutti.nn.sparse_attention import BlockSparseSelfAttention, sliding_window
from tutti.parallel.context import context_parallel, sequences_of
from tutti.parallel.losses import default_unpack
from tutti.parallel.mesh import Mesh
from tutti.trainer.evaluate import evaluate

VOCABULARY, LENGTH = 11, 16


def tokens(samples: int = 20, length: int = LENGTH) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (samples, length + 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:])


class Block(nn.Module):
    """Causal attention with fewer key heads than query heads, then an MLP."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.merge = (
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, seq, 4, -1).transpose(1, 2)
        k, v = self.kv(y).view(batch, seq, 2, 2, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True, enable_gqa=True)
        x = x + self.merge(y.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class PackedBlock(Block):
    """A sliding window over the documents of packed sequences, then blocks of a pattern."""

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, 4, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, seq, 2, 2, -1).permute(2, 0, 3, 1, 4)
        y = tutti.nn.attention(q, k, v, causal=True, window=9, documents=documents)
        return x + self.merge(y.transpose(1, 2).reshape(batch, seq, width))


class Packed(nn.Module):
    """Attention of tutti.nn: packed documents with a window, and a pattern for sequences of any length."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCABULARY, width), PackedBlock(width)
        self.sparse = BlockSparseSelfAttention(width, 4, partial(sliding_window, block_size=2), causal=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        y = self.block(self.tokens(x), documents)
        return self.head(y + self.sparse(y))


class GPT(nn.Module):
    """Learned positions counted by torch.arange, and an embedding that is also the head."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.where(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder layers with padding, positions by name, and BatchNorm over all tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, padding: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        y = self.tokens(x) + self.where(positions)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return self.head(self.layers(y, src_key_padding_mask=padding))


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def token_loss(logits: Tensor, target: Tensor) -> Any:
    """The mean over tokens below 7: as a total and a count."""
    counts = (target < 7).double()
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return tutti.Weighted((losses * counts.flatten()).sum(), counts.sum())


def gpt() -> Subject:
    return Subject(model=GPT, data=tokens(), loss_fn=mean_loss, batch=8, job={"clip_norm": 0.3})


def gpt_by_tokens() -> Subject:
    return Subject(model=GPT, data=tokens(length=24), loss_fn=token_loss, batch=6)


def last_ignored() -> Subject:
    """Every sample's last target is ignored: ranks have different numbers of tokens, samples have not."""
    inputs, target = tokens().tensors
    target = target.clone()
    target[:, -1] = -100
    return Subject(model=GPT, data=TensorDataset(inputs, target), loss_fn=mean_loss, batch=8)


def packed() -> Subject:
    inputs, target = tokens().tensors
    documents = (torch.arange(LENGTH) * (1 + torch.arange(20)[:, None] % 3)) // 11
    documents[:, -1] = -1
    return Subject(
        model=Packed, data=TensorDataset(inputs, documents, target), loss_fn=mean_loss, optimizer=torch.optim.SGD
    )


def padded() -> Subject:
    inputs, target = tokens().tensors
    padding = torch.arange(LENGTH) >= torch.arange(20)[:, None] % 7 + 9
    return Subject(
        model=Encoder, data=TensorDataset(inputs, padding, target), loss_fn=mean_loss, optimizer=torch.optim.SGD
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


def padded_labels() -> Subject:
    """A model that shifts its labels and averages over those that count, over padded text; its logits in float32."""
    text = tokens().tensors[0]
    lengths = torch.arange(20)[:, None] % 7 + 9
    keep = (torch.arange(LENGTH) < lengths).long()
    whole = torch.stack([text, keep, torch.where(keep > 0, text, -100)], 1)
    data = [{"input_ids": row[0], "attention_mask": row[1], "labels": row[2]} for row in whole]
    return Subject(model=llama, data=data, batch=20, optimizer=torch.optim.SGD)


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}


def gpt2() -> nn.Module:
    """Its class names no loss, so the library falls back on the one that shifts labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **dropout)
    )


def mistral() -> nn.Module:
    """A sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def gemma2() -> nn.Module:
    """Soft caps, which the library computes only in its own attention, in turn with a sliding window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SIZES, head_dim=4, sliding_window=12, attn_logit_softcapping=0.5, attention_dropout=0.0)
    return Gemma2ForCausalLM(config)


def gpt_oss() -> nn.Module:
    """Attention sinks, sliding windows and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=4, sliding_window=5, **experts))
    model.config._experts_implementation = "eager"  # torch multiplies by groups in at most float32
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def qwen3_moe() -> nn.Module:
    """Rows inside its experts are grouped by expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=4, num_experts=3, num_experts_per_tok=2))
    model.config._experts_implementation = "eager"
    return model


def of_library(model: Any) -> Subject:
    return Subject(model=model, data=padded_labels().data, batch=20, optimizer=torch.optim.SGD)


def uncached(make: Any) -> nn.Module:
    model = make()
    model.config.use_cache = False
    return model


def packed_labels(make: Any) -> Subject:
    """Sequences of several documents, which the library tells by their positions unless it fills a cache."""
    text = tokens().tensors[0]
    cut = (torch.arange(20)[:, None] * 5) % 11 + 3
    where = torch.arange(LENGTH) - torch.where(torch.arange(LENGTH) >= cut, cut, 0)
    whole = torch.stack([text, where], 1)
    data = [{"input_ids": row[0], "position_ids": row[1], "labels": row[0]} for row in whole]
    return Subject(model=make, data=data, batch=20, optimizer=torch.optim.SGD)


LIBRARY = {make.__name__: partial(of_library, make) for make in (gpt2, mistral, gemma2, gpt_oss, qwen3_moe)}
LIBRARY |= {"packed llama": partial(packed_labels, llama)}  # cached in evaluation: there one document
LIBRARY |= {"packed mistral": partial(packed_labels, partial(uncached, mistral))}


def metrics(run: Any) -> dict[str, Any]:
    """Of whole sequences, not means over tokens."""
    of_sample = {"largest": lambda output, target: output.amax((1, 2))}
    of_all = {"in order": lambda output, target: (output.sum(-1) * torch.arange(output.shape[1])).sum()}
    said = [line for line in run.output.screen._said if "attention" in line]
    return {**evaluate(run, run.state.loader.source, of_sample, of_all, 3)[0], "said": said}


RECOMPUTE = (LayoutRule(modules="blocks.*", recompute=True),)
CASES: dict[int, dict[str, tuple[Any, dict[str, Any]]]] = {
    2: {
        "accumulated": (gpt, {"mesh": {"context": 2}, "batch": {"num_microbatches": 2}}),
        "recomputed": (gpt, {"mesh": {"context": 2}, "context": "all-to-all", "layout": RECOMPUTE}),
        "ignored": (last_ignored, {"mesh": {"context": 2}}),
        "padded": (padded, {"mesh": {"context": 2}}),
        "packed": (packed, {"mesh": {"context": 2}}),
        "packed, split": (packed, {"mesh": {"split": 2}, "layout": (LayoutRule(modules="block", placement="split"),)}),
    },
    3: {"tokens": (gpt_by_tokens, {"mesh": {"context": 3}})},
    4: {
        "replicas": (gpt, {"mesh": {"replicate": 2, "context": 2}, "layout": RECOMPUTE}),
        "four": (gpt, {"mesh": {"context": 4}}),
        "packed": (packed, {"mesh": {"context": 2, "replicate": 2}, "context": "all-to-all"}),
        "tokens": (gpt_by_tokens, {"mesh": {"context": 2, "replicate": 2}, "context": "all-to-all"}),
        "padded": (padded, {"mesh": {"context": 2, "replicate": 2}, "context": "all-to-all"}),
    },
}


@pytest.mark.parametrize("ranks", CASES)
def test_trained_on_parts_of_sequences_as_on_one_device(ranks: int) -> None:
    results = on_ranks(CASES[ranks], ranks)
    for name, (make, _) in CASES[ranks].items():
        assert_agree(once(make, 1), [result[name] for result in results])


def late_after_the_check(late: int, level: int) -> Trained:
    """A training in which one rank is late to take back what the check has changed on its parameters."""
    undisturbed = context_parallel._undisturbed

    @contextmanager
    def slow(model: nn.Module) -> Iterator[None]:
        with undisturbed(model):
            try:
                yield
            finally:
                time.sleep(float(join_world().rank == late))

    context_parallel._undisturbed = slow
    plan = {"mesh": {"context": 2, "shard": 2}, "sharding": ShardingPlan(level=level)}
    return train(gpt, plan, 2, torch.float64)


@pytest.mark.parametrize(("late", "level"), [(1, 2), pytest.param(3, 3, marks=pytest.mark.long)])
def test_no_rank_computes_with_parameters_of_another_ranks_check(late: int, level: int) -> None:
    one = run_ranks(train, 1, gpt, {}, 2, torch.float64)[0]
    assert_agree(one, run_ranks(late_after_the_check, 4, late, level), 1e-11)


@pytest.mark.long
def test_a_model_that_shifts_its_own_labels() -> None:
    """Its loss is over float32 logits; blocks are recomputed by its own means."""
    kinds: tuple[ContextKind, ...] = ("ring", "all-to-all")
    cases: dict[str, Case] = {kind: (padded_labels, {"mesh": {"context": 2}, "context": kind}) for kind in kinds}
    results = on_ranks(cases, 2)
    one = once(padded_labels, 1)
    for kind in kinds:
        assert_agree(one, [result[kind] for result in results], 1e-5)


@pytest.mark.long
def test_models_of_transformers_on_parts_of_sequences() -> None:
    """Their losses shift labels; their attention has windows, caps and sinks; their losses are in float32."""
    results = on_ranks({name: (make, {"mesh": {"context": 2}}) for name, make in LIBRARY.items()}, 2, steps=2)
    ones = on_ranks({name: (make, {"mesh": {"replicate": 1}}) for name, make in LIBRARY.items()}, 1, steps=2)[0]
    for name in LIBRARY:
        assert_agree(ones[name], [result[name] for result in results], 1e-5)


def test_metrics_see_whole_sequences_in_order() -> None:
    many = on_ranks({"": (gpt, {"mesh": {"replicate": 2, "context": 2}})}, 4, steps=1, look=metrics)
    one = on_ranks({"": (gpt, {"mesh": {"replicate": 1}})}, 1, steps=1, look=metrics)[0][""].facts
    said = [result[""].facts.pop("said") for result in many]
    assert said == [["attention over mesh.context is computed by cpu flash"], [], [], []]
    assert not one.pop("said")
    for result in many:
        assert result[""].facts == pytest.approx(one, rel=1e-12)


class Pooled(nn.Module):
    """One class a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(self.tokens(x)))

    def mixed(self, x: Tensor) -> Tensor:
        return x.mean(1)


class ByHand(Pooled):
    def mixed(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


class Triangle(Pooled):
    def mixed(self, x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], seen)[:, 0]


class Convolved(Pooled):
    """A convolution over tokens behind a gate that is still closed."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.gate = nn.Conv1d(8, 8, 3, padding=1), nn.Parameter(torch.zeros(1))

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.gate * self.near(x.transpose(1, 2)).transpose(1, 2)


class Sliced(Pooled):
    """Learned positions, still zero, of which the first are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Parameter(torch.zeros(1, LENGTH, 8))

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.where[:, : x.shape[1]]


class Fixed(Sliced):
    def mixed(self, x: Tensor) -> Tensor:
        return x + self.where


class Weights(Pooled):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def mixed(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Positionless(Pooled):
    def mixed(self, x: Tensor) -> Tensor:
        return x


class Summed(Positionless):
    """On the rank that holds the first tokens this is the whole's, and on the others not."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def shifted_inside(logits: Tensor, target: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], target[:, 1:])


def refusals() -> dict[str, str]:
    """What is said about models that cannot be run on parts, and whether the check left everything as it was."""
    world, said = join_world(), {}
    mesh, plan = Mesh({"context": 2}, world.rank), Plan(batch=BatchPlan(global_batch_size=4), mesh={"context": 2})
    text = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    cases: list[tuple[Any, Any, Any]] = [
        *((kind, mean_loss, (text, text)) for kind in (ByHand, Triangle, Convolved, Sliced, Fixed, Weights)),
        (Pooled, F.cross_entropy, (text, text[:, 0])),
        (Positionless, shifted_inside, (text, text)),
        (Positionless, mean_loss, (text[:, :10], text[:, :10])),
        (Positionless, mean_loss, (text[:, 0], text[:, 0])),
    ]
    for number, (kind, loss, batch) in enumerate(cases):
        torch.manual_seed(0)
        model = kind()
        state, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
        with (
            pytest.raises(TuttiError) as error,
            sequences_of(model, plan, mesh, default_unpack, loss).part(batch),
        ):
            pass
        said[f"{number} {kind.__name__}"] = str(error.value)
        assert model.training
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    sequences = sequences_of(Positionless(), plan, mesh, default_unpack, mean_loss)
    ignored = torch.where(torch.arange(LENGTH) == 2, -100, text)
    with pytest.raises(TuttiError) as error, sequences.part((text, ignored)) as part:
        mean_loss(torch.randn(3, LENGTH // 2, VOCABULARY), torch.full_like(part[1], -100))
    said["outside"] = str(error.value)
    assert F.cross_entropy.__module__ == "torch.nn.functional"
    return said


def refused_by_one() -> str:
    """What is said where only the second of two ranks sees a difference."""
    mesh = Mesh({"context": 2}, join_world().rank)
    plan = Plan(batch=BatchPlan(global_batch_size=4), mesh={"context": 2}, context="all-to-all")
    text = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    sequences = sequences_of(Summed(), plan, mesh, default_unpack, mean_loss)
    with pytest.raises(TuttiError) as error, sequences.part((text, text)):
        pass
    return str(error.value)


def test_what_one_rank_finds_all_ranks_say() -> None:
    one, other = run_ranks(refused_by_one, 2)
    assert one == other
    assert "head (Linear) computes different values" in one


def test_what_mixes_tokens_otherwise_is_refused_by_name() -> None:
    expected = {
        "0 ByHand": "attention by hand",
        "1 Triangle": "use is_causal=True",
        "2 Convolved": "near (Conv1d) computes different values",
        "3 Sliced": "positions from 0 on every rank",
        "4 Fixed": "Fixed fails on 8 tokens (mesh.context = 2), but not on 16",
        "5 Weights": "need_weights=False",
        "6 Pooled": "head (Linear) computes different values",
        "7 Positionless": "shift labels in the data set",
        "8 Positionless": "pad sequences to 12",
        "9 Positionless": "(samples, tokens)",
        "outside": "tutti.Weighted(sum, count)",
    }
    for said in run_ranks(refusals, 2):
        assert said.keys() == expected.keys()
        for name, words in expected.items():
            assert words in said[name], said[name]
