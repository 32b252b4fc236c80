"""The secret of a job, which its ranks share and strangers do not know, and what is derived from it.

The launcher makes one for ranks of one host. Several hosts use TUTTI_SECRET, the file that TUTTI_SECRET_FILE names, or
a file of the user's that all hosts see, which is made when it is first needed.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tutti.environment import SECRET_FILE_VARIABLE, SECRET_VARIABLE, secret_settings
from tutti.errors import LaunchError

MIN_SECRET_LENGTH = 16
"""The fewest characters of a secret: shorter ones can be guessed."""

_MAX_SECRET_NBYTES = 4096


def find_secret() -> bytes:
    """Return the secret that the user or the launcher has given, else that of the user's file.

    Raises:
        LaunchError: the secret is short, its file can be read by others, or there is none and none can be made.
    """
    settings = secret_settings()
    if settings.secret:
        return _checked(settings.secret.encode(), SECRET_VARIABLE)
    if settings.named_file is not None:
        return read_secret(settings.named_file)
    return read_secret(_users_file(settings.users_file))


def read_secret(path: Path) -> bytes:
    """Read a secret from a file that only its user may read.

    Args:
        path: the file.

    Raises:
        LaunchError: it cannot be read, others may read it, or it is too short.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(state.st_mode) & 0o077:
                raise LaunchError(
                    f"the secret in {path} can be read by other users, so it proves nothing; make it yours alone: "
                    f"chmod 600 {path}"
                )
            return _checked(file.read(_MAX_SECRET_NBYTES).strip(), str(path))
    except OSError as error:
        raise LaunchError(
            f"the secret in {path} cannot be read ({error.strerror or error}); correct {SECRET_FILE_VARIABLE}, or "
            f"export {SECRET_VARIABLE} with the same text on all hosts"
        ) from None


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret) < MIN_SECRET_LENGTH:
        raise LaunchError(
            f"the secret in {place} has {len(secret)} characters, which can be guessed; use at least "
            f"{MIN_SECRET_LENGTH}, such as those of: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def _users_file(path: Path) -> Path:
    """Make the user's secret file if there is none. Of several ranks that do so at once, all keep the first one's."""
    if path.exists():
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".secret-", dir=path.parent)  # only its user may read it
        try:
            with os.fdopen(number, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
        finally:
            os.unlink(name)
    except OSError as error:
        raise LaunchError(
            f"ranks need a common secret, and {path} cannot be made ({error.strerror or error}); export "
            f"{SECRET_VARIABLE} with the same long random text on all hosts"
        ) from None
    return path


def mac(key: bytes, purpose: str, *parts: object) -> bytes:
    """Return the HMAC-SHA256 of a purpose and values. Equal texts split differently have different ones.

    Args:
        key: the secret, or a key derived from it.
        purpose: what the code proves; codes of one purpose say nothing about another.
        parts: values that JSON can write, or bytes.
    """
    plain = [part.hex() if isinstance(part, bytes) else part for part in parts]
    text = json.dumps([purpose, *plain], separators=(",", ":"), sort_keys=True)
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).digest()


def same(code: bytes, other: bytes) -> bool:
    """Return whether two codes are equal, in a time that tells nothing about where they differ."""
    return hmac.compare_digest(code, other)


@dataclass(slots=True)
class _Session:
    """The key of the ranks that have met, and not of any other run; empty before."""

    key: bytes = b""


_SESSION = _Session()


def session_key() -> bytes:
    """Return the key that all ranks of this run share; empty in a process that has not joined other ranks."""
    return _SESSION.key


def set_session_key(key: bytes) -> None:
    """Keep the key that the ranks of this run share.

    Args:
        key: the key.
    """
    _SESSION.key = key
