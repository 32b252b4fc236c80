"""Text that may be kept and shown: without passwords in command lines, and without what would control a terminal."""

import re
import unicodedata
from collections.abc import Iterable

HIDDEN = "***"
"""Stands for a value that is not kept."""

_SECRET_WORDS = ("password", "passwd", "passphrase", "passcode", "pass", "pwd", "secret", "secrets", "token", "key")
_SECRET_ENDS = frozenset((*_SECRET_WORDS, "apikey", "credential", "credentials", "auth", "authorization"))
_SECRET_ANYWHERE = ("password", "passwd", "passphrase", "secret", "apikey", "credential")
_NOT_SECRET_ENDS = frozenset(("file", "path", "dir", "folder", "dim", "size", "length", "len", "name", "count", "num"))

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NAME_BEGINS = r"(?<![-\w.])"  # so that the search does not begin again at each letter of a long word
_SCHEME = r"(?:(?:Bearer|Basic)\s+)?"
_ASSIGNMENT = re.compile(
    _NAME_BEGINS + r"(?P<name>[-\w.]*\w)(?P<between>[\"']?\s*[=:](?!//)\s*[\"']?" + _SCHEME + r")"
    r"(?P<value>[^\s\"'&,;}]+)"
)
_OPTION = re.compile(
    _NAME_BEGINS + r"(?P<name>--?\w[-\w.]*)(?P<between>\s+[\"']?)(?P<value>[^\s\"'-][^\s\"']*|-[^\s\"'-][^\s\"']*)"
)
_IN_ADDRESS = re.compile(r"(?P<scheme>\w[\w+.-]{0,31}://)(?P<who>[^\s/?#\"']+)@")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)


def names_secret(name: str) -> bool:
    """Return whether the name of an option says that its value is secret.

    Args:
        name: such as "--api-key", "API_KEY" or "logger.token".

    Examples:
        >>> [names_secret(name) for name in ("--wandb-api-key", "hub.token", "--token-dim", "--num-tokens", "--monkey")]
        [True, True, False, False, False]
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _NOT_SECRET_ENDS:
        return False
    return words[-1] in _SECRET_ENDS or any(word in "".join(words) for word in _SECRET_ANYWHERE)


def hide_secrets(text: str) -> str:
    """Replace secret values in a text: of options and assignments, passwords in addresses, and well-known tokens.

    Args:
        text: a command line, an argument or a message.

    Examples:
        >>> hide_secrets("train.py --lr 0.1 --token=abc --api-key abc s3://me:pw@host/data")
        'train.py --lr 0.1 --token=*** --api-key *** s3://***@host/data'
    """
    text = _IN_ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)
    for pattern in (_ASSIGNMENT, _OPTION):
        text = pattern.sub(_hidden, text)
    return _KNOWN.sub(HIDDEN, text)


def _hidden(match: re.Match[str]) -> str:
    value = HIDDEN if names_secret(match["name"]) else match["value"]
    return f"{match['name']}{match['between']}{value}"


def hide_arguments(arguments: Iterable[str]) -> tuple[str, ...]:
    """Replace secret values in a command line's arguments.

    Args:
        arguments: the arguments, one by one.

    Examples:
        >>> hide_arguments(["--password", "two words", "--verbose", "--key=a b", "x"])
        ('--password', '***', '--verbose', '--key=***', 'x')
    """
    shown: list[str] = []
    secret_follows = False
    for argument in arguments:
        name, separator, value = argument.partition("=")
        is_option = argument.startswith("-") and not separator
        if secret_follows and not (argument.startswith("--") and argument[2:3].isalpha()):
            shown.append(HIDDEN)
        elif separator and value and "://" not in name and names_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(hide_secrets(argument))
        secret_follows = is_option and names_secret(argument)
    return tuple(shown)


_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # of operating systems: titles, links, the clipboard
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # colours, and movements of the cursor
    r"|\x1b[ -/]*[0-~]?"
)
_KEPT = frozenset("\n\t")
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def plain_text(text: str) -> str:
    r"""Return a text without escape sequences, control characters and marks that turn the direction of writing.

    Line ends and tabs stay. Lone surrogates, which no terminal can show, become "?".

    Args:
        text: a text that may come from elsewhere: another rank, a file's name, a run folder.

    Examples:
        >>> plain_text("a\x1b[31mred\x1b[0m\x1b]0;title\x07b\r\n")
        'aredb\n'
    """
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPES.sub("", text)
    return "".join(_plain(letter) for letter in text)


def _plain(letter: str) -> str:
    if letter in _KEPT or letter.isprintable():
        return letter
    kind = unicodedata.category(letter)
    if kind == "Cs":
        return "?"
    return "" if kind in ("Cc", "Zl", "Zp") or letter in _DIRECTIONS else letter


def shorten(text: str, limit: int = 160) -> str:
    """Return a text, or its beginning and its length if it is longer than `limit`.

    Args:
        text: such as a value that a message shows.
        limit: the number of characters that stay.

    Examples:
        >>> shorten("0, " * 1000, 12)
        '0, 0, 0, 0, ... (3,000 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
