"""Record what the real frameworks compute: writes coming_from_reference.json, beside this file.

In an environment with torch, accelerate, lightning, transformers, deepspeed and scikit-learn, on CPUs:

    for name in ddp accelerate hf_trainer hf_trainer_default deepspeed; do
        torchrun --nproc-per-node 2 tests/examples/coming_from_reference.py $name
    done
    torchrun --nproc-per-node 1 tests/examples/coming_from_reference.py lightning  # on several, it always shuffles

The programs of examples/coming_from run as they are, in float64. Recorded are the loss of every step (the mean over
processes, the sum over accumulation steps), sums over each trained tensor, and what is printed.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "coming_from"
REFERENCE = HERE / "coming_from_reference.json"
ARGUMENTS = {"lightning": ["--batch-size", "64"], "deepspeed": ["--deepspeed_config", str(EXAMPLES / "ds_config.json")]}
PACKAGES = {"ddp": "torch", "hf_trainer": "transformers", "hf_trainer_default": "transformers"}


def load_program(name: str) -> Any:
    """Import examples/coming_from/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sums_of(state: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Of each tensor: the sum of its values, and their sum weighted with cosines, which tells their order."""
    sums = {}
    for name, tensor in sorted(state.items()):
        flat = tensor.detach().to("cpu", torch.float64).flatten()
        sums[name] = [flat.sum().item(), (flat * torch.arange(len(flat), dtype=torch.float64).cos()).sum().item()]
    return sums


def run_theirs(name: str) -> dict[str, Any]:
    """Run a framework's program on this process; returns its step losses, its weights' sums and its last line."""
    torch.set_default_dtype(torch.float64)
    losses: list[float] = []
    backward = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.item())
        backward(loss, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]
    program = load_program(f"{name.removesuffix('_default')}_before")
    if name == "hf_trainer_default":
        program.BertForSequenceClassification.accepts_loss_kwargs = property(lambda model: True, lambda model, v: None)
    printed = io.StringIO()
    sys.argv = [name, *ARGUMENTS.get(name, [])]
    try:
        with contextlib.redirect_stdout(printed):
            program.main()
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    lines = re.findall(r"^(?:epoch|val loss|best|loss|\d ranks).*", printed.getvalue(), re.MULTILINE)
    return {"losses": losses, "lines": lines}


def weights(name: str) -> dict[str, torch.Tensor]:
    """Read the weights that a framework's program has written into this folder."""
    if name == "ddp":
        return torch.load("model.pt")
    if name == "lightning":
        return torch.load("model.ckpt", weights_only=False)["state_dict"]
    if name == "deepspeed":
        return torch.load("checkpoints/global_step48/mp_rank_00_model_states.pt", weights_only=False)["module"]
    from safetensors.torch import load_file

    return load_file("model/model.safetensors")


def main() -> None:
    name, rank, world_size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    folder = Path(tempfile.gettempdir()) / f"coming-from-{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    arguments = [*sys.argv]
    mine = run_theirs(name)
    sys.argv = arguments
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(mine["losses"]))
    partial.rename(folder / f"{rank}.json")
    if rank:
        return
    files = [folder / f"{number}.json" for number in range(world_size)]
    while not all(file.exists() for file in files):
        time.sleep(0.1)
    means = [
        math.fsum(losses) / world_size for losses in zip(*(json.loads(file.read_text()) for file in files), strict=True)
    ]
    package = PACKAGES.get(name, name)
    entry = {
        "versions": {package: version(package), "torch": version("torch")},
        "processes": world_size,
        "losses": [math.fsum(means[start : start + 2]) for start in range(0, len(means), 2)],
        "lines": mine["lines"],
        "weights": sums_of(weights(name)),
    }
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else REFERENCE
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, name: entry}, indent=1, sort_keys=True) + "\n")
    print(name, len(entry["losses"]), entry["losses"][:2], entry["losses"][-1], entry["lines"])


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # torch may abort a process that ends with a group
