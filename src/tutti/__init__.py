"""tutti trains a PyTorch model on the machines you have.

The names below are the public ones. Each is loaded when it is first used, so that `import tutti` is fast and does not
load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tutti.config.version import VERSION

if TYPE_CHECKING:
    from tutti.commands.calibrate import calibrate
    from tutti.commands.describe import describe
    from tutti.commands.doctor import doctor
    from tutti.commands.explain import explain
    from tutti.commands.export import export
    from tutti.commands.notebook import notebook
    from tutti.commands.plan import plan
    from tutti.commands.predict import predict
    from tutti.commands.probe import probe
    from tutti.commands.report import report
    from tutti.commands.run import run
    from tutti.commands.submission import submit
    from tutti.commands.submitted_job import SubmittedJob, attach
    from tutti.commands.validate import validate
    from tutti.commands.verify import verify
    from tutti.commands.why import why
    from tutti.config.cluster import ClusterSpec
    from tutti.config.model import ModelSpec
    from tutti.config.plan import Plan
    from tutti.config.prediction import Prediction
    from tutti.config.run_report import RunReport
    from tutti.errors import TuttiError
    from tutti.nn.annotations import replicate, shard, split, stage, synchronized
    from tutti.optim.learning_rate import LRRule
    from tutti.parallel.losses import Weighted
    from tutti.trainer.averaged_weights import AveragedWeights
    from tutti.trainer.callbacks import Callback, EarlyStopping
    from tutti.trainer.job import Job
    from tutti.trainer.loggers import CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger

_HOMES = {
    "AveragedWeights": "tutti.trainer.averaged_weights",
    "CSVLogger": "tutti.trainer.loggers",
    "Callback": "tutti.trainer.callbacks",
    "ClusterSpec": "tutti.config.cluster",
    "EarlyStopping": "tutti.trainer.callbacks",
    "Job": "tutti.trainer.job",
    "LRRule": "tutti.optim.learning_rate",
    "Logger": "tutti.trainer.loggers",
    "MLflowLogger": "tutti.trainer.loggers",
    "ModelSpec": "tutti.config.model",
    "Plan": "tutti.config.plan",
    "Prediction": "tutti.config.prediction",
    "RunReport": "tutti.config.run_report",
    "SubmittedJob": "tutti.commands.submitted_job",
    "TensorBoardLogger": "tutti.trainer.loggers",
    "TuttiError": "tutti.errors",
    "WandbLogger": "tutti.trainer.loggers",
    "Weighted": "tutti.parallel.losses",
    "attach": "tutti.commands.submitted_job",
    "calibrate": "tutti.commands.calibrate",
    "describe": "tutti.commands.describe",
    "doctor": "tutti.commands.doctor",
    "explain": "tutti.commands.explain",
    "export": "tutti.commands.export",
    "notebook": "tutti.commands.notebook",
    "plan": "tutti.commands.plan",
    "predict": "tutti.commands.predict",
    "probe": "tutti.commands.probe",
    "replicate": "tutti.nn.annotations",
    "report": "tutti.commands.report",
    "run": "tutti.commands.run",
    "shard": "tutti.nn.annotations",
    "split": "tutti.nn.annotations",
    "stage": "tutti.nn.annotations",
    "submit": "tutti.commands.submission",
    "synchronized": "tutti.nn.annotations",
    "validate": "tutti.commands.validate",
    "verify": "tutti.commands.verify",
    "why": "tutti.commands.why",
}

__version__ = VERSION
__all__ = [
    "AveragedWeights",
    "CSVLogger",
    "Callback",
    "ClusterSpec",
    "EarlyStopping",
    "Job",
    "LRRule",
    "Logger",
    "MLflowLogger",
    "ModelSpec",
    "Plan",
    "Prediction",
    "RunReport",
    "SubmittedJob",
    "TensorBoardLogger",
    "TuttiError",
    "WandbLogger",
    "Weighted",
    "attach",
    "calibrate",
    "describe",
    "doctor",
    "explain",
    "export",
    "notebook",
    "plan",
    "predict",
    "probe",
    "replicate",
    "report",
    "run",
    "shard",
    "split",
    "stage",
    "submit",
    "synchronized",
    "validate",
    "verify",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
