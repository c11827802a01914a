"""`specheads env`: what a bug report needs to say."""

from __future__ import annotations

from typing import Any

import typer

from . import options


def env(as_json: options.AsJson = False) -> None:
    """Show versions, devices and folders, for bug reports."""
    found = environment()
    if as_json:
        import json

        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        shown = value if not isinstance(value, dict) else ", ".join(f"{part} {number}" for part, number in value.items())
        typer.echo(f"{name.replace('_', ' '):16} {shown}")


def environment() -> dict[str, Any]:
    """What is installed here, and what the machine has."""
    import os
    import platform

    import torch
    from huggingface_hub import constants

    from ..evaluation.provenance import run_provenance
    from ..evaluation.smollm2 import cache_folder

    made = run_provenance()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "python": made["python"],
        "platform": made["platform"],
        "versions": {name: version or "missing" for name, version in made["versions"].items()},
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpus": ", ".join(gpus) or "none",
        "cuda": torch.version.cuda or "none",
        "packed_weights": "supported" if torch.backends.mkldnn.is_available() else "not supported by this torch",
        "hub_cache": constants.HF_HUB_CACHE,
        "own_cache": str(cache_folder()),
        "offline": constants.HF_HUB_OFFLINE,
    }
