"""Options that several commands share. Imports nothing heavy, so that starting ranks need not wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from tutti.config.vocabulary import Relaxation

F = TypeVar("F", bound=Callable[..., Any])

SCRIPT_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": True}
"""Context settings of commands that take a script. tutti's options may stand on either side of it; options that tutti
does not know, and everything after `--`, are the script's."""


def json_option(function: F) -> F:
    """--json: one JSON document on standard output."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")(function)


def _worded(option: str, metavar: str, read: Callable[[str], Any], says: str) -> Callable[[F], F]:
    """An option whose words `read` understands, or refuses by an error of the user's; None where it is not given."""

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
    "Sum gradients in fewer bytes: bfloat16, bytegrad, one-bit, top-k,density=0.01, powersgd,rank=2, ...",
)
"""--compress: how gradients are written while ranks sum them."""


def _buckets(text: str) -> str:
    from tutti.config.option_syntax import with_bucket_size
    from tutti.config.plan import BatchPlan, Plan

    with_bucket_size(Plan(batch=BatchPlan(global_batch_size=1)), text)
    return text


bucket_option = _worded(
    "--bucket-mb",
    "MIB|auto",
    _buckets,
    "Sum gradients in buckets of this size; auto: the quickest of a few, tried over the first steps.",
)
"""--bucket-mb: the size of the buckets that gradients are summed in."""


def _sync(text: str) -> Any:
    from tutti.config.sync_words import parse_sync

    return parse_sync(text)


sync_option = _worded(
    "--sync",
    "MODE[:VALUE,...]",
    _sync,
    "Let replicas differ: local:8, post-local:8,after=1000, diloco:500, adasum, ring, elastic, stale:3, ...",
)
"""--sync: how far replicas may differ."""


def relax_option(function: F) -> F:
    """--relax: how far the planner may leave what one device computes."""
    return click.option(
        "--relax",
        type=click.Choice(get_args(Relaxation)),
        default="exact",
        show_default=True,
        help="What may be given up to send less, where that is predicted to pay for sure: exact, nothing; reduced, "
        "gradients in fewer bytes; relaxed, replicas may differ too.",
    )(function)


def script_arguments(function: F) -> F:
    """SCRIPT and the arguments that go to it, options included."""
    function = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(function)
    return click.argument("script", type=click.Path(path_type=Path))(function)
