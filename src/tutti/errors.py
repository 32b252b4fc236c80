"""Every error tutti raises on purpose.

Each message names what is wrong, where (file, field, module, rank), and ends with the remedy. The command
line prints the message without a traceback and exits with `exit_code`.
"""

import sys
import types


class TuttiError(Exception):
    """Base of all errors tutti raises on purpose. `exit_code`: 2 user's input, 1 what happened in a run."""

    exit_code = 2


class SpecError(TuttiError, ValueError):
    """A file or value does not have the form its kind requires; names the path of the offending field."""


class PlanError(TuttiError, ValueError):
    """A plan that cannot be carried out: degrees, layout or batch do not fit the model or the cluster.

    Attributes:
        code: name of the refusal in `tutti.config.refusals`, or the place that refuses, such as
            "parallel.pipeline.stage_building.cut_stages". docs/refusals.md lists both.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or _place(sys._getframe(1))


class ScriptError(TuttiError):
    """The user's script cannot be used: no Job in it, no prepare, or prepare called with unusable arguments."""


class DataError(TuttiError):
    """The data cannot be shared among ranks as asked: empty, unsplittable, or of unknown order."""


class LaunchError(TuttiError):
    """Ranks could not be started or could not meet: port in use, host unreachable, environment contradictory."""


class LabError(TuttiError):
    """A laboratory of hosts cannot be made or used here: no root, tools or namespaces, or no lab of that name."""


class RankMismatchError(TuttiError):
    """Ranks that must agree do not: different parameters, plans or data on different ranks."""


class TrainingError(TuttiError):
    """A run went wrong while training: a loss that is not finite, a rank that failed."""

    exit_code = 1


class CheckpointError(TuttiError):
    """A checkpoint could not be written or read; earlier checkpoints are whole."""

    exit_code = 1


class ReportError(TuttiError):
    """A run folder cannot be reported on, or a comparison would mislead and is refused."""


def _place(frame: types.FrameType) -> str:
    """Module within tutti and function of a frame."""
    module = str(frame.f_globals.get("__name__", ""))
    return f"{module.removeprefix('tutti.')}.{frame.f_code.co_name}"


__all__ = [
    "CheckpointError",
    "DataError",
    "LabError",
    "LaunchError",
    "PlanError",
    "RankMismatchError",
    "ReportError",
    "ScriptError",
    "SpecError",
    "TrainingError",
    "TuttiError",
]
