"""Time to a stated held-out quality on limited links: tutti beside DDP, torch's hooks, peers and a free network.

Steps to the quality come from whole trainings at an unlimited link, one for each seed; no trajectory here depends
on timing. Step times are measured at every limit, with all methods in turns in the same ranks; peers have ranks of
their own. Time to quality is the product of both, without evaluation. Methods with exact sums (and fp16) use the
steps of tutti's exact sums; as a check, DDP and its fp16 hook are trained with the first seed. One cell is trained
in full at its rate, and its time compared with the product. The hosts are those of `tutti lab` (root). Finished
units are kept in benchmarks/out/pays: `--resume` continues from them, and `--set only=mlp-2,gpt-4` measures some
parts only.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pays_peers
from pays_judge import rows, summary
from pays_methods import AUTOS, CHECKED_ALIKE, METHODS, ON_REQUEST, at_first, stood_for
from pays_work import WORKS, sequence
from record import QUICK_RESULTS
from tutti.lab import Lab, parse_rate
from tutti.lab.lab_network import QUEUE, burst_nbytes
from tutti.lab.lab_record import LabRecord

__all__ = ["QUICK", "Sizes", "measure", "rows"]

ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).with_name("pays_rank.py")
PARTS = QUICK_RESULTS / "pays"
MOST_FAILURES = 3
OURS = (*(name for name, method in METHODS.items() if method.side != "peer" and name not in ON_REQUEST), *AUTOS)

Unit = dict[str, Any]

RESUMABLE = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        models: names of works (pays_work.WORKS).
        hosts: numbers of hosts.
        rates: limits of the links.
        methods: methods that are compared.
        peers: other libraries that are compared.
        seeds: trainings of each method.
        most: steps of a training at most; 0 takes each model's own number.
        repeats: blocks of each method at each limit. There are only 2 for peers, and where the blocks of a method
            take more than `limit_s` seconds together.
        block_ms: length of a block, about.
        limit_s: seconds of a method's blocks at one limit.
        checked: parts, MODEL-HOSTS@RATE, that are trained in full at their rate.
        only: parts, MODEL-HOSTS, that are measured; empty for all.
    """

    models: tuple[str, ...] = ("mlp", "cnn", "gpt")
    hosts: tuple[str, ...] = ("2", "4")
    rates: tuple[str, ...] = ("unlimited", "1gbit", "100mbit")
    methods: tuple[str, ...] = OURS
    peers: tuple[str, ...] = pays_peers.NAMES
    seeds: int = 3
    most: int = 0
    repeats: int = 5
    block_ms: int = 1500
    limit_s: int = 6
    checked: tuple[str, ...] = ("mlp-2@1gbit",)
    only: tuple[str, ...] = ()


QUICK = Sizes(
    models=("mlp",), hosts=("2",), rates=("1gbit",), seeds=1, most=12, repeats=2, block_ms=250, limit_s=1, checked=()
)


def measure(sizes: Sizes, *, resume: bool = False) -> dict[str, Any]:
    """Measure all parts. Returns {"works": .., "methods": .., "parts": {part: its rows}, "summary": one entry a
    cell}.
    """
    folder = folder_of(sizes, resume=resume)
    sizes = replace(sizes, peers=tuple(filter(None, sizes.peers)), checked=tuple(filter(None, sizes.checked)))
    parts = [(model, int(hosts)) for model in sizes.models for hosts in sizes.hosts]
    parts = [part for part in parts if not sizes.only or f"{part[0]}-{part[1]}" in sizes.only]
    rows_by_part = {f"{model}-{hosts}": run_part(model, hosts, sizes, folder, resume=resume) for model, hosts in parts}
    # Name the files of plans relative to the repository.
    rows_by_part = json.loads(json.dumps(rows_by_part).replace(f"{ROOT}/", ""))
    return {
        "works": {name: stated(name) for name in sizes.models},
        "methods": {
            name: {"says": METHODS[name].says, "exact": METHODS[name].exact}
            for name in (*sizes.methods, *sizes.peers)
            if name in METHODS
        },
        "parts": rows_by_part,
        "summary": summary(rows_by_part, (*sizes.methods, *sizes.peers)),
    }


def kept(sizes: Sizes) -> dict[str, Any]:
    """Return the sizes that must agree for measured parts to belong together."""
    left_out = ("only", "models", "hosts", "checked")
    return {name: value for name, value in asdict(sizes).items() if name not in left_out}


def folder_of(sizes: Sizes, *, resume: bool) -> Path:
    """Return the folder for parts of these sizes. Unless a run resumes, clusters probed before are deleted."""
    folder = PARTS / hashlib.sha256(json.dumps(kept(sizes)).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    for file in () if resume else folder.glob("cluster-*.json"):
        file.unlink()
    return folder


def stated(name: str) -> dict[str, Any]:
    """Describe a model and its training, for the result file."""
    work = WORKS[name]
    train, held = work.data()
    return {
        "says": work.says,
        "parameters": sum(p.numel() for p in work.model().parameters()),
        "global_batch": work.batch,
        "target_held_out_loss": work.target,
        "most_steps": work.most,
        "looked_first": work.first,
        "looked_every": work.every,
        "train_samples": len(train),
        "held_out_samples": len(held),
    }


# A part: one model on a number of hosts


def run_part(model: str, hosts: int, sizes: Sizes, folder: Path, *, resume: bool) -> list[dict[str, Any]]:
    """Do all units of a part and return the rows they left. After a failure, a new launch continues without what
    failed.
    """
    file = folder / f"{model}-{hosts}.jsonl"
    if not (resume and lines(file)):
        file.write_text(json.dumps({"kind": "sizes", **kept(sizes)}) + "\n", encoding="utf-8")
    choose(model, hosts, sizes, file)
    failures = 0
    while left := undone(units(model, hosts, sizes, lines(file)), lines(file)):
        say(f"{model} on {hosts} hosts: {len(left)} units left")
        error = launch(model, hosts, left, file)
        if error is not None or undone(left, lines(file)) == left:
            failures += 1
            blame(file, left, error or "the ranks ended before the unit was done")
        if failures > MOST_FAILURES:
            break
    measure_peers(model, hosts, sizes, file)
    return [row for row in lines(file) if "begun" not in row and "trying" not in row]


def measure_peers(model: str, hosts: int, sizes: Sizes, file: Path) -> None:
    """Measure step times of the installed peers, each in its own ranks and in a new lab."""
    import torch

    done = {row["method"] for row in lines(file) if row["kind"] == "peer" and row.get("failed") != "not installed"}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        torch.save(sequence(WORKS[model], 0).tensors, data)
        for name in sizes.peers:
            if name in done:
                continue
            say(f"{model} on {hosts} hosts: {name}")
            with Lab(hosts) as lab:
                rates = list(sizes.rates)
                unit = {
                    "rates": rates,
                    "hosts": hosts,
                    "period": METHODS[name].period,
                    "limits": limits(lab.record, {"unlimited", *rates}),
                    "addresses": [lab.address(host) for host in lab.record.hosts],
                    **terms(sizes),
                    "repeats": min(2, sizes.repeats),
                }
                failed = pays_peers.measured(name, lab, model, data, unit, file)
            if failed is not None:
                add(file, {"kind": "peer", "method": name, "failed": failed[-1500:]})
                say(f"  {failed.strip()[-300:]}")


def terms(sizes: Sizes) -> dict[str, Any]:
    return {"repeats": sizes.repeats, "block_s": sizes.block_ms / 1e3, "limit_s": sizes.limit_s}


def choose(model: str, hosts: int, sizes: Sizes, file: Path) -> None:
    """Let the planner choose a plan for every limit and every row of automatic choices that has none yet."""
    from pays_auto import choice

    done = {(row["as"], row["rate"]) for row in lines(file) if row["kind"] == "choice"}
    for listed in (name for name in sizes.methods if name in AUTOS):
        for rate in sizes.rates:
            if (listed, rate) not in done:
                add(file, choice(model, hosts, rate, listed, file.parent))


def units(model: str, hosts: int, sizes: Sizes, done: list[dict[str, Any]]) -> list[Unit]:
    """List what is to be done: trainings of methods with their own trajectory, trainings that check others, step
    times at all limits, and the trainings in full at a limited rate.
    """
    most = sizes.most or WORKS[model].most
    plans = chosen_plans(done)
    names = list(
        dict.fromkeys([*(name for name in sizes.methods if name not in AUTOS), *(plan["name"] for plan in plans)])
    )
    new = {plan["name"]: plan for plan in plans if plan["name"] not in METHODS}
    trained = [name for name in names if name == "tutti plain" or not stood_for(name, new)]
    wanted = [(name, seed, "unlimited") for name in trained for seed in range(sizes.seeds)]
    wanted += [(name, 0, "unlimited") for name in CHECKED_ALIKE if name in sizes.methods]
    for words in sizes.checked:
        part, _, rate = words.partition("@")
        if part == f"{model}-{hosts}":
            wanted += [(name, 0, rate) for name in ("ddp", "tutti powersgd") if name in sizes.methods]
    trainings = [
        {"kind": "quality", "method": m, "seed": s, "rate": r, "most": most, "plans": new} for m, s, r in wanted
    ]
    return [*trainings, {"kind": "time", "methods": names, "rates": list(sizes.rates), "plans": new, **terms(sizes)}]


def chosen_plans(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plans that were chosen, each once, with the limits at which it was chosen."""
    plans: dict[str, dict[str, Any]] = {}
    for row in done:
        if row["kind"] == "choice" and "name" in row:
            for variant in plans_of(row):
                plan = plans.setdefault(variant["name"], {**variant, "rates": []})
                plan["rates"] += [row["rate"]] if row["rate"] not in plan["rates"] else []
    return list(plans.values())


def plans_of(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chosen plan. If its first updates differ, also yield the plan that makes all updates so; it is timed
    as well.
    """
    whole = {k: choice[k] for k in ("name", "exact", "period", "delay", "file")}
    yield {**whole, "begins": choice.get("begins", 0)}
    if choice.get("begins"):
        first = {"name": at_first(choice["name"]), "first_of": choice["name"], "file": choice["first_file"]}
        yield {**whole, **first, "period": 1, "delay": 0}


def undone(wanted: list[Unit], done: list[dict[str, Any]]) -> list[Unit]:
    """Return the units without result or failure; of step times, the limits and methods that are missing."""
    finished = {key(row) for row in done if row["kind"] == "quality" and ("steps" in row or "failed" in row)}
    broken = {row["method"] for row in done if row["kind"] == "time" and "failed" in row}
    timed = {row["rate"] for row in done if row["kind"] == "time" and "step_s" in row}
    left = []
    for unit in wanted:
        if unit["kind"] == "quality":
            if key(unit) not in finished:
                left.append(unit)
            continue
        rates = [rate for rate in unit["rates"] if rate not in timed]
        methods = [name for name in unit["methods"] if name not in broken]
        if rates and methods:
            left.append({**unit, "rates": rates, "methods": methods})
    return left


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["method"], row["seed"], row["rate"]


def blame(file: Path, left: list[Unit], error: str) -> None:
    """Write that the unit or method that began last failed, so that the others can continue without it."""
    last = next((row for row in reversed(lines(file)) if "begun" in row or "trying" in row), left[0])
    named = last.get("trying") or last.get("method")
    row = {k: last[k] for k in ("kind", "seed", "rate") if k in last}
    row |= {"method": named, "failed": error.strip()[-1500:]}
    add(file, row)
    say(f"  failed: {named}: {error.strip()[-300:]}")


def add(file: Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as output:
        output.write(json.dumps(row) + "\n")


def launch(model: str, hosts: int, wanted: list[Unit], file: Path) -> str | None:
    """Do units on the ranks of a lab. Returns None, or the error output if they failed."""
    with Lab(hosts) as lab, tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "units.json"
        listed.write_text(json.dumps(wanted), encoding="utf-8")
        words = [sys.executable, str(RANK), f"--work={model}", f"--units={listed}", f"--output={file}"]
        words.append(f"--limits={json.dumps(limits(lab.record, {'unlimited', *rates_in(wanted)}))}")
        try:
            done = lab.run(words, environment={"OMP_NUM_THREADS": "1"}, cwd=Path(folder), timeout_s=3600)
        except subprocess.TimeoutExpired:
            return "took longer than one hour"
    bad = [host for host in done if host.code]
    return "\n".join(host.err[-2000:] for host in bad) or f"exit code {bad[0].code}" if bad else None


def rates_in(wanted: list[Unit]) -> set[str]:
    """Return all limits that units need."""
    return {rate for unit in wanted for rate in (unit["rates"] if unit["kind"] == "time" else [unit["rate"]])}


def limits(record: LabRecord, rates: set[str]) -> dict[str, list[list[str]]]:
    """Map each limit to the commands that set it on all links in both directions, as `tutti lab` does."""
    devices = [(record.namespace(host), "eth0") for host in record.hosts]
    devices += [(record.switch, f"port{host}") for host in record.hosts]
    commands: dict[str, list[list[str]]] = {}
    for rate in rates:
        bits = parse_rate(rate)
        commands[rate] = []
        for namespace, device in devices:
            words = ["tc", "-n", namespace, "qdisc", "del" if bits is None else "replace", "dev", device, "root"]
            if bits is not None:
                burst = str(burst_nbytes(bits))
                words += ["tbf", "rate", f"{bits}bit", "burst", burst, "latency", QUEUE]
            commands[rate].append(words)
    return commands


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a part's file; an incomplete last line is ignored."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
