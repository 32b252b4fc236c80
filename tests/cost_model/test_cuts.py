"""Where a pipeline is cut and what its stages send on, for networks of containers: the same as in the runtime."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cost_model.examples import cluster, cpu, link
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import predict
from tutti.cost_model.stage_cuts import stages_of
from tutti.parallel.capabilities import with_capabilities
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.stage_building import cut_stages
from tutti.parallel.pipeline.stage_placement import place
from tutti.parallel.preview import _fake_world
from tutti.profile import describe_model

BATCH, TOKENS = 4, 16


def volumes(*, named: bool = True) -> nn.Module:
    """Return convolutions in a container and a head in another; the first convolutions have most of the work."""
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    )  # fmt: skip
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 5))
    return nn.Sequential(OrderedDict(features=features, head=head)) if named else nn.Sequential(features, head)


def described(model: nn.Module, x: torch.Tensor) -> ModelSpec:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = describe_model(model, (x,), {}, None, lambda output, _: output.square().mean(), optimizer, samples=BATCH)
    return with_capabilities(spec, model, (x,))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_stages_begin_and_send_as_the_runtime_s(count: int, named: bool) -> None:
    model, x = volumes(named=named), torch.zeros(BATCH, 3, 32, 32)
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"stage": count})
    spec = described(model, x)
    foreseen = stages_of(spec, plan)
    with _fake_world(0, count):
        cuts = cut_stages(model, plan, Layout.of(model, Mesh(plan.mesh, 0)), lambda: ((x,), {}))
    assert cuts is not None
    worked = [module.name for module in spec.modules if module.ops and module.name]
    stage = {module.name: int(at) for module, at in zip(spec.modules, foreseen.stage, strict=True)}
    first = [next(name for name in worked if stage[name] == at) for at in range(1, count)]
    assert first == [unit for unit, _ in cuts.starts]
    program = cuts.tracer.trace(lambda: model(x))
    sends = [part.sends for part in place(program, cuts.starts, cuts.holders).parts[:-1]]
    outlines = [[program.outlines[key] for key in sent[at + 1]] for at, sent in enumerate(sends)]
    nbytes = [
        sum(torch.Size(outline.shape).numel() * outline.dtype.itemsize for outline in sent) / BATCH for sent in outlines
    ]
    assert foreseen.sent.tolist() == nbytes


def transformers_of_six() -> dict[str, nn.Module]:
    """Return small transformers of the kinds whose attention and elementwise work weigh most beside their layers."""
    words = {"vocab_size": 99, "num_attention_heads": 4, "max_position_embeddings": TOKENS}
    wide = {"hidden_size": 32, "num_hidden_layers": 6}
    t5 = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, pad_token_id=0)
    t5.decoder_start_token_id = 0
    gpt2 = GPT2Config(vocab_size=99, n_embd=32, n_layer=6, n_head=2, n_positions=TOKENS, bos_token_id=1, eos_token_id=1)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**words, **wide, intermediate_size=88, num_key_value_heads=2)),
        "bert": BertForMaskedLM(BertConfig(**words, **wide, intermediate_size=64)),
        "gpt2": GPT2LMHeadModel(gpt2),
        "t5": T5ForConditionalGeneration(t5),
    }


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5"])
def test_transformers_are_cut_where_the_runtime_does(name: str) -> None:
    model = transformers_of_six()[name]
    words = torch.ones(BATCH, TOKENS, dtype=torch.long)
    batch = {"input_ids": words, "labels": words}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = describe_model(model, (), batch, None, lambda output, _: output.loss, optimizer, samples=BATCH)
    worked = [module.name for module in spec.modules if module.ops and module.name]
    for count in (2, 3, 4):
        plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"stage": count})
        foreseen = stages_of(spec, plan).stage
        with _fake_world(0, count):
            cuts = cut_stages(model, plan, Layout.of(model, Mesh(plan.mesh, 0)), lambda: ((), batch))
        assert cuts is not None
        stage = {module.name: int(at) for module, at in zip(spec.modules, foreseen, strict=True)}
        first = [next(name for name in worked if stage[name] == at) for at in range(1, count)]
        for predicted, (unit, _) in zip(first, cuts.starts, strict=True):
            assert predicted == unit or predicted.startswith(f"{unit}.")


def test_a_container_is_no_stage() -> None:
    """Where one layer has nearly all the work, a module that only contains it does not become a stage of its own."""
    features = nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(64, 2, 1), nn.ReLU(), nn.MaxPool2d(2)
    )
    head = nn.Sequential(nn.Flatten(), nn.Linear(32, 5))
    spec = described(nn.Sequential(OrderedDict(features=features, head=head)), torch.zeros(BATCH, 3, 32, 32))
    plan = Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"stage": 4})
    foreseen = stages_of(spec, plan)
    work = [0.0] * 4
    for module, at in zip(spec.modules, foreseen.stage, strict=True):
        work[int(at)] += sum(op.flops_forward for op in module.ops)
    assert work[0] > 0.8 * sum(work)
    assert foreseen.sent[0] == 4 * 64 * 32 * 32  # the output of the first layer
    sent = [0.0, *foreseen.sent, 0.0]  # a rank between two others sends activations on and gradients back
    most = BATCH * max(sent[place] + sent[place + 1] for place in range(4))
    assert predict(spec, cluster(cpu(), (link(),)), plan).sent_nbytes_per_rank == pytest.approx(most, rel=1e-12)
