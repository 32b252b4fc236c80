"""The benchmark of codecs: what is timed on a device stands beside what is timed on a core."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tutti.compression.one_bit import OneBit

ROOT = Path(__file__).resolve().parents[2]


def test_a_device_is_timed_with_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("bench_compress", ROOT / "benchmarks" / "compress.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)  # by its file: the tests have a `compress`, too
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    found = bench.on_device(OneBit(), torch.randn(4096), least_s=0.001)
    assert min(value for name, value in found.items() if name.endswith("_ns") and "aim" not in name) > 0
    alone = bench._one(OneBit(), 4, torch.randn(4096), bench.Sizes(numel=4096, repeats=1))
    assert found.keys() == alone.keys()
    header, rows = bench.rows({"summary": {"on a core": alone, "on a device": found}})
    assert [len(row) for row in rows] == [len(header)] * 2
    assert [row[3:6:2] for row in rows] == [["4", "2"], ["", ""]]
