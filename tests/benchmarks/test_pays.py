"""Time to quality on limited links: what follows from rows, which units are left to do, and what is trained."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that `benchmarks/run.py` adds for itself."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])


@pytest.fixture
def pays() -> ModuleType:
    return importlib.import_module("pays")


@pytest.fixture
def judge() -> ModuleType:
    return importlib.import_module("pays_judge")


def training(method: str, seed: int, steps: int | None, rate: str = "unlimited", **more: Any) -> dict[str, Any]:
    looks = [[4, 1.0, 0.5], [8 if steps is None else steps, 0.2, 0.9]]
    return {"kind": "quality", "method": method, "seed": seed, "rate": rate, "steps": steps, "looks": looks, **more}


def timing(rate: str, **step_s: list[float]) -> dict[str, Any]:
    named = {name.replace("_", " "): values for name, values in step_s.items()}
    return {"kind": "time", "rate": rate, "step_s": named, "sent_nbytes": dict.fromkeys(named, 100.0)}


ROWS = [
    *(training("tutti plain", seed, steps) for seed, steps in enumerate((40, 44, 60))),
    *(training("tutti local", seed, steps) for seed, steps in enumerate((48, 52, 60))),
    *(training("ddp powersgd", seed, steps) for seed, steps in enumerate((40, None, 40))),
    training("ddp", 0, 40),
    timing("1gbit", floor=[0.1, 0.1, 0.9], tutti_plain=[0.4], tutti_local=[0.1, 0.12, 0.11], ddp=[0.5],
           ddp_powersgd=[0.1]),
    {"kind": "peer", "method": "horovod", "rate": "1gbit", "step_s": {"floor": [0.3], "horovod": [0.6]},
     "sent_nbytes": {"floor": 0.0, "horovod": 7.0}},
    {"kind": "peer", "method": "deepspeed", "failed": "not installed"},
]  # fmt: skip
METHODS = ("floor", "tutti plain", "tutti local", "ddp", "ddp powersgd", "horovod", "deepspeed", "hivemind")


def test_time_to_quality_is_median_steps_times_the_median_step(judge: ModuleType) -> None:
    cell = judge.summary({"mlp-2": ROWS}, METHODS)["cells"]["mlp-2@1gbit"]
    assert cell["floor"]["step_s"] == 0.1
    assert cell["floor"]["to_quality_s"] == pytest.approx(44 * 0.1)  # exact sums share tutti's steps
    assert cell["horovod"]["to_quality_s"] == pytest.approx(44 * 0.6)
    assert cell["tutti local"]["to_quality_s"] == pytest.approx(52 * 0.11)
    assert cell["tutti local"]["to_quality_range_s"] == [pytest.approx(48 * 0.11), pytest.approx(60 * 0.11)]
    assert cell["tutti local"]["of_floor"] == pytest.approx(52 * 0.11 / 4.4)


def test_first_updates_that_sum_like_ddp_take_ddp_s_time(judge: ModuleType) -> None:
    begun = [training(name, seed, 40) for name in ("tutti plain", "ddp post-local") for seed in range(3)]
    timed = timing("1gbit", floor=[0.1], ddp=[0.5], ddp_post_local=[0.2])
    timed["step_s"]["ddp post-local"] = timed["step_s"].pop("ddp post local")
    real = {**training("ddp post-local", 0, 40, "1gbit"), "train_s": 9.2}
    found = judge.summary({"mlp-2": [*begun, timed, real]}, ("ddp", "ddp post-local"))
    assert found["cells"]["mlp-2@1gbit"]["ddp post-local"]["to_quality_s"] == pytest.approx(4 * 0.5 + 36 * 0.2)
    assert found["checked"][0]["run_of_product"] == pytest.approx(1.0)
    alone = judge.summary({"mlp-2": [*begun, timing("1gbit", floor=[0.1]) | {"step_s": {"ddp post-local": [0.2]}}]},
                          ("ddp", "ddp post-local"))  # fmt: skip
    assert alone["cells"]["mlp-2@1gbit"]["ddp post-local"]["to_quality_s"] == pytest.approx(40 * 0.2)


def test_a_chosen_plan_s_first_updates_are_timed_as_a_plan_of_their_own(judge: ModuleType, pays: ModuleType) -> None:
    chosen = {"kind": "choice", "as": "tutti auto", "rate": "1gbit", "name": "tutti begun", "exact": False, "period": 8,
              "delay": 0, "begins": 4, "file": "a.json", "first_file": "b.json", "predicted_step_s": 0.1}  # fmt: skip
    whole, first = pays.chosen_plans([chosen])
    assert (first["name"], first["file"], first["period"], first["rates"]) == (
        "tutti begun, at first", "b.json", 1, ["1gbit"],
    )  # fmt: skip
    assert (whole["name"], whole["period"], whole["begins"]) == ("tutti begun", 8, 4)
    units = pays.units("mlp", 2, pays.Sizes(methods=("floor", "tutti plain", "tutti auto")), [chosen])
    assert {unit["method"] for unit in units if unit["kind"] == "quality"} == {"tutti plain", "tutti begun"}
    assert units[-1]["methods"] == ["floor", "tutti plain", "tutti begun", "tutti begun, at first"]
    timed = timing("1gbit", floor=[0.1])
    timed["step_s"] |= {"tutti begun": [0.2], "tutti begun, at first": [0.5]}
    trained = [training(name, seed, 40) for name in ("tutti plain", "tutti begun") for seed in range(3)]
    found = judge.summary({"mlp-2": [chosen, *trained, timed]}, ("floor", "tutti auto"))["cells"]["mlp-2@1gbit"]
    assert found["tutti auto"]["to_quality_s"] == pytest.approx(4 * 0.5 + 36 * 0.2)


def test_a_method_that_misses_the_quality_in_one_seed_has_no_time_and_wins_nothing(judge: ModuleType) -> None:
    found = judge.summary({"mlp-2": ROWS}, METHODS)
    assert "to_quality_s" not in found["cells"]["mlp-2@1gbit"]["ddp powersgd"]
    assert found["cells"]["mlp-2@1gbit"]["ddp powersgd"]["steps"] == [40, None, 40]
    assert found["verdicts"]["mlp-2@1gbit"]["best_of_others"] == "ddp"
    header, table = judge.rows({"summary": found})
    assert all(len(line) == len(header) for line in table)
    assert any("not reached" in cell for line in table for cell in line)


def test_peers_that_are_absent_say_so(judge: ModuleType) -> None:
    cell = judge.summary({"mlp-2": ROWS}, METHODS)["cells"]["mlp-2@1gbit"]
    assert cell["deepspeed"] == {"failed": "not installed"}
    assert cell["hivemind"] == {"failed": "not measured"}


def test_verdicts_are_the_automatic_choices(judge: ModuleType) -> None:
    chosen = {
        "kind": "choice",
        "as": "tutti auto",
        "rate": "1gbit",
        "name": "tutti plain",
        "exact": True,
        "predicted_step_s": 0.3,
    }
    found = judge.summary({"mlp-2": [*ROWS, chosen]}, (*METHODS, "tutti auto"))
    verdict = found["verdicts"]["mlp-2@1gbit"]
    assert (verdict["judged"], verdict["best_of_tutti"]) == ("tutti plain", "tutti local")
    assert verdict["regret"] == {"tutti auto": pytest.approx(44 * 0.4 / (52 * 0.11) - 1)}
    assert verdict["of_ddp"] == pytest.approx(0.4 / 0.5)
    assert (verdict["aim"], verdict["met"]) == (1.15, False)
    by_hand = judge.summary({"mlp-2": ROWS}, METHODS)["verdicts"]["mlp-2@1gbit"]
    assert by_hand["judged"] == "tutti local"
    assert by_hand["of_best_of_others"] == pytest.approx(52 * 0.11 / (44 * 0.5))


def test_that_exact_sums_train_alike_is_shown_and_a_real_run_stands_beside_the_product(judge: ModuleType) -> None:
    real = training("ddp", 0, 40, rate="1gbit", train_s=22.0)
    found = judge.summary({"mlp-2": [*ROWS, real]}, METHODS)
    alike = found["exact"]["mlp-2"]["ddp"]
    assert (alike["same_number_of_steps"], alike["largest_difference_of_losses"]) == (True, 0)
    assert found["checked"][0]["run_of_product"] == pytest.approx(22.0 / (40 * 0.5))
    other = [*ROWS[:9], {**training("ddp", 0, 40), "looks": [[4, 1.25, 0.5]]}]
    assert judge.same_steps(other)["ddp"] == {
        "looks": 1,
        "same_number_of_steps": False,
        "largest_difference_of_losses": 0.25,
    }


def test_units_that_are_done_or_failed_are_not_done_again(pays: ModuleType) -> None:
    sizes = pays.Sizes(
        models=("mlp",), hosts=("2",), seeds=1, methods=("floor", "tutti plain", "ddp"), rates=("1gbit",)
    )
    wanted = pays.units("mlp", 2, sizes, [])
    kinds = [(unit.get("method"), unit.get("rate")) for unit in wanted]
    assert kinds == [("tutti plain", "unlimited"), ("ddp", "unlimited"), ("ddp", "1gbit"), (None, None)]
    assert pays.undone(wanted, []) == wanted
    done = [training("tutti plain", 0, 40), {**training("ddp", 0, 40), "begun": True}]
    del done[1]["steps"]
    assert len(pays.undone(wanted, done)) == 3  # begun is not done
    done += [{"kind": "quality", "method": "ddp", "seed": 0, "rate": "unlimited", "failed": "why"}]
    done += [{"kind": "time", "method": "ddp", "failed": "why"}]
    left = pays.undone(wanted, done)
    assert [unit["kind"] for unit in left] == ["quality", "time"]
    assert left[1]["methods"] == ["floor", "tutti plain"]
    assert [unit["kind"] for unit in pays.undone(wanted, [*done, timing("1gbit", floor=[1.0])])] == ["quality"]


def test_a_chosen_plan_is_trained_unless_it_is_a_known_method_or_exact(pays: ModuleType) -> None:
    def choice(rate: str, name: str, exact: bool) -> dict[str, Any]:
        return {
            "kind": "choice",
            "as": "tutti auto",
            "rate": rate,
            "name": name,
            "exact": exact,
            "period": 1,
            "delay": 0,
            "file": "plan.json",
        }

    sizes = pays.Sizes(seeds=2, methods=("floor", "tutti plain", "tutti local", "tutti auto"), checked=())
    choices = [choice("1gbit", "tutti local", False), choice("unlimited", "tutti stage=2", True)]
    wanted = pays.units("mlp", 2, sizes, [*choices, choice("100mbit", "tutti powersgd 1", False)])
    trained = [unit["method"] for unit in wanted if unit["kind"] == "quality"]
    assert trained == ["tutti plain"] * 2 + ["tutti local"] * 2 + ["tutti powersgd 1"] * 2
    assert wanted[-1]["methods"] == ["floor", "tutti plain", "tutti local", "tutti stage=2", "tutti powersgd 1"]
    assert wanted[-1]["plans"]["tutti stage=2"]["rates"] == ["unlimited"]


def test_parts_of_one_run_are_kept_together_and_probes_are_fresh_unless_it_goes_on(
    pays: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pays, "PARTS", tmp_path)
    folder = pays.folder_of(pays.Sizes(), resume=False)
    probe = folder / "cluster-2-1gbit.json"
    probe.touch()
    assert pays.folder_of(pays.Sizes(only=("mlp-2",)), resume=True) == folder
    assert probe.exists()
    assert pays.folder_of(pays.QUICK, resume=False) != folder
    assert probe.exists()
    pays.folder_of(pays.Sizes(), resume=False)
    assert not probe.exists()


def test_a_line_that_was_cut_off_does_not_count(pays: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "part.jsonl"
    file.write_text(json.dumps({"kind": "sizes"}) + "\n" + '{"kind": "quality", "st', encoding="utf-8")
    assert pays.lines(file) == [{"kind": "sizes"}]
    assert pays.lines(tmp_path / "none") == []


def test_blocks_in_which_the_cores_were_given_to_others_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = importlib.import_module("pays_wire")
    blocks = iter(
        [(9.0, 1.0, 0.5), (8.0, 1.0, 0.2), (1.0, 1.0, 0.01), *((9.0 - n, 1.0, 0.9 - n / 10) for n in range(5))]
    )
    monkeypatch.setattr(wire, "block", lambda step, steps: next(blocks))
    assert wire.quiet_block(lambda: None, 1) == (1.0, 1.0, 0.01)
    assert wire.quiet_block(lambda: None, 1) == (5.0, 1.0, 0.5)  # the least disturbed, once patience is used up
    assert next(blocks, None) is None
    assert 0 <= wire.stolen_s() < float("inf")


@pytest.mark.parametrize(
    ("seconds", "limit_s", "blocks"),
    [
        ([1.0, 1.1, 1.0, 1.1], 100.0, 4),  # calm
        ([1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 100.0, 8),  # one that was disturbed stays far away
        ([1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 3.0, 6),  # three seconds, and as many again
        ([1.0, 1.5], 0.5, 2),
    ],
)
def test_blocks_that_are_far_apart_get_more_beside_them(
    seconds: list[float], limit_s: float, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shows how many steps a block is to have: one."""
    wire, left = importlib.import_module("pays_wire"), iter(seconds)
    monkeypatch.setattr(wire, "quiet_block", lambda step, steps: (next(left), 0.0, 0.0))
    terms = {"repeats": 4, "block_s": 0.5, "limit_s": limit_s}
    found = wire.in_turns({"one": lambda: None}, {"one": 1}, terms, lambda name: None)
    assert found["step_s"]["one"] == seconds[:blocks]


def test_blocks_are_whole_periods_or_as_many_steps_as_fit() -> None:
    wire = importlib.import_module("pays_wire")
    assert [wire.steps_of(16, step_s, 0.5) for step_s in (9.0, 0.02, 0.0001)] == [16, 16, 64]
    assert [wire.steps_of(1, step_s, 0.5) for step_s in (0.2, 4.0, 0.001)] == [2, 1, 64]
    assert wire.warm_steps(16) % 16 == 8  # the exchange falls in the middle of a block


@pytest.mark.parametrize(("name", "millions"), [("mlp", 10.02), ("cnn", 3.0), ("gpt", 7.9)])
def test_models_have_the_stated_sizes_and_every_seed_its_batches(name: str, millions: float) -> None:
    module = importlib.import_module("pays_work")
    work = module.WORKS[name]
    model = module.fresh(work, 0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)
    batches = module.sequence(work, 0)
    inputs, target = batches[:4]
    assert work.loss(model(inputs), target).isfinite()
    assert len(batches) == work.most * work.batch
    assert not (module.sequence(work, 1)[:4][0] == inputs).all()
    assert work.batch % 4 == 0  # equal shares on every number of hosts
    assert work.target < math.log(10 if name != "gpt" else 256)


def test_links_are_limited_as_the_lab_limits_them(pays: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti.lab import lab_network
    from tutti.lab.lab_record import LabRecord

    record = LabRecord(id="x", name="", owner=None, subnet="10.213.0", rates=(None, None), made_utc="")
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(lab_network, "_call", lambda *words: called.append(words))
    for namespace, device in ((record.namespace(0), "eth0"), (record.namespace(1), "eth0"),
                              (record.switch, "port0"), (record.switch, "port1")):  # fmt: skip
        lab_network._limit(namespace, device, 10**9)
    found = pays.limits(record, {"1gbit", "unlimited"})
    assert [tuple(words) for words in found["1gbit"]] == [
        tuple("replace" if word == "add" else word for word in words) for words in called
    ]
    assert all("del" in words for words in found["unlimited"])


def test_a_chosen_plan_has_the_name_of_the_method_that_it_is() -> None:
    from tutti.config.compression import Compression
    from tutti.config.consistency_modes import Relaxed
    from tutti.config.plan import BatchPlan, Plan, SyncPlan

    auto, methods = importlib.import_module("pays_auto"), importlib.import_module("pays_methods")
    script = Plan(batch=BatchPlan(global_batch_size=8))

    def name(**fields: Any) -> str:
        return str(auto.name_of(Plan(**{"batch": script.batch, "mesh": {"replicate": 4}, **fields}), script, 4))

    assert name() == "tutti plain"
    assert name(sync=SyncPlan(mode="local", relaxed=Relaxed(period=methods.PERIOD))) == "tutti local"
    assert name(sync=SyncPlan(compress=Compression(method="powersgd", rank=methods.RANK))) == "tutti powersgd"
    assert name(sync=SyncPlan(compress=Compression(method="powersgd", rank=7))) == "tutti replicate=4, powersgd,rank=7"
    cut = name(mesh={"stage": 4}, batch=BatchPlan(global_batch_size=8, num_microbatches=2))
    assert cut == "tutti stage=4, synchronous, 2 microbatches"


def test_tiers_are_beside_the_flat_sum_block_by_block() -> None:
    tiers = importlib.import_module("tiers")
    sums = {"step_s": {"tiers": [1.0, 2.0, 4.0], "gloo": [2.0, 4.0, 4.0]}, "sent_nbytes": {"tiers": 8e6, "gloo": 12e6}}
    steps = {
        "step_s": {"floor": [1.0], "tutti plain": [3.0], "ddp": [4.0]},
        "sent_nbytes": dict.fromkeys(tiers.STEPS, 1.0),
    }
    found = tiers.summary({"sums": sums, "steps": steps})
    assert (found["sums"]["ratio"], found["sums"]["ratio_range"]) == (0.5, [0.5, 1.0])
    assert found["steps"]["ratio"] == 0.75
    header, table = tiers.rows({"summary": {"1gbit": found}})
    assert [line[2] for line in table] == ["2000.0 (8.0 MB)", "3000.0 (0.0 MB)"]
    assert all(len(line) == len(header) for line in table)
