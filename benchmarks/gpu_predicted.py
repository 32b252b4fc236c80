"""Predicted step times and memory beside measured ones; `gpu_prediction` has the models."""

import importlib
import importlib.util
from collections.abc import Iterator

from gpu_run import PartRun, Row, skipped


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each model."""
    if importlib.util.find_spec("gpu_prediction") is None:
        yield skipped("prediction", "benchmarks/gpu_prediction.py is not there")
        return
    for row in importlib.import_module("gpu_prediction").predict_part(run.device, run.left_s()):
        yield {"what": f"prediction, {row.get('model', row.get('name', '?'))}", **row}
