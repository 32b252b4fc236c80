"""`tutti.notebook`: trains with a function of a notebook cell, or of a script, on several ranks of this machine.

The ranks are not forked from the notebook: they come from the fork server of `tutti run`, which has no threads and has
not touched CUDA. So it does not matter what the notebook has used before. The function travels by value, with what it
refers to, and its cell's text, so that tracebacks show it.
"""

import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

from tutti.commands.messages import messages
from tutti.commands.run import options_of_run, report_of, screen, trained
from tutti.commands.values import StrPath
from tutti.config.compression import Compression
from tutti.config.plan import Plan, SyncPlan
from tutti.config.run_report import RunReport
from tutti.errors import ScriptError, TuttiError

T = TypeVar("T")

SCRIPT = '''"""Calls the function that a notebook gave to tutti.notebook."""

from pathlib import Path

from tutti.commands.notebook import call_function

__tutti_calls__ = True  # tracebacks begin below this file

call_function(Path(__file__).parent)
'''

FUNCTION, VALUE = "function.pkl", "value.pt"


class NotebookRun(NamedTuple, Generic[T]):
    """A training that a notebook started.

    Attributes:
        value: what the function returned on rank 0; its tensors are on the CPU.
        report: the report of the run.
        folder: the run folder, with the output of every rank in ranks/.
    """

    value: T
    report: RunReport
    folder: Path


def notebook(
    train: Callable[..., T],
    *arguments: Any,
    nproc: int = 2,
    plan: StrPath | Plan | None = None,
    mesh: str | Mapping[str, int] | None = None,
    compress: str | Compression | None = None,
    sync: str | SyncPlan | None = None,
    folder: StrPath | None = None,
    resume: StrPath | None = None,
    checkpoint_every: int | None = None,
    timeout: float | None = None,
    share_device: bool = False,
    verbose: bool = True,
) -> NotebookRun[T]:
    """Call a function that trains with a `tutti.Job` on several ranks of this machine, and return what it returns.

    The function may be defined in a cell. It sees copies of the cell's values, and what it changes stays in the ranks.

    Args:
        train: the function; it makes its model, data and `tutti.Job` itself, as a script does.
        arguments: its arguments.
        nproc: the number of ranks.
        plan: a Plan to follow, such as `tutti.plan(...).plan`, or a file of one, instead of `nproc`.
        mesh: the ranks as a grid, such as {"replicate": 2, "split": 2}, instead of `nproc`.
        compress: codec of gradient reductions, such as "top-k,density=0.01".
        sync: how far replicas may differ, such as "local:8".
        folder: the run folder; runs/NAME-TIME if None.
        resume: continue from a run folder or a checkpoint.
        checkpoint_every: save a checkpoint every so many steps.
        timeout: seconds that ranks wait for each other; None: as in `tutti.run`.
        share_device: ranks may compute on the same GPU; their times then say little.
        verbose: show the output of rank 0 as it comes.

    Raises:
        ScriptError: the function cannot be sent to other processes, or makes no `tutti.Job`.
        TuttiError: a rank failed: the message has the function's own traceback.
    """
    if not callable(train):
        raise ScriptError(f"{train!r} is not a function; give tutti.notebook a function that trains, uncalled")
    name = getattr(train, "__name__", type(train).__name__).strip("<>")
    options = options_of_run(
        target=(name,),
        nproc=nproc if plan is None and mesh is None else None,
        plan=plan,
        mesh=mesh,
        compress=compress,
        sync=sync,
        folder=folder,
        resume=resume,
        checkpoint_every=checkpoint_every,
        timeout=timeout,
        share_device=share_device,
        predict=False,
    )
    packed = _packed(name, train, arguments)

    def in_folder(place: Path) -> str:
        (place / FUNCTION).write_bytes(packed)
        (place / VALUE).unlink(missing_ok=True)
        script = place / f"{name}.py"
        script.write_text(SCRIPT, encoding="utf-8")
        return str(script)

    try:
        with messages(shown=verbose):
            ended = trained(options, screen=screen(shown=verbose), make_script=in_folder)
            report = report_of(ended)
    except TuttiError as error:
        raise _short(error) from None
    assert report is not None  # a notebook is node 0
    return NotebookRun(_value(ended.spec.folder), report, ended.spec.folder)


def _packed(name: str, train: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return a function with its arguments, its surroundings and the text of its cell as bytes.

    Raises:
        ScriptError: it refers to something that cannot be sent to another process.
    """
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # the library has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                raise ScriptError(
                    f"{name} uses a tensor of shape {tuple(obj.shape)} on {obj.device} that the notebook made; make it "
                    "inside the function, where every rank has its own device, or move it to the CPU"
                )
            if isinstance(obj, CodeType):  # the library leaves out where code is from, which tracebacks show
                kind, values = self.dispatch_table[CodeType](obj)
                return kind, tuple(obj.co_filename if value == "<dynamic-code>" else value for value in values)
            return super().reducer_override(obj)

    cells = {file: entry[2] for file, entry in linecache.cache.items() if len(entry) == 4 and not Path(file).exists()}
    buffer = io.BytesIO()
    pickle.dump((sys.path[:], os.getcwd(), cells), buffer)  # read first: the function may use modules found by the path
    try:
        Pickler(buffer).dump((train, arguments))
    except ScriptError:
        raise
    except Exception as error:  # whatever the objects' own reductions raise
        raise ScriptError(
            f"{name} cannot be sent to the ranks ({type(error).__name__}: {error}); make what it refers to inside the "
            "function: open files, locks and connections stay in the notebook"
        ) from None
    return buffer.getvalue()


def call_function(folder: Path) -> None:
    """Call the function of a run folder, as every rank does, and keep what it returns on rank 0."""
    import cloudpickle
    import torch

    from tutti.environment import read_rank_environment

    with (folder / FUNCTION).open("rb") as file:
        path, place, cells = pickle.load(file)
        sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
        os.chdir(place)
        for name, lines in cells.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        train, arguments = pickle.load(file)  # may import modules from the notebook's own folders
    value = train(*arguments)
    if read_rank_environment().rank:
        return
    try:
        torch.save(value, folder / VALUE, pickle_module=cloudpickle)
    except Exception as error:  # whatever the value's own reduction raises
        raise ScriptError(
            f"what the function returned, a {type(value).__name__}, cannot be sent to the notebook "
            f"({type(error).__name__}: {error}); return numbers, tensors or state_dicts"
        ) from None


def _value(folder: Path) -> Any:
    import torch

    return torch.load(folder / VALUE, map_location="cpu", weights_only=False)


def _short(error: TuttiError) -> TuttiError:
    """Return the error so that IPython shows its message, which has the function's traceback, and no frame of tutti."""
    words = f"{type(error).__name__}: {error}".splitlines()
    error._render_traceback_ = lambda: words  # type: ignore[attr-defined]  # what IPython looks for
    return error
