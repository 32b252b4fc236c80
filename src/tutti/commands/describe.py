"""`tutti.describe`: the costs of a script's model, module by module, from shapes alone."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.commands.capture import SCRIPT_TIMEOUT_S, capture_script, process_restored
from tutti.commands.inputs import named_model, write_spec
from tutti.commands.messages import messages, status
from tutti.commands.values import needed_path, path_of, seconds_above_0, texts_of
from tutti.config.model import ModelSpec
from tutti.errors import DataError

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript


def describe(
    script: str | PathLike[str],
    arguments: Sequence[str] = (),
    *,
    output: str | PathLike[str] | None = None,
    timeout: float = SCRIPT_TIMEOUT_S,
    verbose: bool = False,
) -> ModelSpec:
    """Return what the model of a script costs for one sample: parameters, FLOPs and bytes, by module.

    The script runs up to `job.prepare` in this process; the model is not run and takes no memory.

    Args:
        script: the script, or a model by name, such as "llama3-70b".
        arguments: the script's own arguments, or the named model's sizes, such as ["--layers", "80"].
        output: also write the ModelSpec to this file.
        timeout: seconds that the script may take to get as far as `job.prepare`.
        verbose: show on standard error what is being done, and what the script prints.

    Raises:
        TuttiError: what `tutti describe` would refuse, with the same sentence.

    Examples:
        >>> describe("llama3-8b").name
        'llama3-8b'
    """
    target, limit_s = (str(script), *texts_of(arguments)), seconds_above_0("timeout", timeout)
    with messages(shown=verbose), process_restored(needed_path("script", script)):
        return describe_target(target, path_of("output", output), limit_s)


def describe_target(target: tuple[str, ...], output: Path | None, timeout_s: float) -> ModelSpec:
    """Describe a model by name, or the one of a script, and write the ModelSpec if a file is named.

    Args:
        target: the script or the name, and its arguments.
        output: the file to write.
        timeout_s: seconds that the script may take.
    """
    model = named_model(target)
    if model is None:
        with status("tracing the model on shapes"):
            model = describe_script(Path(target[0]), target[1:], timeout_s)
    if output is not None:
        write_spec(model, output)
    return model


def describe_script(script: Path, arguments: tuple[str, ...], timeout_s: float = SCRIPT_TIMEOUT_S) -> ModelSpec:
    """Run a script up to `Job.prepare` and describe its model; the spec is named after the script."""
    return describe_captured(capture_script(script, arguments, timeout_s=timeout_s), name=script.stem)


def describe_captured(captured: "CapturedScript", *, name: str) -> ModelSpec:
    """Return the ModelSpec of what a script gave to `prepare`.

    Args:
        captured: what the script gave to `prepare`.
        name: the spec's name.

    Raises:
        DataError: the data set is empty, or its samples cannot be made into a batch.
    """
    from tutti.parallel.capabilities import with_capabilities
    from tutti.profile import describe_model
    from tutti.trainer.capture import TRACED_SAMPLES

    known = captured.dataset_samples
    count = TRACED_SAMPLES if known is None else min(TRACED_SAMPLES, known)
    if count < 1:
        raise DataError(f"{name}: the data set has 0 samples; give prepare a data set with at least one")
    losses = [function for function, _ in captured.losses]
    if losses:
        batches = tuple(batch for _, batch in captured.losses)
        args, kwargs, target = batches, dict[str, Any](), None
    else:
        args, kwargs, target = samples_of(captured, count, name)
    described = describe_model(
        captured.model,
        args,
        kwargs,
        target,
        captured.loss,
        captured.optimizers,
        samples=count,
        name=name,
        tokens_per_sample=captured.tokens_per_sample,
        dataset_samples=captured.dataset_samples,
        losses=losses,
        autocast=_autocast_dtype(captured),
    )
    capable = with_capabilities(described, captured.model, () if kwargs or losses else args, captured.plan.layout)
    model = replace(capable, loading=captured.loading(), script_nbytes=captured.script_nbytes, own_losses=len(losses))
    return _with_failure(model, captured.failed)


def _autocast_dtype(captured: "CapturedScript") -> Any:
    """Return the 16-bit precision of the script's job, in which its memory is traced too."""
    import torch

    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return low.get(captured.plan.precision)


def samples_of(captured: "CapturedScript", count: int, name: str) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the first samples as a batch.

    Raises:
        DataError: the script's data set, collate function or `unpack` fails.
    """
    try:
        return captured.samples(count)
    except Exception as error:  # the script's code
        raise DataError(
            f"{name}: the first {count} samples cannot be made into a batch ({type(error).__name__}: {error}); "
            "fix the data set, its collate function or `unpack`"
        ) from error


def _with_failure(model: ModelSpec, failed: str) -> ModelSpec:
    """Return `model` with why the script did not complete its first step."""
    if not failed:
        return model
    counted = "only its losses before that count" if model.own_losses else "the loss given to prepare counts"
    words = f"the script's first step, in which nothing is computed, failed ({failed}): {counted}"
    untraced = f"{model.untraced} ({words})" if model.untraced else ""
    return replace(model, notes=(*model.notes, words), untraced=untraced)
