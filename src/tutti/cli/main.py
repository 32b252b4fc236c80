"""The command `tutti`: a group that imports each command only when it is used."""

import errno
import importlib
import io
import json
import sys
from difflib import get_close_matches

import click

from tutti.config.safe_text import plain_text, shorten
from tutti.config.version import VERSION
from tutti.errors import PlanError, TuttiError

_COMMANDS = {
    "probe": "measure this machine or a cluster, or describe one from data sheets",
    "describe": "show the costs of a script's model, module by module, without running it",
    "plan": "find the best plan for a script on a cluster, and explain it",
    "predict": "predict the step time and memory of one plan",
    "validate": "score predictions against published measurements",
    "calibrate": "fit a cluster's constants to past runs",
    "run": "train a script according to a plan",
    "verify": "compare N ranks with one device and name the first difference",
    "export": "write a checkpoint as a plain file that one device reads",
    "checkpoint": "list, verify and prune checkpoints, and convert them to and from torch's format",
    "report": "report on a run, or compare several",
    "lab": "simulate hosts on this machine, joined by links of limited rate",
    "doctor": "find what would stop a launch, and how to fix it",
    "why": "say why a run hangs, or what its ranks did last",
    "submit": "submit a run to a cluster's scheduler",
    "attach": "show a submitted run until it has ended",
    "status": "list submitted runs: state, nodes, step and loss",
    "logs": "print what a submitted run prints",
    "cancel": "end a submitted run, with a checkpoint if asked",
}

_SUBMITTED = ("submit", "attach", "status", "logs", "cancel")
"""Commands of `tutti.cli.submit`; each other one has a module of its own."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name in _SUBMITTED:
            command = getattr(importlib.import_module("tutti.cli.submit"), f"{cmd_name}_command")
        else:
            command = importlib.import_module(f"tutti.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with.

        Raises:
            click.UsageError: there is none; it says what may be meant.
        """
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = get_close_matches(name, _COMMANDS, n=1)
            meant = f"tutti run {name}" if name.endswith(".py") else f"tutti {near[0]}" if near else ""
            hint = f"did you mean `{meant}`?" if meant else "`tutti --help` lists them"
            raise click.UsageError(f"{name!r} is not a command of tutti; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION)
def cli() -> None:
    """Train a PyTorch model on the machines you have: planned, verified against one device, reported honestly."""


def _refusal_code(error: TuttiError) -> str:
    """Return the code of a refusal of `tutti.config.refusals` for the end of its message; docs/refusals.md lists it."""
    return f" [{error.code}]" if isinstance(error, PlanError) and "." not in error.code else ""


def _show_as_json(kind: str, message: str, code: int) -> None:
    """Print an error on standard output as the one JSON document that --json asks for."""
    words = sys.argv[1:]
    if "--json" in words[: words.index("--") if "--" in words else None]:
        print(json.dumps({"status": "failed", "exit_code": code, "error": kind, "message": message}, indent=2))


def main() -> None:
    """Run a command; a TuttiError is printed as one sentence on standard error and sets the exit code.

    With --json the error is a JSON document on standard output, too.
    """
    try:
        code = cli.main(standalone_mode=False)
    except TuttiError as error:
        print(plain_text(f"tutti: {error}{_refusal_code(error)}"), file=sys.stderr)
        _show_as_json(type(error).__name__, str(error), error.exit_code)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        print(plain_text(usage.getvalue()), end="", file=sys.stderr)
        _show_as_json("UsageError", error.format_message(), 2)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        message = f"no file can have the name {shorten(repr(error.filename), 80)}: it is too long; name another file"
        print(plain_text(f"tutti: {message}"), file=sys.stderr)
        _show_as_json("UsageError", message, 2)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("tutti: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
