"""The connection between node 0's `tutti run`, which decides for all nodes, and that of another node.

Lines of JSON over TCP. Before anything is believed, both sides prove the job's secret over fresh random numbers of both
(challenge and response, HMAC-SHA256); then each line carries a code over its number and its text. Both sides send a
beat each second, so that a node whose network is cut is noticed, too.
"""

import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from tutti.config.safe_text import plain_text
from tutti.errors import LaunchError
from tutti.job_secret import mac, same

BEAT_S = 1.0
"""Seconds between two signs of life."""

LOST_S = 10.0
"""Seconds without a sign of life after which the other side is lost."""

_STRANGER_S = 10.0
"""Seconds that a connection has to prove the secret."""

_MAX_LINE_NBYTES = 2**20
_MAX_STRANGER_NBYTES = 2**16
_CODE_LENGTH = 64
_RETRY_S = 0.1

Side = Literal["leader", "node"]
Message = dict[str, Any]


class NodeLink:
    """One side of a connection whose sides have proved the secret.

    Args:
        connection: the socket.
        key: the key of this connection.
        side: which side this is.
        rest: what has been received already.
    """

    def __init__(self, connection: socket.socket, key: bytes, side: Side, rest: bytes = b"") -> None:
        self._socket, self._key, self._side = connection, key, side
        self._data, self._sent, self._received = bytearray(rest), 0, 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self.address = str(connection.getpeername()[0])
        """The address of the other side."""
        connection.settimeout(LOST_S)

    def start(self, take: Callable[["NodeLink", Message | None], None]) -> None:
        """Receive messages in a thread, and send beats in another.

        Args:
            take: called with each message, and with None, once, when the other side is lost or has closed.
        """
        threading.Thread(target=self._receive, args=(take,), name="tutti node link", daemon=True).start()
        threading.Thread(target=self._beat, name="tutti node beat", daemon=True).start()

    def send(self, message: Message) -> bool:
        """Send a message; return whether the system took it."""
        with self._lock:
            text = json.dumps(message)
            code = self._code(self._side, self._sent, text)
            self._sent += 1
            try:
                self._socket.sendall(f"{code}{text}\n".encode("ascii"))
            except OSError:
                return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None if the other side is lost, has closed, or does not know the key."""
        other: Side = "node" if self._side == "leader" else "leader"
        while True:
            line = _next_line(self._socket, self._data)
            if line is None:
                return None
            code, text = line[:_CODE_LENGTH], line[_CODE_LENGTH:]
            if not same(code.encode("utf-8", "replace"), self._code(other, self._received, text).encode()):
                return None
            self._received += 1
            message = _object(text)
            if message != {}:  # a beat
                return message

    def close(self) -> None:
        """Close the connection: the other side takes this one for lost."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code(self, side: Side, number: int, text: str) -> str:
        return mac(self._key, "node line", side, number, text).hex()

    def _receive(self, take: Callable[["NodeLink", Message | None], None]) -> None:
        while (message := self.receive()) is not None:
            take(self, message)
        self.close()
        take(self, None)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S) and self.send({}):
            pass


def admit(connection: socket.socket, secret: bytes) -> tuple[NodeLink, Message] | None:
    """Let a node prove the secret, and prove it to the node.

    Args:
        connection: a connection that has just been accepted.
        secret: the job's secret.

    Returns:
        The link, and what the node says of itself; None for a stranger, whose connection is closed.
    """
    connection.settimeout(_STRANGER_S)
    challenge = secrets.token_hex(16)
    data = bytearray()
    try:
        connection.sendall(json.dumps({"tutti nodes": challenge}).encode() + b"\n")
        until = time.monotonic() + _STRANGER_S
        line = _object(_next_line(connection, data, most=_MAX_STRANGER_NBYTES, until=until) or "")
        nonce, hello, proof = line.get("nonce"), line.get("hello"), line.get("proof")
        known = isinstance(nonce, str) and isinstance(hello, dict) and isinstance(proof, str)
        if known and same(str(proof).encode("utf-8", "replace"), _proof(secret, challenge, nonce, hello).encode()):
            return NodeLink(connection, _key(secret, challenge, nonce), "leader", bytes(data)), dict(hello or {})
        connection.sendall(b'{"refusal": "secret"}\n')
    except (OSError, ValueError, RecursionError):
        pass
    connection.close()
    return None


def join(
    address: tuple[str, int], secret: bytes, hello: Message, timeout_s: float, stopped: Callable[[], bool]
) -> tuple[NodeLink, Message]:
    """Connect to node 0, and prove the secret to each other.

    Args:
        address: where node 0 listens.
        secret: the job's secret.
        hello: what this node says of itself.
        timeout_s: seconds to wait for node 0.
        stopped: asked while waiting; true ends it.

    Returns:
        The link, and node 0's first message.

    Raises:
        LaunchError: node 0 did not come, does not know the secret, or refuses this node.
        KeyboardInterrupt: it was stopped.
    """
    deadline, reason = time.monotonic() + timeout_s, "nobody answered"
    while time.monotonic() < deadline and not stopped():
        try:
            with socket.create_connection(address, timeout=_STRANGER_S) as connection:
                link = _converse(connection.dup(), secret, hello)
            first = link.receive() if link is not None else None
            if link is None or first is None:
                reason = "what listens there closed the connection"
            elif "refusal" in first:
                link.close()
                raise LaunchError(plain_text(str(first["refusal"])))
            else:
                return link, first
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(_RETRY_S)
    if stopped():
        raise KeyboardInterrupt
    host, port = address
    raise LaunchError(
        f"{_named(hello)} could not meet node 0 at {host}:{port} within {timeout_s:g} s "
        f"({reason}); start `tutti run` with the same --rendezvous and --max-restarts there, or wait longer (--timeout)"
    )


def _converse(connection: socket.socket, secret: bytes, hello: Message) -> NodeLink | None:
    connection.settimeout(_STRANGER_S)
    data = bytearray()
    line = _next_line(connection, data)
    if line is None:
        connection.close()
        return None
    challenge = _object(line).get("tutti nodes")
    if not isinstance(challenge, str):
        connection.close()
        raise LaunchError(
            "what listens at the rendezvous is not a `tutti run` that may restart its ranks; give node 0 the same "
            "--max-restarts, or choose another port (--rendezvous HOST:PORT)"
        )
    nonce = secrets.token_hex(16)
    proved = {"nonce": nonce, "hello": hello, "proof": _proof(secret, challenge, nonce, hello)}
    connection.sendall(json.dumps(proved).encode() + b"\n")
    answer = _next_line(connection, data)
    if answer is not None and _object(answer).get("refusal") == "secret":
        connection.close()
        raise LaunchError(
            f"{_named(hello)} does not know the job's secret, so it may not join; give all "
            "hosts the same one: copy ~/.config/tutti/secret from node 0's host, or export the same TUTTI_SECRET "
            "everywhere"
        )
    rest = b"" if answer is None else f"{answer}\n".encode() + bytes(data)
    return NodeLink(connection, _key(secret, challenge, nonce), "node", rest)


def _named(hello: Message) -> str:
    number = "" if hello["node"] is None else f"{hello['node']} "
    return f"node {number}on {hello['host']}"


def _proof(secret: bytes, challenge: str, nonce: Any, hello: Any) -> str:
    return mac(secret, "node hello", challenge, nonce, hello).hex()


def _key(secret: bytes, challenge: str, nonce: Any) -> bytes:
    return mac(secret, "node link", challenge, nonce)


def _next_line(
    connection: socket.socket, data: bytearray, *, most: int = _MAX_LINE_NBYTES, until: float = math.inf
) -> str | None:
    """Take the next line out of what has been received; None if the connection ends, or it is too long or too late."""
    while b"\n" not in data:
        if len(data) > most or time.monotonic() > until:
            return None
        try:
            received = connection.recv(65536)
        except OSError:
            return None
        if not received:
            return None
        data += received
    line, _, rest = bytes(data).partition(b"\n")
    data[:] = rest
    return line.decode("utf-8", "replace")


def _object(text: str) -> Message:
    """Return the object that a line is; an empty one if it is none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
