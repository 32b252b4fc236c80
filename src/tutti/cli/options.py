"""Options that several commands share. Imports nothing heavy, so that ranks start without delay."""

import ast
import json
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from rich.console import Console

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.vocabulary import Relaxation
from tutti.errors import ScriptError, TuttiError

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript

F = TypeVar("F", bound=Callable[..., Any])

SCRIPT_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""Context settings of commands that take a script. tutti's options may come before or after the script. Options that
tutti does not know, and everything after `--`, are the script's.
"""


class ScriptCommand(click.Command):
    """A command that takes a script: an option that neither tutti nor the script's text has is refused as misspelt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does.

        Raises:
            click.UsageError: an option before `--` resembles one of tutti's, and the script does not mention it.
        """
        own = args[: args.index("--")] if "--" in args else list(args)
        rest = super().parse_args(ctx, args)
        if ctx.params.get("module"):  # its text is not read
            return rest
        known = {name for param in self.params for name in (*param.opts, *param.secondary_opts) if name[:2] == "--"}
        text = _text_of(ctx.params)
        for name in (arg.partition("=")[0] for arg in own if arg.startswith("--")):
            near = get_close_matches(name, known, n=1, cutoff=0.8) if name not in known else []
            if near and not any(word in text for word in (name[2:], name[2:].replace("-", "_"))):
                raise click.UsageError(
                    f"{name} is not an option of tutti, and the script does not name it; did you mean {near[0]}? "
                    "Put `--` before options that are meant for the script.",
                    ctx,
                )
        return rest


def _text_of(params: Mapping[str, Any]) -> str:
    """Return the text of the script that a command line names; "" if there is none."""
    script = params.get("script") or next(iter(params.get("target") or ()), "")
    try:
        return Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def json_option(function: F) -> F:
    """Add --json: one JSON document on standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")(function)


def _worded(option: str, metavar: str, read: Callable[[str], Any], says: str) -> Callable[[F], F]:
    """Make an option whose text `read` parses, or refuses with a TuttiError; its value is None if it is not given."""

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        return None if text is None else read(text)

    return click.option(option, metavar=metavar, callback=parse, help=says)


def _compression(text: str) -> Any:
    from tutti.config.compression import parse_compression

    return parse_compression(text)


compress_option = _worded(
    "--compress",
    "METHOD[,NAME=VALUE]",
    _compression,
    "Reduce gradients in fewer bytes: bfloat16, bytegrad, one-bit, top-k,density=0.01, powersgd,rank=2, ...",
)
"""--compress: the codec of gradient reductions."""


def _buckets(text: str) -> str:
    from tutti.config.option_syntax import with_bucket_size
    from tutti.config.plan import BatchPlan, Plan

    with_bucket_size(Plan(batch=BatchPlan(global_batch_size=1)), text)
    return text


bucket_option = _worded(
    "--bucket-mb",
    "MIB|auto",
    _buckets,
    "Reduce gradients in buckets of this size; auto: the fastest of a few sizes, tried in the first steps.",
)
"""--bucket-mb: the size of the buckets in which gradients are reduced."""


def _sync(text: str) -> Any:
    from tutti.config.sync_notation import parse_sync

    return parse_sync(text)


sync_option = _worded(
    "--sync",
    "MODE[:VALUE,...]",
    _sync,
    "Let replicas differ: local:8, post-local:8,after=1000, diloco:500, adasum, ring, elastic, stale:3, ...",
)
"""--sync: how far replicas may differ."""


def relax_option(function: F) -> F:
    """Add --relax: how far the planner may leave exactness to send less."""
    return click.option(
        "--relax",
        type=click.Choice(get_args(Relaxation)),
        default="exact",
        show_default=True,
        help="How far training may deviate in order to send less, where that is certain to pay by prediction. exact: "
        "not at all; reduced: gradients in fewer bytes; relaxed: replicas may differ too.",
    )(function)


def script_arguments(function: F) -> F:
    """Add SCRIPT and the arguments that are passed to it, options included."""
    function = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(function)
    return click.argument("script", type=click.Path(path_type=Path))(function)


console = Console(stderr=True, highlight=False)
"""Everything that is not a result goes to standard error, so that --json leaves one document on standard output."""


def run_command(plan: Path, target: tuple[str, ...]) -> str:
    """Return the command that trains a script by a plan, quoted for a shell."""
    return shlex.join(["tutti", "run", "--plan", str(plan), *(target or ("SCRIPT",))])


def emit(data: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(serialization.to_data(data), indent=2))


def capture_script(script: Path, arguments: tuple[str, ...]) -> "CapturedScript":
    """Run a script up to `Job.prepare` and return what it was given; the model's parameters stay on the meta device.

    What the script prints goes to standard error. A script with `forward_backward` in its text runs through its first
    step, which shows its losses but computes nothing.

    Args:
        script: the script's path.
        arguments: the script's own arguments.

    Raises:
        ScriptError: the script fails or ends without calling prepare.
    """
    from tutti.launch.preload import load_modules
    from tutti.launch.rank_main import user_traceback
    from tutti.launch.script_path import check_script
    from tutti.profile.meta_device import parameters_on_meta
    from tutti.profile.step_trace import first_line
    from tutti.trainer.capture import capturing

    check_script(script)
    load_modules()
    with capturing(follow=_computes_losses(script)) as capture:
        try:
            with _as_main(script, arguments), redirect_stdout(sys.stderr), parameters_on_meta():
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            if error.code not in (0, None) and capture.captured is None:
                raise ScriptError(
                    f"{script} ended with exit code {error.code} before job.prepare; run it with python to see why"
                ) from None
        except Exception as error:  # a followed script may fail where it needs values
            if capture.captured is None and isinstance(error, TuttiError):
                raise
            if capture.captured is None:
                words = user_traceback(error).rstrip()
                raise ScriptError(f"{script} failed before its Job was prepared:\n{words}") from None
            capture.captured = replace(capture.captured, failed=first_line(error))
    if capture.captured is not None:
        return capture.captured
    raise ScriptError(
        f"{script} ended without calling job.prepare; make a tutti.Job and pass model, optimizer, data and loss to its "
        "prepare (docs/tutorial.md shows the three lines)"
    )


def _computes_losses(script: Path) -> bool:
    """Return whether the script's text calls `forward_backward`."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):  # running it says what is wrong
        return False
    return any(isinstance(node, ast.Attribute) and node.attr == "forward_backward" for node in ast.walk(tree))


def cluster_for(path: Path | None, *, quick: bool = True) -> ClusterSpec:
    """Return the cluster of a file or of one line (4x8:a100-80gb,nvlink3,8*ib-hdr), or this machine's.

    Args:
        path: the file or the line; None for this machine, measured now if it never was.
        quick: measure with fewer sizes and repeats.
    """
    if path is not None:
        from tutti.profile.catalog.text_models import cluster_from_text, is_cluster_text

        if is_cluster_text(str(path)) and not path.exists():
            return cluster_from_text(str(path))
        return serialization.load(ClusterSpec, path)
    from tutti.profile.probe import cached_cluster_path, measure

    cached = cached_cluster_path()
    if cached.exists():
        return serialization.load(ClusterSpec, cached)
    console.print("measuring this machine, once (`tutti probe` measures it more thoroughly)")
    cluster = measure(quick=quick)
    serialization.save(cluster, cached)
    return cluster


@contextmanager
def _as_main(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Set sys.argv and sys.path as `python script arguments` has them, while the context lasts."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
