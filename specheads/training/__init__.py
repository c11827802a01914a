"""Training of draft heads."""

from .batch import TrainingBatch, count_trained
from .laws import Sampling
from .losses import LOSSES, Objective
from .metrics import Deployment, Evaluation, TrainingSums
from .step import DraftTraining, StepOutput, TrainingSettings
from .teacher import Teacher
from .weights import DepthWeights

__all__ = [
    "LOSSES",
    "Deployment",
    "DepthWeights",
    "DraftTraining",
    "Evaluation",
    "Objective",
    "Sampling",
    "StepOutput",
    "Teacher",
    "TrainingBatch",
    "TrainingSettings",
    "TrainingSums",
    "count_trained",
]
