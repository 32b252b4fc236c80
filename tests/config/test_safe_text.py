"""What is kept of command lines has no passwords; what is shown has no escapes."""

import shlex

import pytest

from tutti.config.safe_text import hide_arguments, hide_secrets, names_secret, plain_text

SECRET_LINES = [
    "--api-key SECRET", "--api_key=SECRET", "--token=SECRET", "--token SECRET", "-token SECRET", "--hf-token SECRET",
    "--password SECRET", "--db.password=SECRET", "password=SECRET", "logger.api_key=SECRET", "WANDB_API_KEY=SECRET",
    "--apiKey SECRET", "--apikey SECRET", "--aws-secret-access-key SECRET", "--secret SECRET", "--key SECRET",
    "+wandb.key=SECRET", "s3://me:SECRET@host/bucket", "--data https://SECRET@github.com/x",
    "postgresql://user:SECRET@db:5432/x", "--url https://host/file?token=SECRET&n=1",
    """--config '{"password": "SECRET", "lr": 1}'""", "--header 'auth: SECRET'",
    "--header 'Authorization: Bearer SECRET'", "--passphrase 'SECRET SECRET'",
    "--token -SECRET", "--client-secret=SECRET", "hf_SECRETSECRETSECRETSECRET", "ghp_SECRETSECRETSECRETSECRET",
    "--note sk-SECRETSECRETSECRET", "AKIASECRETSECRETSECR1",
]  # fmt: skip


@pytest.mark.parametrize("line", SECRET_LINES)
def test_no_secret_is_left(line: str) -> None:
    arguments = ["--lr", "0.1", *shlex.split(line), "--epochs=3", "tail"]
    shown = hide_arguments(arguments)
    assert "SECRET" not in " ".join(shown)
    assert "***" in " ".join(shown)
    assert (shown[:2], shown[-2:]) == (("--lr", "0.1"), ("--epochs=3", "tail"))
    assert len(shown) == len(arguments)
    assert "SECRET" not in hide_secrets(line.replace("'SECRET SECRET'", "SECRET"))


PLAIN_LINES = [
    "--num-tokens 512", "--token-dim=64", "--tokenizer gpt2", "--monkey 3", "--key-dim 64", "--max_tokens 7",
    "--token-file /a/b", "--passes 3", "--author me", "s3://bucket/a@b", "--lr=1e-3", "-v", "user@host:/path",
    "--keyboard us", "https://host:80/a?b=c", "--password --verbose", "--bypass", "x=1",
]  # fmt: skip


@pytest.mark.parametrize("line", PLAIN_LINES)
def test_other_arguments_stay(line: str) -> None:
    arguments = tuple(shlex.split(line))
    assert hide_arguments(arguments) == arguments


def test_names() -> None:
    assert names_secret("OPENAI_API_KEY")
    assert not names_secret("")
    assert not names_secret("--")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é ✓ 日本\n\tx", "plain é ✓ 日本\n\tx"),
        ("\x1b[2J\x1b[1;31mred\x1b[0m", "red"),
        ("a\x1b]0;owned\x07b", "ab"),
        ("a\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("a\x1b]52;c;cm0gLXJm\x07", "a"),
        ("\x1bPq#0;2\x1b\\after", "after"),
        ("\x9b31mred\x9d0;t\x9c", "red0;t"),
        ("over\rwritten\x08\x7f\x00", "overwritten"),
        ("trojan\u202esource\u2066", "trojansource"),
        ("family 👨\u200d👩", "family 👨\u200d👩"),
        ("\x1b", ""),
        ("lone \ud800", "lone ?"),
        ("\u2028line", "line"),
    ],
)
def test_what_controls_a_terminal_is_left_out(text: str, shown: str) -> None:
    assert plain_text(text) == shown
