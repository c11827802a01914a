"""Exact speculative decoding for Hugging Face models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SpeculativeConfig
    from .drafters import load_drafter
    from .formats import export_head, import_head
    from .heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads
    from .mixin import SpeculativeGenerationMixin, disable, enable
    from .packing import pack_for_cpu
    from .stats import SpeculationStats

__version__ = "0.1.0"

# Loaded on first use: importing the package costs next to nothing.
_HOMES = {
    "EagleConfig": "heads",
    "EagleHead": "heads",
    "MedusaConfig": "heads",
    "MedusaHeads": "heads",
    "SpeculationStats": "stats",
    "SpeculativeConfig": "config",
    "SpeculativeGenerationMixin": "mixin",
    "disable": "mixin",
    "enable": "mixin",
    "export_head": "formats",
    "import_head": "formats",
    "load_drafter": "drafters",
    "pack_for_cpu": "packing",
}

__all__ = [
    "EagleConfig",
    "EagleHead",
    "MedusaConfig",
    "MedusaHeads",
    "SpeculationStats",
    "SpeculativeConfig",
    "SpeculativeGenerationMixin",
    "__version__",
    "disable",
    "enable",
    "export_head",
    "import_head",
    "load_drafter",
    "pack_for_cpu",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
