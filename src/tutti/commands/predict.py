"""`tutti.predict`: the cost of one plan, for a described model or a script, on a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tutti.commands.capture import SCRIPT_TIMEOUT_S, capture_script, process_restored
from tutti.commands.inputs import cluster_for, named_model, write_spec
from tutti.commands.messages import messages, status
from tutti.commands.planning import costed, model_spec_of, warn_if_changed
from tutti.commands.values import StrPath, path_of, path_or, seconds_above_0, texts_of
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.errors import ScriptError


def predict(
    plan: StrPath | Plan,
    script: StrPath | None = None,
    arguments: Sequence[object] = (),
    *,
    model: StrPath | ModelSpec | None = None,
    cluster: StrPath | ClusterSpec | None = None,
    output: StrPath | None = None,
    timeout: float = SCRIPT_TIMEOUT_S,
    verbose: bool = False,
) -> Prediction:
    """Predict the step time and memory of a plan. With `cluster` no hardware is needed.

    Args:
        plan: a Plan, or a file of one.
        script: the script, or a model by name; a script runs up to `job.prepare` in this process.
        arguments: the script's own arguments, or the named model's sizes.
        model: a ModelSpec, or a file of one, instead of a script.
        cluster: a ClusterSpec, a file of one, or one line; this machine, measured, if None.
        output: also write the Prediction to this file.
        timeout: seconds that the script may take to get as far as `job.prepare`.
        verbose: show on standard error what is being done, and what the script prints.

    Raises:
        TuttiError: what `tutti predict` would refuse, with the same sentence.
    """
    target = (str(script), *texts_of(arguments)) if script is not None else ()
    limit_s = seconds_above_0("timeout", timeout)
    with messages(shown=verbose), process_restored(path_of("script", script)):
        made = predicted(
            path_or("plan", Plan, plan),
            target,
            path_or("model", ModelSpec, model),
            path_or("cluster", ClusterSpec, cluster),
            path_of("output", output),
            limit_s,
        )
        return made.prediction


class Predicted(NamedTuple):
    """A prediction, and what it is for."""

    plan: Plan
    model: ModelSpec
    cluster: ClusterSpec
    prediction: Prediction


def predicted(
    plan: Path | Plan | None,
    target: tuple[str, ...],
    model: Path | ModelSpec | None,
    cluster: Path | ClusterSpec | None,
    output: Path | None,
    timeout_s: float,
) -> Predicted:
    """Predict a plan for a model or a script, and write the Prediction if a file is named.

    Args:
        plan: the plan, or its file.
        target: the script or named model, with its arguments.
        model: the model, or its file, instead of a target.
        cluster: the machines, or their file; None for this one.
        output: the file to write.
        timeout_s: seconds that the script may take.
    """
    from tutti.cost_model import predict as predict_plan

    if plan is None:
        raise ScriptError("no plan was named; give a Plan, or the file of one (tutti plan --output)")
    intended = plan if isinstance(plan, Plan) else serialization.load(Plan, plan)
    described = _model(model, target, intended, timeout_s)
    warn_if_changed(intended, described)
    machines = cluster_for(cluster)
    prediction = predict_plan(described, machines, intended)
    if output is not None:
        write_spec(prediction, output)
    return Predicted(intended, described, machines, prediction)


def _model(given: Path | ModelSpec | None, target: tuple[str, ...], intended: Plan, timeout_s: float) -> ModelSpec:
    """Return the model to cost; a script's model is described for the layout of the plan `intended`."""
    if (given is not None) == bool(target):
        raise ScriptError("name one model: --model FILE before the plan, or a script after it")
    if given is not None:
        return costed(given if isinstance(given, ModelSpec) else serialization.load(ModelSpec, given))
    named = named_model(target)
    if named is not None:
        return named
    script = Path(target[0])
    with status("tracing the model on shapes"):
        captured = capture_script(script, target[1:], timeout_s=timeout_s)
        captured = replace(captured, plan=replace(captured.plan, layout=intended.layout))
        return costed(model_spec_of(captured, name=script.stem))
