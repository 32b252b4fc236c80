"""Which runs are of one recipe: a digest of everything that determines the result, except the seed."""

import hashlib
import json
from pathlib import PurePath
from typing import Any

from tutti.config import serialization
from tutti.config.run_folder import RunHeader
from tutti.reporting.run_records import Records


def config_sha256(records: Records) -> str:
    """Return a digest of everything that determines the result, except the seed.

    Runs of one recipe have the same digest on any number of ranks. The number of microbatches counts only for a model
    that normalises over the batch, because it changes no other result.
    """
    header, model = records.header, records.model
    recipe = serialization.to_data(header.recipe)
    del recipe["seed"]
    if not (model and model.batch_statistics):
        del recipe["num_microbatches"]
    return _digest(header, recipe)


_NOT_TUNED = ("seed", "global_batch_size", "num_microbatches", "batch_ramp", "precision", "compress", "last_batch")


def tuned_sha256(header: RunHeader) -> str:
    """Return a digest of what tuning changes: as `config_sha256`, without the batch and how numbers are stored.

    Runs with larger batches or in another precision are scaling experiments, unless arguments differ, too.
    """
    recipe = serialization.to_data(header.recipe)
    return _digest(header, {name: value for name, value in recipe.items() if name not in _NOT_TUNED})


def _digest(header: RunHeader, recipe: dict[str, Any]) -> str:
    settings = {
        "script": PurePath(header.script).name,
        "arguments": _without_seed(header.arguments),
        "recipe": recipe,
        "model": header.model,
        "parameters": header.parameters,
        "data": header.data.sha256,
    }
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_seed(arguments: tuple[str, ...]) -> list[str]:
    """Return the script arguments without `--seed` and its value."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--seed" and not argument.startswith("--seed="):
            remaining.append(argument)
        skip = argument == "--seed"
    return remaining
