"""What works on any accelerator asks torch for it, and takes no device for CUDA's: on the device of the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fakegpu
from fakegpu import needs_fakegpu
from tutti.parallel.mixed_precision import set_float32_precision
from tutti.profile.probe.compute_rates import supported
from tutti.trainer import job_context

SCRIPT = """
import json, sys
from pathlib import Path

import torch

import fakegpu

device = torch.device(fakegpu.load().type, 0)

from tutti.profile import meta_device
from tutti.profile.probe import rank_probe
from tutti.profile.probe.compute_rates import supported
from tutti.trainer.step_profile import StepProfile

facts = rank_probe._facts(device)
steps = StepProfile(1, Path(sys.argv[1]), 0, device)
for _ in range(5):
    torch.ones(64, device=device).mul_(2)
    steps.stepped()
empty = torch.ones(2)
print(json.dumps({
    "kind": facts.kind, "device": facts.device, "visible": facts.visible,
    "memory": facts.device_memory_nbytes == facts.host.memory_nbytes,
    "dtypes": [name for name in ("float32", "bfloat16", "tf32", "float8") if supported(name, device)],
    "outcome": steps.outcome,
    "stays": [meta_device._stays(torch.Tensor.to, (empty, name), {}) for name in ("cuda:1", "fakegpu", "cpu", "xpu")],
}))
"""


@needs_fakegpu
def test_the_probe_and_the_profiler_know_a_device_that_is_not_cudas(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(fakegpu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "profile")],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told == {
        "kind": "cuda",
        "device": "fakegpu",
        "visible": 1,
        "memory": True,
        "dtypes": ["float32", "bfloat16"],
        "outcome": "1 steps",
        "stays": [True, False, False, True],
    }
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "rank-0.trace.json.gz", "rank-0.time.txt", "rank-0.memory.txt",
    }  # fmt: skip


def test_rocm_is_not_taken_for_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's torch says "cuda", and has a capability of its own."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    with pytest.raises(Exception, match="precision = tf32 needs an NVIDIA GPU"):
        set_float32_precision("tf32", device)
    assert job_context._gpu_uuid(device) is None
    assert supported("bfloat16", device)
