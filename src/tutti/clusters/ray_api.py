"""The jobs of a Ray cluster through its official client, whose refusals become sentences with a remedy."""

import contextlib
import functools
import importlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tutti.clusters.ray_driver import STATE
from tutti.config.safe_text import plain_text, shorten
from tutti.environment import RaySign, ray_sign, stated_ray_address
from tutti.errors import LaunchError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"

_TIMEOUT_S = 10.0
_FRESH_S = 0.8  # a log is fetched whole, so a large one not that often
_NOISE = re.compile(rf"Running entrypoint for job |{STATE}|\S+ \S+\s+INFO job_manager\.py:")  # begins such lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJobInfo:
    """What Ray knows of a job.

    Attributes:
        status: in Ray's words, such as "RUNNING".
        exit_code: of the driver; None unless it ended by itself.
        runtime_env: the environment that was made for it.
    """

    status: str
    message: str
    exit_code: int | None
    runtime_env: Mapping[str, Any]


class RayCluster:
    """The jobs of a cluster, whose refusals are sentences.

    Args:
        address: of the cluster's dashboard, as http://HOST:PORT.

    Raises:
        LaunchError: the package is missing, or the cluster does not answer or does not let this user in.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        _reach(address)
        with stated_ray_address(address), self._in_words():  # Ray lets its variables count more than an argument
            self._client = package("ray.job_submission").JobSubmissionClient(address)
        self._logs: dict[str, tuple[str, float, float]] = {}

    def submit(self, name: str, entrypoint: str, runtime_env: dict[str, Any]) -> None:
        """Submit a job. Raises LaunchError."""
        with self._in_words():
            self._client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env=runtime_env)

    def info(self, job: str) -> RayJobInfo | None:
        """Return what Ray knows of a job; None if it has forgotten it. Raises LaunchError."""
        with self._in_words():
            try:
                found = self._client.get_job_info(job)
            except RuntimeError as error:
                if "does not exist" in str(error):
                    return None
                raise
        return RayJobInfo(
            status=str(found.status.value),
            message=str(found.message or ""),
            exit_code=found.driver_exit_code,
            runtime_env=found.runtime_env or {},
        )

    def stop(self, job: str) -> None:
        """Let a job's driver end. Raises LaunchError."""
        with self._in_words():
            self._client.stop_job(job)

    def output(self, job: str, *, fresh: bool = False) -> str:
        """Return what a job has printed. Raises LaunchError.

        Args:
            job: its name.
            fresh: as it is now, however large it is.
        """
        text, read_at, took = self._logs.get(job, ("", 0.0, 0.0))
        begun = time.monotonic()
        if fresh or begun > read_at + max(_FRESH_S, 10 * took):
            with self._in_words():
                text = str(self._client.get_job_logs(job))
            self._logs[job] = (text, time.monotonic(), time.monotonic() - begun)
        return text

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what the client raises into sentences."""
        errors = package("ray.exceptions")
        try:
            yield
        except errors.AuthenticationError as error:
            raise LaunchError(refused_token(self._address, str(error), ray_sign())) from None
        except (ConnectionError, OSError) as error:  # those of requests are OSErrors
            raise LaunchError(unreachable(self._address, _reason(error))) from None
        except (RuntimeError, ValueError, KeyError) as error:
            server = getattr(self, "_client", None)
            theirs = str(getattr(server, "_server_ray_version", None) or "")
            raise LaunchError(refused(str(error), package("ray").__version__, theirs)) from None


@functools.lru_cache
def ray_cluster(address: str) -> RayCluster:
    """Return the jobs of a cluster, which is reached once."""
    return RayCluster(address)


def package(name: str) -> Any:
    """Return a module of Ray. Raises LaunchError if it is not installed."""
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        raise LaunchError(f"the package ray is not installed ({error}); install it: pip install 'tutti[ray]'") from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    for part in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(part).setLevel(logging.ERROR)
    return found


def checked_address(text: str) -> str:
    """Return the address of a cluster's dashboard.

    Args:
        text: HOST:PORT, or with http:// or https://.

    Raises:
        LaunchError: it is something else, such as "auto" or the address of a Ray Client.
    """
    found = text if "://" in text else f"http://{text}"
    parts = urlsplit(found)
    with contextlib.suppress(ValueError):
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or "://" in text) and text != "auto":
            return found.rstrip("/")
    raise LaunchError(
        f"{text} is not the address of a Ray cluster's dashboard, to which jobs are submitted; name it with --request "
        "address=http://HOST:8265, or in RAY_ADDRESS"
    )


def _reach(address: str) -> None:
    """Connect once, as Ray's client would wait for minutes. Raises LaunchError."""
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((str(parts.hostname), port), _TIMEOUT_S):
            pass
    except OSError as error:
        raise LaunchError(unreachable(address, _reason(error))) from None


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def unreachable(address: str, reason: str) -> str:
    """Return the sentence about a cluster that does not answer."""
    return (
        f"the Ray cluster at {address} cannot be reached ({shorten(plain_text(reason))}); start it, open the tunnel "
        "that leads to its dashboard, or name another with --request address=http://HOST:8265"
    )


def refused_token(address: str, said: str, sign: RaySign) -> str:
    """Return the sentence about a cluster that does not take the token, or asks for one."""
    if not sign.mode:
        return (
            f"the Ray cluster at {address} asks for a token; export RAY_AUTH_MODE=token, and the token in "
            "RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
        )
    if "invalid" in said.lower():
        place = f"in {sign.place}" if sign.place else "in ~/.ray/auth_token"
        return (
            f"the Ray cluster at {address} does not take the token {place}; get the cluster's own, such as by "
            "`ray get-auth-token` on its head node"
        )
    return (
        f"RAY_AUTH_MODE={sign.mode}, but there is no token; export RAY_AUTH_TOKEN, or write it into a file that "
        "RAY_AUTH_TOKEN_PATH names, or into ~/.ray/auth_token"
    )


def refused(said: str, ours: str, theirs: str) -> str:
    """Return a refusal of Ray as a sentence.

    Args:
        said: Ray's own words.
        ours, theirs: the versions of Ray here and in the cluster.
    """
    words = shorten(plain_text(" ".join(said.split())), 400)
    if "exceeds the maximum size" in said:
        return f"the copy of this directory is too large for Ray ({words}); name what it can do without in `exclude`"
    if theirs and ours != theirs:
        return f"Ray refuses it ({words}); this machine has Ray {ours} and the cluster {theirs}: install that one here"
    return f"Ray refuses it ({words}); correct what it names in tutti.toml or --request"


def printed(text: str) -> str:
    """Return the log of a job without what is not for people."""
    return "".join(line for line in text.splitlines(keepends=True) if not _NOISE.match(line))


def last_state(text: str) -> dict[str, Any]:
    """Return how things stand, as a job's driver has written it last into its log; empty if it has not yet."""
    for line in reversed(text.splitlines()):
        if line.startswith(STATE):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line.removeprefix(STATE)))
    return {}
