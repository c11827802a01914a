"""Where a result comes from: command, versions, machine settings."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("specheads", "torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "trl")


def run_provenance() -> dict[str, Any]:
    """What one needs to run the same again: command, date, versions."""
    return {
        "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def provenance(model: Any) -> dict[str, Any]:
    """What one needs to measure the same again.

    Args:
        model: The target that was measured.
    """
    import torch

    return {
        **run_provenance(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "device": str(model.device),
        "device_name": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor(),
        "dtype": str(model.dtype),
        "attention": model.config._attn_implementation,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
