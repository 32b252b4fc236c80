"""Patches for the tests of the BigEarthNet example, and a TIFF writer that shares no code with it."""

import struct
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "examples" / "bigearthnet"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))


def make_pack(folder: Path, patches: int, seed: int = 0) -> Path:
    """Generate patches in `folder`, pack them, and return the pack."""
    from generate import generate
    from pack import pack

    generate(folder, patches, seed)
    pack(folder, folder / "packed", splits=folder / "splits")
    return folder / "packed"


def write_big_endian_tiff(
    path: Path, values: np.ndarray, rows_per_strip: int, corner: tuple[float, float], width_m: float
) -> None:
    """Write an uncompressed TIFF 6.0 by hand: big-endian, several strips, with a GeoTIFF's scale and tie point."""
    rows, columns = values.shape
    strips = [values[row : row + rows_per_strip].astype(">u2").tobytes() for row in range(0, rows, rows_per_strip)]
    count = len(strips)
    tags = 11
    arrays_at = 8 + 2 + 12 * tags + 4
    place_at = arrays_at + 8 * count
    pixels_at = place_at + 8 * 9
    offsets = [pixels_at + sum(map(len, strips[:index])) for index in range(count)]

    def entry(tag: int, kind: int, number: int, value: int) -> bytes:
        packed = struct.pack(">HH", value, 0) if kind == 3 and number == 1 else struct.pack(">I", value)
        return struct.pack(">HHI", tag, kind, number) + packed

    first_offset, first_size = (arrays_at, arrays_at + 4 * count) if count > 1 else (offsets[0], len(strips[0]))
    entries = [
        entry(256, 3, 1, columns),
        entry(257, 3, 1, rows),
        entry(258, 3, 1, 16),
        entry(259, 3, 1, 1),
        entry(262, 3, 1, 1),
        entry(273, 4, count, first_offset),
        entry(277, 3, 1, 1),
        entry(278, 4, 1, rows_per_strip),
        entry(279, 4, count, first_size),
        entry(33550, 12, 3, place_at),
        entry(33922, 12, 6, place_at + 24),
    ]
    sizes = [len(strip) for strip in strips]
    arrays = struct.pack(f">{2 * count}I", *offsets, *sizes)
    arrays += struct.pack(">9d", width_m, width_m, 0, 0, 0, 0, *corner, 0)
    head = struct.pack(">2sHI", b"MM", 42, 8) + struct.pack(">H", tags) + b"".join(entries) + struct.pack(">I", 0)
    path.write_bytes(head + arrays + b"".join(strips))
