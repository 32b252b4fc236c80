"""Text that every machine has without a download, with its hash.

Every byte is a token (256 of them). The data set cuts the text into windows and asks for the next byte.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tutti.errors import DataError

LICENCES = Path("/usr/share/common-licenses")
"""Where Debian and Ubuntu store the texts of free licences (package base-files)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes and their origin.

    Attributes:
        content: the bytes.
        sha256: hash of `content`.
        description: where they come from.
    """

    content: bytes
    sha256: str
    description: str


def licence_text(folder: Path = LICENCES) -> Text:
    """Return the licence texts of this system in order of name, each file once (links to another file are left out).

    Where there are none, the sources of the standard library take their place, and the description says so.
    """
    files = sorted({path.resolve() for path in folder.glob("*") if path.is_file()})
    if not files:
        fallback = standard_library_text()
        return Text(
            content=fallback.content,
            sha256=fallback.sha256,
            description=f"{fallback.description} (no licence texts in {folder})",
        )
    return _joined(files, f"{len(files)} licence texts of {folder}")


def standard_library_text(nbytes: int = 1_000_000) -> Text:
    """Return the first `nbytes` of Python's standard library: the sources of its modules by name, without packages.

    Raises:
        DataError: this Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(f"{folder} has no sources of the standard library; use a Python that ships them")
    version = sysconfig.get_python_version()
    return _joined(files, f"Python {version} standard library sources", nbytes)


def split_by_position(content: bytes, fraction: float = 0.9) -> tuple[bytes, bytes]:
    """Split a text in two.

    Args:
        content: the text.
        fraction: the part to train on, from the start; the rest is to test on.

    Raises:
        DataError: one part is empty.
    """
    cut = int(len(content) * fraction)
    if not 0 < cut < len(content):
        raise DataError(
            f"{len(content)} bytes cannot be split at {fraction}: one part is empty; give a fraction between 0 and 1"
        )
    return content[:cut], content[cut:]


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: sample i is (inputs, target), both (length,) int64, where the target is one byte later.

    Windows begin every `stride` bytes (default: `length`, so that every byte is predicted at most once). A shorter rest
    at the end is left out.
    """

    def __init__(self, content: bytes, length: int, stride: int | None = None) -> None:
        self.length = length
        self.stride = length if stride is None else stride
        if self.length < 1 or self.stride < 1:
            raise DataError(f"length = {self.length}, stride = {self.stride}; give numbers of 1 or more")
        if len(content) <= length:
            raise DataError(
                f"a window of {length} bytes and the byte after it need {length + 1} bytes of text, not "
                f"{len(content)}; give a shorter length or more text"
            )
        self.content = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.content) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * self.stride
        window = self.content[begin : begin + self.length + 1].long()
        return window[:-1], window[1:]


def _joined(files: Iterable[Path], description: str, nbytes: int | None = None) -> Text:
    content = bytearray()
    for path in files:
        content += path.read_bytes()
        if nbytes is not None and len(content) >= nbytes:
            del content[nbytes:]
            break
    joined = bytes(content)
    return Text(
        content=joined,
        sha256=hashlib.sha256(joined).hexdigest(),
        description=f"{description}, {len(joined)} bytes",
    )
