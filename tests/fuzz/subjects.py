"""The corpus of inputs: what a person can give tutti, each made from a valid one by the changes of `fuzz.changes`."""

import io
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from hypothesis import strategies as st
from torch import nn

import tutti
from cost_model import examples
from fuzz import changes
from fuzz.laws import call, command
from report.run_folders import Story, write_run
from tutti import environment
from tutti.checkpoint.checksums import checksum
from tutti.checkpoint.index import INDEX, RUN_STATE
from tutti.cli import main as command_line
from tutti.config import serialization
from tutti.job_secret import read_secret
from tutti.reporting.build_report import build_report
from tutti.reporting.terminal_report import as_text, report_table
from tutti.validation.published_rows import load_rows

RANK_FILE = "rank-00000.safetensors"
_CHECKSUM = ',\n  "checksum": "'


def data_of(value: Any) -> Any:
    return json.loads(serialization.dumps(value))


def _write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def specs(data: st.DataObject, folder: Path) -> None:
    """Plans, clusters and models for `tutti predict` and `tutti plan`."""
    valid = {
        "plan.json": data_of(examples.plan(ranks=2)),
        "cluster.json": data_of(examples.cluster()),
        "model.json": data_of(examples.mlp(64, 2)),
    }
    wrong = data.draw(st.sampled_from(sorted(valid)))
    as_bytes = data.draw(st.integers(0, 7)) == 0
    for name, document in valid.items():
        content = changes.written(document)
        if name == wrong:
            content = (
                data.draw(changes.changed_bytes(content))
                if as_bytes
                else changes.written(data.draw(changes.changed(document)))
            )
        _write(folder, name, content)
    plan, *rest = [
        str(folder / "plan.json"),
        "--model",
        str(folder / "model.json"),
        "--cluster",
        str(folder / "cluster.json"),
    ]
    if wrong != "plan.json" and data.draw(st.booleans()):
        command("plan", *rest, "--global-batch-size", "64", "--json")
    else:
        command("predict", plan, *rest, *data.draw(st.sampled_from(((), ("--json",)))))


@cache
def _run_rows() -> tuple[Story, list[dict[str, Any]]]:
    from report.run_folders import rows

    story = Story(epochs=1, steps_per_epoch=3, quality=(0.8,))
    return story, rows(story)


def run_folders(data: st.DataObject, folder: Path) -> None:
    """Run folders for `tutti report` and `tutti calibrate`."""
    story, _ = _run_rows()
    run = write_run(folder / "runs" / "run", story)
    other = write_run(folder / "runs" / "other", story)
    _write(run, "ranks/0/error.json", b'{"rank": 0, "type": "ValueError", "message": "wrong", "step": 2}')
    files = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from([*files, "metrics.jsonl", "metrics.jsonl", "run.json"]))
    content = (run / name).read_bytes()
    if data.draw(st.integers(0, 7)) == 0:
        content = data.draw(changes.changed_bytes(content))
    elif name.endswith(".jsonl"):
        lines = [json.loads(line) for line in content.decode().splitlines()]
        rows = data.draw(changes.changed(lines))
        content = b"\n".join(map(changes.written, rows)) if isinstance(rows, list) else changes.written(rows)
    else:
        content = changes.written(data.draw(changes.changed(json.loads(content))))
    _write(run, name, content)
    words = data.draw(
        st.sampled_from(
            (
                ("report", str(run), str(other), "--json"),
                ("report", str(other), str(run)),
                ("report", "--history", str(folder / "runs"), "--json"),
                ("calibrate", str(folder / "runs"), "--json"),
                ("checkpoint", "list", str(run), "--json"),
                (),
                (),
            )
        )
    )
    if not words:  # the report without its figures, which take a second each
        call(lambda: as_text(report_table(build_report(run))))
        return
    command(*words)


def reports(data: st.DataObject, folder: Path) -> None:
    """A row of metrics that changes what the figures of a report show."""
    story, rows = _run_rows()
    row = data.draw(st.sampled_from(range(len(rows))))
    lines = [*rows[:row], data.draw(changes.changed(rows[row], most=1)), *rows[row + 1 :]]
    run = write_run(folder / "run", story)
    _write(run, "metrics.jsonl", b"\n".join(map(changes.written, lines)))
    command("report", str(run), "--json", "--output", str(folder / "report"))


def _script(folder: Path, resume: Path | None, steps: int) -> None:
    """Train on one device in this process, and write checkpoints."""
    job = tutti.Job(global_batch_size=8, seed=3, folder=str(folder), resume=None if resume is None else str(resume))
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    samples = torch.utils.data.TensorDataset(torch.ones(32, 6), torch.zeros(32, dtype=torch.long))
    model, optimizer, loader = job.prepare(model, optimizer, samples, nn.functional.cross_entropy, scheduler=scheduler)
    batches = iter(loader)
    for _ in range(steps):
        job.step(next(batches))
        job.save()


@cache
def _sound_run() -> Path:
    """A run folder with two checkpoints, made once."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="tutti-fuzz-")) / "run"
    _script(folder, None, 2)
    return folder


def reseal(folder: Path, index: Any) -> None:
    """Write an index as a hostile writer would, who computes its checksum again."""
    text = changes.written(index)
    body = text[:-1] if text.endswith(b"}") else text
    (folder / INDEX).write_bytes(body + _CHECKSUM.encode() + checksum(body).encode() + b'"\n}\n')


def _plain(value: Any) -> Any:
    """Return the containers of a run state as dicts and lists, which `changed` knows; other values stay."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list | tuple) else value


def checkpoints(data: st.DataObject, folder: Path) -> None:
    """Indexes, run states and tensor files of checkpoints, whose writer may have computed the checksums again."""
    run = Path(shutil.copytree(_sound_run(), folder / "run"))
    newest = run / "checkpoints" / "step-00000002"
    index = json.loads((newest / INDEX).read_text())
    del index["checksum"]
    kind = data.draw(st.sampled_from(("index", "index", "state", "state", "tensors", "bytes", "name")))
    if kind == "index":
        reseal(newest, data.draw(changes.changed(index)))
    elif kind == "state":
        state = _plain(torch.load(newest / RUN_STATE, weights_only=True))
        buffer = io.BytesIO()
        torch.save(data.draw(changes.changed(state)), buffer)
        _seal_file(newest, index, RUN_STATE, buffer.getvalue())
    elif kind == "tensors":
        content = (newest / RANK_FILE).read_bytes()
        nbytes = int.from_bytes(content[:8], "little")
        header = changes.written(data.draw(changes.changed(json.loads(content[8 : 8 + nbytes]))))
        _seal_file(newest, index, RANK_FILE, len(header).to_bytes(8, "little") + header + content[8 + nbytes :])
    elif kind == "bytes":
        name = data.draw(st.sampled_from((INDEX, RUN_STATE, RANK_FILE)))
        content = data.draw(changes.changed_bytes((newest / name).read_bytes()))
        if name == INDEX:
            (newest / INDEX).write_bytes(content)
        else:
            _seal_file(newest, index, name, content)
    else:
        name = data.draw(
            st.sampled_from(("step-99999999999999999999", "step-x", "step-3", "step-00000009.replaced", "x"))
        )
        newest.rename(newest.with_name(name))
    _use(data, run, folder)


def _seal_file(folder: Path, index: Any, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    index["files"][name]["nbytes"] = len(content)
    head = content if name == RUN_STATE else content[: 8 + int.from_bytes(content[:8], "little")]
    index["files"][name]["checksum"] = checksum(head)
    reseal(folder, index)


def _use(data: st.DataObject, run: Path, folder: Path) -> None:
    use = data.draw(st.sampled_from(("list", "verify", "prune", "export", "weights", "dcp", "resume", "resume")))
    if use in ("list", "verify"):
        command("checkpoint", use, str(run), "--json")
    elif use == "prune":
        command("checkpoint", "prune", str(run), "--keep", "1", "--json")
    elif use == "export":
        command("export", str(run), "--to", str(folder / "all.pt"), "--optimizers", "--json")
    elif use == "weights":
        command("export", str(run), "--to", str(folder / "all.safetensors"))
    elif use == "dcp":
        command("checkpoint", "export", str(run), "--to-dcp", str(folder / "dcp"))
    else:
        newest = sorted((run / "checkpoints").iterdir())[-1]
        resume = data.draw(st.sampled_from((run, newest)))
        call(lambda: _script(run if resume == run else folder / "second", resume, 1))


VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TUTTI_RENDEZVOUS",
    "TUTTI_RUN_FOLDER", "TUTTI_PLAN", "TUTTI_MESH", "TUTTI_SYNC", "TUTTI_COMPRESS", "TUTTI_BUCKET_MB", "TUTTI_SHARD",
    "TUTTI_RESUME", "TUTTI_OBSERVER", "TUTTI_RECORD", "TUTTI_RECORD_STEPS", "TUTTI_RECORD_EPOCHS",
    "TUTTI_RECORD_SAVE_AT", "TUTTI_CHECKPOINT_EVERY", "TUTTI_STEPS", "TUTTI_SUPERVISED", "TUTTI_TIMEOUT_S",
    "TUTTI_PROFILE", "TUTTI_BIND_CORES", "TUTTI_STOP_AT_S", "TUTTI_SECRET", "TUTTI_SECRET_FILE", "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip
_VALUES = st.sampled_from(
    ("0", "1", "2", "tcp://127.0.0.1:29500", "file:///tmp/x/store", "replicate=2", "local:8", "top-k,density=0.01",
     "auto", "level=2", "n[1-3]", "2(x3),1")
)  # fmt: skip
# No variable of a process holds a null byte or a lone surrogate, which the system refuses or keeps as bytes.
_TEXTS = changes.texts.filter(lambda text: "\0" not in text and text.isprintable())


def environments(data: st.DataObject, folder: Path) -> None:
    """The variables of launchers, and of tutti's own."""
    environ = data.draw(st.dictionaries(st.sampled_from(VARIABLES), _VALUES | _TEXTS, min_size=1, max_size=8))
    for read in (
        environment.read_rank_environment,
        environment.read_launch_options,
        environment.secret_settings,
        environment.agent_store,
        environment.visible_devices,
    ):
        call(lambda read=read: read(environ))  # type: ignore[misc]
    secret = folder / "secret"
    secret.write_bytes(data.draw(st.binary(max_size=80)))
    secret.chmod(data.draw(st.sampled_from((0o600, 0o644))))
    call(lambda: read_secret(secret))


def prepared_environments(data: st.DataObject, folder: Path) -> None:
    """The variables that a Job reads when it prepares a training of one rank."""
    names = [name for name in VARIABLES if name.startswith("TUTTI_") and "SECRET" not in name and "RENDEZ" not in name]
    environ = data.draw(st.dictionaries(st.sampled_from(names), _VALUES | _TEXTS, min_size=1, max_size=3))
    before, here = dict(os.environ), Path.cwd()
    os.chdir(folder)
    os.environ.update(environ)
    try:
        call(lambda: _script(folder / "run", None, 1))
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


@cache
def _options(name: str) -> tuple[str, ...]:
    """The options of a command that neither open a page nor measure this machine."""
    found = command_line.cli.get_command(click.Context(command_line.cli), name)
    assert found is not None
    options = (option for param in found.params for option in (*param.opts, *param.secondary_opts))
    return tuple(option for option in options if option[:2] == "--" and option not in ("--open", "--help"))


COMMANDS = (
    "describe",
    "plan",
    "predict",
    "validate",
    "calibrate",
    "run",
    "verify",
    "export",
    "checkpoint",
    "report",
    "lab",
)


def command_lines(data: st.DataObject, folder: Path) -> None:
    """Words of the command line; no script is there that could be trained, and no cluster that would be measured."""
    name = data.draw(st.sampled_from(COMMANDS))
    option = st.sampled_from(_options(name) or ("--json",))
    value = (
        changes.texts
        | _VALUES
        | st.sampled_from(("nothere.py", "llama", "--", "-", "--x=y", "64", "test.accuracy=0.9"))
    )
    words = data.draw(st.lists(st.one_of(option, st.tuples(option, value), value), max_size=6))
    flat = [word for entry in words for word in ([entry] if isinstance(entry, str) else entry)]
    # A null byte and a lone surrogate cannot be in a process's arguments; functions of the package take them.
    flat = [word.replace("\0", "").replace("\ud800", "") for word in flat]
    here = Path.cwd()
    os.chdir(folder)
    try:
        serialization.save(examples.cluster(), Path("cluster.json"))
        known = ("--cluster", "cluster.json") if "--cluster" in _options(name) and "--cluster" not in flat else ()
        command(name, *known, *flat)
    finally:
        os.chdir(here)


@cache
def _published() -> tuple[list[str], list[list[str]]]:
    rows = load_rows(None)[::400][:6]
    columns = list(rows[0].cells)
    return columns, [[row.cells.get(column, "") for column in columns] for row in rows]


def published_rows(data: st.DataObject, folder: Path) -> None:
    """Tables of published measurements for `tutti validate`."""
    columns, rows = _published()
    table = data.draw(changes.changed([columns, *rows]))
    lines = table if isinstance(table, list) else [[table]]
    cells = [[str(cell) for cell in line] if isinstance(line, list) else [str(line)] for line in lines]
    text = "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells)
    content = text.encode(errors="surrogatepass")
    if data.draw(st.integers(0, 7)) == 0:
        content = data.draw(changes.changed_bytes(content))
    command("validate", _write(folder, "rows.csv", content), *data.draw(st.sampled_from(((), ("--json",)))))


SUBJECTS: dict[str, Callable[[st.DataObject, Path], None]] = {
    "specs": specs,
    "run-folders": run_folders,
    "reports": reports,
    "checkpoints": checkpoints,
    "environments": environments,
    "prepared-environments": prepared_environments,
    "command-lines": command_lines,
    "published-rows": published_rows,
}
"""Name -> draws one input in an empty folder, gives it to tutti, and checks what tutti does."""
