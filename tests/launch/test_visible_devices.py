"""What CUDA_VISIBLE_DEVICES and its relatives mean, on recorded outputs of `nvidia-smi -L`."""

from pathlib import Path

import pytest

from tutti.errors import LaunchError
from tutti.launch import doctor_checks, launch_environment, local_launcher
from tutti.launch.launcher import LaunchSpec
from tutti.launch.visible_devices import check_others, describe_devices, devices_of, parse_gpus, variables_of_rank

RECORDED = Path(__file__).parent / "topologies"
H100 = (RECORDED / "mig_h100.txt").read_text(encoding="utf-8")
A100 = (RECORDED / "mig_a100_r460.txt").read_text(encoding="utf-8")
PLAIN = "".join(f"GPU {n}: NVIDIA A100-SXM4-80GB (UUID: GPU-{n}a{n}b-77)\n" for n in range(4))
FIRST, SECOND = "MIG-7839bf6f-ba33-59f0-89eb-01c8d8c4134d", "MIG-433a63e2-53a4-58c0-9b8d-a4dba3eb8f36"


def numbers(value: str | None) -> list[int]:
    return [device.gpu for device in devices_of(value, parse_gpus(PLAIN))]


def test_recorded_outputs() -> None:
    (gpu, *instances) = parse_gpus(H100)[0]
    assert (gpu.name, gpu.uuid) == ("NVIDIA H100 NVL", "GPU-81495ec7-da36-8ea5-9f7d-5804aa3fef20")
    assert [device.name for device in instances] == ["NVIDIA H100 NVL 2g.24gb"] * 3 + ["NVIDIA H100 NVL 1g.12gb"]
    assert instances[1].uuid == SECOND
    assert parse_gpus(A100)[0][3].uuid == "MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/9/0"


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("GPU-2a2b-77,GPU-0a", [2, 0]),
    ],
)
def test_values_that_cuda_takes(value: str | None, gpus: list[int]) -> None:
    assert numbers(value) == gpus


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0,7,1", "no GPU 7, and CUDA drops it and every later entry .* choose among 0, 1, 2, 3"),
        ("0,-1,1", "entry -1 is no number"),
        ("0,,1", r"entry \(empty\) is no number"),
        ("1,0,1", "entry 1 repeats a device, and CUDA then shows none"),
        ("GPU-", "several devices begin with GPU-"),
        ("GPU-9", "no GPU GPU-9"),
        ("0,GPU-1a1b-77", "GPU UUIDs and numbers are mixed"),
        ("MIG-x", "no instance MIG-x"),
        ("MIG-x,GPU-0a", "GPU UUIDs and MIG instances are mixed"),
    ],
)
def test_values_of_which_cuda_drops_something(value: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        numbers(value)


@pytest.mark.parametrize("value", [None, "0", "GPU-8149", f"{FIRST},{SECOND}"])
def test_each_rank_gets_an_instance_of_its_own(value: str | None) -> None:
    devices = devices_of(value, parse_gpus(H100))
    given = [variables_of_rank(rank, devices) for rank in range(2)]
    assert given == [{"CUDA_VISIBLE_DEVICES": FIRST}, {"CUDA_VISIBLE_DEVICES": SECOND}]
    assert variables_of_rank(1, devices_of("1,3", parse_gpus(PLAIN))) == {}


def test_the_mapping_is_told() -> None:
    devices = devices_of("3,1", parse_gpus(PLAIN))
    assert describe_devices(2, "3,1", devices) == (
        "CUDA_VISIBLE_DEVICES=3,1; rank 0: cuda:0 is GPU 3, NVIDIA A100-SXM4-80GB (GPU-3a3b-77); "
        "rank 1: cuda:1 is GPU 1, NVIDIA A100-SXM4-80GB (GPU-1a1b-77)"
    )
    assert "3 more for other ranks" in describe_devices(1, None, devices_of(None, parse_gpus(H100)))
    assert "ranks compute on the CPU" in describe_devices(2, "", [])


def test_the_doctor_names_what_cuda_would_drop() -> None:
    finding = doctor_checks.visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "0,9"}, lambda *_: PLAIN)
    assert not finding.ok
    assert finding.fix == "choose among 0, 1, 2, 3"
    assert doctor_checks.visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "0,2"}, lambda *_: PLAIN).ok
    two_models = PLAIN.replace("0: NVIDIA A100", "0: NVIDIA T400")
    order = doctor_checks.visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "0"}, lambda *_: two_models)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in order.fix
    known = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert doctor_checks.visible_gpus(1, known, lambda *_: two_models).ok
    assert doctor_checks.visible_gpus(1, {"ZE_AFFINITY_MASK": "0.1"}, lambda *_: None).found == "ZE_AFFINITY_MASK=0.1"


def amd_host(root: Path, gpus: int) -> Path:
    for number in range(gpus + 1):  # the first node is the processor
        folder = root / f"class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{number * 1000}\n")
    return root


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,4"}, "GPU 4 is not among the 4 .* choose from 0 to 3"),
        ({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "2"}, "GPU 2 is not among the 2 that ROCR_VISIBLE"),
        ({"ROCR_VISIBLE_DEVICES": "1,1"}, "entry 1 repeats a device"),
        ({"ZE_AFFINITY_MASK": "0,x"}, "entry x is no number"),
    ],
)
def test_variables_of_other_vendors(tmp_path: Path, values: dict[str, str], said: str) -> None:
    root = amd_host(tmp_path, 4)
    with pytest.raises(LaunchError, match=said):
        check_others(values, root)
    fine = {"ROCR_VISIBLE_DEVICES": "1,GPU-3f", "HIP_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0.1,1"}
    assert check_others(fine, root).startswith("ROCR_VISIBLE_DEVICES=1,GPU-3f, HIP")


def test_the_launcher_gives_instances_and_refuses_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def fork(function: object, task: local_launcher.rank_main.RankTask) -> None:
        started.append(task.environment)

    monkeypatch.setattr(local_launcher, "warm", lambda threads: None)
    monkeypatch.setattr(local_launcher, "forked", fork)
    monkeypatch.setattr(local_launcher, "devices_here", lambda values: devices_of(values.get(NAME), parse_gpus(H100)))
    monkeypatch.setenv(NAME, f"{SECOND},{FIRST}")
    spec = LaunchSpec(target="train.py", folder=tmp_path, ranks_per_node=(2,))
    local_launcher.LocalLauncher().start(spec)
    assert [environment[NAME] for environment in started] == [SECOND, FIRST]
    monkeypatch.setenv(NAME, "0,1")
    with pytest.raises(LaunchError, match="no GPU 1"):
        local_launcher.LocalLauncher().start(spec)
    assert len(started) == 2
    assert launch_environment.device_variables()[NAME] == "0,1"


NAME = "CUDA_VISIBLE_DEVICES"
