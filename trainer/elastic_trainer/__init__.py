"""Inside the training pods: session, commit protocol, drain, data position."""

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
