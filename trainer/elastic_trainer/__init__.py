"""The library for training scripts: session, commit protocol, drain, and position in the data.

It runs inside the training pods and imports `reshard`, but never the operator.
"""

from elastic_trainer.batch import BatchPlan, shuffled
from elastic_trainer.errors import ConfigurationError, FencedError, TrainerError
from elastic_trainer.session import Action, Position, Session

__all__ = [
    "Action",
    "BatchPlan",
    "ConfigurationError",
    "FencedError",
    "Position",
    "Session",
    "TrainerError",
    "shuffled",
]
