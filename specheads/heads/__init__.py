"""Draft heads, real models of the transformers ecosystem: one file per architecture, config and module."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from .base import ConfidenceHead, DraftHead, HeadConfig
from .card import make_card, write_card
from .eagle import EagleHead, EagleOutput
from .eagle_config import EagleConfig
from .facts import HeadFacts
from .medusa import MedusaConfig, MedusaHeads, MedusaOutput
from .results import MeasuredResults, TaskResult, TrainingRecord, load_records

__all__ = [
    "ConfidenceHead",
    "DraftHead",
    "EagleConfig",
    "EagleHead",
    "EagleOutput",
    "HeadConfig",
    "HeadFacts",
    "MeasuredResults",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaOutput",
    "TaskResult",
    "TrainingRecord",
    "load_records",
    "make_card",
    "write_card",
]

for _config, _model in ((EagleConfig, EagleHead), (MedusaConfig, MedusaHeads)):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
