"""From `tutti run --on slurm` to the first step on two nodes, beside `srun hostname` and the ranks' own start.

A private Slurm of two nodes on this machine takes all jobs. In turns: `tutti run --on slurm` of a small training; a
batch job whose `srun` starts `hostname` once on each node; `tutti run` of as many ranks on one host; and the commands
of two nodes given at once. The excess is the first time less the second and the third. Both nodes are this machine, so
two launchers load torch on its cores at once; the excess beyond two nodes leaves that out, with the fourth time in the
place of the third. All clocks are those of one host.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.slurm_rig import missing, own_slurm
from record import spread
from startup import JOB

TUTTI = (sys.executable, "-m", "tutti.cli.main", "run")

BATCH = """#!/bin/bash
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 bash -c 'hostname; date +%s.%N > {folder}/node-$SLURM_PROCID'
"""

SYSTEMS = ("tutti run --on slurm", "sbatch and srun hostname", "tutti run on one host", "tutti run on two nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Each of the three `repeats` times; `ranks` ranks on `nodes` nodes."""

    ranks: int = 4
    nodes: int = 2
    repeats: int = 5
    timeout_s: int = 240


QUICK = Sizes(repeats=1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Time all three in turns. Returns {"samples": {name: [seconds]}, "parts": {..}, "summary": {..}}."""
    reason = missing()
    if reason is not None:
        raise SystemExit(f"cluster_start: {reason}")
    samples: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    parts: dict[str, list[float]] = {"submitted": [], "on the nodes": [], "first step": []}
    with own_slurm() as environment:
        base = Path(environment["XDG_STATE_HOME"])
        for number in range(sizes.repeats):
            for name, took in zip(SYSTEMS, (_on_slurm, _hostname, _on_one_host, _on_two_nodes), strict=True):
                folder = base / f"{number}-{SYSTEMS.index(name)}"
                folder.mkdir()
                times = took(sizes, folder, environment)
                samples[name].append(times[-1])
                for part, seconds in zip(parts, times, strict=False) if len(times) > 1 else ():
                    parts[part].append(seconds)
    return {"samples": samples, "parts": parts, "summary": _summary(samples, parts)}


def _summary(samples: Mapping[str, list[float]], parts: Mapping[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ours, slurms, ranks, nodes = (medians[name] for name in SYSTEMS)
    return {
        **{name: {"median_s": medians[name], "spread": spread(values)} for name, values in samples.items()},
        "excess_s": ours - slurms - ranks,
        "excess_beyond_two_nodes_s": ours - slurms - nodes,
        "median_s_until": {name: statistics.median(values) for name, values in parts.items()},
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table."""
    summary = result["summary"]
    table = [[name, f"{summary[name]['median_s']:.2f}", f"{summary[name]['spread']:.0%}"] for name in SYSTEMS]
    table += [[f"  until {name}", f"{seconds:.2f}", ""] for name, seconds in summary["median_s_until"].items()]
    table += [["excess", f"{summary['excess_s']:.2f}", ""]]
    table += [["excess beyond two nodes", f"{summary['excess_beyond_two_nodes_s']:.2f}", ""]]
    return ["what", "median s", "spread"], table


def _on_slurm(sizes: Sizes, folder: Path, cluster: Mapping[str, str]) -> list[float]:
    """Return the seconds until the job was submitted, until its command ran on all nodes, and until the first step."""
    each = sizes.ranks // sizes.nodes
    (folder / "tutti.toml").write_text(f"[slurm]\nsetup = ['date +%s.%N > {folder}/node-$SLURM_PROCID']\n")
    words = ("--on", "slurm", "--nnodes", str(sizes.nodes), "--nproc", str(each))
    started = _train(sizes, folder, cluster, words)
    submitted = (folder / "run/job.json").stat().st_mtime
    return [submitted - started, _last(folder, "node-*") - started, _last(folder, "[0-9]*") - started]


def _hostname(sizes: Sizes, folder: Path, cluster: Mapping[str, str]) -> list[float]:
    """Return the seconds until every node has printed its name."""
    script = BATCH.format(nodes=sizes.nodes, folder=folder)
    words = ["sbatch", "--wait", f"--nodes={sizes.nodes}", "--ntasks-per-node=1", f"--output={folder}/out"]
    words.append(f"--cpus-per-task={sizes.ranks // sizes.nodes}")
    started = time.time()
    subprocess.run(
        words, input=script, text=True, env={**os.environ, **cluster}, check=True, capture_output=True,
        timeout=sizes.timeout_s,
    )  # fmt: skip
    return [_last(folder, "node-*") - started]


def _on_one_host(sizes: Sizes, folder: Path, cluster: Mapping[str, str]) -> list[float]:
    """Return the seconds until the last rank's first step."""
    started = _train(sizes, folder, cluster, ("--nproc", str(sizes.ranks)))
    return [_last(folder, "[0-9]*") - started]


def _on_two_nodes(sizes: Sizes, folder: Path, cluster: Mapping[str, str]) -> list[float]:
    """Return the seconds until the last rank's first step, where the command of each node is given at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    each, others = str(sizes.ranks // sizes.nodes), []
    words = ("--nproc", each, "--nnodes", str(sizes.nodes), "--rendezvous", f"127.0.0.1:{port}", "--one-screen")
    environment = {**os.environ, **cluster, "OMP_NUM_THREADS": "1", "STARTUP_FOLDER": str(folder)}
    (folder / "job.py").write_text(JOB)
    for node in range(1, sizes.nodes):
        command = (*TUTTI, *words, "--node-rank", str(node), "--no-predict", "--folder", str(folder / "run"), "job.py")
        others.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
    try:
        started = _train(sizes, folder, cluster, (*words, "--node-rank", "0"))
    finally:
        for other in others:
            other.wait(sizes.timeout_s)
    return [_last(folder, "[0-9]*") - started]


def _train(sizes: Sizes, folder: Path, cluster: Mapping[str, str], words: tuple[str, ...]) -> float:
    """Run a small training to its end, and return when the command was started."""
    (folder / "job.py").write_text(JOB)
    environment = {**os.environ, **cluster, "OMP_NUM_THREADS": "1", "STARTUP_FOLDER": str(folder)}
    command = (*TUTTI, *words, "--no-predict", "--folder", str(folder / "run"), "job.py")
    started = time.time()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=sizes.timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return started


def _last(folder: Path, pattern: str) -> float:
    """Return the latest of the times that files of a folder name."""
    return max(float(file.read_text()) for file in folder.glob(pattern) if file.is_file())
