"""tutti trains a PyTorch model on the machines you have.

The names below are the public ones. Each is loaded when it is first used, so that `import tutti` is fast and does not
load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.config.cluster import ClusterSpec
    from tutti.config.model import ModelSpec
    from tutti.config.plan import Plan
    from tutti.config.prediction import Prediction
    from tutti.config.run_report import RunReport
    from tutti.errors import TuttiError
    from tutti.nn.annotations import replicate, shard, split, stage, synchronized
    from tutti.optim.learning_rate import LRRule
    from tutti.parallel.losses import Weighted
    from tutti.trainer.callbacks import Callback, EarlyStopping
    from tutti.trainer.job import Job
    from tutti.trainer.loggers import CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger

_HOMES = {
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
    "TensorBoardLogger": "tutti.trainer.loggers",
    "TuttiError": "tutti.errors",
    "WandbLogger": "tutti.trainer.loggers",
    "Weighted": "tutti.parallel.losses",
    "replicate": "tutti.nn.annotations",
    "shard": "tutti.nn.annotations",
    "split": "tutti.nn.annotations",
    "stage": "tutti.nn.annotations",
    "synchronized": "tutti.nn.annotations",
}

__version__ = "0.1.0"
__all__ = [
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
    "TensorBoardLogger",
    "TuttiError",
    "WandbLogger",
    "Weighted",
    "replicate",
    "shard",
    "split",
    "stage",
    "synchronized",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
