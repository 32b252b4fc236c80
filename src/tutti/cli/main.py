"""The command `tutti`: a group whose commands are loaded when they are asked for."""

import importlib
import sys

import click

from tutti.errors import TuttiError

_COMMANDS = {
    "probe": "measure this machine or a cluster, or write one down",
    "describe": "what the script's model costs, module by module, without running it",
    "plan": "find the best plan for a script on a cluster, and explain it",
    "predict": "cost one plan",
    "validate": "score predictions against published measurements",
    "calibrate": "fit a cluster's constants to past runs",
    "run": "train by a plan",
    "verify": "compare N ranks with one device and name the first difference",
    "export": "a checkpoint of any plan as plain files that one device reads",
    "checkpoint": "checkpoints to and from torch's distributed checkpoint format",
    "report": "the honest report of a run, or of several",
    "lab": "hosts on this machine, joined by links of limited rate",
    "doctor": "find what would stop a launch, and say the fix",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"tutti.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tutti")
def cli() -> None:
    """Train a PyTorch model on the machines you have: planned, verified against one device, reported honestly."""


def main() -> None:
    """Run a command; a TuttiError becomes one sentence on standard error and its exit code."""
    try:
        code = cli.main(standalone_mode=False)
    except TuttiError as error:
        print(f"tutti: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("tutti: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
