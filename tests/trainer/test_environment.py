"""The environments of launchers: tutti, torchrun, srun, mpirun, and none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.environment import (
    RENDEZVOUS_PORTS,
    RankEnvironment,
    read_launch_options,
    read_rank_environment,
    slurm_node_names,
)
from tutti.errors import LaunchError, TuttiError


def test_nothing_is_one_device() -> None:
    assert read_rank_environment({}) == RankEnvironment()


def test_torchrun() -> None:
    rank_environment = read_rank_environment(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "1234",
        }
    )
    assert (
        rank_environment.rank,
        rank_environment.world_size,
        rank_environment.local_rank,
        rank_environment.local_world_size,
    ) == (3, 4, 1, 2)
    assert rank_environment.rendezvous == "tcp://h:1234"
    assert rank_environment.launcher == "torchrun"


def test_tutti_says_where_to_meet() -> None:
    rank_environment = read_rank_environment({"RANK": "0", "WORLD_SIZE": "2", "TUTTI_RENDEZVOUS": "file:///x/store"})
    assert (rank_environment.rendezvous, rank_environment.launcher) == ("file:///x/store", "tutti")


@pytest.mark.parametrize(
    ("nodes", "host"), [("localhost", "localhost"), ("127.0.0.[1-3,7]", "127.0.0.1"), ("localhost,n2", "localhost")]
)
def test_srun_meets_at_the_first_node(nodes: str, host: str) -> None:
    environ = {
        "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    rank_environment = read_rank_environment(environ)
    assert (
        rank_environment.rank,
        rank_environment.world_size,
        rank_environment.local_world_size,
        rank_environment.launcher,
    ) == (2, 4, 2, "srun")
    address, _, port = rank_environment.rendezvous.rpartition(":")
    assert address == f"tcp://{host}"
    assert int(port) in RENDEZVOUS_PORTS
    assert read_rank_environment({**environ, "SLURM_PROCID": "0"}).rendezvous == rank_environment.rendezvous
    assert read_rank_environment({**environ, "SLURM_STEP_ID": "1"}).rendezvous != rank_environment.rendezvous


def test_no_job_meets_at_a_port_that_systems_hand_out() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    places = [
        read_rank_environment({**environ, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}) for job in range(1, 2001)
    ]
    ports = [int(rank_environment.rendezvous.rpartition(":")[2]) for rank_environment in places]
    assert max(ports) < 32768  # net.ipv4.ip_local_port_range of Linux begins there
    assert len(set(ports)) > 1800  # and jobs of one host seldom meet each other


def test_a_node_name_that_does_not_resolve_gives_way_to_the_launching_host() -> None:
    environ = {
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "no-such-host-[1-2]",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_JOB_ID": "1",
    }  # fmt: skip
    assert read_rank_environment(environ).rendezvous.startswith("tcp://127.0.0.1:")


def test_nodes_of_a_heterogeneous_job_are_in_the_order_of_its_components() -> None:
    """As Slurm 22.05 has them: lists are sorted by name, and nodes are numbered by component."""
    environ = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost", "SLURM_JOB_NODELIST_HET_GROUP_1": "a[1-2]",
        "SLURM_STEP_NODELIST": "a[1-2],localhost", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "5", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    first = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "localhost"}
    second = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURMD_NODENAME": "a1"}
    assert slurm_node_names(environ) == ("localhost", "a1", "a2")
    ranks = [read_rank_environment({**environ, **one}) for one in (first, second)]
    assert [rank.local_world_size for rank in ranks] == [1, 2]
    assert ranks[0].rendezvous == ranks[1].rendezvous
    assert ranks[0].rendezvous.startswith("tcp://localhost:"), "where rank 0 is"
    of_srun = {name: value for name, value in environ.items() if "GROUP" not in name}
    with pytest.raises(LaunchError, match="no MASTER_ADDR; export MASTER_ADDR"):
        read_rank_environment({**of_srun, **second})
    assert read_rank_environment({**of_srun, **second, "MASTER_ADDR": "localhost"}).rendezvous.startswith("tcp://local")


def test_an_sbatch_script_without_srun_is_one_device() -> None:
    assert read_rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}) == RankEnvironment()


def test_mpirun_on_one_host() -> None:
    environ = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
    }
    rank_environment = read_rank_environment(environ)
    assert (rank_environment.rank, rank_environment.world_size, rank_environment.launcher) == (1, 2, "mpirun")
    assert rank_environment.rendezvous.startswith("tcp://127.0.0.1:")


def test_mpirun_on_several_hosts_does_not_meet_at_loopback() -> None:
    """As Open MPI 4.1 sets them on two hosts: what is nearest to a rank is its own host's daemon."""
    environ = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items()
    }
    environ["PMIX_SERVER_URI2"] = "1983119360.2;tcp4://127.0.0.1:48565"
    with pytest.raises(LaunchError, match="no MASTER_ADDR"):
        read_rank_environment(environ)
    environ["OMPI_MCA_orte_hnp_uri"] = "1983119360.0;tcp://192.0.2.2:40517;tcp6://[fd00::2]:49511"
    assert read_rank_environment(environ).rendezvous.startswith("tcp://192.0.2.2:")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "rank 2 does not fit a world of 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "no MASTER_ADDR"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        read_rank_environment(environ)


TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TUTTI_RENDEZVOUS": "host:1"}, "cannot meet at 'host:1': give file:///PATH or tcp://HOST:PORT"),
        ({"TUTTI_RENDEZVOUS": "tcp://host"}, "cannot meet at"),
        ({"TUTTI_RENDEZVOUS": "tcp://:29500"}, "cannot meet at"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "a port of 1 to 65535"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "0"}, "a port of 1 to 65535"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "9" * 5000}, r"not a whole number|a port of 1 to 65535"),
        ({"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}, "local rank 7 does not fit the 2 ranks of this host"),
        ({"LOCAL_RANK": "-1"}, "local rank -1 does not fit"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_in_one_sentence(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence) as refused:
        read_rank_environment({**TWO, "MASTER_ADDR": "h", **environ})
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "\u00e9", "", "9" * 5000])
def test_a_time_out_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a number of seconds above 0") as refused:
        read_launch_options({"TUTTI_TIMEOUT_S": text})
    assert len(str(refused.value)) < 300


names = st.sampled_from(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TUTTI_RENDEZVOUS",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TUTTI_TIMEOUT_S",
        "TUTTI_MESH",
        "TUTTI_SYNC",
        "TUTTI_COMPRESS",
        "TUTTI_STEPS",
        "TUTTI_CHECKPOINT_EVERY",
    ]
)
texts = st.text(max_size=12) | st.integers(-3, 9).map(str) | st.sampled_from(("nan", "1e999", "9" * 5000, "a" * 5000))


@given(st.dictionaries(names, texts, max_size=8))
@settings(deadline=None, max_examples=200)
def test_any_environment_is_read_or_refused_in_a_sentence(environ: dict[str, str]) -> None:
    for read in (read_rank_environment, read_launch_options):
        refused: TuttiError | None = None
        try:
            read(environ)  # type: ignore[operator]
        except TuttiError as error:
            refused = error
        assert refused is None or (refused.exit_code == 2 and len(str(refused)) < 1500)
