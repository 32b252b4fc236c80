"""Ranks prove to each other that they know the job's secret, before anything that they send is believed.

Rank 0 listens at the rendezvous, on that interface only. Every other rank connects; both prove the secret with
HMAC-SHA256 over fresh random numbers of both sides (challenge and response). Then rank 0 opens the store in which
groups are formed, on a port that only admitted ranks are told.
"""

import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.config.safe_text import plain_text
from tutti.errors import LaunchError
from tutti.job_secret import mac, same

_NONCE_NBYTES = 16
_MAX_LINE_NBYTES = 2**16
_STRANGER_S = 10.0
"""Seconds that a connection has to prove the secret."""

WRONG_SECRET_S = 5.0
"""Seconds to wait for a rank after a process that did not know the secret took its number: it may be a stranger's."""

_RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """What a rank says of itself."""

    rank: int
    world_size: int
    host: str


@dataclass(slots=True)
class _Connection:
    """A connection to rank 0 that is not admitted yet, or is."""

    socket: socket.socket
    address: str
    nonce: bytes
    since: float
    data: bytearray = field(default_factory=bytearray)
    answer: bytes = b""
    applicant: Applicant | None = None


def wrong_secret(rank: int, host: str) -> str:
    """Return the sentence about a rank that does not know the secret; rank 0 and that rank say the same."""
    return (
        f"rank {rank} on {host} does not know the job's secret, so it may not join; give all hosts the same one: copy "
        "~/.config/tutti/secret from rank 0's host, or export the same TUTTI_SECRET everywhere"
    )


class Gate:
    """Rank 0's side: admits the other ranks.

    Args:
        listener: a listening socket.
        secret: the job's secret.
        world_size: number of ranks.
    """

    def __init__(self, listener: socket.socket, secret: bytes, world_size: int) -> None:
        self._listener, self._secret, self._size = listener, secret, world_size
        self._waiting: dict[socket.socket, _Connection] = {}
        self._admitted: dict[int, _Connection] = {}
        self._admitted_at = 0.0
        self._refused: dict[int, tuple[str, float]] = {}
        self._strangers: set[str] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def admit(self, timeout_s: float) -> dict[int, Applicant]:
        """Wait for all other ranks; return what they say of themselves.

        Args:
            timeout_s: seconds to wait.

        Raises:
            LaunchError: a rank does not know the secret, contradicts rank 0, or does not come. Ranks that have come
                raise it, too.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while len(self._admitted) < self._size - 1:
                self._give_up(deadline, timeout_s)
                for key, _ in self._selector.select(0.2):
                    self._receive(key.fileobj)  # type: ignore[arg-type]
                self._drop_silent()
        except LaunchError as error:
            self._tell({"refusal": str(error)})
            raise
        return {rank: connection.applicant for rank, connection in self._admitted.items() if connection.applicant}

    def welcome(self, message: dict[str, Any]) -> None:
        """Send a message to all admitted ranks, each with a proof that it comes from rank 0, and close.

        Args:
            message: values that JSON can write.
        """
        self._tell(message)
        self.close()

    def reached_address(self) -> str:
        """Return the address at which ranks of other hosts have reached this one; a loopback address if none has."""
        addresses = [str(connection.socket.getsockname()[0]) for connection in self._admitted.values()]
        return next((address for address in addresses if not address.startswith("127.")), addresses[0])

    def close(self) -> None:
        """Listen no more."""
        for connection in (*self._waiting.values(), *self._admitted.values()):
            connection.socket.close()
        self._selector.close()
        self._listener.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._admitted.values():
            self._send_proved(connection, message)

    def _send_proved(self, connection: _Connection, message: dict[str, Any]) -> None:
        rank = connection.applicant.rank if connection.applicant else 0
        proof = mac(self._secret, "welcome", rank, connection.nonce, connection.answer, message)
        _send(connection.socket, {**message, "proof": proof.hex()})

    def _give_up(self, deadline: float, timeout_s: float) -> None:
        """Raise LaunchError if waiting has no use any more."""
        now = time.monotonic()
        missing = [rank for rank in range(1, self._size) if rank not in self._admitted]
        if all(rank in self._refused for rank in missing):
            rank = missing[0]
            host, _ = self._refused[rank]
            latest = max(self._admitted_at, *(refused for _, refused in self._refused.values()))
            if now > latest + WRONG_SECRET_S or now > deadline:
                raise LaunchError(wrong_secret(rank, host))
        if now > deadline:
            shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
            raise LaunchError(
                f"rank{'s' if len(missing) > 1 else ''} {shown} of {self._size} did not come to the rendezvous within "
                f"{timeout_s:g} s; check that all nodes were started, or run `tutti doctor`"
            )

    def _receive(self, source: socket.socket) -> None:
        if source is self._listener:
            self._accept()
            return
        connection = self._waiting.get(source)
        if connection is None:  # an admitted rank has nothing to say: it has ended
            self._forget(source)
            return
        try:
            data = source.recv(_MAX_LINE_NBYTES)
        except OSError:
            data = b""
        connection.data += data
        if b"\n" in connection.data:
            self._judge(connection)
        elif not data or len(connection.data) > _MAX_LINE_NBYTES:
            self._drop(connection, stranger=bool(connection.data))

    def _accept(self) -> None:
        try:
            accepted, address = self._listener.accept()
        except OSError:
            return
        if len(self._waiting) > 4 * self._size + 64:  # a flood of strangers
            accepted.close()
            return
        connection = _Connection(accepted, str(address[0]), secrets.token_bytes(_NONCE_NBYTES), time.monotonic())
        accepted.settimeout(_STRANGER_S)
        if _send(accepted, {"tutti": 1, "challenge": connection.nonce.hex()}):
            self._waiting[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ)
        else:
            accepted.close()

    def _judge(self, connection: _Connection) -> None:
        """Admit or refuse a connection that has said who it is."""
        read = _line(connection.data)
        try:
            applicant = Applicant(rank=int(read["rank"]), world_size=int(read["world"]), host=str(read["host"])[:255])
            connection.answer, proof = bytes.fromhex(read["nonce"]), bytes.fromhex(read["proof"])
        except (KeyError, ValueError, TypeError, OverflowError):
            self._drop(connection, stranger=True)
            return
        expected = _proof(self._secret, applicant, connection.nonce, connection.answer)
        if not same(proof, expected) or len(connection.answer) < _NONCE_NBYTES:
            _send(connection.socket, {"refusal": "secret"})
            if 0 < applicant.rank < self._size:
                self._refused[applicant.rank] = (" ".join(plain_text(applicant.host).split()), time.monotonic())
            self._drop(connection, stranger=True)
            return
        self._refused.pop(applicant.rank, None)
        connection.applicant = applicant
        del self._waiting[connection.socket]
        try:
            self._check(applicant)
        except LaunchError as error:
            self._send_proved(connection, {"refusal": str(error)})
            connection.socket.close()
            raise
        self._admitted[applicant.rank] = connection
        self._admitted_at = time.monotonic()

    def _check(self, applicant: Applicant) -> None:
        """Raise LaunchError if a rank of this job contradicts rank 0."""
        if applicant.world_size != self._size or not 0 < applicant.rank < self._size:
            raise LaunchError(
                f"rank {applicant.rank} on {applicant.host} was started as one of {applicant.world_size} ranks, rank 0 "
                f"as one of {self._size}; start all nodes with the same number of nodes and of ranks for each"
            )
        first = self._admitted.get(applicant.rank)
        if first is not None and first.applicant is not None:
            raise LaunchError(
                f"rank {applicant.rank} was started twice, on {first.applicant.host} and on {applicant.host}; give "
                "each node its own --node-rank"
            )

    def _forget(self, source: socket.socket) -> None:
        rank = next(rank for rank, connection in self._admitted.items() if connection.socket is source)
        del self._admitted[rank]
        self._selector.unregister(source)
        source.close()

    def _drop(self, connection: _Connection, *, stranger: bool) -> None:
        self._waiting.pop(connection.socket, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if stranger and connection.address not in self._strangers and len(self._strangers) < 10:
            self._strangers.add(connection.address)
            sys.stderr.write(f"tutti: refused a process at {connection.address} that does not know the job's secret\n")

    def _drop_silent(self) -> None:
        """Drop connections that have not proved anything in time."""
        now = time.monotonic()
        for connection in [*self._waiting.values()]:
            if now > connection.since + _STRANGER_S:
                self._drop(connection, stranger=bool(connection.data))


def apply_for_admission(
    address: Callable[[], tuple[str, int]], secret: bytes, applicant: Applicant, timeout_s: float
) -> tuple[dict[str, Any], str, str]:
    """Prove the secret to rank 0, and wait until all ranks have done so.

    Args:
        address: returns host and port of rank 0's gate.
        secret: the job's secret.
        applicant: this rank.
        timeout_s: seconds to wait.

    Returns:
        (rank 0's message, the address at which rank 0 was reached, this host's address towards it).

    Raises:
        LaunchError: rank 0 does not answer, does not know the secret, or refuses this rank.
    """
    deadline = time.monotonic() + timeout_s
    reason = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address(), timeout=max(0.1, min(5.0, timeout_s))) as connection:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                message = _converse(connection, secret, applicant)
                if message is not None:
                    return message, str(connection.getpeername()[0]), str(connection.getsockname()[0])
                reason = "what listens there closed the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_RETRY_S)
    raise LaunchError(
        f"rank {applicant.rank} of {applicant.world_size} could not meet rank 0 within {timeout_s:g} s ({reason}); "
        "check that all ranks were started and that the address is reachable, or run `tutti doctor`"
    )


def _converse(connection: socket.socket, secret: bytes, applicant: Applicant) -> dict[str, Any] | None:
    """Return rank 0's message; None if it closed the connection before."""
    data = bytearray()
    if not _fill(connection, data):
        return None
    try:
        challenge = bytes.fromhex(_line(data)["challenge"])
    except (KeyError, ValueError, TypeError):
        raise LaunchError(
            "what listens at the rendezvous is not rank 0 of this run; choose another port (--rendezvous HOST:PORT, or "
            "MASTER_PORT)"
        ) from None
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    hello = {"rank": applicant.rank, "world": applicant.world_size, "host": applicant.host, "nonce": nonce.hex()}
    _send(connection, {**hello, "proof": _proof(secret, applicant, challenge, nonce).hex()})
    data.clear()
    if not _fill(connection, data):
        return None
    message = _line(data)
    code = message.pop("proof", None)
    expected = mac(secret, "welcome", applicant.rank, challenge, nonce, message)
    if not isinstance(code, str) or not same(code.encode("utf-8", "replace"), expected.hex().encode()):
        raise LaunchError(wrong_secret(applicant.rank, applicant.host))
    if "refusal" in message:
        raise LaunchError(str(message["refusal"]))
    return message


def _proof(secret: bytes, applicant: Applicant, challenge: bytes, nonce: bytes) -> bytes:
    return mac(secret, "hello", applicant.rank, applicant.world_size, applicant.host, challenge, nonce)


def _send(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Send one line of JSON; return whether the other side took it."""
    try:
        connection.sendall(json.dumps(message).encode("ascii") + b"\n")
    except OSError:
        return False
    return True


def _fill(connection: socket.socket, data: bytearray) -> bool:
    """Receive one line of limited length; return whether it came."""
    while b"\n" not in data and len(data) <= _MAX_LINE_NBYTES:
        received = connection.recv(4096)
        if not received:
            return False
        data += received
    return b"\n" in data


def _line(data: bytearray) -> dict[str, Any]:
    """Return the object that the first line is; an empty one if it is none."""
    try:
        read = json.loads(bytes(data).partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
