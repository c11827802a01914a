"""Training draft heads, and making the data for it. Needs the extra `train`."""

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
