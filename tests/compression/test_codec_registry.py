"""A codec that another package registers works everywhere: text, plan files, refusals, prediction, run and report."""

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compression import toy_codec
from cost_model.examples import cluster, link, mlp, plan
from harness import run_ranks
from local_sgd.replicas import Seen, Told
from tutti.compression.codecs import make_codec
from tutti.config import registry, serialization
from tutti.config.codec_registry import CODECS, CodecEntry, register_codec
from tutti.config.compression import (
    Compression,
    all_reduce_sent_nbytes,
    bucket_sent_nbytes,
    format_compression,
    parse_compression,
)
from tutti.config.plan import BatchPlan, Plan
from tutti.config.refusals import check_plan
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.reporting.build_report import build_report

TEXT = f"{toy_codec.NAME},levels=50"
STEPS = 4


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_codec(toy_codec.ENTRY)
    yield
    CODECS.remove(toy_codec.NAME)


def toy_compression() -> Compression:
    return Compression(method=toy_codec.NAME, options={"levels": 50})


def plan_with(how: Compression | None) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}).compressed(how)


def test_text_and_plan_files_state_the_codec_and_its_parameters() -> None:
    assert parse_compression(TEXT) == toy_compression()
    assert format_compression(toy_compression()) == TEXT
    assert parse_compression(toy_codec.NAME).settings == {"levels": 100}
    stated = plan_with(toy_compression())
    check_plan(stated)
    assert serialization.loads(Plan, serialization.dumps(stated)) == stated
    assert hash(toy_compression()) == hash(Compression(method=toy_codec.NAME, options={"levels": 50}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{toy_codec.NAME},levels=128", "levels = 128; give a number of levels from 1 to 127"),
        (f"{toy_codec.NAME},density=0.1", "density is a setting of top-k, dgc; leave it out with toy-levels"),
        ("one-bit,levels=3", "levels"),
        ("toy-lefels", "there is no such codec; choose from float64"),
    ],
)
def test_a_wrong_parameter_or_name_is_refused(text: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        parse_compression(text)


def test_options_of_another_codec_are_refused() -> None:
    with pytest.raises(PlanError, match="levels is a setting of toy-levels; leave it out with one-bit"):
        Compression(method="one-bit", options={"levels": 3})
    with pytest.raises(PlanError, match="one-bit has no setting spin"):
        Compression(method="one-bit", options={"spin": 3})


def test_what_the_entry_excludes_is_refused() -> None:
    staged = replace(plan_with(toy_compression()), mesh={"replicate": 2, "stage": 2})
    with pytest.raises(PlanError, match=r"with mesh.stage = 2: it was never tried with stages; use one-bit"):
        check_plan(staged)


def test_the_prediction_has_the_entrys_bytes_and_kernel_cost() -> None:
    machines = cluster(devices_per_node=1, count=4, links=(link("node"), link("network", 1e-4, 1.25e8)))
    exact = plan(64, 4)
    predicted = {how: predict(mlp(), machines, exact.compressed(parse_compression(how))) for how in (TEXT, "bytegrad")}
    sent = predicted[TEXT].sent_nbytes_per_rank
    assert sent < 0.26 * predict(mlp(), machines, exact).sent_nbytes_per_rank
    assert all_reduce_sent_nbytes(toy_compression(), [(1000,)], 4, 4) == 3 * 2 * (
        4 + 256
    )  # chunks of a multiple of 8 values
    slower, usual = (predicted[how].step_time_s.value for how in (TEXT, "bytegrad"))
    assert slower > usual  # three times the time in the kernels, for about as many bytes


def test_two_ranks_train_with_it_and_the_report_names_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    coded, exact = (
        run_ranks(toy_codec.train_with_it, 2, Told(compress=text, steps=STEPS, folder=where, rate=0.1))
        for text, where in ((TEXT, folder), ("", str(tmp_path / "exact")))
    )
    first, second = (_parameters(seen) for seen in coded)
    assert torch.equal(first, second)
    error = float((first - _parameters(exact[0])).norm() / _parameters(exact[0]).norm())
    assert 0 < error < 0.02
    shapes = [tuple(tensor.shape) for tensor in coded[0].after.values()]
    assert {row["sent_nbytes"] for row in coded[0].rows} >= {bucket_sent_nbytes(toy_compression(), shapes[::-1], 2, 8)}
    report = build_report(Path(folder))
    assert report.recipe.compress == TEXT
    assert report.sent_per_step.value == bucket_sent_nbytes(toy_compression(), shapes[::-1], 2, 8)


def test_a_codec_without_messages_of_flat_values_fails_loudly() -> None:
    with pytest.raises(PlanError, match="powersgd has no codec of flat values"):
        make_codec(Compression(method="powersgd"))


def test_every_codec_has_a_factory_that_gives_messages_of_the_entrys_size() -> None:
    for name, entry in CODECS.items():
        if entry.message_nbytes is None:
            continue
        how = Compression(method=name)
        for numel in (1, 7, 512, 5000):
            assert make_codec(how).nbytes(numel) == entry.message_nbytes(how.settings, numel), (name, numel)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(PlanError, match="already registered"):
        register_codec(CodecEntry(name="one-bit"))


def test_an_installed_package_registers_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("toy_plugin")
    monkeypatch.setitem(sys.modules, "toy_plugin", module)

    class Point:
        load: Callable[[], CodecEntry] = staticmethod(lambda: register_codec(CodecEntry(name="from-a-package")))

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point] if group == registry.PLUGIN_GROUP else [])
    monkeypatch.setattr(CODECS, "_plugins_loaded", False)
    assert "one-bit" in CODECS
    assert "from-a-package" not in list(CODECS)  # nothing is loaded for a name that is known
    assert parse_compression("from-a-package").method == "from-a-package"
    CODECS.remove("from-a-package")


def _parameters(seen: Seen) -> torch.Tensor:
    return nn.utils.parameters_to_vector(list(seen.after.values()))
