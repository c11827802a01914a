"""Writing files so that a reader, or a crash, never meets half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def written_together(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary folder whose files move into `folder` when the block has ended well.

    Args:
        folder: Where the files belong; made if it is not there.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".writing-") as name:
        temporary = Path(name)
        yield temporary
        for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
            place = target / file.relative_to(temporary)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file; its weights may share memory, the file's do not."""
    file.parent.mkdir(parents=True, exist_ok=True)
    own = {name: weight.detach().clone(memory_format=torch.contiguous_format).cpu() for name, weight in weights.items()}
    save_file(own, str(file), metadata={"format": "pt"})
