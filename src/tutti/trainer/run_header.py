"""The run folder and its header, which describes the run and is written before the first step."""

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from tutti.comm.devices import device_name
from tutti.comm.world import World
from tutti.config.mesh_axes import format_mesh
from tutti.config.run_folder import DatasetInfo, RankInfo, Recipe, RunFolder, RunHeader, lock_folder
from tutti.config.safe_text import hide_arguments
from tutti.config.version import VERSION
from tutti.config.vocabulary import AxisName
from tutti.environment import (
    SHARED_MEMORY_OFF,
    SHARED_MEMORY_VARIABLE,
    LaunchOptions,
    options_given,
    shared_memory_setting,
)
from tutti.errors import LaunchError


def script_path() -> Path:
    """Return the path of the running script; "interactive" if there is none."""
    main = sys.modules.get("__main__")
    return Path(getattr(main, "__file__", None) or sys.argv[0] or "interactive")


def open_folder(launch_options: LaunchOptions, world: World, stated: Path | None) -> RunFolder:
    """Create the run folder if it is missing, and return it, locked by rank 0. Collective.

    The launcher's folder, which may be each node's own; else the same folder on every rank: `stated`, or
    runs/<script>-<time>.

    Raises:
        LaunchError: the folder cannot be created, or another process writes into it.
    """
    path = launch_options.run_folder
    if path is None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = stated or Path("runs") / f"{script_path().stem}-{stamp}"
        path = Path(world.broadcast(str(path.absolute())))
    folder, refused = RunFolder(path), None
    try:
        path.mkdir(parents=True, exist_ok=True)
        if world.is_main and (warning := lock_folder(folder)):
            print(f"tutti: {warning}", file=sys.stderr)
    except OSError as error:
        refused = f"the run folder {path} cannot be created ({error.strerror}); name another folder"
    except LaunchError as error:
        refused = str(error)
    refused = next(filter(None, world.gather(refused)), None)
    if refused:
        raise LaunchError(refused)
    return folder


def this_rank(world: World, strategies: Sequence[str] = ()) -> RankInfo:
    """Describe where this rank runs.

    Args:
        world: the ranks.
        strategies: transports of this rank's gradient reductions.
    """
    device, sums = world.device, " and ".join(strategies)
    return RankInfo(
        rank=world.rank,
        local_rank=world.local_rank,
        host=world.host,
        device=str(device),
        device_model=_cpu_model() if device.type == "cpu" else device_name(device),
        pid=os.getpid(),
        threads=torch.get_num_threads(),
        sums=f"{sums or 'nothing'} ({SHARED_MEMORY_VARIABLE}=off)"
        if shared_memory_setting() == SHARED_MEMORY_OFF
        else sums,
        place=world.place.device,
        cores=world.place.cores,
        binding=world.place.binding,
        network=world.place.network,
    )


def make_header(
    world: World,
    ranks: list[RankInfo],
    *,
    name: str | None,
    model: torch.nn.Module,
    parameters: int,
    mesh: dict[AxisName, int],
    recipe: Recipe,
    data: DatasetInfo,
    resumed_from: Path | None,
    resumed_at_step: int,
    checkpoint_store: str | None,
    facts: Mapping[str, str],
) -> RunHeader:
    """Collect everything about the run that is known before its first step. Called on rank 0.

    Args:
        world: the ranks.
        ranks: where each rank runs.
        name: name of the run; None: the script's.
        model: the model, for the name of its class.
        parameters: number of values in the whole model's parameters.
        mesh: degrees by axis.
        recipe: settings that determine the result.
        data: the training data.
        resumed_from: checkpoint that was loaded.
        resumed_at_step: its step; 0 for a new run.
        checkpoint_store: where checkpoints are uploaded to.
        facts: what the user wants the report to say.
    """
    script = script_path()
    commit, dirty = git_state(script)
    return RunHeader(
        name=name or script.stem,
        script=str(script),
        arguments=hide_arguments(sys.argv[1:]),
        command=_command(world, script, mesh),
        started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=world.world_size,
        backend=world.backend,
        ranks=tuple(ranks),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tutti": VERSION,
        },
        platform=platform.platform(),
        git_commit=commit,
        git_dirty=dirty,
        environment_sha256=environment_hash(),
        model=type(model).__name__,
        parameters=parameters,
        recipe=recipe,
        data=data,
        resumed_from=str(resumed_from) if resumed_from else None,
        resumed_at_step=resumed_at_step,
        checkpoint_store=checkpoint_store,
        extra={
            "cores": str(world.place.granted),
            **({"shared_devices": str(world.devices)} if world.shares_device else {}),
            **_clock_exit_of(script),
            **facts,
        },
    )


def _clock_exit_of(script: Path) -> dict[str, str]:
    try:
        line = clock_exit(script.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return {}
    return {} if line is None else {"clock_exit": f"line {line} of {script.name}"}


_CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "time_ns",
    "monotonic_ns",
    "perf_counter_ns",
    "now",
    "times",
}
_TIMERS = {"signal.alarm", "signal.setitimer", "threading.Timer", "alarm", "setitimer", "Timer"}
_CLOCK_MODULES = {"time", "datetime", "os"}


def clock_exit(source: str) -> int | None:
    """Return the line at which a script leaves a loop, or the program, because of the time; None if it has none.

    Names and functions whose value was computed from a clock are followed.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    timed = _TimedNames(nodes)
    for node in nodes:
        if isinstance(node, ast.While) and timed.of_clock(node.test):
            return node.lineno
        if isinstance(node, ast.If) and timed.of_clock(node.test) and any(_leaves(part) for part in node.body):
            return node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _TIMERS:
            return node.lineno
    return None


class _TimedNames:
    """The names of a script whose values were computed from a clock."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self._modules = set(_CLOCK_MODULES)
        self._names: set[str] = set()
        self._functions: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                self._modules |= {name.asname or name.name for name in node.names if name.name in _CLOCK_MODULES}
            elif isinstance(node, ast.ImportFrom) and node.module in _CLOCK_MODULES:
                self._names |= {name.asname or name.name for name in node.names if name.name in _CLOCKS}
                self._modules |= {name.asname or name.name for name in node.names if name.name == "datetime"}
        known = -1
        while known != len(self._names) + len(self._functions):
            known = len(self._names) + len(self._functions)
            for node in nodes:
                self._follow(node)

    def _follow(self, node: ast.AST) -> None:
        """Add the names that one statement computes from a clock."""
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value and self.of_clock(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._names |= {ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)}
        elif isinstance(node, ast.If) and self.of_clock(node.test):  # a flag that says that time is up
            set_there = [
                part for statement in node.body for part in ast.walk(statement) if isinstance(part, ast.Assign)
            ]
            self._names |= {
                ast.unparse(target)
                for part in set_there
                if isinstance(part.value, ast.Constant)
                for target in part.targets
            }
        elif isinstance(node, ast.FunctionDef):
            results = [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value]
            if any(self.of_clock(result) for result in results):
                self._functions.add(node.name)

    def of_clock(self, expression: ast.AST) -> bool:
        """Return whether a value is computed from a clock."""
        for part in ast.walk(expression):
            if isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) in self._names:
                return True
            if isinstance(part, ast.Attribute) and part.attr in _CLOCKS:
                module = ast.unparse(part.value)
                if module in self._modules or module == "datetime.datetime":
                    return True
            if isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] in self._functions:
                return True
        return False


def _leaves(statement: ast.AST) -> bool:
    """Return whether a statement leaves a loop, a function or the program."""
    for part in ast.walk(statement):
        if isinstance(part, ast.Break | ast.Return | ast.Raise):
            return True
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]).endswith("stop_reason"):
            return True
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("exit", "quit", "sys.exit", "os._exit"):
            return True
    return False


def resuming_command(world: World, mesh: dict[AxisName, int], folder: Path) -> str:
    """Return the command that goes on with a run, as far as a rank can tell.

    Args:
        world: the ranks.
        mesh: degrees by axis.
        folder: the run folder.
    """
    if world.launcher == "tutti":
        return _command(world, script_path(), mesh, "--resume", str(folder))
    return f"TUTTI_RESUME={shlex.quote(str(folder))} {_command(world, script_path(), mesh)}"


def _command(world: World, script: Path, mesh: dict[AxisName, int], *options: str) -> str:
    """Reconstruct the command that started the run, as far as a rank can tell."""
    plain = set(mesh) <= {"replicate"}
    start = {
        "tutti": ["tutti", "run", "--nproc", str(world.local_world_size)]
        + (["--share-device"] if world.shares_device else [])
        + ([] if plain else ["--mesh", format_mesh(mesh)])
        + list(hide_arguments(options_given()))
        + list(options),
        "torchrun": ["torchrun", "--nproc-per-node", str(world.local_world_size)],
        "srun": ["srun", "-n", str(world.world_size), "python"],
        "mpirun": ["mpirun", "-n", str(world.world_size), "python"],
    }.get(world.launcher, ["python"])
    return shlex.join([*start, script.name, *hide_arguments(sys.argv[1:])])


def git_state(script: Path) -> tuple[str | None, bool | None]:
    """Return (commit, has uncommitted changes) of the checkout that a script lies in; (None, None) outside one.

    A script that git does not know is an uncommitted change.
    """
    folder = script.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder or Path()), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        unknown = script.is_file() and not git("ls-files", script.name)
        return git("rev-parse", "HEAD"), unknown or bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def data_fields(data: DatasetInfo) -> dict[str, object]:
    """Return a data set's description as fields of a metrics row."""
    return asdict(data)


@functools.cache
def environment_hash() -> str:
    """Return the SHA-256 of the names and versions of all installed packages."""
    names = sorted({_pinned(distribution) for distribution in importlib.metadata.distributions()})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _pinned(distribution: importlib.metadata.Distribution) -> str:
    """Return "name==version" of a distribution, parsed here because importlib is slow (100 ms for 150 packages)."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = dict(re.findall(r"^(Name|Version):\s*(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return f"{fields.get('Name')}=={fields.get('Version')}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
