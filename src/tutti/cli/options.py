"""Options that several commands share. Imports nothing heavy, so that ranks start without delay."""

import json
import shlex
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from tutti.commands.capture import SCRIPT_TIMEOUT_S
from tutti.commands.values import needed_path
from tutti.config import serialization
from tutti.config.count_range import CountRange, node_counts
from tutti.config.run_folder import checkpoint_place
from tutti.config.vocabulary import Relaxation
from tutti.errors import LaunchError

F = TypeVar("F", bound=Callable[..., Any])

SCRIPT_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""Context settings of commands that take a script. tutti's options may come before or after the script. Options that
tutti does not know, and everything after `--`, are the script's.
"""


GIVEN = "tutti.given"
"""Where the context keeps the arguments of a ScriptCommand as they were given."""


class ScriptCommand(click.Command):
    """A command that takes a script: an option that neither tutti nor the script's text has is refused as misspelt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does.

        Raises:
            click.UsageError: an option before `--` resembles one of tutti's, and the script does not mention it; or it
                stands where the script should, and another command has it.
        """
        own = args[: args.index("--")] if "--" in args else list(args)
        ctx.meta[GIVEN] = list(args)
        rest = super().parse_args(ctx, args)
        if ctx.params.get("module"):  # its text is not read
            return rest
        self._refuse_option_of_another_command(ctx)
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

    def _refuse_option_of_another_command(self, ctx: click.Context) -> None:
        """Refuse an option of another command in the place of the script."""
        name = str(ctx.params.get("script") or next(iter(ctx.params.get("target") or ()), "")).partition("=")[0]
        group = ctx.parent.command if ctx.parent else None
        if not name.startswith("--") or ctx.parent is None or not isinstance(group, click.Group):
            return
        for other in group.list_commands(ctx.parent):
            command = group.get_command(ctx.parent, other)
            if command is not None and any(name in param.opts for param in command.params):
                raise click.UsageError(f"{name} is an option of tutti {other}, not of tutti {ctx.info_name}", ctx)


PLACE = checkpoint_place
"""Type of an argument that names a run folder, a checkpoint, or a store of checkpoints."""


class LocalPath(click.Path):
    """Type of an argument that names a file or folder of this machine; the address of a store is refused as that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises SpecError for an address."""
        return super().convert(needed_path(param.name if param and param.name else "path", value), param, ctx)


def _text_of(params: Mapping[str, Any]) -> str:
    """Return the text of the script that a command line names; "" if there is none."""
    script = params.get("script") or next(iter(params.get("target") or ()), "")
    try:
        return Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def request_option(function: F) -> F:
    """Add --request: settings of the cluster's job."""
    says = "Settings of the cluster's job, such as partition=gpu,time=2h; tutti.toml has those of the project."
    return click.option("--request", "requests", multiple=True, metavar="NAME=VALUE,...", help=says)(function)


def hosts_option(function: F) -> F:
    """Add --hosts: the hosts of a run over ssh."""
    says = "Run on these hosts, over ssh or by mpirun (--on mpi): HOST:RANKS,..., or a file with one a line."
    return click.option("--hosts", metavar="HOSTS|FILE", help=says)(function)


def _nodes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | CountRange | None:
    try:
        return node_counts(text)
    except LaunchError as error:
        raise click.BadParameter(str(error)) from None


def nnodes_option(function: F) -> F:
    """Add --nnodes: the number of nodes, or a range."""
    says = "Nodes that run this command together; a range for as many as there are at each time."
    return click.option("--nnodes", metavar="N|MIN:MAX", callback=_nodes, help=says)(function)


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

share_option = click.option(
    "--share-device", is_flag=True, help="Let ranks compute on the same GPU: to prove a plan, not for speed."
)
"""--share-device: several ranks on one accelerator."""


def _buckets(text: str) -> str | None:
    from tutti.commands.run import buckets_of

    return buckets_of(text)


bucket_option = _worded(
    "--bucket-mb",
    "MIB|auto",
    _buckets,
    "Reduce gradients in buckets of this size; auto: the fastest of a few sizes, tried in the first steps.",
)
"""--bucket-mb: the size of the buckets in which gradients are reduced."""


def _sharding(text: str) -> str | None:
    from tutti.commands.values import sharding_of

    return sharding_of(text)


shard_option = _worded(
    "--shard",
    "NAME=VALUE,...",
    _sharding,
    "What the shard axis divides and what runs it: level=2, offload=parameters (or optimizer; nvme for its "
    "state in files of nvme_path=FOLDER), engine=fsdp2 (or tutti, auto).",
)
"""--shard: settings of the shard axis."""


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


def timeout_option(function: F) -> F:
    """Add --timeout: the seconds that a script has to get as far as job.prepare."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.1),
        default=SCRIPT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long the script may take to get as far as job.prepare.",
    )(function)


def run_command(plan: Path, target: tuple[str, ...]) -> str:
    """Return the command that trains a script by a plan, quoted for a shell."""
    return shlex.join(["tutti", "run", "--plan", str(plan), *(target or ("SCRIPT",))])


def emit(data: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(serialization.to_data(data), indent=2))
