"""The output of `tutti plan --on`: what each pool of a cluster gives, and how to run the best plan there."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from tutti.cli.prediction_view import standard_output
from tutti.commands.plan_trials import words_in_full
from tutti.cost_model.cost_notes import seconds
from tutti.planner.objectives import duration, money

if TYPE_CHECKING:
    from tutti.commands.plan_options import PlanOptions
    from tutti.commands.planned import Planned, PoolPlan


def show_pools(planned: "Planned", options: "PlanOptions") -> None:
    """Print a table of the pools, the best first, what is not known of them, and the command for the best."""
    from tutti.reporting.fitted_table import FittedTable

    out, rows = standard_output(), [(pool, _cells(pool, planned)) for pool in planned.pools]
    shown = FittedTable(title=f"What {options.on} has, the best first", title_justify="left")
    shown.below = ("remarks",)
    names = ("partition", "nodes", "idle", "best plan", "on", "step", "training", "limit", "cost", "remarks")
    columns = [at for at, name in enumerate(names) if any(cells[at] for _, cells in rows)]
    for at in columns:
        text = names[at] in ("partition", "nodes", "best plan", "on", "remarks")
        shown.add_column(names[at], overflow="fold", justify="left" if text else "right", no_wrap=not text)
    for number, (pool, cells) in enumerate(rows):
        style = "bold green" if number == 0 else None if pool.plan is not None else "red"
        shown.add_row(*(Text(cells[at]) for at in columns), style=style)
    out.print(shown)
    command = run_there(planned.pools[0], options)
    out.print(f"run it there: {command}", markup=False, soft_wrap=True)
    if options.output is None:
        out.print("(--output plan.json writes the plan)", style="dim")


def _cells(pool: "PoolPlan", planned: "Planned") -> list[str]:
    remarks = [pool.reason] if pool.reason else []
    remarks += [f"{name} is not counted: {why}" for name, why in list(pool.absent.items())[:3]]
    remarks += [f"{len(pool.absent) - 3} more are not counted"] if len(pool.absent) > 3 else []
    if pool.time_s is not None and pool.time_limit_s is not None and pool.time_s > pool.time_limit_s:
        jobs = -(-pool.time_s // pool.time_limit_s)
        remarks.append(f"longer than one job: it stops with a checkpoint and goes on, about {jobs:.0f} times")
    name = pool.pool or "all"
    idle = str(pool.idle) if pool.node_names and pool.idle is not None else ""
    if pool.plan is None:
        return [name, pool.nodes_are, idle, "none", "", "", "", _limit(pool), "", "; ".join([*remarks, *pool.notes])]
    count = len(pool.nproc)
    per_node = ",".join(map(str, dict.fromkeys(pool.nproc))) if len(set(pool.nproc)) > 1 else str(pool.nproc[0])
    cost = "" if pool.cost is None else money(pool.cost) + ("" if pool.steps is not None else " a step")
    return [
        name,
        pool.nodes_are,
        idle,
        words_in_full(pool.plan, planned.choice.request),
        f"{count} node{'s' if count > 1 else ''} x {per_node}",
        seconds(pool.step_time_s or 0.0),
        "" if pool.time_s is None else duration(pool.time_s),
        _limit(pool),
        cost,
        "; ".join([*remarks, *pool.notes]),
    ]


def _limit(pool: "PoolPlan") -> str:
    return "" if pool.time_limit_s is None else duration(pool.time_limit_s)


def run_there(pool: "PoolPlan", options: "PlanOptions") -> str:
    """Return the command that trains a script by the best plan for a pool, quoted for a shell."""
    equal = len(set(pool.nproc)) == 1
    words = ["tutti", "run", "--on", str(options.on), "--nnodes", str(len(pool.nproc))]
    words += ["--nproc", str(pool.nproc[0]) if equal else ",".join(map(str, pool.nproc))]
    named = {part.partition("=")[0] for text in options.requests for part in text.split(",")}
    requests = [pool.request] if pool.request and pool.request.partition("=")[0] not in named else []
    requests += [f"gpus={max(pool.nproc)}"] if pool.gpus and "gpus" not in named and options.on != "ssh" else []
    requests += options.requests
    words += [word for text in requests for word in ("--request", text)]
    words += [] if options.hosts is None else ["--hosts", options.hosts]
    is_script = bool(options.target) and Path(options.target[0]).is_file()
    words += ["--plan", str(options.output or "plan.json"), *(options.target if is_script else ("SCRIPT",))]
    return shlex.join(words)
