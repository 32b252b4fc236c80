"""tutti.toml: what a project says once about the clusters that it runs on.

[run]
on = "slurm"
nnodes = 2

[slurm]
partition = "gpu"
time = "2h"
setup = ["module load cuda"]

[ssh]
hosts = "node0:8,node1:8"

[kubernetes]
image = "registry.example.org/team/train:1"

[ray]
address = "http://head:8265"

[hardware]
gpus = { a100 = "A100-SXM4-80GB" }
links = "nvlink3,8*ib-hdr"
prices = { gpu = 2.1 }
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tutti.clusters.cluster_job import offered_schedulers
from tutti.config.count_range import node_counts
from tutti.errors import LaunchError

NAME = "tutti.toml"

_MOST_NBYTES = 1 << 20

Settings = TypeVar("Settings", bound=BaseModel)


class RunDefaults(BaseModel):
    """The table `[run]`.

    Attributes:
        on: what starts the ranks, as --on says.
        nnodes: number of nodes, or a range such as "1:4", where the command line has none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    on: str | None = None
    nnodes: int | str | None = None


class HardwareFacts(BaseModel):
    """The table `[hardware]`: what schedulers do not tell of their clusters, for `tutti plan --on`.

    Attributes:
        gpus: the device of the catalogue by the cluster's name of a kind of GPU.
        links: what joins devices of a node, and nodes, such as "nvlink3,8*ib-hdr"; or that by partition or kind of GPU.
        prices: of a device and hour, by partition, kind of GPU, or device of the catalogue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: dict[str, str] = {}
    links: str | dict[str, str] = ""
    prices: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}


class ClusterProfile(BaseModel):
    """A whole tutti.toml. Schedulers of other packages have tables of their names, too.

    Attributes:
        slurm: settings of Slurm's jobs; see `tutti.clusters.slurm_script.SlurmSettings`.
        ssh: settings of runs over ssh; see `tutti.clusters.ssh_hosts.SshSettings`.
        kubernetes: settings of jobs there; see `tutti.clusters.kubernetes_manifest.KubernetesSettings`.
        mpi: settings of runs by mpirun; see `tutti.clusters.mpi_hosts.MpiSettings`.
        ray: settings of jobs there; see `tutti.clusters.ray_task.RaySettings`.
        hardware: what the schedulers do not tell.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    run: RunDefaults = RunDefaults()
    slurm: dict[str, Any] = {}
    ssh: dict[str, Any] = {}
    kubernetes: dict[str, Any] = {}
    mpi: dict[str, Any] = {}
    ray: dict[str, Any] = {}
    hardware: HardwareFacts = HardwareFacts()

    def launcher(self, hosts: str | None) -> str | None:
        """Return what starts ranks where the command line does not say it; None for what `[run]` does not name either.

        Args:
            hosts: those of the command line, which are for ssh unless `[run]` names mpi.
        """
        return "ssh" if hosts is not None and self.run.on != "mpi" else self.run.on


def listed(value: Any) -> Any:
    """Return the parts of a text with commas, as --request gives it; other values as they are."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def mapped(value: Any) -> Any:
    """Return the pairs of a text such as "accelerator:a100,zone:b"; other values as they are."""
    return dict(part.partition(":")[::2] for part in listed(value)) if isinstance(value, str) else value


def read_cluster_settings(model: type[Settings], given: Mapping[str, Any], scheduler: str) -> Settings:
    """Return a scheduler's settings after a check.

    Args:
        model: what settings there are.
        given: from tutti.toml and --request.
        scheduler: its name in messages.

    Raises:
        LaunchError: one does not exist, or has no value that it may have.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            names = ", ".join(model.model_fields)
            raise LaunchError(f"{scheduler} has no setting {name!r}; settings are {names}") from None
        raise LaunchError(
            f"{scheduler} setting {name}: {first['msg']}; correct it in tutti.toml or --request"
        ) from None


def read_profile(directory: Path) -> ClusterProfile:
    """Return the nearest tutti.toml of a directory or those above it; an empty profile without one.

    Raises:
        LaunchError: it cannot be read, or has something that it may not have.
    """
    file = next((each / NAME for each in (directory, *directory.parents) if (each / NAME).is_file()), None)
    if file is None:
        return ClusterProfile()
    try:
        if file.stat().st_size > _MOST_NBYTES:
            raise LaunchError(f"{file} has more than 1 MiB; correct it")
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{file} cannot be read ({error}); correct it") from None
    try:
        profile = ClusterProfile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise LaunchError(f"{file}: {name}: {first['msg']}; correct it") from None
    try:
        node_counts(profile.run.nnodes)
    except LaunchError as error:
        raise LaunchError(f"{file}: run.nnodes: {error}") from None
    for table, settings in (profile.model_extra or {}).items():
        if not isinstance(settings, dict):
            raise LaunchError(f"{file}: {table} is no table; correct it")
        if not any(offer.name == table for offer in offered_schedulers()):
            tables = ", ".join(ClusterProfile.model_fields)
            raise LaunchError(
                f"{file}: {table}: there is no scheduler of this name; correct it, or install the package that has it "
                f"(tables of tutti's own are {tables})"
            )
    for settings in (profile.ssh, profile.mpi):
        hosts = settings.get("hosts")
        if isinstance(hosts, str) and os.path.isfile(beside := file.parent / hosts):
            settings["hosts"] = str(beside)
    return profile


def with_requests(settings: Mapping[str, Any], requests: Sequence[str]) -> dict[str, Any]:
    """Return settings with those of --request, which count more.

    Args:
        settings: of tutti.toml.
        requests: texts such as "partition=gpu,time=2h". A part without a name belongs to the value before it, as in
            "hosts=node0:8,node1:8".

    Raises:
        LaunchError: a text is no setting.
    """
    found = dict(settings)
    for text in requests:
        last = ""
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals and last and part.strip():
                found[last] += f",{part.strip()}"
                continue
            if not equals or not name.strip() or not value.strip():
                raise LaunchError(f"--request {text}: {part!r} is no setting; write such as partition=gpu,time=2h")
            last = name.strip()
            found[last] = value.strip()
    return found
