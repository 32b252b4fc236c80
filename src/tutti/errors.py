"""Every error tutti raises on purpose.

Each message names what is wrong, where (file, field, module, rank), and ends with the remedy. The command
line prints the message without a traceback and exits with `exit_code`.
"""

import re
import sys
import types


class TuttiError(Exception):
    """Base of all errors tutti raises on purpose.

    Attributes:
        exit_code: the command's exit code: 2 for a mistake in the user's input, 1 for a failure during a run.
    """

    exit_code = 2

    def __init__(self, message: object = "", *others: object) -> None:
        super().__init__(_LONG_WORD.sub(_shortened, message) if isinstance(message, str) else message, *others)


RESUMABLE = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a rank that stopped with a checkpoint, and of a run of such ranks."""

_LONG_WORD = re.compile(r"\S{250,}")
"""What no name, path or number that a person gave on purpose is like."""


def _shortened(word: re.Match[str]) -> str:
    return f"{word.group()[:80]}... ({len(word.group()):,} characters)"


class SpecError(TuttiError, ValueError):
    """A file or value does not have the form that its kind requires; the message names the offending field."""


class PlanError(TuttiError, ValueError):
    """A plan cannot be carried out: degrees, layout or batch do not fit the model or the cluster.

    Attributes:
        code: name of the refusal in `tutti.config.refusals`, or the place that refuses, such as
            "parallel.pipeline.stage_building.cut_stages". docs/refusals.md lists both.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or _place(sys._getframe(1))


class ScriptError(TuttiError):
    """The user's script cannot be used: it has no Job, never calls prepare, or calls it with unusable arguments."""


class DataError(TuttiError):
    """The data cannot be divided among ranks as asked: empty, not divisible, or in unknown order."""


class LaunchError(TuttiError):
    """Ranks could not be started or find each other: port in use, host unreachable, contradictory environment."""


class LabError(TuttiError):
    """A network lab cannot be created or used here: no root, tools or namespaces, or no lab of that name."""


class RankMismatchError(TuttiError):
    """Ranks that must agree do not: parameters, plans or data differ between ranks."""


class TrainingError(TuttiError):
    """A run failed while training: a loss that is not finite, or a rank that failed."""

    exit_code = 1


class CheckpointError(TuttiError):
    """A checkpoint could not be written or read; earlier checkpoints stay complete."""

    exit_code = 1


class NoCheckpointError(CheckpointError):
    """What the user named holds no checkpoint."""

    exit_code = 2


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was saved: a part of it is damaged, truncated, missing, or of another checkpoint.

    Attributes:
        finding: what is wrong with which file, without the remedy.
    """

    exit_code = 2

    def __init__(self, message: str, finding: str = "") -> None:
        super().__init__(message)
        self.finding = finding or message


class EventRecordError(TuttiError):
    """A file is no flight record, or is damaged."""

    exit_code = 2


class StoreError(CheckpointError):
    """An object store of checkpoints cannot be opened, read or written."""

    exit_code = 2


class ReportError(TuttiError):
    """A run folder cannot be reported on, or a comparison is refused because it would mislead."""


def _place(frame: types.FrameType) -> str:
    """Return the frame's module within tutti and its function, as "module.function"."""
    module = str(frame.f_globals.get("__name__", ""))
    return f"{module.removeprefix('tutti.')}.{frame.f_code.co_name}"


__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "DataError",
    "EventRecordError",
    "LabError",
    "LaunchError",
    "NoCheckpointError",
    "PlanError",
    "RankMismatchError",
    "ReportError",
    "ScriptError",
    "SpecError",
    "StoreError",
    "TrainingError",
    "TuttiError",
]
