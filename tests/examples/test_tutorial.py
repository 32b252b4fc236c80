"""The tutorial shows code that the examples have, and commands with options that exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

import tutti
from tutti.cli.main import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line[2:] for line in TEXT.splitlines() if line.startswith("$ tutti ")]


def code(text: str) -> list[str]:
    """Lines without indentation, trailing comments and blanks."""
    return [line for raw in text.splitlines() if (line := re.sub(r"\s+#.*", "", raw).strip())]


@pytest.mark.parametrize(("block", "name"), [(0, "digits_torch"), (1, "digits_tutti")])
def test_the_shown_main_is_the_examples_main(block: int, name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    body = text[text.index("def main()") :].split("\n", 1)[1].split("\nif __name__")[0]
    assert code(PYTHON[block]) == code(body)


def test_the_learning_rate_rule_gives_the_rates_that_are_said() -> None:
    from tutti.optim.learning_rate import learning_rate

    given = re.search(r"lr_rule=(.*),\n", PYTHON[2])
    assert given is not None
    rule = eval(given[1], {"tutti": tutti})
    rates = [learning_rate(rule, 0.05, s, global_batch_size=512, steps_per_epoch=3) for s in (0, 6, 7)]
    assert rates == pytest.approx([0.05, 0.4, 0.4])


def options(command: click.Command | None) -> set[str]:
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_options_exist(command: str) -> None:
    _, name, *words = shlex.split(command, comments=True)
    found = cli.get_command(click.Context(cli), name)
    known: set[str] = set()
    while isinstance(found, click.Group):
        found = found.commands[words.pop(0)]
        known |= {"--"} | options(cli.get_command(click.Context(cli), "run"))  # its commands pass on what is not theirs
    known |= options(found)
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    assert {word for word in words[:script] if word.startswith("--")} <= known
    assert script == len(words) or (ROOT / words[script]).is_file()


def test_every_command_of_the_tutorial_is_shown_once_at_least() -> None:
    assert {command.split()[1] for command in COMMANDS} >= {"describe", "probe", "plan", "run", "verify", "report"}
